# ruff: noqa: NPY002, PLW0108 - the legacy functions are what such models call, and they look them up at each call
"""Forwards that draw from `random` and NumPy's global generator: every stage draws what the uncut model draws."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import partial
from random import random as imported_by_name
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hetpipe.model.description import from_plain, to_plain
from tests.model import zoo
from tests.model.harness import Subject, assert_cut_anywhere, differences

WIDTH = 6
MADE = (torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0)),)


def linears(count: int) -> nn.ModuleList:
    return nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(count)])


def subject_of(build: Callable[[], nn.Module]) -> Subject:
    """The model cut everywhere, after checks against the uncut one, with several seeds."""
    subject = Subject(build, MADE, loss=lambda output: output.square().mean())
    assert not differences(subject.uncut(MADE), subject.watched(MADE))
    for seed in range(3):
        with patch("tests.model.harness.SEED", seed):
            assert not differences(subject.uncut_with_the_seeds_of_stages(MADE), subject.stages((), MADE))
            assert_cut_anywhere(subject, MADE, at_most=2)
    return subject


def names_of(subject: Subject) -> list[str]:
    return [layer.name for layer in subject.layers]


class Masking(nn.Module):
    """Masks a random number of values, as SpecAugment does, between layers, and mixes samples, in training."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.embedding = linears(2), linears(2), nn.Parameter(torch.randn(()))

    def forward(self, value: Tensor) -> Tensor:
        for layer in self.first:
            value = layer(value).tanh()
        if self.training:
            mask = np.zeros(value.shape, dtype=bool)
            count = int(2.5 + np.random.rand(1).item())
            for row in mask:  # as often as there are samples: no stage may end there
                row[np.random.choice(np.arange(WIDTH), count, replace=False)] = True
            value = value.clone()
            value[torch.tensor(mask)] = self.embedding
        for layer in self.second:
            value = layer(value).tanh()
        if self.training:
            share = float(np.random.beta(0.4, 0.4))
            value = share * value + (1 - share) * value[torch.from_numpy(np.random.permutation(len(value)))]
        return value * random.gauss(1.0, 0.1)


def test_masks_and_mixtures_that_numpy_draws_are_the_same_on_every_stage() -> None:
    subject = subject_of(Masking)
    names = names_of(subject)
    assert {f"{part}.{index}" for part in ("first", "second") for index in range(2)} <= set(names)
    assert {"mul", "tanh@2"} <= set(names)
    again = from_plain(json.loads(json.dumps(to_plain(subject.cut.description))))
    assert again == subject.cut.description
    drawing = {each.__name__ for each in again.training.drawing_functions}
    assert {"rand", "choice", "beta", "permutation", "gauss"} <= drawing


class Skipping(nn.Module):
    """LayerDrop, with dropout of torch beside it."""

    def __init__(self, draw: Callable[[], float], share: float) -> None:
        super().__init__()
        self.entry, self.layers, self.head = nn.Linear(WIDTH, WIDTH), linears(4), nn.Linear(WIDTH, WIDTH)
        self.draw, self.share = draw, share

    def forward(self, value: Tensor) -> Tensor:
        value = self.entry(value)
        for layer in self.layers:
            if self.training and self.draw() < self.share:
                continue
            value = nn.functional.dropout(layer(value).tanh(), 0.3, self.training) + value
        result: Tensor = self.head(value)
        return result


@pytest.mark.parametrize(
    ("draw", "share"),
    [
        (lambda: random.random(), 0.5),
        (lambda: np.random.uniform(0, 1), 0.5),
        (lambda: float(np.random.rand(1)[0]), 0.0),
    ],
)
def test_layers_that_python_skips_at_random_are_cut_before_their_draws(draw: Callable[[], float], share: float) -> None:
    names = names_of(subject_of(lambda: Skipping(draw, share)))
    assert {f"layers.{index}" for index in range(4)} <= set(names)


