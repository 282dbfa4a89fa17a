"""A large cluster is planned as copies of a small one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from hetpipe.decide.planner.allocation.auto import auto
from hetpipe.decide.planner.allocation.equal_distribution import equal_distribution
from hetpipe.decide.planner.allocation.node_partition import node_partition
from hetpipe.decide.planner.choose import choose_plan, closed_form
from hetpipe.decide.planner.jobs import JobPlan, Jobs
from hetpipe.decide.planner.options import AllocationName, PlanOptions
from hetpipe.decide.planner.ranking import ALIKE, Ranking
from hetpipe.decide.planner.tiling import tiling_of
from hetpipe.decide.simulator.prediction import predicted
from hetpipe.values.cluster import Cluster, LinkOverride, node_of
from hetpipe.values.plan_document import Predicted
from hetpipe.values.policies import PlacementName
from hetpipe.values.profile import Profile
from tests.decide.planner import models
from tests.decide.planner.job_cases import MIB, chain, cluster_of, jobs_for

#: Nodes of two types, in turn.
NODES = ["VVVV", "QQQQ"] * 20
#: Up to so many times as slow may copies be (docs/benchmarks.md, section f).
_SLOWER = 1.06
#: What a search calls to see whether the cluster is a large one.
ASKED = "hetpipe.decide.planner.ranking.tiling_of"


@pytest.fixture(autouse=True)
def _smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two copies are a large cluster already."""
    monkeypatch.setattr("hetpipe.decide.planner.tiling._FEWEST", 2)


def test_a_large_cluster_has_256_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert tiling_of(cluster_of(["VVVV", "QQQQ"] * 31), PlanOptions()) is None
    assert tiling_of(cluster_of(["VVVV", "QQQQ"] * 32), PlanOptions()) is not None


def test_copies_have_each_node_once() -> None:
    cluster = cluster_of(NODES)
    tiling = tiling_of(cluster, PlanOptions())

    assert tiling is not None
    assert Counter(node.devices[0] for node in tiling.small.nodes) == {"V": 10, "Q": 10}
    assert len(tiling.copies) == 2
    assert not tiling.rest
    repeated = tiling.repeated([tuple(tiling.small.devices)])
    assert repeated[0] == tuple(tiling.small.devices)
    assert sorted(repeated[0] + repeated[1]) == sorted(cluster.devices)
    types = [[cluster.devices[device] for device in group] for group in repeated]
    assert types[0] == types[1]


def test_few_devices_may_be_left_over() -> None:
    tiling = tiling_of(cluster_of([*NODES, "VVVV", "R"]), PlanOptions())

    assert tiling is not None
    assert tiling.rest == {"n40/0": "V", "n40/1": "V", "n40/2": "V", "n40/3": "V", "n41/0": "R"}


def test_other_clusters_are_planned_as_they_are() -> None:
    unlike = cluster_of(["V" * (1 + index) for index in range(16)])
    cluster = cluster_of(NODES)
    slower = LinkOverride(between=("n0", "n1"), bandwidth_bytes_per_second=1e9, latency_seconds=0.0)
    links = cluster.links.model_copy(update={"overrides": (slower,)})
    placements: tuple[PlacementName, ...] = ("round_robin", "ed_local")

    assert len(unlike.devices) >= 128
    assert tiling_of(unlike, PlanOptions()) is None
    assert tiling_of(cluster_of(NODES[:30]), PlanOptions()) is None
    assert tiling_of(cluster.model_copy(update={"links": links}), PlanOptions()) is None
    assert tiling_of(cluster, PlanOptions(num_shards=4)) is None
    assert tiling_of(cluster, PlanOptions(with_shards=False)) is None
    assert all(tiling_of(cluster, PlanOptions(placement=placement)) is None for placement in placements)


