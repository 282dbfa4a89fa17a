"""The model of the pipeline benchmark: 8 transformer encoder layers of width 512; a microbatch is 8 × 64 tokens."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.sizes import sized

NUM_LAYERS = 8
WIDTH = sized(512, 32)
TOKENS = sized(64, 4)
MICROBATCH = 8
LEARNING_RATE = 1e-4


def layers() -> list[nn.Module]:
    """The chain, seeded: every process builds the same."""
    torch.manual_seed(0)
    return [
        nn.TransformerEncoderLayer(WIDTH, nhead=8, dim_feedforward=4 * WIDTH, dropout=0.0, batch_first=True)
        for _ in range(NUM_LAYERS)
    ]


def model() -> nn.Module:
    """The chain as one module."""
    return nn.Sequential(*layers())


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Mean squared error."""
    return nn.functional.mse_loss(output, target)


class RandomTokens(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Pairs of random activations; the same tensors again and again, so that reading costs nothing."""

    def __init__(self, length: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self._length = length
        self._sample = (
            torch.randn(TOKENS, WIDTH, generator=generator),
            torch.randn(TOKENS, WIDTH, generator=generator),
        )

    def __len__(self) -> int:
        """Number of samples."""
        return self._length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """One sample."""
        return self._sample


def data() -> RandomTokens:
    """Enough samples for one benchmark run of the real command line."""
    return RandomTokens(10_000)
