"""Digits of hetpipe's own data set, drawn at other places, angles and sizes, as colour images [3 32 32]."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from examples.moved_digits import data

SIZE = 32


class Images:
    """Sample i is (image float32 [3 SIZE SIZE], class int64): a digit in a colour of its own."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self._images = images
        self._labels = labels

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"image {index} of {len(self)}")
        generator = torch.Generator().manual_seed(index)
        grey = functional.interpolate(self._images[index][None], size=(SIZE, SIZE), mode="bilinear")[0]
        colour = 0.5 + torch.rand(3, 1, 1, generator=generator)
        return grey * colour, self._labels[index]


def train_data() -> Images:
    """4326 images."""
    return Images(*data.train_data().tensors)


def eval_data() -> Images:
    """710 images, of other originals."""
    return Images(*data.eval_data().tensors)
