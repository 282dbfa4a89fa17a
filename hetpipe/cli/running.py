"""The commands that run a job: train, submit, demo."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from hetpipe.cli.interrupts import Interrupts
from hetpipe.cli.outcome import ExitStatus, Output
from hetpipe.cli.requests import new_run
from hetpipe.cli.run_folder import RunFolder
from hetpipe.cli.shell import Shell
from hetpipe.cli.summary import safety_lines, summary_lines
from hetpipe.cli.text import shown_path
from hetpipe.cli.training import RunEnd, RunRequest, Training, record_of, submission_of
from hetpipe.cli.view import LineView, View
from hetpipe.observe.log import configure_logging, get_logger

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


def train(options: RunOptions, output: Output, shell: Shell) -> ExitStatus:
    """Run a job and follow it to its end."""
    request = _request(options, shell)
    return run(request, _folder(request, options.run_dir, shell), output, shell)


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
    request = _request(options, shell)
    hand_in(request, _folder(request, options.run_dir, shell), output, shell)
    return ExitStatus.OK


def hand_in(request: RunRequest, folder: RunFolder, output: Output, shell: Shell) -> None:
    """Hand `request` in, with `folder` for its run, and say so."""
    assert request.coordinator is not None
    folder.write_job(request.job)  # before the coordinator may replace it by what it planned
    client = shell.connect(request.coordinator)
    try:
        job_id = client.submit_job(submission_of(request, folder))
    finally:
        client.close()
    folder.write_record(replace(record_of(request, folder, shell), job_id=job_id, pids={}))
    where = shown_path(folder.path, shell.current)
    output.answer(
        {"run_dir": str(folder.path), "job_id": job_id},
        f"submitted as job {job_id}; see how it goes with: hetpipe status {where}",
    )


def view_for(output: Output, name: str, shell: Shell) -> View:
    """A live table on a terminal, else lines."""
    stream = output.people
    if shell.is_screen(stream):
        from hetpipe.cli.live import LiveView  # rich takes a while, and pipes do without

        return LiveView(stream, name=name, clock=shell.clock)
    return LineView(stream, shell.clock)


def _request(options: RunOptions, shell: Shell) -> RunRequest:
    request = new_run(
        options.job, options.settings, resume=options.resume, coordinator=options.coordinator, shell=shell
    )
    return request if options.import_path is None else replace(request, import_path=options.import_path)


def _folder(request: RunRequest, run_dir: Path | None, shell: Shell) -> RunFolder:
    return RunFolder.create(run_dir, name=request.job.name, clock=shell.clock)


def _tell(end: RunEnd, output: Output, shell: Shell) -> None:
    if end.result is None:
        for line in safety_lines(end.conditions):
            output.note(line)
        output.complain(end.sentences, end.to_json())
        return
    output.say(*end.sentences, *summary_lines(end, current=shell.current))
    if output.machine is not None:
        output.answer(end.to_json())
