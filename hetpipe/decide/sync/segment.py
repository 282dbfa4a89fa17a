"""Segments between two barriers: end, reasons, and data division (`wsp.md` §5).

A planned barrier is known before its waves start: it is the earliest of the next checkpoint, the next change of the
job's script, the end of the epoch and the end of the run. Everything here is a function of a `Progress`, the state of a
run at a barrier.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from hetpipe.decide.sync.division import Block, at_home, deal, empty_bitmap, in_order, shuffled, unused, with_used
from hetpipe.values.barrier_reasons import BarrierReasons
from hetpipe.values.freezing import Freezing
from hetpipe.values.ids import Clock, VirtualWorkerIndex
from hetpipe.values.sync import DataSpec, MemberChange, Progress, WaveChange, is_absent

CHECKPOINT = "checkpoint"
EPOCH = "epoch"
END = "end"
STOP = "stop"
EVICT = "evict"
JOIN = "join"
DRAIN = "drain"
PLAN = "plan"

#: Reasons whose barrier has a checkpoint, and those that end the run. A drained virtual worker has a part in the
#: checkpoint of the barrier at which it leaves, so that it can rejoin with its optimizer state.
CHECKPOINTS = frozenset({CHECKPOINT, EPOCH, END, STOP, DRAIN})
ENDS = frozenset({END, STOP})


def ends_run(reasons: Collection[str]) -> bool:
    """Whether a barrier with these reasons ends the run."""
    return not ENDS.isdisjoint(reasons)


@dataclass(frozen=True, slots=True)
class Segment:
    """The clocks [start, end) between two barriers, and the reasons of the second one."""

    start: Clock
    end: Clock
    reasons: tuple[str, ...]
    epoch: int

    @property
    def reason(self) -> str:
        """The reasons as one word, for records and messages: `checkpoint+epoch+end`."""
        return str(BarrierReasons(self.reasons))


def first_progress(data: DataSpec) -> Progress:
    """The progress at the start of a run."""
    return Progress(clock=Clock(0), epoch=0, used=empty_bitmap(data.num_samples), minibatches=0, samples=0)


def is_finished(progress: Progress, data: DataSpec) -> bool:
    """Whether nothing is left to train."""
    if data.total_minibatches is not None:
        return progress.minibatches >= data.total_minibatches
    return data.epochs is not None and progress.epoch >= data.epochs


def _remaining(progress: Progress, data: DataSpec) -> int | None:
    return None if data.total_minibatches is None else data.total_minibatches - progress.minibatches


def _num_unused(progress: Progress, data: DataSpec) -> int:
    return data.num_samples - int.from_bytes(progress.used, "little").bit_count()


def plan_segment(
    progress: Progress,
    data: DataSpec,
    *,
    minibatches_in_wave: int,
    checkpoint_every_waves: int | None,
    plan_clocks: Collection[int] = (),
    drop_clocks: Collection[int] = (),
    plan_every_waves: int | None = None,
) -> Segment:
    """The segment that starts at `progress`.

    Args:
        progress: at its start.
        data: what is dealt.
        minibatches_in_wave: Σ N_v over the members: minibatches of one whole wave of all of them.
        checkpoint_every_waves: waves between two checkpoints.
        plan_clocks: clocks at which plans change.
        drop_clocks: those at which virtual workers leave.
        plan_every_waves: waves between two clocks at which they may change.

    >>> data = DataSpec(num_samples=20, batch_size=2, seed=0, epochs=1, total_minibatches=None)
    >>> plan_segment(first_progress(data), data, minibatches_in_wave=4, checkpoint_every_waves=None)
    Segment(start=0, end=3, reasons=('epoch', 'end'), epoch=0)
    >>> plan_segment(first_progress(data), data, minibatches_in_wave=4, checkpoint_every_waves=2)
    Segment(start=0, end=2, reasons=('checkpoint',), epoch=0)
    >>> plan_segment(
    ...     first_progress(data), data, minibatches_in_wave=4, checkpoint_every_waves=2, plan_clocks=(1, 2))
    Segment(start=0, end=1, reasons=('plan',), epoch=0)
    """
    start = progress.clock
    if is_finished(progress, data):
        return Segment(start, start, (END,), progress.epoch)
    blocks = -(-_num_unused(progress, data) // data.batch_size)
    remaining = _remaining(progress, data)
    dealt = blocks if remaining is None else min(blocks, remaining)
    end = start + -(-dealt // minibatches_in_wave)
    reasons: list[str] = []
    if dealt == blocks:
        reasons.append(EPOCH)
    if (remaining is not None and dealt == remaining) or (data.epochs == progress.epoch + 1 and dealt == blocks):
        reasons.append(END)
    due = {
        reason: min((clock for clock in clocks if clock > start), default=end + 1)
        for reason, clocks in ((PLAN, plan_clocks), (DRAIN, drop_clocks))
    }
    if plan_every_waves is not None:
        due[PLAN] = min(due[PLAN], (start // plan_every_waves + 1) * plan_every_waves)
    if checkpoint_every_waves is not None:
        due[CHECKPOINT] = (start // checkpoint_every_waves + 1) * checkpoint_every_waves
    first = min(end, *due.values())
    before = sorted(reason for reason, clock in due.items() if clock == first)
    return Segment(start, Clock(first), (*before, *(reasons if first == end else ())), progress.epoch)


def divide(
    progress: Progress,
    data: DataSpec,
    members: Sequence[VirtualWorkerIndex],
    per_wave: Mapping[VirtualWorkerIndex, int] | None = None,
    *,
    order: Sequence[int] | None = None,
) -> dict[VirtualWorkerIndex, tuple[Block, ...]]:
    """The blocks of every member for the segment that starts at `progress`; block j is minibatch start·N_v + 1 + j.

    Args:
        progress: at its start.
        data: what is dealt.
        members: in index order.
        per_wave: N_v of each member; None: the same for all.
        order: every sample of the epoch in the order that a sampler gives them, which those that are left keep; None:
            they are permuted anew.
    """
    left = unused(progress.used, data.num_samples)
    dealt = (
        shuffled(left, seed=data.seed, epoch=progress.epoch, barrier=progress.clock)
        if order is None
        else in_order(left, order)
    )
    if data.homes:
        dealt = at_home(
            dealt,
            batch_size=data.batch_size,
            per_wave=dict.fromkeys(members, 1) if per_wave is None else {vw: per_wave[vw] for vw in members},
            homes=data.homes,
            seed=data.seed,
            num_samples=data.num_samples,
        )
    return deal(dealt, batch_size=data.batch_size, members=members, limit=_remaining(progress, data), per_wave=per_wave)


def advance(progress: Progress, data: DataSpec, *, clock: Clock, samples: Sequence[int], minibatches: int) -> Progress:
    """The progress at the barrier at `clock`, after `samples` of the epoch were used in `minibatches` minibatches."""
    used = with_used(progress.used, samples)
    after = replace(
        progress,
        clock=clock,
        used=used,
        minibatches=progress.minibatches + minibatches,
        samples=progress.samples + len(samples),
    )
    if _num_unused(after, data) == 0:
        return replace(after, epoch=progress.epoch + 1, used=empty_bitmap(data.num_samples))
    return after


@dataclass(frozen=True, slots=True)
class SegmentLength:
    """Amount of work between two barriers."""

    minibatches: int
    """Per virtual worker, rounded up; with equal N that is the most that one has."""
    samples: int
    """Over all virtual workers."""
    end: Clock = Clock(0)
    """The clock of the second one."""
    frozen_layers: int = 0
    """The first so many layers of the model are frozen."""
    lineup: int = 0
    """F of those who train (`Progress.lineup`)."""


@dataclass(frozen=True, slots=True)
class ScriptedChanges:
    """What a script decides about the division of data, in order of clocks."""

    waves: Sequence[WaveChange] = ()
    members: Sequence[MemberChange] = ()


def planned_lengths(
    progress: Progress,
    data: DataSpec,
    *,
    per_wave: Sequence[int],
    checkpoint_every_waves: int | None,
    plan_clocks: Collection[int] = (),
    scripted: ScriptedChanges = ScriptedChanges(),
    freezing: Freezing | None = None,
) -> Iterator[SegmentLength]:
    """The lengths of `planned_segments`, without dealing any sample; arguments as of that.

    `per_wave` are the N_v of all virtual workers, also of those that `scripted` keeps out. `freezing` is how layers
    freeze: by norms as many as can be.

    >>> data = DataSpec(num_samples=20, batch_size=2, seed=0, epochs=1, total_minibatches=None)
    >>> [(length.minibatches, length.samples) for length in planned_lengths(
    ...     first_progress(data), data, per_wave=[2, 2], checkpoint_every_waves=2)]
    [(4, 16), (1, 4)]
    """
    after, reasons = Clock(-1), tuple[str, ...]()
    while not is_finished(progress, data):
        frozen, lineup = progress.frozen, progress.lineup
        if freezing is not None:
            lineup = frozen if after >= 0 else lineup
            frozen = freezing.foretold(frozen, after=after, upto=progress.clock, epoch=progress.epoch, reasons=reasons)
        waves = _waves_from(progress.clock, lineup, per_wave, scripted, freezing)
        changes = freezing is not None and freezing.lineup(lineup) != freezing.lineup(frozen)
        segment = plan_segment(
            progress,
            data,
            minibatches_in_wave=sum(waves),
            checkpoint_every_waves=checkpoint_every_waves,
            plan_clocks=(*plan_clocks, progress.clock + 1) if changes else plan_clocks,
            plan_every_waves=None if freezing is None else freezing.every_waves,
        )
        after, reasons = progress.clock, segment.reasons
        unread, remaining = _num_unused(progress, data), _remaining(progress, data)
        blocks = -(-unread // data.batch_size)
        dealt = blocks if remaining is None else min(blocks, remaining)
        # Blocks are dealt wave by wave, so those of the segment's waves come first.
        computed = min(dealt, (segment.end - segment.start) * sum(waves))
        samples = min(computed * data.batch_size, unread)
        frozen_layers = 0 if freezing is None else freezing.levels[frozen]
        yield SegmentLength(-(-computed // len(waves)), samples, segment.end, frozen_layers, lineup)
        is_over = samples == unread
        num_used = 0 if is_over else data.num_samples - unread + samples
        progress = Progress(
            segment.end,
            progress.epoch + is_over,
            ((1 << num_used) - 1).to_bytes(len(progress.used), "little"),  # their identity is irrelevant here
            progress.minibatches + computed,
            progress.samples + samples,
            frozen=frozen,
            lineup=lineup,
        )


def _waves_from(
    clock: int, lineup: int, per_wave: Sequence[int], scripted: ScriptedChanges, freezing: Freezing | None
) -> list[int]:
    """N_v of those who train in the segment from `clock` on, those for F = `lineup` if that decides it."""
    decided = None if freezing is None else freezing.lineup(lineup)
    if decided is not None:
        return [decided.minibatches_per_wave] * len(decided.workers)
    change = wave_change_at(scripted.waves, clock)
    present = [vw for vw in range(len(per_wave)) if not is_absent(scripted.members, vw, clock)]
    return [per_wave[vw] if change is None else change.of(VirtualWorkerIndex(vw)) for vw in present]


def wave_change_at(changes: Sequence[WaveChange], clock: int) -> WaveChange | None:
    """The change in effect at a clock, of changes in order of their clocks."""
    return next((change for change in reversed(changes) if change.clock <= clock), None)


def planned_segments(
    progress: Progress,
    data: DataSpec,
    *,
    per_wave: Mapping[VirtualWorkerIndex, int],
    checkpoint_every_waves: int | None,
    plan_clocks: Collection[int] = (),
    scripted: ScriptedChanges = ScriptedChanges(),
    plan_every_waves: int | None = None,
    order_of: Callable[[int], Sequence[int] | None] = lambda _: None,
) -> Iterator[tuple[Segment, dict[VirtualWorkerIndex, tuple[Block, ...]]]]:
    """Every segment of an undisturbed run from `progress` on, with its data division.

    Args:
        progress: at the start of the first one.
        data: what is dealt.
        per_wave: virtual worker → N_v at `progress`, in index order.
        checkpoint_every_waves: waves between two checkpoints.
        plan_clocks: clocks at which plans change.
        scripted: changes of N_v and of members; who has none is a member all the time.
        plan_every_waves: waves between two clocks at which they may change.
        order_of: epoch → `order` of `divide`.
    """
    while not is_finished(progress, data):
        change = wave_change_at(scripted.waves, progress.clock)
        if change is not None:
            per_wave = {vw: change.of(vw) for vw in per_wave}
        members = {vw: n for vw, n in per_wave.items() if not is_absent(scripted.members, vw, progress.clock)}
        segment = plan_segment(
            progress,
            data,
            minibatches_in_wave=sum(members.values()),
            checkpoint_every_waves=checkpoint_every_waves,
            plan_clocks=plan_clocks,
            plan_every_waves=plan_every_waves,
        )
        waves = segment.end - segment.start
        division = divide(progress, data, tuple(members), members, order=order_of(progress.epoch))
        blocks = {vw: dealt[: waves * members[vw]] for vw, dealt in division.items()}
        yield segment, blocks
        computed = [block for dealt in blocks.values() for block in dealt]
        progress = advance(
            progress,
            data,
            clock=segment.end,
            samples=[sample for block in computed for sample in block],
            minibatches=len(computed),
        )
