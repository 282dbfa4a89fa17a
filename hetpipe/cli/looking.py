"""The commands that look at a run or at this machine: status, clocks, check, export, doctor, init, version."""

from __future__ import annotations

import importlib.metadata
import platform
from dataclasses import dataclass
from pathlib import Path

import hetpipe
from hetpipe.check import check_run
from hetpipe.checkpoint.export import export_weights
from hetpipe.cli.look import clocks as clocks_module
from hetpipe.cli.start import doctor as doctor_module
from hetpipe.cli.start.init import write_templates
from hetpipe.errors import UserError
from hetpipe.report.text import count, shown_path
from hetpipe.runs.judge import histories_of
from hetpipe.runs.mending import Mending
from hetpipe.runs.outcome import ExitStatus, Output
from hetpipe.runs.run_folder import RUNS, find_run
from hetpipe.runs.shell import Shell
from hetpipe.runs.status import status_of_coordinator, status_of_run


@dataclass(frozen=True, slots=True, kw_only=True)
class Which:
    """Which run is meant: the one in a folder, the newest job of a coordinator, or the newest run started here."""

    run_dir: Path | None = None
    coordinator: str | None = None
    runs_dir: Path = RUNS


def status(which: Which, output: Output, shell: Shell) -> ExitStatus:
    """Tell how a run is doing."""
    if which.coordinator is not None and which.run_dir is None:
        found = status_of_coordinator(which.coordinator, shell)
    else:
        found = status_of_run(find_run(which.run_dir, runs_dir=which.runs_dir), shell)
    output.answer(found.to_json(), *found.lines(shell.current))
    return ExitStatus.OK


def clocks(which: Which, output: Output, shell: Shell) -> ExitStatus:
    """Tell the clocks of a run."""
    if which.coordinator is not None and which.run_dir is None:
        found = clocks_module.clocks_of_coordinator(which.coordinator, shell)
    else:
        found = clocks_module.clocks_of_run(find_run(which.run_dir, runs_dir=which.runs_dir), shell)
    output.answer(found.to_json(), *found.lines())
    return ExitStatus.OK


def watch_clocks(which: Which, output: Output, shell: Shell) -> ExitStatus:
    """Tell the clocks of a run after every change, to its end: one line each."""
    if which.coordinator is not None and which.run_dir is None:
        changes = clocks_module.watch_coordinator(which.coordinator, shell, Mending(shell.clock, say=output.note))
    else:
        changes = clocks_module.watch_run(find_run(which.run_dir, runs_dir=which.runs_dir), shell, output.note)
    for found in changes:
        output.answer(found.to_json(), found.line())
    return ExitStatus.OK


def check(which: Which, output: Output) -> ExitStatus:
    """Judge a run by its histories: its own, and after a rewind that of each folder in which it went on."""
    run_dir = find_run(which.run_dir, runs_dir=which.runs_dir).path
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


def export(paths: list[Path], runs_dir: Path, output: Output, shell: Shell) -> ExitStatus:
    """Write the weights of a run into one file. `paths`: the run's folder, which may be left out, and the file."""
    *run_dirs, out = paths
    if len(run_dirs) > 1:
        raise UserError(
            "export takes the folder of one run and the file to write: hetpipe export RUN_DIR OUT.safetensors"
        )
    folder = find_run(run_dirs[0] if run_dirs else None, runs_dir=runs_dir)
    exported = export_weights(folder.path, out)
    output.answer(
        {
            "path": str(out.absolute()),
            "checkpoint": str(exported.checkpoint),
            "clock": exported.clock,
            "tensors": exported.num_tensors,
            "bytes": exported.num_bytes,
        },
        f"wrote {out}: {count(exported.num_tensors, 'tensor')}, {exported.num_bytes} bytes, the weights of "
        f"{shown_path(folder.path, shell.current)} at clock {exported.clock}",
    )
    return ExitStatus.OK


def doctor(output: Output, shell: Shell) -> ExitStatus:
    """Check this machine."""
    checks = doctor_module.examine(shell.current)
    output.answer(doctor_module.to_json(checks), *doctor_module.lines(checks))
    return ExitStatus.FAILED if doctor_module.has_failed(checks) else ExitStatus.OK


def init(folder: Path, output: Output, shell: Shell) -> ExitStatus:
    """Write a job to start from."""
    written = write_templates(folder)
    go = "" if folder.resolve() == shell.current.resolve() else f"cd {folder} && "
    output.say(
        f"wrote {' and '.join(map(str, written))}: a small model that trains as it is; put yours in its place",
        f"train it with: {go}hetpipe train job.yaml",
    )
    return ExitStatus.OK


def version(output: Output) -> ExitStatus:
    """Tell which versions there are."""
    others = ", ".join(f"{name} {_version(name)}" for name in ("torch", "grpcio"))
    output.say(f"hetpipe {hetpipe.__version__} (Python {platform.python_version()}, {others})")
    return ExitStatus.OK


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
