"""A world small enough to be explored whole: three virtual workers of one stage, two shards, no network in between.

A state holds the real `DecisionLog`, `ShardState`s and `LogView`s. A step is one thing that one process does at once;
that messages are slow or lost is that a step is not taken yet. Faults are steps, too, of which a state has few left.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from hetpipe.decide.sync.decision_log import DecisionLog
from hetpipe.decide.sync.log_view import LogView
from hetpipe.decide.sync.records import CommitRecord, PublishRecord, Record
from hetpipe.decide.sync.segment import divide
from hetpipe.decide.sync.shard_state import Admission, ShardState
from hetpipe.errors import ClockFreed, ClockNotPublished, HetpipeError, ProtocolViolation, StaleIncarnation
from hetpipe.values.ids import Clock, Incarnation, ShardIndex, StageIndex, VirtualWorkerIndex
from hetpipe.values.requests import PushHeader
from tests.decide.sync.oracle import required_clock
from tests.decide.sync.scenario import JOB, TERM
from tests.simulation.freezing import clone_object, freeze, freeze_object
from tests.simulation.job import Job, push_header, requester
from tests.simulation.scheduler import Violation
from tests.simulation.small_parts import (
    LOG_LEFT_OUT,
    LOG_SHARED,
    SHARD_SHARED,
    TOUCHES,
    Message,
    Shard,
    Worker,
    carry_out,
    end_of,
    forget_pushes,
    freeze_shard,
    freeze_worker,
)
from tests.support.gates import gate_of

Step = tuple[object, ...]

_STAGE = StageIndex(0)


class SmallWorld:
    """A state. `apply` makes another one."""

    def __init__(self, job: Job, *, crashes: int, copies: int, drains: int = 0) -> None:
        self.job = job
        self.log = DecisionLog(job.scenario.log_config())
        self.shards = [Shard(self._fresh(index)) for index in range(job.scenario.num_shards)]
        start = Clock(job.scenario.start)
        self.workers = [Worker(vw, LogView(start)) for vw in job.scenario.members]
        self.crashes = crashes
        self.copies = copies
        self.drains = drains
        #: The latest push and report of everybody.
        self.sent: dict[int, Message] = {}
        #: wave → who has committed it, with samples. Those that some shard has yet to add.
        self.committed: dict[int, frozenset[tuple[int, int]]] = {}
        #: Of the parts that did not change since they were asked for.
        self._hashes: dict[object, int] = {}

    def _fresh(self, index: int) -> ShardState:
        job = self.job
        return ShardState(
            job_id=JOB,
            term=TERM,
            slices=job.slices[index],
            founders=job.scenario.members,
            start=Clock(job.scenario.start),
            staleness=job.d,
        )

    def _copy(self, step: Step) -> SmallWorld:
        """A state of its own as far as a step changes it; the rest is shared."""
        name, *whom = step
        touched = TOUCHES[str(name)]
        other = object.__new__(SmallWorld)
        other.__dict__.update(self.__dict__)
        other._hashes = dict(self._hashes)
        if "log" in touched:
            other.log = clone_object(self.log, LOG_SHARED)
            other._hashes.pop("log", None)
        shards = whom[-1:] if "shard" in touched else range(len(self.shards)) if "shards" in touched else ()
        other.shards = list(self.shards)
        for index in shards:
            assert isinstance(index, int)
            shard = self.shards[index]
            state = clone_object(shard.state, SHARD_SHARED)
            other.shards[index] = replace(shard, state=state, pushes=dict(shard.pushes))
            other._hashes.pop(("shard", index), None)
        other.workers = list(self.workers)
        if "worker" in touched:
            vw = whom[0]
            assert isinstance(vw, int)
            other.workers[vw] = replace(self.workers[vw], view=clone_object(self.workers[vw].view))
            other._hashes.pop(("worker", vw), None)
        other.sent, other.committed = dict(self.sent), dict(self.committed)
        return other

    def fingerprint(self) -> int:
        """Equal for states with the same future."""
        log, shards = self.log, self.shards
        read = [shard.state.followed for shard in shards]
        read += [worker.position for worker in self.workers if worker.is_alive]
        if self.crashes:
            read += [min((c.followed for c in shard.state._closed.values()), default=0) for shard in shards]
        unread = tuple(log.records[max(0, min(read) - log.first) :])
        hashes = [self._hash("log", lambda: (freeze_object(log, LOG_LEFT_OUT), frozenset(log.segment_samples)))]
        hashes += [self._hash(("shard", s), partial(freeze_shard, shard)) for s, shard in enumerate(shards)]
        hashes += [self._hash(("worker", w.vw), partial(freeze_worker, w)) for w in self.workers]
        sent = freeze(self.sent) if self.copies else 0
        return hash((tuple(hashes), unread, self.crashes, self.copies, self.drains, sent))

    def _hash(self, part: object, frozen: Callable[[], object]) -> int:
        found = self._hashes.get(part)
        if found is None:
            found = self._hashes[part] = hash(frozen())
        return found

    # -- what can happen ---------------------------------------------------------------------------------------------

    def steps(self) -> list[Step]:
        """Everything that can happen without a fault."""
        found: list[Step] = [("follow", s) for s, shard in enumerate(self.shards) if self._has_to_follow(s, shard)]
        for worker in self.workers:
            found += self._steps_of(worker)
        return found

    def _has_to_follow(self, index: int, shard: Shard) -> bool:
        num_records = self.log.num_records
        return shard.state.followed < num_records or self.log.acknowledged[index] < shard.state.followed

    def _steps_of(self, worker: Worker) -> list[Step]:
        vw = worker.vw
        if not worker.is_alive:
            if self.log.finished or worker.is_done:
                return []
            if worker.has_left:
                return [("admit", vw)]
            is_present = any(
                life is not None and life.incarnation == worker.incarnation
                for life in (self.log.members.get(vw), self.log.newcomers.get(vw))
            )
            return [("evict", vw)] if is_present else [("admit", vw)]
        if not worker.has_joined:
            return [("join", vw)] if self._may_join(vw) else []
        found: list[Step] = []
        if worker.position < self.log.num_records:
            found.append(("read", vw))
        if worker.is_computed:
            missing = [s for s in range(len(self.shards)) if s not in worker.pushed]
            found += [("push", vw, s) for s in missing if self._serves(s)]
            if not missing:
                found.append(("report", vw))
        else:
            found += self._next_wave(worker)
        return found

    def _serves(self, shard: int) -> bool:
        return self.shards[shard].state.followed >= self.shards[shard].serves_from

    def _may_join(self, vw: int) -> bool:
        return vw != 0 or self.log.has_weights or all(self._serves(s) for s in range(len(self.shards)))

    def _next_wave(self, worker: Worker) -> list[Step]:
        end = end_of(worker)
        if worker.segment is None or end is None or worker.wave >= end:
            return []
        if worker.wave >= worker.segment.start + len(worker.blocks):
            return [("report", worker.vw)]  # empty
        if worker.clock is None:
            return [("choose", worker.vw)] if self._may_choose(worker, end) else []
        return [("pull", worker.vw)] if self._may_pull(worker, worker.clock) else []

    def _may_choose(self, worker: Worker, end: int) -> bool:
        assert worker.segment is not None
        p = worker.wave + 1
        required = gate_of(1, self.job.d, start=worker.segment.start).required(p)
        if worker.view.published < required:
            return False
        asks = self._asks(worker)
        return not asks or (self.log.segment.start == worker.segment.start and self.log.segment.end == end)

    def _asks(self, worker: Worker) -> bool:
        assert worker.segment is not None
        start = worker.segment.start
        newest = gate_of(1, start=start).newest_usable(worker.wave + 1)
        return newest > start and not self.job.deterministic

    def _may_pull(self, worker: Worker, clock: int) -> bool:
        try:
            for index, shard in enumerate(self.shards):
                if not self._serves(index):
                    return False
                shard.state.check_request(requester(JOB, worker.vw, worker.incarnation, 0, TERM))
                shard.state.check_pull(Clock(clock))
        except (ClockNotPublished, StaleIncarnation):
            return False
        except ClockFreed as error:
            raise Violation(f"virtual worker {worker.vw} chose a clock that is gone: {error}") from error
        return True

    def faults(self) -> list[Step]:
        """Everything that can go wrong."""
        found: list[Step] = []
        if self.crashes:
            found += [("crash", w.vw) for w in self.workers if w.is_alive and not w.is_done]
            found += [("restart", s) for s in range(len(self.shards))]
        if self.copies:
            found += [("again", who) for who in self.sent]
        if self.drains:
            found += [("drain", vw) for vw in self.log.members if vw not in self.log.leaving]
        return found

    # -- what happens ------------------------------------------------------------------------------------------------

    def apply(self, step: Step) -> SmallWorld:
        """The state after a step. Raises `Violation`, or whatever a machine asserts."""
        after = self._copy(step)
        before = after.log.num_records
        getattr(after, f"_{step[0]}")(*step[1:])
        after._judge(before)
        return after

    def _join(self, vw: VirtualWorkerIndex) -> None:
        worker = self.workers[vw]
        worker.has_joined = True
        self.log.join(vw, worker.incarnation, _STAGE)
        if vw == 0 and not self.log.has_weights:
            for index in range(len(self.shards)):
                self._deliver_push(index, self._header(worker, index, None))
            self.log.initialized(vw, worker.incarnation, _STAGE)

    def _header(self, worker: Worker, shard: int, wave: int | None) -> PushHeader:
        slices = self.job.headers(1, 0, shard)
        return push_header(requester(JOB, worker.vw, worker.incarnation, 0, TERM), wave, slices)

    def _deliver_push(self, shard: int, header: PushHeader) -> None:
        verdict, indices = self.shards[shard].state.admit(header)
        if verdict is Admission.ACCEPT:
            self.shards[shard].state.staged_by(header, indices)
            self.shards[shard].pushes[header] = None

    def _read(self, vw: int) -> None:
        worker = self.workers[vw]
        from_newest = worker.position == 0 and worker.incarnation > 0
        position = -1 if from_newest else worker.position
        if 0 <= position < self.log.first and self.log.has_left(worker.vw, worker.incarnation):
            # Nobody waits for who leaves to read that it has: two barriers later it cannot any more, and ends.
            worker.has_left, worker.is_alive = True, False
            return
        records = self.log.records_from(position)
        worker.position = self.log.num_records
        worker.view.follow(records)
        record = worker.view.segment
        if record is None or (worker.segment is not None and record.index == worker.segment.index):
            return
        if any((m.vw, m.incarnation) == (vw, worker.incarnation) for m in record.members):
            worker.segment, worker.wave, worker.clock = record, record.start, None
            worker.is_computed, worker.pushed = False, frozenset()
            if not worker.view.is_over:
                worker.blocks = divide(self.log.progress, self.job.data, [m.vw for m in record.members])[worker.vw]
        if worker.view.is_over:
            worker.is_done = True
            worker.is_alive = False
        elif (vw, worker.incarnation) in worker.view.left:
            # Its part of the barrier's work is let through.
            self.log.check_stage(worker.vw, worker.incarnation, _STAGE)
            worker.has_left = True
            worker.is_alive = False

    def _choose(self, vw: VirtualWorkerIndex) -> None:
        worker = self.workers[vw]
        assert worker.segment is not None
        start, p = worker.segment.start, worker.wave + 1
        required = gate_of(1, self.job.d, start=start).required(p)
        clock = self.log.hold(vw, worker.incarnation, p) if self._asks(worker) else max(required, start)
        wanted = max(start, required_clock(p, n=1, d=self.job.d))
        if clock < wanted or clock > self.log.published:
            raise Violation(f"P4: minibatch {p} of {vw} starts with clock {clock}, it needs {wanted}")
        worker.clock = clock

    def _pull(self, vw: int) -> None:
        self.workers[vw].is_computed = True

    def _push(self, vw: int, shard: int) -> None:
        worker = self.workers[vw]
        header = self._header(worker, shard, worker.wave)
        self._deliver_push(shard, header)
        worker.pushed |= {shard}
        self.sent[2 * vw] = Message(header, shard)

    def _report(self, vw: VirtualWorkerIndex) -> None:
        worker = self.workers[vw]
        assert worker.segment is not None
        first = worker.wave - worker.segment.start
        blocks = worker.blocks[first : first + 1] if worker.is_computed else ()
        message = Message(self._header(worker, 0, worker.wave), None, blocks, worker.segment.start)
        try:
            self._deliver_report(message)
        except ProtocolViolation:
            end = end_of(worker)
            if worker.is_computed or (end is not None and worker.wave < self.log.segment.end == end):
                raise
        self.sent[2 * vw + 1] = message
        worker.wave += 1
        worker.clock, worker.is_computed, worker.pushed = None, False, frozenset()

    def _deliver_report(self, message: Message) -> None:
        who, wave = message.header.requester, message.header.wave
        assert wave is not None
        self.log.staged(who.vw, who.incarnation, wave, who.stage, message.blocks, segment=Clock(message.segment))

    def _follow(self, index: int) -> None:
        shard = self.shards[index]
        for record in self.log.records_from(shard.state.followed):
            carry_out(index, shard, shard.state.follow(record), self.committed)
        forget_pushes(shard)
        oldest = min((closed.followed for closed in shard.state._closed.values()), default=0)
        self.log.acknowledge(ShardIndex(index), shard.state.followed, oldest)

    # -- crashes, and those who see to them --------------------------------------------------------------------------

    def _crash(self, vw: int) -> None:
        self.crashes -= 1
        self.workers[vw].is_alive = False

    def _evict(self, vw: VirtualWorkerIndex) -> None:
        self.log.evict(vw, self.workers[vw].incarnation)

    def _drain(self, vw: VirtualWorkerIndex) -> None:
        self.drains -= 1
        self.log.drain(vw, self.log.members[vw].incarnation)

    def _admit(self, vw: VirtualWorkerIndex) -> None:
        life = Incarnation(self.workers[vw].incarnation + 1)
        self.log.admit(vw, life, 1)
        self.workers[vw] = Worker(vw, LogView(Clock(self.job.scenario.start)), life)

    def _restart(self, index: int) -> None:
        """A shard is killed, and begins again at the oldest clock that may be pulled."""
        self.crashes -= 1
        old = self.shards[index]
        state, closed = self._fresh(index), old.state._closed
        if closed:
            state.restore(closed[min(closed)])
        shard = Shard(state, old.pushes, self.log.num_records, frozenset(), old.built)
        self.shards[index] = shard
        for header in shard.pushes:
            state.restage(header, state.slice_index.of(header.slices))
        carry_out(index, shard, state.resume(), self.committed)

    def _again(self, who: int) -> None:
        """A message arrives a second time."""
        self.copies -= 1
        message = self.sent[who]
        try:
            if message.shard is None:
                self._deliver_report(message)
            elif self._serves(message.shard):
                self._deliver_push(message.shard, message.header)
        except HetpipeError:
            pass  # refused: nobody listens to the answer

    # -- promises ----------------------------------------------------------------------------------------------------

    def _judge(self, before: int) -> None:
        for record in self.log.records_from(max(before, self.log.first)):
            self._judge_record(record)
        self.log.validate_state()

    def _judge_record(self, record: Record) -> None:
        match record:
            case CommitRecord(_, vw, incarnation, wave, samples):
                _, used = self.log.take_used(record)
                if min(shard.built for shard in self.shards) > wave:
                    raise Violation(f"P3: {record}, but every shard has completed clock {wave + 1}")
                if samples != len(used):
                    raise Violation(f"P9: {record} used {used}")
                if samples:
                    self.committed[wave] = self.committed.get(wave, frozenset()) | {(vw, incarnation)}
            case PublishRecord(_, clock, _):
                if min(shard.built for shard in self.shards) < clock:
                    raise Violation(f"P3: {record}, but a shard has not completed it")
            case _:
                pass
