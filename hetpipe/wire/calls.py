"""The one table of remote calls, with the dataclasses of their requests and replies.

A row says everything about a call but what it does: its name, request and reply, who may make it, how long it may take,
whether it may be repeated, whether it is an order of the leading coordinator, and how large a request may be. The proto
files say how the dataclasses travel; a test compares both (`wire.codec`). What is not in `ACCESS` is denied.

To add a call, see "To add a remote call" in docs/architecture.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Final

from pydantic import AfterValidator, Field

from hetpipe.decide.sync.records import Record
from hetpipe.values.bounds import MAX_LISTED, Sentence
from hetpipe.values.commands import AgentNews, NumberedCommand, StageKey
from hetpipe.values.conditions import Condition
from hetpipe.values.events import JobState, JobStatus, NumberedEvent, StopMode, Submission, WorkerStatus
from hetpipe.values.identity import Role
from hetpipe.values.ids import AgentId, Clock, Incarnation, JobId, ShardIndex, Term, VirtualWorkerIndex, Wave
from hetpipe.values.link_measurement import LinksProgress
from hetpipe.values.members import Lease, Member, MemberId, MemberInfo, Registration, Renewal
from hetpipe.values.plan import DTYPE_BYTES
from hetpipe.values.requests import (
    Blocks,
    BuffersHeader,
    CheckpointFile,
    Meeting,
    PullHeader,
    PushHeader,
    PushReply,
    Requester,
    SliceHeader,
)
from hetpipe.values.run import ClockSnapshot
from hetpipe.values.run_document import RunDescription, RunDocument
from hetpipe.values.shard_config import ShardConfig
from hetpipe.values.sync import Progress
from hetpipe.wire import access
from hetpipe.wire.call import SMALL_BYTES, Call, Download, Rule, Streaming, Unary, Upload
from hetpipe.wire.checks import checked_job_id
from hetpipe.wire.watchers import STREAM_DEADLINE_SECONDS

COORDINATOR_SERVICE: Final = "hetpipe.proto.v2.CoordinatorService"
SHARD_SERVICE: Final = "hetpipe.proto.v2.ParameterServerService"
TENSOR_SERVICE: Final = "hetpipe.proto.v2.TensorService"

#: Deadline of a call that the coordinator answers at once.
CALL_SECONDS = 5.0

#: Deadline of a heartbeat: shorter than a lease, so that a second one can still save it.
HEARTBEAT_SECONDS = 2.0

#: Deadline of a good-bye, which nobody needs: whoever says it is about to end, and has been given ten seconds.
LEAVE_SECONDS = 2.0

#: Deadline of a call of a shard that moves no tensors, and the least one of a call that does.
CONTROL_SECONDS = 10.0
TRANSFER_SECONDS = 60.0

_CheckedJobId = Annotated[JobId, AfterValidator(checked_job_id)]


# -- requests and replies of the coordinator -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RegisterRequest:
    """Makes a member."""

    member: MemberInfo
    """The new member."""


@dataclass(frozen=True, slots=True)
class HeartbeatRequest:
    """Renews a lease, and tells what is new."""

    member_id: MemberId
    """Id of the member."""
    registration: Registration
    """Token of its registration."""
    clocks: Annotated[dict[_CheckedJobId, ClockSnapshot], Field(max_length=MAX_LISTED)] = field(default_factory=dict)
    """Clocks per job id; clock shards only."""
    jobs: Annotated[tuple[_CheckedJobId, ...], Field(max_length=MAX_LISTED)] = ()
    """Ids of the jobs the member does something for."""
    last_command: int = 0
    """Sequence number of the last command that was carried out, 0 for none; agents only."""
    lost: Annotated[dict[_CheckedJobId, Sentence], Field(max_length=MAX_LISTED)] = field(default_factory=dict)
    """Why the member does nothing more for a job that it served: its state on disk is gone or damaged. By job id;
    shards only."""
    conditions: Annotated[
        dict[_CheckedJobId, Annotated[tuple[Condition, ...], Field(max_length=MAX_LISTED)]],
        Field(max_length=MAX_LISTED),
    ] = field(default_factory=dict)
    """What endangers jobs at the member, or has: the newest state of every condition, by job id; shards only."""


@dataclass(frozen=True, slots=True)
class LeaveRequest:
    """Ends a membership."""

    member_id: MemberId
    """Id of the member."""
    registration: Registration
    """Token of its registration."""


@dataclass(frozen=True, slots=True)
class WatchCommandsRequest:
    """Opens an agent's command stream."""

    agent_id: AgentId
    """Id of the agent."""
    registration: Registration
    """Token of its registration."""
    after: int
    """Commands up to this sequence number were received; 0 for none."""


