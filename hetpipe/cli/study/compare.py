"""`hetpipe compare`: train one job under several weight policies or values in sequence, and compare the results.

A run that diverges or fails is a row of the comparison, and does not end it. Ctrl-C ends the comparison and keeps the
finished runs; the same command with `--run-dir` continues it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Protocol

import typer

from hetpipe.cli.options import JobFile, Json, Settings
from hetpipe.comparison.progress import CompareLines, CompareLive, CompareProgress
from hetpipe.comparison.record import ComparisonFolder, TrialRecord, TrialState
from hetpipe.comparison.trainer import train_trial
from hetpipe.comparison.trials import COMPARED, Trial, trials_of
from hetpipe.comparison.view import comparison_json, summaries_of, view_of
from hetpipe.errors import UserError
from hetpipe.report.text import shown_path
from hetpipe.report.view import View
from hetpipe.runs.outcome import ExitStatus, Output
from hetpipe.runs.shell import Shell


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Train a job under several weight policies, or values of its keys. Compares convergence, speed and memory."""

    job: JobFile
    weights: Annotated[
        str | None,
        typer.Option(
            metavar="POLICY,…", help=f"Weight policies to compare.  [default: {COMPARED}; with --vary the job's]"
        ),
    ] = None
    vary: Annotated[
        tuple[str, ...],
        typer.Option(metavar="PATH=VALUE,…", help="Compare values of a key of the job. Of several all combinations."),
    ] = ()
    seeds: Annotated[int, typer.Option(metavar="N", help="Number of seeds, starting from the job's.")] = 3
    settings: Settings = ()
    own_settings: Annotated[
        tuple[str, ...],
        typer.Option(
            "--set-for", metavar="POLICY:PATH=VALUE", help="Change a key of the job under one policy only. Repeatable."
        ),
    ] = ()
    run_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Folder of the comparison; its finished runs are reused.  [default: a new one]"
        ),
    ] = None
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the comparison as an HTML page with curves.")
    ] = None
    as_json: Json = False


class Trainer(Protocol):
    """Trains one run; see `train_trial`."""

    def __call__(self, trial: Trial, run_dir: Path, shell: Shell, view: View) -> TrialRecord:
        """Train it to its end."""
        ...


def run(options: Options, output: Output, shell: Shell, train: Trainer = train_trial) -> ExitStatus:
    """Train the missing runs, and print the comparison.

    Raises:
        UserError: the options or, under one of the policies, the job cannot be used; or a file cannot be written.
    """
    trials = trials_of(options.job, options)
    if options.html is not None and not options.html.absolute().parent.is_dir():
        raise UserError(f"--html {options.html}: no such folder; create it, or name another")
    name = trials[0].job.name
    folder = ComparisonFolder.open(options.run_dir, name=name, clock=shell.clock)
    where = shown_path(folder.path, shell.current)
    output.say(f"the comparison's folder is {where}")
    interrupted = False
    with _progress_for(output, shell) as progress:
        try:
            train_all(trials, folder, shell, progress, train)
        except KeyboardInterrupt:
            interrupted = True
    records = [record for trial in trials if (record := folder.find(trial))]
    if records:
        _print_results(trials, records, folder, options, output, shell)
    if interrupted:
        sentence = f"interrupted after {len(records)} of {len(trials)} runs; continue with --run-dir {where}"
        # Finished records determine the only choice.
        output.say(sentence) if records else output.complain([sentence])
        return ExitStatus.INTERRUPTED
    return ExitStatus.FAILED if any(one.state is TrialState.FAILED for one in records) else ExitStatus.OK


def train_all(
    trials: Sequence[Trial], folder: ComparisonFolder, shell: Shell, progress: CompareProgress, train: Trainer
) -> None:
    """Train the trials that `folder` has no result of; those that failed are tried again.

    Raises:
        KeyboardInterrupt: Ctrl-C; finished runs are recorded.
    """
    for number, trial in enumerate(trials, start=1):
        progress.begin(number, len(trials), trial)
        record = folder.find(trial)
        is_to_do = record is None or record.state is TrialState.FAILED
        if record is None or is_to_do:
            record = train(trial, folder.fresh_run_dir(trial), shell, progress)
            folder.add(record, name=trial.job.name)
        progress.end(record, is_used_again=not is_to_do)


def _print_results(
    trials: Sequence[Trial],
    records: Sequence[TrialRecord],
    folder: ComparisonFolder,
    options: Options,
    output: Output,
    shell: Shell,
) -> None:
    summaries = summaries_of(tuple(dict.fromkeys(trial.label for trial in trials)), records)
    view = view_of(trials[0].job, len({trial.seed for trial in trials}), summaries, records)
    # rich and the page are needed neither by other commands nor by --json
    if output.machine is None:
        from rich.console import Console

        from hetpipe.comparison.screen import show_comparison

        output.say("")
        show_comparison(view, Console(file=output.people, highlight=False))
    if options.html is not None:
        from hetpipe.comparison.page import page_of

        try:
            options.html.write_text(page_of(view, records), encoding="utf-8")
        except OSError as error:
            raise UserError(f"cannot write {options.html}: {error.strerror}; give --html another file") from error
        output.say("", f"the page is in {shown_path(options.html.absolute(), shell.current)}")
    if output.machine is not None:
        seeds = sorted({trial.seed for trial in trials})
        output.answer(comparison_json(folder.path, seeds, summaries, records))


def _progress_for(output: Output, shell: Shell) -> CompareProgress:
    if shell.is_screen(output.people):
        return CompareLive(output.people, shell.clock)
    return CompareLines(output.people, shell.clock)
