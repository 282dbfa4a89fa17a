"""Buffers and frozen parameters that a forward writes: cut anywhere they end with the bits of the uncut model."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from hetpipe.errors import CallableError
from hetpipe.job.file import Job
from tests.model import zoo
from tests.model.harness import Subject, assert_cut_anywhere, differences
from tests.numerics.compare import ROOT, assert_same_bits, trained
from tests.reference.executor import ReferenceRun, run_reference
from tests.support.in_process import InProcessRun, run_in_process

WIDTH = 6


class Centred(nn.Module):
    """Subtracts a running mean of values that depend on weights, which it changes in two steps."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, value: Tensor) -> Tensor:
        value = self.second(self.first(value).tanh())
        if self.training:
            self.update(value.detach().mean(0))
        result: Tensor = self.third((value - self.mean).tanh())
        return result

    def update(self, found: Tensor) -> None:
        self.mean.mul_(0.9).add_(found, alpha=0.1)


class Replaced(Centred):
    """The same, by assignment of a new tensor."""

    def update(self, found: Tensor) -> None:
        self.mean = 0.9 * self.mean + 0.1 * found


class ReadInEvaluation(Centred):
    """Writes before its second layer what evaluation reads after it."""

    def forward(self, value: Tensor) -> Tensor:
        value = self.first(value)
        if self.training:
            self.update(value.detach().mean(0))
        value = self.second(value.tanh())
        result: Tensor = self.third(value if self.training else value - self.mean)
        return result


class Counting(Centred):
    """Counts its minibatches in a buffer, and scales with it."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Tensor
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, value: Tensor) -> Tensor:
        self.count += 1
        return super().forward(value) / (1 + self.count)


class Contrast(nn.Module):
    """Momentum contrast: a queue of keys, from an encoder whose frozen weights follow those of another one."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = (nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, 4)) for _ in range(2))
        for ours, theirs in zip(self.key.parameters(), self.query.parameters(), strict=True):
            ours.data.copy_(theirs.data)
            ours.requires_grad = False
        self.queue: Tensor
        self.register_buffer("queue", functional.normalize(torch.randn(4, 12), dim=0))

    def forward(self, value: Tensor) -> Tensor:
        query = functional.normalize(self.query(value), dim=1)
        with torch.no_grad():
            self.follow()
            key = functional.normalize(self.key(value + 0.1), dim=1)
        alike = (query * key).sum(1, keepdim=True)
        logits = torch.cat([alike, query @ self.queue.clone().detach()], 1) / 0.2
        with torch.no_grad():
            self.queue = torch.cat([key.T, self.queue[:, : -len(key)]], 1)
        return logits

    def follow(self) -> None:
        for ours, theirs in zip(self.key.parameters(), self.query.parameters(), strict=True):
            ours.data = ours.data * 0.9 + theirs.data * 0.1


class ContrastInPlace(Contrast):
    def follow(self) -> None:
        for ours, theirs in zip(self.key.parameters(), self.query.parameters(), strict=True):
            ours.data.mul_(0.9).add_(theirs.data, alpha=0.1)


def batch_norm_with_activation() -> nn.Module:
    """A BatchNorm of timm, which counts its minibatches itself and calls its activation."""
    norm = importlib.import_module("timm.layers").BatchNormAct2d
    return nn.Sequential(nn.Conv2d(3, 4, 3), norm(4), nn.Conv2d(4, 4, 3), norm(4))


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = batch_norm_with_activation()

    def forward(self, value: Tensor) -> Tensor:
        result: Tensor = self.body(value).mean((2, 3))
        return result


def rows(*shape: int) -> tuple[Tensor]:
    return (torch.randn(3, *(shape or (WIDTH,)), generator=torch.Generator().manual_seed(0)),)


def squares(output: Tensor) -> Tensor:
    return output.square().mean()


