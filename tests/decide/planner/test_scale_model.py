"""A few virtual workers of each kind stand for all of them: the loads of network cards remain, and nearly the speed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import pytest

from hetpipe.decide.planner.job_rate import bytes_moved
from hetpipe.decide.planner.jobs import JobPlan
from hetpipe.decide.planner.options import PlanOptions
from hetpipe.decide.planner.scale_model import ScaleModel, scale_model
from hetpipe.decide.simulator.prediction import predicted
from hetpipe.values.cluster import Cluster, LinkOverride, node_of
from hetpipe.values.ids import DeviceId
from hetpipe.values.policies import PlacementName
from hetpipe.values.sync import PushCompression
from tests.decide.planner.job_cases import MIB, chain, cluster_of, jobs_for

#: Three kinds of nodes, 32 in all.
NODES = ["VVVV", "QQQQ", "RRRR", "VVVV"] * 8


@pytest.fixture(autouse=True)
def _smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half as large as others, so that whole jobs are simulated in a second."""
    monkeypatch.setattr("hetpipe.decide.planner.scale_model._SCALED_STAGES", 64)


def plan_of(
    cluster: Cluster,
    *,
    n: int = 8,
    parameters: int = 8 * MIB,
    placement: PlacementName = "balanced",
    compress_pushes: PushCompression = "none",
) -> JobPlan:
    """Each node is a virtual worker, as is each pair of nodes of R behind one another."""
    options = PlanOptions(placement=placement, compress_pushes=compress_pushes)
    jobs = jobs_for(chain([3.0] * 24, parameters=parameters), cluster, options)
    by_node: dict[str, list[DeviceId]] = {}
    for device in jobs.devices:
        by_node.setdefault(node_of(device), []).append(device)
    strong = [node for node in by_node if jobs.devices[by_node[node][0]] == "R"]
    groups = [devices for node, devices in by_node.items() if node not in strong]
    for one, other in zip(strong[::2], strong[1::2], strict=True):
        groups += [by_node[one][:2] + by_node[other][:2], by_node[one][2:] + by_node[other][2:]]
    found = jobs.best_with(n, groups)
    assert found is not None
    return found


def model_of(plan: JobPlan) -> ScaleModel | None:
    return scale_model([worker.stages for worker in plan.workers], plan.waves, plan.placed, plan.costs)


def test_every_kind_is_there_in_proportion() -> None:
    plan = plan_of(cluster_of(NODES))
    scale = model_of(plan)

    def kinds(workers: Iterable[int]) -> Counter[str]:
        return Counter(plan.workers[vw].stages[0].kind for vw in workers)

    assert scale is not None
    assert kinds(range(32)) == {"V": 16, "Q": 8, "R": 8}
    assert kinds(scale.workers) == {"V": 8, "Q": 4, "R": 4}
    stand_ins = [scale.workers[like] for like in scale.stand_ins]
    assert kinds(stand_ins) == kinds(range(32))
    assert set(Counter(stand_ins).values()) == {2}
    assert scale.chosen(range(32)) == scale.workers
    assert scale.expanded(list(map(float, scale.workers))) == stand_ins


@pytest.mark.parametrize("compress_pushes", ["none", "bfloat16"])
def test_network_cards_carry_the_same(compress_pushes: PushCompression) -> None:
    """Apart from the weights that stay on a node: per wave, of each node, in each direction."""
    plan = plan_of(cluster_of(NODES), compress_pushes=compress_pushes)
    scale = model_of(plan)
    assert scale is not None

    def loads(workers: Iterable[int], *, whole: bool) -> dict[tuple[str, str], int]:
        placed, total = (plan.placed if whole else scale.placed), Counter[tuple[str, str]]()
        for vw in workers:
            stages = plan.workers[vw].stages
            total.update(bytes_moved(stages, costs=plan.costs, placed=placed, minibatches_per_wave=8))
            for stage in stages:
                node = node_of(stage.device)
                local = sum(sums.local_bytes(node, stage.first, stage.last) for sums in (placed.pushed, placed.pulled))
                total.update({(node, "in"): local, (node, "out"): local})
        return total

    here, there = loads(scale.workers, whole=False), loads(range(32), whole=True)
    assert here
    for side, num_bytes in here.items():
        assert num_bytes == pytest.approx(there[side], rel=0.06)  # balanced placements differ by up to 5 %


@pytest.mark.parametrize(
    ("n", "parameters", "most"),
    [pytest.param(8, MIB, 0.01, id="devices"), pytest.param(4, 64 * MIB, 0.1, id="network")],
)
def test_nearly_as_fast(n: int, parameters: int, most: float, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, options = plan_of(cluster_of(NODES), n=n, parameters=parameters), PlanOptions()
    scaled = predicted(plan, options, waves=12)
    monkeypatch.setattr("hetpipe.decide.simulator.prediction.scale_model", lambda *_: None)
    whole = predicted(plan, options, waves=12)

    assert model_of(plan) is not None
    assert scaled.samples_per_second == pytest.approx(whole.samples_per_second, rel=most)
    assert scaled.cross_node_bytes_per_minibatch == whole.cross_node_bytes_per_minibatch


def test_pulls_are_counted_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where D decides when weights are pulled, the simulation knows how often."""
    plan, options = plan_of(cluster_of(NODES), n=4), PlanOptions(staleness=2, pull="required")
    scaled = predicted(plan, options, waves=6).cross_node_bytes_per_minibatch
    monkeypatch.setattr("hetpipe.decide.simulator.prediction.scale_model", lambda *_: None)

    assert scaled == pytest.approx(predicted(plan, options, waves=6).cross_node_bytes_per_minibatch, rel=0.1)


def test_others_are_simulated_as_they_are() -> None:
    cluster = cluster_of(NODES)
    slower = LinkOverride(between=("n0", "n1"), bandwidth_bytes_per_second=1e9, latency_seconds=0.0)
    links = cluster.links.model_copy(update={"overrides": (slower,)})
    plan = plan_of(cluster)
    waves = tuple(8 + index for index in range(32))

    assert model_of(plan_of(cluster_of(NODES[:16]))) is None, "few virtual workers"
    assert model_of(plan_of(cluster, placement="round_robin")) is None, "24 of 32 shards have a layer"
    assert model_of(plan_of(cluster.model_copy(update={"links": links}))) is None, "a link of its own"
    assert model_of(replace(plan, own_waves=waves)) is None, "no two are alike"
