"""`hetpipe train`: train a job, on this machine or on a running cluster."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

import typer

from hetpipe.cli.options import JobOrResume, Json, NewRunDir, Resume, Settings, TlsFolder
from hetpipe.cli.run.following import follow
from hetpipe.runs.outcome import ExitStatus, Output
from hetpipe.runs.requests import new_run
from hetpipe.runs.run_folder import RunFolder
from hetpipe.runs.shell import Shell


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Train a job and follow it to its end. Ctrl-C stops it at a checkpoint, a second one at once."""

    job: JobOrResume = None
    settings: Settings = ()
    run_dir: NewRunDir = None
    resume: Resume = None
    coordinator: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Train on a running cluster instead of starting one on this machine."),
    ] = None
    tls: TlsFolder = None
    as_json: Json = False


def run(options: Options, output: Output, shell: Shell) -> ExitStatus:
    """Train a job and follow it to its end."""
    request = new_run(
        options.job, options.settings, resume=options.resume, coordinator=options.coordinator, shell=shell
    )
    request = replace(request, detaches=options.coordinator is not None)
    folder = RunFolder.create(options.run_dir, name=request.job.name, clock=shell.clock)
    return follow(request, folder, output, shell)
