"""The model and the cluster of the prediction benchmark: the paper's 4 nodes × 4 GPUs (HetPipe §8.1), times scaled.

Sixteen small linear layers that two cores compute in passing; the profile says how long a device of each type takes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.sleeper import keep_time

WIDTH = 128
BATCH_SIZE = 8
NUM_SAMPLES = 100_000

#: Device type → milliseconds of a forward of an average layer. A backward takes twice as long.
FORWARD_MS = {"TITAN_V": 24.0, "TITAN_RTX": 26.4, "RTX_2060": 42.0, "QUADRO_P4000": 54.0}

#: How much of an average layer each layer is: the layers are as unequal as the devices.
SHARES = (1.4, 0.8, 1.0, 1.2, 0.6, 1.0, 0.9, 1.1, 1.3, 0.7, 1.0, 0.8, 1.2, 1.0, 0.9, 1.1)

_DTYPE_BYTES = 4


def model() -> nn.Module:
    """A chain of linear layers, each with its activation."""
    keep_time()
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in SHARES))


class Samples(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Noise from each sample's number."""

    def __len__(self) -> int:
        """Number of samples."""
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """One sample."""
        value = torch.sin(torch.arange(WIDTH) * float(index + 1))
        return value, value.flip(0)


def data() -> Samples:
    """The training data."""
    return Samples()


def profile() -> dict[str, Any]:
    """The profile file of the model."""
    row = BATCH_SIZE * WIDTH * _DTYPE_BYTES
    layers = [
        {
            "name": str(index),
            "parameter_bytes": (WIDTH * WIDTH + WIDTH) * _DTYPE_BYTES,
            "activation_bytes": 2 * row,
            "output_bytes": row,
            "forward_ms": {kind: share * time for kind, time in FORWARD_MS.items()},
            "backward_ms": {kind: 2 * share * time for kind, time in FORWARD_MS.items()},
        }
        for index, share in enumerate(SHARES)
    ]
    return {
        "version": 1,
        "model": "benchmarks.unequal:model",
        "batch_size": BATCH_SIZE,
        "input_bytes": row,
        "layers": layers,
    }


def cluster() -> dict[str, Any]:
    """The cluster file: a node per type; between nodes a layer's output takes 2 ms."""
    return {
        "device_types": {kind: {} for kind in FORWARD_MS},
        "nodes": [{"name": f"n{node}", "devices": [kind] * 4} for node, kind in enumerate(FORWARD_MS)],
        "links": {
            "intra_node": {"bandwidth_bytes_per_second": 10e6, "latency_seconds": 0.0001, "efficiency": 0.8},
            "inter_node": {"bandwidth_bytes_per_second": 2.5e6, "latency_seconds": 0.0002, "efficiency": 0.8},
        },
    }