def best(
    profile: Profile, cluster: Cluster, name: AllocationName, search: Callable[[Jobs], JobPlan], devices: int = 8
) -> JobPlan:
    """The best plan by closed form; small clusters have `devices`."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("hetpipe.decide.planner.tiling._SMALL", devices)
        return Ranking(jobs_for(profile, cluster, PlanOptions()), closed_form).of(name, search).plan


def nodes_of(plan: JobPlan) -> Counter[str]:
    return Counter(node_of(stage.device) for worker in plan.workers for stage in worker.stages)


def test_what_is_left_over_is_used_where_it_helps() -> None:
    """Another node of the same type is another virtual worker of NP; a slow one would hold the others back."""
    profile, nodes = chain([3.0] * 8), ["VV"] * 17
    plan = best(profile, cluster_of(nodes), "NP", node_partition)
    assert nodes_of(plan) == {f"n{index}": 2 for index in range(17)}

    plan = best(profile, cluster_of([*nodes[1:], "Q"]), "NP", node_partition)
    assert nodes_of(plan) == {f"n{index}": 2 for index in range(16)}


def test_a_cluster_is_divided_evenly_as_a_whole() -> None:
    """ED has all devices, none left over: 3 of each type in each of 6 virtual workers, which no copy has."""
    plan = best(chain([3.0] * 8), cluster_of(["VV"] * 9 + ["QQ"] * 9), "ED", equal_distribution)
    assert nodes_of(plan) == {f"n{index}": 2 for index in range(18)}


@pytest.mark.parametrize(
    ("name", "search", "factor"),
    [
        pytest.param("auto", auto, 1.1, id="auto: copies of 8 devices pack less evenly than 24"),
        pytest.param("ED", equal_distribution, ALIKE, id="ED"),
        pytest.param("NP", node_partition, ALIKE, id="NP"),
    ],
)
def test_as_good_as_the_whole_search(name: AllocationName, search: Callable[[Jobs], JobPlan], factor: float) -> None:
    profile, cluster = chain([3.0, 2.0] * 3), cluster_of(["VV", "QQ"] * 6)
    plan, searched = (best(profile, cluster, name, search, devices) for devices in (8, 64))

    assert plan.rate.samples_per_second * factor >= searched.rate.samples_per_second
    assert set(nodes_of(plan)) <= {node.name for node in cluster.nodes}
    assert max(nodes_of(plan).values()) <= 2


def test_only_copies_are_simulated_at_full_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetpipe.decide.planner.tiling._SMALL", 8)
    cluster = cluster_of(["VV", "QQ"] * 6)
    simulated: list[tuple[int, bool]] = []

    def recorded(plan: JobPlan, options: PlanOptions, *, waves: int | None = None) -> Predicted:
        simulated.append((len(plan.costs.cluster.devices), waves is None))
        return closed_form(plan, options)

    Ranking(jobs_for(chain([3.0, 2.0] * 3), cluster, PlanOptions()), recorded).of("auto", auto)

    assert set(simulated) == {(8, False), (24, True)}


def test_a_model_that_needs_more_than_a_small_cluster() -> None:
    """It has three stages, and copies of two devices."""
    plan = best(chain([1.0] * 3, parameters=1800 * MIB), cluster_of(["Q"] * 4), "auto", auto, devices=2)
    assert [len(worker.stages) for worker in plan.workers] == [3]


@pytest.mark.sweep
@pytest.mark.timeout(900)
@pytest.mark.parametrize("staleness", [0, 4])
@pytest.mark.parametrize("model", ["vgg", "gpt2"])
def test_little_slower_than_the_whole_search_by_simulation(
    model: str, staleness: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = {"vgg": models.vgg19, "gpt2": models.gpt2}[model]()
    cluster, options = models.cluster(*models.PAPER * 8), PlanOptions(staleness=staleness)
    plan = choose_plan(profile, cluster, options, predict=predicted)
    monkeypatch.setattr(ASKED, lambda *_: None)
    searched = choose_plan(profile, cluster, options, predict=predicted)

    assert plan.predicted.samples_per_second * _SLOWER >= searched.predicted.samples_per_second
