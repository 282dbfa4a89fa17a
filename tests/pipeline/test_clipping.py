"""Norms in the order of the chain, and gradients scaled by them: `torch.nn.utils.clip_grad_norm_`, in pieces."""

from __future__ import annotations

import math
import sys

import pytest
import torch
from torch import Tensor, nn

from hetpipe.pipeline.clipping import clip_factor, layer_squares, norm_of, scaled, squared_norms

NAMES = ("a", "b", "c")


def gradients() -> dict[str, Tensor | None]:
    """Not in the order of the chain."""
    return {"c": torch.tensor([[3.0, 4.0]]), "b": None, "a": torch.tensor([2.0, -2.0, 1.0])}


def test_squares_of_layers_are_sums_over_their_parameters() -> None:
    found = {"a": torch.tensor([3.0]), "c": torch.tensor([[4.0, 1.0]], dtype=torch.float64), "h": torch.ones(2).half()}
    assert layer_squares(found, {0: ("a", "b"), 2: ("c", "a"), 3: ()}) == {0: 9.0, 2: 26.0, 3: 0.0}
    assert layer_squares({"h": found["h"] * 60000}, {1: ("h",)}) == {1: 2 * float(torch.tensor(6e4).half()) ** 2}
    assert layer_squares({"a": torch.ones(3, 1 << 20)}, {0: ("a",)}) == {0: 3.0 * (1 << 20)}
    assert layer_squares({"a": torch.ones(0)}, {0: ("a",)}) == {0: 0.0}
    largest = layer_squares({"a": torch.tensor([1e30]), "b": torch.tensor([float("nan")])}, {0: ("a",), 1: ("b",)})
    assert largest == dict.fromkeys((0, 1), sys.float_info.max)


def test_squared_norms_come_in_the_order_of_the_names() -> None:
    assert squared_norms(gradients(), NAMES) == [9.0, 0.0, 25.0]
    assert squared_norms(gradients(), ("c",)) == [25.0]
    assert squared_norms({}, NAMES) == [0.0, 0.0, 0.0]
    assert squared_norms({}, ()) == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_squares_are_computed_in_float64(dtype: torch.dtype) -> None:
    """In the gradient's own type the square of the largest number would be infinite."""
    large = torch.full((3,), torch.finfo(dtype).max, dtype=dtype)
    (square,) = squared_norms({"a": large}, ("a",))
    assert square == float(large.double().square().sum()) < math.inf


def test_the_norm_adds_one_after_the_other() -> None:
    """Neither another order nor a compensated sum gives the same bits."""
    squares = [1.0, 1e100, 1.0, -1e100]
    assert norm_of(squares) == 0.0
    assert math.fsum(squares) == 2.0
    assert norm_of([9.0, 0.0, 16.0]) == 5.0
    assert norm_of([]) == 0.0


@pytest.mark.parametrize("max_norm", [0.1, 1.0, 100.0])
def test_as_torch_clips(max_norm: float) -> None:
    generator = torch.Generator().manual_seed(1)
    found: dict[str, Tensor | None] = {
        name: torch.randn(4, 5, generator=generator, dtype=torch.float64) for name in NAMES
    }
    parameters = [nn.Parameter(torch.zeros(4, 5, dtype=torch.float64)) for _ in NAMES]
    for parameter, gradient in zip(parameters, found.values(), strict=True):
        parameter.grad = None if gradient is None else gradient.clone()
    norm = norm_of(squared_norms(found, NAMES))
    assert norm == pytest.approx(float(nn.utils.clip_grad_norm_(parameters, max_norm)), rel=1e-14)
    clipped = scaled(found, clip_factor(norm, max_norm))
    for parameter, gradient in zip(parameters, clipped.values(), strict=True):
        assert gradient is not None
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-14, atol=0.0)


def test_what_is_small_enough_stays_as_it_is() -> None:
    found = gradients()
    assert clip_factor(5.0, 5.1) == 1.0
    assert scaled(found, 1.0) is found


def test_scaling_makes_new_tensors() -> None:
    found = gradients()
    half = scaled(found, 0.5)
    assert half.pop("b") is None
    assert {name: gradient.tolist() for name, gradient in half.items() if gradient is not None} == {
        "a": [1.0, -1.0, 0.5],
        "c": [[1.5, 2.0]],
    }
    assert not any(half[name] is found[name] for name in half)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_norm_that_is_no_number_spreads_no_further(bad: float) -> None:
    """The parameters that are all right stay so, for the check of the update to name the one that is not."""
    found = gradients() | {"b": torch.tensor([bad])}
    norm = norm_of(squared_norms(found, NAMES))
    assert not math.isfinite(norm)
    left = scaled(found, clip_factor(norm, 1.0))
    assert all(left[name] is gradient for name, gradient in found.items())