@dataclass(frozen=True, slots=True)
class ReportRequest:
    """Tells what happened on one node."""

    agent_id: AgentId
    """Id of the agent."""
    registration: Registration
    """Token of its registration."""
    batch: int
    """Number of this batch within the registration: 1, 2, … A resend keeps its number, and counts once."""
    news: tuple[AgentNews, ...]
    """The news in order."""


@dataclass(frozen=True, slots=True)
class CertifyStageRequest:
    """Asks for a stage's certificate."""

    agent_id: AgentId
    """Id of the agent that starts the stage."""
    registration: Registration
    """Token of its registration."""
    stage: StageKey
    """The stage."""
    request_pem: bytes
    """Certificate request made with the stage's key, PEM. Only the key is taken from it."""


@dataclass(frozen=True, slots=True)
class Certificate:
    """A stage's certificate."""

    pem: bytes
    """The stage's certificate and the signer's, PEM."""


@dataclass(frozen=True, slots=True)
class SubmitJobRequest:
    """Hands in a job; a resend of the same `request_id` gives the same job. Mistakes found later come as events."""

    submission: Submission
    """The job as it is handed in."""


@dataclass(frozen=True, slots=True)
class SubmittedJob:
    """The job was accepted."""

    job_id: JobId
    """Names the job in every other call."""


@dataclass(frozen=True, slots=True)
class StopJobRequest:
    """Asks a job to stop."""

    mode: StopMode
    """How."""
    job_id: JobId | None = None
    """The job; absent for the newest."""


@dataclass(frozen=True, slots=True)
class StoppingJob:
    """The job knows that it is to stop."""

    state: JobState
    """Where the job stands now."""


@dataclass(frozen=True, slots=True)
class DrainWorkerRequest:
    """Asks a virtual worker to leave: after the next barrier if it computes, else at once."""

    vw: VirtualWorkerIndex
    """Virtual worker, 0-based."""
    job_id: JobId | None = None
    """The job; absent for the newest."""


@dataclass(frozen=True, slots=True)
class AddWorkerRequest:
    """Asks virtual workers back that have left, or are not started anew; or for another one, on free devices."""

    vw: VirtualWorkerIndex | None = None
    """Virtual worker, 0-based; absent for all that are out, or if none is, for another one."""
    job_id: JobId | None = None
    """The job; absent for the newest."""


@dataclass(frozen=True, slots=True)
class Workers:
    """Virtual workers that were asked to come."""

    workers: tuple[WorkerStatus, ...]
    """Where each of them stands now."""


@dataclass(frozen=True, slots=True)
class DepartRequest:
    """Tells that an agent is about to leave: its stages end at the next barrier, and it gets no others."""

    agent_id: AgentId
    """Id of the agent."""
    registration: Registration
    """Its newest registration."""


@dataclass(frozen=True, slots=True)
class MeasureLinksRequest:
    """Asks for the links of the cluster. The same request id means the same survey: ask again for how far it is."""

    request_id: str
    """Chosen by the caller: 8 to 64 letters, digits or dashes."""
    fresh: bool = False
    """Measure also the links that are known."""


