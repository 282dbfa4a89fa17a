"""`hetpipe status`."""

from __future__ import annotations

from dataclasses import dataclass

from hetpipe.cli.options import Json, NewestJobOf, RunDir, RunsDir, TlsFolder
from hetpipe.runs.outcome import ExitStatus, Output
from hetpipe.runs.run_folder import RUNS, find_run
from hetpipe.runs.shell import Shell
from hetpipe.runs.status import status_of_coordinator, status_of_run


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Show the status of a run. State, processes, clocks."""

    run_dir: RunDir = None
    coordinator: NewestJobOf = None
    runs_dir: RunsDir = RUNS
    tls: TlsFolder = None
    as_json: Json = False


def run(options: Options, output: Output, shell: Shell) -> ExitStatus:
    """Print the status of a run."""
    if options.coordinator is not None and options.run_dir is None:
        found = status_of_coordinator(options.coordinator, shell)
    else:
        found = status_of_run(find_run(options.run_dir, runs_dir=options.runs_dir), shell)
    output.answer(found.to_json(), *found.lines(shell.current))
    return ExitStatus.OK
