"""Layers move between real stage processes, over both kinds of links: the bits of the reference, no new process."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hetpipe.checker import check_run
from hetpipe.decide.elastic.script import script_of
from hetpipe.job.elastic import MoveLine
from hetpipe.server.decisions_file import read_decisions
from hetpipe.values.decisions import MoveDecision
from tests.numerics.compare import ADAMW, Case, assert_same_bits, trained
from tests.numerics.test_deaths import BATCH_NORM
from tests.numerics.test_moves import barrier_move
from tests.polling import wait_until
from tests.processes.harness import Train, kill, write_job
from tests.processes.test_elastic import workers
from tests.processes.test_lives import waves
from tests.reference.executor import run_reference

pytestmark = [pytest.mark.processes, pytest.mark.exhaustive, pytest.mark.timeout(180)]


def job_of(what: Case, folder: Path, **changes: Any) -> Path:
    return write_job(
        folder,
        model=f"tests.models:{what.model}",
        data={"train": f"tests.models:{what.data}"},
        batch_size=what.batch_size,
        epochs=what.epochs,
        optimizer=ADAMW,
        workers={"count": 2, "stages": what.stages},
        sync={"kind": "wsp", "D": what.staleness, "minibatches_per_wave": what.wave, "deterministic": True},
        parameter_servers={"count": 2},
        **changes,
    )


@pytest.mark.parametrize("link", ["gloo", "grpc"])
def test_layers_move_between_running_processes(link: str, tmp_path: Path) -> None:
    what = Case(
        stages=[[2, 2], [2, 2]],
        epochs=3,
        optimizer=dict(ADAMW),
        moves=((2, 0, (3, 1)), (3, 1, (1, 3)), (5, 0, (1, 3))),
        **BATCH_NORM,
    )
    script = [{"at": {"clock": at}, "do": "move", "vw": vw, "stages": list(counts)} for at, vw, counts in what.moves]
    train = Train(tmp_path, job_of(what, tmp_path, link=link, elastic={"script": script}))
    outcome = train.finish(150.0)
    assert outcome.returncode == 0, outcome.stderr
    assert check_run(train.run_dir, require_complete=True).ok
    for path in (train.run_dir / "history").glob("vw-*.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        assert len({line["pid"] for line in lines}) == 1, "one process all the time"
        assert {line["version"] for line in lines if line["event"] == "forward"} == (
            {0, 1, 2} if "vw-0" in path.name else {0, 1}
        )
    assert_same_bits(trained(train.run_dir), run_reference(what.reference()))


def test_processes_follow_every_verb_of_a_script(tmp_path: Path) -> None:
    """N, members, policies of layers: one comes back with another process, two others take the devices of another."""
    what = Case(
        stages=[[2, 2], [2, 2]],
        epochs=6,
        optimizer=dict(ADAMW),
        policies=(({"p": 3}, 0, (0,), "recompute"),),
        members=((2, "drop", 1), (8, "add", 1), (10, "drop", 0)),
        added=((10, 2, (4,), (0,)), (10, 3, (4,), (1,))),
        resized=((2, 4), (8, 2)),
        moves=((8, 1, (3, 1)),),
        **BATCH_NORM,
    )
    train = Train(tmp_path, job_of(what, tmp_path, elastic=what.job().elastic.model_dump(mode="json")))
    outcome = train.finish(150.0)
    assert outcome.returncode == 0, outcome.stderr
    assert check_run(train.run_dir, require_complete=True).ok
    assert_same_bits(trained(train.run_dir), run_reference(what.reference()))


def test_replicas_leave_and_join(tmp_path: Path) -> None:
    """One virtual worker of two stages becomes two of one: they form a group of their own, with its state."""
    what = Case(
        kind="allreduce",
        weights="flush",
        workers=1,
        stages=[[2, 2]],
        wave=4,
        epochs=3,
        optimizer=dict(ADAMW),
        members=((2, "drop", 0),),
        added=((2, 1, (4,), (0,)), (2, 2, (4,), (1,))),
        elastic={"keep_global_batch": True},
        **BATCH_NORM,
    )
    job = what.job().model_dump(mode="json")
    named = ("batch_size", "epochs", "seed", "optimizer", "weights", "workers", "sync", "elastic")
    values = {"model": "tests.models:" + what.model, "data": {"train": "tests.models:" + what.data}}
    train = Train(tmp_path, write_job(tmp_path, **values, **{key: job[key] for key in named}))
    outcome = train.finish(150.0)
    assert outcome.returncode == 0, outcome.stderr
    assert check_run(train.run_dir, require_complete=True).ok
    assert_same_bits(trained(train.run_dir), run_reference(what.reference(waves={2: (4, 2, 2)})))


@pytest.mark.parametrize("moment", ["prepared", "recorded"])
def test_one_that_takes_over_devices_is_killed(moment: str, tmp_path: Path) -> None:
    """Before the barrier at which it joins, which waits for its next life, so that no bit changes; or behind it."""
    what = Case(
        workers=1,
        stages=[[2, 2]],
        wave=2,
        epochs=40,
        optimizer=dict(ADAMW),
        members=((20, "drop", 0),),
        added=((20, 1, (4,), (0,)), (20, 2, (4,), (1,))),
        **BATCH_NORM,
    )
    job = what.job().model_dump(mode="json")
    named = ("batch_size", "epochs", "seed", "optimizer", "weights", "workers", "sync", "elastic")
    values = {"model": "tests.models:" + what.model, "data": {"train": "tests.models:" + what.data}}
    train = Train(tmp_path, write_job(tmp_path, **values, **{key: job[key] for key in named}))
    vw = 0 if moment == "prepared" else 1
    wait_until(lambda: bool(waves(train, vw, 0)), timeout_seconds=60.0, what=f"a wave of virtual worker {vw}")
    (victim,) = [one["pid"] for one in train.status()["processes"] if one["role"] == "stage" and one["vw"] == 1]
    kill(victim)
    outcome = train.finish(150.0)
    assert outcome.returncode == 0, outcome.stderr
    assert f"(pid {victim}" in outcome.stderr
    assert outcome.result["deaths"]["1"] == 1
    assert check_run(train.run_dir, require_complete=True).ok
    if moment == "prepared":
        assert_same_bits(trained(train.run_dir), run_reference(what.reference()))


def test_layers_move_as_an_operator_asks(tmp_path: Path) -> None:
    """`hetpipe workers move`; the bits are those of the reference with the moves of `decisions.jsonl`."""
    what = Case(stages=[[2, 2], [2, 2]], epochs=100, optimizer=dict(ADAMW), **BATCH_NORM)
    train = Train(tmp_path, job_of(what, tmp_path, survive={"straggler": 0}))
    wait_until(lambda: bool(waves(train, 1, 0)), timeout_seconds=60.0, what="the first wave")
    for number, (vw, cut, before, after) in enumerate(
        [("0", "3,1", [2, 2], [3, 1]), ("1", "1,3", [2, 2], [1, 3]), ("0", "2,2", [3, 1], [2, 2])], 1
    ):
        asked = workers(train, "move", vw, cut)
        assert (asked["before"], asked["after"]) == (before, after)
        wait_until(lambda: len(read_decisions(train.run_dir)) >= number, timeout_seconds=60.0, what="the move")  # noqa: B023
        wait_until(
            lambda: train.stderr().count("event=worker_replanned") >= number,  # noqa: B023
            timeout_seconds=60.0,
            what="the announcement",
        )
    outcome = train.finish(150.0)
    assert outcome.returncode == 0, outcome.stderr
    assert check_run(train.run_dir, require_complete=True).ok
    moves = [line for line in read_decisions(train.run_dir) if isinstance(line, MoveDecision)]
    assert [(line.vw, line.stages, line.by) for line in moves] == [
        (0, (3, 1), "operator"),
        (1, (1, 3), "operator"),
        (0, (2, 2), "operator"),
    ]
    again = replace(
        what,
        moves=tuple(barrier_move(line) for line in script_of(moves) if isinstance(line, MoveLine)),
    )
    assert_same_bits(trained(train.run_dir), run_reference(again.reference()))