@dataclass(frozen=True, slots=True)
class GetStatusRequest:
    """Asks for one job's status; with no job at all, the cluster's processes alone."""

    job_id: JobId | None = None
    """The job; absent for the newest."""


@dataclass(frozen=True, slots=True)
class WatchJobRequest:
    """Opens a job's event stream."""

    job_id: JobId | None = None
    """The job; absent for the newest."""
    after: int = 0
    """Events up to this sequence number were received; 0 for none."""


@dataclass(frozen=True, slots=True)
class ListMembersRequest:
    """Asks for the members."""


@dataclass(frozen=True, slots=True)
class Members:
    """The live members."""

    members: tuple[Member, ...]
    """In order of registration."""


@dataclass(frozen=True, slots=True)
class GetClocksRequest:
    """Asks for a job's clocks."""

    job_id: JobId | None = None
    """The job; absent for the newest."""


@dataclass(frozen=True, slots=True)
class KnownClocks:
    """The newest clocks of a job, as far as they are known."""

    clocks: ClockSnapshot | None
    """Absent while the clock shard has told none."""


@dataclass(frozen=True, slots=True)
class WatchClocksRequest:
    """Opens a stream of clocks."""

    job_id: JobId | None = None
    """The job; absent for the newest."""


# -- requests and replies of a shard ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReleaseRequest:
    """Has a shard forget a job; one it does not know is no error."""

    job_id: JobId
    """Job to forget."""


@dataclass(frozen=True, slots=True)
class RequestBarrierRequest:
    """Asks for an unplanned barrier, as early as is safe."""

    job_id: JobId
    """Job."""
    term: Term
    """Version of plan and membership."""
    reason: str
    """Why: `stop` ends the run there."""


@dataclass(frozen=True, slots=True)
class Barrier:
    """The next barrier."""

    clock: Clock
    """Where it is."""


@dataclass(frozen=True, slots=True)
class EvictRequest:
    """A life of a virtual worker is over: what it committed stands, the rest is dropped."""

    job_id: JobId
    """Job."""
    term: Term
    """Version of plan and membership."""
    vw: VirtualWorkerIndex
    """Index of the virtual worker."""
    incarnation: Incarnation
    """The life that is over."""


@dataclass(frozen=True, slots=True)
class DrainRequest:
    """A life of a virtual worker is to leave at the next barrier."""

    job_id: JobId
    """Job."""
    term: Term
    """Version of plan and membership."""
    vw: VirtualWorkerIndex
    """Index of the virtual worker."""
    incarnation: Incarnation
    """The life that is to leave."""


@dataclass(frozen=True, slots=True)
class AdmitRequest:
    """A new life of a virtual worker will come, and counts from the next barrier on."""

    job_id: JobId
    """Job."""
    term: Term
    """Version of plan and membership."""
    vw: VirtualWorkerIndex
    """Index of the virtual worker."""
    incarnation: Incarnation
    """The life that will come."""
    num_stages: int
    """Its stages."""


@dataclass(frozen=True, slots=True)
class KeepRunRequest:
    """Has a run kept for the next coordinator, in place of what was kept before."""

    job_id: JobId
    """Job."""
    term: Term
    """Version of plan and membership."""
    run: RunDocument
    """The run."""


@dataclass(frozen=True, slots=True)
class DescribeRunRequest:
    """Asks for a run, and what has become of it."""

    job_id: JobId
    """Job."""


@dataclass(frozen=True, slots=True)
class GetShardClocksRequest:
    """Asks a clock shard for the clocks of a job."""

    job_id: JobId
    """Job."""


