"""The one table of remote calls, with the dataclasses of their requests and replies.

A row declares everything about a call except its behaviour: its name, request and reply, allowed callers, deadline,
whether it is idempotent, whether it is an order of the leading coordinator, and the maximum request size. The proto
files define the wire format of the dataclasses; a test compares the two (`wire.codec`). Calls that are not in `ACCESS`
are denied.

To add a call, see "To add a remote call" in docs/architecture.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Final

from pydantic import AfterValidator, Field

from hetpipe import __version__
from hetpipe.decide.sync.records import Record
from hetpipe.values.bounds import MAX_LISTED, Name, Sentence
from hetpipe.values.commands import AgentReport, NumberedCommand, StageKey
from hetpipe.values.conditions import Condition
from hetpipe.values.events import CodeArchive, JobState, JobStatus, NumberedEvent, StopMode, Submission, WorkerStatus
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
    MemoryOffer,
    PullHeader,
    PushHeader,
    PushReply,
    Requester,
    SliceHeader,
)
from hetpipe.values.run import ClockSnapshot
from hetpipe.values.run_document import RunDescription, RunDocument
from hetpipe.values.shard_config import ShardConfig
from hetpipe.values.sync import PlanMove, Progress
from hetpipe.wire import access
from hetpipe.wire.call import SMALL_BYTES, Call, Download, Rule, Streaming, Unary, Upload
from hetpipe.wire.checks import checked_job_id
from hetpipe.wire.watchers import STREAM_DEADLINE_SECONDS

COORDINATOR_SERVICE: Final = "hetpipe.proto.v2.CoordinatorService"
SHARD_SERVICE: Final = "hetpipe.proto.v2.ParameterServerService"
TENSOR_SERVICE: Final = "hetpipe.proto.v2.TensorService"

#: Deadline of a call that the coordinator answers immediately.
CALL_SECONDS = 5.0

#: Deadline of a heartbeat: shorter than a lease, so that a second attempt can still renew it.
HEARTBEAT_SECONDS = 2.0

#: Deadline of a sign-off on shutdown: optional, because the process is about to exit and has a grace period of ten
#: seconds.
LEAVE_SECONDS = 2.0

#: Deadline of a shard call that transfers no tensors, and the minimum deadline of one that does.
CONTROL_SECONDS = 10.0
TRANSFER_SECONDS = 60.0

_CheckedJobId = Annotated[JobId, AfterValidator(checked_job_id)]


# -- requests and replies of the coordinator -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RegisterRequest:
    """Registers a member."""

    member: MemberInfo
    """The new member."""
    version: Name = __version__
    """Of hetpipe, that it runs; empty in versions that do not tell."""


@dataclass(frozen=True, slots=True)
class HeartbeatRequest:
    """Renews a lease and carries status updates."""

    member_id: MemberId
    """Id of the member."""
    registration: Registration
    """Token of its registration."""
    clocks: Annotated[dict[_CheckedJobId, ClockSnapshot], Field(max_length=MAX_LISTED)] = field(default_factory=dict)
    """Clocks per job id; clock shards only."""
    jobs: Annotated[tuple[_CheckedJobId, ...], Field(max_length=MAX_LISTED)] = ()
    """Ids of the jobs the member works on."""
    last_command: int = 0
    """Sequence number of the last command executed, 0 for none; agents only."""
    lost: Annotated[dict[_CheckedJobId, Sentence], Field(max_length=MAX_LISTED)] = field(default_factory=dict)
    """Why the member no longer serves a job: its state on disk is missing or damaged. By job id; shards only."""
    conditions: Annotated[
        dict[_CheckedJobId, Annotated[tuple[Condition, ...], Field(max_length=MAX_LISTED)]],
        Field(max_length=MAX_LISTED),
    ] = field(default_factory=dict)
    """Conditions that endanger jobs at the member, active and cleared: the newest state of each, by job id; shards
    only.
    """


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
    """Sequence number of the last command received; 0 for none."""


@dataclass(frozen=True, slots=True)
class ReportRequest:
    """Reports events of one node."""

    agent_id: AgentId
    """Id of the agent."""
    registration: Registration
    """Token of its registration."""
    batch: int
    """Sequence number of this batch within the registration: 1, 2, … A resend keeps its number and is counted once."""
    reports: tuple[AgentReport, ...]
    """The reports in order."""


@dataclass(frozen=True, slots=True)
class CertifyStageRequest:
    """Requests a stage's certificate."""

    agent_id: AgentId
    """Id of the agent that starts the stage."""
    registration: Registration
    """Token of its registration."""
    stage: StageKey
    """The stage."""
    request_pem: bytes
    """Certificate signing request made with the stage's key, PEM. Only the public key is used."""


