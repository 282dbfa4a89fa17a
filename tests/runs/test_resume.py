"""What a resumed run may change, and when there is nothing to resume."""

from __future__ import annotations

from typing import Any

import pytest

from hetpipe.errors import JobError, UserError
from hetpipe.runs.resume import check_not_finished, check_resumed
from hetpipe.values.ids import Clock
from hetpipe.values.sync import Progress
from tests.cli.fakes import small_job


@pytest.mark.parametrize(
    ("path", "change"),
    [
        ("model", {"model": "tests.models:mlp64"}),
        ("data.train", {"data.train": "tests.models:data64"}),
        ("data.length", {"data.length": 40}),
        ("seed", {"seed": 1}),
        ("batch_size", {"batch_size": 8}),
        ("optimizer.name", {"optimizer": {"name": "Adam"}}),
        ("weights", {"weights": "flush"}),
    ],
)
def test_what_must_stay_is_refused_with_the_reason(path: str, change: dict[str, Any]) -> None:
    with pytest.raises(JobError) as caught:
        check_resumed(small_job(), small_job(**change))
    (problem,) = caught.value.problems
    assert problem.startswith(f"{path}: is ")
    assert "must not change" in problem


@pytest.mark.parametrize(
    ("name", "argument", "value", "shown"),
    [
        ("Adam", "amsgrad", True, "is True here and False"),
        ("RMSprop", "centered", True, "is True here and False"),
        ("RMSprop", "momentum", 0.9, "is above 0 here and 0"),
    ],
)
def test_options_that_need_state_which_is_not_there(name: str, argument: str, value: object, shown: str) -> None:
    without = {"name": name, "lr": 0.1}
    with pytest.raises(JobError) as caught:
        check_resumed(small_job(optimizer=without), small_job(optimizer={**without, argument: value}))
    (problem,) = caught.value.problems
    assert problem.startswith(f"optimizer.{argument}: {shown} in the run to resume, but must not change")


def test_all_of_it_is_told_at_once() -> None:
    with pytest.raises(JobError) as caught:
        check_resumed(small_job(), small_job(seed=1, batch_size=8))
    assert [problem.split(":")[0] for problem in caught.value.problems] == ["seed", "batch_size"]


@pytest.mark.parametrize(
    "change",
    [
        {"epochs": 9},
        {"minibatches": 900},
        {"sync.D": 4},
        {"sync.combine": "mean"},
        {"workers.stages": 2},
        {"optimizer.lr": 0.01},
        {"optimizer.momentum": 0.9},
        {"optimizer.groups": [{"parameters": ["*.bias"], "lr": 0.2}]},
        {"workers.count": 3},
        {"workers": {"stages": "auto"}},
        {"sync.minibatches_per_wave": 3},
        {"sync": {"kind": "none"}, "workers.count": 1},
        {"gradients.accumulate": 2},
        {"lr_schedule": {"name": "StepLR", "step_size": 3}},
        {"parameter_servers.count": 3},
        {"checkpoint.every_waves": 5},
        {"cluster": {"slowdown": 2.0}},
        {"data.eval": "tests.models:data32"},
    ],
)
def test_all_else_may_change(change: dict[str, Any]) -> None:
    check_resumed(small_job(), small_job(**change))


def progress(*, epoch: int, minibatches: int) -> Progress:
    return Progress(clock=Clock(6), epoch=epoch, used=bytes(6), minibatches=minibatches, samples=4 * minibatches)


def test_a_finished_run_is_not_resumed() -> None:
    with pytest.raises(UserError) as by_epochs:
        check_not_finished(small_job(), progress(epoch=2, minibatches=24), num_samples=46, where="runs/a")
    assert "runs/a is finished: it trained 2 of 2 epochs" in str(by_epochs.value)
    assert "--set epochs=4" in str(by_epochs.value)
    job = small_job(minibatches=12)
    with pytest.raises(UserError) as by_minibatches:
        check_not_finished(job, progress(epoch=0, minibatches=24), num_samples=46, where="runs/a")
    assert "24 of 24 minibatches" in str(by_minibatches.value)
    assert "--set minibatches=24" in str(by_minibatches.value)


def test_fewer_virtual_workers_may_have_done_enough() -> None:
    """`minibatches` is of each: with half as many, half of the run is all of it."""
    alone = small_job(**{"minibatches": 12, "workers.count": 1})
    with pytest.raises(UserError, match=r"trained 20 of 12 minibatches, .* --set minibatches=40"):
        check_not_finished(alone, progress(epoch=0, minibatches=20), num_samples=46, where="runs/a")
    check_not_finished(alone, progress(epoch=0, minibatches=11), num_samples=46, where="runs/a")


def test_a_run_that_is_planned_anew_has_as_many_as_its_plan_says() -> None:
    anew = small_job(minibatches=12, workers={"stages": "auto"})
    check_not_finished(anew, progress(epoch=0, minibatches=500), num_samples=46, where="runs/a")


def test_a_longer_run_goes_on() -> None:
    check_not_finished(small_job(epochs=3), progress(epoch=2, minibatches=24), num_samples=46, where="runs/a")
    check_not_finished(small_job(minibatches=13), progress(epoch=1, minibatches=24), num_samples=46, where="runs/a")
