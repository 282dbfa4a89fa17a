"""The replicated log of one job on the clock shard: the only place that decides order (`wsp.md` §4, §5).

A pure state machine. Each event method checks the event, changes the state, and returns the records it appended to the
log; the shell (`server.shard.clock_shard`) writes history, wakes followers and replies. Nothing here accesses a clock,
a socket or a tensor. Events are idempotent: a repeated one returns the same reply; an illegal one raises and changes
nothing. The log is deterministic: the same events in the same order give the same records, so a restarted clock shard
continues from its persisted state.

After every event `_settle` commits and publishes as far as possible, in a fixed order.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

from hetpipe.decide.sync.gate import Gate
from hetpipe.decide.sync.records import (
    BarrierRecord,
    CommitRecord,
    EvictRecord,
    HandoverRecord,
    InitializeRecord,
    NewCut,
    PlanRecord,
    PrepareRecord,
    PublishRecord,
    Record,
    SegmentMember,
    SegmentRecord,
    TermRecord,
)
from hetpipe.decide.sync.segment import (
    DRAIN,
    END,
    EPOCH,
    EVICT,
    JOIN,
    PLAN,
    Segment,
    advance,
    divide,
    ends_run,
    is_finished,
    plan_segment,
)
from hetpipe.errors import ClockNotPublished, ProtocolViolation, StaleIncarnation, WaveOutOfOrder
from hetpipe.values.activation import Activation, fresh_at, inactive_at, started_with
from hetpipe.values.bounds import MAX_LISTED
from hetpipe.values.freezing import FreezeLineup, Freezing, FrozenSince, joining
from hetpipe.values.ids import (
    Clock,
    Incarnation,
    Minibatch,
    ShardIndex,
    StageIndex,
    Term,
    VirtualWorkerIndex,
    Wave,
    virtual_workers_text,
)
from hetpipe.values.run import ClockSnapshot
from hetpipe.values.run_document import LifeSeen
from hetpipe.values.sync import (
    DataSpec,
    DecidedMove,
    MemberChange,
    Membership,
    PlanChange,
    PlanMove,
    PlanVersion,
    Progress,
    SyncSpec,
    WaveChange,
    WaveNumbers,
    is_absent,
)

#: Start position of a reader without state: the newest segment record.
FROM_NEWEST_SEGMENT = -1


@dataclass(frozen=True, slots=True)
class LogConfig:
    """Job parameters of the log."""

    term: Term
    num_shards: int
    membership: Membership
    """The initial virtual workers; others may be admitted later."""
    sync: SyncSpec
    data: DataSpec
    checkpoint_every_waves: int | None
    progress: Progress
    plan_changes: tuple[PlanChange, ...] = ()
    """Changes of plans decided beforehand, in order of their clocks; those up to the start are done."""
    wave_changes: tuple[WaveChange, ...] = ()
    """Changes of N decided beforehand, likewise."""
    member_changes: tuple[MemberChange, ...] = ()
    """Virtual workers that leave and come back, decided beforehand, likewise."""
    freezing: Freezing | None = None
    """How layers freeze; None: none do."""
    activations: tuple[Activation, ...] = ()
    """Which layers are inactive from when on; empty: all are active all the time."""

    @property
    def plan_clocks(self) -> list[Clock]:
        """The clocks of the barriers at which something changes, or layers freeze."""
        clocks = [change.clock for change in self.plan_changes if not change.live]
        clocks += [change.clock for change in self.wave_changes]
        clocks += [change.clock for change in self.member_changes]
        clocks += [change.clock for change in self.activations if change.clock]
        return [*clocks, *(() if self.freezing is None else self.freezing.clocks)]

    @property
    def drop_clocks(self) -> list[Clock]:
        """The clocks of the barriers at which a virtual worker leaves."""
        return [change.clock for change in self.member_changes if not change.joins]

    def is_dropped(self, vw: VirtualWorkerIndex, clock: int) -> bool:
        """Whether a virtual worker takes no part in the segment that a barrier at `clock` begins."""
        return is_absent(self.member_changes, vw, clock)


@dataclass(slots=True)
class Member:
    """A virtual worker that counts."""

    num_stages: int
    incarnation: Incarnation
    #: The clock at which it joined.
    start: Clock
    #: Local clock: waves committed.
    committed: Clock
    #: The clock chosen at its latest switch point; it may still be pulled.
    held: Clock
    #: The number of the latest switch point for which it requested a clock.
    last_switch: int
    #: wave → stages that reported it as staged. Uncommitted waves only.
    reports: dict[Wave, set[StageIndex]] = field(default_factory=dict)
    #: wave → its minibatches (blocks of sample indices), from the first stage's report. Uncommitted waves only.
    samples: dict[Wave, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    #: wave → layer → squared norm of its gradients, where norms decide what freezes. Uncommitted waves only.
    squares: dict[Wave, dict[int, float]] = field(default_factory=dict)
    #: Those of its last wave in this segment that was not empty; stages tell them of that wave alone.
    newest_squares: dict[int, float] = field(default_factory=dict)
    #: Of one that left: the stages that have written their parts of the barrier's checkpoint.
    written: set[StageIndex] = field(default_factory=set)
    #: Of one that left: whether there is a record of what it hands over.
    has_handed_over: bool = False


@dataclass(slots=True)
class Newcomer:
    """A virtual worker that will count from the next barrier on, once all its stages have joined."""

    num_stages: int
    incarnation: Incarnation
    #: Stages that have joined, and those of them that are ready to start.
    present: set[StageIndex] = field(default_factory=set)
    joined: set[StageIndex] = field(default_factory=set)
    #: Stages whose part of the initial weights is on the shards.
    initialized: set[StageIndex] = field(default_factory=set)

    @property
    def is_complete(self) -> bool:
        """Whether all its stages are ready to start."""
        return len(self.joined) == self.num_stages


@dataclass(slots=True)
class Preparation:
    """A move without a barrier, which the stages of its virtual worker prepare."""

    index: int
    """Of its record."""
    move: PlanMove
    ready: set[StageIndex] = field(default_factory=set)
    """The stages that are prepared."""


@dataclass(slots=True)
class LogState:
    """The serializable state of a `DecisionLog`; names as its attributes.

    As the log is deterministic, a restarted clock shard needs only this state and the events since.
    """

    records: list[Record]
    """Records that may still be read, in order; the first one has index `first`."""
    first: int
    members: dict[VirtualWorkerIndex, Member]
    newcomers: dict[VirtualWorkerIndex, Newcomer]
    leaving: tuple[VirtualWorkerIndex, ...]
    """Members being drained: they count up to the next barrier."""
    leavers: dict[VirtualWorkerIndex, Member]
    """Virtual workers that left at a barrier and may still be working there: until evicted or until a later incarnation
    is admitted.
    """
    lives: dict[VirtualWorkerIndex, Incarnation]
    """The newest incarnation of every virtual worker ever admitted."""
    progress: Progress
    """Progress at the start of the current segment: the input of its data division."""
    published: Clock
    """Newest published clock; `start − 1` before the initial weights are complete."""
    acknowledged: list[int]
    """Number of records executed by each shard."""
    durable: list[int]
    """Number of records that each shard will not request again after a restart."""
    segment_samples: list[int]
    """Sample indices committed in the current segment, in the order of commits."""
    segment_minibatches: int
    num_waves: int
    """Total number of waves committed."""
    claimed: set[int]
    """Samples used in this segment, including staged ones: none may count twice."""
    most_committed: Clock
    """Largest local clock ever: committed waves of an evicted worker stand."""
    most_switched: int
    """Largest switch point for which a clock was requested: bounds the minibatches that may have started."""
    slowest: Clock
    """The last defined global clock: it does not change while there are no members."""
    max_distance: int
    """Largest clock distance so far."""
    retained: tuple[Clock, ...]
    """Published clocks that may still be pulled."""
    has_weights: bool
    """Whether the initial weights are decided; they stand even if their creator is evicted later."""
    complete_at: dict[Clock, int]
    """clock → index of the record after which its weights are complete."""
    dealt_to: tuple[VirtualWorkerIndex, ...]
    """The members that share the current segment."""
    segments: tuple[int, int]
    """Indices of the two newest segment records; 0 if there is none."""
    asked: tuple[str, ...]
    """Unplanned reasons of the barrier that is set or (before the start) will be set."""
    segment: Segment
    per_wave: dict[VirtualWorkerIndex, int] = field(default_factory=dict)
    """N_v of every virtual worker ever admitted, as planned; empty where all have that of the job."""
    waves: dict[VirtualWorkerIndex, WaveNumbers] = field(default_factory=dict)
    """N_v of every virtual worker in the current segment, and its minibatches before; empty until N changes."""
    plans: dict[VirtualWorkerIndex, PlanVersion] = field(default_factory=dict)
    """The plan version of every virtual worker ever admitted, as far as its cut is known."""
    moved: tuple[VirtualWorkerIndex, ...] = ()
    """Virtual workers whose plan version has changed since the newest segment record."""
    moves: dict[VirtualWorkerIndex, PlanMove] = field(default_factory=dict)
    """Moves that take effect at the next barrier, unless they are prepared before."""
    preparing: dict[VirtualWorkerIndex, Preparation] = field(default_factory=dict)
    """Those of them that need no barrier, while stages prepare them."""
    fixed: dict[VirtualWorkerIndex, tuple[DecidedMove, ...]] = field(default_factory=dict)
    """Moves announced in this segment, without a barrier, by no script; only the last may not be in force yet."""
    announced: dict[VirtualWorkerIndex, int] = field(default_factory=dict)
    """The number of moves announced in this segment, scripted ones included."""
    decided: dict[VirtualWorkerIndex, DecidedMove] = field(default_factory=dict)
    """The newest move of each virtual worker that has taken effect."""
    deciding: dict[VirtualWorkerIndex, dict[int, float]] = field(default_factory=dict)
    """The squared norms of gradients that have decided F at the newest barrier; empty where they do not decide."""
    frozen_before: int = 0
    """F before the newest barrier."""
    lineup_before: int = 0
    """F of those who trained before the newest barrier."""
    frozen: tuple[FrozenSince, ...] = ()
    """The frozen layers since the start of the run, one entry per barrier at which they became more, in order."""


class DecisionLog:
    """Orders the commits, joins, evictions, barriers and publications of one job.

    Invariants (`validate_state`): no member is more than D + 1 waves ahead of another; `published` is never above the
    global clock and at most one below it once all shards have acknowledged; the barrier is above `published`.

    All virtual workers start as newcomers: the publication of the start is the first barrier passed.

    The mutable attributes are those of `LogState` and documented there.
    """

    def __init__(self, config: LogConfig) -> None:
        progress = config.progress
        start = progress.clock
        self.config = config
        self.records: list[Record] = []
        self.first = 0
        self.members: dict[VirtualWorkerIndex, Member] = {}
        self.newcomers = {
            vw: Newcomer(count, Incarnation(0)) for vw, count in sorted(config.membership.num_stages.items())
        }
        self.leaving: tuple[VirtualWorkerIndex, ...] = ()
        self.leavers: dict[VirtualWorkerIndex, Member] = {}
        self.lives = dict.fromkeys(self.newcomers, Incarnation(0))
        self.progress = progress
        self.published = Clock(start - 1)
        self.acknowledged: list[int] = [0] * config.num_shards
        self.durable: list[int] = [0] * config.num_shards
        self.segment_samples: list[int] = []
        self.segment_minibatches = 0
        self.num_waves = 0
        self.claimed: set[int] = set()
        self.most_committed = start
        self.most_switched = 0
        self.slowest = start
        self.max_distance = 0
        self.retained: tuple[Clock, ...] = ()
        self.has_weights = False
        self.complete_at: dict[Clock, int] = {}
        self.dealt_to: tuple[VirtualWorkerIndex, ...] = ()
        self.segments = (0, 0)
        self.asked: tuple[str, ...] = ()
        self.segment = Segment(start, start, (), progress.epoch)
        self.per_wave = dict(config.membership.minibatches_per_wave)
        self.waves = dict(progress.waves)
        if self.waves:
            known = {vw: WaveNumbers(self._num_in_wave(vw), self._origin(vw, start)) for vw in self.lives}
            self.waves = known | self.waves
        self._adopt_waves(start)
        self.plans = dict(config.membership.plans)
        self.moved: tuple[VirtualWorkerIndex, ...] = ()
        self.moves: dict[VirtualWorkerIndex, PlanMove] = {}
        self.preparing: dict[VirtualWorkerIndex, Preparation] = {}
        self.fixed: dict[VirtualWorkerIndex, tuple[DecidedMove, ...]] = {}
        self.announced: dict[VirtualWorkerIndex, int] = {}
        self.decided: dict[VirtualWorkerIndex, DecidedMove] = {}
        self.deciding: dict[VirtualWorkerIndex, dict[int, float]] = {}
        self.frozen_before = progress.frozen
        self.lineup_before = progress.lineup
        self.frozen: tuple[FrozenSince, ...] = ()
        #: index of a commit record → its epoch and samples; consumed by the writer of the history.
        self._used: dict[int, tuple[int, tuple[int, ...]]] = {}
        self._append(TermRecord(0, config.term))

    def state(self) -> LogState:
        """A copy of the complete state."""
        return LogState(**{field.name: _copied(getattr(self, field.name)) for field in fields(LogState)})

    @classmethod
    def restore(cls, config: LogConfig, state: LogState) -> Self:
        """Create the log from its `state`."""
        log = cls(config)
        for attribute in fields(LogState):
            setattr(log, attribute.name, _copied(getattr(state, attribute.name)))
        return log

    # -- queries -------------------------------------------------------------------------------------------------------

    @property
    def num_records(self) -> int:
        """Number of records ever appended, including dropped ones."""
        return self.first + len(self.records)

    def records_from(self, start: int, *, jumps: bool = False) -> Sequence[Record]:
        """The records from index `start` on, or from the newest segment record (`FROM_NEWEST_SEGMENT`).

        Args:
            start: first record.
            jumps: start at the newest segment record if `start` has been dropped. This happens only to slow newcomers,
                never to members.

        Raises:
            ProtocolViolation: the records have been dropped, as all members and shards have read them; or do not exist
                yet.
        """
        newest = start == FROM_NEWEST_SEGMENT or (jumps and 0 <= start < self.first)
        wanted = self.segments[1] if newest else start
        if not self.first <= wanted <= self.num_records:
            raise ProtocolViolation(
                f"the decision log holds records {self.first} to {self.num_records}; record {start} is not available"
            )
        return self._since(wanted)

    @property
    def global_clock(self) -> Clock:
        """Minimum of the members' local clocks; without members, its last value."""
        return min((m.committed for m in self.members.values()), default=max(self.slowest, self.published))

    @property
    def awaits_shards(self) -> bool:
        """Whether the next clock may lack nothing but acknowledgements of shards; none is needed before.

        A record makes it true, so a shard that acknowledges only while it is true misses none.
        """
        return not self._has_started or not self.members or self.global_clock > self.published

    @property
    def finished(self) -> bool:
        """Whether the last barrier of the run is published."""
        return self.published == self.segment.end and ends_run(self.segment.reasons)

    def is_for_norms(self, segment: SegmentRecord) -> bool:
        """Whether there is a barrier where a segment begins so that norms may decide there."""
        freezing = self.config.freezing
        every = None if freezing is None else freezing.every_waves
        begins = segment.start == self.config.progress.clock
        return every is not None and not begins and segment.start % every == 0 and not ends_run(segment.reasons)

    def take_used(self, record: CommitRecord) -> tuple[int, tuple[int, ...]]:
        """Take the epoch and the sample indices of a commit; may be called once."""
        return self._used.pop(record.index)

    def check_stage(self, vw: VirtualWorkerIndex, incarnation: Incarnation, stage: StageIndex) -> None:
        """Check that the caller is a stage of a member, or of one that left and may still be working.

        Raises:
            StaleIncarnation, ProtocolViolation: as named.
        """
        has_left = self.has_left(vw, incarnation)
        self._check_stage(self.leavers[vw] if has_left else self._member(vw, incarnation), vw, stage)

    def check_follower(self, vw: VirtualWorkerIndex, incarnation: Incarnation, stage: StageIndex) -> None:
        """Check that the caller is a stage of an incarnation that counts, will count, or left and may still be working.

        Raises:
            StaleIncarnation, ProtocolViolation: as named.
        """
        has_left = self.has_left(vw, incarnation)
        self._check_stage(self.leavers[vw] if has_left else self._life(vw, incarnation), vw, stage)

    def has_left(self, vw: VirtualWorkerIndex, incarnation: Incarnation) -> bool:
        """Whether this incarnation left at a barrier and may still be working there."""
        left = self.leavers.get(vw)
        return left is not None and left.incarnation == incarnation

    def present(self, vw: VirtualWorkerIndex) -> tuple[StageIndex, ...]:
        """The joined stages of a member or newcomer, ready or not."""
        if vw in self.members:
            return tuple(StageIndex(stage) for stage in range(self.members[vw].num_stages))
        return tuple(sorted(self.newcomers[vw].present))

    @property
    def newest_segment(self) -> SegmentRecord | None:
        """The record of the current segment; None before the start is published."""
        record = self.records[self.segments[1] - self.first]
        return record if isinstance(record, SegmentRecord) else None

    @property
    def expected_at_start(self) -> list[VirtualWorkerIndex]:
        """The virtual workers that train from the start of the run on, if all of them come."""
        start = self.config.progress.clock
        return [vw for vw in self.config.membership.num_stages if not self._is_dropped(vw, start, self._lineup)]

    def makes_weights(self, vw: VirtualWorkerIndex) -> bool:
        """Whether `vw` must create the initial weights: there are none, and no candidate with a lower index is left."""
        return not self.has_weights and vw == min(self.newcomers, default=None)

    def snapshot(self) -> ClockSnapshot:
        """The clocks, for status displays and the coordinator."""
        before = dict.fromkeys(self.newcomers, self.progress.clock)
        return ClockSnapshot(
            term=self.config.term,
            published=max(self.published, self.progress.clock),
            global_clock=self.global_clock,
            local={vw: m.committed for vw, m in self.members.items()} if self._has_started else before,
            max_distance=self.max_distance,
            epoch=self.progress.epoch + 1,
            minibatches=self.progress.minibatches + self.segment_minibatches,
            samples=self.progress.samples + len(self.segment_samples),
            barrier=self.segment.end,
            barrier_reason=self.segment.reason,
            waves=self.num_waves,
            staged={vw: _staged_clock(m) for vw, m in self.members.items()} if self._has_started else before,
            plans=self._plans_in_force,
            frozen=self.frozen,
            lineup=self.progress.lineup,
        )

    def newest_lives(self) -> tuple[LifeSeen, ...]:
        """The newest incarnation of every virtual worker, in index order."""
        return tuple(self._life_seen(vw, incarnation) for vw, incarnation in sorted(self.lives.items()))

    def pending_publish_reason(self) -> str:
        """The reason why the published clock does not advance, as a phrase."""
        wanted = self.published + 1
        absent = [vw for vw, newcomer in self.newcomers.items() if not newcomer.is_complete]
        if not self._has_started and absent:
            return "the stages of " + virtual_workers_text(absent)
        if not self._has_started and not self.has_weights:
            return "the initial weights"
        if self._has_started and not self.members and not self._is_taken_up:
            return "the stages of " + virtual_workers_text(absent) if absent else "any virtual worker to rejoin"
        behind = [vw for vw, member in self.members.items() if member.committed < wanted]
        if behind:
            return f"{virtual_workers_text(behind)} to commit wave {wanted - 1}"
        awaited = self._awaited(wanted)
        if awaited and self._has_started:
            what = "join" if self._changes_lineup else "the script adds"
            return f"the stages of {virtual_workers_text(awaited)}, which {what} at clock {wanted}"
        late = [shard for shard, done in enumerate(self.acknowledged) if done < self.num_records]
        return f"parameter servers {late} to apply wave {wanted - 1}"

    def validate_state(self) -> None:
        """Check the invariants; for tests."""
        committed = [m.committed for m in self.members.values()]
        if committed and self.config.sync.staleness is not None:
            distance = max(committed) - min(committed)
            assert distance <= self.config.sync.staleness + 1, f"clock distance {distance}"
        assert not committed or self.published <= min(committed), f"{self.published} published before {committed}"
        assert self.segment.end >= self.published, f"barrier {self.segment.end} below {self.published}"
        assert all(record.index == index for index, record in enumerate(self.records, start=self.first)), "log has gaps"

    # -- events --------------------------------------------------------------------------------------------------------

    def admit(
        self,
        vw: VirtualWorkerIndex,
        incarnation: Incarnation,
        num_stages: int,
        minibatches_per_wave: int | None = None,
        bounds: tuple[int, ...] = (),
    ) -> Sequence[Record]:
        """Admit a new incarnation of a virtual worker, which ends older ones.

        Args:
            vw, incarnation: identify it.
            num_stages: its stages.
            minibatches_per_wave: its N_v; None: the one it has, or that of the job.
            bounds: the cut with which its processes start; empty: not known.

        Raises:
            StaleIncarnation: there is a newer incarnation.
            ProtocolViolation: the number of stages is less than one, or differs within an incarnation, or from its cut;
                or N_v differs from that of earlier incarnations, or from that of all others where the job has one for
                all.
        """
        before = self.num_records
        newest = self.lives.get(vw)
        if newest is not None and incarnation < newest:
            raise StaleIncarnation(f"incarnation {incarnation} of virtual worker {vw}; the newest is {newest}")
        present = self.members.get(vw) or self.newcomers.get(vw)
        if num_stages < 1:
            raise ProtocolViolation(f"virtual worker {vw} cannot have {num_stages} stages")
        self._check_per_wave(vw, minibatches_per_wave)
        plan = self._plan_of_next(vw, num_stages, bounds)
        if incarnation == newest:
            if present is not None and present.num_stages != num_stages:
                raise ProtocolViolation(f"virtual worker {vw} has {present.num_stages} stages, not {num_stages}")
            return ()
        if present is not None:
            self.evict(vw, present.incarnation)
        self._end_leaver(vw)
        self.lives[vw] = incarnation
        if plan is None:
            self.plans.pop(vw, None)
        else:
            self._set_plan(vw, plan)
        if self.per_wave:
            self.per_wave.setdefault(vw, minibatches_per_wave or self.config.sync.minibatches_per_wave)
        self.newcomers[vw] = Newcomer(num_stages, incarnation)
        self.newcomers = dict(sorted(self.newcomers.items()))
        return self._since(before)

    def join(
        self, vw: VirtualWorkerIndex, incarnation: Incarnation, stage: StageIndex, *, ready: bool = True
    ) -> Sequence[Record]:
        """Handle the join of a stage. When all stages of its virtual worker are ready, it joins at the next barrier.

        Others do not wait for stages that are not ready, as these may still be connecting to each other.
        """
        before = self.num_records
        life = self._life(vw, incarnation)
        self._check_stage(life, vw, stage)
        if isinstance(life, Newcomer):
            life.present.add(stage)
        if isinstance(life, Newcomer) and ready and stage not in life.joined:
            life.joined.add(stage)
            if life.is_complete:
                # One that the script drops and adds again joins where that says.
                is_awaited = self._is_dropped(vw, self.segment.start, self._lineup)
                if self._has_started and not self.finished and not is_awaited:
                    self._request_barrier(JOIN)
                self._settle()
        return self._since(before)

    def initialized(self, vw: VirtualWorkerIndex, incarnation: Incarnation, stage: StageIndex) -> Sequence[Record]:
        """Record that a stage has staged its part of the initial weights on every shard; the first full set counts."""
        before = self.num_records
        life = self._life(vw, incarnation)
        self._check_stage(life, vw, stage)
        if isinstance(life, Newcomer) and not self.has_weights:
            life.initialized.add(stage)
            if len(life.initialized) == life.num_stages:
                self.has_weights = True
                self.complete_at[self.progress.clock] = self.num_records
                self._append(InitializeRecord(self.num_records, self.progress.clock, vw, incarnation))
                self._settle()
        return self._since(before)

    def staged(
        self,
        vw: VirtualWorkerIndex,
        incarnation: Incarnation,
        wave: Wave,
        stage: StageIndex,
        blocks: tuple[tuple[int, ...], ...] | None,
        *,
        segment: Clock,
        squares: Mapping[int, float] | None = None,
    ) -> Sequence[Record]:
        """Record that a stage has staged its part of a wave on every shard.

        Args:
            vw, incarnation, wave, stage: identify the part.
            blocks: the sample indices of each minibatch of the wave, from the first stage; None from the others.
            segment: start of the segment in which the stage works.
            squares: layer of the stage → squared norm of its gradients in the wave, where norms decide what freezes.

        Raises:
            WaveOutOfOrder: negative, skipped, at or beyond the next barrier, or of an earlier segment: a late copy of a
                report dropped by a barrier.
            ProtocolViolation: a sample is out of range, or was used before in this epoch; or a norm is not finite.
        """
        before = self.num_records
        if self.has_left(vw, incarnation):
            return self._staged_late(vw, wave)
        member = self._member(vw, incarnation)
        self._check_stage(member, vw, stage)
        if self._is_repeat(member, vw, wave, stage):
            return ()
        if segment != self.segment.start:
            raise WaveOutOfOrder(
                f"stage {stage} of virtual worker {vw} reports wave {wave} of the segment that began at "
                f"{segment}; the current one began at {self.segment.start}"
            )
        if (stage == 0) != (blocks is not None):
            raise ProtocolViolation("the samples of a wave are reported by the first stage only")
        if blocks is not None:
            self._claim(vw, wave, blocks)
            member.samples[wave] = blocks
        if squares:
            self._take_squares(member, vw, wave, squares)
        reports = member.reports.setdefault(wave, set())
        reports.add(stage)
        if len(reports) == member.num_stages:  # else nothing has become possible
            self._settle()
        return self._since(before)

    def acknowledge(self, shard: ShardIndex, num_records: int, durable: int | None = None) -> Sequence[Record]:
        """Record that a shard has executed the first `num_records` records.

        Args:
            shard: its index.
            num_records: number of records executed.
            durable: number of them that it will not request again after a restart; None: all.
        """
        before = self.num_records
        if not 0 <= shard < len(self.acknowledged):
            raise ProtocolViolation(f"there is no shard {shard}; the job has {len(self.acknowledged)}")
        kept = num_records if durable is None else durable
        if not 0 <= kept <= num_records <= self.num_records:
            raise ProtocolViolation(
                f"shard {shard} acknowledges {num_records} of {self.num_records} records, {kept} of them durable"
            )
        self.acknowledged[shard] = max(self.acknowledged[shard], num_records)
        self.durable[shard] = max(self.durable[shard], kept)
        if self._publish_one():  # else nothing has become possible
            self._settle()
        return self._since(before)

    def hold(self, vw: VirtualWorkerIndex, incarnation: Incarnation, switch: int) -> Clock:
        """Choose the clock of `vw` from a switch point on, by the gate. Idempotent.

        Raises:
            ClockNotPublished: the required clock is not published yet; or the switch point has no choice of a clock,
                which happens if the caller has not yet read the record of the segment's first barrier.
            WaveOutOfOrder: before the latest request, or before the segment.
        """
        member = self._member(vw, incarnation)
        gate = self._gate_of(vw)
        p = gate.switch_minibatch(switch)
        if switch < member.last_switch or p <= gate.start * gate.sync.minibatches_per_wave:
            asked = gate.switch_minibatch(member.last_switch)
            raise WaveOutOfOrder(f"virtual worker {vw} requests the clock of minibatch {p} after {asked}")
        if gate.newest_usable(p) <= gate.start:
            raise ClockNotPublished(f"minibatch {p} starts with the clock of the barrier at {gate.start}")
        if switch == member.last_switch:
            return member.held
        chosen = gate.chosen(p, in_use=member.held, published=self.published)
        if chosen is None:
            awaited = gate.awaited(p, in_use=member.held)
            raise ClockNotPublished(
                f"minibatch {p} needs clock {awaited}, but the newest published is {self.published}"
            )
        member.held = chosen
        member.last_switch = switch
        self.most_switched = max(self.most_switched, switch)
        return member.held

    def request_barrier(self, reason: str) -> Sequence[Record]:
        """Set an unplanned barrier at the earliest safe clock; it ends the run if `reason` is `stop`."""
        before = self.num_records
        if not self.finished:
            self._request_barrier(reason)
            self._settle()
        return self._since(before)

    def drain(self, vw: VirtualWorkerIndex, incarnation: Incarnation) -> Sequence[Record]:
        """Drain a virtual worker: it leaves at the next barrier, and its work up to there counts.

        A newcomer, which has no work yet, is removed immediately, without a record: the caller also ends its processes.
        No effect if that incarnation has already left or ended.

        Raises:
            StaleIncarnation: there was no such incarnation.
        """
        before = self.num_records
        if self.has_left(vw, incarnation):
            return ()
        member = self.members.get(vw)
        if member is None or member.incarnation != incarnation:
            return self.evict(vw, incarnation)
        if vw not in self.leaving and not self.finished:
            self.leaving = (*self.leaving, vw)
            self._request_barrier(DRAIN)
            self._settle()
        return self._since(before)

    def move(self, vw: VirtualWorkerIndex, move: PlanMove) -> Sequence[Record]:
        """Move layers between the stages of a virtual worker, without new processes.

        That is at the next barrier; for a live move none is set, and it takes effect before it once its stages are
        prepared. The move is dropped if that incarnation is evicted or leaves before, or the run ends there. A later
        one replaces it. No effect if its layers are cut like that already, or the run is over.

        Raises:
            StaleIncarnation: that incarnation does not count.
            WaveOutOfOrder: it counts from the next barrier on.
            ProtocolViolation: the job has a script, which decides all changes; or the cut is none of its layers into as
                many stages; or another move has been announced and has not begun.
        """
        before = self.num_records
        self._member(vw, move.incarnation)
        if self.config.plan_changes or self.config.wave_changes or self.config.member_changes:
            raise ProtocolViolation(f"the script of the job decides how virtual worker {vw} is cut; change it there")
        known = self._newest_plan(vw)
        if known is None or not known.can_become(move.bounds):
            cut = "unknown" if known is None else str(list(known.layer_counts))
            raise ProtocolViolation(
                f"virtual worker {vw} cannot be cut at {list(move.bounds)}: its stages have {cut} layers, and a move "
                "keeps their number and all layers"
            )
        if self.finished or known.bounds == move.bounds:
            return ()
        if self.fixed.get(vw) and not self._is_in_force(vw, self.fixed[vw][-1]):
            raise ProtocolViolation(
                f"layers of virtual worker {vw} are about to move at minibatch {self.fixed[vw][-1].p}; ask again then"
            )
        is_known = self.moves.get(vw) == move
        if is_known and move.live:
            return ()
        self.moves[vw] = move
        self.preparing.pop(vw, None)
        if move.live and not self.waves and self._has_started:
            self.preparing[vw] = Preparation(self.num_records, move)
            self._append(PrepareRecord(self.num_records, vw, move.incarnation, move.bounds))
        else:
            if PLAN not in self.segment.reasons:
                self._request_barrier(PLAN)
            elif not is_known and self._has_started:
                self._announce_barrier()
            self._settle()
        return self._since(before)

    def prepared(
        self, vw: VirtualWorkerIndex, incarnation: Incarnation, stage: StageIndex, index: int, *, can: bool
    ) -> Sequence[Record]:
        """Record that a stage is prepared for a move without a barrier, or that it cannot be.

        Once all are, the move is fixed: it takes effect with the first wave of which no minibatch can have started. If
        one cannot, a barrier is set, at which layers move. Idempotent; no effect if that move is out of date.

        Args:
            vw, incarnation, stage: identify the stage.
            index: of the record of the preparation.
            can: whether the stage is prepared.

        Raises:
            StaleIncarnation, ProtocolViolation, WaveOutOfOrder: as for `staged`.
        """
        before = self.num_records
        if self.has_left(vw, incarnation):
            return ()
        member, preparation = self._member(vw, incarnation), self.preparing.get(vw)
        self._check_stage(member, vw, stage)
        if preparation is None or preparation.index != index:
            return ()
        preparation.ready.add(stage)
        if not can:
            del self.preparing[vw]
            self._request_barrier(PLAN)
            self._settle()
        elif len(preparation.ready) == member.num_stages:
            self._fix(vw, member)
        return self._since(before)

    def _fix(self, vw: VirtualWorkerIndex, member: Member) -> None:
        """Announce a prepared move; one that could begin at the next barrier only is left to that."""
        del self.preparing[vw]
        # Under `flush` the wave after a committed one may still wait for a clock, which the history does not show.
        clock, known = Clock(max(self._unplanned_clock(), member.committed + 1)), self._newest_plan(vw)
        if clock >= self.segment.end:
            return
        assert known is not None, "the cut of a virtual worker that moves is known"
        move = self.moves.pop(vw)
        decided = DecidedMove(clock, known.version + 1, move, Minibatch(clock * self._num_in_wave(vw) + 1))
        self.fixed[vw] = (*self.fixed.get(vw, ()), decided)
        self._announce(vw, member, clock, decided.version, move.bounds)

    def evict(self, vw: VirtualWorkerIndex, incarnation: Incarnation) -> Sequence[Record]:
        """Evict a virtual worker: it no longer counts, its staged waves are dropped, committed ones stand.

        The eviction of a newcomer has no record; that of one which has left has one if it has not handed over its
        state (`HandoverRecord`). No effect if that incarnation has already ended.

        Raises:
            StaleIncarnation: there was no such incarnation.
        """
        before = self.num_records
        newest = self.lives.get(vw)
        if newest is None or incarnation > newest:
            raise StaleIncarnation(f"virtual worker {vw} had no incarnation {incarnation}")
        newcomer = self.newcomers.get(vw)
        if newcomer is not None and newcomer.incarnation == incarnation:
            del self.newcomers[vw]
        if self.has_left(vw, incarnation):
            self._end_leaver(vw)
        member = self.members.get(vw)
        if member is not None and member.incarnation == incarnation:
            self._evict_member(vw, member)
        self._settle()
        return self._since(before)

    def state_written(
        self, vw: VirtualWorkerIndex, incarnation: Incarnation, stage: StageIndex, clock: Clock, *, whole: bool
    ) -> Sequence[Record]:
        """Record that a stage has written its part of the checkpoint of a barrier, or could not.

        The last stage of one that leaves there, or the first that could not, decides what it hands over. Idempotent; no
        effect for others, and at other barriers.

        Raises:
            ProtocolViolation: it has no such stage.
        """
        before = self.num_records
        leaver = self.leavers.get(vw)
        if leaver is None or leaver.incarnation != incarnation or leaver.committed != clock:
            return ()
        self._check_stage(leaver, vw, stage)
        if whole:
            leaver.written.add(stage)
        if not whole or len(leaver.written) == leaver.num_stages:
            self._hand_over(vw, leaver, whole=whole)
        return self._since(before)

    def _end_leaver(self, vw: VirtualWorkerIndex) -> None:
        """Forget one that has left; what it has not handed over is lost."""
        leaver = self.leavers.pop(vw, None)
        if leaver is not None:
            self._hand_over(vw, leaver, whole=False)

    def _hand_over(self, vw: VirtualWorkerIndex, leaver: Member, *, whole: bool) -> None:
        """Append what one that has left hands over, once."""
        if not leaver.has_handed_over:
            leaver.has_handed_over = True
            self._append(HandoverRecord(self.num_records, vw, leaver.incarnation, leaver.committed, whole))

    # -- consequences of an event: barriers, commits, publications
    # --------------------------------------------------------

    def _request_barrier(self, reason: str) -> None:
        """Add a barrier request; before the start there is no barrier to set, and none is set twice."""
        if reason not in self.segment.reasons:
            self._add_request(reason)
            if self._has_started:
                self._set_barrier(reason, self.segment.reasons)

    def _add_request(self, reason: str) -> None:
        self.asked = self.asked if reason in self.asked else (*self.asked, reason)

    def _set_barrier(self, reason: str, planned: tuple[str, ...]) -> None:
        """Set an unplanned barrier.

        `planned` are the reasons that remain valid although the planned barrier is not reached; requested ones always
        remain.
        """
        clock = self._unplanned_clock()
        kept = tuple(r for r in planned if r in self.asked or clock == self.segment.end)
        reasons = kept if reason in kept else (*kept, reason)
        self.segment = Segment(self.segment.start, clock, reasons, self.segment.epoch)
        for member in self.members.values():
            for wave in [w for w in member.reports if w >= clock]:
                del member.reports[wave]
                member.samples.pop(wave, None)
                member.squares.pop(wave, None)
        if not self.members:
            # No member will commit anything before it: shards complete its clock as soon as they read this.
            self.complete_at = {Clock(c): self.num_records for c in range(self.published + 1, clock + 1)}
        self._announce_barrier()

    def _announce_barrier(self) -> None:
        """Append the barrier of the segment, with the cuts that are requested for it."""
        cuts = tuple(NewCut(vw, move.bounds) for vw, move in sorted(self.moves.items()))
        segment = self.segment
        self._append(BarrierRecord(self.num_records, segment.end, segment.reason, segment.epoch, cuts))

    def _unplanned_clock(self) -> Clock:
        if not self.members:
            return Clock(max(self.most_committed, self.published + 1))
        return self._gate.unplanned_barrier(
            committed=self.most_committed,
            published=self.published,
            # Up to the first switch point with a choice of clock, minibatches start without a request.
            last_switch=max(self.segment.start + 1, self.most_switched),
            planned=self.segment.end,
        )

    def _owes_work(self, vw: VirtualWorkerIndex, member: Member) -> bool:
        """Whether a member has uncommitted minibatches of this segment, which will be dealt again."""
        n, start = self._num_in_wave(vw), self.segment.start
        per_wave = {other: self._num_in_wave(other) for other in self.dealt_to}
        dealt = divide(self.progress, self.config.data, self.dealt_to, per_wave).get(vw, ())
        return len(dealt[: (self.segment.end - start) * n]) > (member.committed - start) * n

    def _settle(self) -> None:
        """Commit and publish as far as possible, in a fixed order. After every event nothing more is possible."""
        while self._commit_one() or self._publish_one():
            pass
        self.slowest = self.global_clock

    def _commit_one(self) -> bool:
        for vw, member in self.members.items():
            wave = Wave(member.committed)
            reports = member.reports.get(wave)
            is_complete = reports is not None and len(reports) == member.num_stages
            if is_complete and self._gate.may_commit(wave, self.published):
                del member.reports[wave]
                blocks = member.samples.pop(wave, ())
                squares = member.squares.pop(wave, {})
                member.newest_squares = squares if blocks else member.newest_squares
                indices = tuple(index for block in blocks for index in block)
                self.segment_samples.extend(indices)
                self._used[self.num_records] = (self.segment.epoch, indices)
                self.segment_minibatches += len(blocks)
                self.num_waves += 1
                member.committed = Clock(wave + 1)
                self.most_committed = max(self.most_committed, member.committed)
                for fixed in self.fixed.get(vw, ()):
                    if fixed.clock == Clock(wave):
                        self.decided[vw] = fixed
                self.complete_at[member.committed] = self.num_records
                self._append(CommitRecord(self.num_records, vw, member.incarnation, wave, len(indices)))
                self.max_distance = max(self.max_distance, member.committed - self.global_clock)
                return True
        return False

    def _publish_one(self) -> bool:
        clock = Clock(self.published + 1)
        index = self.complete_at.get(clock)
        if index is None or min(self.acknowledged) <= index or not self._nobody_is_missed(clock):
            return False
        del self.complete_at[clock]
        self.published = clock
        crosses = clock == self.segment.end
        if crosses:
            self._end_at_once()
            self._enter_barrier()
        self.retained = retained(
            self.members.values(),
            Gate(self.config.sync, self.progress.clock),
            published=clock,
            global_clock=self.global_clock,
        )
        self._append(PublishRecord(self.num_records, clock, self.retained))
        if crosses:
            self._cross()
        return True

    def _nobody_is_missed(self, clock: Clock) -> bool:
        """Whether all waves of `clock` are committed, and there is a member to continue from it.

        The start waits only for first incarnations: a virtual worker that dies repeatedly must not block the others.
        """
        if not self._has_started:
            founders = [life for life in self.newcomers.values() if life.incarnation == 0]
            return self._is_taken_up and all(life.is_complete for life in founders)
        if not self.members:
            return self._is_taken_up
        return self.global_clock >= clock and not self._awaited(clock)

    @property
    def _is_taken_up(self) -> bool:
        """Whether somebody who is ready trains from the next barrier on; where the run ends there, anybody is enough.

        Those that the script adds at a later clock do not count: clocks would pass without waves up to it.
        """
        clock = self.segment.end
        lineup = self._lineup if clock == self.config.progress.clock else self._next_lineup
        ends = ends_run(self.segment.reasons)
        return any(ends or not self._is_dropped(vw, clock, lineup) for vw in self._pending)

    def _awaited(self, clock: int) -> list[VirtualWorkerIndex]:
        """The virtual workers that are decided to join at the barrier at `clock`, and that are not ready yet.

        Where the run ends there, it waits for none.
        """
        if clock != self.segment.end or ends_run(self.segment.reasons):
            return []
        wanted = [change.vw for change in self.config.member_changes if change.clock == clock and change.joins]
        if self.config.freezing is not None:
            wanted += joining(self.config.freezing.lineups, self.progress.lineup, self.progress.frozen)
        return [vw for vw in wanted if vw not in {*self._pending, *self.members}]

    @property
    def _lineup(self) -> FreezeLineup | None:
        """Who trains in the current segment; None: all."""
        return None if self.config.freezing is None else self.config.freezing.lineup(self.progress.lineup)

    @property
    def _next_lineup(self) -> FreezeLineup | None:
        """Who trains from the next barrier on; None: all."""
        return None if self.config.freezing is None else self.config.freezing.lineup(self.progress.frozen)

    @property
    def _changes_lineup(self) -> bool:
        """Whether others train from the next barrier on than in this segment, or waves get another length there."""
        return self._next_lineup != self._lineup

    @property
    def new_lineup(self) -> tuple[FreezeLineup, FreezeLineup] | None:
        """Who trained before the newest barrier, and who does from there on, where these are others."""
        freezing = self.config.freezing
        if freezing is None:
            return None
        before, after = freezing.lineup(self.lineup_before), freezing.lineup(self.progress.lineup)
        return None if before is None or after is None or before == after else (before, after)

    def _is_dropped(self, vw: VirtualWorkerIndex, start: int, lineup: FreezeLineup | None) -> bool:
        """Whether a virtual worker takes no part in the segment from the barrier at `start` on, with that lineup."""
        return self.config.is_dropped(vw, start) or (lineup is not None and vw not in lineup.members)

    def _end_at_once(self) -> None:
        """End a run that has nothing to do right at its start."""
        if not self.segment.reasons and is_finished(self.progress, self.config.data):
            self.segment = Segment(self.segment.start, self.segment.end, (END,), self.segment.epoch)
            self._append(BarrierRecord(self.num_records, self.segment.end, self.segment.reason, self.segment.epoch))

    def _enter_barrier(self) -> None:
        if self.published > self.segment.start:
            self.progress = advance(
                self.progress,
                self.config.data,
                clock=self.published,
                samples=self.segment_samples,
                minibatches=self.segment_minibatches,
            )
        if self.segment_minibatches:
            self.progress = replace(self.progress, fresh=())
        self.segment_samples = []
        self.segment_minibatches = 0
        self.claimed = set()
        for member in self.members.values():
            member.held = self.published
            member.last_switch = self.published

    def _cross(self) -> None:
        """Cross a barrier: remove leaving members, add newcomers, and set members and end of the next segment."""
        passed, start, inactive_before = self.segment, self.published, self.progress.inactive
        squares = {vw: member.newest_squares for vw, member in self.members.items() if member.newest_squares}
        for member in self.members.values():
            member.newest_squares = {}
        self.deciding, self.frozen_before, self.lineup_before = {}, self.progress.frozen, self.progress.lineup
        reasons, ends = passed.reasons, ends_run(passed.reasons)
        if not ends and start > self.config.progress.clock:
            self.progress = replace(self.progress, lineup=self.progress.frozen)
        # At the end of the run virtual workers join only if work is left.
        dropped = [vw for vw in self.members if self._is_dropped(vw, start, self._lineup)]
        left = {} if ends else {vw: self.members.pop(vw) for vw in sorted({*self.leaving, *dropped})}
        self.leavers |= left
        self.leaving = ()
        pending = [vw for vw in self._pending if not self._is_dropped(vw, start, self._lineup)]
        joined = pending if not (ends and self.members) else []
        for vw in joined:
            newcomer = self.newcomers.pop(vw)
            self.members[vw] = Member(newcomer.num_stages, newcomer.incarnation, start, start, start, start)
        self.members = dict(sorted(self.members.items()))
        self._count_minibatches(passed.start, start)
        self._change_plans(passed.start, start, ends=ends)
        if not ends:
            self._change_waves(passed.start, start)
            self._freeze(passed, start, squares)
            self._activate(passed, start)
        frozen = self.progress.frozen
        layers = 0 if self.config.freezing is None else self.config.freezing.levels[frozen]
        if layers > (self.frozen[-1].layers if self.frozen else 0):
            self.frozen = (*self.frozen, FrozenSince(start, frozen, layers))[-MAX_LISTED:]
        self.segments = (self.segments[1], self.num_records)
        self._append(
            SegmentRecord(
                self.num_records,
                start,
                reasons,
                passed.epoch,
                self._segment_members(self.members, joined),
                self._segment_members(left),
                frozen=frozen,
                frozen_layers=layers,
                inactive=self.progress.inactive,
                inactive_before=inactive_before,
                fresh=self.progress.fresh,
            )
        )
        self.moved = tuple(vw for vw in self.moved if vw not in self.members)
        self.announced = {}
        self.progress = replace(self.progress, plans=dict(self.plans), waves=dict(self.waves))
        self._forget()
        if ends:
            self.segment = Segment(passed.start, start, reasons, passed.epoch)
            return
        if not self.members:
            # The first to join does so one clock later: shards complete all clocks up to a barrier that no member can
            # lower.
            self.segment, self.dealt_to = Segment(start, start, (), self.progress.epoch), ()
            self._add_request(DRAIN)
            self._set_barrier(DRAIN, ())
            return
        self._plan_segment()
        asked, self.asked = self.asked if not passed.reasons else (), ()
        for reason in asked:
            self._request_barrier(reason)

    def _change_plans(self, after: Clock, upto: Clock, *, ends: bool) -> None:
        """Apply the changes of plans decided for the clocks after `after`, up to `upto`, where the run may end.

        There only those are made that were live, in waves before it.
        """
        moves, self.moves, self.preparing = {} if ends else self.moves, {}, {}
        for vw, fixed in sorted(self.fixed.items()):
            for decided in fixed:
                if decided.clock < upto:
                    self._change_live(vw, decided)
                elif not ends:
                    moves.setdefault(vw, decided.move)
        for change in self.config.plan_changes:
            plan = self.plans.get(change.vw)
            is_made = change.live and change.clock < upto if ends else True
            if plan is not None and change.bounds and after < change.clock <= upto and is_made:
                self._set_plan(change.vw, PlanVersion(plan.version + 1, change.bounds, plan.planned))
        # Who has moved its layers before the barrier already changes nothing there.
        self.moved = tuple(vw for vw in self.moved if not self._has_moved_live(vw, after, upto))
        self.fixed = {}
        for vw, move in sorted(moves.items()):
            member, known = self.members.get(vw), self.plans.get(vw)
            if known is not None and member is not None and member.incarnation == move.incarnation:
                moved = PlanVersion(known.version + 1, move.bounds, known.planned)
                self._set_plan(vw, moved)
                self.decided[vw] = DecidedMove(upto, moved.version, move)

    def _change_live(self, vw: VirtualWorkerIndex, decided: DecidedMove) -> None:
        """Let the segment that begins have the version of a move in the one before, also in the next incarnation."""
        known = self.plans[vw]
        if known.version + 1 == decided.version and known.can_become(decided.move.bounds):
            self._set_plan(vw, PlanVersion(decided.version, decided.move.bounds, known.planned))
            self.decided[vw] = decided
        else:  # it is restarted with another plan; versions only grow
            self._set_plan(vw, replace(known, version=max(known.version, decided.version + 1)))

    def _has_moved_live(self, vw: VirtualWorkerIndex, after: Clock, upto: Clock) -> bool:
        """Whether a member has computed waves after the barrier at `after` by the version it has at that at `upto`."""
        member = self.members.get(vw)
        if member is None or member.start > after:
            return False
        if self.fixed.get(vw):
            return self.decided.get(vw) in self.fixed[vw]
        own = [change for change in self.config.plan_changes if change.vw == vw and after < change.clock <= upto]
        return bool(own) and own[-1].live and own[-1].clock < upto

    def _is_in_force(self, vw: VirtualWorkerIndex, fixed: DecidedMove) -> bool:
        """Whether the first wave of a move is committed, so that no barrier can come before it any more."""
        decided = self.decided.get(vw)
        return decided is not None and decided.p is not None and decided.version >= fixed.version

    def _newest_plan(self, vw: VirtualWorkerIndex) -> PlanVersion | None:
        """The plan version of a virtual worker behind all moves that are announced in this segment."""
        known, fixed = self.plans.get(vw), self.fixed.get(vw)
        if known is None or not fixed:
            return known
        return PlanVersion(fixed[-1].version, fixed[-1].move.bounds, known.planned)

    @property
    def _plans_in_force(self) -> dict[VirtualWorkerIndex, PlanVersion]:
        """The plan versions by which virtual workers compute."""
        found = dict(self.progress.plans)
        for vw, moves in self.fixed.items():
            for fixed in moves:
                if vw in found and self._is_in_force(vw, fixed):
                    found[vw] = PlanVersion(fixed.version, fixed.move.bounds, found[vw].planned)
        return found

    def _announce(
        self, vw: VirtualWorkerIndex, member: Member, clock: Clock, version: int, bounds: tuple[int, ...]
    ) -> None:
        self.announced[vw] = self.announced.get(vw, 0) + 1
        self._append(PlanRecord(self.num_records, vw, member.incarnation, clock, version, bounds))

    def _announce_moves(self) -> None:
        """Announce the live moves in the segment that has just been planned."""
        for vw, member in self.members.items():
            plan = self.plans.get(vw)
            version = 0 if plan is None else plan.version
            for change in self.config.plan_changes:
                if change.vw == vw and change.live and self.segment.start < change.clock < self.segment.end:
                    version += 1
                    self._announce(vw, member, change.clock, version, change.bounds)

    def _count_minibatches(self, since: Clock, upto: Clock) -> None:
        """Continue the numbering of minibatches at the barrier at `upto`, after the waves before it."""
        self.waves = {
            vw: replace(numbers, origin=numbers.origin + (upto - since) * numbers.minibatches_per_wave)
            for vw, numbers in self.waves.items()
        }

    def _change_waves(self, after: Clock, upto: Clock) -> None:
        """Apply the changes of N decided for the barriers at the clocks after `after`, up to `upto`."""
        for change in self.config.wave_changes:
            if after < change.clock <= upto:
                changed = {vw: WaveNumbers(change.of(vw), self._origin(vw, upto)) for vw in sorted(self.lives)}
                self.waves = self.waves | changed
        self._adopt_waves(upto)

    def _adopt_waves(self, start: Clock) -> None:
        """Give all virtual workers the N of the lineup from the barrier at `start` on, where they have another one."""
        lineup = self._lineup
        if lineup is not None and any(self._num_in_wave(vw) != lineup.minibatches_per_wave for vw in lineup.members):
            self.waves = {
                vw: WaveNumbers(lineup.minibatches_per_wave, self._origin(vw, start)) for vw in sorted(self.lives)
            }

    def _origin(self, vw: VirtualWorkerIndex, start: Clock) -> int:
        """The last minibatch of a virtual worker before the barrier at `start`, which begins a segment."""
        known = self.waves.get(vw)
        return start * self._num_in_wave(vw) if known is None else known.origin

    def _freeze(self, passed: Segment, clock: Clock, squares: dict[VirtualWorkerIndex, dict[int, float]]) -> None:
        """Freeze the layers that are due at the barrier at `clock`, or that the norms of gradients decide."""
        freezing = self.config.freezing
        if freezing is None:
            return
        frozen = freezing.frozen_at(self.progress.frozen, after=passed.start, upto=clock, epoch=self.progress.epoch)
        if freezing.decides_at(clock, passed.reasons):
            self.deciding = squares
            frozen = freezing.decided(frozen, list(squares.values()))
        if frozen > self.progress.frozen and clock > self.config.progress.clock:
            self._recut(freezing, frozen, clock)
        self.progress = replace(self.progress, frozen=frozen)

    def _activate(self, passed: Segment, clock: Clock) -> None:
        """Change the active layers where that is due at the barrier at `clock`, or where the run begins.

        Layers that are built anew have their new weights with the first minibatch that counts: without any in a
        segment, they are due again. At the beginning they are those of the checkpoint.
        """
        changes, before = self.config.activations, self.progress.inactive
        begins = not passed.reasons and clock == self.config.progress.clock
        found = (
            started_with(changes, before, clock)
            if begins
            else inactive_at(changes, before, after=passed.start, upto=clock)
        )
        due = () if begins else fresh_at(changes, after=passed.start, upto=clock)
        still = tuple(layer for layer in self.progress.fresh if layer not in found)
        self.progress = replace(self.progress, inactive=found, fresh=due or still)

    def _recut(self, freezing: Freezing, frozen: int, clock: Clock) -> None:
        """Change the plans at the barrier at `clock` to the cuts for F, instead of any others decided for it."""
        for cut in freezing.cuts:
            known, member = self.plans.get(cut.vw), self.members.get(cut.vw)
            if cut.frozen != frozen or known is None or cut.bounds == known.bounds or not known.can_become(cut.bounds):
                continue
            moved = PlanVersion(known.version + 1, cut.bounds, known.planned)
            self._set_plan(cut.vw, moved)
            if member is not None:
                reason = f"{freezing.levels[frozen]} layers are frozen from there on"
                move = PlanMove(member.incarnation, cut.bounds, "freeze", reason)
                self.decided[cut.vw] = DecidedMove(clock, moved.version, move)

    def _take_squares(self, member: Member, vw: VirtualWorkerIndex, wave: Wave, squares: Mapping[int, float]) -> None:
        freezing = self.config.freezing
        if freezing is None or freezing.alpha is None:
            return
        if len(squares) > len(freezing.levels) or not all(0 <= square < math.inf for square in squares.values()):
            raise ProtocolViolation(
                f"wave {wave} of virtual worker {vw} has norms of {len(squares)} layers; they must be finite, of at "
                f"most {len(freezing.levels)}"
            )
        member.squares.setdefault(wave, {}).update(squares)

    def _plan_segment(self) -> None:
        following = [Clock(self.published + 1)] if self._changes_lineup else []
        self.segment = plan_segment(
            self.progress,
            self.config.data,
            minibatches_in_wave=sum(self._num_in_wave(vw) for vw in self.members),
            checkpoint_every_waves=self.config.checkpoint_every_waves,
            plan_clocks=[*self.config.plan_clocks, *following],
            drop_clocks=[*self.config.drop_clocks, *following],
            plan_every_waves=None if self.config.freezing is None else self.config.freezing.every_waves,
        )
        self.dealt_to = tuple(self.members)
        segment = self.segment
        self._announce_moves()
        self._append(BarrierRecord(self.num_records, segment.end, segment.reason, segment.epoch))

    def _forget(self) -> None:
        """Drop the records that will not be requested again.

        Every current member has passed the barrier before this one, and has read all records before that.
        """
        keep = min(self.segments[0], *self.durable)
        del self.records[: max(0, keep - self.first)]
        self.first = max(self.first, keep)

    # -- checks and look-ups -------------------------------------------------------------------------------------------

    def _evict_member(self, vw: VirtualWorkerIndex, member: Member) -> None:
        planned = self.segment.reasons
        if self._owes_work(vw, member):
            planned = tuple(reason for reason in planned if reason not in {EPOCH, END})
        del self.members[vw]
        self.preparing.pop(vw, None)
        self.leaving = tuple(other for other in self.leaving if other != vw)
        self.claimed.difference_update(i for blocks in member.samples.values() for block in blocks for i in block)
        # A shard can complete the others' commits only once it has read that this worker's part is missing.
        self.complete_at = dict.fromkeys(self.complete_at, self.num_records)
        self._append(EvictRecord(self.num_records, vw, member.incarnation, member.committed))
        if not self.finished and (EVICT not in planned or planned != self.segment.reasons or not self.members):
            self._add_request(EVICT)
            self._set_barrier(EVICT, planned)

    def _is_repeat(self, member: Member, vw: VirtualWorkerIndex, wave: Wave, stage: StageIndex) -> bool:
        """Whether this report was received before; raises if it is out of order."""
        if member.start <= wave < member.committed or stage in member.reports.get(wave, ()):
            return True
        following = member.committed
        while stage in member.reports.get(Wave(following), ()):
            following = Clock(following + 1)
        if wave != Wave(following) or wave >= self.segment.end:
            raise WaveOutOfOrder(
                f"stage {stage} of virtual worker {vw} reports wave {wave}; it may report wave {following}, "
                f"below the barrier at {self.segment.end}"
            )
        return False

    def _staged_late(self, vw: VirtualWorkerIndex, wave: Wave) -> Sequence[Record]:
        """A virtual worker that has left repeats a report, or reports an empty wave beyond its last barrier."""
        clock = self.leavers[vw].committed
        if wave >= clock:
            raise WaveOutOfOrder(f"virtual worker {vw} left at clock {clock}, but reports wave {wave}")
        return ()

    def _claim(self, vw: VirtualWorkerIndex, wave: Wave, blocks: tuple[tuple[int, ...], ...]) -> None:
        samples = [index for block in blocks for index in block]
        limit = self.config.data.num_samples
        outside = [index for index in samples if not 0 <= index < limit]
        if outside:
            raise ProtocolViolation(f"wave {wave} of virtual worker {vw} used sample {outside[0]} of {limit}")
        fresh = set(samples)
        used = self.progress.used
        twice = [i for i in samples if i in self.claimed or used[i >> 3] >> (i & 7) & 1]
        if twice or len(fresh) < len(samples):
            raise ProtocolViolation(
                f"wave {wave} of virtual worker {vw} used sample {(twice or samples)[0]} a second time"
            )
        self.claimed |= fresh

    @property
    def _gate(self) -> Gate:
        """The gate of the current segment, for decisions about waves: they do not depend on N."""
        return Gate(self.config.sync, self.segment.start)

    def _gate_of(self, vw: VirtualWorkerIndex) -> Gate:
        """The gate of one virtual worker's minibatches in the current segment."""
        return Gate(replace(self.config.sync, minibatches_per_wave=self._num_in_wave(vw)), self.segment.start)

    def _num_in_wave(self, vw: VirtualWorkerIndex) -> int:
        """N_v in the current segment."""
        known = self.waves.get(vw)
        if known is not None:
            return known.minibatches_per_wave
        return self.per_wave.get(vw, self.config.sync.minibatches_per_wave)

    def _check_per_wave(self, vw: VirtualWorkerIndex, given: int | None) -> None:
        """Check that the N_v of a new incarnation does not change the numbers of the minibatches of earlier ones."""
        known = self.per_wave.get(vw) if self.per_wave else self.config.sync.minibatches_per_wave
        if given is not None and (given < 1 or given != (given if known is None else known)):
            whose = f"virtual worker {vw} has" if known is not None else "a wave has at least"
            raise ProtocolViolation(f"{whose} {known or 1} minibatches per wave, not {given}")

    def _plan_of_next(self, vw: VirtualWorkerIndex, num_stages: int, bounds: tuple[int, ...]) -> PlanVersion | None:
        """The plan version of the next incarnation; None where its cut is not known."""
        known = PlanVersion.following(self.plans.get(vw), bounds) if bounds else None
        if known is not None and known.num_stages != num_stages:
            raise ProtocolViolation(
                f"virtual worker {vw} is admitted with {num_stages} stages, but version {known.version} of its plan "
                f"has {known.num_stages}"
            )
        return known

    def _set_plan(self, vw: VirtualWorkerIndex, plan: PlanVersion) -> None:
        """Set a plan version, which takes effect with the next segment record."""
        before = self.plans.get(vw)
        if plan != before:
            self.plans[vw] = plan
            self.moved = (*(other for other in self.moved if other != vw), vw)

    def _segment_members(
        self, members: Mapping[VirtualWorkerIndex, Member], joined: Sequence[VirtualWorkerIndex] = ()
    ) -> tuple[SegmentMember, ...]:
        """Members in the form used by records."""
        found = []
        for vw, member in members.items():
            plan, moved = self.plans.get(vw), vw in self.moved
            numbers = self.waves.get(vw)
            num = self.per_wave.get(vw) if numbers is None else numbers.minibatches_per_wave
            item = SegmentMember(vw, member.incarnation, member.num_stages, vw in joined, num)
            if numbers is not None:
                item = replace(item, origin=numbers.origin)
            found.append(item if plan is None else replace(item, version=plan.version, bounds=plan.bounds, moved=moved))
        return tuple(found)

    @property
    def _has_started(self) -> bool:
        """Whether the start is published, so that there is a current segment."""
        return self.published >= self.config.progress.clock

    @property
    def _pending(self) -> list[VirtualWorkerIndex]:
        """The newcomers that only wait for the next barrier."""
        return [vw for vw, newcomer in self.newcomers.items() if newcomer.is_complete]

    def _since(self, index: int) -> list[Record]:
        return self.records[index - self.first :]

    def _life_seen(self, vw: VirtualWorkerIndex, incarnation: Incarnation) -> LifeSeen:
        member, newcomer = self.members.get(vw), self.newcomers.get(vw)
        if newcomer is not None:
            return LifeSeen(vw, incarnation, newcomer.num_stages, "newcomer")
        if member is not None:
            return LifeSeen(vw, incarnation, member.num_stages, "member", leaving=vw in self.leaving)
        return LifeSeen(vw, incarnation, 0, "gone")

    def _life(self, vw: VirtualWorkerIndex, incarnation: Incarnation) -> Member | Newcomer:
        """A current incarnation of a virtual worker, which counts or will count."""
        for life in (self.newcomers.get(vw), self.members.get(vw)):
            if life is not None and life.incarnation == incarnation:
                return life
        newest = self.lives.get(vw)
        known = "there is no such virtual worker" if newest is None else f"the newest is {newest}"
        gone = " and is evicted" if newest == incarnation else ""
        raise StaleIncarnation(f"incarnation {incarnation} of virtual worker {vw}; {known}{gone}")

    def _member(self, vw: VirtualWorkerIndex, incarnation: Incarnation) -> Member:
        life = self._life(vw, incarnation)
        if isinstance(life, Newcomer):
            raise WaveOutOfOrder(f"virtual worker {vw} counts from the next barrier on, and cannot report before")
        return life

    @staticmethod
    def _check_stage(life: Member | Newcomer, vw: VirtualWorkerIndex, stage: StageIndex) -> None:
        if not 0 <= stage < life.num_stages:
            raise ProtocolViolation(f"virtual worker {vw} has {life.num_stages} stages; there is no stage {stage}")

    def _append(self, record: Record) -> None:
        assert record.index == self.num_records, "records are appended in order"
        self.records.append(record)


