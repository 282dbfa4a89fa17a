"""Two programs at the same time, in turns: while the processes of one work, those of the other are stopped.

So both meet the same state of the machine, a fraction of a second apart, and never compete. Times of a program are
those of a clock that stands still while it is stopped.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from hetpipe.clock import SYSTEM_CLOCK

#: A turn: short against the seconds in which a process may be silent before others take it for dead.
TURN_SECONDS = 0.05


class Contender:
    """A program and all processes that descend from it, stopped and continued together."""

    def __init__(self, command: Sequence[str], folder: Path, progress: Callable[[], int]) -> None:
        """Start it, stopped.

        Args:
            command: the program and its arguments.
            folder: in which it works.
            progress: how far it is, in a unit that is the same for all contenders.
        """
        self.progress = progress
        self._command = command
        #: Beginning and end of each turn, monotonic seconds.
        self._turns: list[tuple[float, float]] = []
        self._stopped: set[int] = set()
        self._process = subprocess.Popen(
            command, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self._stop()

    @property
    def has_ended(self) -> bool:
        """Whether the program has.

        Raises:
            subprocess.CalledProcessError: it has failed.
        """
        status = self._process.poll()
        if status:
            raise subprocess.CalledProcessError(status, self._command)
        return status is not None

    def take_turn(self) -> None:
        """Work for a turn."""
        began = SYSTEM_CLOCK.monotonic()
        self._signal_all(self._stopped, signal.SIGCONT)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(TURN_SECONDS)
        self._stop()
        self._turns.append((began, SYSTEM_CLOCK.monotonic()))

    def worked_until(self, moment: float) -> float:
        """Seconds of its turns until `moment` (monotonic seconds)."""
        return sum(min(end, moment) - began for began, end in self._turns if began < moment)

    def kill(self) -> None:
        """End what is left of it."""
        if self._process.poll() is None:
            self._signal_all(_family(self._process.pid), signal.SIGKILL)
            self._process.wait()

    def _stop(self) -> None:
        self._stopped = set()
        while found := _family(self._process.pid) - self._stopped:  # one may have started another meanwhile
            self._signal_all(found, signal.SIGSTOP)
            self._stopped |= found

    def _signal_all(self, pids: set[int], number: signal.Signals) -> None:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)


def in_turns(contenders: Sequence[Contender], *, longest_seconds: float) -> None:
    """Let all work until they have ended. The next turn is of the one that is behind.

    Raises:
        subprocess.CalledProcessError: one has failed.
        TimeoutError: they have not ended after `longest_seconds`.
    """
    deadline = SYSTEM_CLOCK.monotonic() + longest_seconds
    last: Contender | None = None
    try:
        while left := [contender for contender in contenders if not contender.has_ended]:
            if SYSTEM_CLOCK.monotonic() > deadline:
                raise TimeoutError(f"{len(left)} contenders have not ended after {longest_seconds:.0f} s")
            last = min(left, key=lambda contender: (contender.progress(), contender is last))
            last.take_turn()
    finally:
        for contender in contenders:
            contender.kill()


def _family(ancestor: int) -> set[int]:
    """A process and all that descend from it, but those that have ended."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):
            state, parent = path.read_text().rsplit(")", 1)[1].split()[:2]
            if state != "Z":
                parents[int(path.parent.name)] = int(parent)
    found, ahead = set[int](), {ancestor} & parents.keys()
    while ahead:
        found |= ahead
        ahead = {pid for pid, parent in parents.items() if parent in ahead} - found
    return found
