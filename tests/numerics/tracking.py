"""An analytic quadratic on which a prediction is exact: each layer's weight w chases a target that moves as it does.

The loss of minibatch p is Σ_i ½ (w_i − c_p)² over the layers. Where the forward of layer i computes on
w_0 − lr·(p − 1), and c_p is just 1 below it, every gradient is 1, so SGD with momentum μ and dampening μ moves each
weight by exactly −lr per update: the momentum is 1 from the first step on. All numbers are dyadic: no rounding.

Minibatches before the first update of a stage are predicted by nothing; their forwards are on w_0, and c_p says so.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from hetpipe.decide.sync.division import shuffled
from hetpipe.values.ids import Clock

RATE = 2.0**-5
NUM_LAYERS = 3
COUNT = 40
SEED = 3
START = 1.0

#: (layer, "forward" | "backward", what the weight was), in the order of the passes of each layer.
seen: list[tuple[int, str, float]] = []


class Witness(torch.autograd.Function):
    """Identity of a weight that tells what it is in both passes."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, layer: int) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.layer = layer
        seen.append((layer, "forward", float(weight.detach())))
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (weight,) = ctx.saved_tensors
        seen.append((ctx.layer, "backward", float(weight)))
        return gradient, None


class Chaser(nn.Module):
    """Adds ½ (w − c)² to what the layers before have summed up; values are [1, layers] sums and targets."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.weight = nn.Parameter(torch.tensor(START, dtype=torch.float64))

    def forward(self, sums: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        weight: Tensor = Witness.apply(self.weight, self.layer)  # type: ignore[no-untyped-call]
        return sums + 0.5 * (weight - targets[:, self.layer]).square(), targets


def build() -> nn.Module:
    return Model()


class Model(nn.Module):
    """A chain of chasers."""

    def __init__(self) -> None:
        super().__init__()
        self.chasers = nn.ModuleList(Chaser(layer) for layer in range(NUM_LAYERS))

    def layers(self) -> list[nn.Module]:
        return list(self.chasers)


def loss(outputs: Any, target: Tensor) -> Tensor:
    sums, _ = outputs
    result: Tensor = sums.mean() + 0.0 * target.sum()
    return result


def forward_weight(p: int, layer: int) -> float:
    """What the forward of minibatch p is predicted to compute on, with one layer per stage."""
    updates_so_far = max(0, p - (NUM_LAYERS - layer))
    return START - RATE * (p - 1) if updates_so_far else START


class Targets(Dataset[tuple[tuple[Tensor, Tensor], Tensor]]):
    """Sample j is what minibatch p takes, where the shuffled order says that p takes j."""

    def __init__(self) -> None:
        order = shuffled(list(range(COUNT)), seed=SEED, epoch=0, barrier=Clock(0))
        self.minibatch_of = {sample: p for p, sample in enumerate(order, start=1)}

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
        p = self.minibatch_of[index]
        targets = torch.tensor([forward_weight(p, i) - 1.0 for i in range(NUM_LAYERS)], dtype=torch.float64)
        return (torch.zeros((), dtype=torch.float64), targets), torch.zeros((), dtype=torch.float64)
