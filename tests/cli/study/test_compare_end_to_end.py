"""The program itself compares policies on a small job, with every process real."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.test_end_to_end import hetpipe, last_line
from tests.comparison.comparisons import write_job

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]


@pytest.mark.exhaustive
def test_a_comparison_and_going_on_with_it(tmp_path: Path) -> None:
    job, kept, page = write_job(tmp_path), tmp_path / "kept", tmp_path / "page.html"
    arguments = ("compare", job, "--seeds", "1", "--run-dir", kept, "--json")
    compared = hetpipe(*arguments, "--weights", "wave,flush", "--html", page)
    assert compared.returncode == 0, compared.stderr
    answer = last_line(compared)
    assert [(run["weights"], run["state"]) for run in answer["runs"]] == [("wave", "finished"), ("flush", "finished")]
    wave, flush = answer["policies"]
    assert wave["final"]["loss"]["mean"] != flush["final"]["loss"]["mean"]
    assert all(stage["weight_bytes"] > 0 and stage["activation_bytes"] > 0 for stage in wave["stages"])
    assert page.read_text().count('<figure class="card curves"') >= 2

    for record in json.loads((kept / "compare.json").read_text())["runs"]:
        # 46 samples in minibatches of 4, twice
        assert [point["minibatches"] for point in record["evaluations"]] == [12, 24]
        seconds = [point["seconds"] for point in record["evaluations"]]
        assert 0 < seconds[0] < seconds[1] <= record["result"]["wall_seconds"] + 1

    again = hetpipe(*arguments, "--weights", "wave,flush")
    assert again.returncode == 0, again.stderr
    assert again.stderr.count("trained before, finished") == 2
    assert last_line(again)["policies"] == answer["policies"]


@pytest.mark.exhaustive
def test_a_policy_that_the_job_cannot_use_is_named_before_anything_starts(tmp_path: Path) -> None:
    job = write_job(tmp_path, optimizer={"name": "Adagrad", "lr": 0.1})
    refused = hetpipe("compare", job, "--weights", "wave,predict,spectrain", "--run-dir", tmp_path / "kept", "--json")
    assert refused.returncode == 2
    assert [error.split(":")[0] for error in last_line(refused)["errors"]] == ["under predict", "under spectrain"]
    assert not (tmp_path / "kept").exists()
