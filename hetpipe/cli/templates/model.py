"""The callables of the job file: the model and its data. None of them takes arguments.

An example to replace: classify points of two spirals.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.utils.data import TensorDataset


def build() -> nn.Sequential:
    """The model. Each entry of the nn.Sequential is a layer, and stages are runs of consecutive layers.

    A model of another kind has a method `layers()` that returns its modules in the order in which they run.
    """
    return nn.Sequential(
        nn.Sequential(nn.Linear(2, 64), nn.Tanh()),
        nn.Sequential(nn.Linear(64, 64), nn.Tanh()),
        nn.Sequential(nn.Linear(64, 64), nn.Tanh()),
        nn.Linear(64, 2),
    )


def train_data() -> TensorDataset:
    """A map-style dataset: len(dataset) samples, dataset[i] is a pair (input, target)."""
    return _spirals(num_points=2000, seed=0)


def eval_data() -> TensorDataset:
    """Points that training never sees."""
    return _spirals(num_points=500, seed=1)


def _spirals(num_points: int, seed: int) -> TensorDataset:
    # A generator of its own: a dataset must have the same samples in every process that creates it.
    generator = torch.Generator().manual_seed(seed)
    spiral = torch.randint(2, (num_points,), generator=generator)
    radius = torch.rand(num_points, generator=generator) * 2 + 0.2
    angle = radius * math.pi + spiral * math.pi
    points = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)
    return TensorDataset(points + torch.randn(num_points, 2, generator=generator) * 0.05, spiral)
