"""Handwritten digits: a small classifier, and hetpipe's bundled images cut into a training and an evaluation part.

Everything that a job file names is called without arguments. Shape suffixes: B images, P pixels (64, an image of
8 × 8), C classes (10).
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from hetpipe.datasets import load_digits

NUM_PIXELS = 64
NUM_CLASSES = 10
WIDTH = 128

PIXEL_MEAN, PIXEL_SCALE = 4.9, 6.0
"""Pixels are counts from 0 to 16; about their mean and standard deviation."""

EVAL_EVERY = 5
"""Of each class, every fifth image is for evaluation: a fixed split with the same mix of classes in both parts."""


def build() -> nn.Sequential:
    """The model, [B P] → [B C]: a chain of four layers, so it can be cut into one to four stages."""

    def block(num_in: int, num_out: int) -> nn.Sequential:
        return nn.Sequential(nn.Linear(num_in, num_out), nn.LayerNorm(num_out), nn.ReLU())

    return nn.Sequential(
        block(NUM_PIXELS, WIDTH),
        block(WIDTH, WIDTH),
        block(WIDTH, NUM_PIXELS),
        nn.Linear(NUM_PIXELS, NUM_CLASSES),
    )


def train_data() -> TensorDataset:
    """1442 pairs of an image (float32 [P]) and its digit (int64 scalar)."""
    images_BP, labels_B = _normalised_digits()
    chosen_B = ~is_for_evaluation(labels_B)
    return TensorDataset(images_BP[chosen_B], labels_B[chosen_B])


def eval_data() -> TensorDataset:
    """The 355 pairs that training never sees."""
    images_BP, labels_B = _normalised_digits()
    chosen_B = is_for_evaluation(labels_B)
    return TensorDataset(images_BP[chosen_B], labels_B[chosen_B])


def is_for_evaluation(labels_B: Tensor) -> Tensor:
    """True for every `EVAL_EVERY`-th image of each class; bool [B]."""
    seen_BC = functional.one_hot(labels_B, NUM_CLASSES).cumsum(dim=0)
    rank_within_class_B = seen_BC.gather(1, labels_B.unsqueeze(1)).squeeze(1)
    return rank_within_class_B % EVAL_EVERY == 0


def _normalised_digits() -> tuple[Tensor, Tensor]:
    images_BP, labels_B = load_digits()
    return (images_BP - PIXEL_MEAN) / PIXEL_SCALE, labels_B
