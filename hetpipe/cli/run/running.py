"""The commands that run a job: train, submit, demo."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from hetpipe.cli.run.summary import safety_lines, summary_lines
from hetpipe.errors import UserError
from hetpipe.job.as_json import job_from_json
from hetpipe.observe.log import configure_logging, get_logger
from hetpipe.report.text import shown_path
from hetpipe.report.view import LineView, View
from hetpipe.runs.interrupts import Interrupts
from hetpipe.runs.outcome import ExitStatus, Output
from hetpipe.runs.requests import new_run
from hetpipe.runs.run_folder import RunFolder
from hetpipe.runs.shell import Shell
from hetpipe.runs.training import RunEnd, RunRequest, Training, record_of, submission_of

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """The options that `train` and `submit` share."""

    job: Path | None
    settings: tuple[str, ...] = ()
    """`path=value` texts."""
    run_dir: Path | None = None
    resume: Path | None = None
    coordinator: str | None = None
    import_path: Path | None = None
    """Folder that user code is imported from first; None: the current one."""
    again: bool = False
    """Follow the job again that was handed in with `run_dir`, if one was."""


def train(options: RunOptions, output: Output, shell: Shell) -> ExitStatus:
    """Run a job and follow it to its end; one on a cluster that was handed in with that folder is followed again."""
    request, folder = _wanted(options, shell)
    return run(request, folder, output, shell)


def run(request: RunRequest, folder: RunFolder, output: Output, shell: Shell) -> ExitStatus:
    """Run `request` in `folder` and tell how it went."""
    configure_logging(folder.logs / "hetpipe.log", role="cli")
    view = view_for(output, request.job.name, shell)
    with Interrupts() as interrupts:
        try:
            view.say(f"the run's folder is {shown_path(folder.path, shell.current)}")
            end = Training(request, folder, shell, view=view, interrupts=interrupts).run()
            _log.info("run_ended", state=end.state, error=end.error, sentences=end.sentences)
        finally:
            view.close()
    _tell(end, output, shell)
    return end.exit_status


def submit_only(options: RunOptions, output: Output, shell: Shell) -> ExitStatus:
    """Hand a job in and leave it to itself."""
    request, folder = _wanted(options, shell)
    hand_in(request, folder, output, shell)
    return ExitStatus.OK


def hand_in(request: RunRequest, folder: RunFolder, output: Output, shell: Shell) -> None:
    """Hand `request` in, with `folder` for its run, and say so."""
    assert request.coordinator is not None
    submission = folder.read_submission()
    if submission is None:
        submission = submission_of(request, folder)
        folder.write_submission(submission)
    if not folder.has_job:
        folder.write_job(request.job)  # before the coordinator may replace it by what it planned
    client = shell.connect(request.coordinator)
    try:
        job_id = client.submit_job(submission)
    finally:
        client.close()
    folder.write_record(replace(record_of(request, folder, shell), job_id=job_id, pids={}))
    folder.point_latest()  # nobody is left who would hear that it trains
    where = shown_path(folder.path, shell.current)
    output.answer(
        {"run_dir": str(folder.path), "job_id": job_id},
        f"submitted as job {job_id}; see how it goes with: hetpipe status {where}",
    )


def view_for(output: Output, name: str, shell: Shell) -> View:
    """A live table on a terminal, else lines."""
    stream = output.people
    if shell.is_screen(stream):
        from hetpipe.report.live import LiveView  # rich takes a while, and pipes do without

        return LiveView(stream, name=name, clock=shell.clock)
    return LineView(stream, shell.clock)


def _wanted(options: RunOptions, shell: Shell) -> tuple[RunRequest, RunFolder]:
    """What to train and where: anew, or what was handed in to a cluster with the same folder.

    Raises:
        UserError: there is another job in the folder, or none at all.
    """
    folder = RunFolder(options.run_dir) if options.again and options.run_dir is not None else None
    submission = None if folder is None else folder.read_submission()
    if folder is None or submission is None:
        request = _request(options, shell)
        return request, _folder(request, options.run_dir, shell)
    if options.job is None and options.resume is None and not options.settings:
        job = job_from_json(submission.job_json)
        restore = None if submission.restore is None else Path(submission.restore)
        request = RunRequest(
            job=job,
            import_path=Path(submission.import_path),
            restore=restore,
            coordinator=options.coordinator,
            detaches=True,
        )
        return request, folder
    request = _request(options, shell)
    if submission_of(request, folder).job_json != submission.job_json:
        raise UserError(
            f"--run-dir {options.run_dir}: another job was handed in with that folder; name a new folder, or follow "
            f"that job with: hetpipe submit --run-dir {options.run_dir} --coordinator {options.coordinator}"
        )
    return request, folder


def _request(options: RunOptions, shell: Shell) -> RunRequest:
    request = new_run(
        options.job, options.settings, resume=options.resume, coordinator=options.coordinator, shell=shell
    )
    request = replace(request, detaches=options.coordinator is not None)
    return request if options.import_path is None else replace(request, import_path=options.import_path)


def _folder(request: RunRequest, run_dir: Path | None, shell: Shell) -> RunFolder:
    return RunFolder.create(run_dir, name=request.job.name, clock=shell.clock)


def _tell(end: RunEnd, output: Output, shell: Shell) -> None:
    if end.detached and not end.error:
        output.answer(end.to_json(), *end.sentences)
        return
    if end.result is None:
        for line in safety_lines(end.conditions):
            output.note(line)
        output.complain(end.sentences, end.to_json())
        return
    output.say(*end.sentences, *summary_lines(end, current=shell.current))
    if output.machine is not None:
        output.answer(end.to_json())
