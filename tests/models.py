"""Small models and data that tests train. Every callable takes no arguments, as a job wants."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import count, islice
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset, TensorDataset

from tests.pipeline.witness import WitnessDataset, witness_model


def _chain(dtype: torch.dtype) -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 3)).to(dtype)


def mlp32() -> nn.Module:
    return _chain(torch.float32)


def mlp64() -> nn.Module:
    return _chain(torch.float64)


def rows32() -> nn.Module:
    """Layers that compute a sample alike wherever it stands; a matrix product does not on each machine."""
    return nn.Sequential(nn.LayerNorm(5), nn.Hardtanh(), nn.LayerNorm(5), nn.Hardtanh(), nn.Linear(5, 3))


def mlp32_with_constants() -> nn.Module:
    """Two of the weights are not trained."""
    model = mlp32()
    model.get_parameter("0.weight").requires_grad = False
    model.get_parameter("2.weight").requires_grad = False
    return model


class AlwaysDrops(nn.Module):
    """Draws in evaluation mode, too."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, 0.5, training=True)


def always_dropping() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), AlwaysDrops(), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 3))


class Centred(nn.Module):
    """Computes something else of a sample in each minibatch."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(dim=0)


def centring() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), Centred(), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 3))


class Rotated(nn.Module):
    """All blocks use the same angles, which belong to no sample."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.LayerNorm(5) for _ in range(4))
        self.head = nn.Linear(5, 3)
        self.register_buffer("frequencies", torch.arange(5.0))

    def forward(self, x: Tensor) -> Tensor:
        angles = torch.cos(self.get_buffer("frequencies")).view(1, 5)
        for block in self.blocks:
            x = nn.functional.hardtanh(block(x)) * angles
        return cast(Tensor, self.head(x))


def rotated() -> nn.Module:
    return Rotated()


class Residual(nn.Module):
    """More values cross a cut within a block than one between blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(5), nn.Hardtanh(), nn.LayerNorm(5)) for _ in range(3))
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return cast(Tensor, self.head(x))


def residual() -> nn.Module:
    return Residual()


def supernet() -> nn.Module:
    """Three blocks of one shape between the first and the last layer, any of which may be left out."""
    blocks = (nn.Sequential(nn.Linear(7, 7), act()) for act in (nn.Tanh, nn.ReLU, nn.Sigmoid))
    return nn.Sequential(nn.Linear(5, 7), *blocks, nn.Linear(7, 3))


def wide32() -> nn.Module:
    """One weight of 256 KiB, which `balanced` cuts as soon as there are two shards."""
    return nn.Sequential(nn.Linear(5, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 3))


def dropout_batch_norm() -> nn.Module:
    return nn.Sequential(
        nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8)), nn.Dropout(0.3), nn.ReLU(inplace=True), nn.Linear(8, 3)
    )


def _data(dtype: torch.dtype, count: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(count, 5, generator=generator, dtype=torch.float64).to(dtype)
    return TensorDataset(inputs, torch.randint(0, 3, (count,), generator=generator))


class Root(nn.Module):
    """Adds √w with w = 0: what it returns is finite, and the gradient of w is not."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(7))

    def forward(self, values: Tensor) -> Tensor:
        return values + self.w.sqrt()


def infinite_gradient() -> nn.Module:
    """Layer 1 of three has a gradient that is infinite from the first minibatch on, and every loss is finite."""
    return nn.Sequential(nn.Linear(5, 7), Root(), nn.Linear(7, 3))


class _Amplified(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 64


class Amplifies(nn.Module):
    """Returns its input, and 64 times the gradient, which overflows at scales that suit all other layers."""

    def forward(self, values: Tensor) -> Tensor:
        amplified: Tensor = _Amplified.apply(values)  # type: ignore[no-untyped-call]  # torch ships it untyped
        return amplified


def amplified32() -> nn.Module:
    """Only gradients of the first layer overflow."""
    return nn.Sequential(
        nn.Sequential(nn.Linear(5, 7), Amplifies()), nn.Tanh(), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 3)
    )


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


