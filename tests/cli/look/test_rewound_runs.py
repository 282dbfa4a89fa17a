"""What is done with the folder of a run that went back to a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from hetpipe.cli.app import app
from hetpipe.runs.judge import count_violations
from tests.checker.corruptions import corrupted_lines
from tests.checker.scenario import Scenario, write_run
from tests.checker.simulator import as_lines, simulate


def rewound(run_dir: Path) -> Path:
    """The run went back twice; the second time it did not come as far as training."""
    write_run(run_dir, Scenario(), as_lines(simulate(Scenario())))
    write_run(run_dir / "rewind-1", Scenario(), as_lines(simulate(Scenario())))
    (run_dir / "rewind-2" / "history").mkdir(parents=True)
    (run_dir / "rewind-2" / "history" / "shard-0.jsonl").write_text("")
    return run_dir


def check(run_dir: Path) -> tuple[int, dict[str, object], list[str]]:
    """Exit status, JSON and lines of `hetpipe check`."""
    told = CliRunner().invoke(app, ["check", str(run_dir), "--json"])
    shown = CliRunner().invoke(app, ["check", str(run_dir)])
    assert told.exit_code == shown.exit_code
    return told.exit_code, json.loads(told.stdout), shown.stdout.splitlines()


def test_every_history_is_judged(tmp_path: Path) -> None:
    run_dir = rewound(tmp_path / "run")
    status, told, lines = check(run_dir)

    assert status == 0
    assert told["violations"] == 0
    assert list(told["histories"]) == ["run", "rewind-1"]  # type: ignore[call-overload]
    assert {line.partition(": ")[0] for line in lines} == {"run", "rewind-1"}
    assert count_violations(run_dir, say=lambda _: None) == 0


def test_a_violation_in_one_of_them_is_one_of_the_run(tmp_path: Path) -> None:
    run_dir = rewound(tmp_path / "run")
    write_run(run_dir / "rewind-1", Scenario(), corrupted_lines("step_twice"))
    status, told, _ = check(run_dir)

    assert status == 1
    assert told["violations"] == count_violations(run_dir, say=lambda _: None) != 0
