"""From gradients to updates in the reference executor: accumulation, clipping, parameter groups, learning rates.

As in `test_reference.py` the model is a number and a sample's gradient is its target, unless something else is said.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from hetpipe.values.ids import Clock
from tests.reference.executor import ReferenceResult, ReferenceRun, run_reference
from tests.reference.gradients import MinibatchGradients, all_reduced, average, clipped
from tests.reference.test_reference import VW0, HalfUsed, Number, number_run, powers, weights_used


def own_gradients(result: ReferenceResult, values: Sequence[float]) -> list[float]:
    """The gradient of every minibatch of the one virtual worker; index 0 is unused."""
    return [0.0] + [sum(values[i] for i in r.samples) / len(r.samples) for r in result.minibatches.values()]


# --- accumulation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sync", ["none", "wsp"])
def test_minibatches_that_accumulate_make_one_update(sync: Any) -> None:
    """N = 4, A = 2, 11 minibatches: the last update is of one alone. v(p) is p − 4, rounded down to an even number."""
    values = powers(11)
    result = run_reference(replace(number_run(values), sync=sync, minibatches_per_wave=4, accumulate=2))
    g = own_gradients(result, values)
    after = {0: 0.0}
    for q in (2, 4, 6, 8, 10):
        after[q] = after[q - 2] - (g[q - 1] + g[q]) / 2
    expected = {p: after[max(0, (p - 4) // 2 * 2)] for p in range(1, 12)}
    assert weights_used(result, values, VW0) == expected
    assert result.weights["0.w"].item() == after[10] - g[11]
    assert result.final.updates == (6,)


def test_ragged_minibatches_count_by_their_samples() -> None:
    values = powers(5)
    run = replace(number_run(values), batch_size=2, sync="none", weights="flush", minibatches_per_wave=4)
    result = run_reference(run)
    assert [len(r.samples) for r in result.minibatches.values()] == [2, 2, 1]
    assert result.weights["0.w"].item() == -sum(values) / 5


def test_a_barrier_cuts_an_update_short() -> None:
    """N = A = 2, 3 minibatches per epoch: the third makes an update alone, and the next epoch starts with a new one."""
    values = [1.0, 2.0, 4.0]
    run = replace(number_run(values), sync="none", minibatches_per_wave=2, accumulate=2, epochs=2)
    result = run_reference(run)
    g = own_gradients(result, values)
    first = -(g[1] + g[2]) / 2 - g[3]
    assert weights_used(result, values, VW0) == {
        1: 0.0,
        2: 0.0,
        3: 0.0,
        5: first,
        6: first,
        7: first,
    }
    assert result.weights["0.w"].item() == first - (g[4] + g[5]) / 2 - g[6]
    assert result.final.updates == (4,)


A, B = torch.tensor([3.0]), torch.tensor([5.0])


def test_an_average_counts_unused_parameters_as_zero() -> None:
    group = [MinibatchGradients({"a": A, "b": None, "c": None}, 1), MinibatchGradients({"a": B, "b": B, "c": None}, 3)]
    assert average(group) == {"a": torch.tensor([4.5]), "b": torch.tensor([3.75])}


def test_one_minibatch_alone_is_not_rounded() -> None:
    third = torch.tensor([0.1])
    assert average([MinibatchGradients({"a": third}, 3)])["a"] is third


def test_replicas_are_summed_before_they_are_divided() -> None:
    assert all_reduced([[MinibatchGradients({"a": A}, 1)], [], [MinibatchGradients({"a": B, "b": B}, 3)]]) == {
        "a": torch.tensor([4.5]),
        "b": torch.tensor([3.75]),
    }


@pytest.mark.parametrize("weights", ["flush", "double_buffer"])
def test_a_replica_without_minibatches_takes_part(weights: str) -> None:
    """3 minibatches per epoch and N = 1: in the second wave of an epoch the second replica has none."""
    values = [1.0, 2.0, 4.0]
    run = replace(number_run(values), sync="allreduce", weights=weights, num_virtual_workers=2, epochs=2)
    result = run_reference(run)
    assert result.final.updates == (4, 4)
    g = [values[r.samples[0]] for r in result.minibatches.values()]
    assert result.weights["0.w"].item() == -((g[0] + g[1]) / 2 + g[2] + (g[3] + g[4]) / 2 + g[5])


def test_what_no_replica_used_is_left_alone() -> None:
    run = replace(
        number_run([1.0] * 4, dtype=torch.float32),
        model=lambda: nn.Sequential(HalfUsed()),
        arguments={"lr": 0.1, "weight_decay": 0.5},
        sync="allreduce",
        weights="flush",
        num_virtual_workers=2,
    )
    weights = run_reference(run).weights
    assert weights["0.idle"].item() == 1.0
    assert weights["0.w"].item() < 0.9


# --- clipping ---------------------------------------------------------------------------------------------------------


class Add(nn.Module):
    """x + w, so that every stage has the same gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.w


