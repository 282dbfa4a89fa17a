"""The check at the end of a run, as far as it goes."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetpipe.runs import judge
from hetpipe.runs.judge import count_violations
from tests.checker.corruptions import corrupted_lines
from tests.checker.scenario import Scenario, write_run
from tests.checker.simulator import as_lines, simulate


def counted(run_dir: Path) -> tuple[int | None, list[str]]:
    said: list[str] = []
    return count_violations(run_dir, say=said.append), said


def test_violations_are_counted(tmp_path: Path) -> None:
    write_run(tmp_path / "clean", Scenario(), as_lines(simulate(Scenario())))
    assert counted(tmp_path / "clean") == (0, [])
    write_run(tmp_path / "bad", Scenario(), corrupted_lines("step_twice"))
    violations, _ = counted(tmp_path / "bad")
    assert violations


def test_a_history_that_is_elsewhere_is_not_judged(tmp_path: Path) -> None:
    assert counted(tmp_path) == (None, [])
    history = as_lines(simulate(Scenario()))
    del history["stage-1-0-0.jsonl"]
    write_run(tmp_path, Scenario(), history)
    assert counted(tmp_path) == (None, [])


def test_a_history_that_cannot_be_judged_is_told(tmp_path: Path) -> None:
    (tmp_path / "history").mkdir()
    (tmp_path / "history" / "shard-0.jsonl").write_text("")
    violations, said = counted(tmp_path)
    assert violations is None
    assert said[0].startswith("the history cannot be checked: ")


def test_a_long_history_is_left_to_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path, Scenario(), as_lines(simulate(Scenario())))
    monkeypatch.setattr(judge, "_TOLD_BYTES", 10)
    assert counted(tmp_path) == (0, ["checking the history of the run"])
    monkeypatch.setattr(judge, "MAX_BYTES", 10)
    violations, said = counted(tmp_path)
    assert violations is None
    assert said == [f"the history has 0 MiB, so it is not checked now; check it with: hetpipe check {tmp_path}"]
