"""Authorization: the claims in the table of calls (`wire.calls`) and how they are checked against certificates.

A caller's identity comes from its certificate, as verified by gRPC's TLS layer, and never from a message or metadata.
If a request also names the process on whose behalf it is made, the two must agree. Without TLS callers are anonymous
and may make every call; servers listen without TLS on loopback, or where `--insecure` is given.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Any, cast

import grpc

from hetpipe.errors import PermissionDenied, ProtocolViolation, Unauthenticated, UserError
from hetpipe.values.identity import NamedPeer, Peer, Role, identity_from_uri
from hetpipe.values.members import MemberRole
from hetpipe.wire.call import Claim, Rule
from hetpipe.wire.codec import from_bytes

#: Certificates whose names are remembered as they were read.
_MAX_KNOWN_NAMES = 4_096

#: Prefix of a shard's name in its member id.
_SHARD_PREFIX = "parameter-server-"


def anybody(_request: Any) -> None:
    """Check the role only."""


def owner(_request: Any) -> None:
    """Ownership is checked by the handler: the owner of a member, the shards of a job."""


def agent(request: Any) -> Peer | None:
    """Allow an agent to call in its own name."""
    return _named(Role.AGENT, request.agent_id)


def agent_member(request: Any) -> Peer | None:
    """Allow an agent to act on its own membership."""
    return _named(Role.AGENT, request.member_id)


def shard_member(request: Any) -> Peer | None:
    """Allow a parameter server to act on its own membership."""
    return _named(Role.PARAMETER_SERVER, request.member_id.removeprefix(_SHARD_PREFIX))


def new_agent(request: Any) -> Peer | None:
    """Allow an agent to register itself only."""
    return _new_member(request, MemberRole.AGENT, Role.AGENT)


def new_shard(request: Any) -> Peer | None:
    """Allow a parameter server to register itself only."""
    return _new_member(request, MemberRole.PARAMETER_SERVER, Role.PARAMETER_SERVER)


def new_worker(request: Any) -> Peer | None:
    """Allow an operator to register a worker process of its own."""
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
    """Allow a stage to call in its own name."""
    peer: Peer = request.requester.peer
    return peer


def header(kind: type) -> Claim:
    """Check a transfer by a stage: its first message is a header, the others are raw bytes."""

    def claim(message: bytes) -> Peer | None:
        try:
            return stage(from_bytes(kind, message))
        except ProtocolViolation:
            return None  # the handler rejects an unreadable header

    return claim


def follower(request: Any) -> Peer | None:
    """Allow a stage to follow the log of its own job."""
    if request.requester is None or request.requester.job_id != request.job_id:
        raise PermissionDenied("a stage follows the log of its own job and must name itself in the request")
    return stage(request)


def following_shard(request: Any) -> Peer | None:
    """Allow a parameter server to follow a log; the clock shard checks whether it serves the job."""
    _check_no_stage(request, "parameter server")
    return None


def following_agent(request: Any) -> Peer | None:
    """Allow an agent to follow a log for all its stages; the clock shard checks whether it has devices of the job."""
    _check_no_stage(request, "agent")
    return None


def _check_no_stage(request: Any, who: str) -> None:
    if request.requester is not None:
        raise PermissionDenied(f"the certificate of a {who} may not follow the log on behalf of one stage")


def _named(role: Role, name: str) -> NamedPeer:
    try:
        return NamedPeer(role, name)
    except UserError as error:
        raise PermissionDenied(str(error)) from error


def peer_of(context: grpc.ServicerContext) -> Peer:
    """The caller's identity from its certificate.

    Raises:
        Unauthenticated: the certificate names no process of hetpipe, or more than one.
    """
    # The stubs declare the values as bytes; they are sequences of bytes.
    names: Iterable[bytes] = cast("Any", context.auth_context() or {}).get("x509_subject_alternative_name", ())
    peers = _peers(tuple(names))
    if len(peers) != 1:
        raise Unauthenticated(
            "the certificate names no process of hetpipe (a URI like spiffe://hetpipe/agent/NAME); make one with "
            "`hetpipe certs issue`"
        )
    return peers[0]


@lru_cache(maxsize=_MAX_KNOWN_NAMES)
def _peers(names: tuple[bytes, ...]) -> tuple[Peer, ...]:
    """The processes of hetpipe that a certificate names."""
    found = (identity_from_uri(name.decode("utf-8", "replace")) for name in names)
    return tuple(peer for peer in found if peer)


def caller_of(context: grpc.ServicerContext) -> Peer | None:
    """The caller's identity from its certificate; None without TLS, where callers are anonymous."""
    with suppress(Unauthenticated):
        return peer_of(context)
    return None


def check_role(call: str, peer: Peer, access: Mapping[str, Rule]) -> Claim:
    """The claim that requests of `peer` must match.

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
    """Check that a request is made in the caller's own name.

    Raises:
        PermissionDenied: it is made in another process's name.
    """
    claimed = claim(request)
    if claimed is not None and claimed != peer:
        raise PermissionDenied(f"{peer} may not call {call} as {claimed}")
