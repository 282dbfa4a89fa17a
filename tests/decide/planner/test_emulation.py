"""Stages that play devices: the profile's times, and the links between the nodes they play."""

from __future__ import annotations

import pytest

from hetpipe.decide.planner.costs import Costs
from hetpipe.decide.planner.emulation import EmulatedStage, emulations
from hetpipe.values.cluster import Cluster
from hetpipe.values.document import document_of
from hetpipe.values.ids import DeviceId
from hetpipe.values.profile import Profile
from hetpipe.values.run import LinkTime
from tests.job.test_job_cluster import CLUSTER, PROFILE

STAGES = (EmulatedStage(DeviceId("n0/1"), 0, 1), EmulatedStage(DeviceId("n1/0"), 1, 2))
INTRA, INTER = LinkTime(0.0, 8e9), LinkTime(0.001, 1e9)


@pytest.fixture
def costs() -> Costs:
    return Costs(document_of(Profile, PROFILE, what="profile"), document_of(Cluster, CLUSTER, what="cluster"))


def test_a_stage_takes_its_devices_time(costs: Costs) -> None:
    first, second = emulations(costs, STAGES, ["n0"], with_links=False)
    assert (first.forward_of(0, 1), first.backward_of(0, 1)) == (0.0025, 0.005)
    assert (second.forward_of(1, 2), second.backward_of(1, 2)) == (0.0025, 0.005)
    assert second.forward_seconds[0] == 0.0025, "a layer that moves there takes what that device takes for it"
    assert (first.upstream, first.downstream, first.shards) == (None, None, ())


def test_a_straggler_computes_longer(costs: Costs) -> None:
    first, second = emulations(costs, STAGES, [], with_links=False, stragglers={"n1/0": 10.0})
    assert first.forward_of(0, 1) == 0.0025
    assert (second.forward_of(1, 2), second.backward_of(1, 2)) == pytest.approx((0.025, 0.05))


def test_links_are_those_between_the_nodes(costs: Costs) -> None:
    first, second = emulations(costs, STAGES, ["n0", "n1"], with_links=True)
    assert (first.upstream, first.downstream, first.shards) == (None, INTER, (INTRA, INTER))
    assert (second.upstream, second.downstream, second.shards) == (INTER, None, (INTER, INTRA))


def test_replicas_make_a_ring_over_the_slowest_link_among_them(costs: Costs) -> None:
    across, within = [DeviceId("n0/1"), DeviceId("n1/0")], [DeviceId("n0/0"), DeviceId("n0/1")]
    first, second = emulations(costs, STAGES, [], with_links=True, replicas=[across, within])
    assert (first.replicas, second.replicas) == (INTER, INTRA)
    unlinked, _ = emulations(costs, STAGES, [], with_links=False, replicas=[across, within])
    assert unlinked.replicas is None


def test_one_stage_has_no_neighbours(costs: Costs) -> None:
    (only,) = emulations(costs, [EmulatedStage(DeviceId("n0/0"), 0, 2)], ["n1"], with_links=True)
    assert (only.forward_of(0, 2), only.backward_of(0, 2)) == (0.002, 0.004)
    assert (only.upstream, only.downstream, only.shards) == (None, None, (INTER,))
