"""What goes into a job's machine and what comes out: inputs are facts, instructions are orders to the shell."""

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
    LinkAwaited,
    LinkResult,
    StageNews,
)
from hetpipe.values.conditions import Condition
from hetpipe.values.events import JobEvent, StopMode, Submission
from hetpipe.values.ids import AgentId, Clock, Incarnation, Term, VirtualWorkerIndex
from hetpipe.values.members import MemberId, MemberInfo
from hetpipe.values.plan import Plan, VirtualWorkerPlan
from hetpipe.values.run import AgentInfo, ClockSnapshot, StageEmulation
from hetpipe.values.sync import DataSpec, Progress


@dataclass(frozen=True, slots=True)
class ClusterSeen:
    """What is free for a job that waits for members, and whose turn it is."""

    cluster: ClusterView
    turn: Turn = Turn()


@dataclass(frozen=True, slots=True)
class Prepared:
    """The plan is made, written down, and every shard is configured with it."""

    run: PlannedRun
    data: DataSpec
    start: Progress
    """Where the run starts."""
    submission: Submission | None = None
    """How the job goes on, where that is not as it was submitted: from another checkpoint, in another folder."""

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
    """A membership ended: its lease ran out, it left, or another process took its id."""

    member: MemberId
    sentence: str


@dataclass(frozen=True, slots=True)
class MemberSeen:
    """A process has registered, for the first time or again."""

    info: MemberInfo


@dataclass(frozen=True, slots=True)
class ShardHeard:
    """What a heartbeat of a parameter server of the job says of the job."""

    member: MemberId
    serves: bool
    """Whether it names the job among those that it serves."""
    reason: str = ""
    """Why it serves it no more, if it says so."""


@dataclass(frozen=True, slots=True)
class ConditionsTold:
    """What a process says of the job's safety."""

    source: str
    """The process."""
    conditions: tuple[Condition, ...]
    """The newest state of each that it looks for."""


@dataclass(frozen=True, slots=True)
class EvictAcknowledged:
    """The clock shard counts a life of a virtual worker no more."""

    vw: VirtualWorkerIndex
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class AdmitAcknowledged:
    """The clock shard expects a new life of a virtual worker."""

    vw: VirtualWorkerIndex
    incarnation: Incarnation
    restore: str | None
    """Folder of the newest complete checkpoint of the run, or None before the first."""


@dataclass(frozen=True, slots=True)
class DrainAcknowledged:
    """The clock shard lets a life of a virtual worker go at the next barrier."""

    vw: VirtualWorkerIndex
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class Replanned:
    """What came of planning a virtual worker anew."""

    vw: VirtualWorkerIndex
    incarnation: Incarnation
    """The life that was measured."""
    plan: VirtualWorkerPlan | None
    """The new one; None: the plan that is stays."""
    recut: Recut | None
    """What it promises, if it is there because of that."""
    gain: float | None
    """How much faster the job would be, as a share; None if that was not asked."""
    emulations: tuple[StageEmulation, ...]
    """How the stages of the new plan play their devices; empty if they do not."""


@dataclass(frozen=True, slots=True)
class ShardNotAsked:
    """`Evict`, `Admit` or `Drain` failed; whether it had an effect is not known."""

    vw: VirtualWorkerIndex
    incarnation: Incarnation
    error: str
    """Class name in `hetpipe.errors`, or of a Python exception."""
    sentence: str


@dataclass(frozen=True, slots=True)
class StopAsked:
    """A user wants the job to stop."""

    mode: StopMode


@dataclass(frozen=True, slots=True)
class KeptOut:
    """What became of a `KeepOut`."""

    out: tuple[VirtualWorkerIndex, ...]
    is_kept: bool
    """Else the clock shard could not be told."""


AfterDrain = Literal["out", "again"]
"""Whether a virtual worker that has left stays out, or comes back as soon as its agents are there."""


@dataclass(frozen=True, slots=True)
class DrainAsked:
    """Somebody wants a virtual worker to leave."""

    vw: VirtualWorkerIndex
    then: AfterDrain


@dataclass(frozen=True, slots=True)
class AddAsked:
    """Somebody wants a virtual worker back that has left, or is not started anew."""

    vw: VirtualWorkerIndex


@dataclass(frozen=True, slots=True)
class NewWorker:
    """A virtual worker that the run has not had yet is to join it."""

    plan: VirtualWorkerPlan
    """Its index is the next one."""
    agents: tuple[AgentInfo, ...]
    """Whose devices it takes: these devices alone."""


@dataclass(frozen=True, slots=True)
class AgentDeparts:
    """An agent is about to leave the cluster: it gets no stages any more until it registers again."""

    agent: AgentId


@dataclass(frozen=True, slots=True)
class ClocksTold:
    """The clock shard's newest clocks."""

    clocks: ClockSnapshot


@dataclass(frozen=True, slots=True)
class WrappedUp:
    """The last clocks, or None when the clock shard did not tell them."""

    clocks: ClockSnapshot | None


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Input = (
    ClusterSeen
    | InspectionStep
    | InspectionPhase
    | InspectionResult
    | LinkAwaited
    | LinkResult
    | Prepared
    | TaskFailed
    | StageNews
    | ChildExit
    | MemberGone
    | MemberSeen
    | ShardHeard
    | ConditionsTold
    | EvictAcknowledged
    | AdmitAcknowledged
    | DrainAcknowledged
    | KeptOut
    | ShardNotAsked
    | Replanned
    | DrainAsked
    | AddAsked
    | NewWorker
    | AgentDeparts
    | StopAsked
    | ClocksTold
    | WrappedUp
    | Tick
)


