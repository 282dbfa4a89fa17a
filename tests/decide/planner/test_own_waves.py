"""Waves in proportion to the speeds of virtual workers: the plan, its prediction, and what people read of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetpipe.decide.planner.choose import choose_plan
from hetpipe.decide.planner.costs import Costs
from hetpipe.decide.planner.options import PlanOptions
from hetpipe.decide.planner.shard_bytes import PlacedParameters
from hetpipe.decide.simulator.documents import simulated_plan
from hetpipe.decide.simulator.options import SimulationOptions
from hetpipe.decide.simulator.prediction import predicted
from hetpipe.decide.simulator.simulate import simulate
from hetpipe.decide.sync.division import mean_minibatches
from hetpipe.report.plan_page import picture_of
from hetpipe.report.plan_reasons import reasons_of
from hetpipe.report.plan_view import PlanFacts, view_of
from hetpipe.values.document import document_of, to_plain
from hetpipe.values.plan_document import PlanDocument
from tests.decide.planner.job_cases import chain, cluster_of

PROFILE = chain([3.0, 5.0, 2.0, 4.0] * 2)
CLUSTER = cluster_of(["VV", "RR", "GG", "QQ"])
COSTS = Costs(PROFILE, CLUSTER)


def options(*, proportional: bool) -> PlanOptions:
    return PlanOptions(allocation="NP", minibatches_per_wave=4, proportional=proportional, placement="balanced")


@pytest.fixture(scope="module")
def plans() -> tuple[PlanDocument, PlanDocument]:
    """With one N, and in proportion."""
    one, own = (choose_plan(PROFILE, CLUSTER, options(proportional=each), predict=predicted) for each in (False, True))
    return one, own


def waiting_for_the_slower(plan: PlanDocument) -> float:
    """Share of the time, over virtual workers, if weights were pushed and pulled in no time."""
    simulated = replace(simulated_plan(plan, COSTS), placed=PlacedParameters((), (), COSTS.num_layers))
    length = mean_minibatches(128, plan.waves)
    found = simulate(simulated, COSTS, SimulationOptions(staleness=0, minibatches=length, staggered=True))
    return sum(found.waiting_seconds) / len(plan.waves) / found.seconds


def test_waves_take_equally_long_as_far_as_rounding_lets_them(plans: tuple[PlanDocument, PlanDocument]) -> None:
    one, own = plans
    assert (one.minibatches_per_wave, min(own.waves)) == (4, 4)
    assert len(set(own.waves)) > 1
    lengths = [n / worker.samples_per_second for n, worker in zip(own.waves, own.virtual_workers, strict=True)]
    slowest = lengths[own.waves.index(4)]
    for n, length, most in zip(own.waves, lengths, own.max_minibatches_per_wave, strict=True):
        assert n <= most
        assert length == pytest.approx(slowest, rel=0.5 / n + 1e-6)


def test_nobody_waits_for_the_slow(plans: tuple[PlanDocument, PlanDocument]) -> None:
    one, own = plans
    assert own.predicted.samples_per_second > 1.1 * one.predicted.samples_per_second
    assert waiting_for_the_slower(own) < 0.06
    assert waiting_for_the_slower(one) > 0.15


def test_a_plan_file_with_a_list(plans: tuple[PlanDocument, PlanDocument]) -> None:
    _, own = plans
    assert to_plain(own)["minibatches_per_wave"] == list(own.waves)
    assert document_of(PlanDocument, to_plain(own), what="plan.json") == own
    assert simulated_plan(own, COSTS).minibatches_per_wave == own.waves


def test_equal_workers_have_equal_waves() -> None:
    equal = options(proportional=True)
    same = choose_plan(PROFILE, CLUSTER, replace(equal, allocation="ED"), predict=predicted)
    one = choose_plan(PROFILE, CLUSTER, replace(equal, allocation="ED", proportional=False), predict=predicted)
    assert set(same.waves) == {4}
    assert same.predicted.samples_per_second == one.predicted.samples_per_second


def test_what_people_read(plans: tuple[PlanDocument, PlanDocument]) -> None:
    _, own = plans
    facts = PlanFacts(own, COSTS, options(proportional=True))
    [(_, told)] = [fact for fact in view_of(facts).facts if fact[0] == "in a wave"]
    assert told.startswith("N = ")
    assert "(virtual workers in order) minibatches" in told
    assert all(str(n) in told for n in own.waves)
    [sentence] = reasons_of(facts).waves
    assert sentence.startswith("N is in proportion to the speeds of the virtual workers")
    assert f"waves of {min(own.waves)} to {max(own.waves)} minibatches" in picture_of(facts).caption
