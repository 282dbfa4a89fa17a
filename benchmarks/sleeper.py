"""Emulated stages for the protocol benchmark: 25 ms forward and 25 ms backward each, without using a core."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hetpipe.clock import SYSTEM_CLOCK

NUM_LAYERS = 4
STAGE_SECONDS = 0.050
NUM_SAMPLES = 100_000

_PR_SET_TIMERSLACK = 29


class _SlowLinear(torch.autograd.Function):
    """x·Wᵀ + b and its gradients, on a device that needs half of `STAGE_SECONDS` for either, arithmetic included."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        started = SYSTEM_CLOCK.monotonic()
        ctx.save_for_backward(value, weight)
        output = nn.functional.linear(value, weight, bias)
        _sleep_until(started + STAGE_SECONDS / 2)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        started = SYSTEM_CLOCK.monotonic()
        value, weight = ctx.saved_tensors
        found = gradient @ weight, gradient.T @ value, gradient.sum(0)
        _sleep_until(started + STAGE_SECONDS / 2)
        return found


def _sleep_until(moment: float) -> None:
    SYSTEM_CLOCK.sleep(max(0.0, moment - SYSTEM_CLOCK.monotonic()))


class Sleeper(nn.Linear):
    """A small linear layer on a device that needs 50 ms for it."""

    def __init__(self) -> None:
        super().__init__(64, 64)

    def forward(self, value: Tensor) -> Tensor:
        """Compute, slowly."""
        slow: Tensor = _SlowLinear.apply(value, self.weight, self.bias)  # type: ignore[no-untyped-call]  # torch ships it untyped
        return slow


def keep_time() -> None:
    """Have this thread's sleeps end on time: Linux may let them last up to 50 µs longer, to save power."""
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)


def model() -> nn.Module:
    """Four of them: one per stage."""
    keep_time()
    return nn.Sequential(*(Sleeper() for _ in range(NUM_LAYERS)))


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Mean squared error."""
    return nn.functional.mse_loss(output, target)


class Samples(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """The same pair again and again."""

    def __init__(self) -> None:
        self._sample = (torch.ones(64), torch.zeros(64))

    def __len__(self) -> int:
        """Number of samples."""
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """One sample."""
        return self._sample


def data() -> Samples:
    """The training data."""
    return Samples()
