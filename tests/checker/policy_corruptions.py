"""What can be wrong under the other weight policies, schedules and kinds of synchronisation."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from hetpipe.checker import Kind
from tests.checker.corruption import (
    CLOCK_SHARD,
    FIRST_STAGE,
    LAST_STAGE,
    Corruption,
    find,
    move,
    record,
    register,
    remove,
)
from tests.checker.scenario import Scenario
from tests.checker.simulator import Histories

POLICY_CORRUPTIONS: dict[str, Corruption] = {}
_corruption = partial(register, POLICY_CORRUPTIONS)

#: The papers' own setting, two stages: 15 minibatches, four to a wave, a barrier behind the third wave.
WAVE = Scenario(num_stages=(2,), num_shards=1, minibatches_per_wave=4, sync="none", deterministic=False)
STASH, VERTICAL, PREDICT = (replace(WAVE, weights=weights) for weights in ("stash", "vertical", "predict"))
DOUBLE_BUFFER, FLUSH = (replace(WAVE, weights=weights) for weights in ("double_buffer", "flush"))
GPIPE = replace(FLUSH, schedule="gpipe")
REPLICAS = replace(FLUSH, sync="allreduce", num_stages=(2, 2), num_samples=58)
WITH_SHARDS = replace(STASH, sync="wsp", num_stages=(2, 2), num_shards=2, num_samples=58, staleness=0)


# -- the table's versions --


@_corruption(STASH, Kind.WRONG_LOCAL_THROUGH, Kind.NOT_NEWEST)
def one_version_on_all_stages(histories: Histories) -> None:
    """The last stage computes with what the first one has, as under vertical sync."""
    for event in ("forward", "backward"):
        record(histories, LAST_STAGE, event=event, p=6)["local_through"] = 4


@_corruption(VERTICAL, Kind.WRONG_LOCAL_THROUGH)
def newest_of_each_stage(histories: Histories) -> None:
    """The last stage computes with its newest weights, as without vertical sync."""
    for event in ("forward", "backward"):
        record(histories, LAST_STAGE, event=event, p=6)["local_through"] = 5


@_corruption(PREDICT, Kind.WRONG_LOCAL_THROUGH, Kind.NOT_NEWEST)
def backward_on_stashed_weights(histories: Histories) -> None:
    record(histories, FIRST_STAGE, event="backward", p=6)["local_through"] = 4


@_corruption(STASH, Kind.WRONG_LOCAL_THROUGH)
def backward_on_current_weights(histories: Histories) -> None:
    record(histories, FIRST_STAGE, event="backward", p=6)["local_through"] = 5


@_corruption(PREDICT, Kind.WRONG_LOCAL_THROUGH, Kind.UPDATE_NOT_READY)
def updates_not_made_yet(histories: Histories) -> None:
    """Weights that are predicted are not weights with updates to come."""
    record(histories, FIRST_STAGE, event="forward", p=6)["local_through"] = 5


@_corruption(replace(STASH, accumulate=2), Kind.WRONG_LOCAL_THROUGH, Kind.UPDATE_NOT_READY)
def half_an_update(histories: Histories) -> None:
    for event in ("forward", "backward"):
        record(histories, FIRST_STAGE, event=event, p=7)["local_through"] = 5


@_corruption(DOUBLE_BUFFER, Kind.WRONG_LOCAL_THROUGH, Kind.UPDATE_NOT_READY)
def newest_wave_of_two(histories: Histories) -> None:
    """The second wave on the update of the first, for which 2BW does not wait."""
    for file in (FIRST_STAGE, LAST_STAGE):
        for event in ("forward", "backward"):
            record(histories, file, event=event, p=5)["local_through"] = 4


@_corruption(WITH_SHARDS, Kind.MIXED_VERSIONS)
def another_clock_on_the_last_stage(histories: Histories) -> None:
    for event in ("forward", "backward"):
        record(histories, LAST_STAGE, event=event, p=8)["clock"] = 0


@_corruption(FLUSH, Kind.NOT_REQUIRED_CLOCK)
def newer_clock_without_shards(histories: Histories) -> None:
    for p in range(9, 13):
        for file in (FIRST_STAGE, LAST_STAGE):
            for event in ("forward", "backward"):
                record(histories, file, event=event, p=p)["clock"] = 1


KEPT = Scenario(num_samples=58, staleness=2, pull="required", checkpoint_every=None, minibatches_per_wave=2)
KEPT_NEWEST = replace(KEPT, deterministic=False, seed=1)


def _uses(histories: Histories, first: int, last: int, clock: int) -> None:
    """Virtual worker 0 starts these minibatches with `clock`."""
    for p in range(first, last + 1):
        for file in (FIRST_STAGE, LAST_STAGE):
            for event in ("forward", "backward"):
                record(histories, file, event=event, p=p)["clock"] = clock


@_corruption(KEPT, Kind.NOT_REQUIRED_CLOCK, Kind.NEEDLESS_PULL)
def weights_pulled_for_a_wave_that_could_keep_them(histories: Histories) -> None:
    """D = 2: clock 0 is good enough through minibatch 7, and this worker takes 1 for 6 to 9."""
    _uses(histories, 6, 9, 1)


@_corruption(KEPT, Kind.STALE_CLOCK, Kind.CLOCK_SWITCH)
def weights_kept_for_a_minibatch_too_long(histories: Histories) -> None:
    """Minibatch 8 requires clock 1."""
    _uses(histories, 8, 8, 0)


@_corruption(KEPT_NEWEST, Kind.NEEDLESS_PULL)
def weights_pulled_though_the_old_ones_would_do(histories: Histories) -> None:
    """Where timing decides which clock is pulled, when one is pulled is decided all the same."""
    _uses(histories, 6, 7, 1)


# -- updates --


@_corruption(VERTICAL, Kind.SKIPPED_APART)
def an_update_skipped_on_one_stage(histories: Histories) -> None:
    record(histories, LAST_STAGE, event="step", p=6).update(event="skip", scale=1024)


@_corruption(VERTICAL, Kind.SKIPPED_APART)
def an_update_skipped_at_two_scales(histories: Histories) -> None:
    for file, scale in ((FIRST_STAGE, 512), (LAST_STAGE, 1024)):
        record(histories, file, event="step", p=6).update(event="skip", scale=scale)


@_corruption(REPLICAS, Kind.SKIPPED_APART)
def an_update_skipped_by_one_replica(histories: Histories) -> None:
    for file in (FIRST_STAGE, LAST_STAGE):
        record(histories, file, event="step", p=4).update(event="skip", scale=1024)


@_corruption(replace(VERTICAL, accumulate=2), Kind.STEP_UNDUE)
def update_of_half_a_group(histories: Histories) -> None:
    step = find(histories, FIRST_STAGE, event="step", p=4)
    backward = find(histories, FIRST_STAGE, event="backward", p=3)
    histories[FIRST_STAGE].insert(backward + 1, {**histories[FIRST_STAGE][step], "p": 3})


@_corruption(replace(STASH, accumulate=2), Kind.STEP_MISSING)
def update_of_a_short_group_missing(histories: Histories) -> None:
    """Minibatch 15 is the last before the barrier, and alone in its group."""
    remove(histories, LAST_STAGE, event="step", p=15)


@_corruption(FLUSH, Kind.STEP_MISSING)
def update_of_a_wave_missing(histories: Histories) -> None:
    remove(histories, LAST_STAGE, event="step", p=8)


@_corruption(STASH, Kind.STEP_TWICE)
def update_made_twice(histories: Histories) -> None:
    step = find(histories, FIRST_STAGE, event="step", p=3)
    histories[FIRST_STAGE].insert(step, dict(histories[FIRST_STAGE][step]))


@_corruption(REPLICAS, Kind.REPLICA_AHEAD)
def update_without_the_other_replica(histories: Histories) -> None:
    step = record(histories, FIRST_STAGE, event="step", p=4)
    other = record(histories, "stage-1-0-0.jsonl", event="backward", p=4)
    step["t"] = float(str(other["t"])) - 0.001


# -- the order of a stage --


@_corruption(STASH, Kind.NOT_NEWEST, Kind.BACKWARD_EARLY)
def older_updates_than_the_stage_has(histories: Histories) -> None:
    """A forward is held up, a backward goes on, and the forward keeps to the version of the table."""
    forward = find(histories, FIRST_STAGE, event="forward", p=6)
    move(histories, FIRST_STAGE, forward, find(histories, FIRST_STAGE, event="step", p=5) + 1)


@_corruption(DOUBLE_BUFFER, Kind.BACKWARD_EARLY)
def backward_before_a_forward_that_is_due(histories: Histories) -> None:
    """The same where the version does not change: 1F1B that is not strict."""
    forward = find(histories, FIRST_STAGE, event="forward", p=6)
    move(histories, FIRST_STAGE, forward, find(histories, FIRST_STAGE, event="backward", p=5) + 1)


@_corruption(DOUBLE_BUFFER, Kind.IN_FLIGHT)
def one_more_in_flight(histories: Histories) -> None:
    forward = find(histories, FIRST_STAGE, event="forward", p=3)
    move(histories, FIRST_STAGE, forward, find(histories, FIRST_STAGE, event="backward", p=1))


@_corruption(FLUSH, Kind.IN_FLIGHT)
def a_wave_in_flight_under_1f1b(histories: Histories) -> None:
    forward = find(histories, FIRST_STAGE, event="forward", p=3)
    move(histories, FIRST_STAGE, forward, find(histories, FIRST_STAGE, event="backward", p=1))


@_corruption(GPIPE, Kind.BACKWARD_EARLY)
def backward_before_the_last_forward(histories: Histories) -> None:
    backward = find(histories, FIRST_STAGE, event="backward", p=1)
    move(histories, FIRST_STAGE, backward, find(histories, FIRST_STAGE, event="forward", p=4))


@_corruption(FLUSH, Kind.NOT_DRAINED, Kind.UPDATE_NOT_READY)
def next_wave_before_the_drain(histories: Histories) -> None:
    forward = find(histories, FIRST_STAGE, event="forward", p=5)
    move(histories, FIRST_STAGE, forward, find(histories, FIRST_STAGE, event="backward", p=4))


@_corruption(STASH, Kind.NOT_DRAINED)
def not_drained_at_a_barrier(histories: Histories) -> None:
    forward = find(histories, FIRST_STAGE, event="forward", p=13)
    move(histories, FIRST_STAGE, forward, find(histories, FIRST_STAGE, event="backward", p=12))


@_corruption(WAVE, Kind.OUT_OF_ORDER)
def forwards_out_of_order(histories: Histories) -> None:
    forward = find(histories, LAST_STAGE, event="forward", p=2)
    move(histories, LAST_STAGE, forward, find(histories, LAST_STAGE, event="forward", p=1))


@_corruption(GPIPE, Kind.OUT_OF_ORDER)
def backwards_out_of_order(histories: Histories) -> None:
    backward = find(histories, LAST_STAGE, event="backward", p=2)
    move(histories, LAST_STAGE, backward, find(histories, LAST_STAGE, event="backward", p=1))


# -- no shards --


@_corruption(STASH, Kind.NO_SLICES)
def pull_without_shards(histories: Histories) -> None:
    forward = record(histories, FIRST_STAGE, event="forward", p=13)
    pull = {"event": "pull", "shard": 0, "vw": 0, "stage": 0, "clock": 3}
    who = {key: forward[key] for key in ("t", "host", "pid", "role", "term")}
    histories[FIRST_STAGE].append({**who, **pull})


@_corruption(REPLICAS, Kind.NO_SLICES)
def staged_without_shards(histories: Histories) -> None:
    commit = record(histories, CLOCK_SHARD, event="commit", vw=1, wave=1)
    staged = {"event": "staged", "vw": 1, "incarnation": 0, "stage": 0, "wave": 1, "shard": 0, "slices": [0]}
    who = {key: commit[key] for key in ("t", "host", "pid", "role", "term")}
    histories[CLOCK_SHARD].insert(0, {**who, **staged})
