"""The folder of a comparison: what is kept, found again, and refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from hetpipe.comparison.record import ComparisonFolder
from hetpipe.errors import UserError
from tests.comparison.comparisons import diverged, record, trials
from tests.support.fake_clock import FakeClock


def opened(path: Path | None, runs_dir: Path = Path("runs")) -> ComparisonFolder:
    return ComparisonFolder.open(path, name="small", clock=FakeClock(), runs_dir=runs_dir)


def test_what_is_kept_is_found_again(tmp_path: Path) -> None:
    first, second = trials(tmp_path, seeds=1)
    folder = opened(tmp_path / "kept")
    done = record("wave", first.seed, job_digest=first.job_digest)
    lost = replace(diverged("flush", second.seed), job_digest=second.job_digest)
    folder.add(done, name="small")
    folder.add(lost, name="small")
    again = opened(tmp_path / "kept")
    assert again.records == [done, lost]
    assert (again.find(first), again.find(second)) == (done, lost)
    assert json.loads((tmp_path / "kept" / "compare.json").read_text())["name"] == "small"


def test_a_run_of_another_job_is_not_used_again(tmp_path: Path) -> None:
    folder = opened(tmp_path / "kept")
    (trial, _) = trials(tmp_path, seeds=1)
    folder.add(record("wave", trial.seed, job_digest=trial.job_digest), name="small")
    (changed, _) = trials(tmp_path, seeds=1, epochs=5)
    assert folder.find(changed) is None
    folder.add(record("wave", trial.seed, job_digest=changed.job_digest), name="small")
    assert len(folder.records) == 1


def test_folders_of_runs_are_fresh(tmp_path: Path) -> None:
    folder = opened(tmp_path / "kept")
    (trial, _) = trials(tmp_path, seeds=1)
    names = []
    for _ in range(3):
        path = folder.fresh_run_dir(trial)
        path.mkdir()
        names.append(path.name)
    assert names == ["wave-seed-3", "wave-seed-3-2", "wave-seed-3-3"]


def test_a_folder_of_its_own_by_default(tmp_path: Path) -> None:
    folder = opened(None, tmp_path / "runs")
    assert folder.path.parent == tmp_path / "runs"
    assert folder.path.name.startswith("compare-small-")


def test_other_folders_are_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"is not empty and no comparison \(no compare.json\); name a new folder"):
        opened(tmp_path)
    (tmp_path / "compare.json").write_text("{")
    with pytest.raises(
        UserError, match=r"compare.json is damaged or of another version; name another folder with --run-dir"
    ):
        opened(tmp_path)
    with pytest.raises(UserError, match="cannot make the comparison's folder"):
        opened(tmp_path / "notes.txt" / "below")