@pytest.mark.parametrize("kind", [Centred, Replaced, ReadInEvaluation, Counting, Contrast, ContrastInPlace, Wrapped])
def test_what_a_forward_writes_is_written_once_and_read_where_it_is_written(kind: type[nn.Module]) -> None:
    made = rows(3, 8, 8) if kind is Wrapped else rows()
    subject = Subject(kind, made, loss=squares)
    uncut = subject.uncut(made)
    assert uncut.buffers.keys() >= set(subject.cut.description.rewritten) > set()
    assert not differences(uncut, subject.watched(made))
    assert assert_cut_anywhere(subject, made) >= 1


def test_what_training_writes_and_evaluation_reads_is_in_one_layer() -> None:
    subject = Subject(ReadInEvaluation, rows(), loss=squares)
    reasons = {cut.label: cut.reason for cut in subject.cut.survey.cuts}
    assert reasons["second"] == "mean is used before and after it, and the forward writes it"
    assert [layer.name for layer in subject.layers if "mean" in layer.buffers.values()] == ["first"]


class Clamping(Centred):
    def update(self, found: Tensor) -> None:
        self.first.weight.data.clamp_(-0.1, 0.1)  # the line that is named


def test_a_forward_that_changes_trainable_weights_is_refused() -> None:
    line = next(n for n, t in enumerate(Path(__file__).read_text().splitlines(), 1) if "# the line that is named" in t)
    told = r"^model: its forward changes the trainable parameter first\.weight in training \(clamp_ \(.* line "
    with pytest.raises(CallableError, match=told + rf"{line}\)\); only the job's optimizer changes weights, "):
        Subject(Clamping, rows(), loss=squares)


def contrast() -> nn.Module:
    return Pooled(Contrast(), 13)


def centred() -> nn.Module:
    return Pooled(Centred())


def replaced() -> nn.Module:
    return Pooled(Replaced())


class Pooled(nn.Module):
    """Of images."""

    def __init__(self, inner: nn.Module, width: int = WIDTH) -> None:
        super().__init__()
        self.entry, self.inner, self.head = nn.Linear(3 * 32, WIDTH), inner, nn.Linear(width, zoo.CLASSES)

    def forward(self, image: Tensor) -> Tensor:
        result: Tensor = self.head(self.inner(self.entry(image.mean(2).flatten(1))))
        return result


@pytest.mark.parametrize(
    ("name", "workers", "stages"),
    [
        ("centred", 1, 2),
        ("replaced", 1, 2),
        ("contrast", 2, 2),
        pytest.param("centred", 1, 4, marks=pytest.mark.exhaustive),
        pytest.param("replaced", 1, 4, marks=pytest.mark.exhaustive),
    ],
)
def test_what_is_written_trains_to_the_bits_of_the_reference(
    name: str, workers: int, stages: int, tmp_path: Path
) -> None:
    """Also averaged over virtual workers, as a momentum encoder, whose weights are frozen."""
    optimizer: dict[str, Any] = {"lr": 0.05, "momentum": 0.9}
    weights = "flush" if workers == 1 else "wave"
    kind = {"kind": "none"} if workers == 1 else {"kind": "wsp", "D": 1, "deterministic": True}
    job = Job(
        name="written",
        model=f"tests.model.test_written_state:{name}",
        loss="tests.model.zoo:cross_entropy",
        data={"train": "tests.model.zoo:images"},
        batch_size=2,
        minibatches=8,
        seed=3,
        optimizer={"name": "SGD", **optimizer},
        weights=weights,
        workers={"count": workers, "stages": stages},
        sync={"minibatches_per_wave": 4, **kind},
        parameter_servers={"count": 1} if workers > 1 else {},
    )
    run_in_process(InProcessRun(job=job, run_dir=tmp_path, import_path=ROOT, stall_seconds=60.0))
    reference = ReferenceRun(
        model=globals()[name],
        loss=zoo.cross_entropy,
        train=zoo.images(),
        batch_size=2,
        seed=3,
        optimizer="SGD",
        arguments=optimizer,
        num_virtual_workers=workers,
        minibatches_per_wave=4,
        staleness=1,
        total_minibatches=8 * workers,
        weights=weights,
        sync="none" if workers == 1 else "wsp",
    )
    expected = run_reference(reference)
    assert_same_bits(trained(tmp_path), expected)
