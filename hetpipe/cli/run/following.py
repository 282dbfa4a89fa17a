"""Follow a run to its end, or submit it without following; for train, submit, demo and up."""

from __future__ import annotations

from contextlib import closing

from hetpipe.cli.run.summary import safety_lines, summary_lines
from hetpipe.observe.log import configure_logging, get_logger
from hetpipe.report.text import shown_path
from hetpipe.report.view import LineView, View
from hetpipe.runs import training
from hetpipe.runs.interrupts import Interrupts
from hetpipe.runs.outcome import ExitStatus, Output
from hetpipe.runs.run_folder import RunFolder
from hetpipe.runs.shell import Shell
from hetpipe.runs.training import RunEnd, RunRequest, Training

_log = get_logger(__name__)


def follow(request: RunRequest, folder: RunFolder, output: Output, shell: Shell) -> ExitStatus:
    """Run `request` in `folder` and print its result."""
    configure_logging(folder.logs / "hetpipe.log", role="cli")
    view = view_for(output, request.job.name, shell)
    with Interrupts() as interrupts:
        try:
            end = Training(request, folder, shell, view=view, interrupts=interrupts).run()
            _log.info("run_ended", state=end.state, error=end.error, sentences=end.sentences)
        finally:
            view.close()
    _print_ending(end, output, shell)
    return end.exit_status


def hand_in(request: RunRequest, folder: RunFolder, output: Output, shell: Shell) -> None:
    """Submit `request`, with `folder` for its run, and print the job id."""
    assert request.coordinator is not None
    with closing(shell.connect(request.coordinator)) as client:
        job_id = training.hand_in(request, folder, client, shell)
    where = shown_path(folder.path, shell.current)
    output.answer(
        {"run_dir": str(folder.path), "job_id": job_id},
        f"submitted as job {job_id}; show its status with: hetpipe status {where}",
    )


def view_for(output: Output, name: str, shell: Shell) -> View:
    """A live table on a terminal, else lines."""
    stream = output.people
    if shell.is_screen(stream):
        from hetpipe.report.live import LiveView  # rich is slow to import, and not needed for pipes

        return LiveView(stream, name=name, clock=shell.clock)
    return LineView(stream, shell.clock)


def _print_ending(end: RunEnd, output: Output, shell: Shell) -> None:
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
