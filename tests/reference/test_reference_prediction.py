"""Predicted weights in the reference executor: the rules, where they are exact, and which weights a backward reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hetpipe.values.ids import Minibatch, VirtualWorkerIndex
from tests.reference.executor import ReferenceResult, ReferenceRun, run_reference
from tests.reference.optimizer import ReferenceOptimizer
from tests.reference.test_reference import VW0, Number, network_run, number_run, weights_used

# --- rules ------------------------------------------------------------------------------------------------------------

RULES: list[tuple[str, dict[str, object]]] = [
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "maximize": True}),
    ("SGD", {"lr": 0.1, "momentum": 0.9}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "maximize": True}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.2, "weight_decay": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "maximize": True}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "foreach": True}),
    ("Adam", {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.1}),
    ("Adam", {"lr": 0.01, "amsgrad": True, "maximize": True}),
    ("AdamW", {"lr": 0.01, "weight_decay": 0.0}),
    ("RMSprop", {"lr": 0.01}),
    ("RMSprop", {"lr": 0.01, "alpha": 0.9, "centered": True, "weight_decay": 0.1, "maximize": True}),
    ("RMSprop", {"lr": 0.01, "momentum": 0.9, "centered": True}),
]


@pytest.mark.parametrize(("optimizer", "arguments"), RULES, ids=str)
def test_a_prediction_repeats_the_last_update(optimizer: str, arguments: dict[str, object]) -> None:
    run = replace(network_run(torch.float64, optimizer, **arguments), weights="predict")
    generator = torch.Generator().manual_seed(4)
    target = {"w": torch.randn(5, generator=generator, dtype=torch.float64)}
    stepping = ReferenceOptimizer(run, target)
    assert not stepping.changes()
    for _ in range(4):
        before = target["w"].clone()
        stepping.step({"w": torch.randn(5, generator=generator, dtype=torch.float64)}, None)
        ahead = stepping.changes()["w"].ahead(target["w"], 3)
        torch.testing.assert_close(ahead - target["w"], 3 * (target["w"] - before), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("include_decay", [True, False])
@pytest.mark.parametrize(
    ("optimizer", "arguments"),
    [("AdamW", {}), ("Adam", {"decoupled_weight_decay": True}), ("AdamW", {"maximize": True})],
    ids=str,
)
def test_a_decoupled_decay_is_that_of_the_predicted_weights(
    optimizer: str, arguments: dict[str, object], *, include_decay: bool
) -> None:
    """Without gradients AdamW does nothing else: W ← W − lr·λ·W."""
    run = network_run(torch.float64, optimizer, lr=0.5, weight_decay=0.5, **arguments)
    stepping = ReferenceOptimizer(
        replace(run, weights="predict", include_decay=include_decay), {"w": torch.zeros(1, dtype=torch.float64)}
    )
    stepping.step({"w": torch.zeros(1, dtype=torch.float64)}, None)
    ahead = stepping.changes()["w"].ahead(torch.tensor([8.0], dtype=torch.float64), 2)
    assert ahead.item() == (4.0 if include_decay else 8.0)


def test_a_prediction_uses_the_rate_of_the_next_update() -> None:
    def tenfold(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 10.0)

    run = replace(network_run(torch.float64, "SGD", lr=1.0), weights="predict", lr_schedule=tenfold)
    stepping = ReferenceOptimizer(run, {"w": torch.zeros(1)})
    stepping.step({"w": torch.ones(1)}, None)
    assert stepping.changes()["w"].ahead(torch.zeros(1), 2).item() == -20.0


def test_what_had_no_gradient_is_predicted_from_its_last_one() -> None:
    run = replace(network_run(torch.float64, "SGD", lr=1.0), weights="predict")
    stepping = ReferenceOptimizer(run, {"w": torch.zeros(1), "idle": torch.zeros(1)})
    stepping.step({"w": torch.ones(1), "idle": None}, None)
    stepping.step({"w": None, "idle": None}, None)
    changes = stepping.changes()
    assert changes.keys() == {"w"}
    assert changes["w"].ahead(torch.zeros(1), 1).item() == -1.0


# --- where a prediction is exact --------------------------------------------------------------------------------------


class Add(nn.Module):
    """x + w, whose gradient by w is the gradient of the output."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.w


