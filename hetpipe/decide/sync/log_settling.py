"""What follows for a decision log without another event: barriers, commits, publications (`wsp.md` §4, §5)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hetpipe.decide.sync.gate import may_commit, unplanned_barrier
from hetpipe.decide.sync.log_core import LogCore
from hetpipe.decide.sync.log_state import Member
from hetpipe.decide.sync.records import (
    BarrierRecord,
    CommitRecord,
    PublishRecord,
    SegmentMember,
    SegmentRecord,
)
from hetpipe.decide.sync.retention import SwitchPoints, retained
from hetpipe.decide.sync.segment import (
    DRAIN,
    END,
    Segment,
    advance,
    divide,
    ends_run,
    is_finished,
    plan_segment,
)
from hetpipe.values.ids import Clock, VirtualWorkerIndex, Wave


class SettlingLog(LogCore):
    """A log that decides whatever can be decided; the events are in `decision_log`."""

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
        return unplanned_barrier(
            committed=self.most_committed,
            published=self.published,
            staleness=self.config.sync.staleness,
            # Up to the first switch point at which a clock is chosen, minibatches start without a question.
            last_switch=max(self.segment.start + 1, self.most_switched),
            planned=self.segment.end,
            weights=self.config.sync.weights,
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
            if complete and may_commit(wave, published=self.published, staleness=self.config.sync.staleness):
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
            SwitchPoints(self.config.sync, self.progress.clock),
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


def _told(
    members: Mapping[VirtualWorkerIndex, Member], joined: Sequence[VirtualWorkerIndex] = ()
) -> tuple[SegmentMember, ...]:
    """Members as a record names them."""
    return tuple(
        SegmentMember(vw, member.incarnation, member.num_stages, joined=vw in joined) for vw, member in members.items()
    )
