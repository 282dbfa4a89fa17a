"""Durations in a job file, and their bounds."""

from __future__ import annotations

from datetime import timedelta

import pytest

from hetpipe.errors import JobError
from hetpipe.job.file import Job, load_job
from hetpipe.job.survive import duration_of, duration_text
from tests.server.coordinator.builders import BASE


@pytest.mark.parametrize(
    ("text", "seconds"), [("500ms", 0.5), ("90s", 90.0), ("1.5min", 90.0), ("2 h", 7200.0), ("0s", 0.0)]
)
def test_a_duration_has_a_unit(text: str, seconds: float) -> None:
    assert duration_of(text) == timedelta(seconds=seconds)
    assert duration_of(duration_text(timedelta(seconds=seconds))) == timedelta(seconds=seconds)


@pytest.mark.parametrize(
    "given", [60, 1.5, True, "60", "s", "-1s", "1d", "1e3s", "9999999999s", "1s 1s", [], "\u0661s"]
)
def test_what_has_none_is_no_duration(given: object) -> None:
    with pytest.raises(JobError, match=r"survive.stall: must be a number with a unit \(ms, s, min or h\)"):
        Job(**{**BASE, "survive": {"stall": given}})


def test_a_job_travels_with_its_durations() -> None:
    job = load_job(BASE, ["survive.stall=2min", "survive.restarts=0", "survive.absence=500ms"])

    assert job.model_dump(mode="json")["survive"] == {
        "stall": "120s",
        "restarts": 0,
        "backoff": "30s",
        "absence": "0.5s",
        "straggler": 2.0,
        "patience_waves": 5,
        "least_gain": 0.2,
    }
    assert Job(**job.model_dump(mode="json")) == job
    assert Job(**job.model_dump()) == job


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("stall", "1s", "must be from 7s to 1h, not 1s"),
        ("stall", "2h", "must be from 7s to 1h, not 7200s"),
        ("backoff", "3601s", "must be from 0s to 1h, not 3601s"),
        ("absence", "25h", "must be from 0s to 24h, not 90000s"),
        ("restarts", "-1", "must be at least 0, not -1"),
        ("restarts", "1001", "must be at most 1000, not 1001"),
    ],
)
def test_bounds_are_told(key: str, value: str, message: str) -> None:
    with pytest.raises(JobError) as caught:
        load_job(BASE, [f"survive.{key}={value}"])

    assert str(caught.value) == f"survive.{key}: {message}"


@pytest.mark.parametrize("factor", [0.0, 1.1, 1000.0])
def test_how_much_longer_a_straggler_takes(factor: float) -> None:
    assert Job(**{**BASE, "survive": {"straggler": factor}}).survive.straggler == factor


@pytest.mark.parametrize("factor", [-1.0, 0.5, 1.0, 1.09, 1001.0])
def test_what_is_no_such_factor(factor: float) -> None:
    with pytest.raises(JobError, match=r"survive.straggler: must be 0, or from 1.1 to 1000, not"):
        Job(**{**BASE, "survive": {"straggler": factor}})
