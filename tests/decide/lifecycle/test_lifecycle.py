"""Every step of the table, and no other."""

from __future__ import annotations

import pytest

from hetpipe.decide.lifecycle.lifecycle import TABLE, JobStep, Lifecycle
from hetpipe.errors import InvalidTransition
from hetpipe.values.events import JobState

LEGAL = {
    *((state, "cluster_lacks", "pending") for state in ("submitted", "inspecting")),
    *((state, "cluster_ready", "inspecting") for state in ("submitted", "pending")),
    ("inspecting", "inspected", "planning"),
    ("planning", "prepared", "starting"),
    ("starting", "all_ready", "running"),
    *((state, "rewind", "planning") for state in ("starting", "running")),
    ("stopping", "rewind", "stopped"),
    ("running", "end_reached", "finished"),
    ("stopping", "end_reached", "finished"),
    ("running", "stop_reached", "stopped"),
    ("stopping", "stop_reached", "stopped"),
    *((state, "stop_asked", "stopping") for state in ("submitted", "pending", "inspecting", "planning", "starting")),
    ("running", "stop_asked", "stopping"),
    ("stopping", "stop_asked", "stopping"),
    *((state, "fail", "failed") for state in ("submitted", "pending", "inspecting", "planning", "starting")),
    ("running", "fail", "failed"),
    ("stopping", "fail", "failed"),
}


def test_the_table_is_total_over_the_states() -> None:
    assert set(TABLE) == set(JobState)


def test_exactly_these_steps_are_legal() -> None:
    steps = {(state, step, after) for state, row in TABLE.items() for step, after in row.items()}

    assert steps == LEGAL


def test_nothing_follows_an_end() -> None:
    assert all(not TABLE[state] for state in JobState if state.is_terminal)


@pytest.mark.parametrize("state", JobState)
@pytest.mark.parametrize("step", JobStep)
def test_an_illegal_step_raises_and_changes_nothing(state: JobState, step: JobStep) -> None:
    lifecycle = Lifecycle("digits")
    lifecycle.state = state
    if step in TABLE[state]:
        assert lifecycle.take(step, now=0.0) is TABLE[state][step]
    else:
        with pytest.raises(InvalidTransition, match=f"cannot take {step} when it is {state}"):
            lifecycle.take(step, now=0.0)
        assert lifecycle.state is state


def test_the_error_tells_the_story() -> None:
    lifecycle = Lifecycle("digits")
    lifecycle.take(JobStep.CLUSTER_READY, now=1.25)
    lifecycle.take(JobStep.FAIL, now=2.0)

    with pytest.raises(InvalidTransition) as caught:
        lifecycle.take(JobStep.INSPECTED, now=3.0)

    assert "submitted --cluster_ready--> inspecting at 1.2 s, inspecting --fail--> failed at 2.0 s" in str(caught.value)
