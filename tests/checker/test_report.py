"""The report's two faces, the errors for what is no run, and the checker's independence."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

import hetpipe.checker
from hetpipe.checker import Counts, Kind, Report, Violation, check_run
from hetpipe.errors import UserError
from tests.checker.generate import SHIPPED
from tests.checker.scenario import Scenario, write_run
from tests.checker.simulator import as_lines, simulate


def test_json_holds_what_check_prints() -> None:
    report = check_run(SHIPPED / "torn_wave").to_json()
    assert json.loads(json.dumps(report)) == report
    assert (report["minibatches"], report["violations"]) == (15, 1)
    assert (report["waves_applied_twice"], report["torn_waves"]) == (0, 1)
    assert [detail["kind"] for detail in report["details"]] == ["torn_wave"]
    assert "wave 1 of virtual worker 0 is torn" in report["details"][0]["message"]


def test_lines_name_each_violation_and_end_with_the_verdict() -> None:
    lines = check_run(SHIPPED / "clock_fell").lines()
    assert lines[1].startswith("clock_fell: the published clock fell from 3 to 2 (history/parameter_server-0.jsonl:")
    assert lines[-1] == "verdict: 1 violation; 0 waves applied twice, 0 torn waves"
    clean = check_run(SHIPPED / "clean").lines()
    judged = "judged 185 events by weights wave and schedule 1f1b: 15 minibatches, 8 waves committed, clock 4 published"
    assert clean[0].startswith(judged)
    assert clean[-1] == "verdict: no violation"


def test_many_violations_of_one_kind_are_summed_up() -> None:
    violations = tuple(Violation(Kind.STALE_CLOCK, f"number {n}", "history/a.jsonl:1") for n in range(30))
    report = Report("wave", "1f1b", 30, violations, 0, 0, Counts())
    assert len(report.to_json()["details"]) == 20
    assert report.to_json()["kinds"] == {"stale_clock": 30}
    assert "stale_clock: 10 more like these" in report.lines()


def test_a_folder_that_is_no_run_is_the_user_s_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="name the folder of a run"):
        check_run(tmp_path)


@pytest.mark.parametrize("name", ["job.json", "plan.json", "facts.json"])
def test_a_missing_or_foreign_file_is_named(name: str, tmp_path: Path) -> None:
    scenario = Scenario()
    write_run(tmp_path, scenario, as_lines(simulate(scenario)))
    (tmp_path / name).write_text("{}")
    with pytest.raises(UserError, match=name):
        check_run(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(UserError, match=f"cannot read .*{name}"):
        check_run(tmp_path)


@pytest.mark.parametrize(
    ("old", "new"),
    [('"wave"', '"newest"'), ('"wsp"', '"gossip"'), ('"D":1', '"D":null'), ('"auto"', '"interleaved"')],
)
def test_what_cannot_be_checked_is_refused(old: str, new: str, tmp_path: Path) -> None:
    scenario = Scenario()
    write_run(tmp_path, scenario, as_lines(simulate(scenario)))
    job = (tmp_path / "job.json").read_text()
    (tmp_path / "job.json").write_text(job.replace(old, new))
    with pytest.raises(UserError, match="cannot be checked"):
        check_run(tmp_path)


def test_the_checker_imports_nothing_that_it_judges() -> None:
    folder = Path(hetpipe.checker.__file__).parent
    imported: set[str] = set()
    for path in folder.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                imported.add(node.module)
            elif isinstance(node, ast.Import):
                imported.update(alias.name for alias in node.names)
    ours = {name for name in imported if name.split(".")[0] == "hetpipe"}
    assert {name for name in ours if not name.startswith("hetpipe.checker")} == {"hetpipe.errors"}
    assert not {name.split(".")[0] for name in imported} & {"torch", "grpc", "redis", "google"}
