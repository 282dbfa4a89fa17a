"""What goes into a job's machine and what comes out: inputs are facts, instructions are orders to the shell."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hetpipe.coordinator.inspections import Inspected
from hetpipe.coordinator.planning import PlannedRun
from hetpipe.coordinator.requirements import ClusterView
from hetpipe.spec.commands import ChildExit, Command, InspectionResult, InspectionStep, StageNews
from hetpipe.spec.events import JobEvent, StopMode
from hetpipe.spec.ids import AgentId, Incarnation, Term, VirtualWorkerIndex
from hetpipe.spec.members import MemberId, MemberInfo
from hetpipe.spec.plan import Plan
from hetpipe.spec.run import AgentInfo, ClockSnapshot
from hetpipe.spec.sync import DataSpec, Progress


@dataclass(frozen=True, slots=True)
class ClusterSeen:
    """What is free for a job that waits for members."""

    cluster: ClusterView


@dataclass(frozen=True, slots=True)
class Prepared:
    """The plan is made, written down, and every shard is configured with it."""

    run: PlannedRun
    data: DataSpec
    start: Progress
    """Where the run starts."""

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
class Evicted:
    """The clock shard counts a life of a virtual worker no more."""

    vw: VirtualWorkerIndex
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class Admitted:
    """The clock shard expects a new life of a virtual worker."""

    vw: VirtualWorkerIndex
    incarnation: Incarnation
    restore: str | None
    """Folder of the newest complete checkpoint of the run, or None before the first."""


@dataclass(frozen=True, slots=True)
class ShardNotAsked:
    """`Evict` or `Admit` failed; whether it had an effect is not known."""

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
class ClocksTold:
    """The clock shard's newest clocks."""

    clocks: ClockSnapshot


@dataclass(frozen=True, slots=True)
class WrappedUp:
    """The shards are released; the last clocks, or None when the clock shard did not tell them."""

    clocks: ClockSnapshot | None


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Input = (
    ClusterSeen
    | InspectionStep
    | InspectionResult
    | Prepared
    | TaskFailed
    | StageNews
    | ChildExit
    | MemberGone
    | MemberSeen
    | Evicted
    | Admitted
    | ShardNotAsked
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


@dataclass(frozen=True, slots=True)
class AskBarrier:
    """Ask the clock shard for a barrier that ends the run. Only a failure is answered, by `TaskFailed`."""

    term: Term
    clock_shard: MemberInfo


@dataclass(frozen=True, slots=True)
class Evict:
    """Tell the clock shard that a life is over. Answered by `Evicted` or `ShardNotAsked`."""

    vw: VirtualWorkerIndex
    incarnation: Incarnation
    term: Term
    clock_shard: MemberInfo


@dataclass(frozen=True, slots=True)
class Admit:
    """Tell the clock shard of a new life. Answered by `Admitted` or `ShardNotAsked`."""

    vw: VirtualWorkerIndex
    incarnation: Incarnation
    num_stages: int
    term: Term
    clock_shard: MemberInfo


@dataclass(frozen=True, slots=True)
class WrapUp:
    """Fetch the last clocks and release the shards. Answered by `WrappedUp`, whatever happens."""

    shards: tuple[MemberInfo, ...]


Task = Prepare | AskBarrier | Evict | Admit | WrapUp

Instruction = SendCommand | Announce | Task
