"""Resolution of a user's request to the job to train: a new run, or one that resumes another one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hetpipe.checkpoint.manifest import no_checkpoint, read_manifest, search
from hetpipe.errors import UserError
from hetpipe.job.file import Job, Overrides, load_job
from hetpipe.report.text import shown_path
from hetpipe.runs.resume import check_not_finished, check_resumed
from hetpipe.runs.run_folder import RunFolder
from hetpipe.runs.shell import Shell
from hetpipe.runs.status import is_running_here
from hetpipe.runs.training import RunRequest

#: A job file, a mapping like its content, or a job.
JobSource = str | Path | Mapping[str, Any] | Job


def new_run(
    source: JobSource | None,
    overrides: Overrides,
    *,
    resume: Path | None = None,
    coordinator: str | None = None,
    shell: Shell,
) -> RunRequest:
    """The request of a new run.

    Args:
        source: the job; None only with `resume`, which then means the old run's.
        overrides: laid over it.
        resume: folder of the run to go on with, from its newest checkpoint.
        coordinator: `HOST:PORT` of a running cluster; None: this machine.
        shell: the world around.

    Raises:
        JobError: with every mistake of the job, or every key that must stay and does not.
        UserError: there is no job, or the run to resume is not one, is finished, or still going on.
        CheckpointError: that run has no complete checkpoint.
    """
    if resume is not None:
        return _resumed(RunFolder(resume.resolve()), source, overrides, coordinator, shell)
    if source is None:
        raise UserError("there is no job to train; name its file, for example job.yaml, or a run with --resume")
    return RunRequest(job=load_job(source, overrides), import_path=shell.current, coordinator=coordinator)


def _resumed(
    old: RunFolder, source: JobSource | None, overrides: Overrides, coordinator: str | None, shell: Shell
) -> RunRequest:
    before = old.read_job()
    job = load_job(before if source is None else source, overrides)
    check_resumed(before, job)
    where = shown_path(old.path, shell.current)
    if old.read_result() is None and is_running_here(old.read_record()):
        raise UserError(f"{where} is still running; stop it with Ctrl-C first, then resume it")
    found = search(old.path)
    if found.folder is None:
        raise no_checkpoint(old.path, found)
    progress = read_manifest(found.folder).progress
    check_not_finished(job, progress, num_samples=old.read_num_samples(), where=where)
    return RunRequest(
        job=job,
        import_path=shell.current,
        restore=found.folder,
        coordinator=coordinator,
        remarks=tuple(f"{reason}; going on from {found.folder.name}" for reason in found.passed_over),
    )
