"""Enlarged, turned and moved digits, with two kinds of labels: which digit it is, and whether it has a hole."""

from __future__ import annotations

import torch
from torch import Tensor

from examples.moved_digits import data

HOLES = (0, 6, 8, 9)


class Images:
    """Sample i is {"pixel_values": image float32 [1 16 16], "labels": class int64}."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images = images
        self.labels = labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"pixel_values": self.images[index], "labels": self.labels[index]}


def digits() -> Images:
    """4326 images with their digits, for the training before."""
    return Images(*data.train_data().tensors)


def train_data() -> Images:
    """1442 images: does the digit have a hole?"""
    images = digits()
    return _with_holes(Images(images.images[:1442], images.labels[:1442]))


def eval_data() -> Images:
    """710 images, of originals that neither training has."""
    return _with_holes(Images(*data.eval_data().tensors))


def _with_holes(images: Images) -> Images:
    return Images(images.images, torch.isin(images.labels, torch.tensor(HOLES)).long())
