"""What a stage keeps besides activations: the counts of the memory model, and what waits for a norm."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from hetpipe.decide.planner.costs import MemoryModel
from hetpipe.decide.schedule.versions import VersionTable
from hetpipe.values.policies import WEIGHT_POLICIES, Schedule, WeightPolicy
from tests.decide.schedule.clockwork import Setting, turns


def test_copies_are_buffers_shards_gradients_and_slots() -> None:
    model = MemoryModel(weights="stash", minibatches_per_wave=4, optimizer_slots=2)
    assert [model.copies(stage, 4) for stage in range(4)] == [4 + 2 + 1 + 2, 3 + 5, 2 + 5, 1 + 5]
    alone = MemoryModel(weights="stash", minibatches_per_wave=4, optimizer_slots=2, with_shards=False)
    assert [alone.copies(stage, 4) for stage in range(4)] == [7, 6, 5, 4]


@pytest.mark.parametrize("weights", WEIGHT_POLICIES)
def test_an_average_grows_beside_the_new_gradient(weights: WeightPolicy) -> None:
    by_wave = weights in {"flush", "double_buffer"}
    assert MemoryModel(weights=weights, minibatches_per_wave=1).gradients == 1
    assert MemoryModel(weights=weights, minibatches_per_wave=4).gradients == (2 if by_wave else 1)
    assert MemoryModel(weights=weights, minibatches_per_wave=4, accumulate=2).gradients == 2


def test_gpipe_has_a_whole_wave_in_flight() -> None:
    model = MemoryModel(weights="flush", minibatches_per_wave=8, schedule="gpipe")
    assert [model.in_flight(stage, 3) for stage in range(3)] == [8, 8, 8]
    assert [model.copies(stage, 3) for stage in range(3)] == [1 + 2 + 2] * 3


@pytest.mark.parametrize("weights", WEIGHT_POLICIES)
def test_nobody_waits_for_a_norm_that_is_not_asked_for(weights: WeightPolicy) -> None:
    model = MemoryModel(weights=weights, minibatches_per_wave=4)
    assert [model.held_for_norm(stage, 4) for stage in range(4)] == [0, 0, 0, 0]


def kept_at_rest(setting: Setting, stage: int, rng: random.Random) -> Iterator[int]:
    """Weights and gradients at a stage after each action, where a norm is back as soon as the first stage is done.

    Weights as in `buffers_at_rest` of the versions' tests, but an update is made when its norm is there. Until then its
    gradient waits, and where the weights that a minibatch used decay, these do, too. A gradient that is not whole yet
    is there as well.
    """
    table = VersionTable(setting.weights, stage, setting.num_stages, setting.wave)
    every, count = table.minibatches_per_update, 5 * setting.wave
    for stages in turns(setting, count, rng):
        here = stages[stage]
        whole = here.backwarded // every * every
        newest = min(whole, stages[0].backwarded // every * every)
        kept_until = newest if setting.weights in {"wave", "vertical"} else here.backwarded
        used = {table.forward_through(p) for p in range(kept_until + 1, here.forwarded + 1)}
        to_come = {table.forward_through(p) for p in range(here.forwarded + 1, count + 1)}
        weights = {newest} | used | {through for through in to_come if through <= newest}
        yield len(weights) + (whole - newest) // every + (here.backwarded > whole)


def most_kept(setting: Setting, stage: int) -> int:
    return max(max(kept_at_rest(setting, stage, random.Random(seed))) for seed in range(30))


def with_clipping(setting: Setting) -> MemoryModel:
    return MemoryModel(
        weights=setting.weights,
        schedule=setting.schedule,
        minibatches_per_wave=setting.wave,
        waits_for_norm=True,
        with_shards=False,
    )


def settings_of(*policies: tuple[WeightPolicy, Schedule]) -> list[Setting]:
    return [
        Setting(weights=weights, schedule=schedule, num_stages=k, wave=n)
        for weights, schedule in policies
        for k, n in ((1, 1), (2, 2), (3, 3), (2, 3))
    ]


@pytest.mark.parametrize("setting", settings_of(("wave", "1f1b"), ("wave", "fifo"), ("vertical", "1f1b")), ids=str)
def test_weights_that_decay_wait_for_norms(setting: Setting) -> None:
    model = with_clipping(setting)
    for stage in range(setting.num_stages):
        # The model counts the gradient of the backward under way; on the first stage none waits beside it.
        at_rest = model.copies(stage, setting.num_stages) - (stage == 0)
        assert most_kept(setting, stage) == at_rest


@pytest.mark.parametrize(
    "setting", settings_of(("flush", "1f1b"), ("flush", "gpipe"), ("double_buffer", "1f1b")), ids=str
)
def test_an_average_waits_in_the_place_of_its_update(setting: Setting) -> None:
    model = with_clipping(setting)
    for stage in range(setting.num_stages):
        assert most_kept(setting, stage) <= model.copies(stage, setting.num_stages) - (setting.wave > 1)
