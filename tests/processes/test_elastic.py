"""A virtual worker of a run leaves and comes back; the others go on, and every sample of every epoch counts once."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hetpipe.cli.app import app
from tests.histories import history_lines
from tests.polling import wait_until
from tests.processes.harness import Train, write_job
from tests.processes.test_lives import ENDLESS, LONGEST_STOP_SECONDS, stop, wait_for_lives, waves

pytestmark = [pytest.mark.processes, pytest.mark.exhaustive, pytest.mark.timeout(180)]


def workers(train: Train, *arguments: str) -> dict[str, Any]:
    """What `hetpipe workers …` says of the run."""
    said = CliRunner().invoke(app, ["workers", *arguments, "--run-dir", str(train.run_dir), "--json"])
    assert said.exit_code == 0, said.stderr
    value: dict[str, Any] = json.loads(said.stdout.splitlines()[-1])
    return value


def states(train: Train) -> list[str]:
    return [worker["state"] for worker in workers(train, "list")["workers"]]


def lines_of(train: Train, event: str) -> list[dict[str, Any]]:
    return history_lines(train.run_dir, event)


def test_one_of_three_leaves_and_comes_back(tmp_path: Path) -> None:
    train = Train(tmp_path, write_job(tmp_path, **ENDLESS, workers={"count": 3, "stages": 1}))
    train.wait_for_checkpoint()
    assert states(train) == ["ready"] * 3

    assert workers(train, "drain", "1", "--wait")["workers"][0]["state"] == "out"
    (left,) = lines_of(train, "leave")
    assert (left["vw"], left["incarnation"]) == (1, 0)
    so_far = len(waves(train, 0, 0))
    wait_until(lambda: len(waves(train, 0, 0)) > so_far + 5, timeout_seconds=30.0, what="waves of who stays")
    assert states(train) == ["ready", "out", "ready"]

    assert workers(train, "add")["workers"][0]["vw"] == 1
    wait_for_lives(train, 1)
    wait_until(lambda: len(waves(train, 1, 1)) > 5, timeout_seconds=30.0, what="waves of the second life")
    outcome = stop(train)

    assert outcome.result["deaths"] == {"0": 0, "1": 0, "2": 0}
    assert "event=worker_left vw=1 life=1 returns=False" in outcome.stderr
    of_survivor = waves(train, 0, 0)
    assert max(later - earlier for earlier, later in pairwise(of_survivor)) < LONGEST_STOP_SECONDS
    assert lines_of(train, "evict") == []
    committed = [line["wave"] for line in lines_of(train, "commit") if (line["vw"], line["incarnation"]) == (1, 0)]
    assert max(committed) == left["clock"] - 1, "up to the barrier, and not beyond it"