class Scale(nn.Module):
    """w·x, whose backward reads w."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.w * x


class Targets:
    """Sample i is (0 or another input, targets[i])."""

    def __init__(self, targets: Sequence[float], x: float = 0.0) -> None:
        self.targets, self.x = targets, x

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int, /) -> tuple[Tensor, Tensor]:
        return torch.tensor(self.x, dtype=torch.float64), torch.tensor(self.targets[index], dtype=torch.float64)


def half_square(output: Tensor, target: Tensor) -> Tensor:
    return (0.5 * (output - target) ** 2).mean()


NUM_MINIBATCHES, C, RATE = 12, 0.5, 0.25


def quadratic_run(weights: str, targets: Sequence[float]) -> ReferenceRun:
    """½·(w_0 + w_1 + w_2 − t)², a weight per stage; dampened momentum, so that a constant gradient is the velocity."""
    return ReferenceRun(
        model=lambda: nn.Sequential(Add(), Add(), Add()),
        loss=half_square,
        train=Targets(targets),
        batch_size=1,
        seed=1,
        optimizer="SGD",
        arguments={"lr": RATE, "momentum": 0.5, "dampening": 0.5},
        epochs=1,
        sync="none",
        weights=weights,
        stages=((1, 1, 1),),
        minibatches_per_wave=3,
    )


def targets_of_true_weights() -> list[float]:
    """Targets under which the gradient is always C, if the forward of p is on the weights through p − 1.

    The first minibatches find nothing to predict from: stage i sees W_0 up to p = K − i.
    """
    order = run_reference(quadratic_run("stash", [0.0] * NUM_MINIBATCHES)).minibatches.values()
    targets = [0.0] * NUM_MINIBATCHES
    for record in order:
        output = sum(1.0 - RATE * C * (record.p - 1 if record.p > 3 - stage else 0) for stage in range(3))
        targets[record.samples[0]] = output - C
    return targets


def losses_of(result: ReferenceResult) -> list[float]:
    return [record.loss for record in result.minibatches.values()]


def test_a_steady_descent_is_predicted_exactly() -> None:
    """A quadratic that moves along with the weights: every forward meets the residual that the true weights have."""
    targets = targets_of_true_weights()
    result = run_reference(quadratic_run("predict", targets))
    assert losses_of(result) == [0.5 * C * C] * NUM_MINIBATCHES
    assert [w.item() for w in result.weights.values()] == [1.0 - RATE * C * NUM_MINIBATCHES] * 3


@pytest.mark.parametrize("weights", ["stash", "spectrain"])
def test_another_number_of_steps_ahead_is_not_exact(weights: str) -> None:
    """`stash` predicts nothing; `spectrain` looks one update too far ahead, here at the last of three stages."""
    targets = targets_of_true_weights()
    losses = losses_of(run_reference(quadratic_run(weights, targets)))
    assert losses[0] == 0.5 * C * C
    assert all(abs(loss - 0.5 * C * C) > 1e-6 for loss in losses[3:6])


@pytest.mark.parametrize("include_decay", [True, False])
def test_a_decay_alone_is_predicted_exactly(*, include_decay: bool) -> None:
    """K = 2, no gradients: the first stage looks one update ahead, W·(1 − lr·λ), from p = 3 on."""

    def value(output: Tensor, target: Tensor) -> Tensor:
        return output.detach().mean() + 0.0 * (output - target).sum()

    run = replace(
        quadratic_run("predict", [0.0] * 6),
        model=lambda: nn.Sequential(Add(), nn.Identity()),
        loss=value,
        stages=((1, 1),),
        optimizer="AdamW",
        arguments={"lr": 0.5, "weight_decay": 0.5},
        include_decay=include_decay,
    )
    behind = [0, 0, 1, 2, 3, 4]
    expected = [0.75 ** (q + (q > 0 and include_decay)) for q in behind]
    assert losses_of(run_reference(run)) == expected


def test_what_is_predicted_from_outlives_a_barrier() -> None:
    """A constant gradient, K = 2: only the second minibatch of the whole run finds nothing to predict from."""
    values = [1.0] * 4
    run = replace(
        number_run(values),
        model=lambda: nn.Sequential(Number(), nn.Identity()),
        sync="none",
        weights="predict",
        stages=((1, 1),),
        minibatches_per_wave=2,
        epochs=2,
    )
    used = weights_used(run_reference(run), values, VW0)
    assert used == {1: 0.0, 2: 0.0, 3: -2.0, 4: -3.0, 5: -4.0, 6: -5.0, 7: -6.0, 8: -7.0}


# --- backward ---------------------------------------------------------------------------------------------------------


def test_a_backward_reads_the_true_weights() -> None:
    """Of two stages the first predicts: its `Scale` multiplies by Ŵ on the way forward, by W on the way back.

    y = z·s·(x + a) and L = y, so ∂L/∂a = z·s with the current s; ∂L/∂s and ∂L/∂z hold activations, so Ŵ.
    """
    run = replace(
        quadratic_run("predict", [0.0] * 5),
        model=lambda: nn.Sequential(Add(), Scale(), Scale()),
        loss=lambda output, target: output.mean() + 0.0 * target.sum(),
        train=Targets([0.0] * 5, x=1.0),
        arguments={"lr": RATE},
        stages=((2, 1),),
    )
    result = run_reference(run)
    # Per update: (a, s, z) and the last gradient of each; y = z·s·(x + a).
    history = [((1.0, 2.0, 2.0), (0.0, 0.0, 0.0))]
    for p in range(1, 6):
        (a, s, _), (da, ds, _) = history[max(0, p - 2)]
        steps = p - 1 - max(0, p - 2)
        a, s = a - RATE * steps * da, s - RATE * steps * ds
        now, _ = history[p - 1]
        first, second = 1.0 + a, s * (1.0 + a)
        gradient = (now[2] * now[1], now[2] * first, second)
        new = tuple(w - RATE * g for w, g in zip(now, gradient, strict=True))
        history.append((new, gradient))  # type: ignore[arg-type]
    assert [w.item() for w in result.weights.values()] == pytest.approx(list(history[-1][0]), rel=1e-12)


def test_a_backward_reads_the_newest_anchor() -> None:
    """V = 2, K = 2, N = 2, D = 0, y = z·(x + a), lr = 1: when p = 3 comes back, p = 4 has brought w^(1) along."""
    run = replace(
        quadratic_run("predict", [0.0] * 8),
        model=lambda: nn.Sequential(Add(), Scale(), nn.Identity()),
        loss=lambda output, target: (output * target).mean(),
        train=Targets([2.0**-i for i in range(8)], x=1.0),
        arguments={"lr": 1.0},
        sync="wsp",
        stages=((2, 1),) * 2,
        num_virtual_workers=2,
        minibatches_per_wave=2,
    )
    result = run_reference(run)
    start = torch.tensor([1.0, 2.0], dtype=torch.float64)

    def update(vw: int, p: int, forward: Tensor, read: Tensor) -> Tensor:
        """Of (a, z); the gradients are z·t, of the weights that the backward reads, and (1 + a)·t."""
        target = 2.0 ** -result.minibatches[VirtualWorkerIndex(vw), Minibatch(p)].samples[0]
        return -target * torch.stack([read[1], 1.0 + forward[0]])

    one = [update(vw, 1, start, start) for vw in (0, 1)]
    two = [update(vw, 2, start, start + one[vw]) for vw in (0, 1)]
    anchor = start + one[0] + two[0] + one[1] + two[1]
    three = [update(vw, 3, start + 2 * one[vw], anchor) for vw in (0, 1)]
    four = [update(vw, 4, anchor + two[vw], anchor + three[vw]) for vw in (0, 1)]
    expected = anchor + three[0] + four[0] + three[1] + four[1]
    torch.testing.assert_close(torch.stack(list(result.weights.values())), expected, rtol=1e-12, atol=0)


class Tied(nn.Module):
    """One weight used twice, once transposed and through a view."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([[1.0, 0.5], [-0.25, 2.0]], dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.w.t()) @ self.w.view(2, 2)


