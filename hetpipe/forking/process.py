"""A child process, forked or started as a program; its process id stays reserved until it is reaped here."""

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

#: Command-line option of the descriptor on which a program reports.
REPORT_FD = "--report-fd"


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A process to start. It leads a session of its own, in the current folder of this process.

    The descriptors must be open and remain the caller's to close; the process inherits no others.
    """

    command: Sequence[str]
    """Program and arguments."""
    environment: Mapping[str, str]
    """The whole environment."""
    stdin: int
    stdout: int
    stderr: int
    report: int | None = None
    """Descriptor of its reports, passed as `--report-fd N`; None for no reports."""
    starts_processes: bool = False
    """Whether it starts processes itself, and therefore gets a fork server of its own if it is forked."""


class Process:
    """A running process, a child of this one. Thread-safe.

    Start it from a thread that lives as long as this process: the kernel signals the death of the parent when the
    *thread* that started the process ends.
    """

    def __init__(self, pid: int, reap: Callable[[], int]) -> None:
        """Take ownership of a child.

        Args:
            pid: process id, also of its group and session.
            reap: waits for it; returns its exit status, or minus the number of the signal that ended it.
        """
        self.pid = pid
        self._reap = reap
        #: Guards the following attributes: its process id cannot be reused before it is reaped.
        self._lock = threading.Lock()
        #: Its exit status; None before it is reaped.
        self.exit_code: int | None = None

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the process alone; no effect if it has ended."""
        with self._lock:
            if self.exit_code is None:
                os.kill(self.pid, number)

    def signal_group(self, number: signal.Signals) -> bool:
        """Send a signal to the process and its group; returns False if the process has ended."""
        with self._lock:
            if self.exit_code is not None:
                return False
            is_alive = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None
            self._signal_group(number)
            return is_alive

    def wait(self, *, end_group: bool = False) -> int:
        """Wait until it has ended; returns its exit status, or minus the number of a signal. Call once.

        Args:
            end_group: send SIGKILL to the rest of its group before its process id can be reused.
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


#: Starts a process, or raises `OSError`.
Starter = Callable[[Launch], Process]


def spawn(launch: Launch) -> Process:
    """Start a process as a separate program.

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
    """Create a pipe; each end is registered with one of the stacks for closing."""
    reading, writing = os.pipe()
    closes_reading.callback(os.close, reading)
    closes_writing.callback(os.close, writing)
    return reading, writing
