"""Training without hetpipe, by hand."""

from __future__ import annotations

import pytest

from hetpipe.decide.planner.baselines import all_reduce, ring_ms, single_devices, slowest_link, whole_model_bytes
from hetpipe.decide.planner.costs import Costs
from hetpipe.values.cluster import LinkOverride, LinkSpec
from hetpipe.values.ids import DeviceId
from tests.decide.planner.job_cases import MIB, chain, cluster_of

PROFILE = chain([30.0, 60.0], {"V": 2.0, "Q": 1.0}, parameters=100 * MIB, output=10 * MIB, batch_size=8)


def costs(nodes: list[str], *, v_gib: int = 1, network: float = 1e9, latency_seconds: float = 0.0) -> Costs:
    gib = {"V": v_gib, "Q": 1}
    return Costs(PROFILE, cluster_of(nodes, gib=gib, network=network, latency_seconds=latency_seconds))


def test_a_device_holds_weights_gradient_slots_and_activations() -> None:
    assert whole_model_bytes(costs(["V"]), 2) == 200 * MIB * 4 + 2 * 20 * MIB


def test_all_reduce_waits_for_the_slowest_and_for_the_ring() -> None:
    fast, slow = all_reduce(costs(["V", "Q"], network=100e9), 0), all_reduce(costs(["V", "Q"], network=1e9), 0)

    assert fast.samples_per_second == pytest.approx(2 * 8 / 0.090)  # 30 ms forward, 60 ms backward of Q
    ring = 2 * 1 / 2 * 200 * MIB / 1e9  # longer than any backward
    assert slow.samples_per_second == pytest.approx(2 * 8 / (0.030 + ring))
    assert "2 of 2" in slow.reason


def test_only_devices_that_hold_the_model_take_part() -> None:
    few = all_reduce(costs(["V", "Q"], v_gib=4), 8)  # 2000 MiB of tensors

    assert few.samples_per_second == pytest.approx(8 / 0.045)
    assert "1 of 2" in few.reason


def test_nobody_holds_the_model() -> None:
    none = all_reduce(costs(["V", "Q"]), 8)

    assert none.samples_per_second is None
    assert "the largest has 1 GiB" in none.reason


def test_single_devices() -> None:
    both = single_devices(costs(["Q", "V", "Q"], v_gib=4), 8)

    assert [(one.name, one.samples_per_second) for one in both] == [
        ("single:Q", None),
        ("single:V", pytest.approx(8 / 0.045)),
    ]
    assert "needs 1.99 GiB and Q has 1 GiB: 1016 MiB are missing" in both[0].reason


def test_the_ring_has_2_g_minus_1_rounds() -> None:
    link = LinkSpec(bandwidth_bytes_per_second=1e9, latency_seconds=0.002, efficiency=0.5)

    assert ring_ms(10**9, 4, link) == pytest.approx(1000 * (2 * 3 / 4 * 2 + 6 * 0.002))


def test_the_slowest_link_is_one_between_the_devices_at_hand() -> None:
    base = cluster_of(["VV", "V", "V"], gib={"V": 1}, network=5e9)
    override = LinkOverride(between=("n0", "n2"), bandwidth_bytes_per_second=1e8)
    cluster = base.model_copy(update={"links": base.links.model_copy(update={"overrides": (override,)})})
    with_override = Costs(PROFILE, cluster)

    def slowest(*devices: str) -> float:
        return slowest_link(with_override, [DeviceId(device) for device in devices]).bandwidth_bytes_per_second

    assert slowest("n0/0", "n0/1") == 15.75e9
    assert slowest("n0/0", "n0/1", "n1/0") == 5e9
    assert slowest("n0/0", "n1/0", "n2/0") == 1e8