def test_views_and_transposes_of_a_weight_are_read_as_it_is_now() -> None:
    """The forward's activations are of Ŵ, whatever the backward multiplies with is W."""
    x = torch.tensor([[1.0, -2.0]], dtype=torch.float64)
    samples: Any = [(x[0], torch.zeros(2, dtype=torch.float64))] * 4
    run = replace(
        quadratic_run("predict", [0.0]),
        model=lambda: nn.Sequential(Tied(), Tied(), nn.Identity()),
        loss=lambda output, target: (output * torch.arange(1.0, 3.0, dtype=torch.float64)).sum() + 0.0 * target.sum(),
        train=samples,
        arguments={"lr": 0.01},
        stages=((2, 1),),
    )
    result = run_reference(run)
    w = [Tied().w.detach(), Tied().w.detach()]
    last = [torch.zeros_like(w[0]), torch.zeros_like(w[1])]
    versions = [list(zip(w, last, strict=True))]
    for p in range(1, 5):
        through = max(0, p - 2)
        ahead = [v - 0.01 * (p - 1 - through) * g for v, g in versions[through]]
        now = [v for v, _ in versions[p - 1]]
        inputs = [x]
        middles = []
        for v in ahead:
            middles.append(inputs[-1] @ v.T)
            inputs.append(middles[-1] @ v)
        error = torch.arange(1.0, 3.0, dtype=torch.float64).unsqueeze(0)
        gradients: list[Tensor] = []
        for layer in (1, 0):
            into_middle = error @ now[layer].T
            gradients.insert(0, middles[layer].T @ error + into_middle.T @ inputs[layer])
            error = into_middle @ now[layer]
        versions.append([(v - 0.01 * g, g) for v, g in zip(now, gradients, strict=True)])
    for found, (expected, _) in zip(result.weights.values(), versions[-1], strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
