"""Times on devices that are not here, with made-up numbers."""

from __future__ import annotations

import pytest

from hetpipe.decide.planner.estimates import (
    COMPUTE_EFFICIENCY,
    OPERATION_SECONDS,
    Bounds,
    bounds_of,
    built_up,
    estimated,
    scaled,
    traffic_bytes,
)
from hetpipe.values.catalogue import CATALOGUE
from tests.profiler.builders import layer, measurement

#: 10 floating-point operations per byte.
MEASURED = Bounds(flops_per_second=1000.0, bytes_per_second=100.0)
#: Half as fast at computing, a quarter at moving: 20 operations per byte.
TARGET = Bounds(flops_per_second=500.0, bytes_per_second=25.0)


def test_traffic_is_parameters_activations_and_output() -> None:
    assert traffic_bytes(layer(parameters=25)) == 100 + 300 + 100


def test_a_layer_bound_by_computing_on_both_scales_with_the_peaks() -> None:
    found = scaled(layer(flops=1_000_000), MEASURED, TARGET)
    assert [found.forward_ms, found.backward_ms] == pytest.approx([4.0, 10.0])


def test_a_layer_bound_by_memory_on_both_scales_with_the_bandwidths() -> None:
    found = scaled(layer(flops=10), MEASURED, TARGET)
    assert [found.forward_ms, found.backward_ms] == pytest.approx([8.0, 20.0])


def test_a_layer_between_the_ridges_changes_its_bound() -> None:
    # 400 bytes and 6000 operations: 15 per byte, above the ridge of one and below that of the other.
    found = scaled(layer(flops=6000), MEASURED, TARGET)
    on_measured, on_target = 6000 / 1000, 400 / 25
    assert found.forward_ms == pytest.approx(2.0 * on_target / on_measured)


def test_backward_has_its_own_work_and_twice_the_traffic() -> None:
    found = scaled(layer(flops=6000), MEASURED, TARGET)
    on_measured, on_target = 12000 / 1000, 800 / 25
    assert found.backward_ms == pytest.approx(5.0 * on_target / on_measured)


def test_equal_devices_take_equal_times() -> None:
    assert scaled(layer(flops=777), MEASURED, MEASURED) == layer(flops=777)


def test_from_its_work_alone() -> None:
    found = built_up(layer(flops=1000), TARGET)
    forward_seconds = 1000 / (COMPUTE_EFFICIENCY * 500) + 400 / 25 + 3 * OPERATION_SECONDS
    backward_seconds = 2000 / (COMPUTE_EFFICIENCY * 500) + 800 / 25 + 4 * OPERATION_SECONDS
    assert found.forward_ms == pytest.approx(1000 * forward_seconds)
    assert found.backward_ms == pytest.approx(1000 * backward_seconds)


@pytest.mark.parametrize(
    ("dtype", "kind", "expected"),
    [
        ("float32", "A100_80GB", CATALOGUE["A100_80GB"].fp32_flops_per_second),
        ("bfloat16", "A100_80GB", CATALOGUE["A100_80GB"].bf16_flops_per_second),
        ("bfloat16", "GTX_1080_TI", CATALOGUE["GTX_1080_TI"].fp32_flops_per_second),  # it has no faster format
        ("float16", "TITAN_V", CATALOGUE["TITAN_V"].fp16_flops_per_second),
    ],
)
def test_the_peak_is_that_of_the_models_dtype(dtype: str, kind: str, expected: float) -> None:
    assert bounds_of(CATALOGUE[kind], dtype).flops_per_second == expected


def test_a_gpu_is_estimated_from_a_measured_gpu_of_the_catalogue() -> None:
    compute = layer("compute", flops=10**12)
    move = layer("move")
    # The CPU comes first, but a GPU says more about another GPU.
    slow_cpu = measurement("cpu", *(layer(name) for name in ("compute", "move")))
    found = estimated([slow_cpu, measurement("TITAN_RTX", compute, move)], "QUADRO_P4000")
    ours, theirs = CATALOGUE["TITAN_RTX"], CATALOGUE["QUADRO_P4000"]
    assert found.device_type == "QUADRO_P4000"
    assert found.layers[0].forward_ms == pytest.approx(2.0 * ours.fp32_flops_per_second / theirs.fp32_flops_per_second)
    assert found.layers[1].forward_ms == pytest.approx(
        2.0 * ours.memory_bytes_per_second / theirs.memory_bytes_per_second
    )
    assert found.layers[1].activation_bytes == 300


def test_without_a_measured_gpu_only_the_work_counts() -> None:
    work = layer(flops=10**9)
    target = bounds_of(CATALOGUE["T4"], "float32")
    assert estimated([measurement("cpu", work)], "T4").layers == (built_up(work, target),)


def test_a_model_without_parameters_computes_in_float32() -> None:
    assert measurement("cpu", layer()).compute_dtype == "float32"
    mixed = measurement("cpu", layer(parameters=10), layer("b", parameters=30, dtype="float16"))
    assert mixed.compute_dtype == "float16"
