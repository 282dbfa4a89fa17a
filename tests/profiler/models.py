"""Chains that keep activations in different ways. Every callable takes no arguments, as a job wants."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from hetpipe.profiler.subject import Subject, load_subject
from hetpipe.spec.job import load_job
from tests.numerics.compare import ROOT

NUM_CLASSES = 3


class Split(nn.Module):
    """One tensor to two, of which one is a transposed view, so that the next boundary has to copy it."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        left, right = x.chunk(2, dim=1)
        return left.contiguous(), right.t()


class Join(nn.Module):
    """The inverse of `Split`, with a product that keeps both."""

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return left * right.t()


class Residual(nn.Module):
    """Keeps nothing of its output."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Raises(nn.Module):
    """A layer with a mistake."""

    def forward(self, x: Tensor) -> Tensor:
        raise ValueError(f"no good at {x.dim()} dimensions")


class Shift(nn.Module):
    """Works in place, and only on what was not shifted yet."""

    def forward(self, x: Tensor) -> Tensor:
        if x.detach().mean() > 50:
            raise ValueError("shifted twice")
        return x.add_(100)


def linear_relu() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, NUM_CLASSES))


def in_place() -> nn.Module:
    return nn.Sequential(
        nn.Linear(5, 64), nn.ReLU(inplace=True), nn.Dropout(0.5, inplace=True), nn.Linear(64, NUM_CLASSES)
    )


def shifts() -> nn.Module:
    return nn.Sequential(Shift(), nn.Linear(5, 8), Shift(), nn.Linear(8, NUM_CLASSES))


def batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 48), nn.BatchNorm1d(48), nn.Dropout(0.3), nn.Linear(48, NUM_CLASSES))


def views() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 5)), nn.Conv1d(1, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(40, NUM_CLASSES)
    )


def tuples() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 64), nn.Tanh(), Split(), Join(), nn.Linear(32, NUM_CLASSES))


def residual() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 32), Residual(32), Residual(32), nn.Linear(32, NUM_CLASSES))


def frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(5, 32), nn.Linear(32, 16), nn.Linear(16, NUM_CLASSES))
    model[1].requires_grad_(requires_grad=False)
    return model


def raises() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4), Raises())


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(32, 5, generator=generator)
    return TensorDataset(inputs, torch.randint(0, NUM_CLASSES, (32,), generator=generator))


def subject(name: str, **changes: object) -> Subject:
    """The chain `name` of this module with its data, ready to run."""
    job = {
        "model": f"tests.profiler.models:{name}",
        "loss": "torch.nn.functional:cross_entropy",
        "data": {"train": "tests.profiler.models:data"},
        "batch_size": 16,
        "epochs": 1,
        "optimizer": {"name": "SGD", "lr": 0.1, "momentum": 0.9},
    }
    return load_subject(load_job({**job, **changes}), ROOT)


@cache
def example(name: str) -> Subject:
    """The job of an example."""
    return load_subject(load_job(ROOT / "examples" / name / "job.yaml"), ROOT)