@dataclass(frozen=True, slots=True)
class FetchCodeRequest:
    """Requests code that was sent along with a job."""

    agent_id: AgentId
    """Id of the agent that runs it."""
    registration: Registration
    """Token of its registration."""
    digest: str
    """SHA-256 of the archive, hexadecimal."""


@dataclass(frozen=True, slots=True)
class Certificate:
    """A stage's certificate."""

    pem: bytes
    """Chain of the stage's certificate and the signer's, PEM."""


@dataclass(frozen=True, slots=True)
class SubmitJobRequest:
    """Submits a job; a resend of the same `request_id` returns the same job. Later mistakes are reported as events."""

    submission: Submission
    """The job as submitted."""


@dataclass(frozen=True, slots=True)
class SubmittedJob:
    """The job was accepted."""

    job_id: JobId
    """Identifies the job in all other calls."""


@dataclass(frozen=True, slots=True)
class StopJobRequest:
    """Requests that a job stop."""

    mode: StopMode
    """The way to stop."""
    job_id: JobId | None = None
    """The job; absent for the newest."""


@dataclass(frozen=True, slots=True)
class StoppingJob:
    """The stop request was recorded."""

    state: JobState
    """Current state of the job."""


@dataclass(frozen=True, slots=True)
class DrainWorkerRequest:
    """Drains a virtual worker: it leaves after the next barrier if it computes, else immediately."""

    vw: VirtualWorkerIndex
    """Virtual worker, 0-based."""
    job_id: JobId | None = None
    """The job; absent for the newest."""


@dataclass(frozen=True, slots=True)
class AddWorkerRequest:
    """Brings virtual workers back that have left or are not being restarted, or adds another one on free devices."""

    vw: VirtualWorkerIndex | None = None
    """Virtual worker, 0-based; absent for all that are out, or for an additional one if none is."""
    job_id: JobId | None = None
    """The job; absent for the newest."""


@dataclass(frozen=True, slots=True)
class MoveWorkerRequest:
    """Moves layers between the stages of a virtual worker at the next barrier, without new processes."""

    vw: VirtualWorkerIndex
    """Virtual worker, 0-based."""
    layers: tuple[Annotated[int, Field(ge=1)], ...]
    """Layers of each of its stages after the move."""
    job_id: JobId | None = None
    """The job; absent for the newest."""


@dataclass(frozen=True, slots=True)
class MovingWorker:
    """A virtual worker whose layers are to move."""

    worker: WorkerStatus
    """Its current status."""
    layers: tuple[int, ...]
    """Layers of each of its stages now: those of the request if there is nothing to move."""


@dataclass(frozen=True, slots=True)
class Workers:
    """Virtual workers that were added."""

    workers: tuple[WorkerStatus, ...]
    """Current state of each."""


@dataclass(frozen=True, slots=True)
class DepartRequest:
    """Announces that an agent is about to leave: its stages end at the next barrier, and no others are placed on it."""

    agent_id: AgentId
    """Id of the agent."""
    registration: Registration
    """Its newest registration."""


@dataclass(frozen=True, slots=True)
class MeasureLinksRequest:
    """Measures the links of the cluster. The request id identifies the survey: repeat it to poll the progress."""

    request_id: str
    """Chosen by the caller: 8 to 64 letters, digits or dashes."""
    fresh: bool = False
    """Remeasure links with a known measurement, too."""


@dataclass(frozen=True, slots=True)
class GetStatusRequest:
    """Requests the status of one job; if there is no job at all, of the cluster's processes only."""

    job_id: JobId | None = None
    """The job; absent for the newest."""


