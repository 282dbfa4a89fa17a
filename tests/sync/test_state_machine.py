"""Shards, decision log and virtual workers under random schedules, against the oracle (`wsp.md` §8).

Hypothesis chooses a job and an interleaving: stages join, compute, push, repeat themselves and lie; shards fall behind
and catch up; barriers are asked for and workers evicted. After every step the whole state is compared with what the
specification allows, and in the end everything must have come to its end.
"""

from __future__ import annotations

import copy
import logging
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from hetpipe.errors import (
    ClockFreed,
    ClockNotPublished,
    HetpipeError,
    ProtocolViolation,
    StaleIncarnation,
    WaveOutOfOrder,
)
from hetpipe.spec.ids import Clock, Incarnation, ShardIndex, StageIndex, VirtualWorkerIndex, Wave
from hetpipe.sync.decision_log import DecisionLog
from hetpipe.sync.records import BarrierRecord, CommitRecord, PublishRecord, Record
from hetpipe.sync.segment import STOP
from hetpipe.sync.shard_state import Admission

from .cluster import ModelShard, Worker
from .oracle import Blocks, Oracle
from .scenario import LIFE, REFUSALS, Scenario, push_header, scenarios, wrong_headers

#: What a member may do next.
_MOVES = ("start", "finish", "push", "report")

_INDEX = st.integers(0, 2)