def unlabelled32() -> TensorDataset:
    """Every third sample has a target, and none of samples 40 to 99."""
    inputs, targets = _data(torch.float32, 301).tensors
    targets[torch.arange(301) % 3 > 0] = -100
    targets[40:100] = -100
    return TensorDataset(inputs, targets)


def spread(output: Tensor, _: Tensor) -> Tensor:
    """A second loss."""
    return output.square().mean()


class OwnLoss(nn.Module):
    """Computes its own loss where it receives labels, as Hugging Face's models do."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, value: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Scores and their loss."""
        logits = self.head(torch.tanh(self.body(value)))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def own_loss() -> nn.Module:
    return OwnLoss()


class Mappings:
    """`unlabelled32` or the like, as mappings of a model's arguments."""

    def __init__(self, data: TensorDataset) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        value, label = self._data[index]
        return {"value": value[:4], "labels": label}


def mappings() -> Mappings:
    return Mappings(unlabelled32())


def small_scores(output: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
    """A second loss, of (output, batch)."""
    return output["logits"].square().mean() + 0.0 * batch["value"].sum()


def num_labelled(target: Tensor) -> int:
    """Targets that count."""
    return int((target != -100).sum())


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


class FrozenNorm(nn.Sequential):
    """The usual way to keep a normalisation frozen while the rest trains."""

    def train(self, mode: bool = True) -> FrozenNorm:  # noqa: FBT001, FBT002 - torch's own
        super().train(mode)
        self[1].eval()
        return self


def _used_norm() -> nn.BatchNorm1d:
    """One that has seen data before."""
    norm = nn.BatchNorm1d(7)
    with torch.no_grad():
        norm.running_mean = torch.linspace(-0.5, 0.5, 7)
        norm.running_var = torch.linspace(0.5, 2.0, 7)
    return norm


def frozen_by_train() -> nn.Module:
    return FrozenNorm(nn.Linear(5, 7), _used_norm(), nn.Tanh(), nn.Linear(7, 6), nn.Dropout(0.3), nn.Linear(6, 3))


def frozen_by_eval() -> nn.Module:
    return nn.Sequential(
        nn.Linear(5, 7), _used_norm().eval(), nn.Tanh(), nn.Linear(7, 6), nn.Dropout(0.3), nn.Linear(6, 3)
    )


def hook_parameter(model: nn.Module, name: str, hook: Callable[[Tensor], Tensor]) -> None:
    """`register_hook` on a parameter."""
    model.get_parameter(name).register_hook(hook)  # type: ignore[no-untyped-call]  # torch ships it untyped


def hooked() -> nn.Module:
    """Hooks on parameters of both stages, and on a module."""
    model = _chain(torch.float32)
    hook_parameter(model, "0.weight", lambda gradient: gradient * 0.5)
    hook_parameter(model, "0.weight", lambda gradient: gradient.clamp(-0.01, 0.01))
    hook_parameter(model, "4.bias", torch.zeros_like)
    model[2].register_forward_hook(lambda module, args, output: output * 2)
    return model


class Flipped:
    """Inputs and targets that are flipped together by chance: by `random`, by NumPy and by torch in turn."""

    def __init__(self) -> None:
        self._inputs = _data(torch.float32, 46).tensors[0]

    def __len__(self) -> int:
        return len(self._inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        drawn = (random.random(), np.random.rand(), float(torch.rand(())))[index % 3]  # noqa: NPY002 - what users call
        sign = 1 if drawn < 0.5 else -1
        inputs = sign * self._inputs[index]
        return inputs, inputs[:3].clone()


def flipped32() -> Flipped:
    return Flipped()


class Augmented(Flipped):
    """No input comes back."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, target = super().__getitem__(index)
        return inputs + torch.randn(5), target


def augmented32() -> Augmented:
    return Augmented()


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """The samples of `data32` one after the other, without end."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        data = data32()
        return (data[index % len(data)] for index in count())


def stream32() -> Stream:
    return Stream()


class Seekable(Stream):
    """Can be iterated from any position."""

    def iterate_from(self, position: int) -> Iterator[tuple[Tensor, Tensor]]:
        return islice(iter(self), position, None)


def seekable32() -> Seekable:
    return Seekable()


class Misplaced(Seekable):
    """Counts positions from 1 where it is asked to begin in the middle."""

    def iterate_from(self, position: int) -> Iterator[tuple[Tensor, Tensor]]:
        return super().iterate_from(max(position - 1, 0))


def misplaced32() -> Misplaced:
    return Misplaced()


class FlippedStream:
    """`Flipped` by position, moved a little from epoch to epoch; an object of no class of torch's."""

    def __init__(self) -> None:
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        flipped = Flipped()
        for index in range(len(flipped)):
            inputs, targets = flipped[index]
            yield inputs + 0.01 * self._epoch, targets


def flipped_stream32() -> FlippedStream:
    return FlippedStream()


def distance(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target)


class Noise(nn.Module):
    """A layer that draws from `random` and NumPy, in training and in evaluation."""

    def forward(self, values: Tensor) -> Tensor:
        return values * (1 + 0.1 * random.random() + 0.1 * float(np.random.rand()))  # noqa: NPY002 - what users call


def noisy() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), Noise(), nn.Linear(7, 6), Noise(), nn.Linear(6, 3))