@dataclass(frozen=True, slots=True)
class JoinRequest:
    """A stage is there; returns where others await it. Repeat until all stages of its virtual worker are there."""

    requester: Requester
    """The stage that is there."""
    link_address: str = ""
    """Where it awaits the next stage, HOST:PORT; empty on the last stage, and where it has been said before."""
    replicas_address: str = ""
    """Where it awaits the same stage of the other virtual workers, HOST:PORT; from virtual worker 0 only, if at all."""
    only_meets: bool = False
    """It only meets its neighbours yet, and does not count as joined: nobody shall wait for it. Its virtual worker
    becomes a member when all stages have joined, and from then on the others wait for its waves."""


@dataclass(frozen=True, slots=True)
class ReportInitializedRequest:
    """A stage's part of the first weights is on every shard."""

    requester: Requester
    """Whose part."""


@dataclass(frozen=True, slots=True)
class ReportStagedRequest:
    """A stage's part of a wave is on every shard."""

    requester: Requester
    """Whose part."""
    wave: Wave
    """The wave."""
    blocks: Blocks
    """The minibatches of the wave in order, with their samples; from the first stage only. An empty wave has none."""
    segment: Clock
    """The clock at which the segment began that the stage works in: a barrier may have dropped an empty wave, and a
    late copy of its report must not count for the wave of that number in the next segment."""


@dataclass(frozen=True, slots=True)
class HoldClockRequest:
    """Chooses and keeps the clock of a switch point. `ClockNotPublished`: not yet."""

    requester: Requester
    """The virtual worker's first stage."""
    switch: int
    """k, for the switch point at minibatch k·N."""


@dataclass(frozen=True, slots=True)
class HeldClock:
    """The clock of a switch point."""

    clock: Clock
    """The clock to use."""
    barrier: Clock
    """The next barrier: no minibatch beyond it may start."""


@dataclass(frozen=True, slots=True)
class GetProgressRequest:
    """Asks for the progress at the start of the segment under way."""

    requester: Requester
    """Who asks."""


@dataclass(frozen=True, slots=True)
class ReportCheckpointRequest:
    """A stage's part of a checkpoint is on disk, or why not."""

    requester: Requester
    """Whose part."""
    clock: Clock
    """Clock of the barrier."""
    files: tuple[CheckpointFile, ...] = ()
    """The files it wrote."""
    failure: Sentence = ""
    """Why it could not write any, as a sentence; empty if it could."""


@dataclass(frozen=True, slots=True)
class ReportShardCheckpointRequest:
    """A shard's part of a checkpoint is on disk, or why not."""

    job_id: JobId
    """Job."""
    term: Term
    """Version of plan and membership."""
    shard: ShardIndex
    """Whose part."""
    clock: Clock
    """Clock of the barrier."""
    files: tuple[CheckpointFile, ...] = ()
    """The files it wrote."""
    failure: Sentence = ""
    """Why it could not write any, as a sentence; empty if it could."""


@dataclass(frozen=True, slots=True)
class CheckpointParts:
    """How far a checkpoint is."""

    complete: bool
    """Whether every part is there and the checkpoint counts."""


@dataclass(frozen=True, slots=True)
class FollowLogRequest:
    """Asks for the decision log from a record on, as it grows; the stream ends now and then, then follow again."""

    job_id: JobId
    """Job."""
    term: Term
    """Version of plan and membership."""
    start: int
    """First record wanted; -1: the newest that begins a segment."""
    gathered: bool = False
    """Commits may wait, about a second, for a record that a stage acts on: fewer messages for who only watches them."""
    requester: Requester | None = None
    """The stage that follows; absent for a shard."""


@dataclass(frozen=True, slots=True)
class LogRecords:
    """Records of the decision log."""

    records: tuple[Record, ...]
    """In order; at least one."""


@dataclass(frozen=True, slots=True)
class AcknowledgeRequest:
    """A shard has carried out records."""

    job_id: JobId
    """Job."""
    term: Term
    """Version of plan and membership."""
    shard: ShardIndex
    """The shard that acknowledges."""
    num_records: int
    """Number of records it has carried out."""
    durable: int | None = None
    """How many of them it will not ask for again, should it be restarted; absent: none of them."""
    applied: bool = False
    """What is staged on it now would be lost with its process: its disk fails, or it has none."""


