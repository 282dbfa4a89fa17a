"""One corruption per kind of violation under `wave`, each a small edit of the shipped clean history."""

from __future__ import annotations

from functools import partial

from hetpipe.checker import Kind
from tests.checker.corruption import (
    CLOCK_SHARD,
    FIRST_STAGE,
    LAST_STAGE,
    OTHER_SHARD,
    Corruption,
    find,
    move,
    record,
    register,
    remove,
)
from tests.checker.scenario import Scenario
from tests.checker.simulator import Histories, as_lines, simulate

CORRUPTIONS: dict[str, Corruption] = {}
_corruption = partial(register, CORRUPTIONS, Scenario())


def corrupted_lines(name: str) -> dict[str, list[str]]:
    """The lines of one shipped history: `clean`, or the name of a corruption."""
    histories = simulate(Scenario())
    if name != "clean":
        CORRUPTIONS[name].edit(histories)
    lines = as_lines(histories)
    if name == "malformed_line":
        lines[OTHER_SHARD][3] = lines[OTHER_SHARD][3][:40] + "\n"
    return lines


def _set_version(histories: Histories, p: int, **changes: object) -> None:
    """Change clock or local_through of every forward and backward of minibatch p of virtual worker 0."""
    for file in (FIRST_STAGE, LAST_STAGE):
        for event in ("forward", "backward"):
            record(histories, file, event=event, p=p).update(changes)


# -- which weights --


@_corruption(Kind.STALE_CLOCK, shipped=True)
def stale_clock(histories: Histories) -> None:
    _set_version(histories, 6, clock=0)


@_corruption(Kind.STALE_CLOCK)
def below_barrier(histories: Histories) -> None:
    for p in (7, 8):
        _set_version(histories, p, clock=1)


@_corruption(Kind.UNPUBLISHED_CLOCK, shipped=True)
def unpublished_clock(histories: Histories) -> None:
    publish = record(histories, CLOCK_SHARD, event="publish", clock=1)
    record(histories, FIRST_STAGE, event="forward", p=6)["t"] = float(str(publish["t"])) - 0.001


@_corruption(Kind.NOT_REQUIRED_CLOCK, Kind.CLOCK_SWITCH)
def clock_switch(histories: Histories) -> None:
    """Clock 1 from p = 5 on, one minibatch before the switch point."""
    _set_version(histories, 5, clock=1)
    for file in (FIRST_STAGE, LAST_STAGE):
        record(histories, file, event="forward", p=5)["t"] = 0.2


@_corruption(Kind.NOT_REQUIRED_CLOCK, Kind.CLOCK_BEYOND_LOCAL)
def clock_beyond_local(histories: Histories) -> None:
    _set_version(histories, 6, clock=3)
    for file in (FIRST_STAGE, LAST_STAGE):
        record(histories, file, event="forward", p=6)["t"] = 0.2


@_corruption(Kind.WRONG_LOCAL_THROUGH, shipped=True)
def wrong_local_through(histories: Histories) -> None:
    _set_version(histories, 4, local_through=1)


@_corruption(Kind.MIXED_VERSIONS, shipped=True)
def mixed_stages(histories: Histories) -> None:
    for event in ("forward", "backward"):
        record(histories, LAST_STAGE, event=event, p=6)["clock"] = 0


@_corruption(Kind.MIXED_VERSIONS, shipped=True)
def mixed_directions(histories: Histories) -> None:
    record(histories, FIRST_STAGE, event="backward", p=6)["clock"] = 2


@_corruption(Kind.UNPUBLISHED_PULL)
def unpublished_pull(histories: Histories) -> None:
    publish = record(histories, CLOCK_SHARD, event="publish", clock=3)
    record(histories, LAST_STAGE, event="pull", clock=3, shard=1)["t"] = float(str(publish["t"])) - 0.001


# -- the work of a stage --


@_corruption(Kind.MINIBATCH_MISSING)
def minibatch_missing(histories: Histories) -> None:
    remove(histories, LAST_STAGE, event="backward", p=3)


@_corruption(Kind.MINIBATCH_MISSING)
def minibatch_missing_on_stage(histories: Histories) -> None:
    remove(histories, LAST_STAGE, event="forward", p=8)


@_corruption(Kind.MINIBATCH_MISSING, Kind.SAMPLE_COUNT)
def minibatch_never_started(histories: Histories) -> None:
    for file in (FIRST_STAGE, LAST_STAGE):
        for event in ("forward", "backward", "step"):
            remove(histories, file, event=event, p=7)


@_corruption(Kind.MINIBATCH_TWICE)
def minibatch_twice(histories: Histories) -> None:
    position = find(histories, FIRST_STAGE, event="forward", p=3)
    histories[FIRST_STAGE].insert(position, dict(histories[FIRST_STAGE][position]))


@_corruption(Kind.MINIBATCH_ORDER)
def minibatch_order(histories: Histories) -> None:
    forward = find(histories, LAST_STAGE, event="forward", p=7)
    move(histories, LAST_STAGE, forward, forward + 2)


