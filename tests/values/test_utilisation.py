"""Model FLOP utilisation: its one definition, and what is said where it cannot be told."""

from __future__ import annotations

import pytest

from hetpipe.values.cluster import DeviceType
from hetpipe.values.plan import ModelWork
from hetpipe.values.utilisation import (
    ModelSpeed,
    Peak,
    model_flops_utilisation,
    model_speed,
    peak_of_type,
    peak_of_types,
)

WORK = ModelWork(128, 2e9)


def test_the_example_of_palm() -> None:
    """Appendix B: PaLM 540B with 6·N + 12·L·H·Q·T operations per token at 238.3 · 10³ tokens/s has 46.2 % of 6144 TPUs.

    N = 540.35e9, L = 118 layers, H = 48 heads of Q = 256, T = 2048 tokens; the peak of a TPU v4 is 275e12.
    """
    per_token = 6 * 540.35e9 + 12 * 118 * 48 * 256 * 2048
    found = model_flops_utilisation(per_token * 238.3e3, seconds=1.0, peak_flops=6144 * 275e12)
    assert found == pytest.approx(0.462, abs=0.001)


def test_tokens_and_share_follow_from_samples() -> None:
    assert model_speed(10.0, WORK, Peak(1e11)) == ModelSpeed(1280.0, 0.2, None)
    assert model_speed(0.0, WORK, Peak(1e11)) == ModelSpeed(0.0, 0.0, None)


def test_what_is_not_known_has_a_reason() -> None:
    assert model_speed(10.0, WORK, Peak(None, "no peak")) == ModelSpeed(1280.0, None, "no peak")
    uncounted = model_speed(10.0, ModelWork(None, None), Peak(1e11))
    assert uncounted.model_flops_utilisation is uncounted.tokens_per_second is None
    assert (uncounted.model_flops_utilisation_reason or "").startswith("torch counts no operations in this model")
    unasked = model_speed(10.0, None, Peak(1e11))
    assert unasked == ModelSpeed(None, None, "the operations of the model were not counted")


def test_what_the_cluster_says_of_a_type_goes_before_the_catalogue() -> None:
    types = {"T4": DeviceType(memory_bytes=16 << 30, peak_flops=4e12), "TITAN_V": DeviceType(memory_bytes=12 << 30)}
    assert peak_of_type("T4", types, "float32") == 4e12
    assert peak_of_type("T4", {}, "float32") == 8.1e12
    assert peak_of_type("T4", {}, "float16") == 65e12
    assert peak_of_type("T4", {}, "bfloat16") == 8.1e12, "it has no faster bfloat16"
    assert peak_of_types(["T4", "TITAN_V", "T4"], types, "float32") == Peak(4e12 + 14.9e12 + 4e12)


def test_types_of_ones_own_without_a_peak_are_named_with_the_fix() -> None:
    types = {name: DeviceType(memory_bytes=1 << 30) for name in ("ACME", "BOLT")}
    assert peak_of_types(["T4", "ACME", "BOLT", "ACME"], types, "float32") == Peak(
        None,
        "no peak is known for ACME and BOLT, not listed in the catalogue of device types; give "
        "device_types.ACME.peak_flops in the cluster file",
    )
