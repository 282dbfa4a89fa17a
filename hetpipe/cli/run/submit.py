"""`hetpipe submit`: submit a job to a running cluster; repeated with the same folder, follow the job again."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from hetpipe.cli.options import Json, Resume, Settings, TlsFolder
from hetpipe.cli.run.following import follow, hand_in
from hetpipe.errors import UserError
from hetpipe.job.as_json import job_from_json
from hetpipe.runs.outcome import ExitStatus, Output
from hetpipe.runs.requests import new_run
from hetpipe.runs.run_folder import RunFolder
from hetpipe.runs.shell import Shell
from hetpipe.runs.training import RunRequest, submission_of
from hetpipe.values.events import Submission


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Train a job on a running cluster and follow it to its end. Ctrl-C stops it at a checkpoint; SIGTERM detaches."""

    job: Annotated[
        Path | None,
        typer.Argument(
            metavar="JOB", help="Job file; not needed with --resume, nor to follow the job of --run-dir again."
        ),
    ] = None
    coordinator: Annotated[str, typer.Option(metavar="HOST:PORT", help="Coordinator of the running cluster.")]
    settings: Settings = ()
    run_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder for the run, new or empty; or that of a submitted job, to follow it again.  "
            "[default: runs/NAME-TIME]",
        ),
    ] = None
    resume: Resume = None
    detach: Annotated[bool, typer.Option("--detach", help="Do not follow the job.")] = False
    tls: TlsFolder = None
    as_json: Json = False


def run(options: Options, output: Output, shell: Shell) -> ExitStatus:
    """Submit a job and, unless detached, follow it to its end."""
    request, folder = _wanted(options, shell)
    if not options.detach:
        return follow(request, folder, output, shell)
    hand_in(request, folder, output, shell)
    return ExitStatus.OK


def _wanted(options: Options, shell: Shell) -> tuple[RunRequest, RunFolder]:
    """The submission: a new job, or the one that was submitted to a cluster with the same folder.

    Raises:
        UserError: the folder has another job, or no job is given.
    """
    folder = None if options.run_dir is None else RunFolder(options.run_dir)
    submission = None if folder is None else folder.read_submission()
    if folder is None or submission is None:
        request = _request(options, shell)
        return request, RunFolder.create(options.run_dir, name=request.job.name, clock=shell.clock)
    if options.job is None and options.resume is None and not options.settings:
        return _request_of(submission, options.coordinator), folder
    request = _request(options, shell)
    if submission_of(request, folder).job_json != submission.job_json:
        raise UserError(
            f"--run-dir {options.run_dir}: another job was submitted with that folder; name a new folder, or follow "
            f"that job with: hetpipe submit --run-dir {options.run_dir} --coordinator {options.coordinator}"
        )
    return request, folder


def _request(options: Options, shell: Shell) -> RunRequest:
    request = new_run(
        options.job, options.settings, resume=options.resume, coordinator=options.coordinator, shell=shell
    )
    return replace(request, detaches=True)


def _request_of(submission: Submission, coordinator: str) -> RunRequest:
    """The earlier submission."""
    return RunRequest(
        job=job_from_json(submission.job_json),
        import_path=Path(submission.import_path),
        restore=submission.restore,
        coordinator=coordinator,
        detaches=True,
    )
