"""One child process of the agent: fed through its standard input, heard through a pipe, ended with its whole group.

The child leads a session of its own, so Ctrl-C at the agent's terminal does not reach it and its own children can be
ended with it. Its standard input stays open as long as the agent lives: its end tells the child that the agent is gone.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hetpipe.clock import Clock
from hetpipe.errors import ProtocolViolation
from hetpipe.observe.log import get_logger
from hetpipe.values.commands import last_words

_log = get_logger(__name__)

#: Longest line a child may report, in bytes. A model report has a few hundred bytes per parameter.
MAX_LINE_BYTES = 16 * 1024 * 1024

#: Seconds the pipe may stay open after the child and its group are gone.
_DRAIN_SECONDS = 1.0

#: How much of the log is looked at for the last words, in bytes.
_TAIL_BYTES = 4_096


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSpec:
    """What to start."""

    name: str
    """For logs and threads."""
    command: Sequence[str]
    """Program and arguments; `--report-fd N` is added."""
    first_line: str
    """What the child reads first from its standard input, without the newline."""
    environment: Mapping[str, str]
    """The whole environment."""
    log_path: Path
    """Standard output and error go there, appended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listener:
    """Who hears of a child. Called from the child's threads, `on_exit` last and once."""

    on_line: Callable[[bytes], None]
    """One line of the report pipe."""
    on_exit: Callable[[int, str], None]
    """Exit status, or minus the signal's number; and the last line of output."""


class Child:
    """A running child. Thread-safe.

    Start it from a thread that lives as long as the agent: the kernel sends a child's parent-death signal when the
    *thread* that started it ends.
    """

    def __init__(self, spec: ChildSpec, listener: Listener) -> None:
        """Start the process.

        Raises:
            OSError: it could not be started.
        """
        self._spec = spec
        self._listener = listener
        self._lock = threading.Lock()
        self._reaped = False
        #: Set once the process is gone and `on_exit` was called.
        self.exited = threading.Event()
        spec.log_path.parent.mkdir(parents=True, exist_ok=True)
        read_end, write_end = os.pipe()
        try:
            with spec.log_path.open("ab") as output:
                self._log_start = output.tell()
                self._process = subprocess.Popen(  # noqa: S603 - the agent's own program
                    [*spec.command, "--report-fd", str(write_end)],
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=output,
                    pass_fds=(write_end,),
                    start_new_session=True,
                    env=dict(spec.environment),
                )
        except BaseException:
            os.close(read_end)
            raise
        finally:
            os.close(write_end)
        self._reader = threading.Thread(target=self._read, args=(read_end,), name=f"reports-{spec.name}", daemon=True)
        self._reader.start()
        threading.Thread(target=self._wait, name=f"wait-{spec.name}", daemon=True).start()

    @property
    def pid(self) -> int:
        """Process id, also of its group and session."""
        return self._process.pid

    def send_signal(self, number: signal.Signals) -> bool:
        """Send a signal to the child and its group; False when the child has come to its end already."""
        with self._lock:
            if self._reaped:
                return False
            is_alive = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None
            self._signal_group(number)
            return is_alive

    def _signal_group(self, number: signal.Signals) -> None:
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            pass
        except PermissionError:
            _log.warning("cannot_signal", child=self._spec.name, signal=number.name)

    def _read(self, read_end: int) -> None:
        with open(read_end, "rb") as reports:
            self._send_first_line()
            while line := reports.readline(MAX_LINE_BYTES):
                if line.endswith(b"\n"):
                    self._hear(line)
                else:
                    _log.error("report_line_cut_off", child=self._spec.name, length_bytes=len(line))

    def _hear(self, line: bytes) -> None:
        try:
            self._listener.on_line(line)
        except ProtocolViolation:
            _log.exception("report_not_understood", child=self._spec.name)

    def _send_first_line(self) -> None:
        stdin = self._process.stdin
        if stdin is None:
            return
        try:
            stdin.write(self._spec.first_line.encode() + b"\n")
            stdin.flush()
        except OSError as error:
            _log.info("child_does_not_read", child=self._spec.name, reason=str(error))

    def _wait(self) -> None:
        # The process stays a zombie until its group is ended: until then nobody else can get its number.
        os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        with self._lock:
            self._signal_group(signal.SIGKILL)
            exit_code = self._process.wait()
            self._reaped = True
        self._reader.join(_DRAIN_SECONDS)
        if self._process.stdin is not None:
            try:
                self._process.stdin.close()
            except OSError:
                _log.debug("unread_input", child=self._spec.name)
        self._listener.on_exit(exit_code, self._last_words())
        self.exited.set()

    def _last_words(self) -> str:
        try:
            with self._spec.log_path.open("rb") as output:
                size = output.seek(0, os.SEEK_END)
                output.seek(max(self._log_start, size - _TAIL_BYTES))
                lines = output.read().decode(errors="replace").split("\n")
        except OSError:
            return ""
        return last_words(lines)


def end_children(children: Sequence[Child], *, grace_seconds: float, clock: Clock) -> None:
    """SIGTERM to all, SIGKILL to those that are left after the grace; returns when all are gone."""
    for child in children:
        child.send_signal(signal.SIGTERM)
    deadline = clock.monotonic() + grace_seconds
    left = [child for child in children if not child.exited.wait(max(0.0, deadline - clock.monotonic()))]
    for child in left:
        child.send_signal(signal.SIGKILL)
    for child in left:
        if not child.exited.wait(_DRAIN_SECONDS + grace_seconds):
            _log.error("child_does_not_end", pid=child.pid)