def summing_run(values: Sequence[float], **changes: Any) -> ReferenceRun:
    return replace(number_run(values), model=lambda: nn.Sequential(*(Add() for _ in range(4))), **changes)


@pytest.mark.parametrize(("clip", "num_weights"), [("global", 4), ("stage", 1)])
@pytest.mark.parametrize("sync", ["none", "wsp"])
def test_the_norm_is_over_all_stages_or_over_one(sync: Any, clip: Any, num_weights: int) -> None:
    """Four equal gradients g: the norm is 2·g over all, √3·g and g over stages of three and one."""
    run = summing_run([8.0], sync=sync, stages=((3, 1),), max_norm=3.0, clip=clip)
    weights = [w.item() for w in run_reference(run).weights.values()]
    if clip == "global":
        assert weights == pytest.approx([-1.5] * 4, rel=1e-6)
    else:
        assert weights == pytest.approx([-(3**0.5)] * 3 + [-3.0], rel=1e-6)


def test_what_is_clipped_is_the_average() -> None:
    run = summing_run([8.0, -8.0, 1.0, 1.0], sync="none", weights="flush", minibatches_per_wave=4, max_norm=1.0)
    assert [w.item() for w in run_reference(run).weights.values()] == pytest.approx([-0.5] * 4, rel=1e-5)


def test_small_gradients_are_not_touched() -> None:
    gradients = {"a": A, "b": None}
    assert clipped(gradients, ("a", "b"), 3.1)["a"] is A
    torch.testing.assert_close(clipped(gradients, ("a", "b"), 1.5)["a"], A / 2)


def test_decay_is_not_clipped() -> None:
    run = replace(number_run([0.0], start=8.0), arguments={"lr": 1.0, "weight_decay": 0.5}, max_norm=0.1)
    assert run_reference(run).weights["0.w"].item() == 4.0


# --- decay ------------------------------------------------------------------------------------------------------------


def test_without_shards_decay_is_that_of_the_weights_that_are_stepped() -> None:
    """Bit for bit as torch does it, although p sees older ones."""
    run = replace(
        number_run([0.0] * 20, start=8.0),
        model=lambda: nn.Sequential(Number(8.0), nn.Identity()),
        sync="none",
        weights="stash",
        stages=((1, 1),),
        minibatches_per_wave=2,
        optimizer="AdamW",
        arguments={"lr": 0.3, "weight_decay": 0.7},
    )
    expected = 8.0
    for _ in range(20):
        expected *= 1 - 0.3 * 0.7
    assert run_reference(run).weights["0.w"].item() == expected


# --- groups -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
@pytest.mark.parametrize("sync", ["none", "wsp"])
def test_the_first_group_that_matches_counts(sync: Any, optimizer: str) -> None:
    """No gradients: what is left of 8 tells rate and decay."""
    run = replace(
        number_run([0.0], start=8.0),
        model=lambda: nn.Sequential(*(Number(8.0) for _ in range(4))),
        sync=sync,
        optimizer=optimizer,
        arguments={"lr": 1.0, "weight_decay": 0.5},
        groups=((["1.*"], {"weight_decay": 0.0}), (["[12].w", "nobody"], {"lr": 0.5}), (["nobody"], {})),
    )
    assert [w.item() for w in run_reference(run).weights.values()] == [4.0, 8.0, 6.0, 4.0]


# --- learning rate ----------------------------------------------------------------------------------------------------


def halving(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return LambdaLR(optimizer, lambda update: 0.5**update)


@pytest.mark.parametrize(
    ("changes", "updates"),
    [
        ({"sync": "none"}, 6),
        ({"sync": "none", "minibatches_per_wave": 2, "weights": "flush"}, 4),
        ({"sync": "wsp", "minibatches_per_wave": 2, "accumulate": 2}, 4),
    ],
)
def test_the_rate_follows_the_number_of_updates_over_barriers(changes: dict[str, Any], updates: int) -> None:
    run = replace(number_run([1.0] * 3), lr_schedule=halving, epochs=2, **changes)
    result = run_reference(run)
    assert result.weights["0.w"].item() == -sum(0.5**u for u in range(updates))
    assert [state.updates for state in result.barriers.values()] == [(0,), (updates // 2,), (updates,)]


def test_every_worker_counts_its_own_updates() -> None:
    """3 minibatches per epoch, dealt to two: the first makes 2 updates per epoch, the second 1."""
    run = replace(number_run([1.0] * 3), num_virtual_workers=2, lr_schedule=halving, epochs=2)
    result = run_reference(run)
    assert result.barriers[Clock(2)].updates == (2, 1)
    assert result.weights["0.w"].item() == -(1 + 0.5 + 0.25 + 0.125) - (1 + 0.5)


def test_decoupled_decay_follows_the_rate() -> None:
    run = replace(number_run([0.0] * 2, start=8.0), optimizer="AdamW", arguments={"lr": 1.0, "weight_decay": 0.5})
    assert run_reference(replace(run, lr_schedule=halving)).weights["0.w"].item() == 8 * 0.5 * 0.75