@dataclass(frozen=True, slots=True)
class WatchJobRequest:
    """Opens a job's event stream."""

    job_id: JobId | None = None
    """The job; absent for the newest."""
    after: int = 0
    """Sequence number of the last event received; 0 for none."""


@dataclass(frozen=True, slots=True)
class ListMembersRequest:
    """Lists the members, a page at a time (`wire.coordinator_client.all_members`)."""

    after: int | None = None
    """Order of the last member received; absent for the first page."""


@dataclass(frozen=True, slots=True)
class Members:
    """A page of the live members."""

    members: tuple[Member, ...]
    """In order of registration."""
    has_more: bool = False
    """Whether further ones follow."""


@dataclass(frozen=True, slots=True)
class GetClocksRequest:
    """Requests a job's clocks."""

    job_id: JobId | None = None
    """The job; absent for the newest."""


@dataclass(frozen=True, slots=True)
class KnownClocks:
    """The last known clocks of a job."""

    clocks: ClockSnapshot | None
    """Absent until the clock shard has reported."""


@dataclass(frozen=True, slots=True)
class WatchClocksRequest:
    """Opens a stream of clocks."""

    job_id: JobId | None = None
    """The job; absent for the newest."""


# -- requests and replies of a shard ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReleaseRequest:
    """Deletes a job's state on a shard; an unknown job is not an error."""

    job_id: JobId
    """Job to delete."""


@dataclass(frozen=True, slots=True)
class RequestBarrierRequest:
    """Requests an unplanned barrier at the earliest safe clock."""

    job_id: JobId
    """Job."""
    term: Term
    """Version of plan and membership."""
    reason: str
    """Reason; `stop` ends the run there."""


@dataclass(frozen=True, slots=True)
class Barrier:
    """The next barrier."""

    clock: Clock
    """Its position."""


@dataclass(frozen=True, slots=True)
class EvictRequest:
    """Evicts an incarnation of a virtual worker: its committed waves stand, the rest is dropped."""

    job_id: JobId
    """Job."""
    term: Term
    """Version of plan and membership."""
    vw: VirtualWorkerIndex
    """Index of the virtual worker."""
    incarnation: Incarnation
    """The incarnation to evict."""


@dataclass(frozen=True, slots=True)
class DrainRequest:
    """Makes an incarnation of a virtual worker leave at the next barrier."""

    job_id: JobId
    """Job."""
    term: Term
    """Version of plan and membership."""
    vw: VirtualWorkerIndex
    """Index of the virtual worker."""
    incarnation: Incarnation
    """The incarnation to drain."""


@dataclass(frozen=True, slots=True)
class MoveRequest:
    """Moves layers between the stages of a virtual worker, at the next barrier or before it."""

    job_id: JobId
    """Job."""
    term: Term
    """Version of plan and membership."""
    vw: VirtualWorkerIndex
    """Index of the virtual worker."""
    move: PlanMove
    """Its new cut."""


@dataclass(frozen=True, slots=True)
class AdmitRequest:
    """Announces a new incarnation of a virtual worker, which counts from the next barrier on."""

    job_id: JobId
    """Job."""
    term: Term
    """Version of plan and membership."""
    vw: VirtualWorkerIndex
    """Index of the virtual worker."""
    incarnation: Incarnation
    """The new incarnation."""
    num_stages: int
    """Its stages."""
    minibatches_per_wave: int | None = None
    """Its N_v; None: the one it has, or that of the job."""
    bounds: tuple[int, ...] = ()
    """The cut with which its processes start: stage k has the layers [bounds[k], bounds[k + 1]); empty: not known."""


@dataclass(frozen=True, slots=True)
class KeepRunRequest:
    """Stores a run document for the next coordinator; replaces the previous one."""

    job_id: JobId
    """Job."""
    term: Term
    """Version of plan and membership."""
    run: RunDocument
    """The run document."""


@dataclass(frozen=True, slots=True)
class DescribeRunRequest:
    """Requests a run document and the state of its run."""

    job_id: JobId
    """Job."""


@dataclass(frozen=True, slots=True)
class GetShardClocksRequest:
    """Requests the clocks of a job from its clock shard."""

    job_id: JobId
    """Job."""