def _copied(value: Any) -> Any:
    """Copy a part of the state, without sharing mutable objects; fast, as it may contain every sample of an epoch."""
    if isinstance(value, dict):
        return {key: copy.deepcopy(entry) for key, entry in value.items()}
    return copy.copy(value)


def _staged_clock(member: Member) -> Clock:
    """Waves reported by all stages of a member, including committed ones."""
    clock = member.committed
    while len(member.reports.get(Wave(clock), ())) == member.num_stages:
        clock = Clock(clock + 1)
    return clock


def retained(members: Iterable[Member], gate: Gate, *, published: Clock, global_clock: Clock) -> tuple[Clock, ...]:
    """The published clocks that shards must keep, in order: those that a member may still request.

    Args:
        members: all of them.
        gate: of the current segment, or of the one that starts at `published`.
        published: the newest clock.
        global_clock: the waves that all members have committed.
    """
    if gate.sync.deterministic and gate.sync.staleness is not None:
        first = min(_oldest_required(gate, global_clock), published)
        return tuple(Clock(clock) for clock in range(first, published + 1))
    wanted = {published}
    for member in members:
        # Once the wave of its switch point is committed, all stages of a member have pulled the held clock.
        if member.committed <= _switch_wave(gate, member.last_switch):
            wanted.add(member.held)
        # Under `double_buffer` the next choice lacks a wave that may already be published.
        switch = gate.next_switch(member.last_switch)
        if member.committed <= _switch_wave(gate, switch):
            wanted.add(min(published, gate.newest_usable(gate.switch_minibatch(switch))))
    return tuple(sorted(wanted))


def _oldest_required(gate: Gate, global_clock: Clock) -> Clock:
    """The oldest clock that a wave not committed by all members may still require."""
    first: int = global_clock
    while _switch_wave(gate, first) < global_clock:
        first += 1
    return gate.required(gate.switch_minibatch(first))


def _switch_wave(gate: Gate, switch: int) -> Wave:
    """The wave that contains a switch point."""
    return gate.wave_of(gate.switch_minibatch(switch))