class Machine(RuleBasedStateMachine):
    """One job in a world of its own."""

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
                assert self.log.progress == self.oracle.progress()
            if isinstance(record, BarrierRecord):
                for worker in self.members():
                    assert worker.started <= record.clock * self.scenario.n, f"{record} at a minibatch that has started"
        self.log.validate_state()
        self.oracle.nothing_is_missing(self.log.acknowledged)

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

    @rule(vw=_INDEX, stage=_INDEX)
    def bring_up(self, vw: int, stage: int) -> None:
        """A stage joins; of the first worker, it also makes its part of the first weights."""
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

    @rule(vw=_INDEX, count=st.integers(1, 12))
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

    @rule(index=_INDEX, count=st.integers(1, 6), acknowledged=st.integers(0, 3))
    def follow(self, index: int, count: int, acknowledged: int) -> None:
        """A shard carries out some records and acknowledges all but the last few, perhaps for the second time."""
        shard = self.shard(index)
        for record in self.log.records_from(shard.state.followed)[:count]:
            shard.follow(record)
        self.log.acknowledge(ShardIndex(shard.index), max(0, shard.state.followed - acknowledged))
        self.judge()

    @rule()
    def everyone_catches_up(self) -> None:
        """All shards and members are where the log is."""
        for shard in self.shards:
            for record in self.log.records_from(shard.state.followed):
                shard.follow(record)
            self.log.acknowledge(ShardIndex(shard.index), shard.state.followed)
            self.judge()
        for worker in self.members():
            worker.read(self.records_for(worker), self.oracle.dealt)

    # -- repetition, which changes nothing ---------------------------------------------------------------------------

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

    @rule(vw=_INDEX, stage=_INDEX, back=st.integers(0, 3), shard=_INDEX)
    def repeat(self, vw: int, stage: int, back: int, shard: int) -> None:
        """A push and a report that were taken before are sent again."""
        worker = self.worker(vw)
        stage %= worker.num_stages
        wave = worker.next_wave[stage] - back - 1
        target = self.shard(shard)
        blocks = () if stage == 0 else None
        if worker.joined_at is None or wave < worker.joined_at:
            return
        errors: tuple[type[Exception], ...] = ()
        if worker.evicted:
            errors = (StaleIncarnation,)
        elif wave >= self.log.segment.end:
            # Nothing holds up the reports of empty waves, and a barrier that is set before them drops them.
            assert wave not in worker.reported[stage]
            errors = (WaveOutOfOrder,)
        self.unchanged(
            lambda: self.log.staged(
                VirtualWorkerIndex(worker.vw),
                worker.incarnation,
                Wave(wave),
                StageIndex(stage),
                blocks,
                segment=self.log.segment.start,
            ),
            *errors,
        )
        header = push_header(self.scenario, worker.vw, stage, target.index, wave, worker.incarnation)
        if header.slices and wave in worker.reported[stage] and not worker.evicted:
            verdicts: list[Admission] = []
            self.unchanged(lambda: verdicts.append(target.push(header)))
            assert verdicts == [Admission.DUPLICATE]

    @rule(vw=_INDEX, stage=_INDEX, shard=_INDEX)
    def push_breaks_off(self, vw: int, stage: int, shard: int) -> None:
        """A push whose bytes do not all arrive stages nothing."""
        worker, target = self.worker(vw), self.shard(shard)
        stage %= worker.num_stages
        wave = worker.next_wave[stage]
        header = push_header(self.scenario, worker.vw, stage, target.index, wave, worker.incarnation)
        is_due = worker.closed(wave) and target.knows(worker)
        if worker.evicted or not is_due or not header.slices:
            return
        self.unchanged(lambda: target.push(header, arrives=False))

    # -- lies, which change nothing ----------------------------------------------------------------------------------

    @rule(vw=_INDEX, stage=_INDEX, shard=_INDEX, lie=st.sampled_from(sorted(REFUSALS)), first=st.booleans())
    def push_wrongly(self, vw: int, stage: int, shard: int, lie: str, first: bool) -> None:  # noqa: FBT001 - a rule
        """A push with one thing wrong in its header."""
        worker, target = self.worker(vw), self.shard(shard)
        stage %= worker.num_stages
        wave = None if first else worker.next_wave[stage]
        header = push_header(self.scenario, worker.vw, stage, target.index, wave, worker.incarnation)
        if not self.counts(worker) or not header.slices or (first and worker.incarnation != LIFE):
            return
        errors: tuple[type[HetpipeError], ...] = (REFUSALS[lie],)
        if first and lie == "incarnation":
            return  # whoever comes to make the first weights may have died before
        if first:
            pass
        elif lie in {"incarnation", "stranger"}:
            errors = (ClockNotPublished,)  # a member perhaps, of which the shard has yet to read
        elif not target.knows(worker):
            errors = (REFUSALS[lie], ClockNotPublished)
        self.unchanged(lambda: target.push(wrong_headers(header)[lie]), *errors)

    @rule(vw=_INDEX, shard=_INDEX, wave=st.sampled_from([-1, -(2**63), 2**63 - 1, 100]))
    def push_a_wave_out_of_order(self, vw: int, shard: int, wave: int) -> None:
        """A push of a wave that cannot be: negative, or far in the future."""
        worker, target = self.worker(vw), self.shard(shard)
        header = push_header(self.scenario, worker.vw, 0, target.index, wave, worker.incarnation)
        if not self.counts(worker) or not header.slices or (self.scenario.d is None and wave > 0):
            return
        self.unchanged(lambda: target.push(header), WaveOutOfOrder if target.knows(worker) else ClockNotPublished)

    @rule(
        vw=_INDEX, stage=_INDEX, lie=st.sampled_from(["skip", "negative", "future", "incarnation", "stranger", "stage"])
    )
    def report_wrongly(self, vw: int, stage: int, lie: str) -> None:
        """A report with one thing wrong about who or when."""
        worker = self.worker(vw)
        if not self.counts(worker):
            return
        stage %= worker.num_stages
        who, life, wave = VirtualWorkerIndex(worker.vw), worker.incarnation, worker.next_wave[stage]
        error: type[HetpipeError] = WaveOutOfOrder
        match lie:
            case "skip":
                wave = max(wave, self.oracle.members[worker.vw].committed) + 1
            case "negative":
                wave = -1
            case "future":
                wave = 2**63 - 1
            case "incarnation":
                life, error = Incarnation(life + 1), StaleIncarnation
            case "stranger":
                who, error = VirtualWorkerIndex(99), StaleIncarnation
            case _:
                stage, error = worker.num_stages, ProtocolViolation
        if self.oracle.published < self.scenario.start and lie == "stage":
            error = WaveOutOfOrder
        blocks = () if stage == 0 else None
        self.unchanged(
            lambda: self.log.staged(who, life, Wave(wave), StageIndex(stage), blocks, segment=self.log.segment.start),
            error,
        )

    @rule(vw=_INDEX, lie=st.sampled_from(["none", "from another stage", "outside", "negative", "twice", "used"]))
    def report_wrong_samples(self, vw: int, lie: str) -> None:
        """The next wave in order, but with samples that cannot be."""
        worker = self.worker(vw)
        stage = 0 if lie != "from another stage" else worker.num_stages - 1
        wave = worker.next_wave[stage]
        staged = {sample for blocks in self.oracle.blocks.values() for block in blocks for sample in block}
        used = sorted(self.oracle.used | staged)
        is_due = self.counts(worker) and worker.segment is not None and wave < self.oracle.barrier
        if not is_due or (lie == "used" and not used) or (lie == "from another stage" and not stage):
            return
        blocks: dict[str, Blocks | None] = {
            "none": None,
            "from another stage": ((),),
            "outside": ((self.scenario.num_samples,),),
            "negative": ((-1,),),
            "twice": ((0,), (0,)),
            "used": ((self.random.choice(used),),) if used else None,
        }
        self.unchanged(
            lambda: self.log.staged(
                VirtualWorkerIndex(worker.vw),
                worker.incarnation,
                Wave(wave),
                StageIndex(stage),
                blocks[lie],
                segment=self.log.segment.start,
            ),
            ProtocolViolation,
        )

    @rule(vw=_INDEX, stage=_INDEX)
    def report_beyond_the_barrier(self, vw: int, stage: int) -> None:
        """The next wave in order, empty, but no wave of this segment."""
        worker = self.worker(vw)
        stage %= worker.num_stages
        wave = worker.next_wave[stage]
        if self.counts(worker) and worker.segment is not None and wave == self.oracle.barrier:
            blocks = () if stage == 0 else None
            self.unchanged(
                lambda: self.log.staged(
                    VirtualWorkerIndex(worker.vw),
                    worker.incarnation,
                    Wave(wave),
                    StageIndex(stage),
                    blocks,
                    segment=self.log.segment.start,
                ),
                WaveOutOfOrder,
            )

    @rule(ahead=st.integers(1, 3), shard=st.integers(0, 4))
    def acknowledge_wrongly(self, ahead: int, shard: int) -> None:
        """More records than there are, or by a shard that is not."""
        index = ShardIndex(shard if shard >= len(self.shards) else -1) if ahead > 1 else ShardIndex(0)
        self.unchanged(lambda: self.log.acknowledge(index, self.log.num_records + ahead), ProtocolViolation)

    # -- barriers and evictions --------------------------------------------------------------------------------------

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

    @rule(vw=_INDEX, hesitation=st.integers(0, 3))
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

    @rule(vw=_INDEX)
    def come_back(self, vw: int) -> None:
        """A new life of an evicted virtual worker is admitted; its stages join in their own time."""
        worker = self.worker(vw)
        if not worker.evicted or self.oracle.published < self.scenario.start or self.oracle.finished:
            return
        index, life = VirtualWorkerIndex(worker.vw), Incarnation(worker.incarnation + 1)
        self.oracle.admit(worker.vw, life)
        self.log.admit(index, life, worker.num_stages)
        self.judge()
        self.workers[worker.vw] = Worker(worker.vw, self.scenario, life, known=self.log.segments[1])
        self.unchanged(lambda: self.log.admit(index, life, worker.num_stages))
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

    # -- the end -----------------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        """Without further faults everything ends, and every sample was used once."""
        if not hasattr(self, "scenario") or sys.exc_info()[0] is not None:
            return
        for vw, count in enumerate(self.scenario.num_stages):
            for stage in range(count):
                self.bring_up(vw, stage)
        idle = 0
        while self.members() and not self.oracle.finished:
            before = self.how_far()
            self.bustle(100)
            idle = 0 if self.how_far() != before else idle + 1
            assert idle < 20, f"nothing moves any more: {self.log.whom_a_publish_waits_for()}"
        self.everyone_catches_up()
        self.check_the_end()

    def how_far(self) -> list[int]:
        """Grows whenever anything moves."""
        counts = [worker.known + worker.started + worker.completed + sum(worker.next_wave) for worker in self.workers]
        return [self.oracle.seen, *counts, *(shard.state.followed for shard in self.shards)]

    def check_the_end(self) -> None:
        """Counts at the end of the run."""
        committed = {(vw, wave) for wave, by_vw in self.oracle.waves.items() for vw in by_vw}
        for shard in self.shards:
            followed_all = shard.state.followed == self.log.num_records
            assert followed_all
            if self.members():
                assert set(shard.applied) == committed
            for wave, counts in shard.counts_of_members.items():
                barrier = max(start for start in self.oracle.dealt if start <= wave)
                assert counts == {len(self.oracle.dealt[barrier])}, f"how many share wave {wave}"
            if self.oracle.finished:
                assert not shard.staging
                assert max(shard.versions) == self.oracle.published
        if not self.oracle.finished or self.stopped:
            return
        sc = self.scenario
        if sc.epochs is not None:
            assert self.oracle.epoch == sc.epochs
            for epoch, samples in self.oracle.account.items():
                before = sc.used if epoch == 0 else ()
                assert sorted((*samples, *before)) == list(range(sc.num_samples))
        else:
            assert self.oracle.minibatches == sc.total_minibatches