class Flips(nn.Module):
    """Flips a boolean buffer in place, and negates its input at every second call."""

    is_flipped: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("is_flipped", torch.tensor(data=False))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.is_flipped.logical_not_()
        return torch.where(self.is_flipped.clone(), x, -x).sigmoid()


class Normed(nn.Linear):
    """Spectral norm: the direction of the largest singular value is a buffer, which each training forward improves.

    torch's own takes fifteen steps of it at each construction, on every stage of every run.
    """

    direction: Tensor

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.register_buffer("direction", torch.ones(outputs) / outputs**0.5)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - as `nn.Linear` names it
        with torch.no_grad():
            other = nn.functional.normalize(self.weight.T @ self.direction, dim=0)
            if self.training:
                self.direction.copy_(nn.functional.normalize(self.weight @ other, dim=0))
        return nn.functional.linear(input, self.weight / (self.direction.clone() @ self.weight @ other), self.bias)


def normed() -> nn.Module:
    """Layers whose training forward reads buffers that it writes."""
    return nn.Sequential(Normed(5, 7), Flips(), Normed(7, 6), nn.Tanh(), nn.Linear(6, 3))


def spectral() -> nn.Module:
    """The same, of torch."""
    norm = nn.utils.parametrizations.spectral_norm
    return nn.Sequential(norm(nn.Linear(5, 7)), Flips(), norm(nn.Linear(7, 6)), nn.Tanh(), nn.Linear(6, 3))


class Counts(nn.Module):
    """Counts its calls in a buffer, in evaluation mode as well, and computes with the count."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return x * (1 + 0.01 * self.calls)


def counts() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), Counts(), nn.Tanh(), nn.Linear(7, 7), Counts(), nn.Linear(7, 3))


class Copies(nn.Module):
    """Returns the first three inputs, and trains nothing that matters."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, values: Tensor) -> Tensor:
        return values[:, :3] + 0 * self.scale


def copies() -> nn.Module:
    return nn.Sequential(nn.Identity(), Copies())


