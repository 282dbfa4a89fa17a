"""`hetpipe check`: the verdict of the history checker, the package `hetpipe.checker`."""

from __future__ import annotations

from dataclasses import dataclass

from hetpipe.checker import check_run
from hetpipe.cli.options import Json, RunDir, RunsDir
from hetpipe.runs.judge import histories_of
from hetpipe.runs.outcome import ExitStatus, Output
from hetpipe.runs.run_folder import RUNS, find_run
from hetpipe.runs.shell import Shell


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Verify a run's history. Staleness bound, exactly-once application of waves, sample accounting."""

    run_dir: RunDir = None
    runs_dir: RunsDir = RUNS
    as_json: Json = False


def run(options: Options, output: Output, _shell: Shell) -> ExitStatus:
    """Verify a run's histories: its own, and those of the folders of its rewinds."""
    run_dir = find_run(options.run_dir, runs_dir=options.runs_dir).path
    reports = {where.name: check_run(where) for where in histories_of(run_dir)}
    if len(reports) == 1:
        (report,) = reports.values()
        output.answer(dict(report.to_json()), *report.lines())
    else:
        lines = [f"{name}: {line}" for name, report in reports.items() for line in report.lines()]
        violations = sum(len(report.violations) for report in reports.values())
        histories = {name: report.to_json() for name, report in reports.items()}
        output.answer({"violations": violations, "histories": histories}, *lines)
    return ExitStatus.OK if all(report.ok for report in reports.values()) else ExitStatus.FAILED
