"""Everything that a coordinator needs to lead a job that it has never heard of. The clock shard keeps it.

A coordinator, and the store behind it, may be lost with all that they know; the run goes on without them. Whoever leads
next asks the clock shard for the document, and for what has become of it since.
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
    """A job under way: what was asked for, what was planned, and who carries it out."""

    job: dict[str, Any]
    """The validated job, as `Job.model_dump(mode="json")`."""
    submission: Submission
    plan: Plan
    """Of the newest life of every virtual worker."""
    agents: tuple[AgentInfo, ...]
    """With the devices that the job has claimed."""
    shards: tuple[MemberInfo, ...]
    """In index order; shard 0 is the clock shard."""
    emulations: tuple[tuple[StageEmulation, ...], ...]
    """Per virtual worker and stage; empty if nothing is played."""
    data: DataSpec
    start: Progress
    """Where the run began: clock 0, or the barrier of the restored checkpoint."""
    eval_samples: Count | None
    """Samples of an evaluation; None without evaluations."""
    submitted_wall: Seconds
    """When the job was handed in, in seconds since 1970."""
    out: tuple[Annotated[VirtualWorkerIndex, COUNT], ...] = ()
    """Virtual workers that were asked to stay out, in index order."""
    proof: ProofReport | None = None
    """Of the model, before training; None where nobody has told."""


#: What has become of a life: it counts; it will count from the next barrier on; it counts no more.
Standing = Literal["member", "newcomer", "gone"]


@dataclass(frozen=True, slots=True)
class LifeSeen:
    """The newest life of a virtual worker, as the decision log knows it."""

    vw: Annotated[VirtualWorkerIndex, COUNT]
    incarnation: Annotated[Incarnation, COUNT]
    num_stages: Count
    """Its stages; 0 for a life that is gone."""
    standing: Standing
    leaving: bool = False
    """It counts, and is drained: it goes at the next barrier."""


@dataclass(frozen=True, slots=True)
class RunDescription:
    """A job under way, and what has become of it."""

    term: Annotated[Term, COUNT]
    run: RunDocument
    lives: tuple[LifeSeen, ...]
    """In index order."""
    clocks: ClockSnapshot
    reasons: tuple[Name, ...]
    """Why somebody wants the next barrier, besides what was planned: `stop`, `checkpoint`, `join` and so on."""
    is_over: bool
    """Whether the barrier that ends the run is published."""
