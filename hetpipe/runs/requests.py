"""Resolve a user's request to the job to train: a new run, or one that resumes another one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hetpipe.checkpoint.locations import manifest_at, search_at
from hetpipe.checkpoint.manifest import no_checkpoint
from hetpipe.checkpoint.stored_run import fetch_documents
from hetpipe.errors import JobError, UserError
from hetpipe.job.file import Job, Overrides, load_job
from hetpipe.loggers.kinds import missing
from hetpipe.report.text import shown_path
from hetpipe.runs.own_code import OwnCode, Program, own_code, write_cells
from hetpipe.runs.resume import check_not_finished, check_resumed
from hetpipe.runs.run_folder import RunFolder
from hetpipe.runs.shell import Shell
from hetpipe.runs.status import is_running_here
from hetpipe.runs.training import RunRequest
from hetpipe.values.storage_url import is_url

#: A job file, a mapping like its content, or a job.
JobSource = str | Path | Mapping[str, Any] | Job


def new_run(
    source: JobSource | None,
    overrides: Overrides,
    *,
    resume: str | Path | None = None,
    coordinator: str | None = None,
    shell: Shell,
) -> RunRequest:
    """The request of a new run.

    Args:
        source: the job; None only with `resume`: the job of the old run.
        overrides: applied to the job.
        resume: folder or URL of the run to resume from its newest checkpoint.
        coordinator: `HOST:PORT` of a running cluster; None: this machine.
        shell: the command's environment.

    Raises:
        JobError: with every mistake of the job, or every changed key that must not change.
        UserError: there is no job, or the run to resume does not exist, is finished, or still running.
        CheckpointError: that run has no complete checkpoint.
    """
    if resume is not None:
        return _resumed(resume, source, overrides, coordinator, shell)
    if source is None:
        raise UserError("there is no job to train; name its file, for example job.yaml, or a run with --resume")
    job = load_job(source, overrides)
    _check_loggers(job, coordinator)
    return RunRequest(job=job, import_path=shell.current, coordinator=coordinator)


def given_run(
    job: JobSource | None,
    overrides: Mapping[str, object],
    *,
    run_dir: str | Path | None,
    resume: str | Path | None,
    coordinator: str | None,
    shell: Shell,
) -> tuple[RunRequest, RunFolder]:
    """The request and the new folder of a run whose job may contain Python objects; see `own_code`.

    Raises:
        JobError: with every mistake of the job.
        UserError: as `new_run`, or the folder cannot be used.
        CheckpointError: the run to resume has no complete checkpoint.
    """
    if job is None and resume is None and overrides:
        job = {}
    given = _given(job, overrides)
    source = given.job if isinstance(job, Mapping) else job
    request = new_run(source, given.overrides, resume=resume, coordinator=coordinator, shell=shell)
    request = replace(request, import_path=given.import_path or request.import_path)
    folder = RunFolder.create(None if run_dir is None else Path(run_dir), name=request.job.name, clock=shell.clock)
    if given.cells is not None:
        request = replace(request, import_path=write_cells(given.cells, folder.path / "code", beside=shell.current))
    return request, folder


@contextmanager
def given_job(job: JobSource | None, overrides: Mapping[str, object], shell: Shell) -> Iterator[tuple[Job, Shell]]:
    """A job that may contain Python objects, and an environment whose current folder is the one to import them from.

    Raises:
        JobError: with every mistake.
        UserError: its functions come from several folders.
    """
    given = _given({} if job is None else job, overrides)
    source = given.job if job is None or isinstance(job, Mapping) else job
    loaded = load_job(source, given.overrides)
    with TemporaryDirectory(prefix="hetpipe-cells-") as folder:
        path = given.import_path or shell.current
        if given.cells is not None:
            path = write_cells(given.cells, Path(folder), beside=shell.current)
        yield loaded, replace(shell, current=path)


def _given(job: JobSource | None, overrides: Mapping[str, object]) -> OwnCode:
    """A job without Python objects; a mapping without a name has that of the program.

    Raises:
        JobError, UserError: as `own_code`.
    """
    program = Program.current()
    if not isinstance(job, Mapping):
        return own_code({}, overrides, program)
    named = {"name": program.job_name} if program.job_name and "name" not in overrides else {}
    return own_code({**named, **job}, overrides, program)


def _check_loggers(job: Job, coordinator: str | None) -> None:
    """Reject a job whose loggers are not installed, before anything starts; a cluster's coordinator checks its own.

    Raises:
        JobError: with the packages.
    """
    lacking = missing(job.log.options) if coordinator is None else []
    if lacking:
        raise JobError(lacking)


@dataclass(frozen=True, slots=True)
class _Old:
    """The run to resume."""

    job: Job
    num_samples: Callable[[], int]
    place: str
    """Location of its checkpoints."""
    shown: str
    """Its name in messages and commands."""
    import_path: Path
    """The first folder to import its user code from."""


def _in_folder(path: Path, shell: Shell) -> _Old:
    folder = RunFolder(path.resolve())
    job = folder.read_job()
    shown = shown_path(folder.path, shell.current)
    if folder.read_result() is None and is_running_here(folder.read_record()):
        raise UserError(f"{shown} is still running; stop it with Ctrl-C first, then resume it")
    return _Old(job, folder.read_num_samples, folder.place, shown, folder.import_path(shell.current))


def _in_store(url: str, shell: Shell) -> _Old:
    # It may still be running, which cannot be determined here; resuming does not disturb it.
    with TemporaryDirectory(prefix="hetpipe-run-") as name:
        fetch_documents(url, Path(name))
        folder = RunFolder(Path(name))
        job, num_samples = folder.read_job(), folder.read_num_samples()
    return _Old(job, lambda: num_samples, url.rstrip("/"), url, shell.current)


def _resumed(
    resume: str | Path, source: JobSource | None, overrides: Overrides, coordinator: str | None, shell: Shell
) -> RunRequest:
    old = _in_store(str(resume), shell) if is_url(str(resume)) else _in_folder(Path(resume), shell)
    job = load_job(old.job if source is None else source, overrides)
    check_resumed(old.job, job)
    _check_loggers(job, coordinator)
    found = search_at(old.place)
    if found.folder is None:
        raise no_checkpoint(old.place, found)
    progress = manifest_at(found.folder).progress
    check_not_finished(job, progress, num_samples=old.num_samples(), where=old.shown)
    name = found.folder.rpartition("/")[2]
    return RunRequest(
        job=job,
        import_path=old.import_path if source is None else shell.current,
        restore=found.folder,
        coordinator=coordinator,
        remarks=tuple(f"{reason}; resuming from {name}" for reason in found.passed_over),
    )
