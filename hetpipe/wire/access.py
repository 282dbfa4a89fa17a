"""Who may call what: one table for all services. What it does not name is denied.

A caller is who its certificate says, as gRPC's TLS layer has verified it; never who a message or metadata says. Where a
request also says in whose name it is made, the two must agree. Without TLS nobody is known, and everybody may call;
servers listen like that on loopback, or where `--insecure` is spelled out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, cast

import grpc
from google.protobuf.message import DecodeError

from hetpipe.errors import PermissionDenied, Unauthenticated, UserError
from hetpipe.proto.v1 import coordinator_pb2, parameter_server_pb2
from hetpipe.values.identity import NamedPeer, Peer, Role, StagePeer, identity_from_uri
from hetpipe.values.ids import Incarnation, JobId, StageIndex, Term, VirtualWorkerIndex
from hetpipe.wire import coordinator_methods, shard_methods

#: Says in whose name a request is made. `None`: it does not say.
Claim = Callable[[Any], Peer | None]

#: Roles that may make a call, each with the claim that must be its own.
Rule = Mapping[Role, Claim]

#: Of members, in front of a shard's name in its member id.
_SHARD_PREFIX = "parameter-server-"


def _nobody(_request: Any) -> None:
    """The role is enough."""


def _owner(_request: Any) -> None:
    """Whose it is, the handler knows: the owner of a member, the shards of a job."""


def _agent(request: Any) -> Peer | None:
    return _named(Role.AGENT, request.agent_id)


def _agent_member(request: Any) -> Peer | None:
    return _named(Role.AGENT, request.member_id)


def _shard_member(request: Any) -> Peer | None:
    return _named(Role.PARAMETER_SERVER, request.member_id.removeprefix(_SHARD_PREFIX))


def _new_agent(request: Any) -> Peer | None:
    return _new_member(request, coordinator_pb2.MEMBER_ROLE_AGENT, Role.AGENT)


def _new_shard(request: Any) -> Peer | None:
    return _new_member(request, coordinator_pb2.MEMBER_ROLE_PARAMETER_SERVER, Role.PARAMETER_SERVER)


def _new_worker(request: Any) -> Peer | None:
    if request.member.role == coordinator_pb2.MEMBER_ROLE_WORKER:
        return None
    raise PermissionDenied("an operator may register no member but its own worker")


def _new_member(request: Any, wanted: int, role: Role) -> Peer | None:
    member = request.member
    if member.role != wanted:
        raise PermissionDenied(f"the certificate of a {role} registers a {role} and nothing else")
    claimed = _named(role, member.id.removeprefix(_SHARD_PREFIX if role is Role.PARAMETER_SERVER else ""))
    if member.id != claimed.member_id:
        raise PermissionDenied(f"{claimed} registers as {claimed.member_id}, and not as {member.id:.80}")
    if member.HasField("shard_index") and str(member.shard_index) != claimed.name:
        raise PermissionDenied(f"{claimed} may not be shard {member.shard_index}: its certificate says {claimed.name}")
    return claimed


def _stage(request: Any) -> Peer | None:
    who = request.requester
    life, term = Incarnation(who.incarnation), Term(who.term)
    return StagePeer(JobId(who.job_id), VirtualWorkerIndex(who.vw), StageIndex(who.stage), life, term)


def _header(kind: Any) -> Claim:
    """The claim of a stream whose first message is a serialized header."""

    def claim(message: bytes) -> Peer | None:
        try:
            return _stage(kind.FromString(message))
        except DecodeError:
            return None  # the handler refuses what it cannot read

    return claim


def _follower(request: Any) -> Peer | None:
    if not request.HasField("requester") or request.requester.job_id != request.job_id:
        raise PermissionDenied("a stage follows the log of its own job, and says which stage it is")
    return _stage(request)


def _following_shard(request: Any) -> Peer | None:
    """Of which job it is a parameter server is for the clock shard to say."""
    if request.HasField("requester"):
        raise PermissionDenied("a parameter server does not follow the log in the name of a stage")
    return None


def _named(role: Role, name: str) -> NamedPeer:
    try:
        return NamedPeer(role, name)
    except UserError as error:
        raise PermissionDenied(str(error)) from error


_LOOKS: Rule = dict.fromkeys((Role.OPERATOR, Role.MONITOR), _nobody)
_STAGE: Rule = {Role.STAGE: _stage}
_COORDINATOR: Rule = {Role.COORDINATOR: _nobody}
_EVERY_SERVICE: Rule = dict.fromkeys(
    (Role.COORDINATOR, Role.PARAMETER_SERVER, Role.AGENT, Role.OPERATOR, Role.MONITOR), _nobody
)

_COORDINATOR_CALLS: Mapping[str, Rule] = {
    "Register": {Role.AGENT: _new_agent, Role.PARAMETER_SERVER: _new_shard, Role.OPERATOR: _new_worker},
    "Heartbeat": {Role.AGENT: _agent_member, Role.PARAMETER_SERVER: _shard_member, Role.OPERATOR: _owner},
    "Leave": {Role.AGENT: _agent_member, Role.PARAMETER_SERVER: _shard_member, Role.OPERATOR: _owner},
    "WatchCommands": {Role.AGENT: _agent},
    "Report": {Role.AGENT: _agent},
    "CertifyStage": {Role.AGENT: _agent},
    "SubmitJob": {Role.OPERATOR: _nobody},
    "MeasureLinks": {Role.OPERATOR: _nobody},
    "StopJob": {Role.OPERATOR: _nobody},
    "DrainWorker": {Role.OPERATOR: _nobody},
    "AddWorker": {Role.OPERATOR: _nobody},
    "Depart": {Role.AGENT: _agent},
    "GetStatus": _LOOKS,
    "WatchJob": _LOOKS,
    "ListMembers": _LOOKS,
    "GetClocks": _LOOKS,
    "WatchClocks": _LOOKS,
}

_SHARD_CALLS: Mapping[str, Rule] = {
    "Configure": _COORDINATOR,
    "Release": _COORDINATOR,
    "RequestBarrier": _COORDINATOR,
    "Evict": _COORDINATOR,
    "Drain": _COORDINATOR,
    "Admit": _COORDINATOR,
    "KeepRun": _COORDINATOR,
    "DescribeRun": _COORDINATOR,
    "GetShardClocks": _COORDINATOR,
    "Join": _STAGE,
    "ReportInitialized": _STAGE,
    "ReportStaged": _STAGE,
    "HoldClock": _STAGE,
    "GetProgress": _STAGE,
    "ReportCheckpoint": _STAGE,
    "FollowLog": {Role.STAGE: _follower, Role.PARAMETER_SERVER: _following_shard},
    "Acknowledge": {Role.PARAMETER_SERVER: _owner},
    "ReportShardCheckpoint": {Role.PARAMETER_SERVER: _owner},
}

_TENSOR_CALLS: Mapping[str, Rule] = {
    "Push": {Role.STAGE: _header(parameter_server_pb2.PushHeader)},
    "Pull": {Role.STAGE: _header(parameter_server_pb2.PullHeader)},
    "PushBuffers": {Role.STAGE: _header(parameter_server_pb2.BuffersHeader)},
    "PullBuffers": {Role.STAGE: _header(parameter_server_pb2.BuffersHeader)},
}

_OWN_CALLS: Mapping[str, Mapping[str, Rule]] = {
    coordinator_methods.SERVICE: _COORDINATOR_CALLS,
    shard_methods.SERVICE: _SHARD_CALLS,
    shard_methods.TENSOR_SERVICE: _TENSOR_CALLS,
    "grpc.health.v1.Health": dict.fromkeys(("Check", "Watch"), _EVERY_SERVICE),
    "grpc.reflection.v1alpha.ServerReflection": {"ServerReflectionInfo": {Role.OPERATOR: _nobody}},
}

#: Full name of the call → who may make it.
ACCESS: Mapping[str, Rule] = {
    f"/{service}/{call}": rule for service, calls in _OWN_CALLS.items() for call, rule in calls.items()
}


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


def check_role(call: str, peer: Peer, access: Mapping[str, Rule] = ACCESS) -> Claim:
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
