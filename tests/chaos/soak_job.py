"""A job whose loss can fall for half an hour: a small network learns a fixed random one, slowly, at a steady pace."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from hetpipe.clock import SYSTEM_CLOCK

_WIDTH, _COUNT = 16, 2_000

#: Between two samples that one virtual worker takes.
_REST_SECONDS = 0.005


def _chain(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(_WIDTH, _WIDTH), nn.Tanh(), nn.Linear(_WIDTH, _WIDTH), nn.Tanh(), nn.Linear(_WIDTH, 4)
    )


def _samples() -> TensorDataset:
    inputs = torch.randn(_COUNT, _WIDTH, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        return TensorDataset(inputs, 3.0 * _chain(99)(inputs))


def model() -> nn.Module:
    """What learns."""
    return _chain(1)


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Mean square of the difference."""
    return nn.functional.mse_loss(output, target)


class PacedData(Dataset[tuple[Tensor, Tensor]]):
    """The samples, one after a rest."""

    def __init__(self) -> None:
        self._samples = _samples()

    def __len__(self) -> int:
        return _COUNT

    def __getitem__(self, index: int, /) -> tuple[Tensor, Tensor]:
        SYSTEM_CLOCK.sleep(_REST_SECONDS)
        inputs, target = self._samples[index]
        return inputs, target


def data() -> PacedData:
    """What is trained on."""
    return PacedData()


#: What differs from the witness job.
CHANGES: dict[str, Any] = {
    "name": "soak",
    "model": f"{__name__}:model",
    "loss": f"{__name__}:loss",
    "data": {"train": f"{__name__}:data"},
    "batch_size": 8,
    "epochs": 100_000,
    "optimizer": {"name": "SGD", "lr": 0.0005},
}