_SETTINGS = settings(
    max_examples=300,
    stateful_step_count=40,
    deadline=None,
    database=None,
    report_multiple_bugs=False,
    phases=(Phase.generate, Phase.shrink),  # to explain a failure Hypothesis traces every line of every run
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture
def _no_numbers_of_other_modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Hypothesis likes to choose numbers that it finds in the source of whatever happens to be imported."""
    known = providers.CONSTANTS_CACHE.cache
    known.clear()
    nothing = Constants()
    monkeypatch.setattr(providers, "_get_local_constants", lambda: nothing)
    yield
    known.clear()


@pytest.mark.matrix
@pytest.mark.timeout(600)  # ten seconds of a core; an interruption looks like a failure that cannot be repeated
@pytest.mark.usefixtures("_no_numbers_of_other_modules")
def test_the_same_runs_as_always() -> None:
    run_state_machine_as_test(Machine, settings=settings(_SETTINGS, derandomize=True))


def test_a_report_of_an_empty_wave_comes_when_the_barrier_that_dropped_it_is_passed() -> None:
    """Found by chance: who has read neither barrier nor segment reports what was empty in the segment before."""
    scenario = Scenario(
        num_stages=(2, 3, 2),
        num_shards=1,
        n=2,
        d=0,
        weights="flush",
        deterministic=False,
        num_samples=26,
        batch_size=1,
        epochs=1,
        total_minibatches=None,
        every=None,
        used=(0,),
    )
    machine = Machine()
    machine.begin(scenario=scenario, prompt=True, schedule=84572451, head_start=500, mishaps=0.005)
    machine.teardown()


def test_nobody_asks_for_a_clock_that_was_published_behind_its_barrier() -> None:
    """Found by chance: the clock is free before one who has yet to read of the barrier has read so far."""
    scenario = Scenario(
        num_stages=(2, 2),
        num_shards=1,
        n=1,
        d=1,
        weights="flush",
        deterministic=True,
        num_samples=8,
        batch_size=1,
        epochs=None,
        total_minibatches=8,
        every=None,
    )
    machine = Machine()
    machine.begin(scenario=scenario, prompt=False, schedule=52062, head_start=200, mishaps=0.005)
    machine.bustle(amount=39)
    machine.check()
    machine.teardown()


def test_runs_nobody_has_seen(record_property: Callable[[str, object], None]) -> None:
    number = random.SystemRandom().getrandbits(32)
    record_property("hypothesis_seed", number)
    logging.getLogger(__name__).warning("hypothesis seed %d", number)
    run_state_machine_as_test(seed(number)(Machine), settings=settings(_SETTINGS, max_examples=100))
