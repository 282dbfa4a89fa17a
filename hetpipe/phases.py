"""The startup phases of a process, reported to its parent every second until it is ready.

`hetpipe.launch` starts reporting before any heavy import; `report_phase` enters the next phase, `end_phases` ends the
reports. The parent waits for a slow process but times out on a silent one: the lines are written by a thread, so only a
process that is stopped, or that holds the interpreter lock, is silent.

A line is one JSON object, with the seconds that the phase has lasted: `{"kind": "phase", "phase": "importing torch",
"seconds": 3.0}`.
"""

from __future__ import annotations

import json
import os
import sys
import threading

from hetpipe.clock import SYSTEM_CLOCK, Clock

#: Interval of lines.
PERIOD_SECONDS = 1.0

#: The value of `kind` in a line.
PHASE = "phase"

#: Command prefix of programs that report their phases; followed by the name of the program.
LAUNCH = (sys.executable, "-m", "hetpipe.launch")

#: Serialises lines, which share one descriptor.
_writing = threading.Lock()


def write_line(descriptor: int, line: str) -> None:
    """Write one line to a pipe; errors of a closed pipe are ignored."""
    data = line.encode() + b"\n"
    with _writing:
        try:
            while data:
                data = data[os.write(descriptor, data) :]
        except OSError:
            return


class PhaseReporter:
    """Repeats the current phase of one process. Thread-safe."""

    def __init__(self, descriptor: int, phase: str, *, clock: Clock = SYSTEM_CLOCK) -> None:
        """Start with `phase`; lines are written to `descriptor`."""
        self._descriptor = descriptor
        self._clock = clock
        #: Guards the following attributes; notified at the end.
        self._changed = threading.Condition()
        self._phase, self._since = phase, clock.monotonic()
        self._is_over = False
        self._write()
        threading.Thread(target=self._repeat, name="phases", daemon=True).start()

    def report(self, phase: str) -> None:
        """Start the next phase."""
        with self._changed:
            if self._is_over or phase == self._phase:
                return
            self._phase, self._since = phase, self._clock.monotonic()
            self._write()

    def end(self) -> None:
        """Stop reporting. Idempotent."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def _repeat(self) -> None:
        with self._changed:
            while not self._changed.wait_for(lambda: self._is_over, PERIOD_SECONDS):
                self._write()

    def _write(self) -> None:
        seconds = round(self._clock.monotonic() - self._since, 1)
        write_line(self._descriptor, json.dumps({"kind": PHASE, "phase": self._phase, "seconds": seconds}))


_reporter: PhaseReporter | None = None


def begin_phases(descriptor: int, phase: str) -> None:
    """Start reporting the phases of this process. Call once, in a process whose parent expects reports."""
    global _reporter  # noqa: PLW0603 - one per process, like its standard output
    _reporter = PhaseReporter(descriptor, phase)


def report_phase(phase: str) -> None:
    """Start the next phase, worded to complete "it is ..."; no effect if phases are not reported."""
    if _reporter is not None:
        _reporter.report(phase)


def end_phases() -> None:
    """Stop reporting, because the process is ready or ends."""
    if _reporter is not None:
        _reporter.end()
