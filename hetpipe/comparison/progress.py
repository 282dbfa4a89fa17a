"""Progress display of a comparison: current run, its progress, and the estimated time remaining."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from statistics import fmean
from types import TracebackType
from typing import Protocol, Self, TextIO

from hetpipe.clock import Clock
from hetpipe.comparison.record import TrialRecord, TrialState
from hetpipe.comparison.trials import Trial
from hetpipe.report.progress import STATE_TEXTS, totals_text
from hetpipe.report.text import duration, measure, rate
from hetpipe.report.view import View, WaitPace
from hetpipe.values.events import (
    JobEnded,
    JobEvent,
    Notice,
    ProgressTable,
    StateChanged,
    Waiting,
)


class CompareProgress(View, AbstractContextManager["CompareProgress"], Protocol):
    """Displays the runs one after the other; each run uses it as its view."""

    def begin(self, number: int, total: int, trial: Trial) -> None:
        """Start run `number` of `total`."""
        ...

    def end(self, record: TrialRecord, *, is_used_again: bool) -> None:
        """Finish a run; also called for runs found already finished."""
        ...


@dataclass(frozen=True, slots=True)
class Pace:
    """Durations of the runs so far, for estimating the rest."""

    runs_left: int
    """After the one under way."""
    seconds: Sequence[float]
    """Of the runs trained so far."""
    elapsed: float = 0.0
    """Of the run under way."""
    eta_seconds: float | None = None
    """To its end; None while unknown."""


def remaining_seconds(pace: Pace) -> float | None:
    """Estimated seconds until all runs have ended; None without data.

    >>> remaining_seconds(Pace(2, [30.0], elapsed=10.0)), remaining_seconds(Pace(1, [], 10.0, 20.0))
    (80.0, 50.0)
    """
    known = list(pace.seconds)
    if pace.eta_seconds is not None:
        known.append(pace.elapsed + pace.eta_seconds)
    if not known:
        return None
    each = fmean(known)
    this_one = max(each - pace.elapsed, 0.0) if pace.eta_seconds is None else pace.eta_seconds
    return this_one + pace.runs_left * each


def record_text(record: TrialRecord) -> str:
    """Outcome of a run: `finished after 41 s: loss 0.1234, accuracy 0.9300, 1034 samples/s`."""
    if record.result is None:
        return f"{record.state}: {record.sentence}"
    values = record.evaluations[-1].values if record.evaluations else {}
    figures = [f"{name} {measure(value)}" for name, value in sorted(values.items(), key=lambda item: item[0] != "loss")]
    figures.append(f"{rate(record.result.samples_per_second)} samples/s")
    return f"{record.state} after {duration(record.result.wall_seconds)}: {', '.join(figures)}"


class _Shown(CompareProgress):
    """Shared by both displays: permanent lines, and the state of the current run."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._seconds: list[float] = []
        self._began = clock.monotonic()
        self._heading = ""
        self._runs_left = 0
        self._state = ""
        self._table: ProgressTable | None = None
        self._waits = WaitPace()
        #: Remarks of the runs so far, to print repeated ones once.
        self._printed: set[str] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """No-op: no resources are held."""

    def begin(self, number: int, total: int, trial: Trial) -> None:
        """Implement `CompareProgress.begin`."""
        self._heading = f"run {number} of {total}: {trial}"
        self._runs_left = total - number
        self._began = self._clock.monotonic()
        self._state, self._table = "", None

    def end(self, record: TrialRecord, *, is_used_again: bool) -> None:
        """Implement `CompareProgress.end`."""
        if not is_used_again:
            self._seconds.append(self._clock.monotonic() - self._began)
        self._state, self._table = "", None
        before = "trained before, " if is_used_again else ""
        left = remaining_seconds(Pace(self._runs_left - 1, self._seconds)) if self._runs_left else None
        rest = "" if left is None else f"; about {duration(left)} left"
        self._print(f"{self._heading}: {before}{record_text(record)}{rest}", is_bad=record.state is TrialState.FAILED)

    def show(self, event: JobEvent) -> None:
        """Implement `View.show`."""
        match event:
            case StateChanged(state=state):
                self._state = STATE_TEXTS[state]
            case ProgressTable():
                self._table = event
            case Waiting(sentence=sentence, seconds=seconds):
                if self._waits.admit(event, now=self._clock.monotonic()):
                    self._print(f"{self._heading}: waiting for {duration(seconds)}: {sentence}", is_bad=True)
            case Notice():
                self._print(f"{self._heading}: {event.text}", is_bad=event.severity == "warning")
            case JobEnded():
                self._state = ""
            case _:
                """Evaluations are shown at its end."""

    def say(self, sentence: str) -> None:
        """Implement `View.say`."""
        if sentence not in self._printed:
            self._printed.add(sentence)
            self._print(sentence)

    def close(self) -> None:
        """No-op: a run has ended, the display continues."""

    def _line(self) -> str:
        """Status line of the current run."""
        elapsed = self._clock.monotonic() - self._began
        eta = None if self._table is None else self._table.eta_seconds
        left = remaining_seconds(Pace(self._runs_left, self._seconds, elapsed, eta))
        parts = [self._heading, self._state]
        if self._table is not None:
            losses = [row.loss for row in self._table.rows if row.loss is not None]
            parts = [self._heading, totals_text(self._table)]
            parts += [f"loss {measure(fmean(losses))}"] if losses else []
        parts += [] if left is None else [f"all done in about {duration(left)}"]
        return " · ".join(part for part in parts if part)

    def _print(self, line: str, *, is_bad: bool = False) -> None:
        raise NotImplementedError


class CompareLines(_Shown):
    """One line at the end of every run, for pipes and logs."""

    def __init__(self, stream: TextIO, clock: Clock) -> None:
        super().__init__(clock)
        self._stream: TextIO | None = stream

    def _print(self, line: str, *, is_bad: bool = False) -> None:
        if self._stream is None:
            return
        try:
            self._stream.write(f"{line}\n")
            self._stream.flush()
        except (OSError, ValueError):
            # The reader has disconnected, or the stream is closed.
            self._stream = None


class CompareLive(_Shown):
    """Live display on a terminal: the same lines, and below them the current run. Needs rich."""

    def __init__(self, stream: TextIO, clock: Clock) -> None:
        from rich.console import Console  # slow import, not needed for pipes
        from rich.live import Live

        super().__init__(clock)
        self._live = Live(
            console=Console(file=stream, highlight=False),
            refresh_per_second=4,
            get_renderable=self._line,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._live.stop()

    def _print(self, line: str, *, is_bad: bool = False) -> None:
        self._live.console.print(line, style="yellow" if is_bad else None, markup=False)
