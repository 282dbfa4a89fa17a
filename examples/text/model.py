"""A small GPT over bytes, as a chain of layers.

Shape suffixes: B texts of a minibatch, T positions, W width, V byte values (256).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

NUM_BYTE_VALUES = 256
CONTEXT = 64
"""Bytes the model looks back at, itself included."""
WIDTH = 96
NUM_HEADS = 4
NUM_BLOCKS = 4
INIT_STANDARD_DEVIATION = 0.02
"""Of embeddings, as in GPT-2; PyTorch's own 1.0 drowns the blocks at the start."""


class Embedding(nn.Module):
    """Bytes [B T] to vectors [B T W]: what the byte is, plus where it stands."""

    def __init__(self) -> None:
        super().__init__()
        self.byte = nn.Embedding(NUM_BYTE_VALUES, WIDTH)
        self.position = nn.Parameter(torch.randn(CONTEXT, WIDTH) * INIT_STANDARD_DEVIATION)
        nn.init.normal_(self.byte.weight, std=INIT_STANDARD_DEVIATION)

    def forward(self, bytes_BT: Tensor) -> Tensor:
        """Bytes [B, T] to hidden states [B, T, W]."""
        embedded: Tensor = self.byte(bytes_BT)
        return embedded + self.position[: bytes_BT.shape[1]]


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each behind a norm and around a shortcut; [B T W] → [B T W]."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH)
        self.attention_out = nn.Linear(WIDTH, WIDTH)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, hidden_BTW: Tensor) -> Tensor:
        """Hidden states [B, T, W] to hidden states of the same shape."""
        heads = self.query_key_value(self.attention_norm(hidden_BTW)).unflatten(-1, (3, NUM_HEADS, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden_BTW = hidden_BTW + self.attention_out(attended.transpose(1, 2).flatten(2))
        fed: Tensor = self.feed_forward(hidden_BTW)
        return hidden_BTW + fed


class GPT(nn.Module):
    """Bytes [B T] to scores of the next byte at every position [B T V]."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = Embedding()
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, NUM_BYTE_VALUES))

    def layers(self) -> Sequence[nn.Module]:
        """The chain that hetpipe cuts into stages: each layer takes what the one before it returns."""
        return [self.embedding, *self.blocks, self.head]

    def forward(self, bytes_BT: Tensor) -> Tensor:
        """Bytes [B, T] to hidden states [B, T, W]."""
        """The layers one after the other; what a plain PyTorch user of the exported weights calls."""
        values = bytes_BT
        for layer in self.layers():
            values = layer(values)
        return values


def build() -> GPT:
    """The model of the job file."""
    return GPT()


def loss(scores_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Mean cross-entropy per byte, in nats."""
    return functional.cross_entropy(scores_BTV.flatten(0, 1), targets_BT.flatten())