@dataclass(frozen=True, slots=True)
class JoinRequest:
    """Reports that a stage is running; returns the neighbours' addresses. Repeat until all its stages have joined."""

    requester: Requester
    """The joining stage."""
    link_address: str = ""
    """Address on which it accepts the next stage, HOST:PORT; empty on the last stage, and if reported before."""
    replicas_address: str = ""
    """Address on which it accepts the same stage of the other virtual workers, HOST:PORT; only from a virtual worker
    that may be the first of them, if at all.
    """
    only_meets: bool = False
    """The stage is only looking up its neighbours and does not count as joined: nothing may wait for it. Its virtual
    worker becomes a member once all stages have joined; from then on the others wait for its waves.
    """


@dataclass(frozen=True, slots=True)
class ReportInitializedRequest:
    """Reports that a stage's part of the initial weights is on every shard."""

    requester: Requester
    """The reporting stage."""


@dataclass(frozen=True, slots=True)
class ReportStagedRequest:
    """Reports that a stage's part of a wave is on every shard."""

    requester: Requester
    """The reporting stage."""
    wave: Wave
    """The wave."""
    blocks: Blocks
    """The minibatches of the wave in order, with their samples; from the first stage only. Empty for an empty wave."""
    segment: Clock
    """Start clock of the segment in which the stage works: a barrier may have dropped an empty wave, and a late copy of
    its report must not count for the wave with that number in the next segment.
    """
    squares: dict[int, float] = field(default_factory=dict, hash=False)
    """Layer of the stage → squared norm of its gradients in the wave, where norms decide what freezes; else empty."""


@dataclass(frozen=True, slots=True)
class HoldClockRequest:
    """Selects and holds the clock of a switch point. `ClockNotPublished`: retry later."""

    requester: Requester
    """The virtual worker's first stage."""
    switch: int
    """k, the index of the switch point at minibatch k·N."""


@dataclass(frozen=True, slots=True)
class HeldClock:
    """The clock of a switch point."""

    clock: Clock
    """The clock to use."""
    barrier: Clock
    """The next barrier: no minibatch beyond it may start."""
    moves: int = 0
    """The number of moves of layers that are announced in this segment: no minibatch may start before they are read."""


@dataclass(frozen=True, slots=True)
class ReportPreparedRequest:
    """Reports that a stage is prepared for a move of layers without a barrier, or cannot be. Idempotent."""

    requester: Requester
    """The stage."""
    index: int
    """Of the record that has asked for it."""
    can: bool
    """Whether it is prepared."""


@dataclass(frozen=True, slots=True)
class GetProgressRequest:
    """Requests the progress at the start of the current segment."""

    requester: Requester
    """The requesting stage."""


@dataclass(frozen=True, slots=True)
class ShareMemoryRequest:
    """Requests a segment of shared memory for the chunks of one kind of call (docs/semantics/shared-memory.md)."""

    requester: Requester
    """The requesting stage."""
    call: str
    """`Push` or `Pull`."""


@dataclass(frozen=True, slots=True)
class ReportCheckpointRequest:
    """Reports a stage's part of a checkpoint, or why it could not be written."""

    requester: Requester
    """The reporting stage."""
    clock: Clock
    """Clock of the barrier."""
    files: tuple[CheckpointFile, ...] = ()
    """The files it wrote."""
    failure: Sentence = ""
    """Why the part could not be written, as a sentence; empty on success."""


@dataclass(frozen=True, slots=True)
class ReportShardCheckpointRequest:
    """Reports a shard's part of a checkpoint, or why it could not be written."""

    job_id: JobId
    """Job."""
    term: Term
    """Version of plan and membership."""
    shard: ShardIndex
    """Index of the shard."""
    clock: Clock
    """Clock of the barrier."""
    files: tuple[CheckpointFile, ...] = ()
    """The files it wrote."""
    failure: Sentence = ""
    """Why the part could not be written, as a sentence; empty on success."""


@dataclass(frozen=True, slots=True)
class CheckpointParts:
    """Progress of a checkpoint."""

    complete: bool
    """Whether every part is there, which completes the checkpoint."""


