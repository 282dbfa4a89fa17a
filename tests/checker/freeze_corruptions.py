"""What can be wrong where layers are frozen (`freezing.md` §4)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from hetpipe.checker import Kind
from tests.checker.corruption import CLOCK_SHARD, FIRST_STAGE, LAST_STAGE, Corruption, find, record, register, remove
from tests.checker.scenario import Scenario
from tests.checker.simulator import Histories

FREEZE_CORRUPTIONS: dict[str, Corruption] = {}
_corruption = partial(register, FREEZE_CORRUPTIONS)

#: Six layers, three on each stage: one is frozen from the start, after the first epoch the whole first stage, after the
#: second one layer more. An epoch has four waves of two minibatches for each of two workers.
FROZEN = Scenario(frozen=((0, 1), (1, 3), (2, 4)), epochs=3, num_samples=32, checkpoint_every=None)

#: The same by norms: half of the five that are trained, and half of the three.
DECIDED = replace(FROZEN, alpha="1/2")


@_corruption(DECIDED, Kind.FREEZE)
def another_layer_has_the_least_norm(histories: Histories) -> None:
    """The first one that is trained: nothing may freeze."""
    record(histories, CLOCK_SHARD, event="norms", clock=4, vw=1)["squares"] = [3.0, 4.0, 5.0, 6.0, 99.0]


@_corruption(DECIDED, Kind.FREEZE)
def norms_without_a_trained_layer(histories: Histories) -> None:
    for vw in (0, 1):
        line = record(histories, CLOCK_SHARD, event="norms", clock=8, vw=vw)
        line.update(layers=[3, 4], squares=[5.0, 0.5])


@_corruption(DECIDED, Kind.FREEZE)
def no_norms_where_they_decide(histories: Histories) -> None:
    for vw in (0, 1):
        remove(histories, CLOCK_SHARD, event="norms", clock=4, vw=vw)


@_corruption(DECIDED, Kind.FREEZE)
def norms_of_one_virtual_worker_alone(histories: Histories) -> None:
    """They decide the same, but not by all gradients."""
    remove(histories, CLOCK_SHARD, event="norms", clock=8, vw=1)


@_corruption(DECIDED, Kind.FREEZE)
def norms_twice(histories: Histories) -> None:
    position = find(histories, CLOCK_SHARD, event="norms", clock=8, vw=1)
    histories[CLOCK_SHARD].insert(position, dict(histories[CLOCK_SHARD][position]))


@_corruption(DECIDED, Kind.FREEZE, Kind.FROZEN_COUNT, Kind.FROZEN_TRAINED)
def more_layers_than_norms_allow(histories: Histories) -> None:
    """α·3 is 1.5: at most four layers may be frozen."""
    record(histories, CLOCK_SHARD, event="freeze", clock=8).update(frozen=5, layers=5)


@_corruption(FROZEN, Kind.FREEZE, Kind.FROZEN_COUNT, Kind.FROZEN_TRAINED)
def too_many_layers_are_frozen(histories: Histories) -> None:
    record(histories, CLOCK_SHARD, event="freeze", clock=0).update(frozen=3, layers=3)


@_corruption(FROZEN, Kind.FREEZE, Kind.FROZEN_COUNT, Kind.MINIBATCH_MISSING, Kind.STEP_MISSING, Kind.COMMITTED_UNSTAGED)
def frozen_layers_are_trained_again(histories: Histories) -> None:
    record(histories, CLOCK_SHARD, event="freeze", clock=8).update(frozen=1, layers=1)


@_corruption(FROZEN, Kind.FREEZE)
def other_layers_than_those_of_the_model(histories: Histories) -> None:
    """F counts layers with parameters; in this model all have some."""
    record(histories, CLOCK_SHARD, event="freeze", clock=12)["layers"] = 5


@_corruption(FROZEN, Kind.FREEZE, Kind.FROZEN_COUNT, Kind.COMMITTED_UNSTAGED, Kind.MINIBATCH_MISSING, Kind.STEP_MISSING)
def layers_that_nobody_froze(histories: Histories) -> None:
    """Stages and shards act on frozen layers that the clock shard never recorded."""
    remove(histories, CLOCK_SHARD, event="freeze", clock=4)


@_corruption(FROZEN, Kind.FREEZE, Kind.FROZEN_COUNT, Kind.COMMITTED_UNSTAGED)
def layers_are_frozen_between_barriers(histories: Histories) -> None:
    record(histories, CLOCK_SHARD, event="freeze", clock=8)["clock"] = 9


@_corruption(FROZEN, Kind.FROZEN_COUNT)
def a_forward_with_the_layers_frozen_before(histories: Histories) -> None:
    record(histories, LAST_STAGE, event="forward", p=9)["frozen"] = 1


@_corruption(FROZEN, Kind.FROZEN_COUNT)
def an_update_with_fewer_frozen_layers(histories: Histories) -> None:
    record(histories, LAST_STAGE, event="step", p=12)["frozen"] = 1


@_corruption(FROZEN, Kind.FROZEN_TRAINED)
def a_backward_of_frozen_layers(histories: Histories) -> None:
    position = find(histories, FIRST_STAGE, event="forward", p=10)
    line = histories[FIRST_STAGE][position]
    histories[FIRST_STAGE].insert(position + 1, {**line, "event": "backward"})


@_corruption(FROZEN, Kind.FROZEN_TRAINED)
def an_update_of_frozen_layers(histories: Histories) -> None:
    position = find(histories, FIRST_STAGE, event="forward", p=10)
    line = {
        key: value for key, value in histories[FIRST_STAGE][position].items() if key not in ("clock", "local_through")
    }
    histories[FIRST_STAGE].insert(position + 1, {**line, "event": "step"})


@_corruption(FROZEN, Kind.FROZEN_TRAINED)
def a_slice_of_a_frozen_layer(histories: Histories) -> None:
    """Of layer 0, beside that of layer 2."""
    record(histories, CLOCK_SHARD, event="staged", vw=0, stage=0, wave=0)["slices"] = [0, 1]


@_corruption(FROZEN, Kind.COMMITTED_UNSTAGED)
def a_trained_layer_is_not_staged(histories: Histories) -> None:
    remove(histories, CLOCK_SHARD, event="staged", vw=0, stage=1, wave=5)