@_corruption(Kind.STEP_MISSING, shipped=True)
def step_missing(histories: Histories) -> None:
    remove(histories, FIRST_STAGE, event="step", p=3)


@_corruption(Kind.STEP_TWICE)
def step_twice(histories: Histories) -> None:
    position = find(histories, FIRST_STAGE, event="step", p=3)
    histories[FIRST_STAGE].insert(position, dict(histories[FIRST_STAGE][position]))


@_corruption(Kind.STEP_ORDER)
def step_order(histories: Histories) -> None:
    step = find(histories, FIRST_STAGE, event="step", p=7)
    move(histories, FIRST_STAGE, step, find(histories, FIRST_STAGE, event="step", p=8) + 1)


@_corruption(Kind.UPDATE_NOT_READY)
def update_not_ready(histories: Histories) -> None:
    forward = find(histories, FIRST_STAGE, event="forward", p=3)
    move(histories, FIRST_STAGE, forward, find(histories, FIRST_STAGE, event="step", p=1))


# -- waves --


@_corruption(Kind.WAVE_APPLIED_TWICE, shipped=True)
def wave_applied_twice(histories: Histories) -> None:
    position = find(histories, OTHER_SHARD, event="apply", vw=0, wave=1)
    histories[OTHER_SHARD].insert(position + 1, dict(histories[OTHER_SHARD][position]))


@_corruption(Kind.TORN_WAVE, shipped=True)
def torn_wave(histories: Histories) -> None:
    remove(histories, OTHER_SHARD, event="apply", vw=0, wave=1)


@_corruption(Kind.NEVER_APPLIED)
def never_applied(histories: Histories) -> None:
    for file in (CLOCK_SHARD, OTHER_SHARD):
        remove(histories, file, event="apply", vw=0, wave=1)


@_corruption(Kind.APPLIED_UNCOMMITTED)
def applied_uncommitted(histories: Histories) -> None:
    line = record(histories, OTHER_SHARD, event="apply", vw=0, wave=3)
    histories[OTHER_SHARD].append({**line, "wave": 4})


@_corruption(
    Kind.STAGED_UNCOMMITTED,
    Kind.PUBLISH_EARLY,
    Kind.APPLIED_UNCOMMITTED,
    Kind.SAMPLE_UNCOMMITTED,
    shipped=True,
)
def never_committed(histories: Histories) -> None:
    remove(histories, CLOCK_SHARD, event="commit", vw=1, wave=3)


@_corruption(Kind.COMMITTED_UNSTAGED)
def committed_unstaged(histories: Histories) -> None:
    remove(histories, OTHER_SHARD, event="staged", vw=1, wave=2, stage=1)


@_corruption(Kind.COMMIT_ORDER)
def commit_order(histories: Histories) -> None:
    """Waves 1 and 2 of virtual worker 0 are committed the wrong way round."""
    first = record(histories, CLOCK_SHARD, event="commit", vw=0, wave=1)
    second = record(histories, CLOCK_SHARD, event="commit", vw=0, wave=2)
    first["wave"], second["wave"] = 2, 1


@_corruption(Kind.COMMIT_EARLY)
def commit_early(histories: Histories) -> None:
    """Three waves of virtual worker 0 before clock 1 is published, with virtual worker 1 only one wave behind that."""
    publish = find(histories, CLOCK_SHARD, event="publish", clock=1)
    for wave in (2, 1):
        move(histories, CLOCK_SHARD, find(histories, CLOCK_SHARD, event="commit", vw=0, wave=wave), publish)


@_corruption(Kind.CLOCK_DISTANCE, shipped=True)
def clock_distance(histories: Histories) -> None:
    """Three waves of virtual worker 0 before the first one of virtual worker 1: a distance of 3 with D = 1."""
    first = find(histories, CLOCK_SHARD, event="commit", vw=1, wave=0)
    for wave in (2, 1, 0):
        move(histories, CLOCK_SHARD, find(histories, CLOCK_SHARD, event="commit", vw=0, wave=wave), first)


@_corruption(Kind.COMMIT_PAST_BARRIER)
def commit_past_barrier(histories: Histories) -> None:
    commit = find(histories, CLOCK_SHARD, event="commit", vw=0, wave=3)
    move(histories, CLOCK_SHARD, commit, find(histories, CLOCK_SHARD, event="publish", clock=3))


# -- clocks --


@_corruption(Kind.PUBLISH_EARLY, shipped=True)
def published_before_commit(histories: Histories) -> None:
    publish = find(histories, CLOCK_SHARD, event="publish", clock=2)
    move(histories, CLOCK_SHARD, publish, find(histories, CLOCK_SHARD, event="commit", vw=1, wave=1))


@_corruption(Kind.PUBLISH_EARLY)
def published_before_apply(histories: Histories) -> None:
    publish = record(histories, CLOCK_SHARD, event="publish", clock=1)
    apply = record(histories, OTHER_SHARD, event="apply", vw=1, wave=0)
    apply["t"] = float(str(publish["t"])) + 0.001


