"""What a job's own code cannot do is refused where the code is first looked at."""

from __future__ import annotations

from typing import Any

import pytest

from hetpipe.errors import JobError
from hetpipe.job.file import Job
from hetpipe.profiler.subject import load_subject
from tests.cli.fakes import small_job
from tests.numerics.compare import ROOT


def told(**keys: Any) -> Job:
    """A job as an agent is told of it: through JSON."""
    job = small_job(data={"train": "tests.models:data32"}, **keys)
    return Job.model_validate(job.model_dump(mode="json"))


def test_groups_that_fit_the_model() -> None:
    groups = ({"parameters": ("*.bias",), "weight_decay": 0.0},)
    assert load_subject(told(optimizer={"name": "AdamW", "groups": groups}), ROOT).chain


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        (
            {"optimizer": {"name": "AdamW", "groups": ({"parameters": ("encoder.*",), "lr": 0.5},)}},
            "optimizer.groups[0].parameters: no parameter matches 'encoder.*'; there are ",
        ),
        (
            {"optimizer": {"name": "Adagrad"}, "weights": "predict"},
            "optimizer.name: is Adagrad, but update rules exist only for ",
        ),
        ({"lr_schedule": {"name": "CosineAnnealingLR"}}, "lr_schedule.T_max: is missing; "),
    ],
    ids=["groups", "prediction", "schedule"],
)
def test_what_does_not(keys: dict[str, Any], problem: str) -> None:
    with pytest.raises(JobError) as caught:
        load_subject(told(**keys), ROOT)
    assert caught.value.problems[0].startswith(problem)
