"""What becomes of a request that names somebody or something else's: one entry per call, field and role.

`wire.calls` says who may make a call; this says of whom the call may speak. Every field of every request is here: as a
value that names nobody, or with what happens to a caller of each role that writes another's name, job, stage or index
into it. A test compares both with the descriptors, so that nobody forgets a new field, and tries every cell on running
servers; `docs/security.md` shows the table.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import fields
from enum import StrEnum
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from hetpipe.values.identity import Role
from hetpipe.values.shard_config import ShardConfig
from hetpipe.wire.calls import ACCESS, CALLS, COORDINATOR_SERVICE, SHARD_SERVICE, TENSOR_SERVICE
from hetpipe.wire.codec import message_type


class Outcome(StrEnum):
    """What happens to a request whose field names another's."""

    REFUSED = "refused"
    """It ends with an error, and nothing has happened."""
    NO_EFFECT = "no effect"
    """It may be taken, and changes nothing for whom it names."""
    TASK = "any"
    """To act on anybody's is what the role is for."""


#: The message of every call of ours, or the header that opens its stream.
REQUESTS: Mapping[str, Any] = {call.path: message_type(call.request) for call in CALLS}

#: Fields that name nobody, by message: counts, kinds, texts for people, and what belongs to whom another field names.
VALUES: Mapping[str, frozenset[str]] = {
    message: frozenset(fields.split())
    for message, fields in {
        "AgentDevice": "type memory_bytes torch_device",
        "MemberInfo": "pid highest_term highest_fence",
        "ClockSnapshot": "term published global_clock local max_distance epoch minibatches samples barrier "
        "barrier_reason waves staged durable applied plans frozen lineup",
        "FrozenSince": "clock frozen layers",
        "PlanVersion": "version bounds planned",
        "RegisterRequest": "version",
        "HeartbeatRequest": "last_command",
        "Condition": "kind who sentence since cleared clearance times",
        "WatchCommandsRequest": "after",
        "WatchJobRequest": "after",
        "KeyedStageReport": "stage_phase stage_ready stage_progress stage_waiting stage_evaluation stage_conditions "
        "stage_failed stage_done",
        "InspectionResult": "model error problems measurements",
        "InspectionStep": "step",
        "InspectionPhase": "phase seconds",
        "LinkResult": "problem",
        "ChildExit": "pid exit_code last_output ordered",
        "ReportRequest": "batch",
        "Submission": "job_json rewinds has_begun model code",
        "FetchCodeRequest": "digest",
        "MeasureLinksRequest": "fresh",
        "MoveWorkerRequest": "layers",
        "StopJobRequest": "mode",
        "SliceHeader": "parameter start stop dtype",
        "PushHeader": "wave fresh",
        "PullHeader": "clock",
        "BuffersHeader": "clock",
        "JoinRequest": "only_meets",
        "Block": "indices",
        "ReportStagedRequest": "wave segment squares",
        "HoldClockRequest": "switch",
        "ReportPreparedRequest": "index can",
        "ShareMemoryRequest": "call",
        "RequestBarrierRequest": "reason",
        "AdmitRequest": "num_stages minibatches_per_wave bounds",
        "CheckpointFile": "sha256 num_bytes",
        "ReportCheckpointRequest": "clock failure",
        "ReportShardCheckpointRequest": "clock failure",
        "FollowLogRequest": "start gathered",
        "ListMembersRequest": "after",
        "AcknowledgeRequest": "num_records durable applied",
    }.items()
}

_Cells = Outcome | Mapping[Role, Outcome]

_REFUSED, _NO_EFFECT, _TASK = Outcome

#: Who speaks for a member: under another's name, or with another's registration.
_MEMBER: dict[str, _Cells] = {"member_id": _REFUSED, "registration": _REFUSED}
_AGENT: dict[str, _Cells] = {"agent_id": _REFUSED, "registration": _REFUSED}

_LIFE = ("job_id", "vw", "stage", "incarnation", "term")
_SELF: dict[str, _Cells] = {f"requester.{field}": _REFUSED for field in _LIFE}


def _stage_of(path: str) -> dict[str, _Cells]:
    """The stage whose reports are told: of another agent, or no life that there is."""
    outcomes = (_REFUSED, _REFUSED, _REFUSED, _NO_EFFECT, _NO_EFFECT)
    return {f"{path}.{field}": outcome for field, outcome in zip(_LIFE, outcomes, strict=True)}


def _all(fields: str, outcome: Outcome) -> dict[str, _Cells]:
    return dict.fromkeys(fields.split(), outcome)


_OF_SHARDS = {Role.PARAMETER_SERVER: _NO_EFFECT, Role.AGENT: _REFUSED, Role.OPERATOR: _REFUSED}