@dataclass(frozen=True, slots=True)
class SendCommand:
    """Queue `command` for an agent."""

    agent: AgentId
    command: Command


@dataclass(frozen=True, slots=True)
class Announce:
    """Tell those who watch the job."""

    event: JobEvent


@dataclass(frozen=True, slots=True)
class Prepare:
    """Take a term, plan, write the plan down, configure the shards. Answered by `Prepared` or `TaskFailed`."""

    inspected: Inspected
    agents: tuple[AgentInfo, ...]
    """With the claimed devices alone."""
    shards: tuple[MemberInfo, ...]
    """In index order."""
    goes_back: bool = False
    """The job has trained, and nobody knows how far: it goes on from its newest checkpoint, as after a rewind."""
    above: Term = Term(0)
    """Highest term of a process that was still there; the new one is above it."""


@dataclass(frozen=True, slots=True)
class Rewind:
    """The same once more, from the newest checkpoint of the run. Answered by `Prepared` or `TaskFailed`.

    The plan stays, but for its term; so do the agents.
    """

    number: int
    """Of the folder in which the run goes on."""
    before: Prepared
    agents: tuple[AgentInfo, ...]
    shards: tuple[MemberInfo, ...]
    """As they are now, in index order."""
    eval_samples: int | None
    """Samples of an evaluation; None: nobody has said."""


@dataclass(frozen=True, slots=True)
class AskBarrier:
    """Ask the clock shard for a barrier that ends the run. Only a failure is answered, by `TaskFailed`."""

    term: Term
    clock_shard: MemberInfo


@dataclass(frozen=True, slots=True)
class Evict:
    """Tell the clock shard that a life is over. Answered by `EvictAcknowledged` or `ShardNotAsked`."""

    vw: VirtualWorkerIndex
    incarnation: Incarnation
    term: Term
    clock_shard: MemberInfo


@dataclass(frozen=True, slots=True)
class NewPlan:
    """By what a run goes on from the next life of a virtual worker on."""

    plan: Plan
    agents: tuple[AgentInfo, ...]
    """Those of that virtual worker, with the devices of its stages alone."""
    emulations: tuple[tuple[StageEmulation, ...], ...]
    left_at: Clock | None
    """Where its last life left, with a checkpoint which the new one waits for: it has its optimizer state."""
    awaited_until: float
    """Monotonic second from which on an older one has to do."""


@dataclass(frozen=True, slots=True)
class Admit:
    """Tell the clock shard of a new life. Answered by `AdmitAcknowledged` or `ShardNotAsked`."""

    vw: VirtualWorkerIndex
    incarnation: Incarnation
    num_stages: int
    term: Term
    clock_shard: MemberInfo
    replan: NewPlan | None = None
    """By what it is to compute, where that is another plan than that of its last life."""


@dataclass(frozen=True, slots=True)
class Replan:
    """Plan a virtual worker anew, and write the plan down if there is a better one. Answered by `Replanned`."""

    vw: VirtualWorkerIndex
    incarnation: Incarnation
    plan: Plan
    basis: Basis
    seconds: tuple[float, ...]
    """What each of its stages takes for a minibatch."""
    healthy: tuple[float, ...]
    """What it would if its device were not off."""
    others: tuple[float, ...]
    """Minibatches per second of all other virtual workers."""
    staleness: int | None
    least_gain: float
    """As a share; with less nothing happens."""
    emulations: tuple[StageEmulation, ...]
    gone: frozenset[AgentId] = frozenset()
    """Agents without which it is to go on, whatever that gains; nothing was measured then."""


@dataclass(frozen=True, slots=True)
class SettleReplan:
    """The new plan of a virtual worker is in force, or it was given up: clear up. Not answered."""

    vw: VirtualWorkerIndex
    incarnation: Incarnation
    is_in_force: bool


@dataclass(frozen=True, slots=True)
class Drain:
    """Have the clock shard let a life go at the next barrier. Answered by `DrainAcknowledged` or `ShardNotAsked`."""

    vw: VirtualWorkerIndex
    incarnation: Incarnation
    term: Term
    clock_shard: MemberInfo


@dataclass(frozen=True, slots=True)
class KeepOut:
    """Have the clock shard keep who was asked to stay out. Answered by `KeptOut`."""

    out: tuple[VirtualWorkerIndex, ...]
    """In index order."""
    term: Term
    clock_shard: MemberInfo


@dataclass(frozen=True, slots=True)
class WrapUp:
    """Fetch the last clocks. Answered by `WrappedUp`, whatever happens."""

    shards: tuple[MemberInfo, ...]


@dataclass(frozen=True, slots=True)
class Release:
    """Have the shards forget the job. Not answered."""

    shards: tuple[MemberInfo, ...]


Task = Prepare | Rewind | AskBarrier | Evict | Admit | Drain | KeepOut | Replan | SettleReplan | WrapUp | Release

Instruction = SendCommand | Announce | Task
