"""A process that this one has started, whichever way: its number stays its own until it is reaped here."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from hetpipe.observe.log import get_logger

_log = get_logger(__name__)

#: Names the descriptor on which a program reports, on its command line.
REPORT_FD = "--report-fd"


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What to start: it leads a session of its own, in the current folder of this process.

    Descriptors are open here, and stay the caller's to close; the process has no others.
    """

    command: Sequence[str]
    """Program and arguments."""
    environment: Mapping[str, str]
    """The whole environment."""
    stdin: int
    stdout: int
    stderr: int
    report: int | None = None
    """A descriptor on which it reports: `--report-fd N` is added to its arguments. None: it does not."""
    starts_processes: bool = False
    """It starts processes itself, and so gets a fork server of its own where it is forked from one."""


class Process:
    """A running process, a child of this one. Thread-safe.

    Start it from a thread that lives as long as this process: the kernel tells a process of its parent's death when
    the *thread* that is its parent ends.
    """

    def __init__(self, pid: int, reap: Callable[[], int]) -> None:
        """Take over a child.

        Args:
            pid: process id, also of its group and session.
            reap: waits for it; its exit status, or minus the number of the signal that ended it.
        """
        self.pid = pid
        self._reap = reap
        #: Guards what follows: until it is reaped, nobody else can get its number.
        self._lock = threading.Lock()
        #: How it ended; None before it is reaped.
        self.exit_code: int | None = None

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the process alone; nothing happens when it has ended."""
        with self._lock:
            if self.exit_code is None:
                os.kill(self.pid, number)

    def signal_group(self, number: signal.Signals) -> bool:
        """Send a signal to the process and its group; False when the process has ended before."""
        with self._lock:
            if self.exit_code is not None:
                return False
            is_alive = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None
            self._signal_group(number)
            return is_alive

    def wait(self, *, end_group: bool = False) -> int:
        """Wait until it has ended; its exit status, or minus the number of a signal. Once.

        Args:
            end_group: send SIGKILL to what is left of its group, while its number still is its own.
        """
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        with self._lock:
            if end_group:
                self._signal_group(signal.SIGKILL)
            self.exit_code = self._reap()
        return self.exit_code

    def _signal_group(self, number: signal.Signals) -> None:
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            pass
        except PermissionError:
            _log.warning("cannot_signal", pid=self.pid, signal=number.name)


#: Starts a process; it raises `OSError` where that cannot be done.
Starter = Callable[[Launch], Process]


def spawn(launch: Launch) -> Process:
    """Start a process as a program of its own.

    Raises:
        OSError: it could not be started.
    """
    report = [] if launch.report is None else [launch.report]
    process = subprocess.Popen(  # noqa: S603 - our own programs
        [*launch.command, *(argument for number in report for argument in (REPORT_FD, str(number)))],
        stdin=launch.stdin,
        stdout=launch.stdout,
        stderr=launch.stderr,
        pass_fds=report,
        start_new_session=True,
        env=dict(launch.environment),
    )
    return Process(process.pid, process.wait)


def pipe(closes_reading: ExitStack, closes_writing: ExitStack) -> tuple[int, int]:
    """A pipe, each end of which is closed by a stack of its own."""
    reading, writing = os.pipe()
    closes_reading.callback(os.close, reading)
    closes_writing.callback(os.close, writing)
    return reading, writing