_COORDINATOR: Mapping[str, Mapping[str, _Cells]] = {
    "Register": {
        **_all("member.role member.id member.shard_index member.devices.device member.links", _REFUSED),
        **_all("member.host member.address", _NO_EFFECT),
        **{
            f"member.stages.{field}": {
                Role.AGENT: _NO_EFFECT,
                Role.PARAMETER_SERVER: _REFUSED,
                Role.OPERATOR: _REFUSED,
            }
            for field in _LIFE
        },
    },
    "Heartbeat": {
        **_MEMBER,
        "clocks": _OF_SHARDS,
        "lost": _OF_SHARDS,
        "conditions": _OF_SHARDS,
        "jobs": {Role.PARAMETER_SERVER: _NO_EFFECT, Role.AGENT: _NO_EFFECT, Role.OPERATOR: _REFUSED},
    },
    "Leave": {"member_id": _REFUSED, "registration": _NO_EFFECT},
    "WatchCommands": _AGENT,
    "Report": {
        **_AGENT,
        **_stage_of("reports.stage_report.key"),
        **_stage_of("reports.child_exit.key"),
        **_all(
            "reports.inspection_result.job_id reports.inspection_step.job_id reports.inspection_phase.job_id", _REFUSED
        ),
        **_all("reports.link_awaited.job_id reports.link_awaited.number reports.link_awaited.address", _REFUSED),
        **_all("reports.link_result.job_id reports.link_result.number reports.link_result.measured", _REFUSED),
    },
    "CertifyStage": {
        **_AGENT,
        **{f"stage.{field}": _REFUSED for field in _LIFE},
        "request_pem": _NO_EFFECT,
    },
    # A digest names content, which is that of a job led here, whoever asks.
    "FetchCode": _AGENT,
    # Agents refuse the folder of code, as only they know it.
    "SubmitJob": {
        **_all("submission.request_id submission.import_path", _NO_EFFECT),
        **_all("submission.run_dir submission.restore", _REFUSED),
    },
    "MeasureLinks": _all("request_id", _NO_EFFECT),
    "StopJob": _all("job_id", _TASK),
    "DrainWorker": _all("job_id vw", _TASK),
    "AddWorker": _all("job_id vw", _TASK),
    "MoveWorker": _all("job_id vw", _TASK),
    "Depart": _AGENT,
    "GetStatus": _all("job_id", _NO_EFFECT),
    "WatchJob": _all("job_id", _NO_EFFECT),
    "ListMembers": {},
    "GetClocks": _all("job_id", _NO_EFFECT),
    "WatchClocks": _all("job_id", _NO_EFFECT),
}

_SHARD: Mapping[str, Mapping[str, _Cells]] = {
    "Configure": _all(" ".join(field.name for field in fields(ShardConfig)), _TASK),
    "Release": _all("job_id", _TASK),
    "RequestBarrier": _all("job_id term", _TASK),
    "Evict": _all("job_id term vw incarnation", _TASK),
    "Drain": _all("job_id term vw incarnation", _TASK),
    "Move": _all("job_id term vw move", _TASK),
    "Admit": _all("job_id term vw incarnation", _TASK),
    "KeepRun": _all("job_id term run", _TASK),
    "DescribeRun": _all("job_id", _TASK),
    "GetShardClocks": _all("job_id", _TASK),
    "Join": {**_SELF, **_all("link_address replicas_address", _NO_EFFECT)},
    "ReportInitialized": _SELF,
    "ReportStaged": _SELF,
    "HoldClock": _SELF,
    "ReportPrepared": _SELF,
    "GetProgress": _SELF,
    "ShareMemory": _SELF,
    "ReportCheckpoint": {**_SELF, "files.name": _REFUSED},
    "FollowLog": {**_SELF, **_all("job_id term", _REFUSED)},
    "Acknowledge": _all("job_id term shard", _REFUSED),
    "ReportShardCheckpoint": _all("job_id term shard files.name", _REFUSED),
}

_TENSORS: Mapping[str, Mapping[str, _Cells]] = dict.fromkeys(("Push", "Pull", "PushBuffers", "PullBuffers"), _SELF)


def _by_role(call: str, cells: _Cells) -> Mapping[Role, Outcome]:
    return dict.fromkeys(ACCESS[call], cells) if isinstance(cells, Outcome) else cells


#: Full name of the call → path of the field → what happens to each role that may make the call.
FIELDS: Mapping[str, Mapping[str, Mapping[Role, Outcome]]] = {
    f"/{service}/{call}": {path: _by_role(f"/{service}/{call}", cells) for path, cells in fields.items()}
    for service, calls in (
        (COORDINATOR_SERVICE, _COORDINATOR),
        (SHARD_SERVICE, _SHARD),
        (TENSOR_SERVICE, _TENSORS),
    )
    for call, fields in calls.items()
}


def leaves(
    message: Descriptor, prefix: str = "", *, known: Container[str] = frozenset()
) -> Iterator[tuple[str, FieldDescriptor]]:
    """The fields of a message and of those inside it, each with its path, down to what holds no message or is `known`.

    A map counts as one field, whose keys may name somebody; the fields of its values come after it.
    """
    for field in message.fields:
        path = f"{prefix}{field.name}"
        inner = field.message_type
        if inner is not None and inner.GetOptions().map_entry:
            yield path, field
            inner = inner.fields_by_name["value"].message_type
        elif inner is None or path in known or field.name in VALUES.get(message.name, ()):
            yield path, field
            continue
        if inner is not None:
            yield from leaves(inner, f"{path}.", known=known)


def unclassified() -> list[str]:
    """Fields of requests of which nobody has said what they name, and names here that are of no field."""
    wrong = [f"{call}: no such call" for call in FIELDS.keys() ^ REQUESTS.keys()]
    for call, request in REQUESTS.items():
        known = dict(FIELDS.get(call, {}))
        for path, field in leaves(request.DESCRIPTOR, known=frozenset(known)):
            owner = field.containing_type
            is_value = owner is not None and field.name in VALUES.get(owner.name, ())
            if (known.pop(path, None) is not None) == is_value:
                wrong.append(f"{call} {path}: {'classified twice' if is_value else 'not classified'}")
        wrong += [f"{call} {path}: no such field" for path in known]
    return wrong
