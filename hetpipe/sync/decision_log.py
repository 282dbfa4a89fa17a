"""The clock shard's mind: the one place where order is decided (`wsp.md` §4, §5).

A pure state machine. Each event method checks the event, changes the state, and returns the records it appended to the
log; the shell (`ps.clock_shard`) writes history, wakes followers and answers. Nothing here reads a clock, a socket or
a tensor. A repeated event is a no-op with the same answer; an illegal one raises and changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hetpipe.errors import ClockNotPublished, ProtocolViolation, StaleIncarnation, WaveOutOfOrder
from hetpipe.spec.ids import Clock, Incarnation, ShardIndex, StageIndex, Term, VirtualWorkerIndex, Wave
from hetpipe.spec.run import ClockSnapshot
from hetpipe.spec.sync import DataSpec, Membership, Progress, SyncSpec
from hetpipe.sync.gate import may_commit, unplanned_barrier
from hetpipe.sync.records import (
    BarrierRecord,
    CommitRecord,
    EvictRecord,
    InitializeRecord,
    JoinRecord,
    PublishRecord,
    Record,
    TermRecord,
)
from hetpipe.sync.retention import SwitchPoints, retained
from hetpipe.sync.segment import END, EPOCH, EVICT, STOP, Segment, advance, divide, plan_segment


@dataclass(frozen=True, slots=True)
class LogConfig:
    """What the log must know of a job."""

    term: Term
    num_shards: int
    membership: Membership
    sync: SyncSpec
    data: DataSpec
    checkpoint_every_waves: int | None
    progress: Progress


@dataclass(slots=True)
class Member:
    """One virtual worker as the clock shard sees it."""

    num_stages: int
    incarnation: Incarnation = Incarnation(0)
    #: Stages that are there; the virtual worker joins when all are.
    joined: set[StageIndex] = field(default_factory=set)
    #: Stages whose part of the first weights is on the shards.
    initialized: set[StageIndex] = field(default_factory=set)
    #: Local clock: waves committed.
    committed: Clock = Clock(0)
    #: wave → stages that reported it staged. Holds uncommitted waves only.
    reports: dict[Wave, set[StageIndex]] = field(default_factory=dict)
    #: wave → the minibatches (blocks of sample indices) it used, from the first stage's report. Uncommitted waves only.
    samples: dict[Wave, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    #: The clock its latest switch point chose; it may still be pulled.
    held: Clock = Clock(0)
    #: The number of the latest switch point that asked for a clock.
    last_switch: int = 0


class DecisionLog:
    """Orders commits, joins, evictions, barriers and publications of one job.

    Invariants (`validate_state`): no member is more than D + 1 waves ahead of another; `published` is never above the
    global clock and at most one below it once all shards have acknowledged; the barrier is above `published`.
    """

    def __init__(self, config: LogConfig) -> None:
        start = config.progress.clock
        self.config = config
        #: Every record since the start of the job, in order; `index` is the position.
        self.records: list[Record] = []
        self.members: dict[VirtualWorkerIndex, Member] = {
            vw: Member(count, committed=start, held=start, last_switch=start)
            for vw, count in sorted(config.membership.num_stages.items())
        }
        #: Progress at the start of the segment under way: what its data division is made from.
        self.progress = config.progress
        #: Newest published clock; `start − 1` before the first weights are there.
        self.published = Clock(start - 1)
        #: Number of records each shard has carried out.
        self.acknowledged: list[int] = [0] * config.num_shards
        #: Sample indices committed in the segment under way, in the order of commits.
        self.segment_samples: list[int] = []
        self.segment_minibatches = 0
        #: Bits of samples used in this epoch, staged ones included: nothing counts twice.
        self._claimed: set[int] = set()
        #: Largest local clock ever: what a worker committed stands, though it is evicted.
        self._most_committed = start
        #: Largest clock distance seen.
        self.max_distance = 0
        #: Published clocks that may still be pulled.
        self.retained: tuple[Clock, ...] = ()
        #: index of a commit record → the epoch and the samples it used; taken by whoever writes the history.
        self._used: dict[int, tuple[int, tuple[int, ...]]] = {}
        #: Whether the first weights are decided; should their maker be evicted later, nobody makes others.
        self._has_weights = False
        #: clock → index of the record after which its weights are complete.
        self._complete_at: dict[Clock, int] = {}
        #: The members that share out the segment under way.
        self._dealt_to: tuple[VirtualWorkerIndex, ...] = ()
        self._append(TermRecord(0, config.term))
        self.segment: Segment = self._next_segment()

    # -- events ------------------------------------------------------------------------------------------------------

    def join(self, vw: VirtualWorkerIndex, incarnation: Incarnation, stage: StageIndex) -> Sequence[Record]:
        """A stage process is there. When all stages of its virtual worker are, the worker joins."""
        before = len(self.records)
        member = self._member(vw, incarnation)
        self._check_stage(member, vw, stage)
        if stage not in member.joined:
            member.joined.add(stage)
            if len(member.joined) == member.num_stages:
                self._append(JoinRecord(len(self.records), vw, incarnation, member.committed))
                self._settle()
        return self.records[before:]

    def initialized(self, vw: VirtualWorkerIndex, incarnation: Incarnation, stage: StageIndex) -> Sequence[Record]:
        """A stage of the first virtual worker has staged its part of the first weights on every shard."""
        before = len(self.records)
        member = self._member(vw, incarnation)
        self._check_stage(member, vw, stage)
        if vw != min(self.members):
            raise ProtocolViolation(f"virtual worker {vw} sent first weights; only {min(self.members)} makes them")
        if stage not in member.initialized and not self._has_weights:
            member.initialized.add(stage)
            if len(member.initialized) == member.num_stages:
                start = self.progress.clock
                self._has_weights = True
                self._complete_at[start] = len(self.records)
                self._append(InitializeRecord(len(self.records), start))
                self._settle()
        return self.records[before:]

    def staged(
        self,
        vw: VirtualWorkerIndex,
        incarnation: Incarnation,
        wave: Wave,
        stage: StageIndex,
        blocks: tuple[tuple[int, ...], ...] | None,
    ) -> Sequence[Record]:
        """A stage has staged its part of a wave on every shard.

        Args:
            vw, incarnation, wave, stage: whose part.
            blocks: the sample indices of each minibatch of the wave, from the first stage; None from the others.

        Raises:
            WaveOutOfOrder: negative, skipped, or at or beyond the next barrier.
            ProtocolViolation: a sample outside of the data, or used already in this epoch.
        """
        before = len(self.records)
        member = self._member(vw, incarnation)
        self._check_stage(member, vw, stage)
        if self._is_repeat(member, vw, wave, stage):
            return ()
        if (stage == 0) != (blocks is not None):
            raise ProtocolViolation("the first stage, and no other, reports the samples of a wave")
        if blocks is not None:
            self._claim(vw, wave, blocks)
            member.samples[wave] = blocks
        member.reports.setdefault(wave, set()).add(stage)
        self._settle()
        return self.records[before:]

    def acknowledge(self, shard: ShardIndex, num_records: int) -> Sequence[Record]:
        """A shard has carried out the first `num_records` records."""
        before = len(self.records)
        if not 0 <= shard < len(self.acknowledged):
            raise ProtocolViolation(f"there is no shard {shard}; the job has {len(self.acknowledged)}")
        if not 0 <= num_records <= len(self.records):
            raise ProtocolViolation(f"shard {shard} acknowledges {num_records} of {len(self.records)} records")
        self.acknowledged[shard] = max(self.acknowledged[shard], num_records)
        self._settle()
        return self.records[before:]

    def hold(self, vw: VirtualWorkerIndex, incarnation: Incarnation, switch: int) -> Clock:
        """The clock of `vw` from a switch point on: the newest published one that it may use. Repeatable.

        Raises:
            ClockNotPublished: the clock it requires is not published yet; or no clock is chosen there, which only
                somebody asks who has not heard of the barrier that the segment began with.
            WaveOutOfOrder: before the latest question, or before the segment.
        """
        member = self._member(vw, incarnation)
        points = SwitchPoints(self.config.sync, self.segment.start)
        p, required = points.minibatch(switch), points.required(switch)
        if switch < member.last_switch or p <= points.start * self.config.sync.minibatches_per_wave:
            asked = points.minibatch(member.last_switch)
            raise WaveOutOfOrder(f"virtual worker {vw} asks for the clock of minibatch {p} after {asked}")
        if points.newest_usable(switch) <= points.start:
            raise ClockNotPublished(f"minibatch {p} begins with the clock of the barrier at {points.start}")
        if switch == member.last_switch:
            return member.held
        if self.published < required:
            raise ClockNotPublished(f"minibatch {p} needs clock {required}, published is {self.published}")
        member.held = min(self.published, points.newest_usable(switch))
        member.last_switch = switch
        return member.held

    def request_barrier(self, reason: str) -> Sequence[Record]:
        """Set a barrier that nobody planned, as early as is safe; it ends the run if `reason` is `stop`."""
        before = len(self.records)
        if reason not in self.segment.reasons and not self.finished:
            self._set_barrier(reason, self.segment.reasons)
            self._settle()
        return self.records[before:]

    def evict(self, vw: VirtualWorkerIndex, incarnation: Incarnation) -> Sequence[Record]:
        """A virtual worker is gone: it stops counting, what it had staged is dropped, what it committed stands."""
        before = len(self.records)
        member = self._member(vw, incarnation)
        planned = self.segment.reasons
        if self._owes_work(vw, member):
            planned = tuple(reason for reason in planned if reason not in {EPOCH, END})
        del self.members[vw]
        self._claimed.difference_update(i for blocks in member.samples.values() for block in blocks for i in block)
        # What the others committed is complete on a shard only once it knows that this worker's part will not come.
        self._complete_at = dict.fromkeys(self._complete_at, len(self.records))
        self._append(EvictRecord(len(self.records), vw, incarnation, member.committed))
        if not self.finished and (EVICT not in planned or planned != self.segment.reasons):
            self._set_barrier(EVICT, planned)
        self._settle()
        return self.records[before:]

    # -- answers -----------------------------------------------------------------------------------------------------

    @property
    def global_clock(self) -> Clock:
        """Minimum of the members' local clocks; with no member, the published clock."""
        return min((m.committed for m in self.members.values()), default=self.published)

    @property
    def finished(self) -> bool:
        """Whether the last barrier of the run is published."""
        return self.published == self.segment.end and bool({END, STOP} & set(self.segment.reasons))

    def take_used(self, record: CommitRecord) -> tuple[int, tuple[int, ...]]:
        """The epoch and the sample indices of a commit, once."""
        return self._used.pop(record.index)

    def check_stage(self, vw: VirtualWorkerIndex, incarnation: Incarnation, stage: StageIndex) -> None:
        """Refuse who is no stage of a present member.

        Raises:
            StaleIncarnation, ProtocolViolation: as named.
        """
        self._check_stage(self._member(vw, incarnation), vw, stage)

    def all_joined(self, vw: VirtualWorkerIndex) -> bool:
        """Whether every stage of `vw` is there."""
        member = self.members[vw]
        return len(member.joined) == member.num_stages

    def snapshot(self) -> ClockSnapshot:
        """The clocks, for people and the coordinator."""
        return ClockSnapshot(
            term=self.config.term,
            published=max(self.published, self.progress.clock),
            global_clock=self.global_clock,
            local={vw: member.committed for vw, member in self.members.items()},
            max_distance=self.max_distance,
            epoch=self.progress.epoch,
            minibatches=self.progress.minibatches + self.segment_minibatches,
            samples=self.progress.samples + len(self.segment_samples),
            barrier=self.segment.end,
            barrier_reason=self.segment.reason,
        )

    def whom_a_publish_waits_for(self) -> str:
        """Who keeps the published clock from advancing, as a phrase."""
        wanted = self.published + 1
        absent = [vw for vw in self.members if not self.all_joined(vw)]
        if absent:
            return "the stages of " + _names(absent)
        behind = [vw for vw, member in self.members.items() if member.committed < wanted]
        if behind:
            return f"{_names(behind)} to commit wave {wanted - 1}"
        late = [shard for shard, done in enumerate(self.acknowledged) if done < len(self.records)]
        return f"parameter servers {late} to apply wave {wanted - 1}"

    def validate_state(self) -> None:
        """Check the invariants; for tests."""
        committed = [m.committed for m in self.members.values()]
        if committed and self.config.sync.staleness is not None:
            distance = max(committed) - min(committed)
            assert distance <= self.config.sync.staleness + 1, f"clock distance {distance}"
        assert not committed or self.published <= min(committed), f"{self.published} published before {committed}"
        assert self.segment.end >= self.published, f"barrier {self.segment.end} behind {self.published}"
        assert all(record.index == index for index, record in enumerate(self.records)), "log has gaps"

    # -- inside ------------------------------------------------------------------------------------------------------

    def _member(self, vw: VirtualWorkerIndex, incarnation: Incarnation) -> Member:
        member = self.members.get(vw)
        if member is None:
            raise StaleIncarnation(f"virtual worker {vw} is no member; members are {sorted(self.members)}")
        if incarnation != member.incarnation:
            raise StaleIncarnation(
                f"incarnation {incarnation} of virtual worker {vw}; its present one is {member.incarnation}"
            )
        return member

    @staticmethod
    def _check_stage(member: Member, vw: VirtualWorkerIndex, stage: StageIndex) -> None:
        if not 0 <= stage < member.num_stages:
            raise ProtocolViolation(f"virtual worker {vw} has {member.num_stages} stages, there is no stage {stage}")

    def _is_repeat(self, member: Member, vw: VirtualWorkerIndex, wave: Wave, stage: StageIndex) -> bool:
        """Whether this report was taken before; raises if it comes out of order."""
        if self.config.progress.clock <= wave < member.committed or stage in member.reports.get(wave, ()):
            return True
        following = member.committed
        while stage in member.reports.get(Wave(following), ()):
            following = Clock(following + 1)
        if wave != Wave(following) or wave >= self.segment.end or self.published < self.segment.start:
            raise WaveOutOfOrder(
                f"stage {stage} of virtual worker {vw} reports wave {wave}; it may report wave {following}, "
                f"below the barrier at {self.segment.end}"
            )
        return False

    def _claim(self, vw: VirtualWorkerIndex, wave: Wave, blocks: tuple[tuple[int, ...], ...]) -> None:
        samples = [index for block in blocks for index in block]
        limit = self.config.data.num_samples
        outside = [index for index in samples if not 0 <= index < limit]
        if outside:
            raise ProtocolViolation(f"wave {wave} of virtual worker {vw} used sample {outside[0]} of {limit}")
        fresh = set(samples)
        used = self.progress.used
        twice = [i for i in samples if i in self._claimed or used[i >> 3] >> (i & 7) & 1]
        if twice or len(fresh) < len(samples):
            raise ProtocolViolation(
                f"wave {wave} of virtual worker {vw} used sample {(twice or samples)[0]} a second time"
            )
        self._claimed |= fresh

    def _append(self, record: Record) -> None:
        assert record.index == len(self.records), "records are appended in order"
        self.records.append(record)

    def _set_barrier(self, reason: str, planned: tuple[str, ...]) -> None:
        """Set an unplanned barrier; `planned` are the reasons that stay true where the planned one is not passed."""
        clock = unplanned_barrier(
            committed=self._most_committed,
            # Also before the start is published the barrier leaves room for a wave: else nothing could pass it.
            published=max(self.published, self.segment.start),
            staleness=self.config.sync.staleness,
            # Up to the first switch point at which a clock is chosen, minibatches start without a question.
            last_switch=max(self.segment.start + 1, *(m.last_switch for m in self.members.values()), 0),
            planned=self.segment.end,
            weights=self.config.sync.weights,
        )
        kept = planned if clock == self.segment.end else ()
        reasons = kept if reason in kept else (*kept, reason)
        self.segment = Segment(self.segment.start, clock, reasons, self.segment.epoch)
        for member in self.members.values():
            for wave in [w for w in member.reports if w >= clock]:
                del member.reports[wave]
                member.samples.pop(wave, None)
        self._append(BarrierRecord(len(self.records), clock, self.segment.reason, self.segment.epoch))

    def _owes_work(self, vw: VirtualWorkerIndex, member: Member) -> bool:
        """Whether a member has minibatches of this segment that are not committed: then they will be dealt again."""
        n, start = self.config.sync.minibatches_per_wave, self.segment.start
        dealt = divide(self.progress, self.config.data, self._dealt_to).get(vw, ())
        return len(dealt[: (self.segment.end - start) * n]) > (member.committed - start) * n

    def _settle(self) -> None:
        """Commit and publish whatever has become possible, in a fixed order."""
        while self._commit_one() or self._publish_one():
            pass

    def _commit_one(self) -> bool:
        for vw, member in self.members.items():
            wave = Wave(member.committed)
            complete = len(member.reports.get(wave, ())) == member.num_stages
            if complete and may_commit(wave, published=self.published, staleness=self.config.sync.staleness):
                del member.reports[wave]
                blocks = member.samples.pop(wave, ())
                indices = tuple(index for block in blocks for index in block)
                self.segment_samples.extend(indices)
                self._used[len(self.records)] = (self.segment.epoch, indices)
                self.segment_minibatches += len(blocks)
                member.committed = Clock(wave + 1)
                self._most_committed = max(self._most_committed, member.committed)
                self._complete_at[member.committed] = len(self.records)
                self._append(CommitRecord(len(self.records), vw, member.incarnation, wave, len(indices)))
                self.max_distance = max(self.max_distance, member.committed - self.global_clock)
                return True
        return False

    def _publish_one(self) -> bool:
        clock = Clock(self.published + 1)
        index = self._complete_at.get(clock)
        ready = (
            bool(self.members)
            and index is not None
            and self.global_clock >= clock
            and min(self.acknowledged) > index
            and all(self.all_joined(vw) for vw in self.members)
        )
        if not ready:
            return False
        del self._complete_at[clock]
        self.published = clock
        ends = clock == self.segment.end and clock > self.segment.start
        if ends:
            self._enter_barrier()
        self.retained = retained(
            self.members.values(),
            SwitchPoints(self.config.sync, self.progress.clock),
            published=clock,
            global_clock=self.global_clock,
        )
        self._append(PublishRecord(len(self.records), clock, self.retained))
        if ends and not self.finished:
            self.segment = self._next_segment()
        return True

    def _enter_barrier(self) -> None:
        self.progress = advance(
            self.progress,
            self.config.data,
            clock=self.published,
            samples=self.segment_samples,
            minibatches=self.segment_minibatches,
        )
        self.segment_samples = []
        self.segment_minibatches = 0
        self._claimed = set()
        for member in self.members.values():
            member.held = self.published
            member.last_switch = self.published

    def _next_segment(self) -> Segment:
        segment = plan_segment(
            self.progress,
            self.config.data,
            members=max(1, len(self.members)),
            minibatches_per_wave=self.config.sync.minibatches_per_wave,
            checkpoint_every_waves=self.config.checkpoint_every_waves,
        )
        self._dealt_to = tuple(sorted(self.members))
        self._append(BarrierRecord(len(self.records), segment.end, segment.reason, segment.epoch))
        return segment


def _names(members: Sequence[VirtualWorkerIndex] | Mapping[VirtualWorkerIndex, object]) -> str:
    return "virtual worker" + ("s " if len(members) > 1 else " ") + ", ".join(str(vw) for vw in members)
