"""Members of a job that do what they should, and are evicted, and what must hold: for `test_state_machine.py`."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from hetpipe.decide.sync.decision_log import DecisionLog
from hetpipe.decide.sync.records import BarrierRecord, CommitRecord, PublishRecord, Record
from hetpipe.decide.sync.segment import STOP
from hetpipe.errors import (
    ClockFreed,
    ClockNotPublished,
    StaleIncarnation,
)
from hetpipe.values.ids import Clock, Incarnation, ShardIndex, StageIndex, VirtualWorkerIndex
from tests.decide.sync.cluster import ModelShard, Worker
from tests.decide.sync.oracle import Oracle
from tests.decide.sync.scenario import LIFE, Scenario, push_header, scenarios

#: What a member may do next.
_MOVES = ("start", "finish", "push", "report")

INDEX = st.integers(0, 2)


class WellBehaved(RuleBasedStateMachine):
    """One job in a world of its own, whose members do what they should, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.stopped = False

    @initialize(
        scenario=scenarios(),
        prompt=st.sampled_from([True, True, True, False]),
        schedule=st.integers(0, 2**32 - 1),
        head_start=st.sampled_from([0, 50, 200, 500]),
        mishaps=st.sampled_from([0.0, 0.0, 0.005]),
    )
    def begin(self, scenario: Scenario, *, prompt: bool, schedule: int, head_start: int, mishaps: float) -> None:
        """Make the world. `prompt`: all stages join before the first step; `head_start`: things done before it."""
        self.scenario = scenario
        self.random = random.Random(schedule)
        self.mishaps = mishaps
        self.log = DecisionLog(scenario.log_config())
        self.oracle = Oracle(scenario)
        self.told: list[Record] = []
        #: Number of records, and whether the log awaited shards, after the event before.
        self.awaited = (0, True)
        self.shards = [ModelShard(index, scenario) for index in range(scenario.num_shards)]
        self.workers = [Worker(vw, scenario) for vw in range(len(scenario.num_stages))]
        self.judge()
        for vw, count in enumerate(scenario.num_stages):
            for stage in range(count):
                if prompt or self.random.random() < 0.7:
                    self.bring_up(vw, stage)
        self.bustle(head_start)

    # -- after every event of the log --------------------------------------------------------------------------------

    def judge(self) -> None:
        """Show the oracle what the log decided."""
        while self.oracle.seen < self.log.num_records:
            record = self.log.records_from(self.oracle.seen)[0]
            used = None
            if isinstance(record, CommitRecord):
                epoch, indices = self.log.take_used(record)
                used = (epoch, tuple(indices))
            if isinstance(record, PublishRecord):
                assert all(shard.state.built >= record.clock for shard in self.shards), f"{record}: a shard lacks it"
            self.oracle.see(record, used)
            self.told.append(record)
            if isinstance(record, PublishRecord) and self.oracle.start == record.clock:
                assert replace(self.log.progress, plans={}) == self.oracle.progress()
            if isinstance(record, BarrierRecord):
                for worker in self.members():
                    assert worker.started <= record.clock * self.scenario.n, f"{record} at a minibatch that has started"
        self.log.validate_state()
        self.oracle.nothing_is_missing(self.log.acknowledged)
        before, self.awaited = self.awaited, (self.log.num_records, self.log.awaits_shards)
        begins = self.awaited[1] and not before[1]
        assert not begins or self.awaited[0] > before[0], "without a record, a shard that acknowledges later misses it"

    def acknowledge(self, shard: int, num_records: int) -> None:
        """Nothing is published that the log did not await."""
        published, awaited = self.log.published, self.log.awaits_shards
        self.log.acknowledge(ShardIndex(shard), num_records)
        assert awaited or self.log.published == published

    def members(self) -> list[Worker]:
        """The workers that are not evicted."""
        return [worker for worker in self.workers if not worker.evicted]

    def counts(self, worker: Worker) -> bool:
        """Whether a worker is a member, in its newest life."""
        oracle = self.oracle
        return not worker.evicted and worker.vw in oracle.members and oracle.lives[worker.vw] == worker.incarnation

    def worker(self, index: int) -> Worker:
        """Some worker, an evicted one perhaps."""
        return self.workers[index % len(self.workers)]

    def shard(self, index: int) -> ModelShard:
        """Some shard."""
        return self.shards[index % len(self.shards)]

    # -- well-behaved members ----------------------------------------------------------------------------------------

    @rule(vw=INDEX, stage=INDEX)
    def bring_up(self, vw: int, stage: int) -> None:
        """A stage joins; of the first worker, it also makes its part of the initial weights."""
        worker = self.worker(vw)
        if worker.evicted:
            return
        stage %= worker.num_stages
        if worker.incarnation == LIFE:
            self.oracle.members[worker.vw].joined.add(stage)
        else:
            self.oracle.join(worker.vw, stage)
        self.log.join(VirtualWorkerIndex(worker.vw), worker.incarnation, StageIndex(stage))
        self.judge()
        if worker.incarnation == LIFE and worker.vw == min(self.oracle.members):
            for shard in self.shards:
                if self.scenario.slices_of_stage(worker.vw, stage, shard.index):
                    shard.push(push_header(self.scenario, worker.vw, stage, shard.index, None))
            if not self.oracle.has_weights:
                self.oracle.initialized.add(stage)
            self.log.initialized(VirtualWorkerIndex(worker.vw), LIFE, StageIndex(stage))
            self.judge()

    @rule(amount=st.integers(5, 150))
    def bustle(self, amount: int) -> None:
        """Members compute, push, report and read, shards follow, in a random order: `amount` small things."""
        slow = self.random.randrange(2 * len(self.workers))
        for turn in range(amount):
            if turn % 10 == 0:
                self.check()
            worker = self.random.choice(self.workers)
            if self.random.random() < self.mishaps:
                self.evict(worker.vw, 0)
            if worker.evicted and self.random.random() < 10 * self.mishaps:
                self.come_back(worker.vw)
            elif worker.joined_at is None and self.random.random() < 0.2:
                self.bring_up(worker.vw, self.random.randrange(worker.num_stages))
            if worker.vw == slow and self.random.random() < 0.8:
                continue
            match self.random.choice(("move", "move", "move", "read", "follow")):
                case "read":
                    self.read_log(worker.vw, self.random.randint(1, 12))
                case "follow":
                    last = self.random.choice((0, 0, 0, 1, 2))
                    self.follow(self.random.randrange(len(self.shards)), self.random.randint(1, 8), last)
                case _:
                    stages = range(worker.num_stages)
                    moves = [(move, stage) for move in _MOVES for stage in stages]
                    self.random.shuffle(moves)
                    any(self.move(worker, move, stage) for move, stage in moves)

    def move(self, worker: Worker, move: str, stage: int) -> bool:
        """One small thing; whether it was possible."""
        match move:
            case "start":
                return worker.start(self.log)
            case "finish":
                return worker.finish()
            case "push":
                return worker.push_next(stage, self.shards)
            case _:
                done = worker.is_pushed(stage, self.shards) and worker.report(stage, self.log, self.oracle)
                self.judge()
                return done

    @rule(vw=INDEX, count=st.integers(1, 12))
    def read_log(self, vw: int, count: int) -> None:
        """A worker learns of some more records."""
        worker = self.worker(vw)
        if not worker.evicted:
            worker.read(self.records_for(worker)[:count], self.oracle.dealt)

    def records_for(self, worker: Worker) -> Sequence[Record]:
        """What a worker has not read; what a slow newcomer missed may be forgotten."""
        records = self.log.records_from(worker.known, jumps=worker.joined_at is None)
        worker.known = records[0].index if records else worker.known
        return records

    @rule(index=INDEX, count=st.integers(1, 6), acknowledged=st.integers(0, 3))
    def follow(self, index: int, count: int, acknowledged: int) -> None:
        """A shard carries out some records and acknowledges all but the last few, perhaps for the second time."""
        shard = self.shard(index)
        for record in self.log.records_from(shard.state.followed)[:count]:
            shard.follow(record)
        self.acknowledge(shard.index, max(0, shard.state.followed - acknowledged))
        self.judge()

    @rule()
    def everyone_catches_up(self) -> None:
        """All shards and members are where the log is."""
        for shard in self.shards:
            for record in self.log.records_from(shard.state.followed):
                shard.follow(record)
            self.acknowledge(shard.index, shard.state.followed)
            self.judge()
        for worker in self.members():
            worker.read(self.records_for(worker), self.oracle.dealt)

    # -- barriers and evictions --------------------------------------------------------------------------------------

    def unchanged(self, call: Callable[[], object], *errors: type[Exception]) -> None:
        """Whatever `call` says, it leaves log and shards as they were; with `errors`, it must raise one of them."""
        parts: list[Any] = [self.log, *(shard.state for shard in self.shards)]
        before = [copy.deepcopy(vars(part)) for part in parts]
        if errors:
            with pytest.raises(errors) as caught:
                call()
            assert type(caught.value) in errors, f"{caught.value!r} where {errors} was due"
        else:
            call()
        assert [vars(part) for part in parts] == before

    @precondition(lambda self: not self.stopped)
    @rule(hesitation=st.integers(0, 5))
    def stop(self, hesitation: int) -> None:
        """Someone wants the run to end; now and then."""
        if hesitation:
            return
        self.stopped = True
        self.oracle.ask_for_barrier(STOP)
        self.log.request_barrier(STOP)
        self.judge()
        self.unchanged(lambda: self.log.request_barrier(STOP))

    @rule(vw=INDEX, hesitation=st.integers(0, 3))
    def evict(self, vw: int, hesitation: int) -> None:
        """A virtual worker is declared dead; it does not know. Mostly one, and mostly not at once."""
        worker = self.worker(vw)
        early = self.oracle.published <= self.scenario.start or len(self.members()) < len(self.workers)
        if worker.evicted or hesitation > (0 if early else 2):
            return
        index, life = VirtualWorkerIndex(worker.vw), worker.incarnation
        if self.counts(worker):
            self.oracle.ask_for_eviction(worker.vw)
        else:
            del self.oracle.newcomers[worker.vw]
        worker.evicted = True
        self.log.evict(index, life)
        self.judge()
        self.unchanged(lambda: self.log.evict(index, life))
        self.unchanged(lambda: self.log.evict(index, Incarnation(life + 1)), StaleIncarnation)

    @rule(vw=INDEX)
    def come_back(self, vw: int) -> None:
        """A new life of an evicted virtual worker is admitted; its stages join in their own time."""
        worker = self.worker(vw)
        if not worker.evicted or self.oracle.published < self.scenario.start or self.oracle.finished:
            return
        index, life = VirtualWorkerIndex(worker.vw), Incarnation(worker.incarnation + 1)
        self.oracle.admit(worker.vw, life)
        bounds = self.scenario.cut(worker.vw)
        self.log.admit(index, life, worker.num_stages, bounds=bounds)
        self.judge()
        self.workers[worker.vw] = Worker(worker.vw, self.scenario, life, known=self.log.segments[1])
        self.unchanged(lambda: self.log.admit(index, life, worker.num_stages, bounds=bounds))
        self.unchanged(lambda: self.log.admit(index, worker.incarnation, worker.num_stages), StaleIncarnation)

    @rule()
    def clock_restarts(self) -> None:
        """The clock shard is killed and goes on from what it knew."""
        restored = DecisionLog.restore(self.scenario.log_config(), self.log.state())
        assert vars(restored) == vars(self.log)
        self.log = restored

    # -- what must hold at any time ----------------------------------------------------------------------------------

    @invariant()
    def check(self) -> None:
        """All of it."""
        self.shards_hold_what_they_should()
        self.members_stay_below_the_barrier()
        self.pulls_get_what_they_need()

    def shards_hold_what_they_should(self) -> None:
        """Right sums, no more versions than needed, no wave twice."""
        sc = self.scenario
        for shard in self.shards:
            for clock, sums in shard.versions.items():
                expected = self.oracle.sums(clock) if shard.slices else []
                assert sums == expected, f"w^({clock}) on shard {shard.index}"
            assert shard.state.alive == set(shard.versions)
            assert set(shard.applied.values()) <= {1}
            assert all(key[2] is not None and key[2] >= shard.state.built for key in shard.state._committed)
            limit = len(self.workers) + 1
            served = [clock for clock in shard.versions if clock <= shard.state.published]
            if sc.d is not None:
                # Under `double_buffer` a wave begins with a clock that lacks the wave before it.
                bound = sc.d + 1 + (sc.weights == "double_buffer")
                limit = bound if sc.deterministic else min(bound, limit)
                # A wave w of N minibatches is pushed once clock w - D is published, a shorter one, before a barrier,
                # one clock earlier: Publish(w - D - 1) stands before Commit(w) in the log. Who has built w has followed
                # that, and has at most D + 2 clocks beyond the published one. Nothing is published before every shard
                # has built it, so what a worker has staged begins with the newest clock built and is at most D + 1
                # waves beyond.
                ahead, building, staged = bound + 1, 1, (bound + 1) * len(self.workers)
                total = len(shard.versions) + bool(shard.building) + len(shard.staging)
                assert total <= bound + ahead + building + staged, f"{shard.versions} {shard.staging}"
            assert len(served) <= limit, f"shard {shard.index} keeps {served}"
            for key in shard.staging:
                assert key[2] is None or key[2] < self.oracle.barrier or shard.state.followed < self.oracle.seen

    def members_stay_below_the_barrier(self) -> None:
        """Whatever a member has read of the log, it starts nothing beyond the barrier."""
        for worker in self.members():
            assert worker.started <= self.oracle.barrier * self.scenario.n

    def pulls_get_what_they_need(self) -> None:
        """A clock that a member may ask for is served, or not published yet on this shard; it is never freed."""
        for worker in self.members():
            for clock in worker.may_pull(self.told[worker.known :]):
                for shard in self.shards:
                    try:
                        shard.state.check_pull(Clock(clock))
                    except ClockNotPublished:
                        assert shard.state.published < clock
                    except ClockFreed as error:
                        raise AssertionError(f"virtual worker {worker.vw} needs clock {clock}: {error}") from error
