"""The parts of a small world: virtual workers, shards and messages, and what makes two of them alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hetpipe.decide.sync.division import Block
from hetpipe.decide.sync.instructions import Apply, Close, Instruction
from hetpipe.decide.sync.log_view import LogView
from hetpipe.decide.sync.records import SegmentRecord
from hetpipe.decide.sync.shard_state import ShardState
from hetpipe.values.ids import Incarnation, VirtualWorkerIndex
from hetpipe.values.requests import PushHeader
from tests.decide.sync.scenario import Scenario
from tests.simulation.freezing import freeze_object
from tests.simulation.job import Job
from tests.simulation.scheduler import Violation

#: What copies of a shard's state share, and what does not tell two of them apart.
SHARD_SHARED = frozenset({"job_id", "term", "slices", "slice_index", "_founders"})
_SHARD_LEFT_OUT = SHARD_SHARED | {"_closed"}

#: The same of the decision log.
LOG_SHARED = frozenset({"config"})
LOG_LEFT_OUT = frozenset({"config", "records", "_used", "segment_samples", "max_distance", "slowest"})
#: What each kind of step changes.
TOUCHES: dict[str, frozenset[str]] = {
    "follow": frozenset({"log", "shard"}),
    "join": frozenset({"log", "shards", "worker"}),
    "read": frozenset({"worker"}),
    "choose": frozenset({"log", "worker"}),
    "pull": frozenset({"worker"}),
    "push": frozenset({"shard", "worker"}),
    "report": frozenset({"log", "worker"}),
    "evict": frozenset({"log"}),
    "drain": frozenset({"log"}),
    "admit": frozenset({"log", "worker"}),
    "crash": frozenset({"worker"}),
    "restart": frozenset({"shard"}),
    "again": frozenset({"log", "shards"}),
}


@dataclass(slots=True)
class Worker:
    """One virtual worker: what its one stage knows."""

    vw: VirtualWorkerIndex
    view: LogView
    incarnation: Incarnation = Incarnation(0)
    is_alive: bool = True
    is_done: bool = False
    has_left: bool = False
    has_joined: bool = False
    position: int = 0
    segment: SegmentRecord | None = None
    blocks: tuple[Block, ...] = ()
    #: The wave it works on, the clock it chose for it, and the shards that have it.
    wave: int = 0
    clock: int | None = None
    is_computed: bool = False
    pushed: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Message:
    """Something that was sent and may arrive again: a push to a shard, or a report."""

    header: PushHeader
    shard: int | None
    blocks: tuple[Block, ...] = ()
    segment: int = 0


@dataclass(slots=True)
class Shard:
    """One shard: its state, and what its process has besides."""

    state: ShardState
    #: The pushes on its disk.
    pushes: dict[PushHeader, None] = field(default_factory=dict)
    #: Records that there were when it was restarted: it serves nobody before it has read them.
    serves_from: int = 0
    #: What is added to the clock being built.
    added: frozenset[tuple[int, int]] = frozenset()
    #: Newest clock ever completed.
    built: int = -1


def end_of(worker: Worker) -> int | None:
    """Where the segment of a worker ends, as far as it has read."""
    newest, barrier = worker.view.segment, worker.view.barrier
    if worker.segment is None or newest is None:
        return None
    if newest.index > worker.segment.index:
        return newest.start
    return None if barrier is None or barrier.clock <= worker.segment.start else barrier.clock


def small_job(staleness: int, *, samples: int, deterministic: bool) -> Job:
    """Three virtual workers of one stage, two shards."""
    scenario = Scenario(
        num_stages=(1, 1, 1),
        num_shards=2,
        n=1,
        d=staleness,
        deterministic=deterministic,
        num_samples=samples,
        batch_size=1,
        epochs=1,
        total_minibatches=None,
        every=None,
    )
    return Job(scenario, fsync=False)


def forget_pushes(shard: Shard) -> None:
    """Delete what a restart would not need."""
    oldest = min(shard.state.alive, default=-1)
    for header in [h for h in shard.pushes if oldest >= 0 and (h.wave is None or h.wave < oldest)]:
        del shard.pushes[header]


def carry_out(
    index: int,
    shard: Shard,
    instructions: Sequence[Instruction],
    committed: Mapping[int, frozenset[tuple[int, int]]],
) -> None:
    """Do what a shard's state says; `committed` are the waves that count: wave → who has committed it.

    Raises:
        Violation: a wave is added twice, or a clock completed that lacks some.
    """
    for instruction in instructions:
        if isinstance(instruction, Apply) and not instruction.is_empty:
            vw, incarnation, _ = instruction.key
            if (vw, incarnation) in shard.added:
                raise Violation(f"P1: {instruction} a second time on shard {index}")
            shard.added |= {(vw, incarnation)}
        elif isinstance(instruction, Close):
            wanted = committed.get(instruction.clock - 1, frozenset())
            if shard.added != wanted:
                raise Violation(f"P3: w^({instruction.clock}) of shard {index} adds {shard.added}, not {wanted}")
            shard.added = frozenset()
    shard.built = max(shard.built, shard.state.built)


def freeze_shard(shard: Shard) -> object:
    state = shard.state
    is_behind = shard.serves_from > state.followed
    return (freeze_object(state, _SHARD_LEFT_OUT), frozenset(shard.pushes), is_behind, shard.added)


def freeze_worker(worker: Worker) -> object:
    names = (name for name in Worker.__slots__ if name not in {"view", "segment"})
    start = None if worker.segment is None else worker.segment.index
    return (tuple(getattr(worker, name) for name in names), start, freeze_object(worker.view))
