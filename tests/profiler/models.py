"""Chains that keep activations in different ways. Every callable takes no arguments, as a job wants."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from hetpipe.job.file import load_job
from hetpipe.profiler.subject import Subject, load_subject
from tests.numerics.compare import ROOT

NUM_CLASSES = 3

#: Of the transformer of 50 M parameters, and of one of 6 M.
WIDTH, VOCABULARY = 768, 5120
NARROW_WIDTH, NARROW_VOCABULARY = 256, 2048


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


class Shortcut(nn.Module):
    """What its layers make of the input, added to the input."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = x + self.layers(x)
        return added


class Attention(nn.Module):
    """Causal self-attention, [B T W] → [B T W]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query_key_value = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.query_key_value(x).unflatten(-1, (3, -1, 64))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.out(attended.transpose(1, 2).flatten(2))
        return out


def transformer(width: int = WIDTH, vocabulary: int = VOCABULARY) -> nn.Module:
    """50 M parameters in eight layers: an embedding, six blocks, a head."""

    def block() -> nn.Module:
        return nn.Sequential(
            Shortcut(nn.LayerNorm(width), Attention(width)),
            Shortcut(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)),
        )

    head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, vocabulary))
    return nn.Sequential(nn.Embedding(vocabulary, width), *(block() for _ in range(6)), head)


def narrow_transformer() -> nn.Module:
    """The same with 6 M parameters."""
    return transformer(NARROW_WIDTH, NARROW_VOCABULARY)


def tokens() -> TensorDataset:
    """Sequences of 64 tokens; to say each again is the task."""
    sequences = torch.randint(0, NARROW_VOCABULARY, (4, 64), generator=torch.Generator().manual_seed(7))
    return TensorDataset(sequences, sequences)


def token_loss(scores: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy per token."""
    return functional.cross_entropy(scores.flatten(0, 1), targets.flatten())


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
    """The job of an example; transformers are those of this module."""
    if name.endswith("transformer"):
        return subject(
            name,
            loss="tests.profiler.models:token_loss",
            data={"train": "tests.profiler.models:tokens"},
            batch_size=1,
        )
    return load_subject(load_job(ROOT / "examples" / name / "job.yaml"), ROOT)