# -- the table -------------------------------------------------------------------------------------------------------

_OPERATOR: Rule = {Role.OPERATOR: access.anybody}
_LOOKS: Rule = dict.fromkeys((Role.OPERATOR, Role.MONITOR), access.anybody)
_AGENT: Rule = {Role.AGENT: access.agent}
_MEMBERS: Rule = {
    Role.AGENT: access.agent_member,
    Role.PARAMETER_SERVER: access.shard_member,
    Role.OPERATOR: access.owner,
}
_STAGE: Rule = {Role.STAGE: access.stage}
_COORDINATOR: Rule = {Role.COORDINATOR: access.anybody}
_JOB_SHARD: Rule = {Role.PARAMETER_SERVER: access.owner}

REGISTER = Unary(
    service=COORDINATOR_SERVICE,
    name="Register",
    request=RegisterRequest,
    reply=Lease,
    access={
        Role.AGENT: access.new_agent,
        Role.PARAMETER_SERVER: access.new_shard,
        Role.OPERATOR: access.new_worker,
    },
    deadline_seconds=CALL_SECONDS,
    awaited="a lease",
)
HEARTBEAT = Unary(
    service=COORDINATOR_SERVICE,
    name="Heartbeat",
    request=HeartbeatRequest,
    reply=Renewal,
    access=_MEMBERS,
    deadline_seconds=HEARTBEAT_SECONDS,
    awaited="the renewal of a lease",
)
LEAVE = Unary(
    service=COORDINATOR_SERVICE,
    name="Leave",
    request=LeaveRequest,
    reply=type(None),
    access=_MEMBERS,
    deadline_seconds=LEAVE_SECONDS,
    max_request_bytes=SMALL_BYTES,
)
WATCH_COMMANDS = Streaming(
    service=COORDINATOR_SERVICE,
    name="WatchCommands",
    request=WatchCommandsRequest,
    reply=NumberedCommand,
    access=_AGENT,
    deadline_seconds=STREAM_DEADLINE_SECONDS,
    awaited="the next command",
    max_request_bytes=SMALL_BYTES,
)
REPORT = Unary(
    service=COORDINATOR_SERVICE,
    name="Report",
    request=ReportRequest,
    reply=type(None),
    access=_AGENT,
    deadline_seconds=CALL_SECONDS,
)
SUBMIT_JOB = Unary(
    service=COORDINATOR_SERVICE,
    name="SubmitJob",
    request=SubmitJobRequest,
    reply=SubmittedJob,
    access=_OPERATOR,
    deadline_seconds=CALL_SECONDS,
    awaited="a job id",
)
STOP_JOB = Unary(
    service=COORDINATOR_SERVICE,
    name="StopJob",
    request=StopJobRequest,
    reply=StoppingJob,
    access=_OPERATOR,
    deadline_seconds=CALL_SECONDS,
    max_request_bytes=SMALL_BYTES,
)
DRAIN_WORKER = Unary(
    service=COORDINATOR_SERVICE,
    name="DrainWorker",
    request=DrainWorkerRequest,
    reply=WorkerStatus,
    access=_OPERATOR,
    deadline_seconds=CALL_SECONDS,
    max_request_bytes=SMALL_BYTES,
)
ADD_WORKER = Unary(
    service=COORDINATOR_SERVICE,
    name="AddWorker",
    request=AddWorkerRequest,
    reply=Workers,
    access=_OPERATOR,
    deadline_seconds=CALL_SECONDS,
    is_repeatable=False,  # without a name, each may bring another new one
    max_request_bytes=SMALL_BYTES,
)
DEPART = Unary(
    service=COORDINATOR_SERVICE,
    name="Depart",
    request=DepartRequest,
    reply=type(None),
    access=_AGENT,
    deadline_seconds=CALL_SECONDS,
    max_request_bytes=SMALL_BYTES,
)
GET_STATUS = Unary(
    service=COORDINATOR_SERVICE,
    name="GetStatus",
    request=GetStatusRequest,
    reply=JobStatus,
    access=_LOOKS,
    deadline_seconds=CALL_SECONDS,
    max_request_bytes=SMALL_BYTES,
)
WATCH_JOB = Streaming(
    service=COORDINATOR_SERVICE,
    name="WatchJob",
    request=WatchJobRequest,
    reply=NumberedEvent,
    access=_LOOKS,
    deadline_seconds=STREAM_DEADLINE_SECONDS,
    awaited="the next event of the job",
    max_request_bytes=SMALL_BYTES,
)
LIST_MEMBERS = Unary(
    service=COORDINATOR_SERVICE,
    name="ListMembers",
    request=ListMembersRequest,
    reply=Members,
    access=_LOOKS,
    deadline_seconds=CALL_SECONDS,
    max_request_bytes=SMALL_BYTES,
)
GET_CLOCKS = Unary(
    service=COORDINATOR_SERVICE,
    name="GetClocks",
    request=GetClocksRequest,
    reply=KnownClocks,
    access=_LOOKS,
    deadline_seconds=CALL_SECONDS,
    max_request_bytes=SMALL_BYTES,
)
WATCH_CLOCKS = Streaming(
    service=COORDINATOR_SERVICE,
    name="WatchClocks",
    request=WatchClocksRequest,
    reply=ClockSnapshot,
    access=_LOOKS,
    deadline_seconds=STREAM_DEADLINE_SECONDS,
    awaited="the next clock",
    max_request_bytes=SMALL_BYTES,
)
MEASURE_LINKS = Unary(
    service=COORDINATOR_SERVICE,
    name="MeasureLinks",
    request=MeasureLinksRequest,
    reply=LinksProgress,
    access=_OPERATOR,
    deadline_seconds=CALL_SECONDS,
    max_request_bytes=SMALL_BYTES,
)
CERTIFY_STAGE = Unary(
    service=COORDINATOR_SERVICE,
    name="CertifyStage",
    request=CertifyStageRequest,
    reply=Certificate,
    access=_AGENT,
    deadline_seconds=CALL_SECONDS,
    awaited="a certificate",
    max_request_bytes=SMALL_BYTES,
)

