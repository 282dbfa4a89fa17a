"""PipeDream-2BW's planner: its closed forms by hand, and that it tries every configuration."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from hetpipe.decide.planner.allocation.parallel import (
    Blocks,
    Configuration,
    Servers,
    configurations,
    device_bytes,
    minibatch_ms,
    parallel,
    samples_per_second,
)
from hetpipe.decide.planner.options import PlanOptions
from hetpipe.decide.planner.scaled_profile import scaled_profile
from hetpipe.errors import InfeasiblePlan, PlanError
from hetpipe.values.cluster import LinkSpec
from tests.decide.planner.job_cases import MIB, chain, cluster_of, jobs_for

BLOCKS = Blocks(
    batch_size=8,
    forward_ms=40.0,
    backward_ms=80.0,
    parameter_bytes=800_000_000,
    activation_bytes=64_000_000,
    returning_bytes=2_000_000.0,
    boundary_bytes=2_000_000.0,
)
SERVERS = Servers(
    devices_per_server=4,
    within=LinkSpec(bandwidth_bytes_per_second=10e9),
    between=LinkSpec(bandwidth_bytes_per_second=1e9),
)
OPTIONS = PlanOptions(allocation="parallel", weights="double_buffer", max_batch=64)


def config(w: int, d: int, b: int, m: int, *, recompute: bool = False) -> Configuration:
    return Configuration(w, d, b, m, recompute)


class TestClosedForms:
    """Appendix A.1."""

    def test_one_device_only_computes(self) -> None:
        assert minibatch_ms(BLOCKS, SERVERS, config(1, 1, 8, 4)) == 120.0

    def test_a_pipeline_within_a_server(self) -> None:
        # Activations and gradients at both borders: 4 × 2 MB over 10 GB/s.
        assert minibatch_ms(BLOCKS, SERVERS, config(1, 4, 8, 4)) == pytest.approx(30.0 + 0.8)

    def test_a_pipeline_across_servers(self) -> None:
        assert minibatch_ms(BLOCKS, SERVERS, config(2, 4, 8, 4)) == pytest.approx(30.0 + 8.0)

    def test_half_the_samples_take_half_the_time(self) -> None:
        assert minibatch_ms(BLOCKS, SERVERS, config(1, 4, 4, 8)) == pytest.approx(15.4)

    def test_recomputation_adds_a_forward(self) -> None:
        assert minibatch_ms(BLOCKS, SERVERS, config(1, 1, 8, 4, recompute=True)) == pytest.approx(4 / 3 * 120.0)

    def test_replicas_exchange_gradients_once_per_wave(self) -> None:
        # Ring over 1 GB/s: 2 · 3/4 · 0.8 GB = 1200 ms; over two minibatches 600 ms each, more than they compute.
        assert minibatch_ms(BLOCKS, SERVERS, config(4, 1, 8, 2)) == pytest.approx(600.0)
        assert minibatch_ms(BLOCKS, SERVERS, config(4, 1, 8, 20)) == 120.0
        # Three replicas are less than a server has, so the fast link counts: 2 · 2/3 · 0.8 GB at 10 GB/s.
        assert minibatch_ms(BLOCKS, SERVERS, config(3, 1, 1, 1)) == pytest.approx(1000 * 4 / 3 * 0.08)

    def test_throughput(self) -> None:
        assert samples_per_second(BLOCKS, SERVERS, config(4, 1, 8, 20)) == pytest.approx(4 * 8 / 0.120)

    def test_memory(self) -> None:
        assert device_bytes(BLOCKS, config(1, 4, 8, 4)) == 400_000_000 + 64_000_000 + 8_000_000
        assert device_bytes(BLOCKS, config(1, 4, 8, 4, recompute=True)) == 400_000_000 + 16_000_000 + 8_000_000
        assert device_bytes(BLOCKS, config(1, 4, 4, 8)) == 400_000_000 + 32_000_000 + 4_000_000


def test_every_configuration_is_tried() -> None:
    found = {(c.width, c.depth, c.batch_size, c.minibatches_per_wave) for c in configurations(6, 3, 12)}

    assert found == {
        (w, d, b, 12 // (w * b))
        for w in range(1, 7)
        for d in range(1, 4)
        for b in range(1, 13)
        if w * d <= 6 and 12 % (w * b) == 0 and 12 // (w * b) >= d
    }


def test_a_profile_of_another_batch_size() -> None:
    profile = chain([3.0, 6.0], {"V": 1.0}, parameters=100, output=1001, batch_size=8)

    half = scaled_profile(profile, 4)

    assert (half.batch_size, half.input_bytes) == (4, 501)
    assert half.layers[1].forward_ms == {"V": 1.0}
    assert (half.layers[0].parameter_bytes, half.layers[0].output_bytes, half.layers[0].activation_bytes) == (
        100,
        501,
        1001,
    )
    assert scaled_profile(profile, 8) == profile


def test_a_small_model_is_replicated_and_keeps_the_measured_minibatch() -> None:
    cluster = cluster_of(["VVVV"], gib={"V": 8})
    plan = parallel(jobs_for(chain([30.0] * 4, {"V": 1.0}, parameters=MIB, batch_size=8), cluster, OPTIONS))

    assert [len(worker.stages) for worker in plan.workers] == [1, 1, 1, 1]
    assert plan.costs.profile.batch_size == 8
    assert plan.minibatches_per_wave == 64 // (4 * 8)


def test_a_large_model_is_a_deep_pipeline() -> None:
    # 1 GiB of parameters in a layer; two of them, 6 tensors each, do not fit on a device.
    cluster = cluster_of(["VVVV"], gib={"V": 7})
    plan = parallel(jobs_for(chain([30.0] * 4, {"V": 1.0}, parameters=1024 * MIB, batch_size=8), cluster, OPTIONS))

    assert [len(worker.stages) for worker in plan.workers] == [4]
    assert plan.minibatches_per_wave * plan.costs.profile.batch_size == 64


def test_the_first_that_fits_is_the_best_of_those_that_fit() -> None:
    cluster = cluster_of(["VV", "VV"], gib={"V": 3}, network=2e8)
    jobs = jobs_for(chain([30.0] * 4, {"V": 1.0}, parameters=128 * MIB, output=8 * MIB, batch_size=8), cluster, OPTIONS)
    blocks = Blocks(8, 40.0, 80.0, 512 * MIB, 64 * MIB, 8.0 * MIB, 8.0 * MIB)
    servers = Servers(2, cluster.links.intra_node, cluster.links.inter_node)

    plan = parallel(jobs)

    def rate(width: int, depth: int, batch_size: int) -> float:
        waves = 64 // (width * batch_size)
        return samples_per_second(blocks, servers, config(width, depth, batch_size, waves))

    chosen = rate(len(plan.workers), len(plan.workers[0].stages), plan.costs.profile.batch_size)
    fitting = [
        rate(c.width, c.depth, c.batch_size)
        for c in configurations(4, 4, 64)
        if not c.recompute and device_bytes(blocks, c) * 2.5 <= 3 << 30  # so that 5 tensors fit, too
    ]
    assert chosen >= max(fitting) * (1 - 1e-12)
    assert math.isfinite(chosen)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (replace(OPTIONS, max_batch=None), "--max-batch"),
        (replace(OPTIONS, weights="wave"), "add --weights double_buffer"),
    ],
)
def test_options_that_do_not_agree(options: PlanOptions, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        parallel(jobs_for(chain([1.0] * 4, {"V": 1.0}), cluster_of(["VV"], gib={"V": 1}), options))


def test_unequal_devices_are_refused() -> None:
    with pytest.raises(PlanError, match="the cluster has Q, V"):
        parallel(jobs_for(chain([1.0] * 4), cluster_of(["VQ"]), OPTIONS))


def test_nothing_fits() -> None:
    jobs = jobs_for(chain([1.0] * 4, {"V": 1.0}, parameters=1 << 32), cluster_of(["VV"], gib={"V": 1}), OPTIONS)

    with pytest.raises(InfeasiblePlan, match="global batch of 64 fits"):
        parallel(jobs)
