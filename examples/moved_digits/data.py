"""Hetpipe's bundled digits, each drawn anew several times at another place, angle and size.

The images of 8 × 8 become 16 × 16. How a sample is moved is drawn from a fixed seed, so every process and every run has
the same samples. The originals are divided as in `examples/digits`: nothing that is evaluated on was ever trained on,
moved or not.

Shape suffixes: B images, H and W pixels, R rows and C columns of an affine map.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import TensorDataset

from examples.digits import model as digits
from examples.moved_digits.model import SIZE

TRAIN_VARIANTS = 3
"""Samples made of each original."""
EVAL_VARIANTS = 2

MOST_TURNED_DEGREES = 20.0
MOST_MOVED_SHARE = 0.15
"""Of the edge, in each direction."""
LEAST_SCALE, MOST_SCALE = 0.75, 1.0

_ORIGINAL_SIZE = 8
_BACKGROUND = (0.0 - digits.PIXEL_MEAN) / digits.PIXEL_SCALE
_TRAIN_SEED, _EVAL_SEED = 1, 2


def train_data() -> TensorDataset:
    """4326 pairs of an image (float32 [1, 16, 16]) and its digit (int64 scalar)."""
    return _moved(digits.train_data(), TRAIN_VARIANTS, seed=_TRAIN_SEED)


def eval_data() -> TensorDataset:
    """710 pairs, made of other originals."""
    return _moved(digits.eval_data(), EVAL_VARIANTS, seed=_EVAL_SEED)


def _moved(originals: TensorDataset, num_variants: int, *, seed: int) -> TensorDataset:
    """Sample i is variant i // len(originals) of original i % len(originals)."""
    pixels_BP, labels_B = originals.tensors
    pixels_BP, labels_B = pixels_BP.repeat(num_variants, 1), labels_B.repeat(num_variants)
    images_BHW = pixels_BP.reshape(-1, _ORIGINAL_SIZE, _ORIGINAL_SIZE)
    maps_BRC = affine_maps(len(labels_B), seed=seed)
    return TensorDataset(draw(images_BHW, maps_BRC), labels_B)


def affine_maps(num_samples: int, *, seed: int) -> Tensor:
    """For each sample, where a point of the new image lies in the original; float32 [B 2 3], edges at −1 and 1."""
    draws_B4 = torch.rand(num_samples, 4, generator=torch.Generator().manual_seed(seed))
    angles_B = (2 * draws_B4[:, 0] - 1) * math.radians(MOST_TURNED_DEGREES)
    scales_B = LEAST_SCALE + (MOST_SCALE - LEAST_SCALE) * draws_B4[:, 1]
    # The edge is 2 long in these coordinates.
    shifts_B2 = (2 * draws_B4[:, 2:] - 1) * 2 * MOST_MOVED_SHARE
    cosines_B, sines_B = angles_B.cos() / scales_B, angles_B.sin() / scales_B
    turns_BRR = torch.stack([cosines_B, sines_B, -sines_B, cosines_B], dim=1).reshape(-1, 2, 2)
    # The digit's middle comes to `shifts`, so that point maps back to the original's middle.
    return torch.cat([turns_BRR, -turns_BRR @ shifts_B2.unsqueeze(2)], dim=2)


def draw(images_BHW: Tensor, maps_BRC: Tensor) -> Tensor:
    """The originals as the maps say, [B 8 8] → [B 1 16 16]; background where there was nothing."""
    grid_BHW2 = functional.affine_grid(maps_BRC, [len(images_BHW), 1, SIZE, SIZE], align_corners=False)
    above_B1HW = (images_BHW - _BACKGROUND).unsqueeze(1)
    return functional.grid_sample(above_B1HW, grid_BHW2, align_corners=False) + _BACKGROUND
