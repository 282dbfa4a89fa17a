"""What is read from a follower's lines, with a program that prints them in place of `hetpipe submit`."""

from __future__ import annotations

import os
import sys

import pytest

from hetpipe.values.life_state import LifeState
from tests.e2e.box import _EPOCHS, _RESTARTED, _SAMPLES_PER_EPOCH, _judge
from tests.e2e.following import Failed, Follower, Progress, progress_of

TRAINS = (
    "t=96.3 state=running epoch=49 samples=69600/144200 samples_per_second=1146 eta_seconds=65.1 global_clock=578 D=1 "
    "vw0.clock=580 vw0.ahead=2 vw0.loss=0.003 vw1.clock=578 vw1.ahead=0 vw1.stage0.slower_than_planned=3.7"
)
ONE_STARTS = TRAINS.replace("vw0.clock=580 vw0.ahead=2", "vw0.state=starting vw0.clock=580")
"""What the table says of a virtual worker that does not train."""


def follower(*lines: str, output: str = "", end: str = "") -> Follower:
    code = (
        f"import sys, time\nfor line in {lines!r}: print(line, file=sys.stderr, flush=True)\nprint({output!r})\n{end}"
    )
    return Follower([sys.executable, "-c", code], os.environ)


def test_a_line_tells_who_trains() -> None:
    assert progress_of(TRAINS) == Progress(578, 69_600, {0: "", 1: ""})
    told = progress_of(ONE_STARTS)
    assert told is not None
    assert told.workers == {0: LifeState.STARTING, 1: ""}
    assert not told.all_train
    assert progress_of('t=113.6 state=running sentence="a new coordinator leads the job"') is None
    assert progress_of("t=115.1 event=evaluation epoch=61 clock=732 samples=355 accuracy=0.97") is None


@pytest.mark.processes
def test_what_was_told_before_does_not_count() -> None:
    lines = follower(TRAINS, ONE_STARTS, TRAINS.replace("global_clock=578", "global_clock=600"))
    try:
        first, _ = lines.wait_for("to train", lambda told: told.all_train, seconds=30)
        later, _ = lines.wait_for("to train on", lambda told: told.all_train, seconds=30, after=1)
        assert (first.global_clock, later.global_clock) == (578, 600)
    finally:
        lines.end()


@pytest.mark.processes
def test_waits_have_a_deadline_and_say_what_for() -> None:
    hangs = follower(ONE_STARTS, end="time.sleep(600)")
    try:
        hangs.wait_for("to begin", lambda told: not told.all_train, seconds=30)
        with pytest.raises(Failed, match=r"(?s)waited 0 s in vain for the job: to train on.*vw0\.state=starting"):
            hangs.wait_for("to train on", lambda told: told.all_train, seconds=0.05)
        with pytest.raises(Failed, match="did not end within 0 s"):
            hangs.result(seconds=0.05)
    finally:
        hangs.end()
    ends = follower(TRAINS, output='{"a": 1}')
    with pytest.raises(Failed, match="the job ended while this was waited for: to train on after the restart of redis"):
        ends.wait_for("to train on after the restart of redis", lambda _: False, seconds=30)
    assert ends.result(seconds=30) == '{"a": 1}\n'
    fails = follower(TRAINS, end="sys.exit(4)")
    with pytest.raises(Failed, match="ended with 4"):
        fails.result(seconds=30)


SAMPLES = _EPOCHS * _SAMPLES_PER_EPOCH
RESULT = {"eval": {"accuracy": 0.97}, "rewinds": 0, "deaths": {"0": 0}}
REPORT = {"complete": True, "violations": 0, "waves_applied_twice": 0, "torn_waves": 0, "samples": SAMPLES}


@pytest.mark.parametrize(
    ("result", "report", "sentence"),
    [
        ({"eval": {"accuracy": 0.1}}, {}, "accuracy 0.1000 is below"),
        ({"rewinds": 1}, {}, "went back to a checkpoint 1 times"),
        ({}, {"samples": SAMPLES - 1}, f"says {{'samples': {SAMPLES - 1}}}"),
        ({}, {"complete": False}, "says {'complete': False}"),
        ({}, {"violations": 1}, "says {'violations': 1}"),
    ],
)
def test_a_run_that_lost_something_does_not_pass(
    result: dict[str, object], report: dict[str, object], sentence: str
) -> None:
    _judge(RESULT, REPORT)
    with pytest.raises(Failed, match=sentence):
        _judge({**RESULT, **result}, {**REPORT, **report})


def test_each_container_of_a_run_is_restarted() -> None:
    from tests.deploy.test_image_and_compose import ONE_SHOT, SERVICES

    assert set(_RESTARTED) == set(SERVICES) - ONE_SHOT - {"agent-gpu"}