class TiedInSecret(nn.Module):
    """A head that reads an embedding which it keeps in a list."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.tied = [embedding]

    def forward(self, values: Tensor) -> Tensor:
        scores: Tensor = values.mean(dim=1) @ self.tied[0].weight.t()
        return scores


def tied_in_secret() -> nn.Module:
    embedding = nn.Embedding(3, 4)
    return nn.Sequential(embedding, nn.Tanh(), TiedInSecret(embedding))


def tokens() -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    return TensorDataset(
        torch.randint(0, 3, (46, 5), generator=generator), torch.randint(0, 3, (46,), generator=generator)
    )


def all_in_evaluation_mode() -> nn.Module:
    return dropout_batch_norm().eval()


class LossWithParameters(nn.Module):
    """A loss that would have to be trained itself."""

    def __init__(self) -> None:
        super().__init__()
        self.centers = nn.Parameter(torch.zeros(3))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output + self.centers, target)


LOSS_WITH_PARAMETERS = LossWithParameters()


class OwnGenerator:
    """Augments by a generator that nobody can seed."""

    def __init__(self) -> None:
        self._data, self._random = _data(torch.float32, 46), np.random.default_rng(7)

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, target = self._data[index]
        return inputs * float(self._random.random()), target


def own_generator() -> OwnGenerator:
    return OwnGenerator()


class WholeMinibatches(nn.Module):
    """Knows how many samples a minibatch has."""

    def forward(self, values: Tensor) -> Tensor:
        return values.view(6, 5)


def whole_minibatches() -> nn.Module:
    return nn.Sequential(WholeMinibatches(), nn.Linear(5, 3))


class Table:
    """`data32` as Hugging Face's `datasets` give it: rows are mappings, in a format, and columns have names."""

    def __init__(self, form: str | None = None) -> None:
        self._columns = dict(zip(("x", "y"), data32().tensors, strict=True))
        self._form = form

    def with_format(self, form: str) -> Table:
        return Table(form)

    def __len__(self) -> int:
        return len(self._columns["x"])

    def __getitem__(self, key: int | str) -> Any:
        if isinstance(key, str):
            return self._columns[key]
        row = {name: column[key] for name, column in self._columns.items()}
        return row if self._form == "torch" else {name: value.tolist() for name, value in row.items()}

    def __getitems__(self, keys: list[int]) -> list[Any]:
        return [self[key] for key in keys]


def table32() -> Table:
    return Table().with_format("torch")


def pairs_of_rows(rows: list[dict[str, Tensor]]) -> tuple[Tensor, Tensor]:
    return torch.stack([row["x"] for row in rows]), torch.stack([row["y"] for row in rows])


def by_first_input(data: TensorDataset, epoch: int) -> Iterator[int]:
    """Length bucketing in small: random buckets, each sorted by the first input; another direction each epoch."""
    indices = torch.randperm(len(data)).tolist()
    for start in range(0, len(indices), 16):
        bucket = indices[start : start + 16]
        yield from sorted(bucket, key=lambda index: float(data[index][0][0]), reverse=epoch % 2 == 1)


_UNSEEDED = np.random.default_rng(1)


def never_alike(data: TensorDataset) -> list[int]:
    """An order from a generator that no one seeds."""
    found: list[int] = _UNSEEDED.permutation(len(data)).tolist()
    return found


class TiedScores(nn.Module):
    """Scores by the weight of the embedding, and dropout in between; it is cut within its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.second = nn.Embedding(8, 6), nn.Linear(6, 6)
        self.first: nn.Module = nn.Linear(6, 6)
        self.drop, self.last = nn.Dropout(0.2), nn.Dropout(0.2)

    def forward(self, ids: Tensor) -> Tensor:
        """Of three classes."""
        value = self.drop(nn.functional.hardtanh(self.first(self.embedding(ids).mean(dim=1))))
        value = self.last(nn.functional.hardtanh(self.second(value)))
        scores: Tensor = value @ self.embedding.weight[:3].t()
        return scores


def tied_scores() -> nn.Module:
    return TiedScores()


def tied_rows() -> nn.Module:
    """The same, whose first layers compute a sample alike wherever it stands."""
    model = TiedScores()
    model.first = nn.LayerNorm(6)
    return model


class TiedInBetween(nn.Module):
    """A weight of a layer in the middle is used once more at the end; cut within its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.first, self.second = nn.Embedding(8, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, ids: Tensor) -> Tensor:
        """Of three classes."""
        value = torch.tanh(self.first(self.embedding(ids).mean(dim=1)))
        value = torch.tanh(self.second(value))
        scores: Tensor = value @ self.first.weight[:3].t()
        return scores


def tied_in_between() -> nn.Module:
    return TiedInBetween()
