"""The startup phases of a process: reported to its parent every second until it is ready.

`hetpipe.launch` begins before anything heavy is imported; `report_phase` says what comes next, `end_phases` that the
process is ready. Whoever reads the lines waits for a process that is slow, and gives up one that is silent: a thread
writes them, so only a process that is stopped, or keeps the interpreter for itself, says nothing.

A line is one JSON object, with the seconds that the phase has lasted: `{"kind": "phase", "phase": "importing torch",
"seconds": 3.0}`.
"""

from __future__ import annotations

import json
import os
import sys
import threading

from hetpipe.clock import SYSTEM_CLOCK, Clock

#: Between two lines.
PERIOD_SECONDS = 1.0

#: The value of `kind` in a line.
PHASE = "phase"

#: Prefix of the command of a program that reports its phases; the name of its module comes next.
LAUNCH = (sys.executable, "-m", "hetpipe.launch")

#: Lines of a process go to one descriptor, and no line into the midst of another.
_writing = threading.Lock()


def write_line(descriptor: int, line: str) -> None:
    """Write one line to a pipe; a closed pipe is ignored."""
    data = line.encode() + b"\n"
    with _writing:
        try:
            while data:
                data = data[os.write(descriptor, data) :]
        except OSError:
            return


class PhaseReporter:
    """Repeats the phase of one process. Thread-safe."""

    def __init__(self, descriptor: int, phase: str, *, clock: Clock = SYSTEM_CLOCK) -> None:
        """Begin with `phase`; lines go to `descriptor`."""
        self._descriptor = descriptor
        self._clock = clock
        #: Guards what follows; notified at the end.
        self._changed = threading.Condition()
        self._phase, self._since = phase, clock.monotonic()
        self._is_over = False
        self._tell()
        threading.Thread(target=self._repeat, name="phases", daemon=True).start()

    def report(self, phase: str) -> None:
        """Enter the next phase."""
        with self._changed:
            if self._is_over or phase == self._phase:
                return
            self._phase, self._since = phase, self._clock.monotonic()
            self._tell()

    def end(self) -> None:
        """Say nothing more. Idempotent."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def _repeat(self) -> None:
        with self._changed:
            while not self._changed.wait_for(lambda: self._is_over, PERIOD_SECONDS):
                self._tell()

    def _tell(self) -> None:
        seconds = round(self._clock.monotonic() - self._since, 1)
        write_line(self._descriptor, json.dumps({"kind": PHASE, "phase": self._phase, "seconds": seconds}))


_reporter: PhaseReporter | None = None


def begin_phases(descriptor: int, phase: str) -> None:
    """Start reporting the phases of this process. Once, and only in a process that was started to do so."""
    global _reporter  # noqa: PLW0603 - one per process, like its standard output
    _reporter = PhaseReporter(descriptor, phase)


def report_phase(phase: str) -> None:
    """Enter the next phase, worded as the end of "it is ..."; without effect if phases are not reported."""
    if _reporter is not None:
        _reporter.report(phase)


def end_phases() -> None:
    """This process is ready, or has come to its end."""
    if _reporter is not None:
        _reporter.end()
