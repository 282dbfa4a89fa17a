"""The replicated log of one job on the clock shard: the one place where order is decided (`wsp.md` §4, §5).

A pure state machine. Each event method checks the event, changes the state, and returns the records it appended to the
log; the shell (`server.shard.clock_shard`) writes history, wakes followers and answers. Nothing here reads a clock, a
socket or a tensor. A repeated event is a no-op with the same answer; an illegal one raises and changes nothing. The
same events in the same order give the same records, so a clock shard that was killed continues from what it had
written down.

After every event `_settle` commits and publishes whatever has become possible, in a fixed order.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Self

from hetpipe.decide.sync.gate import Gate
from hetpipe.decide.sync.records import (
    BarrierRecord,
    CommitRecord,
    EvictRecord,
    InitializeRecord,
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
    Segment,
    advance,
    divide,
    ends_run,
    is_finished,
    plan_segment,
)
from hetpipe.errors import ClockNotPublished, ProtocolViolation, StaleIncarnation, WaveOutOfOrder
from hetpipe.values.ids import (
    Clock,
    Incarnation,
    ShardIndex,
    StageIndex,
    Term,
    VirtualWorkerIndex,
    Wave,
    virtual_workers_text,
)
from hetpipe.values.run import ClockSnapshot
from hetpipe.values.run_document import LifeSeen
from hetpipe.values.sync import DataSpec, Membership, Progress, SyncSpec

#: Where a reader begins who knows nothing: at the newest segment record.
FROM_NEWEST_SEGMENT = -1


@dataclass(frozen=True, slots=True)
class LogConfig:
    """What the log must know of a job."""

    term: Term
    num_shards: int
    membership: Membership
    """The virtual workers that found the run; others may be admitted later."""
    sync: SyncSpec
    data: DataSpec
    checkpoint_every_waves: int | None
    progress: Progress


@dataclass(slots=True)
class Member:
    """A virtual worker that counts."""

    num_stages: int
    incarnation: Incarnation
    #: The clock at which it joined.
    start: Clock
    #: Local clock: waves committed.
    committed: Clock
    #: The clock its latest switch point chose; it may still be pulled.
    held: Clock
    #: The number of the latest switch point that asked for a clock.
    last_switch: int
    #: wave → stages that reported it staged. Holds uncommitted waves only.
    reports: dict[Wave, set[StageIndex]] = field(default_factory=dict)
    #: wave → the minibatches (blocks of sample indices) it used, from the first stage's report. Uncommitted waves only.
    samples: dict[Wave, tuple[tuple[int, ...], ...]] = field(default_factory=dict)


@dataclass(slots=True)
class Newcomer:
    """A virtual worker that will count from the next barrier on, once all its stages are there."""

    num_stages: int
    incarnation: Incarnation
    #: Stages that are there, and those of them that could begin at once.
    present: set[StageIndex] = field(default_factory=set)
    joined: set[StageIndex] = field(default_factory=set)
    #: Stages whose part of the first weights is on the shards.
    initialized: set[StageIndex] = field(default_factory=set)

    @property
    def is_complete(self) -> bool:
        """Whether all its stages could begin at once."""
        return len(self.joined) == self.num_stages


@dataclass(slots=True)
class LogState:
    """The serializable state of a `DecisionLog`; the names are those of its attributes.

    The log is deterministic: this and the events since are all that a restarted clock shard needs.
    """

    records: list[Record]
    """Those that somebody may still read, in order; the first one has index `first`."""
    first: int
    members: dict[VirtualWorkerIndex, Member]
    newcomers: dict[VirtualWorkerIndex, Newcomer]
    leaving: tuple[VirtualWorkerIndex, ...]
    """Members that are drained: they count up to the next barrier."""
    leavers: dict[VirtualWorkerIndex, Member]
    """Who left at a barrier and may still be doing its work there: until it is evicted or a later life is admitted."""
    lives: dict[VirtualWorkerIndex, Incarnation]
    """The newest incarnation of every virtual worker that was ever admitted."""
    progress: Progress
    """At the start of the segment under way: what its data division is made from."""
    published: Clock
    """Newest published clock; `start − 1` before the first weights are there."""
    acknowledged: list[int]
    """Number of records each shard has carried out."""
    durable: list[int]
    """Number of records each shard will not ask for again, should it be restarted."""
    segment_samples: list[int]
    """Sample indices committed in the segment under way, in the order of commits."""
    segment_minibatches: int
    num_waves: int
    """Waves committed so far."""
    claimed: set[int]
    """Samples used in this segment, staged ones included: nothing counts twice."""
    most_committed: Clock
    """Largest local clock ever: what a worker committed stands, though it is evicted."""
    most_switched: int
    """Largest number of a switch point that asked for a clock: where a minibatch may have begun, it has."""
    slowest: Clock
    """The global clock when it was last defined: it stays where it is while there are no members."""
    max_distance: int
    """Largest clock distance seen."""
    retained: tuple[Clock, ...]
    """Published clocks that may still be pulled."""
    has_weights: bool
    """Whether the first weights are decided; should their maker be evicted later, nobody makes others."""
    complete_at: dict[Clock, int]
    """clock → index of the record after which its weights are complete."""
    dealt_to: tuple[VirtualWorkerIndex, ...]
    """The members that share out the segment under way."""
    segments: tuple[int, int]
    """Indices of the two newest segment records; 0 where there is none."""
    asked: tuple[str, ...]
    """Reasons, of the barrier that is set or (before the start) will be, that nothing planned gives."""
    segment: Segment


class DecisionLog:
    """Orders commits, joins, evictions, barriers and publications of one job.

    Invariants (`validate_state`): no member is more than D + 1 waves ahead of another; `published` is never above the
    global clock and at most one below it once all shards have acknowledged; the barrier is above `published`.

    Everybody starts as a newcomer: the publication of the start is the first barrier that is passed.

    The attributes that change are those of `LogState`, which explains them.
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
        #: index of a commit record → the epoch and the samples it used; taken by whoever writes the history.
        self._used: dict[int, tuple[int, tuple[int, ...]]] = {}
        self._append(TermRecord(0, config.term))

    def state(self) -> LogState:
        """A copy of all that the log knows."""
        return LogState(**{field.name: _copied(getattr(self, field.name)) for field in fields(LogState)})

    @classmethod
    def restore(cls, config: LogConfig, state: LogState) -> Self:
        """The log that gave `state`."""
        log = cls(config)
        for attribute in fields(LogState):
            setattr(log, attribute.name, _copied(getattr(state, attribute.name)))
        return log

    # -- queries -------------------------------------------------------------------------------------------------------

    @property
    def num_records(self) -> int:
        """Records of the log so far, those that are forgotten included."""
        return self.first + len(self.records)

    def records_from(self, start: int, *, jumps: bool = False) -> Sequence[Record]:
        """The records from index `start` on, or from the newest segment record (`FROM_NEWEST_SEGMENT`).

        Args:
            start: where to begin.
            jumps: begin with the newest segment record if `start` is forgotten. No member asks for that, only a
                newcomer that was slow.

        Raises:
            ProtocolViolation: they are forgotten: whoever is a member, and every shard, has read them; or there are
                not that many.
        """
        newest = start == FROM_NEWEST_SEGMENT or (jumps and 0 <= start < self.first)
        wanted = self.segments[1] if newest else start
        if not self.first <= wanted <= self.num_records:
            raise ProtocolViolation(
                f"the decision log holds records {self.first} to {self.num_records}, there is none to follow from "
                f"{start}"
            )
        return self._since(wanted)

    @property
    def global_clock(self) -> Clock:
        """Minimum of the members' local clocks; with no member, what it was when there were some."""
        return min((m.committed for m in self.members.values()), default=max(self.slowest, self.published))

    @property
    def finished(self) -> bool:
        """Whether the last barrier of the run is published."""
        return self.published == self.segment.end and ends_run(self.segment.reasons)

    def take_used(self, record: CommitRecord) -> tuple[int, tuple[int, ...]]:
        """The epoch and the sample indices of a commit, once."""
        return self._used.pop(record.index)

    def check_stage(self, vw: VirtualWorkerIndex, incarnation: Incarnation, stage: StageIndex) -> None:
        """Refuse who is no stage of a present member, nor of one that left and may still be at work.

        Raises:
            StaleIncarnation, ProtocolViolation: as named.
        """
        has_left = self.has_left(vw, incarnation)
        self._check_stage(self.leavers[vw] if has_left else self._member(vw, incarnation), vw, stage)

    def check_follower(self, vw: VirtualWorkerIndex, incarnation: Incarnation, stage: StageIndex) -> None:
        """Refuse who is no stage of a life that counts, will count, or left and may still be at work.

        Raises:
            StaleIncarnation, ProtocolViolation: as named.
        """
        has_left = self.has_left(vw, incarnation)
        self._check_stage(self.leavers[vw] if has_left else self._life(vw, incarnation), vw, stage)

    def has_left(self, vw: VirtualWorkerIndex, incarnation: Incarnation) -> bool:
        """Whether this life left at a barrier, and may still be doing its work there."""
        left = self.leavers.get(vw)
        return left is not None and left.incarnation == incarnation

    def present(self, vw: VirtualWorkerIndex) -> tuple[StageIndex, ...]:
        """The stages of a member or newcomer that are there, ready or not."""
        if vw in self.members:
            return tuple(StageIndex(stage) for stage in range(self.members[vw].num_stages))
        return tuple(sorted(self.newcomers[vw].present))

    @property
    def newest_segment(self) -> SegmentRecord | None:
        """The record of the segment under way; None before the start is published."""
        record = self.records[self.segments[1] - self.first]
        return record if isinstance(record, SegmentRecord) else None

    def makes_weights(self, vw: VirtualWorkerIndex) -> bool:
        """Whether `vw` shall make the first weights: there are none, and none with a lower index is to come."""
        return not self.has_weights and vw == min(self.newcomers, default=None)

    def snapshot(self) -> ClockSnapshot:
        """The clocks, for people and the coordinator."""
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
        )

    def newest_lives(self) -> tuple[LifeSeen, ...]:
        """The newest life of everybody, in index order."""
        return tuple(self._life_seen(vw, incarnation) for vw, incarnation in sorted(self.lives.items()))

    def pending_publish_reason(self) -> str:
        """Who keeps the published clock from advancing, as a phrase."""
        wanted = self.published + 1
        absent = [vw for vw, newcomer in self.newcomers.items() if not newcomer.is_complete]
        if not self._has_started and absent:
            return "the stages of " + virtual_workers_text(absent)
        if not self._has_started and not self.has_weights:
            return "the first weights"
        if self._has_started and not self.members and not self._pending:
            return "the stages of " + virtual_workers_text(absent) if absent else "any virtual worker to come back"
        behind = [vw for vw, member in self.members.items() if member.committed < wanted]
        if behind:
            return f"{virtual_workers_text(behind)} to commit wave {wanted - 1}"
        late = [shard for shard, done in enumerate(self.acknowledged) if done < self.num_records]
        return f"parameter servers {late} to apply wave {wanted - 1}"

    def validate_state(self) -> None:
        """Check the invariants; for tests."""
        committed = [m.committed for m in self.members.values()]
        if committed and self.config.sync.staleness is not None:
            distance = max(committed) - min(committed)
            assert distance <= self.config.sync.staleness + 1, f"clock distance {distance}"
        assert not committed or self.published <= min(committed), f"{self.published} published before {committed}"
        assert self.segment.end >= self.published, f"barrier {self.segment.end} behind {self.published}"
        assert all(record.index == index for index, record in enumerate(self.records, start=self.first)), "log has gaps"

    # -- events --------------------------------------------------------------------------------------------------------

    def admit(self, vw: VirtualWorkerIndex, incarnation: Incarnation, num_stages: int) -> Sequence[Record]:
        """A new life of a virtual worker will come; an older one is over.

        Raises:
            StaleIncarnation: it had a newer life already.
            ProtocolViolation: a virtual worker has at least one stage, and one life has one number of them.
        """
        before = self.num_records
        newest = self.lives.get(vw)
        if newest is not None and incarnation < newest:
            raise StaleIncarnation(f"incarnation {incarnation} of virtual worker {vw}; its newest one is {newest}")
        present = self.members.get(vw) or self.newcomers.get(vw)
        if num_stages < 1:
            raise ProtocolViolation(f"virtual worker {vw} cannot have {num_stages} stages")
        if incarnation == newest:
            if present is not None and present.num_stages != num_stages:
                raise ProtocolViolation(f"virtual worker {vw} has {present.num_stages} stages, not {num_stages}")
            return ()
        if present is not None:
            self.evict(vw, present.incarnation)
        self.leavers.pop(vw, None)
        self.lives[vw] = incarnation
        self.newcomers[vw] = Newcomer(num_stages, incarnation)
        self.newcomers = dict(sorted(self.newcomers.items()))
        return self._since(before)

    def join(
        self, vw: VirtualWorkerIndex, incarnation: Incarnation, stage: StageIndex, *, ready: bool = True
    ) -> Sequence[Record]:
        """A stage process is there. When all stages of its virtual worker are ready, it joins at the next barrier.

        Who is not ready is not waited for: nobody shall wait for processes that have yet to find each other.
        """
        before = self.num_records
        life = self._life(vw, incarnation)
        self._check_stage(life, vw, stage)
        if isinstance(life, Newcomer):
            life.present.add(stage)
        if isinstance(life, Newcomer) and ready and stage not in life.joined:
            life.joined.add(stage)
            if life.is_complete:
                if self._has_started and not self.finished:
                    self._ask(JOIN)
                self._settle()
        return self._since(before)

    def initialized(self, vw: VirtualWorkerIndex, incarnation: Incarnation, stage: StageIndex) -> Sequence[Record]:
        """A stage has staged its part of the first weights on every shard; the first whole set counts."""
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
    ) -> Sequence[Record]:
        """A stage has staged its part of a wave on every shard.

        Args:
            vw, incarnation, wave, stage: whose part.
            blocks: the sample indices of each minibatch of the wave, from the first stage; None from the others.
            segment: where the segment began that the stage works in.

        Raises:
            WaveOutOfOrder: negative, skipped, at or beyond the next barrier, or of a segment that is over: a late copy
                of a report that a barrier dropped.
            ProtocolViolation: a sample outside of the data, or used already in this epoch.
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
                f"stage {stage} of virtual worker {vw} reports wave {wave} of the segment that began at {segment}; the "
                f"present one began at {self.segment.start}"
            )
        if (stage == 0) != (blocks is not None):
            raise ProtocolViolation("the first stage, and no other, reports the samples of a wave")
        if blocks is not None:
            self._claim(vw, wave, blocks)
            member.samples[wave] = blocks
        member.reports.setdefault(wave, set()).add(stage)
        self._settle()
        return self._since(before)

    def acknowledge(self, shard: ShardIndex, num_records: int, durable: int | None = None) -> Sequence[Record]:
        """A shard has carried out the first `num_records` records.

        Args:
            shard: which one.
            num_records: how many.
            durable: how many of them it will not ask for again, should it be restarted; None: all.
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
        self._settle()
        return self._since(before)

    def hold(self, vw: VirtualWorkerIndex, incarnation: Incarnation, switch: int) -> Clock:
        """The clock of `vw` from a switch point on, as the gate chooses it. Repeatable.

        Raises:
            ClockNotPublished: the clock it requires is not published yet; or no clock is chosen there, which only
                somebody asks who has not heard of the barrier that the segment began with.
            WaveOutOfOrder: before the latest question, or before the segment.
        """
        member = self._member(vw, incarnation)
        gate = self._gate
        p = gate.switch_minibatch(switch)
        if switch < member.last_switch or p <= gate.start * self.config.sync.minibatches_per_wave:
            asked = gate.switch_minibatch(member.last_switch)
            raise WaveOutOfOrder(f"virtual worker {vw} asks for the clock of minibatch {p} after {asked}")
        if gate.newest_usable(p) <= gate.start:
            raise ClockNotPublished(f"minibatch {p} begins with the clock of the barrier at {gate.start}")
        if switch == member.last_switch:
            return member.held
        chosen = gate.chosen(p, in_use=member.held, published=self.published)
        if chosen is None:
            awaited = gate.awaited(p, in_use=member.held)
            raise ClockNotPublished(f"minibatch {p} needs clock {awaited}, published is {self.published}")
        member.held = chosen
        member.last_switch = switch
        self.most_switched = max(self.most_switched, switch)
        return member.held

    def request_barrier(self, reason: str) -> Sequence[Record]:
        """Set a barrier that nobody planned, as early as is safe; it ends the run if `reason` is `stop`."""
        before = self.num_records
        if not self.finished:
            self._ask(reason)
            self._settle()
        return self._since(before)

    def drain(self, vw: VirtualWorkerIndex, incarnation: Incarnation) -> Sequence[Record]:
        """A virtual worker is to leave at the next barrier, with everything that it has done before it.

        A newcomer, which has done nothing yet, is let go at once, without a record: whoever asks for that also ends its
        processes. Nothing happens when that life has left, or is over, already.

        Raises:
            StaleIncarnation: it never had such a life.
        """
        before = self.num_records
        if self.has_left(vw, incarnation):
            return ()
        member = self.members.get(vw)
        if member is None or member.incarnation != incarnation:
            return self.evict(vw, incarnation)
        if vw not in self.leaving and not self.finished:
            self.leaving = (*self.leaving, vw)
            self._ask(DRAIN)
            self._settle()
        return self._since(before)

    def evict(self, vw: VirtualWorkerIndex, incarnation: Incarnation) -> Sequence[Record]:
        """A virtual worker is gone: it stops counting, what it had staged is dropped, what it committed stands.

        There is no record of a newcomer's end. Nothing happens when that life is over already.

        Raises:
            StaleIncarnation: it never had such a life.
        """
        before = self.num_records
        newest = self.lives.get(vw)
        if newest is None or incarnation > newest:
            raise StaleIncarnation(f"virtual worker {vw} had no incarnation {incarnation}")
        newcomer = self.newcomers.get(vw)
        if newcomer is not None and newcomer.incarnation == incarnation:
            del self.newcomers[vw]
        if self.has_left(vw, incarnation):
            del self.leavers[vw]
        member = self.members.get(vw)
        if member is not None and member.incarnation == incarnation:
            self._evict_member(vw, member)
        self._settle()
        return self._since(before)

    # -- what follows from an event: barriers, commits, publications ---------------------------------------------------

    def _ask(self, reason: str) -> None:
        """Somebody wants a barrier; before the start there is none to set, and none is set twice."""
        if reason not in self.segment.reasons:
            self._note(reason)
            if self._has_started:
                self._set_barrier(reason, self.segment.reasons)

    def _note(self, reason: str) -> None:
        self.asked = self.asked if reason in self.asked else (*self.asked, reason)

    def _set_barrier(self, reason: str, planned: tuple[str, ...]) -> None:
        """Set an unplanned barrier.

        `planned` are the reasons that stay true where the planned barrier is not passed; what was asked for stays in
        any case.
        """
        clock = self._unplanned_clock()
        kept = tuple(r for r in planned if r in self.asked or clock == self.segment.end)
        reasons = kept if reason in kept else (*kept, reason)
        self.segment = Segment(self.segment.start, clock, reasons, self.segment.epoch)
        for member in self.members.values():
            for wave in [w for w in member.reports if w >= clock]:
                del member.reports[wave]
                member.samples.pop(wave, None)
        if not self.members:
            # Nobody will commit anything before it: shards complete its clock as soon as they read this.
            self.complete_at = {Clock(c): self.num_records for c in range(self.published + 1, clock + 1)}
        self._append(BarrierRecord(self.num_records, clock, self.segment.reason, self.segment.epoch))

    def _unplanned_clock(self) -> Clock:
        if not self.members:
            return Clock(max(self.most_committed, self.published + 1))
        return self._gate.unplanned_barrier(
            committed=self.most_committed,
            published=self.published,
            # Up to the first switch point at which a clock is chosen, minibatches start without a question.
            last_switch=max(self.segment.start + 1, self.most_switched),
            planned=self.segment.end,
        )

    def _owes_work(self, vw: VirtualWorkerIndex, member: Member) -> bool:
        """Whether a member has minibatches of this segment that are not committed: then they will be dealt again."""
        n, start = self.config.sync.minibatches_per_wave, self.segment.start
        dealt = divide(self.progress, self.config.data, self.dealt_to).get(vw, ())
        return len(dealt[: (self.segment.end - start) * n]) > (member.committed - start) * n

    def _settle(self) -> None:
        """Commit and publish whatever has become possible, in a fixed order."""
        while self._commit_one() or self._publish_one():
            pass
        self.slowest = self.global_clock

    def _commit_one(self) -> bool:
        for vw, member in self.members.items():
            wave = Wave(member.committed)
            complete = len(member.reports.get(wave, ())) == member.num_stages
            if complete and self._gate.may_commit(wave, self.published):
                del member.reports[wave]
                blocks = member.samples.pop(wave, ())
                indices = tuple(index for block in blocks for index in block)
                self.segment_samples.extend(indices)
                self._used[self.num_records] = (self.segment.epoch, indices)
                self.segment_minibatches += len(blocks)
                self.num_waves += 1
                member.committed = Clock(wave + 1)
                self.most_committed = max(self.most_committed, member.committed)
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
        """Whether `clock` lacks nobody's wave, and somebody is there to go on from it.

        The start waits for the first life of everybody: who dies again and again must not keep the others from it.
        """
        if not self._has_started:
            founders = [life for life in self.newcomers.values() if life.incarnation == 0]
            return bool(self._pending) and all(life.is_complete for life in founders)
        if not self.members:
            return bool(self._pending)
        return self.global_clock >= clock

    def _end_at_once(self) -> None:
        """A run that has nothing left to do when it starts ends there."""
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
        self.segment_samples = []
        self.segment_minibatches = 0
        self.claimed = set()
        for member in self.members.values():
            member.held = self.published
            member.last_switch = self.published

    def _cross(self) -> None:
        """Let those go who leave and those in who wait, say who shares the next segment, and where it ends."""
        passed, start = self.segment, self.published
        reasons, ends = passed.reasons, ends_run(passed.reasons)
        # At the end nobody joins but to do what is left to do there.
        left = {} if ends else {vw: self.members.pop(vw) for vw in sorted(self.leaving)}
        self.leavers |= left
        self.leaving = ()
        joined = self._pending if not (ends and self.members) else []
        for vw in joined:
            newcomer = self.newcomers.pop(vw)
            self.members[vw] = Member(newcomer.num_stages, newcomer.incarnation, start, start, start, start)
        self.members = dict(sorted(self.members.items()))
        self.segments = (self.segments[1], self.num_records)
        self._append(
            SegmentRecord(self.num_records, start, reasons, passed.epoch, _told(self.members, joined), _told(left))
        )
        self._forget()
        if ends:
            self.segment = Segment(passed.start, start, reasons, passed.epoch)
            return
        if not self.members:
            # Whoever comes first joins one clock on: shards build up to a barrier that nobody is there to lower.
            self.segment, self.dealt_to = Segment(start, start, (), self.progress.epoch), ()
            self._note(DRAIN)
            self._set_barrier(DRAIN, ())
            return
        self._plan_segment()
        asked, self.asked = self.asked if not passed.reasons else (), ()
        for reason in asked:
            self._ask(reason)

    def _plan_segment(self) -> None:
        self.segment = plan_segment(
            self.progress,
            self.config.data,
            members=len(self.members),
            minibatches_per_wave=self.config.sync.minibatches_per_wave,
            checkpoint_every_waves=self.config.checkpoint_every_waves,
        )
        self.dealt_to = tuple(self.members)
        segment = self.segment
        self._append(BarrierRecord(self.num_records, segment.end, segment.reason, segment.epoch))

    def _forget(self) -> None:
        """Drop the records that nobody will ask for.

        Who is a member now has passed the barrier before this one, and has read all that came before that.
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
        self.leaving = tuple(other for other in self.leaving if other != vw)
        self.claimed.difference_update(i for blocks in member.samples.values() for block in blocks for i in block)
        # What the others committed is complete on a shard only once it knows that this worker's part will not come.
        self.complete_at = dict.fromkeys(self.complete_at, self.num_records)
        self._append(EvictRecord(self.num_records, vw, member.incarnation, member.committed))
        if not self.finished and (EVICT not in planned or planned != self.segment.reasons or not self.members):
            self._note(EVICT)
            self._set_barrier(EVICT, planned)

    def _is_repeat(self, member: Member, vw: VirtualWorkerIndex, wave: Wave, stage: StageIndex) -> bool:
        """Whether this report was taken before; raises if it comes out of order."""
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
        """Who has left repeats what it had reported, or reports an empty wave beyond the barrier that let it go."""
        clock = self.leavers[vw].committed
        if wave >= clock:
            raise WaveOutOfOrder(f"virtual worker {vw} left at clock {clock}, and reports wave {wave}")
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
        """Of the segment under way."""
        return Gate(self.config.sync, self.segment.start)

    @property
    def _has_started(self) -> bool:
        """Whether the start is published, so that there is a segment under way."""
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
        """A present life of a virtual worker, which counts or will count."""
        for life in (self.newcomers.get(vw), self.members.get(vw)):
            if life is not None and life.incarnation == incarnation:
                return life
        newest = self.lives.get(vw)
        known = "there is no such virtual worker" if newest is None else f"its newest one is {newest}"
        gone = " and is evicted" if newest == incarnation else ""
        raise StaleIncarnation(f"incarnation {incarnation} of virtual worker {vw}; {known}{gone}")

    def _member(self, vw: VirtualWorkerIndex, incarnation: Incarnation) -> Member:
        life = self._life(vw, incarnation)
        if isinstance(life, Newcomer):
            raise WaveOutOfOrder(f"virtual worker {vw} counts from the next barrier on, and has nothing to do before")
        return life

    @staticmethod
    def _check_stage(life: Member | Newcomer, vw: VirtualWorkerIndex, stage: StageIndex) -> None:
        if not 0 <= stage < life.num_stages:
            raise ProtocolViolation(f"virtual worker {vw} has {life.num_stages} stages, there is no stage {stage}")

    def _append(self, record: Record) -> None:
        assert record.index == self.num_records, "records are appended in order"
        self.records.append(record)


def _copied(value: Any) -> Any:
    """A part of the state, which shares nothing that changes: quick, as it may hold every sample of an epoch."""
    if isinstance(value, dict):
        return {key: copy.deepcopy(entry) for key, entry in value.items()}
    return copy.copy(value)


def _staged_clock(member: Member) -> Clock:
    """Waves that all stages of a member have reported, those that are committed among them."""
    clock = member.committed
    while len(member.reports.get(Wave(clock), ())) == member.num_stages:
        clock = Clock(clock + 1)
    return clock


def _told(
    members: Mapping[VirtualWorkerIndex, Member], joined: Sequence[VirtualWorkerIndex] = ()
) -> tuple[SegmentMember, ...]:
    """Members as a record names them."""
    return tuple(
        SegmentMember(vw, member.incarnation, member.num_stages, joined=vw in joined) for vw, member in members.items()
    )


def retained(members: Iterable[Member], gate: Gate, *, published: Clock, global_clock: Clock) -> tuple[Clock, ...]:
    """The published clocks that shards must keep, in their order: those that some member may still ask for.

    Args:
        members: all of them.
        gate: of the segment that is under way, or that begins with `published`.
        published: the newest clock.
        global_clock: the waves that all members have committed.
    """
    if gate.sync.deterministic and gate.sync.staleness is not None:
        first = min(_oldest_required(gate, global_clock), published)
        return tuple(Clock(clock) for clock in range(first, published + 1))
    wanted = {published}
    for member in members:
        # Once the wave of its switch point is committed, all stages of a member have pulled what it holds.
        if member.committed <= _switch_wave(gate, member.last_switch):
            wanted.add(member.held)
        # Under `double_buffer` the next answer lacks a wave that may be published already.
        switch = gate.next_switch(member.last_switch)
        if member.committed <= _switch_wave(gate, switch):
            wanted.add(min(published, gate.newest_usable(gate.switch_minibatch(switch))))
    return tuple(sorted(wanted))


def _oldest_required(gate: Gate, global_clock: Clock) -> Clock:
    """The oldest clock that a wave which is not committed by all may still require."""
    first: int = global_clock
    while _switch_wave(gate, first) < global_clock:
        first += 1
    return gate.required(gate.switch_minibatch(first))


def _switch_wave(gate: Gate, switch: int) -> Wave:
    """The wave that a switch point lies in."""
    return gate.wave_of(gate.switch_minibatch(switch))
