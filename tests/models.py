"""Small models and data that tests train. Every callable takes no arguments, as a job wants."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tests.pipeline.witness import WitnessDataset, witness_model


def _chain(dtype: torch.dtype) -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 3)).to(dtype)


def mlp32() -> nn.Module:
    return _chain(torch.float32)


def mlp64() -> nn.Module:
    return _chain(torch.float64)


def dropout_batch_norm() -> nn.Module:
    return nn.Sequential(
        nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8)), nn.Dropout(0.3), nn.ReLU(inplace=True), nn.Linear(8, 3)
    )


def _data(dtype: torch.dtype, count: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(count, 5, generator=generator, dtype=torch.float64).to(dtype)
    return TensorDataset(inputs, torch.randint(0, 3, (count,), generator=generator))


def data32() -> TensorDataset:
    return _data(torch.float32, 46)


def data64() -> TensorDataset:
    return _data(torch.float64, 46)


def loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, target)


def more32() -> TensorDataset:
    return _data(torch.float32, 301)


def more64() -> TensorDataset:
    return _data(torch.float64, 301)


def poisoned32() -> TensorDataset:
    """Sample 17 is not a number."""
    inputs, targets = _data(torch.float32, 46).tensors
    inputs[17] = float("nan")
    return TensorDataset(inputs, targets)


#: Samples of the witness runs.
NUM_WITNESSES = 46


def witnesses() -> nn.Module:
    """Four layers, each of which counts the samples it was trained on."""
    return witness_model(4, NUM_WITNESSES, torch.float64)


def witness_data() -> WitnessDataset:
    return WitnessDataset(NUM_WITNESSES, torch.float64)
