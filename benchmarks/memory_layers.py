"""Models of the benchmark of planned memory: layers that save as many bytes as the profile says, scaled down.

`TRANSFORMER` is like BERT-24 with 16 sequences of 512 tokens, `CONVOLUTIONS` like ResNet-152 with 64 images: bytes
of activations and outputs of a block, and its times on an emulated device. Layers compute next to nothing. What they
save is as large as in the model times `BYTES_SCALE`, and links are slower by the same factor, so swaps take as long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.sleeper import keep_time

BYTES_SCALE = 1 / 1024
#: Of the links of the devices between each other and to host memory, unscaled.
LINK_BYTES_PER_SECOND = 12e9
NUM_DEVICES = 4
NUM_SAMPLES = 100_000

_FLOAT_BYTES = 4
_MB = 10**6


@dataclass(frozen=True, slots=True)
class Block:
    """A layer, unscaled."""

    forward_ms: float
    saved_bytes: float
    """Besides its output, which the layer behind it saves."""
    output_bytes: float
    parameter_bytes: float

    @property
    def saved(self) -> int:
        """Numbers that it saves, scaled."""
        return _floats(self.saved_bytes)

    @property
    def output(self) -> int:
        """Numbers in its output, scaled."""
        return _floats(self.output_bytes)

    @property
    def parameters(self) -> int:
        """Numbers in its parameters, scaled, at least those that it computes with."""
        return max(2, _floats(self.parameter_bytes))


def _floats(num_bytes: float) -> int:
    return max(1, round(num_bytes * BYTES_SCALE / _FLOAT_BYTES))


@dataclass(frozen=True, slots=True)
class Model:
    """A chain of blocks, and how much slower everything is than on the GPU."""

    name: str
    blocks: tuple[Block, ...]
    slower: float

    def host_bytes_per_second(self) -> float:
        """Of the emulated links."""
        return LINK_BYTES_PER_SECOND * BYTES_SCALE / self.slower


TRANSFORMER = Model("transformer", (Block(8.9, 366 * _MB, 34 * _MB, 50 * _MB),) * 24, 1.0)
CONVOLUTIONS = Model(
    "convolutions",
    (
        *(Block(2.0, 825 * _MB, 205 * _MB, 0.3 * _MB),) * 3,
        *(Block(2.0, 411 * _MB, 103 * _MB, 1.1 * _MB),) * 8,
        *(Block(2.0, 206 * _MB, 51 * _MB, 4.5 * _MB),) * 36,
        *(Block(2.0, 103 * _MB, 26 * _MB, 18 * _MB),) * 3,
    ),
    2.0,
)
MODELS = (TRANSFORMER, CONVOLUTIONS)


class _Layer(nn.Module):
    """Saves its input and a tensor of its own."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self._block = block
        self.weight = nn.Parameter(torch.full((block.parameters - 1,), 1e-3))
        self.scale = nn.Parameter(torch.tensor(1e-3))

    def forward(self, value: Tensor) -> Tensor:
        """The mean of what it saves, as often as its output has numbers."""
        sums = (value * self.scale).sum() + self.weight.sum()
        saved = torch.tanh(sums + torch.zeros(self._block.saved))
        return saved.mean() + torch.zeros(len(value), self._block.output)


def transformer() -> nn.Module:
    """The layers of `TRANSFORMER`."""
    return _chain(TRANSFORMER.blocks)


def convolutions() -> nn.Module:
    """The layers of `CONVOLUTIONS`."""
    return _chain(CONVOLUTIONS.blocks)


def _chain(blocks: Sequence[Block]) -> nn.Module:
    keep_time()
    return nn.Sequential(*map(_Layer, blocks))


class Samples(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """The same pair again and again."""

    def __init__(self, model: Model) -> None:
        self._sample = (torch.ones(model.blocks[0].output), torch.zeros(model.blocks[-1].output))

    def __len__(self) -> int:
        """Number of samples."""
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """One sample."""
        return self._sample


def transformer_data() -> Samples:
    """Training data of `transformer`."""
    return Samples(TRANSFORMER)


def convolutions_data() -> Samples:
    """Training data of `convolutions`."""
    return Samples(CONVOLUTIONS)


def profile(model: Model) -> dict[str, Any]:
    """The profile file of the scaled model on a device of type `gpu`."""
    layers = [
        {
            "name": str(index),
            "parameter_bytes": _FLOAT_BYTES * block.parameters,
            "activation_bytes": _FLOAT_BYTES * (block.saved + block.output),
            "output_bytes": _FLOAT_BYTES * block.output,
            "forward_ms": {"gpu": model.slower * block.forward_ms},
            "backward_ms": {"gpu": 2 * model.slower * block.forward_ms},
        }
        for index, block in enumerate(model.blocks)
    ]
    return {
        "version": 1,
        "model": f"benchmarks.memory_layers:{model.name}",
        "batch_size": 1,
        "input_bytes": _FLOAT_BYTES * model.blocks[0].output,
        "layers": layers,
    }


def cluster(model: Model, memory_bytes: int) -> dict[str, Any]:
    """The cluster file: four equal devices with a link of `LINK_BYTES_PER_SECOND` between each two."""
    link = {"bandwidth_bytes_per_second": model.host_bytes_per_second(), "latency_seconds": 1e-5}
    return {
        "device_types": {"gpu": {"memory_bytes": memory_bytes}},
        "nodes": [{"name": "n0", "devices": ["gpu"] * NUM_DEVICES}],
        "links": {"intra_node": link, "inter_node": link},
    }
