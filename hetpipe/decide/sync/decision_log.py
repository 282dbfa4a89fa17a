"""The clock shard's mind: the one place where order is decided (`wsp.md` §4, §5).

A pure state machine. Each event method checks the event, changes the state, and returns the records it appended to the
log; the shell (`ps.clock_shard`) writes history, wakes followers and answers. Nothing here reads a clock, a socket or
a tensor. A repeated event is a no-op with the same answer; an illegal one raises and changes nothing. The same events
in the same order give the same records, so a clock shard that was killed continues from what it had written down.
"""

from __future__ import annotations

from collections.abc import Sequence

from hetpipe.decide.sync.log_settling import SettlingLog
from hetpipe.decide.sync.log_state import Member, Newcomer
from hetpipe.decide.sync.records import (
    EvictRecord,
    InitializeRecord,
    Record,
)
from hetpipe.decide.sync.retention import SwitchPoints
from hetpipe.decide.sync.segment import (
    DRAIN,
    END,
    EPOCH,
    EVICT,
    JOIN,
)
from hetpipe.errors import ClockNotPublished, ProtocolViolation, StaleIncarnation, WaveOutOfOrder
from hetpipe.values.ids import Clock, Incarnation, ShardIndex, StageIndex, VirtualWorkerIndex, Wave


class DecisionLog(SettlingLog):
    """Orders commits, joins, evictions, barriers and publications of one job.

    Invariants (`validate_state`): no member is more than D + 1 waves ahead of another; `published` is never above the
    global clock and at most one below it once all shards have acknowledged; the barrier is above `published`.

    Everybody starts as a newcomer: the publication of the start is the first barrier that is passed.
    """

    # -- events ------------------------------------------------------------------------------------------------------

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
        """The clock of `vw` from a switch point on, by `ClockRule`. Repeatable.

        Raises:
            ClockNotPublished: the clock it requires is not published yet; or no clock is chosen there, which only
                somebody asks who has not heard of the barrier that the segment began with.
            WaveOutOfOrder: before the latest question, or before the segment.
        """
        member = self._member(vw, incarnation)
        points = SwitchPoints(self.config.sync, self.segment.start)
        p = points.minibatch(switch)
        if switch < member.last_switch or p <= points.start * self.config.sync.minibatches_per_wave:
            asked = points.minibatch(member.last_switch)
            raise WaveOutOfOrder(f"virtual worker {vw} asks for the clock of minibatch {p} after {asked}")
        if points.newest_usable(switch) <= points.start:
            raise ClockNotPublished(f"minibatch {p} begins with the clock of the barrier at {points.start}")
        if switch == member.last_switch:
            return member.held
        chosen = points.rule.chosen(p, in_use=member.held, published=self.published)
        if chosen is None:
            awaited = points.rule.awaited(p, in_use=member.held)
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

    # -- inside ------------------------------------------------------------------------------------------------------

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
