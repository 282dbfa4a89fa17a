"""What can be wrong where each virtual worker has its own number of minibatches per wave (`wsp.md` §10)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from hetpipe.checker import Kind
from tests.checker.corruption import (
    CLOCK_SHARD,
    FIRST_STAGE,
    LAST_STAGE,
    Corruption,
    record,
    register,
    remove,
)
from tests.checker.scenario import Scenario
from tests.checker.simulator import Histories

WAVE_CORRUPTIONS: dict[str, Corruption] = {}
_corruption = partial(register, WAVE_CORRUPTIONS)

#: Waves of 4 and of 1 minibatches, D = 1: worker 0 has 24 of 30 minibatches, in waves 0 to 5.
UNEQUAL = Scenario(waves=(4, 1), num_samples=60, checkpoint_every=None)
REJOINS = replace(UNEQUAL, evict_at=2)
OTHER_FIRST, OTHER_LAST = "stage-1-0-0.jsonl", "stage-1-0-1.jsonl"


def _set(histories: Histories, files: tuple[str, str], p: int, **changes: object) -> None:
    """Change every forward and backward of minibatch p of a worker."""
    for file in files:
        for event in ("forward", "backward"):
            record(histories, file, event=event, p=p).update(changes)


@_corruption(UNEQUAL, Kind.STALE_CLOCK)
def stale_for_its_own_wave(histories: Histories) -> None:
    """Minibatch 4 of the worker whose waves have 1 minibatch requires clock 2, which p = 20 of the other one does."""
    _set(histories, (OTHER_FIRST, OTHER_LAST), 4, clock=1)


@_corruption(UNEQUAL, Kind.NOT_REQUIRED_CLOCK, Kind.CLOCK_BEYOND_LOCAL, Kind.UNPUBLISHED_CLOCK, Kind.STALE_CLOCK)
def clock_of_the_other_s_wave(histories: Histories) -> None:
    """Minibatch 12 requires clock 1; with waves of 1 minibatch it would be far more."""
    _set(histories, (FIRST_STAGE, LAST_STAGE), 12, clock=3)
    for p in range(13, 25):
        _set(histories, (FIRST_STAGE, LAST_STAGE), p, clock=3)


@_corruption(UNEQUAL, Kind.WRONG_LOCAL_THROUGH)
def own_updates_by_the_other_s_wave(histories: Histories) -> None:
    """v(p) = p - 4, not p - 1."""
    _set(histories, (FIRST_STAGE, LAST_STAGE), 10, local_through=5)


@_corruption(UNEQUAL, Kind.STALE_CLOCK, Kind.CLOCK_SWITCH)
def switch_in_a_wave(histories: Histories) -> None:
    """Minibatch 13 is a switch point for waves of 1, not for waves of 4."""
    for p in (12, 13):
        _set(histories, (FIRST_STAGE, LAST_STAGE), p, clock=0 if p == 12 else 1)


@_corruption(UNEQUAL, Kind.SAMPLE_COUNT, Kind.WAVE_SHARE)
def wave_too_short(histories: Histories) -> None:
    """The commit of a wave of 4 minibatches counts 3."""
    record(histories, CLOCK_SHARD, event="commit", vw=0, wave=2)["samples"] = 6


@_corruption(UNEQUAL, Kind.SAMPLE_COUNT, Kind.WAVE_SHARE)
def wave_too_long(histories: Histories) -> None:
    """The commit of a wave of 1 minibatch counts 2."""
    record(histories, CLOCK_SHARD, event="commit", vw=1, wave=2)["samples"] = 4


@_corruption(UNEQUAL, Kind.MINIBATCH_MISSING, Kind.SAMPLE_COUNT, Kind.CLOCK_SWITCH)
def numbering_of_short_waves(histories: Histories) -> None:
    """A wave of 4 that ends after 3 minibatches, though no barrier follows."""
    for file in (FIRST_STAGE, LAST_STAGE):
        for event in ("forward", "backward", "step"):
            remove(histories, file, event=event, p=16)


@_corruption(UNEQUAL, Kind.SAMPLE_TWICE, Kind.SAMPLE_NEVER)
def sample_dealt_twice(histories: Histories) -> None:
    """A sample of the worker with long waves counts for the other one, too."""
    taken = record(histories, CLOCK_SHARD, event="used", vw=0, wave=1)["indices"]
    given = record(histories, CLOCK_SHARD, event="used", vw=1, wave=1)["indices"]
    assert isinstance(taken, list)
    assert isinstance(given, list)
    given[0] = taken[0]


@_corruption(REJOINS, Kind.WAVE_SIZE)
def another_number_than_the_job_has(histories: Histories) -> None:
    record(histories, CLOCK_SHARD, event="join", vw=1)["minibatches_per_wave"] = 2


@_corruption(REJOINS, Kind.WAVE_SIZE)
def no_number_of_its_own(histories: Histories) -> None:
    del record(histories, CLOCK_SHARD, event="join", vw=1)["minibatches_per_wave"]


@_corruption(UNEQUAL, Kind.MALFORMED_LINE)
def a_wave_of_no_minibatch(histories: Histories) -> None:
    fields = {"vw": 1, "incarnation": 0, "clock": 0, "num_stages": 2, "minibatches_per_wave": 0}
    histories[CLOCK_SHARD].insert(0, {**histories[CLOCK_SHARD][0], "event": "join", **fields})


@_corruption(replace(UNEQUAL, dealt_as=(1, 1)), Kind.WAVE_SHARE)
def dealt_out_of_proportion(_histories: Histories) -> None:
    """Both workers get the same number of minibatches."""
