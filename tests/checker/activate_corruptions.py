"""What can be wrong where layers are inactive (`dynamic-models.md` §4)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from hetpipe.checker import Kind
from tests.checker.corruption import CLOCK_SHARD, FIRST_STAGE, LAST_STAGE, Corruption, record, register, remove
from tests.checker.scenario import Scenario
from tests.checker.simulator import Histories

ACTIVATE_CORRUPTIONS: dict[str, Corruption] = {}
_corruption = partial(register, ACTIVATE_CORRUPTIONS)

#: Six layers, three on each stage; even ones have their slice on the clock shard. Waves of two minibatches. From clock
#: 2 on the whole first stage is inactive.
CHANGING = Scenario(inactive=((0, (1, 4)), (2, (0, 1, 2)), (4, (2,))), num_samples=32, checkpoint_every=None)

#: Some layers are built anew: one of the last stage, and later some of both.
RENEWING = replace(CHANGING, inactive=((0, (1, 4)), (2, (0, 1, 2)), (3, (2,))), fresh=((2, (4,)), (3, (1, 3))))


@_corruption(CHANGING, Kind.ACTIVATE, Kind.INACTIVE_LAYERS, Kind.INACTIVE_STAGED, Kind.COMMITTED_UNSTAGED)
def other_layers_than_the_job_says(histories: Histories) -> None:
    record(histories, CLOCK_SHARD, event="activate", clock=2)["inactive"] = [0, 4, 5]


@_corruption(CHANGING, Kind.ACTIVATE, Kind.INACTIVE_LAYERS, Kind.INACTIVE_STAGED, Kind.COMMITTED_UNSTAGED)
def layers_that_nobody_recorded(histories: Histories) -> None:
    """Stages and shards act on a change that the clock shard never recorded."""
    remove(histories, CLOCK_SHARD, event="activate", clock=2)


@_corruption(CHANGING, Kind.ACTIVATE, Kind.INACTIVE_LAYERS, Kind.INACTIVE_STAGED, Kind.COMMITTED_UNSTAGED)
def layers_change_between_barriers(histories: Histories) -> None:
    record(histories, CLOCK_SHARD, event="activate", clock=2)["clock"] = 3


@_corruption(CHANGING, Kind.INACTIVE_LAYERS)
def a_forward_of_an_inactive_layer(histories: Histories) -> None:
    record(histories, FIRST_STAGE, event="forward", p=1)["inactive"] = []


@_corruption(CHANGING, Kind.INACTIVE_LAYERS)
def a_backward_without_an_active_layer(histories: Histories) -> None:
    record(histories, LAST_STAGE, event="backward", p=2)["inactive"] = [3, 4]


@_corruption(CHANGING, Kind.INACTIVE_LAYERS)
def an_update_with_the_layers_active_before(histories: Histories) -> None:
    record(histories, FIRST_STAGE, event="step", p=5)["inactive"] = [1]


@_corruption(CHANGING, Kind.INACTIVE_LAYERS)
def layers_of_another_stage_are_left_out(histories: Histories) -> None:
    record(histories, LAST_STAGE, event="forward", p=5)["inactive"] = [0, 1, 2]


@_corruption(CHANGING, Kind.INACTIVE_STAGED)
def a_slice_of_an_inactive_layer(histories: Histories) -> None:
    """Of layer 4, in place of none."""
    line = dict(record(histories, CLOCK_SHARD, event="staged", vw=0, stage=0, wave=0))
    histories[CLOCK_SHARD].insert(
        histories[CLOCK_SHARD].index(record(histories, CLOCK_SHARD, event="staged", vw=0, stage=0, wave=0)),
        {**line, "stage": 1, "slices": [2]},
    )


@_corruption(CHANGING, Kind.COMMITTED_UNSTAGED)
def an_active_layer_is_not_staged(histories: Histories) -> None:
    remove(histories, CLOCK_SHARD, event="staged", vw=0, stage=1, wave=2)


@_corruption(RENEWING, Kind.ACTIVATE, Kind.FRESH)
def other_layers_are_built_anew_than_the_job_says(histories: Histories) -> None:
    record(histories, CLOCK_SHARD, event="activate", clock=3)["fresh"] = [1]


@_corruption(RENEWING, Kind.ACTIVATE, Kind.FRESH)
def layers_are_built_anew_that_nobody_recorded(histories: Histories) -> None:
    del record(histories, CLOCK_SHARD, event="activate", clock=2)["fresh"]


@_corruption(RENEWING, Kind.FRESH)
def a_stage_goes_on_with_layers_as_they_were_left(histories: Histories) -> None:
    remove(histories, LAST_STAGE, event="fresh", clock=2)


@_corruption(RENEWING, Kind.FRESH)
def a_stage_builds_some_of_its_layers_only(histories: Histories) -> None:
    line = record(histories, LAST_STAGE, event="fresh", clock=3)
    line["layers"], line["digests"] = [], []


@_corruption(RENEWING, Kind.FRESH)
def a_stage_computes_before_it_has_built_them(histories: Histories) -> None:
    lines = histories[FIRST_STAGE]
    line = record(histories, FIRST_STAGE, event="fresh", clock=3)
    at = lines.index(line)
    computed = next(place for place in range(at, len(lines)) if lines[place]["event"] == "forward")
    lines.insert(computed, lines.pop(at))


@_corruption(RENEWING, Kind.FRESH)
def virtual_workers_build_other_weights(histories: Histories) -> None:
    record(histories, FIRST_STAGE, event="fresh", clock=3)["digests"] = ["0" * 32]