class Choosing(nn.Module):
    """Another branch in each minibatch, between layers of every one."""

    def __init__(self, choose: Callable[[], int]) -> None:
        super().__init__()
        self.first, self.branches, self.last, self.choose = linears(2), linears(3), linears(1), choose

    def forward(self, value: Tensor) -> Tensor:
        for layer in self.first:
            value = layer(value).tanh()
        value = self.branches[self.choose()](value)
        for layer in self.last:
            value = layer(value).tanh()
        return value


@pytest.mark.parametrize(
    "choose",
    [
        lambda: random.randrange(3),
        lambda: random.sample([0, 1, 2], 1)[0],
        lambda: int(np.random.choice(3, p=[0.4, 0.3, 0.3])),
    ],
)
def test_branches_that_are_drawn_are_on_one_stage(choose: Callable[[], int]) -> None:
    names = names_of(subject_of(lambda: Choosing(choose)))
    assert "first.1" in names
    assert not [name for name in names if name.startswith("branches")]


class Whole(nn.Module):
    """Has numbers of its own, whose draws are no other module's."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = linears(2)

    def forward(self, value: Tensor) -> Tensor:
        for layer in self.layers:
            value = layer(value) * imported_by_name() + float(np.random.normal())
        return value


class Mixed(nn.Module):
    """Draws between modules that draw, that run whole, or that are under `torch.utils.checkpoint`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = linears(2), nn.ModuleList([Whole(), Whole()]), linears(2)

    def forward(self, value: Tensor) -> Tensor:
        for layer in self.first:
            value = nn.functional.dropout(layer(value), 0.2, self.training) * random.uniform(0.5, 1.5)
        for block in self.inner:
            value = block(value) + float(np.random.uniform())
        for layer in self.last:
            value = checkpoint(layer, value, use_reentrant=False) + random.random()
        return value


def test_draws_beside_modules_that_draw() -> None:
    subject = subject_of(Mixed)
    assert {"first.1", "inner.0", "inner.1"} <= set(names_of(subject))
    told = "with a function that it has imported by name"
    whole = [why for why in subject.cut.survey.whole if told in why]
    assert len(whole) == 2, "what is imported by name cannot be intercepted"
    assert all("test_python_draws.py" in why for why in whole)


def test_the_modules_are_as_they_were_after_a_forward() -> None:
    before = (random.random, random.choice, np.random.rand, np.random.choice)
    seen: list[Any] = []

    class Looking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = linears(2)

        def forward(self, value: Tensor) -> Tensor:
            seen.append(random.random)
            for layer in self.layers:
                value = layer(value) + random.random()
            return value

    subject = subject_of(Looking)
    assert seen[-1] is not before[0]
    assert (random.random, random.choice, np.random.rand, np.random.choice) == before
    assert len(names_of(subject)) >= 3


@pytest.mark.exhaustive
def test_wav2vec2_with_spec_augment_and_layer_drop_is_cut_between_its_layers() -> None:
    """Its masks, and the layers that its adapter skips, are drawn from NumPy."""
    build = partial(
        zoo.hugging_face, "AutoModelForCTC", "wav2vec2", vocab_size=20, hidden_size=16, num_hidden_layers=3,
        num_attention_heads=2, intermediate_size=32, conv_dim=(8, 8), conv_stride=(2, 2), conv_kernel=(3, 3),
        num_feat_extract_layers=2, num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, mask_time_length=2,
        mask_time_prob=0.3, mask_feature_length=2, mask_feature_prob=0.2, layerdrop=0.3, add_adapter=True,
        num_adapter_layers=2, output_hidden_size=16, ctc_zero_infinity=True,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    made = {
        "input_values": torch.randn(4, 200, generator=generator),
        "labels": torch.randint(1, 20, (4, 3), generator=generator),
    }
    subject = Subject(build, made)
    assert not differences(subject.uncut(made), subject.watched(made))
    names = names_of(subject)
    assert {f"wav2vec2.{part}.layers.{index}" for part in ("encoder", "adapter") for index in range(2)} <= set(names)
    for seed in range(4):
        with patch("tests.model.harness.SEED", seed):
            assert_cut_anywhere(subject, made, at_most=8)
