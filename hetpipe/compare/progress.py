"""How a comparison is shown while it goes on: which run of how many, how far it is, how long all will take."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from statistics import fmean
from types import TracebackType
from typing import Protocol, Self, TextIO

from hetpipe.clock import Clock
from hetpipe.compare.record import TrialRecord, TrialState
from hetpipe.compare.trials import Trial
from hetpipe.report.progress import STATE_TEXTS, totals_text
from hetpipe.report.text import duration, measure, rate
from hetpipe.report.view import View
from hetpipe.values.events import (
    JobEnded,
    JobEvent,
    Notice,
    ProgressTable,
    StateChanged,
    Waiting,
)


class CompareProgress(View, AbstractContextManager["CompareProgress"], Protocol):
    """Shows the runs one after the other; each of them takes it for its view."""

    def begin(self, number: int, total: int, trial: Trial) -> None:
        """Run `number` of `total` begins."""
        ...

    def end(self, record: TrialRecord, *, is_used_again: bool) -> None:
        """It has ended, or had before."""
        ...


@dataclass(frozen=True, slots=True)
class Pace:
    """Durations of the runs so far, and the estimate of the rest."""

    runs_left: int
    """After the one under way."""
    seconds: Sequence[float]
    """Of the runs trained so far."""
    elapsed: float = 0.0
    """Of the run under way."""
    eta_seconds: float | None = None
    """To its end; None while unknown."""


def remaining_seconds(pace: Pace) -> float | None:
    """About how long until all runs have ended; None while nothing is known.

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
    """How a run ended: `finished after 41 s: loss 0.1234, accuracy 0.9300, 1034 samples/s`."""
    if record.result is None:
        return f"{record.state}: {record.sentence}"
    values = record.evaluations[-1].values if record.evaluations else {}
    figures = [f"{name} {measure(value)}" for name, value in sorted(values.items(), key=lambda item: item[0] != "loss")]
    figures.append(f"{rate(record.result.samples_per_second)} samples/s")
    return f"{record.state} after {duration(record.result.wall_seconds)}: {', '.join(figures)}"


class _Shown(CompareProgress):
    """What both ways of showing have in common: lines for good, and what is known of the run under way."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._seconds: list[float] = []
        self._began = clock.monotonic()
        self._heading = ""
        self._runs_left = 0
        self._state = ""
        self._table: ProgressTable | None = None
        #: Remarks of the runs so far: what every run says is told once.
        self._told: set[str] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Nothing is held open."""

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
                self._print(f"{self._heading}: waiting for {duration(seconds)}: {sentence}", is_bad=True)
            case Notice():
                self._print(f"{self._heading}: {event.text}", is_bad=event.severity == "warning")
            case JobEnded():
                self._state = ""
            case _:
                """Evaluations are shown at its end."""

    def say(self, sentence: str) -> None:
        """Implement `View.say`."""
        if sentence not in self._told:
            self._told.add(sentence)
            self._print(sentence)

    def close(self) -> None:
        """Without effect: a run has ended, the display continues."""

    def _line(self) -> str:
        """The run under way."""
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
    """A line at the end of every run, for pipes and logs."""

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
            # Its reader is gone, or the stream is closed.
            self._stream = None


class CompareLive(_Shown):
    """The same lines on a terminal, and below them the run under way. Needs rich."""

    def __init__(self, stream: TextIO, clock: Clock) -> None:
        from rich.console import Console  # rich takes a while, and pipes do without
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
