"""Train one run of a comparison on this machine like `hetpipe train`, and collect its curves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from hetpipe.clock import Clock as TimeSource
from hetpipe.comparison.record import Point, TrialRecord, TrialState
from hetpipe.comparison.statistics import distance_curve, training_curve
from hetpipe.comparison.trials import Trial
from hetpipe.errors import NonFiniteUpdate, UserError
from hetpipe.observe.clock_curve import ClockPoint, read_clock_curve
from hetpipe.observe.log import configure_logging
from hetpipe.observe.metrics import TimedWave, read_metrics
from hetpipe.report.view import View
from hetpipe.runs.interrupts import Interrupts
from hetpipe.runs.run_folder import RunFolder
from hetpipe.runs.shell import Shell
from hetpipe.runs.training import RunEnd, RunRequest, Training
from hetpipe.values.events import Evaluated, JobEvent, JobState, StateChanged
from hetpipe.values.rewinds import run_folders


class Recorder(View):
    """Forwards everything to another view and records the times of evaluations."""

    def __init__(self, view: View, clock: TimeSource) -> None:
        self._view = view
        self._clock = clock
        #: When all stages were ready, in monotonic seconds; None before.
        self.began: float | None = None
        #: Evaluations over all of the evaluation data, each with the monotonic time of its report.
        self.evaluations: list[tuple[float, Evaluated]] = []

    def show(self, event: JobEvent) -> None:
        """Implement `View.show`."""
        match event:
            case StateChanged(state=JobState.RUNNING):
                self.began = self._clock.monotonic()
            case Evaluated(whole=True):
                self.evaluations.append((self._clock.monotonic(), event))
        self._view.show(event)

    def say(self, sentence: str) -> None:
        """Implement `View.say`."""
        self._view.say(sentence)

    def close(self) -> None:
        """Implement `View.close`."""
        self._view.close()


def train_trial(trial: Trial, run_dir: Path, shell: Shell, view: View) -> TrialRecord:
    """Train one run to completion.

    Args:
        trial: what to train.
        run_dir: the run's folder, new.
        shell: the command's environment.
        view: displays progress; is left open.

    Returns:
        Its outcome.

    Raises:
        UserError: the job cannot be trained, under whatever policy.
        KeyboardInterrupt: it was stopped by Ctrl-C.
    """
    folder = RunFolder.create(run_dir, name=trial.job.name, clock=shell.clock, runs_dir=run_dir.parent)
    configure_logging(folder.logs / "hetpipe.log", role="cli")
    recorder = Recorder(view, shell.clock)
    request = RunRequest(job=trial.job, import_path=shell.current)
    with Interrupts() as interrupts:
        end = Training(request, folder, shell, view=recorder, interrupts=interrupts).run()
    if end.interrupted:
        raise KeyboardInterrupt("; ".join(end.sentences))
    return record_of(trial, end, recorder, folder)


def record_of(trial: Trial, end: RunEnd, recorder: Recorder, folder: RunFolder) -> TrialRecord:
    """Create the record of a run.

    Raises:
        UserError: the job cannot be trained, under whatever policy.
    """
    if end.state is JobState.FAILED and isinstance(end.exception(), UserError):
        raise end.exception()
    return TrialRecord(
        weights=trial.weights,
        seed=trial.seed,
        values=trial.values,
        job_digest=trial.job_digest,
        run_dir=folder.path.name,
        state=_state(end),
        sentence="; ".join(end.sentences),
        evaluations=() if recorder.began is None else _evaluations(recorder, recorder.began),
        losses=() if recorder.began is None else training_curve(_waves(folder), began=recorder.began),
        distances=()
        if recorder.began is None
        else distance_curve(_commits(folder), began=recorder.began, batch_size=trial.job.batch_size),
        result=end.result if end.state is JobState.FINISHED else None,
    )


def _waves(folder: RunFolder) -> list[TimedWave]:
    """Waves trained, in order of time, including those undone by a rewind."""
    return [wave for where in run_folders(folder.path) for wave in read_metrics(where)]


def _commits(folder: RunFolder) -> list[ClockPoint]:
    """Commits, in order of time, including those undone by a rewind."""
    found: list[ClockPoint] = []
    for where in run_folders(folder.path):
        before = found[-1].samples if found else 0
        found += [replace(one, samples=before + one.samples) for one in read_clock_curve(where)]
    return found


def _state(end: RunEnd) -> TrialState:
    if end.state is JobState.FINISHED:
        return TrialState.FINISHED
    return TrialState.DIVERGED if end.error == NonFiniteUpdate.__name__ else TrialState.FAILED


def _evaluations(recorder: Recorder, began: float) -> tuple[Point, ...]:
    return tuple(
        Point(evaluated.minibatches, seconds - began, _finite(evaluated.values))
        for seconds, evaluated in recorder.evaluations
    )


def _finite(values: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in values.items() if math.isfinite(value)}