CONFIGURE = Unary(
    service=SHARD_SERVICE,
    name="Configure",
    request=ShardConfig,
    reply=type(None),
    access=_COORDINATOR,
    deadline_seconds=CONTROL_SECONDS,
    is_order=True,
)
RELEASE = Unary(
    service=SHARD_SERVICE,
    name="Release",
    request=ReleaseRequest,
    reply=type(None),
    access=_COORDINATOR,
    deadline_seconds=CONTROL_SECONDS,
    is_order=True,
    max_request_bytes=SMALL_BYTES,
)
JOIN = Unary(
    service=SHARD_SERVICE,
    name="Join",
    request=JoinRequest,
    reply=Meeting,
    access=_STAGE,
    deadline_seconds=CONTROL_SECONDS,
    max_request_bytes=SMALL_BYTES,
)
REPORT_INITIALIZED = Unary(
    service=SHARD_SERVICE,
    name="ReportInitialized",
    request=ReportInitializedRequest,
    reply=type(None),
    access=_STAGE,
    deadline_seconds=CONTROL_SECONDS,
    max_request_bytes=SMALL_BYTES,
)
REPORT_STAGED = Unary(
    service=SHARD_SERVICE,
    name="ReportStaged",
    request=ReportStagedRequest,
    reply=type(None),
    access=_STAGE,
    deadline_seconds=CONTROL_SECONDS,
)
HOLD_CLOCK = Unary(
    service=SHARD_SERVICE,
    name="HoldClock",
    request=HoldClockRequest,
    reply=HeldClock,
    access=_STAGE,
    deadline_seconds=CONTROL_SECONDS,
    max_request_bytes=SMALL_BYTES,
)
REQUEST_BARRIER = Unary(
    service=SHARD_SERVICE,
    name="RequestBarrier",
    request=RequestBarrierRequest,
    reply=Barrier,
    access=_COORDINATOR,
    deadline_seconds=CONTROL_SECONDS,
    is_order=True,
    max_request_bytes=SMALL_BYTES,
)
EVICT = Unary(
    service=SHARD_SERVICE,
    name="Evict",
    request=EvictRequest,
    reply=type(None),
    access=_COORDINATOR,
    deadline_seconds=CONTROL_SECONDS,
    is_order=True,
    max_request_bytes=SMALL_BYTES,
)
DRAIN = Unary(
    service=SHARD_SERVICE,
    name="Drain",
    request=DrainRequest,
    reply=type(None),
    access=_COORDINATOR,
    deadline_seconds=CONTROL_SECONDS,
    is_order=True,
    max_request_bytes=SMALL_BYTES,
)
ADMIT = Unary(
    service=SHARD_SERVICE,
    name="Admit",
    request=AdmitRequest,
    reply=type(None),
    access=_COORDINATOR,
    deadline_seconds=CONTROL_SECONDS,
    is_order=True,
    max_request_bytes=SMALL_BYTES,
)
KEEP_RUN = Unary(
    service=SHARD_SERVICE,
    name="KeepRun",
    request=KeepRunRequest,
    reply=type(None),
    access=_COORDINATOR,
    deadline_seconds=CONTROL_SECONDS,
    is_order=True,
)
DESCRIBE_RUN = Unary(
    service=SHARD_SERVICE,
    name="DescribeRun",
    request=DescribeRunRequest,
    reply=RunDescription,
    access=_COORDINATOR,
    deadline_seconds=CONTROL_SECONDS,
    is_order=True,  # whoever asks is about to lead the run
    max_request_bytes=SMALL_BYTES,
)
GET_SHARD_CLOCKS = Unary(
    service=SHARD_SERVICE,
    name="GetShardClocks",
    request=GetShardClocksRequest,
    reply=ClockSnapshot,
    access=_COORDINATOR,
    deadline_seconds=CONTROL_SECONDS,
    max_request_bytes=SMALL_BYTES,
)
GET_PROGRESS = Unary(
    service=SHARD_SERVICE,
    name="GetProgress",
    request=GetProgressRequest,
    reply=Progress,
    access=_STAGE,
    deadline_seconds=CONTROL_SECONDS,
    max_request_bytes=SMALL_BYTES,
)
REPORT_CHECKPOINT = Unary(
    service=SHARD_SERVICE,
    name="ReportCheckpoint",
    request=ReportCheckpointRequest,
    reply=CheckpointParts,
    access=_STAGE,
    deadline_seconds=CONTROL_SECONDS,
    max_request_bytes=SMALL_BYTES,
)
FOLLOW_LOG = Streaming(
    service=SHARD_SERVICE,
    name="FollowLog",
    request=FollowLogRequest,
    reply=LogRecords,
    access={Role.STAGE: access.follower, Role.PARAMETER_SERVER: access.following_shard},
    deadline_seconds=STREAM_DEADLINE_SECONDS,
    awaited="the next event",
    resume=lambda request, reply: replace(request, start=reply.records[-1].index + 1),
    max_request_bytes=SMALL_BYTES,
)
ACKNOWLEDGE = Unary(
    service=SHARD_SERVICE,
    name="Acknowledge",
    request=AcknowledgeRequest,
    reply=type(None),
    access=_JOB_SHARD,
    deadline_seconds=CONTROL_SECONDS,
    max_request_bytes=SMALL_BYTES,
)
REPORT_SHARD_CHECKPOINT = Unary(
    service=SHARD_SERVICE,
    name="ReportShardCheckpoint",
    request=ReportShardCheckpointRequest,
    reply=CheckpointParts,
    access=_JOB_SHARD,
    deadline_seconds=CONTROL_SECONDS,
    max_request_bytes=SMALL_BYTES,
)


