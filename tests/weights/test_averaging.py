"""The average over several minibatches, as `wsp.md` §3 rounds it."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from hetpipe.weights.averaging import GradientsByName, GradientSum, divided


def draw(seed: int, *, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(5, generator=generator).to(dtype) for name in ("w", "b")}


def gathered(*minibatches: tuple[Mapping[str, Tensor | None], int]) -> GradientSum:
    found = GradientSum()
    for gradients, samples in minibatches:
        found.add({**gradients}, samples)
    return found


def tensor(*values: float) -> Tensor:
    return torch.tensor(values)


def assert_same(found: GradientsByName, expected: GradientsByName) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        got = found[name]
        assert (got is None) == (value is None), name
        assert got is None or (value is not None and got.dtype == value.dtype and torch.equal(got, value)), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("samples", [(4, 4, 4), (4, 4, 1), (3, 1), (7, 2, 5, 1)])
def test_the_average_of_a_wave_with_ragged_minibatches(samples: tuple[int, ...], dtype: torch.dtype) -> None:
    """(g_1·n_1 + n_2·g_2 + …) / Σ n, in that order, bit for bit; and it is the mean of the samples."""
    drawn = [draw(seed, dtype=dtype) for seed, _ in enumerate(samples)]
    average = gathered(*zip(drawn, samples, strict=True)).take_average()

    for name in ("w", "b"):
        total = drawn[0][name] * samples[0]
        for gradients, n in zip(drawn[1:], samples[1:], strict=True):
            total = total.add(gradients[name], alpha=n)
        found = average[name]
        assert found is not None
        assert torch.equal(found, total / sum(samples))
        each = torch.cat([g[name].double().repeat(n, 1) for g, n in zip(drawn, samples, strict=True)])
        torch.testing.assert_close(found.double(), each.mean(0), rtol=1e-5, atol=1e-6)


def test_a_minibatch_alone_keeps_its_gradient() -> None:
    """The very tensors: multiplied by n and divided by n again they might be rounded."""
    gradients: GradientsByName = {**draw(1), "unused": None}
    average = gathered((gradients, 3)).take_average()
    assert all(average[name] is gradient for name, gradient in gradients.items())


def test_the_sum_is_weighted_even_of_one_minibatch() -> None:
    gradients: GradientsByName = {**draw(1), "unused": None}
    total, samples = gathered((gradients, 3)).take_sum()
    expected = {name: None if g is None else g * 3 for name, g in gradients.items()}
    assert_same(total, expected)
    assert samples == 3


def test_the_sum_of_several_is_not_divided() -> None:
    total, samples = gathered(({"w": tensor(1.0, 2.0)}, 2), ({"w": tensor(10.0, 20.0)}, 3)).take_sum()
    assert_same(total, {"w": tensor(32.0, 64.0)})
    assert samples == 5


def test_nothing_gathered_is_nothing_to_add() -> None:
    """A replica without minibatches."""
    assert GradientSum().take_sum() == ({}, 0)


@pytest.mark.parametrize("used", [(0,), (1,), (2,), (0, 2), ()])
def test_a_parameter_counts_as_zero_where_it_was_not_used(used: tuple[int, ...]) -> None:
    minibatches: list[tuple[GradientsByName, int]] = [
        ({"w": tensor(1.0), "b": tensor(8.0) if j in used else None}, n) for j, n in enumerate((2, 1, 1))
    ]
    average = gathered(*minibatches).take_average()
    weights = [n for j, n in enumerate((2, 1, 1)) if j in used]
    assert_same(average, {"w": tensor(1.0), "b": tensor(8.0 * sum(weights) / 4) if used else None})


def test_what_was_given_is_never_written() -> None:
    """Autograd may hand out one tensor for two parameters, or one that is broadcast."""
    shared, broadcast = tensor(1.0, 2.0), tensor(4.0).expand(2)
    late = tensor(16.0, 16.0)
    minibatches: list[tuple[GradientsByName, int]] = [
        ({"a": shared, "b": shared, "c": broadcast, "d": None}, 2),
        ({"a": shared, "b": shared, "c": broadcast, "d": late}, 2),
        ({"a": shared, "b": shared, "c": broadcast, "d": late}, 4),
    ]
    average = gathered(*minibatches).take_average()
    assert_same(average, {"a": tensor(1.0, 2.0), "b": tensor(1.0, 2.0), "c": tensor(4.0, 4.0), "d": tensor(12.0, 12.0)})
    assert torch.equal(shared, tensor(1.0, 2.0))
    assert torch.equal(broadcast, tensor(4.0, 4.0))
    assert torch.equal(late, tensor(16.0, 16.0))


@pytest.mark.parametrize("take", [GradientSum.take_average, GradientSum.take_sum])
def test_the_next_update_begins_from_nothing(take: object) -> None:
    assert callable(take)
    found = gathered(({"w": tensor(1.0)}, 2), ({"w": tensor(2.0)}, 2))
    assert (found.minibatches, found.weight) == (2, 4)
    take(found)
    assert (found.minibatches, found.weight) == (0, 0)
    found.add({"w": tensor(0.1)}, 3)
    assert_same(found.take_average(), {"w": tensor(0.1)})


def test_a_first_minibatch_of_the_next_update_leaves_the_last_average_alone() -> None:
    found = gathered(({"w": tensor(1.0)}, 1), ({"w": tensor(3.0)}, 1))
    average = found.take_average()
    for gradient in (5.0, 7.0):
        found.add({"w": tensor(gradient)}, 1)
    assert_same(average, {"w": tensor(2.0)})
    assert_same(found.take_average(), {"w": tensor(6.0)})


def test_divided_in_place() -> None:
    gradients: GradientsByName = {"w": tensor(6.0), "unused": None}
    assert_same(divided(gradients, 3), {"w": tensor(2.0), "unused": None})
    assert_same(gradients, {"w": tensor(2.0), "unused": None})