@_corruption(Kind.CLOCK_FELL, shipped=True)
def clock_fell(histories: Histories) -> None:
    position = find(histories, CLOCK_SHARD, event="publish", clock=3)
    histories[CLOCK_SHARD].insert(position + 1, {**histories[CLOCK_SHARD][position], "clock": 2})


@_corruption(Kind.CLOCK_REPEATED)
def clock_repeated(histories: Histories) -> None:
    position = find(histories, CLOCK_SHARD, event="publish", clock=3)
    histories[CLOCK_SHARD].insert(position + 1, dict(histories[CLOCK_SHARD][position]))


@_corruption(Kind.CLOCK_SKIPPED)
def clock_skipped(histories: Histories) -> None:
    remove(histories, CLOCK_SHARD, event="publish", clock=2)


@_corruption(Kind.BARRIER)
def barrier_behind(histories: Histories) -> None:
    line = record(histories, CLOCK_SHARD, event="barrier", clock=4)
    position = find(histories, CLOCK_SHARD, event="publish", clock=3)
    histories[CLOCK_SHARD].insert(position, {**line, "clock": 2, "reason": "stop"})


# -- samples --


@_corruption(Kind.SAMPLE_TWICE, Kind.SAMPLE_NEVER, shipped=True)
def sample_twice(histories: Histories) -> None:
    source = record(histories, CLOCK_SHARD, event="used", vw=0, wave=0)["indices"]
    target = record(histories, CLOCK_SHARD, event="used", vw=1, wave=2)["indices"]
    assert isinstance(source, list)
    assert isinstance(target, list)
    target[0] = source[0]


@_corruption(Kind.SAMPLE_NEVER, shipped=True)
def sample_never(histories: Histories) -> None:
    used = record(histories, CLOCK_SHARD, event="used", vw=1, wave=2)
    assert isinstance(used["indices"], list)
    used["indices"] = used["indices"][1:]
    record(histories, CLOCK_SHARD, event="commit", vw=1, wave=2)["samples"] = len(used["indices"])


@_corruption(Kind.SAMPLE_COUNT)
def sample_count(histories: Histories) -> None:
    record(histories, CLOCK_SHARD, event="commit", vw=1, wave=2)["samples"] = 3


@_corruption(Kind.SAMPLE_UNKNOWN, Kind.SAMPLE_NEVER)
def sample_of_other_epoch(histories: Histories) -> None:
    record(histories, CLOCK_SHARD, event="used", vw=1, wave=2)["epoch"] = 1


@_corruption(Kind.WRONG_TOTAL)
def wrong_total(histories: Histories) -> None:
    record(histories, CLOCK_SHARD, event="barrier", clock=4)["reason"] = "end"


@_corruption(Kind.PAST_END, Kind.WRONG_TOTAL)
def past_end(histories: Histories) -> None:
    """The run is stopped at clock 3, and everybody goes on."""
    record(histories, CLOCK_SHARD, event="barrier", clock=3)["reason"] = "end"
    remove(histories, CLOCK_SHARD, event="barrier", clock=4)


# -- membership and terms --


@_corruption(Kind.OLD_INCARNATION, shipped=True)
def commit_after_eviction(histories: Histories) -> None:
    position = find(histories, CLOCK_SHARD, event="commit", vw=1, wave=3)
    line = {key: histories[CLOCK_SHARD][position][key] for key in ("t", "host", "pid", "role", "term")}
    histories[CLOCK_SHARD].insert(position, {**line, "event": "evict", "vw": 1, "incarnation": 0, "clock": 3})


@_corruption(Kind.HANDOVER)
def handover_of_one_that_stays(histories: Histories) -> None:
    """`tests/numerics/test_members.py` has those of runs in which one leaves and others take over."""
    position = find(histories, CLOCK_SHARD, event="commit", vw=1, wave=3)
    line = {key: histories[CLOCK_SHARD][position][key] for key in ("t", "host", "pid", "role", "term")}
    fields = {"event": "handover", "vw": 1, "incarnation": 0, "clock": 3, "whole": 1}
    histories[CLOCK_SHARD].insert(position, {**line, **fields})


@_corruption(Kind.OLD_TERM)
def old_term(histories: Histories) -> None:
    record(histories, OTHER_SHARD, event="apply", vw=0, wave=2)["term"] = 0


@_corruption(Kind.MEMBERSHIP)
def stranger(histories: Histories) -> None:
    record(histories, FIRST_STAGE, event="pull", clock=3, shard=1)["vw"] = 7


@_corruption(Kind.MALFORMED_LINE, shipped=True)
def malformed_line(histories: Histories) -> None:
    """Cut as text, by `corrupted_lines`; here the line that loses its meaning is put in as an extra one."""
    histories[OTHER_SHARD].insert(3, dict(histories[OTHER_SHARD][3]))
