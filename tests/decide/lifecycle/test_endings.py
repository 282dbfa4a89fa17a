"""Runs that end before their planned end, by `early_stopping` and `max_time`."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from hetpipe.decide.lifecycle.endings import early_end
from hetpipe.decide.lifecycle.exchange import RequestBarrier, StopRequested, Tick
from hetpipe.errors import JobError
from hetpipe.job.file import Job
from hetpipe.values.events import Evaluated, JobState, StateChanged, StopMode
from hetpipe.values.ids import Clock
from hetpipe.values.run import StageEvaluation
from tests.cli.fakes import small_job
from tests.server.coordinator.machine_driver import SHARDS, Driver

METRICS = {"accuracy": "accuracy", "ppl": "perplexity"}


def job_with(**rule: Any) -> Job:
    data = {"train": "tests.models:data32", "eval": "tests.models:data32"}
    return small_job(data=data, metrics=METRICS, early_stopping=rule)


def ended_after(rule: dict[str, Any], values: list[float]) -> int | None:
    """The number of evaluations after which the run ends; None: it goes on."""
    name, job = rule.get("metric", "loss"), job_with(**rule)
    found = [Evaluated(Clock(n), n, 46, {"loss": 1.0, name: value}) for n, value in enumerate(values, start=1)]
    ends = [n for n in range(len(found) + 1) if early_end(job, found[:n], running_seconds=1e6)]
    assert ends == list(range(ends[0], len(found) + 1))[: len(ends)] if ends else True
    return ends[0] if ends else None


@pytest.mark.parametrize(
    ("rule", "values", "after"),
    [
        ({"patience": 2}, [3, 2, 1, 1, 1], 5),
        ({"patience": 2}, [3, 2, 2.5, 1.5, 1.6], None),
        ({"patience": 1}, [1, 2], 2),
        ({"patience": 2, "min_delta": 0.5}, [3, 2.6, 2.6], 3),
        ({"patience": 2, "min_delta": 0.5}, [3, 2.4, 2.4], None),
        ({"patience": 2}, [math.nan, math.inf], 2),
        ({"patience": 2}, [math.nan, 2, math.nan], None),
        ({"metric": "accuracy", "patience": 1}, [0.5, 0.6, 0.6], 3),
        ({"metric": "accuracy", "patience": 1, "mode": "min"}, [0.5, 0.6], 2),
        ({"metric": "ppl", "patience": 1}, [9.0, 8.0, 8.5], 3),
    ],
)
def test_it_ends_after_so_many_evaluations_without_an_improvement(
    rule: dict[str, Any], values: list[float], after: int | None
) -> None:
    assert ended_after(rule, values) == after


def test_evaluations_of_a_part_do_not_count() -> None:
    whole = [Evaluated(Clock(n), n, 46, {"loss": float(n)}) for n in (1, 2)]
    parts = [replace(one, whole=False) for one in whole]
    assert early_end(job_with(patience=1), parts, running_seconds=0.0) == ""
    assert early_end(job_with(patience=1), whole, running_seconds=0.0) == (
        "loss was best, 1, in epoch 1, and 1 evaluations in a row were not better (`early_stopping`)"
    )


def test_the_time_of_training_is_bounded() -> None:
    job = small_job(max_time="90s")
    assert early_end(job, [], running_seconds=89.9) == ""
    assert early_end(job, [], running_seconds=90.0) == "it has trained for 90 s, and `max_time` is 90 s"


def test_what_is_not_evaluated_cannot_end_a_run() -> None:
    with pytest.raises(JobError, match=r"early_stopping: needs evaluations, which need `data.eval`"):
        small_job(early_stopping={})
    with pytest.raises(JobError, match=r"early_stopping\.metric: is accurcy, .* did you mean `accuracy`"):
        job_with(metric="accurcy")
    with pytest.raises(JobError, match=r"max_time: is 0.5s; use at least 1s"):
        small_job(max_time="500ms")


def driver_of(**changes: Any) -> Driver:
    driver = Driver(Job.model_validate({**Driver().job.model_dump(mode="json"), **changes}))
    return driver.to(JobState.RUNNING)


def test_a_run_whose_time_is_over_stops_at_a_barrier_and_is_finished() -> None:
    driver = driver_of(max_time="60s")
    driver.now = 59.0
    driver.feed(Tick())
    assert driver.states()[-1] == "running"
    driver.now = 61.0
    driver.feed(Tick())
    assert driver.states()[-1] == "stopping"
    assert driver.tasks(RequestBarrier) == [RequestBarrier(1, SHARDS[0])]  # type: ignore[arg-type]
    remark = driver.events(StateChanged)[-1].remark
    assert remark.startswith("the run ends early: it has trained for 6")
    driver.feed(Tick())
    assert len(driver.tasks(RequestBarrier)) == 1
    driver.all_done("checkpoint+stop")
    driver.wrap_up()
    assert driver.ended().state is JobState.FINISHED
    assert driver.ended().result is not None


def test_a_run_that_no_longer_gets_better_is_finished() -> None:
    data = {"train": "tests.models:data32", "eval": "tests.models:data32"}
    driver = driver_of(data=data, early_stopping={"patience": 1})
    for clock, loss in ((3, 1.0), (6, 2.0)):
        driver.report(0, 1, StageEvaluation(Clock(clock), 0, 1, {"loss": loss}))
        driver.report(1, 1, StageEvaluation(Clock(clock), 0, 9, {"loss": loss}))
        driver.feed(Tick())
    assert driver.states()[-1] == "stopping"
    driver.all_done("checkpoint+stop")
    driver.wrap_up()
    assert driver.ended().state is JobState.FINISHED


def test_a_user_who_stops_it_before_has_stopped_it() -> None:
    driver = driver_of(max_time="60s")
    driver.now = 10.0
    driver.feed(StopRequested(StopMode.CHECKPOINT))
    driver.all_done("checkpoint+stop")
    driver.wrap_up()
    assert driver.ended().state is JobState.STOPPED
