"""Shards, decision log and virtual workers under random schedules, against the oracle (`wsp.md` §8).

Hypothesis chooses a job and an interleaving: stages join, compute, push, repeat themselves and lie; shards fall behind
and catch up; barriers are asked for and workers evicted. After every step the whole state is compared with what the
specification allows, and in the end everything must have come to its end.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants
from hypothesis.stateful import (
    rule,
    run_state_machine_as_test,
)

from hetpipe.decide.sync.shard_state import Admission
from hetpipe.errors import (
    ClockNotPublished,
    HetpipeError,
    ProtocolViolation,
    StaleIncarnation,
    WaveOutOfOrder,
)
from hetpipe.values.ids import Incarnation, ShardIndex, StageIndex, VirtualWorkerIndex, Wave
from tests.decide.sync.oracle import Blocks
from tests.decide.sync.scenario import LIFE, REFUSALS, Scenario, push_header, wrong_headers
from tests.decide.sync.well_behaved import INDEX, WellBehaved


class Machine(WellBehaved):
    """And some repeat themselves and lie; in the end everything must have come to its end."""

    # -- repetition, which changes nothing ---------------------------------------------------------------------------

    @rule(vw=INDEX, stage=INDEX, back=st.integers(0, 3), shard=INDEX)
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

    @rule(vw=INDEX, stage=INDEX, shard=INDEX)
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

    @rule(vw=INDEX, stage=INDEX, shard=INDEX, lie=st.sampled_from(sorted(REFUSALS)), first=st.booleans())
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
            return  # whoever comes to make the initial weights may have died before
        if first:
            pass
        elif lie in {"incarnation", "stranger"}:
            errors = (ClockNotPublished,)  # a member perhaps, of which the shard has yet to read
        elif not target.knows(worker):
            errors = (REFUSALS[lie], ClockNotPublished)
        self.unchanged(lambda: target.push(wrong_headers(header)[lie]), *errors)

    @rule(vw=INDEX, shard=INDEX, wave=st.sampled_from([-1, -(2**63), 2**63 - 1, 100]))
    def push_a_wave_out_of_order(self, vw: int, shard: int, wave: int) -> None:
        """A push of a wave that cannot be: negative, or far in the future."""
        worker, target = self.worker(vw), self.shard(shard)
        header = push_header(self.scenario, worker.vw, 0, target.index, wave, worker.incarnation)
        if not self.counts(worker) or not header.slices or (self.scenario.d is None and wave > 0):
            return
        self.unchanged(lambda: target.push(header), WaveOutOfOrder if target.knows(worker) else ClockNotPublished)

    @rule(
        vw=INDEX, stage=INDEX, lie=st.sampled_from(["skip", "negative", "future", "incarnation", "stranger", "stage"])
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

    @rule(vw=INDEX, lie=st.sampled_from(["none", "from another stage", "outside", "negative", "twice", "used"]))
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

    @rule(vw=INDEX, stage=INDEX)
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
            assert idle < 20, f"nothing moves any more: {self.log.pending_publish_reason()}"
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


SETTINGS = settings(
    max_examples=300,
    stateful_step_count=40,
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
@pytest.mark.parametrize("num_runs", [40, pytest.param(300, marks=pytest.mark.exhaustive)])
def test_any_run(num_runs: int) -> None:
    run_state_machine_as_test(Machine, settings=settings(SETTINGS, max_examples=num_runs))


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


def test_nobody_pulls_the_clock_in_use_again() -> None:
    """Found by chance: with pulls when required, a clock may be kept that no shard holds any longer."""
    scenario = Scenario(
        num_stages=(1, 1),
        num_shards=1,
        n=2,
        d=2,
        weights="wave",
        deterministic=False,
        num_samples=21,
        batch_size=1,
        epochs=None,
        total_minibatches=21,
        pull="required",
        every=None,
        used=(0,),
    )
    machine = Machine()
    machine.begin(scenario=scenario, prompt=True, schedule=1, head_start=500, mishaps=0.0)
    assert any(worker.clock not in machine.shards[0].versions for worker in machine.members())
    machine.teardown()
