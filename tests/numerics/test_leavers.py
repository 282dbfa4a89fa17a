"""Virtual workers that are drained: what they did counts, nobody waits for them, and they come back as they left."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hetpipe.errors import InjectedFault, LinkClosed, StaleIncarnation
from hetpipe.job.file import Job
from hetpipe.values.ids import VirtualWorkerIndex
from hetpipe.values.run import StageDone, StageEvaluation
from tests import models
from tests.models import NUM_WITNESSES
from tests.numerics.compare import ADAMW, ROOT, Case, assert_same_bits, run, trained
from tests.numerics.test_deaths import BATCH_NORM, death
from tests.numerics.test_witnesses import case, counts
from tests.reference.executor import run_reference
from tests.support.in_process import InProcessResult, InProcessRun, run_in_process

pytestmark = pytest.mark.matrix


def drain(at: str = "before forward", number: int | None = 3, *, vw: int = 1, **changes: Any) -> Any:
    """At which moment a virtual worker is asked to leave."""
    return death(at, number, vw=vw, how="drained", **changes)


def decisions(folder: Path, *events: str, of: str = "shard-0") -> Iterator[dict[str, Any]]:
    lines = (folder / "history" / f"{of}.jsonl").read_text().splitlines()
    return (line for line in map(json.loads, lines) if line["event"] in events)


def membership(folder: Path, num_workers: int) -> dict[int, tuple[int, ...]]:
    """Clock → members from there on, by the history."""
    members, found = set(range(num_workers)), {}
    for line in decisions(folder, "leave", "join"):
        if line["clock"]:
            members = members - {line["vw"]} if line["event"] == "leave" else members | {line["vw"]}
            found[line["clock"]] = tuple(sorted(members))
    return found


def done(result: InProcessResult) -> Counter[tuple[int, str]]:
    """(virtual worker, reason) → stages that ended so."""
    return Counter((vw, report.reason) for vw, _, report in result.reports if isinstance(report, StageDone))


def barriers(folder: Path) -> tuple[int, ...]:
    """The clocks of the barriers that were passed."""
    reached = {line["clock"] for line in decisions(folder, "publish")}
    pending: set[int] = set()
    for line in decisions(folder, "barrier"):
        pending = {clock for clock in pending if clock < line["clock"]} | {line["clock"]}
    return tuple(sorted(pending & reached))


@pytest.mark.parametrize(
    ("changes", "comes_back"),
    [
        pytest.param({"optimizer": dict(ADAMW), "combine": "mean"}, False, marks=pytest.mark.exhaustive),
        ({"optimizer": dict(ADAMW), "combine": "mean"}, True),
        ({"weights": "flush", "lr_schedule": {"name": "StepLR", "step_size": 2}}, True),
    ],
)
def test_the_bits_are_those_of_the_same_membership(
    changes: dict[str, Any], tmp_path: Path, *, comes_back: bool
) -> None:
    """Who comes back has the state with which its optimizer left: the checkpoint of that barrier has it."""
    what = Case(workers=3, stages=2, wave=2, epochs=8, staleness=0, **changes, **BATCH_NORM)
    run(what, tmp_path, deaths=(drain(number=5, comes_back=comes_back),))
    changed = membership(tmp_path, 3)
    assert [len(members) for members in changed.values()] == [2, 3][: 1 + comes_back]
    reference = what.reference(membership=changed, extra_barriers=barriers(tmp_path))
    assert_same_bits(trained(tmp_path), run_reference(reference))


@pytest.mark.parametrize(
    ("changes", "deaths"),
    [
        ({"workers": 3, "kind": "asp", "wave": 1}, [drain("before push", 2, vw=2, comes_back=False)]),
        ({"workers": 2, "stages": 3, "wave": 4}, [drain(stage=1), drain("after staged", None, incarnation=1)]),
        # Two of three, and all.
        ({"workers": 3}, [drain(also=(2,))]),
        pytest.param({"workers": 2, "stages": 1}, [drain(also=(0,))], marks=pytest.mark.exhaustive),
        # It dies before it has left, in the midst of the barrier's work, or with it behind it.
        pytest.param({"workers": 3}, [drain(number=2), death("before staged", 1, vw=1)], marks=pytest.mark.exhaustive),
        ({"workers": 2}, [drain(number=2), death("before report_checkpoint", vw=1)]),
        pytest.param(
            {"workers": 2},
            [drain(number=2, comes_back=False), death("after report_checkpoint", vw=1, stage=1)],
            marks=pytest.mark.exhaustive,
        ),
        # One leaves and another one dies.
        ({"workers": 3}, [drain(number=2), death("before staged", 2, vw=2)]),
    ],
)
def test_every_sample_counts_once(changes: dict[str, Any], deaths: list[Any], tmp_path: Path) -> None:
    what = case(**{"stages": 2, "wave": 2, **changes})
    result = run(what, tmp_path, deaths=deaths, stall_seconds=20.0)
    assert all(isinstance(error, InjectedFault | StaleIncarnation | LinkClosed) for *_, error in result.ended)
    assert counts(tmp_path) == [[changes.get("epochs", 2)] * NUM_WITNESSES] * 4


def test_who_leaves_says_so_and_evaluates_nothing(tmp_path: Path) -> None:
    what = Case(workers=2, stages=2, wave=2, epochs=2, staleness=0, **BATCH_NORM)
    job = what.job().model_dump(mode="json")
    job["data"]["eval"] = "tests.models:data32"
    in_the_last_wave = 5  # of the epoch, at whose end it leaves
    deaths = (drain(number=in_the_last_wave, vw=0, comes_back=False),)
    result = run_in_process(InProcessRun(Job.model_validate(job), tmp_path, ROOT, stall_seconds=20.0, deaths=deaths))
    assert done(result) == {(0, "drain"): 2, (1, "epoch+end"): 2}
    (left,) = {line["clock"] for line in decisions(tmp_path, "leave")}
    evaluated = [(vw, report) for vw, _, report in result.reports if isinstance(report, StageEvaluation)]
    at_the_barrier = [(vw, report.samples) for vw, report in evaluated if report.clock == left]
    assert at_the_barrier == [(VirtualWorkerIndex(1), len(models.data32()))]


def test_nobody_leaves_at_the_end(tmp_path: Path) -> None:
    result = run(case(workers=2, stages=2, wave=2, epochs=1), tmp_path, deaths=(drain("before staged", 3),))
    assert done(result) == {(0, "epoch+end+drain"): 2, (1, "epoch+end+drain"): 2}
