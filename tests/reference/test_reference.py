"""The reference executor against plain PyTorch and against numbers worked out by hand from `wsp.md`.

In the hand examples the model is one number w that starts at 0 and sample i has the target g_i: the loss is w·g_i, its
gradient is g_i whatever w is, and under SGD with lr = 1 sample i adds −g_i. A recorded loss therefore tells the weight
that its minibatch used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from hetpipe.values.ids import Clock, Minibatch, VirtualWorkerIndex
from tests.pairwise import every_nth
from tests.reference.executor import ReferenceResult, ReferenceRun, run_reference

VW0, VW1 = VirtualWorkerIndex(0), VirtualWorkerIndex(1)


class Number(nn.Module):
    """y = w·x for one number w."""

    def __init__(self, start: float = 0.0, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(start, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return self.w * x


@dataclass(frozen=True)
class Numbers:
    """Sample i is (1, values[i])."""

    values: Sequence[float]
    dtype: torch.dtype = torch.float64

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int, /) -> tuple[Tensor, Tensor]:
        return torch.ones((), dtype=self.dtype), torch.tensor(self.values[index], dtype=self.dtype)


def product_loss(output: Tensor, target: Tensor) -> Tensor:
    return (output * target).mean()


def number_run(values: Sequence[float], *, start: float = 0.0, dtype: torch.dtype = torch.float64) -> ReferenceRun:
    return ReferenceRun(
        model=lambda: nn.Sequential(Number(start, dtype)),
        loss=product_loss,
        train=Numbers(values, dtype),
        batch_size=1,
        seed=3,
        optimizer="SGD",
        arguments={"lr": 1.0},
        epochs=1,
    )


def powers(count: int) -> list[float]:
    return [float(2**i) for i in range(count)]


def updates_of(result: ReferenceResult, values: Sequence[float], vw: VirtualWorkerIndex) -> list[float]:
    """The update of every minibatch of `vw`, in the order of p; index 0 is unused, so that u[p] is that of p."""
    return [0.0] + [-values[r.samples[0]] for r in result.minibatches.values() if r.vw == vw]


def weights_used(result: ReferenceResult, values: Sequence[float], vw: VirtualWorkerIndex) -> dict[int, float]:
    """For every p, w_p, from the loss w_p·g."""
    return {r.p: r.loss / values[r.samples[0]] for r in result.minibatches.values() if r.vw == vw}


def network(dtype: torch.dtype) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


def regression(num_samples: int, dtype: torch.dtype) -> Any:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_samples, 6, generator=generator, dtype=dtype)
    return TensorDataset(x, torch.randn(num_samples, 3, generator=generator, dtype=dtype))


def network_run(dtype: torch.dtype, optimizer: str, **arguments: object) -> ReferenceRun:
    return ReferenceRun(
        model=network(dtype),
        loss=nn.functional.mse_loss,
        train=regression(98, dtype),
        batch_size=4,
        seed=5,
        optimizer=optimizer,
        arguments=arguments,
        epochs=2,
    )


OPTIMIZERS: list[tuple[str, dict[str, object]]] = [
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "weight_decay": 0.05}),
    ("SGD", {"lr": 0.1, "momentum": 0.9}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.05}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.05}),
    ("SGD", {"lr": 0.001, "maximize": True, "weight_decay": 0.05}),
    ("AdamW", {"lr": 0.01}),
    ("AdamW", {"lr": 0.01, "weight_decay": 0.1, "amsgrad": True}),
    ("Adam", {"lr": 0.01}),
    ("Adam", {"lr": 0.01, "weight_decay": 0.05}),
    ("Adam", {"lr": 0.01, "weight_decay": 0.05, "decoupled_weight_decay": True}),
    ("RMSprop", {"lr": 0.005, "weight_decay": 0.05, "momentum": 0.5}),
    ("Adagrad", {"lr": 0.05, "weight_decay": 0.05, "initial_accumulator_value": 0.1}),
    ("Adadelta", {"lr": 0.5, "weight_decay": 0.05}),
    ("Adamax", {"lr": 0.01, "weight_decay": 0.05}),
    ("NAdam", {"lr": 0.01, "weight_decay": 0.05}),
    ("NAdam", {"lr": 0.01, "weight_decay": 0.05, "decoupled_weight_decay": True}),
    ("RAdam", {"lr": 0.01, "weight_decay": 0.05}),
    ("RAdam", {"lr": 0.01, "weight_decay": 0.05, "decoupled_weight_decay": True}),
    ("Adafactor", {"lr": 0.01, "weight_decay": 0.05}),
    ("ASGD", {"lr": 0.05, "lambd": 0.01, "weight_decay": 0.05}),
    ("Rprop", {"lr": 0.01}),
]


@pytest.mark.parametrize(("optimizer", "arguments"), every_nth(4, OPTIMIZERS), ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, pytest.param(torch.float32, marks=pytest.mark.exhaustive)], ids=str)
def test_one_worker_and_one_minibatch_per_wave_is_a_plain_loop(
    dtype: torch.dtype, optimizer: str, arguments: dict[str, object]
) -> None:
    run = network_run(dtype, optimizer, **arguments)
    result = run_reference(run)
    torch.manual_seed(run.seed)
    model = run.model()
    plain: torch.optim.Optimizer = getattr(torch.optim, optimizer)(model.parameters(), **arguments)
    assert len(result.minibatches) == 50
    for record in result.minibatches.values():
        samples = [run.train[index] for index in record.samples]
        plain.zero_grad()
        x, y = (torch.stack([sample[part] for sample in samples]) for part in (0, 1))
        assert run.loss is not None
        torch.autograd.backward(run.loss(model(x), y))
        plain.step()
    rtol, atol = (1e-12, 1e-12) if dtype == torch.float64 else (0.0, 1e-6)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(result.weights[name], parameter.detach(), rtol=rtol, atol=atol)


@pytest.mark.parametrize("staleness", [0, 1, 4, None])
@pytest.mark.parametrize("n", [2, 4])
def test_one_worker_with_waves_is_delayed_sgd(n: int, staleness: int | None) -> None:
    run = replace(network_run(torch.float64, "SGD", lr=0.1), minibatches_per_wave=n, staleness=staleness)
    result = run_reference(run)
    torch.manual_seed(run.seed)
    model = run.model()
    versions = [{name: p.detach().clone() for name, p in model.named_parameters()}]
    epoch_start = 0
    for step, record in enumerate(result.minibatches.values()):
        if step == 25:  # the barrier at the end of the first epoch drains the pipeline
            epoch_start = step
        used = versions[max(step + 1 - n, epoch_start)]
        leaves = {name: weight.clone().requires_grad_() for name, weight in used.items()}
        samples = [run.train[index] for index in record.samples]
        x, y = (torch.stack([sample[part] for sample in samples]) for part in (0, 1))
        assert run.loss is not None
        loss = run.loss(torch.func.functional_call(model, leaves, (x,)), y)
        assert record.loss == pytest.approx(loss.item(), rel=1e-12)
        gradients = torch.autograd.grad(loss, list(leaves.values()))
        versions.append({name: versions[-1][name] - 0.1 * g for name, g in zip(leaves, gradients, strict=True)})
    for name, weight in versions[-1].items():
        torch.testing.assert_close(result.weights[name], weight, rtol=1e-12, atol=1e-12)


def test_two_workers_by_hand_without_staleness() -> None:
    """V = 2, N = 2, D = 0: w^(1) is used from minibatch 4 on, w^(2) from 6 on."""
    values = powers(12)
    result = run_reference(replace(number_run(values), num_virtual_workers=2, minibatches_per_wave=2))
    a, b = (updates_of(result, values, vw) for vw in (VW0, VW1))
    first = a[1] + a[2] + b[1] + b[2]
    second = first + a[3] + a[4] + b[3] + b[4]
    assert weights_used(result, values, VW0) == {1: 0, 2: 0, 3: a[1], 4: first, 5: first + a[3], 6: second}
    assert weights_used(result, values, VW1) == {1: 0, 2: 0, 3: b[1], 4: first, 5: first + b[3], 6: second}
    assert [(r.clock, r.local_through) for r in result.minibatches.values() if r.vw == VW0] == [
        (0, 0),
        (0, 0),
        (0, 1),
        (1, 2),
        (1, 3),
        (2, 4),
    ]
    assert result.weights["0.w"].item() == -float(2**12 - 1)
    assert result.clocks == {VW0: 3, VW1: 3}


def test_two_workers_by_hand_with_staleness() -> None:
    """V = 2, N = 2, D = 1: w^(1) is used from minibatch 6 on, w^(2) from 8 on; own waves are added to it until then."""
    values = powers(20)
    run = replace(number_run(values), num_virtual_workers=2, minibatches_per_wave=2, staleness=1)
    result = run_reference(run)
    a, b = (updates_of(result, values, vw) for vw in (VW0, VW1))
    first = a[1] + a[2] + b[1] + b[2]
    second = first + a[3] + a[4] + b[3] + b[4]
    third = second + a[5] + a[6] + b[5] + b[6]
    assert weights_used(result, values, VW1) == {
        1: 0,
        2: 0,
        3: b[1],
        4: b[1] + b[2],
        5: b[1] + b[2] + b[3],
        6: first + b[3] + b[4],
        7: first + b[3] + b[4] + b[5],
        8: second + b[5] + b[6],
        9: second + b[5] + b[6] + b[7],
        10: third + b[7] + b[8],
    }
    assert [r.clock for r in result.minibatches.values() if r.vw == VW1] == [0, 0, 0, 0, 0, 1, 1, 2, 2, 3]
    assert [r.local_through for r in result.minibatches.values() if r.vw == VW1] == [0, 0, 1, 2, 3, 4, 5, 6, 7, 8]
    assert result.weights["0.w"].item() == -float(2**20 - 1)


def test_two_workers_by_hand_after_a_barrier() -> None:
    """After the barrier at clock 2 both start from w^(2): no older update of their own is added to it again."""
    values = powers(16)
    run = replace(
        number_run(values), num_virtual_workers=2, minibatches_per_wave=2, staleness=1, checkpoint_every_waves=2
    )
    result = run_reference(run)
    a = updates_of(result, values, VW0)
    base = result.barriers[Clock(2)].weights["0.w"].item()
    assert base == sum(a[1:5]) + sum(updates_of(result, values, VW1)[1:5])
    used = weights_used(result, values, VW0)
    assert [used[p] for p in (5, 6, 7, 8)] == [base, base, base + a[5], base + a[5] + a[6]]
    second_segment = [r for r in result.minibatches.values() if r.vw == VW0 and r.p > 4]
    assert [(r.p, r.clock, r.local_through) for r in second_segment] == [(5, 2, 4), (6, 2, 4), (7, 2, 5), (8, 2, 6)]


def test_mean_scales_what_is_published_and_not_what_is_local() -> None:
    values = powers(8)
    run = replace(number_run(values), num_virtual_workers=2, minibatches_per_wave=1, staleness=1, combine="mean")
    result = run_reference(run)
    a, b = (updates_of(result, values, vw) for vw in (VW0, VW1))
    assert weights_used(result, values, VW0) == {
        1: 0,
        2: a[1],
        3: (a[1] + b[1]) / 2 + a[2],
        4: (a[1] + b[1] + a[2] + b[2]) / 2 + a[3],
    }
    assert result.weights["0.w"].item() == -(2**8 - 1) / 2


BIG = float(2**24)  # the float32 after which 1 is lost: BIG + 1 == BIG, BIG + 2 > BIG


def test_updates_of_several_workers_are_added_one_by_one() -> None:
    run = replace(number_run([-1.0, -1.0], start=BIG, dtype=torch.float32), num_virtual_workers=2)
    assert run_reference(run).weights["0.w"].item() == BIG


def test_updates_of_one_wave_are_summed_before_they_are_published() -> None:
    run = replace(number_run([-1.0, -1.0], start=BIG, dtype=torch.float32), minibatches_per_wave=2)
    assert run_reference(run).weights["0.w"].item() == BIG + 2


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_weight_decay_uses_the_weights_that_the_minibatch_used(optimizer: str) -> None:
    """No gradient, λ = ½, lr = 1: minibatch q adds −w_q / 2. V = 1, N = 2: w_1 … w_4 = 8, 8, 8 − 4, 8 − 8."""
    run = replace(number_run([0.0] * 4, start=8.0), minibatches_per_wave=2, optimizer=optimizer)
    result = run_reference(replace(run, arguments={"lr": 1.0, "weight_decay": 0.5}))
    assert result.weights["0.w"].item() == 8 - 4 - 4 - 2 - 0


class HalfUsed(nn.Module):
    """Has a parameter that the forward pass ignores."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(1.0))
        self.idle = nn.Parameter(torch.tensor(1.0))
        self.fixed = nn.Parameter(torch.tensor(1.0), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w * x * self.fixed


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_a_parameter_without_gradient_is_left_alone_and_a_frozen_one_is_no_weight(optimizer: str) -> None:
    run = replace(
        number_run([1.0] * 4, dtype=torch.float32),
        model=lambda: nn.Sequential(HalfUsed()),
        optimizer=optimizer,
        arguments={"lr": 0.1, "weight_decay": 0.5},
    )
    result = run_reference(run)
    assert set(result.weights) == {"0.w", "0.idle"}
    assert result.weights["0.idle"].item() == 1.0
    assert result.weights["0.w"].item() != 1.0


class Sometimes(nn.Module):
    """Uses its parameter for positive inputs only."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Parameter(torch.zeros(()))
        self.sometimes = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * (self.always + self.sometimes) if x.sum() > 0 else x * self.always


def test_an_earlier_gradient_is_not_used_again() -> None:
    samples = [(torch.tensor(1.0 if i % 2 else -1.0), torch.tensor(1.0)) for i in range(10)]
    run = replace(number_run([0.0]), model=lambda: nn.Sequential(Sometimes()), train=samples)
    weights = run_reference(run).weights
    assert (weights["0.always"].item(), weights["0.sometimes"].item()) == (0.0, -5.0)


def test_a_broadcast_gradient_is_not_written_into() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return (self.left + self.right).sum() * x

    run = replace(
        number_run([1.0], dtype=torch.float32),
        model=lambda: nn.Sequential(Sum()),
        arguments={"lr": 1.0, "weight_decay": 0.5},
    )
    assert {name: w.tolist() for name, w in run_reference(run).weights.items()} == {
        "0.left": [-0.5] * 3,
        "0.right": [-0.5] * 3,
    }


#: D, N → p: required clock, as printed in `wsp.md` §2.
REQUIRED = [
    (0, 1, {1: 0, 2: 1, 3: 2, 4: 3}),
    (0, 4, {1: 0, 7: 0, 8: 1, 11: 1, 12: 2, 15: 2}),
    (1, 4, {1: 0, 11: 0, 12: 1, 15: 1, 16: 2, 19: 2}),
    (4, 5, {1: 0, 29: 0, 30: 1, 34: 1}),
]


@pytest.mark.parametrize(("staleness", "n", "required"), REQUIRED)
@pytest.mark.parametrize("vws", [1, 2])
def test_the_published_clock_in_use_is_the_required_one(
    staleness: int, n: int, required: dict[int, int], vws: int
) -> None:
    run = replace(number_run([1.0] * (vws * 35)), num_virtual_workers=vws, minibatches_per_wave=n, staleness=staleness)
    records = run_reference(run).minibatches
    for p, clock in required.items():
        for vw in range(vws):
            record = records[VirtualWorkerIndex(vw), Minibatch(p)]
            assert (record.clock, record.local_through) == (clock, max(0, p - n))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"total_minibatches": 3}, "exactly one"),
        ({"epochs": None}, "exactly one"),
        ({"minibatches_per_wave": 0}, "minibatches_per_wave is 0"),
        ({"staleness": -1}, "staleness is -1"),
        ({"train": Numbers([])}, "training samples is 0"),
        ({"optimizer": "LBFGS"}, "no rule for the optimizer LBFGS"),
        ({"train": [torch.ones(2, 2)]}, r"\(input, target\)"),
        ({"train": [({"x": torch.ones(1)}, torch.ones(1))]}, "input must be a tensor"),
    ],
)
def test_what_cannot_be_run_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run_reference(replace(number_run([1.0]), **change))