@dataclass(frozen=True, slots=True)
class FollowLogRequest:
    """Streams the decision log from a record on; the server ends the stream periodically, and the client reopens it."""

    job_id: JobId
    """Job."""
    term: Term
    """Version of plan and membership."""
    start: int
    """First record wanted; -1: the newest that begins a segment."""
    gathered: bool = False
    """Commits may be delayed by a second, or longer with many virtual workers, until a record that a stage acts on, and
    are left out where a publication implies them: fewer and shorter messages for observers."""
    requester: Requester | None = None
    """The following stage; absent for a shard or an agent."""


@dataclass(frozen=True, slots=True)
class LogRecords:
    """Records of the decision log."""

    records: tuple[Record, ...]
    """In order; at least one."""
    acknowledge_later: bool = False
    """No clock waits for a shard to acknowledge these records: it acknowledges them together with later ones."""


@dataclass(frozen=True, slots=True)
class AcknowledgeRequest:
    """Acknowledges that a shard has executed records."""

    job_id: JobId
    """Job."""
    term: Term
    """Version of plan and membership."""
    shard: ShardIndex
    """Index of the shard."""
    num_records: int
    """Number of records executed."""
    durable: int | None = None
    """Number of records it will not request again after a restart; absent: none."""
    applied: bool = False
    """What is staged on it now would be lost with its process: its disk has failed, or it has none."""


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
    is_repeatable=False,  # without a name, each could register another new member
    max_request_bytes=SMALL_BYTES,
)
MOVE_WORKER = Unary(
    service=COORDINATOR_SERVICE,
    name="MoveWorker",
    request=MoveWorkerRequest,
    reply=MovingWorker,
    access=_OPERATOR,
    deadline_seconds=CALL_SECONDS,
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
FETCH_CODE = Unary(
    service=COORDINATOR_SERVICE,
    name="FetchCode",
    request=FetchCodeRequest,
    reply=CodeArchive,
    access=_AGENT,
    deadline_seconds=CALL_SECONDS,
    awaited="the code of a job",
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
REPORT_PREPARED = Unary(
    service=SHARD_SERVICE,
    name="ReportPrepared",
    request=ReportPreparedRequest,
    reply=type(None),
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
MOVE = Unary(
    service=SHARD_SERVICE,
    name="Move",
    request=MoveRequest,
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
    is_order=True,  # the caller is about to lead the run
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
SHARE_MEMORY = Unary(
    service=SHARD_SERVICE,
    name="ShareMemory",
    request=ShareMemoryRequest,
    reply=MemoryOffer,
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
    access={
        Role.STAGE: access.follower,
        Role.PARAMETER_SERVER: access.following_shard,
        Role.AGENT: access.following_agent,
    },
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
    """Announced size of slices, not yet validated."""
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
    needs_room=True,  # they are assembled in a buffer of that size
)

#: All calls of hetpipe's own services except links: a link between stages is one stream that lives as long as they do,
#: opened and guarded by its two ends (`wire.link_server`).
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
    MOVE_WORKER,
    DEPART,
    GET_STATUS,
    WATCH_JOB,
    LIST_MEMBERS,
    GET_CLOCKS,
    WATCH_CLOCKS,
    MEASURE_LINKS,
    CERTIFY_STAGE,
    FETCH_CODE,
    CONFIGURE,
    RELEASE,
    JOIN,
    REPORT_INITIALIZED,
    REPORT_STAGED,
    HOLD_CLOCK,
    REPORT_PREPARED,
    REQUEST_BARRIER,
    EVICT,
    DRAIN,
    MOVE,
    ADMIT,
    KEEP_RUN,
    DESCRIBE_RUN,
    GET_SHARD_CLOCKS,
    GET_PROGRESS,
    SHARE_MEMORY,
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

#: Full method name → allowed callers, including gRPC's own services.
ACCESS: Final[Mapping[str, Rule]] = {
    **{call.path: call.access for call in CALLS},
    "/grpc.health.v1.Health/Check": _EVERY_SERVICE,
    "/grpc.health.v1.Health/Watch": _EVERY_SERVICE,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": _OPERATOR,
}

#: Full method name → its row.
BY_PATH: Final[Mapping[str, Call]] = {call.path: call for call in CALLS}
