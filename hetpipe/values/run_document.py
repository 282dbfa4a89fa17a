"""The run document: all that a coordinator needs to lead a job it has no record of. Stored by the clock shard.

A coordinator and its store may be lost with all their data while the run continues. The next leader reads the document,
and the state of the run since, from the clock shard.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from hetpipe.values.bounds import COUNT, Count, Name, Seconds
from hetpipe.values.events import Submission
from hetpipe.values.ids import Incarnation, Term, VirtualWorkerIndex
from hetpipe.values.members import MemberInfo
from hetpipe.values.plan import Plan, ProofReport
from hetpipe.values.run import AgentInfo, ClockSnapshot, StageEmulation
from hetpipe.values.sync import DataSpec, Progress


@dataclass(frozen=True, slots=True)
class RunDocument:
    """A running job: its specification, its plan, and the processes that run it."""

    job: dict[str, Any]
    """The validated job, as `Job.model_dump(mode="json")`."""
    submission: Submission
    plan: Plan
    """Of the newest incarnation of every virtual worker."""
    agents: tuple[AgentInfo, ...]
    """With the devices claimed by the job."""
    shards: tuple[MemberInfo, ...]
    """In index order; shard 0 is the clock shard."""
    emulations: tuple[tuple[StageEmulation, ...], ...]
    """Per virtual worker and stage; empty without emulation."""
    data: DataSpec
    start: Progress
    """Where the run began: clock 0, or the barrier of the restored checkpoint."""
    eval_samples: Count | None
    """Samples of an evaluation; None without evaluations."""
    submitted_wall: Seconds
    """Submission time, in seconds since 1970."""
    out: tuple[Annotated[VirtualWorkerIndex, COUNT], ...] = ()
    """Virtual workers drained on request, in index order."""
    proof: ProofReport | None = None
    """Proof of the model, before training; None if unknown."""


#: State of an incarnation: it counts; it will count from the next barrier on; it no longer counts.
LifeStanding = Literal["member", "newcomer", "gone"]


@dataclass(frozen=True, slots=True)
class LifeSeen:
    """The newest incarnation of a virtual worker, according to the decision log."""

    vw: Annotated[VirtualWorkerIndex, COUNT]
    incarnation: Annotated[Incarnation, COUNT]
    num_stages: Count
    """Its stages; 0 for an incarnation that is gone."""
    standing: LifeStanding
    leaving: bool = False
    """It counts and is being drained: it leaves at the next barrier."""


@dataclass(frozen=True, slots=True)
class RunDescription:
    """A running job and its current state."""

    term: Annotated[Term, COUNT]
    run: RunDocument
    lives: tuple[LifeSeen, ...]
    """In index order."""
    clocks: ClockSnapshot
    reasons: tuple[Name, ...]
    """Reasons for the next barrier other than the planned ones: `stop`, `checkpoint`, `join` and so on."""
    is_over: bool
    """Whether the barrier that ends the run is published."""
