"""What a decision log knows, and what it can be asked: all of it but the decisions (`decision_log`)."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

from hetpipe.decide.sync.log_state import LogState, Member, Newcomer
from hetpipe.decide.sync.records import CommitRecord, Record, SegmentRecord, TermRecord
from hetpipe.decide.sync.segment import Segment, ends_run
from hetpipe.errors import ProtocolViolation, StaleIncarnation, WaveOutOfOrder
from hetpipe.values.ids import Clock, Incarnation, StageIndex, Term, VirtualWorkerIndex, Wave
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


class LogCore:
    """The state of a decision log. The attributes that change are those of `LogState`, which explains them."""

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
        for field in fields(LogState):
            setattr(log, field.name, _copied(getattr(state, field.name)))
        return log

    # -- answers -----------------------------------------------------------------------------------------------------

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

    def whom_a_publish_waits_for(self) -> str:
        """Who keeps the published clock from advancing, as a phrase."""
        wanted = self.published + 1
        absent = [vw for vw, newcomer in self.newcomers.items() if not newcomer.is_complete]
        if not self._has_started and absent:
            return "the stages of " + names(absent)
        if not self._has_started and not self.has_weights:
            return "the first weights"
        if self._has_started and not self.members and not self._pending:
            return "the stages of " + names(absent) if absent else "any virtual worker to come back"
        behind = [vw for vw, member in self.members.items() if member.committed < wanted]
        if behind:
            return f"{names(behind)} to commit wave {wanted - 1}"
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

    # -- for decisions ---------------------------------------------------------------------------------------------

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


def names(members: Sequence[VirtualWorkerIndex] | Mapping[VirtualWorkerIndex, object]) -> str:
    """Virtual workers in a sentence."""
    return "virtual worker" + ("s " if len(members) > 1 else " ") + ", ".join(str(vw) for vw in members)
