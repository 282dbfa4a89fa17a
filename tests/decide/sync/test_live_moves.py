"""Layers that move without a barrier, under random schedules: who computes which layer of which minibatch?

The machine is that of `test_state_machine.py`, with operators who ask for moves and stages which prepare them. Stages
read the log on their own: what they hear is late, in pieces, and more than once; virtual workers die and come back, and
the clock shard is killed, at any point of a move.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule, run_state_machine_as_test

from hetpipe.decide.sync.records import PlanRecord, Record, SegmentRecord
from hetpipe.decide.sync.segment import PLAN
from hetpipe.errors import ProtocolViolation, StaleIncarnation
from hetpipe.values.ids import Incarnation, StageIndex, VirtualWorkerIndex
from hetpipe.values.sync import PlanMove
from tests.decide.sync.cluster import Worker
from tests.decide.sync.scenario import NUM_LAYERS, Scenario, scenarios
from tests.decide.sync.test_state_machine import SETTINGS, Machine
from tests.decide.sync.well_behaved import INDEX

_Life = tuple[int, Incarnation]


@dataclass(slots=True)
class Stage:
    """A stage but the first, which computes what the one before has sent, by what it has read of the log."""

    known: int = 0
    plans: list[tuple[int, int, tuple[int, ...]]] = field(default_factory=list)
    """First minibatch, version, bounds."""
    computed: set[int] = field(default_factory=set)

    def read(self, record: Record, life: _Life, n: int) -> None:
        """Read the next record."""
        self.known += 1
        if isinstance(record, SegmentRecord):
            for member in record.members:
                if (member.vw, member.incarnation) == life:
                    self.plans = [(record.start * n + 1, member.version, member.bounds)]
        if isinstance(record, PlanRecord) and (record.vw, record.incarnation) == life:
            self.plans.append((record.clock * n + 1, record.version, record.bounds))

    def plan_of(self, p: int) -> tuple[int, tuple[int, ...]]:
        """The version of a minibatch, and its bounds."""
        return next((version, bounds) for first, version, bounds in reversed(self.plans) if first <= p)


def long_enough(scenario: Scenario) -> Scenario:
    """A job like this one whose layers may move, with segments of some waves."""
    staleness = scenario.d if scenario.d is None else min(scenario.d, 1)
    return replace(
        scenario,
        has_cuts=True,
        num_stages=tuple(max(2, count) for count in scenario.num_stages),
        n=min(scenario.n, 2),
        d=staleness,
        num_samples=40 + scenario.num_samples,
        batch_size=1,
        epochs=None,
        total_minibatches=100 + len(scenario.used),
        every=None if scenario.every is None else 3 * scenario.every,
    )


class Movers(Machine):
    """Layers move while a job trains."""

    def __init__(self) -> None:
        super().__init__()
        #: Stages 1, … of each life, and (life, p) → layers computed of it.
        self.stages: dict[_Life, list[Stage]] = {}
        self.computed: dict[tuple[_Life, int], list[int]] = {}
        #: The newest version of every virtual worker in the log.
        self.versions: dict[int, tuple[int, tuple[int, ...]]] = {}
        self.num_judged = 0
        #: Announced in this segment.
        self.announced: dict[int, list[PlanRecord]] = {}

    def judge(self) -> None:
        super().judge()
        for record in self.told[self.num_judged :]:
            self.num_judged += 1
            if isinstance(record, PlanRecord):
                worker = self.workers[record.vw]
                assert worker.started <= record.clock * self.scenario.n, f"{record}: a minibatch of it has started"
                assert record.clock < self.log.segment.end
                self.announced.setdefault(record.vw, []).append(record)
            if isinstance(record, SegmentRecord):
                for vw, announced in self.announced.items():
                    for plan in announced:
                        if plan.clock < record.start:  # else it is void
                            self._grows(vw, plan.version, plan.bounds)
                self.announced = {}
                for member in record.members:
                    self._grows(member.vw, member.version, member.bounds)

    def _grows(self, vw: int, version: int, bounds: tuple[int, ...]) -> None:
        """Versions only grow, and each is one cut of all layers."""
        known = self.versions.get(vw)
        is_kept = known == (version, bounds)
        assert known is None or version > known[0] or is_kept, f"version {version} of {vw} follows {known}"
        assert (bounds[0], bounds[-1]) == (0, NUM_LAYERS)
        assert all(first < last for first, last in pairwise(bounds))
        self.versions[vw] = (version, bounds)

    @initialize(
        scenario=scenarios().map(long_enough),
        prompt=st.sampled_from([True, True, True, False]),
        schedule=st.integers(0, 2**32 - 1),
        head_start=st.sampled_from([0, 50, 200]),
        mishaps=st.sampled_from([0.0, 0.0, 0.005]),
    )
    def begin(self, scenario: Scenario, *, prompt: bool, schedule: int, head_start: int, mishaps: float) -> None:
        super().begin(scenario, prompt=prompt, schedule=schedule, head_start=head_start, mishaps=mishaps)

    @rule(amount=st.integers(5, 150))
    def bustle(self, amount: int) -> None:
        """As for others, with moves in between: they take several answers."""
        for done in range(0, amount, 10):
            super().bustle(min(10, amount - done))
            draw = self.random.random
            if draw() < 0.5:
                self.ask(self.random.randrange(3), self.random.randrange(3), live=draw() < 0.8)
            for vw in range(len(self.workers)):
                for stage in range(self.worker(vw).num_stages):
                    self.prepare(vw, stage, self.random.randrange(20))
            self.flow(self.random.randrange(3), self.random.randrange(3), self.random.randrange(1, 40))

    # -- moves -------------------------------------------------------------------------------------------------------

    @rule(vw=INDEX, cut=st.integers(0, 2), live=st.sampled_from([True, True, True, False]))
    def ask(self, vw: int, cut: int, *, live: bool) -> None:
        """Somebody wants other layers on the stages of a virtual worker; twice, as the first answer was lost."""
        worker = self.worker(vw)
        known_cuts: dict[int, list[tuple[int, ...]]] = {1: [(0, 3)], 2: [(0, 1, 3), (0, 2, 3)], 3: [(0, 1, 2, 3)]}
        cuts = known_cuts[worker.num_stages]
        bounds = cuts[cut % len(cuts)]
        if not self.counts(worker) or self.log.published < self.scenario.start:
            return
        index = VirtualWorkerIndex(worker.vw)
        move = PlanMove(worker.incarnation, bounds, "operator", "an operator asked for it", live=live)
        known, pending = self.log._newest_plan(index), self.log.fixed.get(index)
        if not self.log.finished and pending and not self.log._is_in_force(index, pending[-1]):
            if known is not None and known.bounds != bounds:
                self.unchanged(lambda: self.log.move(index, move), ProtocolViolation)
            return
        if not live and known is not None and known.bounds != bounds and not self.log.finished:
            if self.log.moves.get(index) == move:
                return
            self.oracle.ask_for_barrier(PLAN)
        self.log.move(index, move)
        self.judge()
        self.unchanged(lambda: self.log.move(index, move))
        self.unchanged(lambda: self.log.move(index, replace(move, incarnation=Incarnation(99))), StaleIncarnation)

    @rule(vw=INDEX, stage=INDEX, hesitation=st.integers(0, 9))
    def prepare(self, vw: int, stage: int, hesitation: int) -> None:
        """A stage has read that it is to prepare a move, and says that it has; now and then that it cannot."""
        worker = self.worker(vw)
        if worker.to_prepare is None or worker.evicted:
            return
        index, can = VirtualWorkerIndex(worker.vw), hesitation > 0
        about, who = worker.to_prepare.index, StageIndex(stage % worker.num_stages)
        preparing = self.log.preparing.get(index)
        if not can and preparing is not None and preparing.index == about:
            self.oracle.ask_for_barrier(PLAN)
        self.log.prepared(index, worker.incarnation, who, about, can=can)
        self.judge()
        if not (preparing is not None and self.log.preparing.get(index) is preparing):
            self.unchanged(lambda: self.log.prepared(index, worker.incarnation, who, about, can=False))
        wrong = StageIndex(worker.num_stages)
        self.unchanged(lambda: self.log.prepared(index, worker.incarnation, wrong, about, can=True), ProtocolViolation)

    # -- stages, each of which reads the log on its own ----------------------------------------------------------------

    @rule(vw=INDEX, stage=INDEX, count=st.integers(1, 40))
    def flow(self, vw: int, stage: int, count: int) -> None:
        """A stage behind the first reads some records, and computes what it can."""
        worker = self.worker(vw)
        if worker.num_stages == 1:
            return
        self._flow(worker, 1 + stage % (worker.num_stages - 1), count)

    def _flow(self, worker: Worker, number: int, count: int) -> None:
        life: _Life = (worker.vw, worker.incarnation)
        stages = self.stages.setdefault(life, [Stage() for _ in range(worker.num_stages - 1)])
        own, n = stages[number - 1], self.scenario.n
        sent = sorted({*worker.versions} if number == 1 else stages[number - 2].computed)
        for record in self.told[own.known : own.known + count]:
            # It completes a segment before it begins the next one: it waits until everything that the first stage has
            # started has come through the stages before, as the barrier's frame comes behind that.
            self._compute(worker, number, [p for p in sent if p not in own.computed])
            begun = (
                {p for p in worker.versions if p <= record.start * n} if isinstance(record, SegmentRecord) else set()
            )
            if not begun <= own.computed:
                return
            own.read(record, life, n)
        self._compute(worker, number, [p for p in sent if p not in own.computed])

    def _compute(self, worker: Worker, number: int, arrived: list[int]) -> None:
        """Compute minibatches in order, up to one of a version that the stage does not know."""
        life: _Life = (worker.vw, worker.incarnation)
        own = self.stages[life][number - 1]
        for p in arrived:
            version, bounds = own.plan_of(p) if own.plans else (-1, ())
            if version < worker.versions[p]:
                return
            assert version == worker.versions[p], f"stage {number} computes {p} of {life} by version {version}"
            layers = self.computed.setdefault((life, p), [*range(bounds[0], bounds[1])] if number == 1 else [])
            layers += range(bounds[number], bounds[number + 1])
            own.computed.add(p)
            if number == worker.num_stages - 1:
                assert layers == [*range(NUM_LAYERS)], f"minibatch {p} of {life} goes through layers {layers}"

    def check_the_end(self) -> None:
        """Everything is computed by every stage, with the layers that were announced last."""
        super().check_the_end()
        for worker in self.members():
            for number in range(1, worker.num_stages):
                self._flow(worker, number, len(self.told))
                assert self.stages[worker.vw, worker.incarnation][number - 1].computed == {*worker.versions}
        for vw, (version, _) in self.versions.items():  # who was never a member has none
            plan = self.log.progress.plans[VirtualWorkerIndex(vw)]
            assert plan.version <= version, f"{plan} of {vw} was never announced"


@pytest.mark.matrix
@pytest.mark.timeout(900)
@pytest.mark.exhaustive
def test_each_layer_of_each_minibatch_is_computed_by_one_stage() -> None:
    num_runs = 60
    begun: list[int] = []

    class Counted(Movers):
        def check_the_end(self) -> None:
            super().check_the_end()
            begun.append(sum(isinstance(record, PlanRecord) for record in self.told))

    run_state_machine_as_test(Counted, settings=settings(SETTINGS, max_examples=num_runs))
    assert sum(begun) >= num_runs // 5, "layers hardly ever move"


def test_a_stage_waits_for_minibatches_that_those_before_it_have_not_computed_yet() -> None:
    """Found by chance: the third stage reads of the next segment before the second has computed all of this one."""
    scenario = Scenario(
        num_stages=(3, 2),
        num_shards=1,
        n=1,
        d=1,
        weights="wave",
        deterministic=False,
        num_samples=60,
        batch_size=1,
        epochs=None,
        total_minibatches=60,
        every=None,
        has_cuts=True,
    )
    machine = Movers()
    machine.begin(scenario=scenario, prompt=True, schedule=2, head_start=0, mishaps=0.0)
    machine.clock_restarts()
    machine.teardown()
