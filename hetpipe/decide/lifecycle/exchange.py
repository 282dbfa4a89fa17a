"""Inputs and outputs of a job's state machine: facts, and instructions to the shell."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hetpipe.decide.elastic.replanning import Basis, Recut
from hetpipe.decide.lifecycle.inspections import Inspected
from hetpipe.decide.lifecycle.job_queue import ClusterView, Turn
from hetpipe.decide.lifecycle.planning import PlannedRun
from hetpipe.values.commands import (
    ChildExit,
    Command,
    InspectionPhase,
    InspectionResult,
    InspectionStep,
    KeyedStageReport,
    LinkAwaited,
    LinkResult,
)
from hetpipe.values.conditions import Condition
from hetpipe.values.events import JobEvent, StopMode, Submission
from hetpipe.values.ids import AgentId, Clock, Incarnation, Term, VirtualWorkerIndex
from hetpipe.values.members import MemberId, MemberInfo
from hetpipe.values.plan import Plan, VirtualWorkerPlan
from hetpipe.values.run import AgentInfo, ClockSnapshot, StageEmulation
from hetpipe.values.sync import DataSpec, PlanMove, Progress


@dataclass(frozen=True, slots=True)
class ResourcesOffered:
    """Free resources for a job waiting for members, and its turn in the queue."""

    cluster: ClusterView
    turn: Turn = Turn()


@dataclass(frozen=True, slots=True)
class Prepared:
    """The plan is computed and stored, and every shard is configured with it."""

    run: PlannedRun
    data: DataSpec
    start: Progress
    """Progress at the start of the run."""
    submission: Submission | None = None
    """Changed submission, if the job continues from another checkpoint in another folder."""

    @property
    def plan(self) -> Plan:
        """The plan of the run."""
        return self.run.plan


@dataclass(frozen=True, slots=True)
class TaskFailed:
    """A task of the shell failed."""

    task: Literal["prepare", "barrier"]
    error: str
    """Class name in `hetpipe.errors`, or of a Python exception."""
    sentence: str
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class MemberGone:
    """A membership ended: its lease expired, it left, or another process took its id."""

    member: MemberId
    sentence: str


@dataclass(frozen=True, slots=True)
class MemberRegistered:
    """A process has registered, for the first time or again."""

    info: MemberInfo


@dataclass(frozen=True, slots=True)
class ShardHeartbeat:
    """Status of the job in a heartbeat of one of its parameter servers."""

    member: MemberId
    serves: bool
    """Whether it lists the job among those it serves."""
    reason: str = ""
    """Why it no longer serves it, if reported."""


@dataclass(frozen=True, slots=True)
class ConditionsReported:
    """A process's report of the job's conditions."""

    source: str
    """Name of the reporting process."""
    conditions: tuple[Condition, ...]
    """The newest state of each condition that it monitors."""


@dataclass(frozen=True, slots=True)
class EvictAcknowledged:
    """The clock shard has evicted an incarnation of a virtual worker."""

    vw: VirtualWorkerIndex
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class AdmitAcknowledged:
    """The clock shard expects a new incarnation of a virtual worker."""

    vw: VirtualWorkerIndex
    incarnation: Incarnation
    restore: str | None
    """Folder of the newest complete checkpoint of the run; None before the first."""


@dataclass(frozen=True, slots=True)
class DrainAcknowledged:
    """The clock shard will let an incarnation of a virtual worker leave at the next barrier."""

    vw: VirtualWorkerIndex
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class Stay:
    """Why the layers of a virtual worker stay where they are."""

    stages: tuple[int, ...]
    """Layers of each stage by the best cut, or by the one that was requested; empty: none fits in memory."""
    predicted_gain: float | None
    """Speed-up of the job by it, as a fraction; None: there is no cut."""
    reason: str


@dataclass(frozen=True, slots=True)
class Replanned:
    """Result of replanning a virtual worker."""

    vw: VirtualWorkerIndex
    incarnation: Incarnation
    """The measured incarnation."""
    plan: VirtualWorkerPlan | None
    """The new plan; None to keep the current plan."""
    recut: Recut | None
    """The recut on which it is based, if any."""
    gain: float | None
    """Speed-up of the job, as a fraction; None if not requested."""
    emulations: tuple[StageEmulation, ...]
    """Emulations of the stages of the new plan; empty if there are none."""
    stay: Stay | None = None
    """Why its layers stay where they are; None if they move, or if nothing was found out."""


@dataclass(frozen=True, slots=True)
class ShardCallFailed:
    """`Evict`, `Admit` or `Drain` failed, but may have taken effect."""

    vw: VirtualWorkerIndex
    incarnation: Incarnation
    error: str
    """Class name in `hetpipe.errors`, or of a Python exception."""
    sentence: str


@dataclass(frozen=True, slots=True)
class MoveAnswered:
    """Answer to a `MoveLayers`."""

    vw: VirtualWorkerIndex
    incarnation: Incarnation
    outcome: Literal["accepted", "refused", "unreachable"]
    """`unreachable`: it may have been accepted."""


@dataclass(frozen=True, slots=True)
class MoveRequested:
    """An operator asks for another cut of a virtual worker."""

    vw: VirtualWorkerIndex
    bounds: tuple[int, ...]
    """Stage k has the layers [bounds[k], bounds[k + 1])."""


@dataclass(frozen=True, slots=True)
class StopRequested:
    """A user requests that the job stop."""

    mode: StopMode


@dataclass(frozen=True, slots=True)
class DrainedPersisted:
    """Result of a `PersistDrained`."""

    out: tuple[VirtualWorkerIndex, ...]
    is_kept: bool
    """Reason of a failed call."""


AfterDrain = Literal["out", "again"]
"""Whether a virtual worker that has left stays out, or restarts once its agents are available."""


@dataclass(frozen=True, slots=True)
class DrainRequested:
    """A virtual worker is to be drained."""

    vw: VirtualWorkerIndex
    then: AfterDrain


@dataclass(frozen=True, slots=True)
class AddRequested:
    """A virtual worker that has left, or is not being restarted, is to be restarted."""

    vw: VirtualWorkerIndex


@dataclass(frozen=True, slots=True)
class NewWorker:
    """An additional virtual worker is to join the run."""

    plan: VirtualWorkerPlan
    """Its index is the next one."""
    agents: tuple[AgentInfo, ...]
    """The agents with the devices it uses, and no others."""


@dataclass(frozen=True, slots=True)
class AgentDeparts:
    """An agent is about to leave the cluster: it gets no stages until it registers again."""

    agent: AgentId


@dataclass(frozen=True, slots=True)
class ClocksReported:
    """The newest clocks of the clock shard."""

    clocks: ClockSnapshot


@dataclass(frozen=True, slots=True)
class FinalClocks:
    """The final clocks; None if the clock shard did not report them."""

    clocks: ClockSnapshot | None


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Input = (
    ResourcesOffered
    | InspectionStep
    | InspectionPhase
    | InspectionResult
    | LinkAwaited
    | LinkResult
    | Prepared
    | TaskFailed
    | KeyedStageReport
    | ChildExit
    | MemberGone
    | MemberRegistered
    | ShardHeartbeat
    | ConditionsReported
    | EvictAcknowledged
    | AdmitAcknowledged
    | DrainAcknowledged
    | DrainedPersisted
    | ShardCallFailed
    | Replanned
    | MoveAnswered
    | MoveRequested
    | DrainRequested
    | AddRequested
    | NewWorker
    | AgentDeparts
    | StopRequested
    | ClocksReported
    | FinalClocks
    | Tick
)


@dataclass(frozen=True, slots=True)
class SendCommand:
    """Queue `command` for an agent."""

    agent: AgentId
    command: Command


@dataclass(frozen=True, slots=True)
class Announce:
    """Notify followers of the job."""

    event: JobEvent


@dataclass(frozen=True, slots=True)
class Prepare:
    """Allocate a term, plan, store the plan, configure the shards. Answered by `Prepared` or `TaskFailed`."""

    inspected: Inspected
    agents: tuple[AgentInfo, ...]
    """With the claimed devices only."""
    shards: tuple[MemberInfo, ...]
    """In index order."""
    goes_back: bool = False
    """The job has trained, but its progress is unknown: it continues from its newest checkpoint, as after a rewind."""
    above: Term = Term(0)
    """Highest term of processes that may still exist; the new term is above it."""


@dataclass(frozen=True, slots=True)
class Rewind:
    """Prepare again, from the newest checkpoint of the run. Answered by `Prepared` or `TaskFailed`.

    The plan and the agents are the same, except for the term.
    """

    number: int
    """Number of the folder in which the run continues."""
    before: Prepared
    agents: tuple[AgentInfo, ...]
    shards: tuple[MemberInfo, ...]
    """Current shards, in index order."""
    eval_samples: int | None
    """Samples of an evaluation; None if unknown."""


@dataclass(frozen=True, slots=True)
class RequestBarrier:
    """Request a barrier that ends the run from the clock shard. Only a failure is answered, by `TaskFailed`."""

    term: Term
    clock_shard: MemberInfo


@dataclass(frozen=True, slots=True)
class Evict:
    """Evict an incarnation at the clock shard. Answered by `EvictAcknowledged` or `ShardCallFailed`."""

    vw: VirtualWorkerIndex
    incarnation: Incarnation
    term: Term
    clock_shard: MemberInfo


@dataclass(frozen=True, slots=True)
class NewPlan:
    """The plan used from the next incarnation of a virtual worker on."""

    plan: Plan
    agents: tuple[AgentInfo, ...]
    """Agents of that virtual worker, with the devices of its stages only."""
    emulations: tuple[tuple[StageEmulation, ...], ...]
    left_at: Clock | None
    """Barrier at which its last incarnation left, with the checkpoint that contains its optimizer state."""
    awaited_until: float
    """Monotonic second at which an older checkpoint is used instead."""


@dataclass(frozen=True, slots=True)
class Admit:
    """Admit a new incarnation at the clock shard. Answered by `AdmitAcknowledged` or `ShardCallFailed`."""

    vw: VirtualWorkerIndex
    incarnation: Incarnation
    num_stages: int
    term: Term
    clock_shard: MemberInfo
    replan: NewPlan | None = None
    """Its plan, if different from that of its last incarnation."""
    minibatches_per_wave: int | None = None
    """Its N_v; None: that of the job."""
    bounds: tuple[int, ...] = ()
    """The cut with which its processes start: stage k has the layers [bounds[k], bounds[k + 1])."""


@dataclass(frozen=True, slots=True)
class Replan:
    """Replan a virtual worker; store the plan, if it needs new processes. Answered by `Replanned`."""

    vw: VirtualWorkerIndex
    incarnation: Incarnation
    plan: Plan
    basis: Basis
    seconds: tuple[float, ...]
    """Measured time of each of its stages per minibatch."""
    healthy: tuple[float, ...]
    """Times on unimpaired devices."""
    others: tuple[float, ...]
    """Minibatches per second of all other virtual workers."""
    staleness: int | None
    least_gain: float
    """Minimum gain, as a fraction; below it nothing changes."""
    emulations: tuple[StageEmulation, ...]
    gone: frozenset[AgentId] = frozenset()
    """Lost agents that must be replaced, whatever the gain; nothing was measured then."""
    clock: Clock = Clock(0)
    """The newest one."""


@dataclass(frozen=True, slots=True)
class MoveLayers:
    """Move layers of a virtual worker at the next barrier. Answered by `MoveAnswered`."""

    vw: VirtualWorkerIndex
    move: PlanMove
    term: Term
    clock_shard: MemberInfo


@dataclass(frozen=True, slots=True)
class FileJudgement:
    """Add what a move has gained to the decisions of the run. Not answered."""

    vw: VirtualWorkerIndex
    version: int
    """The plan version that it has made."""
    measured_gain: float | None
    sentence: str


@dataclass(frozen=True, slots=True)
class FileStay:
    """Add to the decisions of the run that layers stay where they are. Not answered."""

    vw: VirtualWorkerIndex
    clock: Clock
    """The newest one."""
    by: str
    """What wanted them to move."""
    stay: Stay
    was_requested: bool = False
    """Whether the clock shard was asked to move them, so that they may have moved unheard; then they did not stay."""


@dataclass(frozen=True, slots=True)
class SettleReplan:
    """Clean up after a new plan of a virtual worker came into force or was abandoned. Not answered."""

    vw: VirtualWorkerIndex
    incarnation: Incarnation
    is_in_force: bool


@dataclass(frozen=True, slots=True)
class Drain:
    """Drain an incarnation at the clock shard. Answered by `DrainAcknowledged` or `ShardCallFailed`."""

    vw: VirtualWorkerIndex
    incarnation: Incarnation
    term: Term
    clock_shard: MemberInfo


@dataclass(frozen=True, slots=True)
class PersistDrained:
    """Persist the set of drained virtual workers at the clock shard. Answered by `DrainedPersisted`."""

    out: tuple[VirtualWorkerIndex, ...]
    """In index order."""
    term: Term
    clock_shard: MemberInfo


@dataclass(frozen=True, slots=True)
class FetchClocks:
    """Fetch the final clocks. Always answered by `FinalClocks`."""

    shards: tuple[MemberInfo, ...]


@dataclass(frozen=True, slots=True)
class Release:
    """Release the job on the shards. Not answered."""

    shards: tuple[MemberInfo, ...]


Task = (
    Prepare
    | Rewind
    | RequestBarrier
    | Evict
    | Admit
    | Drain
    | PersistDrained
    | Replan
    | SettleReplan
    | MoveLayers
    | FileJudgement
    | FileStay
    | FetchClocks
    | Release
)

Instruction = SendCommand | Announce | Task
