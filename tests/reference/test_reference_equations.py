"""The weight policies of the reference executor against their equations, worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tests.reference.executor import ReferenceResult, ReferenceRun, run_reference
from tests.reference.policies import POLICIES, required_clock
from tests.reference.test_reference import VW0, VW1, Number, network_run, number_run, powers


class Quadratic:
    """½·a·(w − b)² per sample (a, b), as a loss of the weight that the model hands through."""

    def __init__(self, coefficients: Sequence[tuple[float, float]]) -> None:
        self.coefficients = coefficients

    def __len__(self) -> int:
        return len(self.coefficients)

    def __getitem__(self, index: int, /) -> tuple[Tensor, Tensor]:
        return torch.ones((), dtype=torch.float64), torch.tensor(self.coefficients[index], dtype=torch.float64)


class Weight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(3.0, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.w * x


def quadratic_loss(output: Tensor, target: Tensor) -> Tensor:
    return (0.5 * target[:, 0] * (output - target[:, 1]) ** 2).mean()


def waves(result: ReferenceResult, n: int) -> list[list[int]]:
    """The samples of each wave of the one virtual worker."""
    samples: dict[int, list[int]] = {}
    for record in result.minibatches.values():
        samples.setdefault((record.p - 1) // n, []).extend(record.samples)
    return list(samples.values())


def test_two_buffers_follow_the_equation_of_2bw() -> None:
    """W(t + 1) = W(t) − ν·∇f(W(t − 1)), W(−1) = W(0), and ∇f is the mean over the samples of wave t."""
    train = Quadratic([(0.5 + 0.1 * i, float(i % 5)) for i in range(26)])
    run = ReferenceRun(
        model=lambda: nn.Sequential(Weight(), nn.Identity()),
        loss=quadratic_loss,
        train=train,
        batch_size=2,
        seed=1,
        optimizer="SGD",
        arguments={"lr": 0.4},
        epochs=1,
        sync="none",
        weights="double_buffer",
        stages=((1, 1),),
        minibatches_per_wave=4,
    )
    result = run_reference(run)
    w = [3.0, 3.0]  # W(t − 1), W(t)
    for batch in waves(result, 4):
        gradient = sum(a * (w[0] - b) for a, b in (train.coefficients[i] for i in batch)) / len(batch)
        w = [w[1], w[1] - 0.4 * gradient]
    assert result.weights["0.w"].item() == pytest.approx(w[1], rel=1e-12)
    assert [r.local_through for r in result.minibatches.values()] == [0] * 8 + [4] * 4 + [8]


K = 4


def chain_of_matrices() -> nn.Module:
    return nn.Sequential(*(nn.Linear(3, 3, bias=False) for _ in range(K))).double()


def delay(weights: str, p: int, stage: int) -> int:
    """How far p looks back: p − v_i(p), as in the table of `policies.md`."""
    return {"wave": 5, "vertical": K, "stash": K - stage, "predict": K - stage, "spectrain": K - stage}[weights]


def by_hand(run: ReferenceRun, batches: Sequence[Sequence[int]]) -> list[Tensor]:
    """Train the chain of matrices y = W_3 W_2 W_1 W_0 x with momentum; every stage keeps all its (W, v) so far."""
    torch.manual_seed(run.seed)
    history = [[(w.detach().clone(), torch.zeros_like(w))] for w in run.model().parameters()]
    for p, batch in enumerate(batches, start=1):
        samples = [run.train[index] for index in batch]
        x, y = (torch.stack([sample[part] for sample in samples]) for part in (0, 1))
        activations = [x]
        for stage in range(K):
            through = max(0, p - delay(run.weights, p, stage))
            w, v = history[stage][through]
            steps = p - 1 - through + (stage // 2 if run.weights == "spectrain" else 0)
            forward = w - 0.05 * steps * v if POLICIES[run.weights].predicts else w
            activations.append(activations[-1] @ forward.T)
        error = 2 * (activations[-1] - y) / y.numel()
        for stage in reversed(range(K)):
            w, v = history[stage][-1]
            read = w
            if run.weights == "spectrain":
                read = w - 0.05 * (stage // 2) * v
            elif run.weights != "predict":
                read = history[stage][max(0, p - delay(run.weights, p, stage))][0]
            gradient = error.T @ activations[stage]
            error = error @ read
            velocity = 0.9 * v + gradient
            history[stage].append((w - 0.05 * velocity, velocity))
    return [versions[-1][0] for versions in history]


@pytest.mark.parametrize("weights", ["wave", "vertical", "stash", "predict", "spectrain"])
def test_each_stage_computes_with_the_versions_of_the_table(weights: str) -> None:
    generator = torch.Generator().manual_seed(2)
    x, y = (torch.randn(96, 3, generator=generator, dtype=torch.float64) for _ in range(2))
    run = replace(
        network_run(torch.float64, "SGD", lr=0.05, momentum=0.9),
        sync="none",
        epochs=1,
        model=chain_of_matrices,
        train=TensorDataset(x, y),
        weights=weights,
        stages=((1,) * K,),
        minibatches_per_wave=5,
    )
    result = run_reference(run)
    for found, expected in zip(
        result.weights.values(), by_hand(run, [r.samples for r in result.minibatches.values()]), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("is_first", [True, False], ids=["first stage", "last stage"])
def test_decay_is_that_of_the_newest_anchor(*, is_first: bool) -> None:
    """V = 2, K = 2, N = 2, D = 0, λ = ½: when p = 3 is updated, the first stage has begun p = 4 and so uses w^(1)."""
    values = powers(8)
    run = replace(
        number_run(values),
        model=lambda: (
            nn.Sequential(Number(8.0), nn.Identity()) if is_first else nn.Sequential(nn.Identity(), Number(8.0))
        ),
        arguments={"lr": 1.0, "weight_decay": 0.5},
        num_virtual_workers=2,
        minibatches_per_wave=2,
        weights="stash",
        stages=((1, 1),) * 2,
    )
    result = run_reference(run)
    gradients = [[values[r.samples[0]] for r in result.minibatches.values() if r.vw == vw] for vw in (VW0, VW1)]
    w0, sums = 8.0, [0.0, 0.0]

    def step(vw: int, p: int, newest: float) -> float:
        return -(gradients[vw][p - 1] + 0.5 * newest)

    first = [[step(vw, 1, w0)] for vw in (0, 1)]
    for vw in (0, 1):
        first[vw].append(step(vw, 2, w0 + first[vw][0]))
    w1 = w0 + sum(first[0]) + sum(first[1])
    for vw in (0, 1):
        newest = w1 if is_first else w0 + sum(first[vw])
        third = step(vw, 3, newest)
        sums[vw] = third + step(vw, 4, w1 + third)
    assert next(iter(result.weights.values())).item() == w1 + sum(sums)


def test_no_anchor_comes_with_a_minibatch_that_the_segment_does_not_have() -> None:
    """The same with three minibatches each, no gradients: there is no p = 4 whose clock the update of 3 could use."""
    run = replace(
        number_run([0.0] * 6, start=8.0),
        model=lambda: nn.Sequential(Number(8.0), nn.Identity()),
        arguments={"lr": 1.0, "weight_decay": 0.5},
        num_virtual_workers=2,
        minibatches_per_wave=2,
        weights="stash",
        stages=((1, 1),) * 2,
    )
    after_two = 8.0 - 4.0 - 2.0
    assert run_reference(run).weights["0.w"].item() == 8.0 + 2 * (-4.0 - 2.0) + 2 * (-0.5 * after_two)


#: D, N → p: required clock, as in `wsp.md` §2.
REQUIRED: list[tuple[str, int, int, dict[int, int]]] = [
    ("flush", 0, 1, {1: 0, 2: 1, 3: 2}),
    ("flush", 0, 4, {4: 0, 5: 1, 8: 1, 9: 2}),
    ("flush", 1, 4, {8: 0, 9: 1, 13: 2}),
    ("double_buffer", 0, 4, {8: 0, 9: 1, 12: 1, 13: 2}),
    ("double_buffer", 1, 4, {12: 0, 13: 1}),
    ("stash", 0, 4, {7: 0, 8: 1, 12: 2}),
    ("predict", 1, 4, {11: 0, 12: 1, 16: 2}),
]


@pytest.mark.parametrize(("weights", "staleness", "n", "required"), REQUIRED)
def test_the_published_clock_in_use_is_the_required_one(
    weights: str, staleness: int, n: int, required: dict[int, int]
) -> None:
    run = replace(
        network_run(torch.float64, "SGD", lr=0.01, momentum=0.5),
        epochs=None,
        total_minibatches=34,
        num_virtual_workers=2,
        minibatches_per_wave=n,
        staleness=staleness,
        weights=weights,
        stages=((5,), (2, 3)) if n > 1 else None,
    )
    clocks = {record.p: record.clock for record in run_reference(replace(run, batch_size=2)).minibatches.values()}
    for p, clock in required.items():
        formula = required_clock(p, minibatches_per_wave=n, staleness=staleness, weights=weights)
        assert (clocks[p], formula) == (clock, clock)  # type: ignore[index]
