"""Every weight policy, schedule and kind of synchronisation is judged by its own rules and by no other's."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest

from hetpipe.checker import Kind, Report, check_events, check_run
from hetpipe.checker.events import Pull
from hetpipe.checker.facts import read_facts
from hetpipe.checker.reading import read_history
from hetpipe.errors import UserError
from tests.checker.activate_corruptions import ACTIVATE_CORRUPTIONS
from tests.checker.corruption import Corruption
from tests.checker.freeze_corruptions import FREEZE_CORRUPTIONS
from tests.checker.plan_corruptions import PLAN_CORRUPTIONS
from tests.checker.policy_corruptions import POLICY_CORRUPTIONS
from tests.checker.scenario import Record, Scenario, write_run
from tests.checker.simulator import as_lines, simulate
from tests.checker.wave_corruptions import WAVE_CORRUPTIONS
from tests.pairwise import every_nth

POLICIES = ("wave", "stash", "vertical", "double_buffer", "flush", "predict", "spectrain")

#: A pipeline in which no two policies have the same versions, but for the two that predict.
DEEP = Scenario(num_stages=(3,), num_shards=1, minibatches_per_wave=4, sync="none", num_samples=45)

#: One of each kind: with and without shards, alone and together, updates per minibatch, group and wave.
KINDS = {
    "stash": replace(DEEP, weights="stash", sync="wsp", num_shards=2, num_stages=(3, 2)),
    "stash, alone": replace(DEEP, weights="stash", accumulate=2),
    "vertical": replace(DEEP, weights="vertical", accumulate=4, sync="wsp", num_stages=(3, 1), staleness=0),
    "predict": replace(DEEP, weights="predict", num_stages=(4,)),
    "spectrain": replace(DEEP, weights="spectrain", sync="wsp", num_stages=(4, 4)),
    "double_buffer": replace(DEEP, weights="double_buffer", sync="wsp", num_stages=(3, 3), num_shards=3),
    "double_buffer, replicas": replace(DEEP, weights="double_buffer", sync="allreduce", num_stages=(3, 3)),
    "flush, replicas": replace(DEEP, weights="flush", sync="allreduce", num_stages=(2, 2, 2)),
    "gpipe": replace(DEEP, weights="flush", schedule="gpipe", checkpoint_every=2),
}


def judge(folder: Path, scenario: Scenario, **changes: object) -> Report:
    """Check a run of a scenario whose job says something else than what was done."""
    write_run(folder, scenario, as_lines(simulate(scenario)))
    job: Record = json.loads((folder / "job.json").read_text())
    (folder / "job.json").write_text(json.dumps({**job, **changes}))
    return check_run(folder, require_complete=True)


def test_as_many_numbers_of_minibatches_as_virtual_workers(tmp_path: Path) -> None:
    scenario = replace(DEEP, waves=(4, 4))
    write_run(tmp_path, scenario, as_lines(simulate(scenario)))
    with pytest.raises(
        UserError, match=r"minibatches_per_wave has 2 numbers, but the plan has 1 virtual workers; give"
    ):
        check_run(tmp_path)


_ALL = POLICY_CORRUPTIONS | WAVE_CORRUPTIONS | PLAN_CORRUPTIONS | FREEZE_CORRUPTIONS | ACTIVATE_CORRUPTIONS


@pytest.mark.parametrize("corruption", _ALL.values(), ids=list(_ALL))
def test_each_corruption_is_caught_and_nothing_else_is_reported(corruption: Corruption, tmp_path: Path) -> None:
    histories, right = simulate(corruption.scenario), replace(corruption.scenario, dealt_as=())
    write_run(tmp_path / "clean", right, as_lines(simulate(right)))
    assert check_run(tmp_path / "clean", require_complete=True).ok
    corruption.edit(histories)
    write_run(tmp_path / "corrupted", corruption.scenario, as_lines(histories))
    report = check_run(tmp_path / "corrupted")
    assert set(report.kinds()) == set(corruption.kinds), "\n".join(report.lines())


@pytest.mark.parametrize(("done", "promised"), list(permutations(POLICIES, 2)))
def test_a_run_of_one_policy_breaks_the_promise_of_another(done: str, promised: str, tmp_path: Path) -> None:
    report = judge(tmp_path, replace(DEEP, weights=done), weights=promised)
    # Which weights the two compute with is the same; by how much they differ from those that they have is not told.
    assert report.ok == ({done, promised} == {"predict", "spectrain"}), "\n".join(report.lines())


def test_a_run_of_one_schedule_breaks_the_promise_of_another(tmp_path: Path) -> None:
    flush = replace(DEEP, weights="flush")
    gpipe = replace(flush, schedule="gpipe")
    assert judge(tmp_path / "1f1b", gpipe, schedule="1f1b").kinds().keys() == {Kind.IN_FLIGHT}
    assert judge(tmp_path / "gpipe", flush, schedule="gpipe").kinds().keys() == {Kind.BACKWARD_EARLY}
    assert judge(tmp_path / "auto", flush, schedule="1f1b").ok


@pytest.mark.parametrize("weights", ["wave", "stash", "vertical", "predict", "spectrain"])
def test_updates_of_another_number_of_minibatches_are_wrong(weights: str, tmp_path: Path) -> None:
    scenario = replace(DEEP, weights=weights, accumulate=2)
    kinds = judge(tmp_path / "each", scenario, gradients={"accumulate": 1}).kinds()
    assert {Kind.WRONG_LOCAL_THROUGH, Kind.STEP_MISSING} <= kinds.keys()
    kinds = judge(tmp_path / "four", scenario, gradients={"accumulate": 4}).kinds()
    assert {Kind.WRONG_LOCAL_THROUGH, Kind.STEP_UNDUE} <= kinds.keys()


@pytest.mark.parametrize("weights", ["flush", "double_buffer"])
def test_policies_that_update_once_per_wave_accumulate_anyway(weights: str, tmp_path: Path) -> None:
    assert judge(tmp_path, replace(DEEP, weights=weights), gradients={"accumulate": 2}).ok


def test_a_job_of_an_older_run_has_neither_schedule_nor_gradients(tmp_path: Path) -> None:
    scenario = Scenario()
    write_run(tmp_path, scenario, as_lines(simulate(scenario)))
    job = json.loads((tmp_path / "job.json").read_text())
    del job["schedule"], job["gradients"]
    (tmp_path / "job.json").write_text(json.dumps(job))
    assert check_run(tmp_path, require_complete=True).ok


@pytest.mark.parametrize("name", every_nth(4, KINDS))
def test_every_line_but_a_pull_is_missed(name: str, tmp_path: Path) -> None:
    write_run(tmp_path, KINDS[name], as_lines(simulate(KINDS[name])))
    events, facts = read_history(tmp_path).events, read_facts(tmp_path)
    assert check_events(events, facts, require_complete=True).ok
    for position in range(0, len(events), 5):
        if not isinstance(events[position], Pull):
            shorter = events[:position] + events[position + 1 :]
            assert not check_events(shorter, facts, require_complete=True).ok, events[position]


@pytest.mark.parametrize(("kind", "bound"), [("none", None), ("allreduce", None), ("asp", None), ("wsp", 2)])
def test_only_a_staleness_bounds_the_clocks(kind: str, bound: int | None, tmp_path: Path) -> None:
    scenario = replace(DEEP, weights="flush", deterministic=False)
    sync = {"kind": kind, "D": 1 if kind == "wsp" else None, "minibatches_per_wave": 4}
    assert judge(tmp_path, scenario, sync=sync).counts.bound_clock_distance == bound


def test_the_report_names_what_it_judged_by(tmp_path: Path) -> None:
    report = judge(tmp_path, replace(DEEP, weights="flush", schedule="gpipe"))
    assert (report.to_json()["weights"], report.to_json()["schedule"]) == ("flush", "gpipe")
    assert " by weights flush and schedule gpipe: 23 minibatches, " in report.lines()[0]


@pytest.mark.parametrize("weights", every_nth(2, POLICIES))
@pytest.mark.parametrize("deterministic", [True, False])
def test_a_run_that_pulls_when_required_keeps_that_promise_and_breaks_the_other(
    weights: str,
    deterministic: bool,  # noqa: FBT001 - pytest's parameter
    tmp_path: Path,
) -> None:
    scenario = replace(
        DEEP, weights=weights, sync="wsp", num_stages=(3, 2), staleness=3, num_samples=240, deterministic=deterministic
    )
    kept = replace(scenario, pull="required", checkpoint_every=7, evict_at=9)
    report = judge(tmp_path / "kept", kept)
    assert report.ok, "\n".join(report.lines())
    promised = {"kind": "wsp", "D": 3, "minibatches_per_wave": 4, "deterministic": deterministic, "pull": "required"}
    broken = judge(tmp_path / "every", replace(scenario, checkpoint_every=None), sync=promised)
    kind = Kind.NOT_REQUIRED_CLOCK if deterministic else Kind.NEEDLESS_PULL
    assert set(broken.kinds()) == {kind}, "\n".join(broken.lines())
    every = judge(tmp_path / "all", kept, sync={**promised, "pull": "every_wave"})
    assert every.ok is not deterministic, "a run that may take any clock may keep one"


def test_the_checker_knows_no_other_timing_of_pulls(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"sync\.pull: sometimes cannot be checked, only every_wave, required"):
        judge(tmp_path, DEEP, sync={"kind": "wsp", "D": 1, "minibatches_per_wave": 4, "pull": "sometimes"})
