"""Data sets of Hugging Face's `datasets`, made in memory; few tests import that package."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tests import models

if TYPE_CHECKING:
    import datasets


def samples() -> list[dict[str, Tensor]]:
    """Those of `tests.models:data32`, as mappings of the arguments of `tests.models:own_loss`."""
    return [{"value": inputs[:4], "labels": target} for inputs, target in zip(*models.data32().tensors, strict=True)]


def rows() -> datasets.Dataset:
    """`samples` as a table, whose rows are tensors."""
    import datasets

    columns = {name: [sample[name].tolist() for sample in samples()] for name in ("value", "labels")}
    return datasets.Dataset.from_dict(columns).with_format("torch")


def augmented_rows() -> datasets.Dataset:
    """The same, moved by chance when they are read."""
    return rows().with_transform(_move)


def _move(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
    values = [torch.tensor(value) + 0.1 * torch.rand(len(value)) for value in batch["value"]]
    return {"value": values, "labels": batch["labels"]}


def stream() -> datasets.IterableDataset:
    """The same one after the other, from several shards as large sets have them."""
    return rows().to_iterable_dataset(num_shards=3)


def shuffled_stream() -> datasets.IterableDataset:
    """In another order in each epoch, by its own means: of the shards, and in a buffer."""
    return stream().shuffle(seed=5, buffer_size=10)