def _slice_bytes(pieces: tuple[SliceHeader, ...]) -> int:
    """What slices hold, before anybody has judged them."""
    return sum(max(0, piece.stop - piece.start) * DTYPE_BYTES.get(piece.dtype, 1) for piece in pieces)


PUSH = Upload(
    service=TENSOR_SERVICE,
    name="Push",
    request=PushHeader,
    reply=PushReply,
    access={Role.STAGE: access.header(PushHeader)},
    deadline_seconds=TRANSFER_SECONDS,
    num_bytes=lambda header: _slice_bytes(header.slices),
)
PULL = Download(
    service=TENSOR_SERVICE,
    name="Pull",
    request=PullHeader,
    access={Role.STAGE: access.header(PullHeader)},
    deadline_seconds=TRANSFER_SECONDS,
    num_bytes=lambda header: _slice_bytes(header.slices),
)
PUSH_BUFFERS = Upload(
    service=TENSOR_SERVICE,
    name="PushBuffers",
    request=BuffersHeader,
    reply=type(None),
    access={Role.STAGE: access.header(BuffersHeader)},
    deadline_seconds=TRANSFER_SECONDS,
    num_bytes=lambda header: _slice_bytes(header.buffers),
)
PULL_BUFFERS = Download(
    service=TENSOR_SERVICE,
    name="PullBuffers",
    request=BuffersHeader,
    access={Role.STAGE: access.header(BuffersHeader)},
    deadline_seconds=TRANSFER_SECONDS,
    num_bytes=lambda header: _slice_bytes(header.buffers),
    needs_room=True,  # they are combined in a buffer of that size
)

