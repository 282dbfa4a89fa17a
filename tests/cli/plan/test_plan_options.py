"""What the options of `hetpipe plan` mean, alone and with a job."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from hetpipe.cli.plan.plan import Options, check_request, planner_request_of, workers_of
from hetpipe.decide.planner.options import PlanOptions
from hetpipe.errors import UserError
from hetpipe.job.file import Job, load_job


def job_with(**changes: Any) -> Job:
    values = {
        "model": "tests.models:mlp32",
        "loss": "tests.models:loss",
        "data": {"train": "tests.models:data32"},
        "optimizer": {"name": "SGD", "lr": 0.1},
        "epochs": 1,
    }
    return load_job({**values, **changes})


FILES: dict[str, Any] = {"profile": Path("p.json"), "cluster": Path("c.yaml")}


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, "there is nothing to plan; name a job file, or give --profile and --cluster"),
        ({"profile": Path("p.json")}, "--profile is given without --cluster; give both, or name a job file"),
        ({"cluster": Path("c.yaml")}, "--cluster is given without --profile; give both, or name a job file"),
        ({**FILES, "workers": '[["n0/0"]]'}, "--workers is for --allocation explicit; add --allocation explicit"),
        (
            {**FILES, "workers": '[["n0/0"]]', "allocation": "NP"},
            "--workers is for --allocation explicit, not NP; leave it out, or give explicit",
        ),
        ({**FILES, "max_batch": 256}, "--max-batch is for --allocation parallel; add --allocation parallel"),
        (
            {**FILES, "allocation": "explicit"},
            "--allocation explicit needs the devices of each virtual worker: --workers",
        ),
        ({**FILES, "allocation": "parallel"}, "--allocation parallel needs --max-batch"),
    ],
)
def test_contradictions_are_refused_with_the_fix(given: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError) as caught:
        check_request(Options(**given), as_json=False)
    assert str(caught.value).startswith(told)


def test_json_has_the_reasons_already() -> None:
    check_request(Options(**FILES, why=True), as_json=False)
    with pytest.raises(UserError, match="leave out --why"):
        check_request(Options(**FILES, why=True), as_json=True)


def test_nothing_given_means_the_defaults() -> None:
    planning = planner_request_of(Options(**FILES), None)
    assert planning.options == PlanOptions()
    assert planning.remarks == ()


def test_what_is_given_is_understood() -> None:
    request = Options(
        allocation="explicit",
        workers='[["n0/0","n1/0"],["n0/1"]]',
        minibatches_per_wave="6",
        placement="balanced",
        staleness="inf",
        weights="flush",
        schedule="gpipe",
        optimizer_slots=3,
        recompute="on",
        shards=5,
        reserve_bytes=7,
    )
    options = planner_request_of(request, None).options
    assert options.workers == (("n0/0", "n1/0"), ("n0/1",))
    assert (options.minibatches_per_wave, options.staleness) == (6, None)
    assert (options.placement, options.weights, options.recompute) == ("balanced", "flush", "on")
    assert options.schedule == "gpipe"
    assert (options.optimizer_slots, options.num_shards, options.reserve_bytes) == (3, 5, 7)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"allocation": "ND"}, "--allocation 'ND' is unknown; "),
        ({"placement": "balance"}, "--placement 'balance' is unknown; did you mean `balanced`?"),
        ({"weights": "waves"}, "--weights 'waves' is unknown; did you mean `wave`?"),
        ({"recompute": "yes"}, "--recompute 'yes' is unknown; "),
        ({"schedule": "1f2b"}, "--schedule '1f2b' is unknown; did you mean `1f1b`?"),
        ({"schedule": "gpipe"}, "the schedule is gpipe, but `gpipe` drains"),
        ({"schedule": "fifo", "weights": "stash"}, "the schedule is fifo, but the weight versions of `stash`"),
        (
            {"minibatches_per_wave": "0"},
            "--minibatches-per-wave is '0'; give a whole number from 1 on, auto or ",
        ),
        ({"minibatches_per_wave": "many"}, "--minibatches-per-wave is 'many'; "),
        ({"staleness": "-1"}, "--D is '-1'; "),
    ],
)
def test_what_means_nothing_is_refused(given: dict[str, str], told: str) -> None:
    with pytest.raises(UserError) as caught:
        planner_request_of(Options(**FILES, **given), None)  # type: ignore[arg-type]
    assert str(caught.value).startswith(told)


@pytest.mark.parametrize("text", ["", "n0/0", "[]", '["n0/0"]', '[["n0/0"], 3]', "[[1]]", '{"a": 1}'])
def test_workers_that_are_no_lists_of_names(text: str) -> None:
    with pytest.raises(UserError, match="--workers is"):
        workers_of(text)


def test_a_job_says_what_its_run_will_do() -> None:
    job = job_with(
        optimizer={"name": "AdamW", "lr": 0.1, "amsgrad": True},
        sync={"D": 3, "minibatches_per_wave": 2},
        parameter_servers={"placement": "balanced"},
    )
    options = planner_request_of(Options(job=Path("job.yaml")), job).options
    assert (options.staleness, options.minibatches_per_wave, options.optimizer_slots) == (3, 2, 3)
    assert (options.placement, options.allocation, options.recompute) == ("balanced", "auto", "off")
    typed = Options(job=Path("job.yaml"), minibatches_per_wave="auto", staleness="0", optimizer_slots=0)
    options = planner_request_of(typed, job).options
    assert (options.staleness, options.minibatches_per_wave, options.optimizer_slots) == (0, None, 0)


def test_another_policy_has_its_own_schedule() -> None:
    job = job_with(schedule="fifo", gradients={"accumulate": 2}, workers={"stages": 2, "count": 1})
    options = planner_request_of(Options(job=Path("job.yaml")), job).options
    assert (options.weights, options.schedule, options.accumulate) == ("wave", "fifo", 2)
    options = planner_request_of(Options(job=Path("job.yaml"), weights="wave"), job).options
    assert (options.schedule, options.accumulate) == ("fifo", 2)
    options = planner_request_of(Options(job=Path("job.yaml"), weights="stash"), job).options
    assert (options.schedule, options.accumulate) == ("auto", 2)
    options = planner_request_of(Options(job=Path("job.yaml"), weights="flush", schedule="gpipe"), job).options
    assert (options.schedule, options.accumulate) == ("gpipe", 1)
    options = planner_request_of(Options(job=Path("job.yaml"), allocation="parallel", max_batch=8), job).options
    assert (options.weights, options.schedule, options.accumulate) == ("double_buffer", "auto", 1)


def test_a_job_without_parameter_servers() -> None:
    job = job_with(sync={"kind": "none"}, workers={"stages": 2, "count": 1})
    options = planner_request_of(Options(job=Path("job.yaml")), job).options
    assert (options.with_shards, options.num_shards) == (False, None)
    with pytest.raises(UserError, match="--shards is for parameter servers, which the job does not use"):
        planner_request_of(Options(job=Path("job.yaml"), shards=2), job)


def test_averaging_among_stages_is_not_foreseen() -> None:
    job = job_with(sync={"kind": "allreduce"}, weights="flush", workers={"stages": 2, "count": 2})
    with pytest.raises(
        UserError, match=r"does not predict the time of averaging gradients.*; plan it with `sync: bsp`"
    ):
        planner_request_of(Options(job=Path("job.yaml")), job)


def test_the_jobs_own_devices() -> None:
    job = job_with(workers={"stages": "auto", "devices": [["n0/0", "n1/0"]]})
    options = planner_request_of(Options(job=Path("job.yaml")), job).options
    assert (options.allocation, options.workers) == ("explicit", (("n0/0", "n1/0"),))
    options = planner_request_of(Options(job=Path("job.yaml"), allocation="ED"), job).options
    assert (options.allocation, options.workers) == ("ED", None)


def test_the_planner_of_2bw_has_its_own_weights_and_n() -> None:
    job = job_with(sync={"minibatches_per_wave": 2})
    request = Options(job=Path("job.yaml"), allocation="parallel", max_batch=256)
    options = planner_request_of(request, job).options
    assert (options.weights, options.minibatches_per_wave, options.max_batch) == ("double_buffer", None, 256)


def test_an_optimizer_that_is_not_known() -> None:
    job = job_with(optimizer={"name": "Sophia", "lr": 0.1})
    planning = planner_request_of(Options(job=Path("job.yaml")), job)
    assert planning.options.optimizer_slots == 2
    assert "the state of Sophia is unknown" in planning.remarks[0]
    assert "--optimizer-slots" in planning.remarks[0]


def test_waves_in_proportion() -> None:
    job = job_with(sync={"minibatches_per_wave": "proportional"})
    assert planner_request_of(Options(**FILES, minibatches_per_wave="proportional"), None).options.proportional
    options = planner_request_of(Options(job=Path("job.yaml")), job).options
    assert (options.proportional, options.minibatches_per_wave) == (True, None)
    options = planner_request_of(Options(job=Path("job.yaml"), minibatches_per_wave="3"), job).options
    assert (options.proportional, options.minibatches_per_wave) == (False, 3)
    options = planner_request_of(Options(job=Path("job.yaml"), allocation="parallel", max_batch=8), job).options
    assert not options.proportional


@pytest.mark.parametrize(
    ("given", "keys", "problem"),
    [
        (
            {},
            {"workers": {"stages": [[1], [1]]}, "sync": {"minibatches_per_wave": [2, 1]}},
            "one number for each virtual worker of the job, but a plan defines new ones; give --minib",
        ),
        (
            {"allocation": "parallel", "max_batch": 8, "minibatches_per_wave": "proportional"},
            {},
            "--allocation parallel has equal virtual workers, whose waves take equally long; leave out",
        ),
        (
            {"minibatches_per_wave": "proportional"},
            {"sync": "none"},
            "is for several virtual workers with parameter servers, which the job does not use; leave it out",
        ),
    ],
)
def test_waves_that_no_plan_can_have(given: dict[str, Any], keys: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError, match=re.escape(problem)):
        planner_request_of(Options(job=Path("job.yaml"), **given), job_with(**keys))
