"""Who calls, and in whose name: the claims that stand in the table of calls (`wire.calls`), and how they are judged.

A caller is who its certificate says, as gRPC's TLS layer has verified it; never who a message or metadata says. Where a
request also says in whose name it is made, the two must agree. Without TLS nobody is known, and everybody may call;
servers listen like that on loopback, or where `--insecure` is spelled out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, cast

import grpc

from hetpipe.errors import PermissionDenied, ProtocolViolation, Unauthenticated, UserError
from hetpipe.values.identity import NamedPeer, Peer, Role, identity_from_uri
from hetpipe.values.members import MemberRole
from hetpipe.wire.call import Claim, Rule
from hetpipe.wire.codec import from_bytes

#: Of members, in front of a shard's name in its member id.
_SHARD_PREFIX = "parameter-server-"


def anybody(_request: Any) -> None:
    """The role is enough."""


def owner(_request: Any) -> None:
    """Whose it is, the handler knows: the owner of a member, the shards of a job."""


def agent(request: Any) -> Peer | None:
    """An agent calls in its own name."""
    return _named(Role.AGENT, request.agent_id)


def agent_member(request: Any) -> Peer | None:
    """An agent speaks for its own membership."""
    return _named(Role.AGENT, request.member_id)


def shard_member(request: Any) -> Peer | None:
    """A parameter server speaks for its own membership."""
    return _named(Role.PARAMETER_SERVER, request.member_id.removeprefix(_SHARD_PREFIX))


def new_agent(request: Any) -> Peer | None:
    """An agent registers itself, and nobody else."""
    return _new_member(request, MemberRole.AGENT, Role.AGENT)


def new_shard(request: Any) -> Peer | None:
    """A parameter server registers itself, and nobody else."""
    return _new_member(request, MemberRole.PARAMETER_SERVER, Role.PARAMETER_SERVER)


def new_worker(request: Any) -> Peer | None:
    """An operator registers a worker of its own."""
    if request.member.role == MemberRole.WORKER:
        return None
    raise PermissionDenied("an operator may register no member but its own worker")


def _new_member(request: Any, wanted: MemberRole, role: Role) -> Peer | None:
    member = request.member
    if member.role != wanted:
        raise PermissionDenied(f"the certificate of a {role} registers a {role} and nothing else")
    claimed = _named(role, member.id.removeprefix(_SHARD_PREFIX if role is Role.PARAMETER_SERVER else ""))
    if member.id != claimed.member_id:
        raise PermissionDenied(f"{claimed} registers as {claimed.member_id}, and not as {member.id:.80}")
    if member.shard_index is not None and str(member.shard_index) != claimed.name:
        raise PermissionDenied(f"{claimed} may not be shard {member.shard_index}: its certificate says {claimed.name}")
    return claimed


def stage(request: Any) -> Peer | None:
    """A stage calls in its own name."""
    peer: Peer = request.requester.peer
    return peer


def header(kind: type) -> Claim:
    """The claim of a transfer by a stage, whose first message is a header and whose others are raw bytes."""

    def claim(message: bytes) -> Peer | None:
        try:
            return stage(from_bytes(kind, message))
        except ProtocolViolation:
            return None  # the handler refuses what it cannot read

    return claim


def follower(request: Any) -> Peer | None:
    """A stage follows the log of its own job."""
    if request.requester is None or request.requester.job_id != request.job_id:
        raise PermissionDenied("a stage follows the log of its own job, and says which stage it is")
    return stage(request)


def following_shard(request: Any) -> Peer | None:
    """Of which job it is a parameter server is for the clock shard to say."""
    if request.requester is not None:
        raise PermissionDenied("a parameter server does not follow the log in the name of a stage")
    return None


def _named(role: Role, name: str) -> NamedPeer:
    try:
        return NamedPeer(role, name)
    except UserError as error:
        raise PermissionDenied(str(error)) from error


def peer_of(context: grpc.ServicerContext) -> Peer:
    """Who calls, by its certificate.

    Raises:
        Unauthenticated: the certificate names no process of hetpipe, or more than one.
    """
    # The stubs say that the values are bytes; they are sequences of bytes.
    names: Iterable[bytes] = cast("Any", context.auth_context() or {}).get("x509_subject_alternative_name", ())
    peers = [peer for peer in (identity_from_uri(name.decode("utf-8", "replace")) for name in names) if peer]
    if len(peers) != 1:
        raise Unauthenticated(
            "the certificate names no process of hetpipe (a URI like spiffe://hetpipe/agent/NAME); make one with "
            "`hetpipe certs issue`"
        )
    return peers[0]


def caller_of(context: grpc.ServicerContext) -> Peer | None:
    """Who calls, by its certificate; None without TLS, where nobody is known."""
    with suppress(Unauthenticated):
        return peer_of(context)
    return None


def check_role(call: str, peer: Peer, access: Mapping[str, Rule]) -> Claim:
    """The claim that requests of `peer` must agree with.

    Raises:
        PermissionDenied: its role may not make this call.
    """
    rule = access.get(call, {})
    claim = rule.get(peer.role)
    if claim is None:
        allowed = ", ".join(rule) or "nobody"
        raise PermissionDenied(f"{peer} may not call {call}; it is for: {allowed}")
    return claim


def check_claim(call: str, peer: Peer, claim: Claim, request: Any) -> None:
    """Let nobody act in another's name.

    Raises:
        PermissionDenied: the request is made in another's name.
    """
    claimed = claim(request)
    if claimed is not None and claimed != peer:
        raise PermissionDenied(f"{peer} may not call {call} as {claimed}")
