"""The display of a run in progress: the interface, and the line view. `live` has the terminal view.

`LineView` writes one structured line every few seconds, for pipes and logs; `live.LiveView` shows a table on a
terminal; `CallbackView` passes events to a function; `SilentView` shows nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Protocol, TextIO

from hetpipe.clock import Clock
from hetpipe.report.conditions import condition_line
from hetpipe.report.progress import evaluation_line, measuring_pairs, notice_line, table_line
from hetpipe.report.text import pairs
from hetpipe.values.events import (
    ConditionCleared,
    ConditionRaised,
    Evaluated,
    JobEnded,
    JobEvent,
    Measuring,
    Notice,
    ProgressTable,
    StateChanged,
    Waiting,
)

#: Interval of lines about progress, and of those about evaluations, in seconds.
LINE_SECONDS = 5.0
EVALUATION_SECONDS = 1.0

#: Interval of repeated lines about the same wait, in seconds: doubled each time, up to the maximum.
WAIT_SECONDS = 10.0
MAX_WAIT_SECONDS = 300.0


class View(Protocol):
    """The display of one run. Not thread-safe. Never raises because its output is closed: the run continues."""

    def show(self, event: JobEvent) -> None:
        """Show an event of the job."""
        ...

    def say(self, sentence: str) -> None:
        """Show a remark that is not an event."""
        ...

    def close(self) -> None:
        """Flush delayed lines and restore the terminal. Idempotent; remarks may still follow."""
        ...


class SilentView(View):
    """Shows nothing."""

    def show(self, event: JobEvent) -> None:
        """No-op."""

    def say(self, sentence: str) -> None:
        """No-op."""

    def close(self) -> None:
        """No-op: nothing is buffered."""


class CallbackView(SilentView):
    """Passes every event to a function; an exception in it ends the run."""

    def __init__(self, callback: Callable[[JobEvent], None]) -> None:
        self._callback = callback

    def show(self, event: JobEvent) -> None:
        """Implement `View.show`."""
        self._callback(event)


class LineView(View):
    """One `key=value` line per event. Lines about progress and evaluations are rate-limited."""

    def __init__(self, stream: TextIO, clock: Clock) -> None:
        self._stream: TextIO | None = stream
        self._clock = clock
        self._began = clock.monotonic()
        self._progress = _Pace(LINE_SECONDS)
        self._evaluations = _Pace(EVALUATION_SECONDS)
        self._measuring = _Pace(WAIT_SECONDS)
        self._waits = WaitPace()

    def show(self, event: JobEvent) -> None:  # noqa: C901 - one per kind of event
        """Implement `View.show`."""
        match event:
            case StateChanged(state=state, remark=remark):
                if state.is_terminal:
                    self._write_held_back()
                self._write(pairs({"state": state} | ({"sentence": remark} if remark else {})))
            case Waiting(sentence=sentence, seconds=seconds):
                if self._waits.admit(event, now=self._clock.monotonic()):
                    self._write(pairs({"event": "waiting", "seconds": round(seconds, 1), "sentence": sentence}))
            case Measuring(step=step):
                self._write(self._measuring.admit(pairs(measuring_pairs(step)), now=self._clock.monotonic()))
            case Evaluated():
                self._write(self._evaluations.admit(evaluation_line(event), now=self._clock.monotonic()))
            case ProgressTable():
                self._write(self._progress.admit(table_line(event), now=self._clock.monotonic()))
            case Notice():
                self._write(notice_line(event))
            case ConditionRaised() | ConditionCleared():
                self._write(condition_line(event))
            case JobEnded():
                """Displayed with its state."""

    def say(self, sentence: str) -> None:
        """Implement `View.say`."""
        self._write(pairs({"event": "note", "sentence": sentence}))

    def close(self) -> None:
        """Implement `View.close`."""
        self._write_held_back()

    def _write_held_back(self) -> None:
        for pace in (self._progress, self._evaluations):
            self._write(pace.release())

    def _write(self, line: str | None) -> None:
        if self._stream is None or line is None:
            return
        try:
            self._stream.write(f"t={self._clock.monotonic() - self._began:.1f} {line}\n")
            self._stream.flush()
        except (OSError, ValueError):
            # The reader has exited, or the stream is closed.
            self._stream = None


def same_wait(one: Waiting, other: Waiting) -> bool:
    """Whether both report the same wait, that is, differ only in numbers such as duration or clock."""
    return _NUMBERS.sub("0", one.sentence) == _NUMBERS.sub("0", other.sentence) and other.seconds >= one.seconds


_NUMBERS = re.compile(r"\d+(\.\d+)?")


class WaitPace:
    """Rate limit of waits: a new one is shown immediately, repetitions at growing intervals."""

    def __init__(self) -> None:
        self._newest: Waiting | None = None
        self._pause = WAIT_SECONDS
        self._next = 0.0

    def admit(self, event: Waiting, *, now: float) -> bool:
        """Whether `event` is due to be shown."""
        is_same = self._newest is not None and same_wait(self._newest, event)
        self._newest = event
        if is_same and now < self._next:
            return False
        self._pause = min(2 * self._pause, MAX_WAIT_SECONDS) if is_same else WAIT_SECONDS
        self._next = now + self._pause
        return True


class _Pace:
    """Rate limit: the first line immediately, then one per interval; the newest line in between is kept."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._admitted_at: float | None = None
        self._held_back: str | None = None

    def admit(self, line: str, *, now: float) -> str | None:
        """The line if it is due."""
        if self._admitted_at is not None and now - self._admitted_at < self._seconds:
            self._held_back = line
            return None
        self._admitted_at, self._held_back = now, None
        return line

    def release(self) -> str | None:
        """The withheld line, if any; returned once."""
        line, self._held_back = self._held_back, None
        return line