#: Every call of a service of hetpipe's own. A link between stages is one stream that lives as long as they do, which
#: its two ends open and guard themselves (`wire.link_server`).
CALLS: Final[tuple[Call, ...]] = (
    REGISTER,
    HEARTBEAT,
    LEAVE,
    WATCH_COMMANDS,
    REPORT,
    SUBMIT_JOB,
    STOP_JOB,
    DRAIN_WORKER,
    ADD_WORKER,
    DEPART,
    GET_STATUS,
    WATCH_JOB,
    LIST_MEMBERS,
    GET_CLOCKS,
    WATCH_CLOCKS,
    MEASURE_LINKS,
    CERTIFY_STAGE,
    CONFIGURE,
    RELEASE,
    JOIN,
    REPORT_INITIALIZED,
    REPORT_STAGED,
    HOLD_CLOCK,
    REQUEST_BARRIER,
    EVICT,
    DRAIN,
    ADMIT,
    KEEP_RUN,
    DESCRIBE_RUN,
    GET_SHARD_CLOCKS,
    GET_PROGRESS,
    REPORT_CHECKPOINT,
    FOLLOW_LOG,
    ACKNOWLEDGE,
    REPORT_SHARD_CHECKPOINT,
    PUSH,
    PULL,
    PUSH_BUFFERS,
    PULL_BUFFERS,
)

_EVERY_SERVICE: Rule = dict.fromkeys(
    (Role.COORDINATOR, Role.PARAMETER_SERVER, Role.AGENT, Role.OPERATOR, Role.MONITOR), access.anybody
)

#: Full name of the call → who may make it; those of gRPC's own services, too.
ACCESS: Final[Mapping[str, Rule]] = {
    **{call.path: call.access for call in CALLS},
    "/grpc.health.v1.Health/Check": _EVERY_SERVICE,
    "/grpc.health.v1.Health/Watch": _EVERY_SERVICE,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": _OPERATOR,
}

#: Full name of the call → its row.
BY_PATH: Final[Mapping[str, Call]] = {call.path: call for call in CALLS}
