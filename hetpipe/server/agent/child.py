"""One child process of the agent: configured through its standard input, reporting through a pipe, killed by group.

The child has a session of its own, so Ctrl-C at the agent's terminal does not reach it and its own children can be
ended with it. Its standard input stays open as long as the agent lives; at its end the child exits. What the agent
tells it later is written there, too.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from hetpipe.clock import Clock
from hetpipe.errors import ProtocolViolation
from hetpipe.forking.process import Launch, Starter, pipe, spawn
from hetpipe.observe.log import get_logger
from hetpipe.values.commands import last_words

_log = get_logger(__name__)

#: Longest line a child may report, in bytes. A model report has a few hundred bytes per parameter.
MAX_LINE_BYTES = 16 * 1024 * 1024

#: Bytes that wait for a child which does not read its input; beyond, it is told nothing more.
MAX_UNSENT_BYTES = 1024 * 1024

#: Seconds the pipe may stay open after the child and its group are gone.
_DRAIN_SECONDS = 1.0

#: Bytes read from the end of the log for its last line.
_TAIL_BYTES = 4_096


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSpec:
    """A child process to start."""

    name: str
    """Name in logs and of threads."""
    command: Sequence[str]
    """Program and arguments; `--report-fd N` is added."""
    first_line: str
    """The first line on the child's standard input, without the newline."""
    environment: Mapping[str, str]
    """The whole environment."""
    log_path: Path
    """Standard output and error are appended to this file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listener:
    """Callbacks for a child's reports. Called from the child's threads, `on_exit` last and once."""

    on_line: Callable[[bytes], None]
    """One line of the report pipe."""
    on_exit: Callable[[int, str], None]
    """Exit status, or minus the signal's number; and the last line of output."""


class Child:
    """A running child. Thread-safe.

    Start it from a thread that lives as long as the agent: the kernel sends a child's parent-death signal when the
    *thread* that started it ends.
    """

    def __init__(self, spec: ChildSpec, listener: Listener, *, starter: Starter = spawn) -> None:
        """Start the process.

        Args:
            spec: the process.
            listener: gets its reports.
            starter: starts it.

        Raises:
            OSError: it could not be started.
        """
        self._spec = spec
        self._listener = listener
        #: Set once the process is gone and `on_exit` was called.
        self.exited = threading.Event()
        spec.log_path.parent.mkdir(parents=True, exist_ok=True)
        with ExitStack() as its_ends, ExitStack() as our_ends:
            output = its_ends.enter_context(spec.log_path.open("ab"))
            self._log_start = output.tell()
            stdin, first_line = pipe(its_ends, our_ends)
            reports, report = pipe(our_ends, its_ends)
            self._process = starter(
                Launch(
                    command=spec.command,
                    environment=spec.environment,
                    stdin=stdin,
                    stdout=output.fileno(),
                    stderr=output.fileno(),
                    report=report,
                )
            )
            our_ends.pop_all()
        self._stdin = os.fdopen(first_line, "wb")
        #: Guards what follows, and the end of standard input.
        self._input_lock = threading.Lock()
        #: What the child has not read yet, beyond the pipe; None while, or once, it is told nothing.
        self._unsent: bytearray | None = None
        self._reader = threading.Thread(target=self._read, args=(reports,), name=f"reports-{spec.name}", daemon=True)
        self._reader.start()
        threading.Thread(target=self._wait, name=f"wait-{spec.name}", daemon=True).start()

    @property
    def pid(self) -> int:
        """Process id, also of its group and session."""
        return self._process.pid

    def send_signal(self, number: signal.Signals) -> bool:
        """Send a signal to the child and its group; False if the child has already ended."""
        return self._process.signal_group(number)

    def tell(self, data: bytes) -> bool:
        """Write to its standard input, behind its first line and what it was told before, without waiting for it.

        Returns:
            Whether it takes that and more: it reads, or is at most `MAX_UNSENT_BYTES` behind.
        """
        with self._input_lock:
            unsent = self._unsent
            if unsent is None:
                return False
            unsent += data
            try:
                del unsent[: os.write(self._stdin.fileno(), unsent)]
            except BlockingIOError:
                _log.debug("child_is_behind", child=self._spec.name, num_bytes=len(unsent))
            except OSError:
                unsent.clear()
                self._unsent = None
            if len(unsent) > MAX_UNSENT_BYTES:
                self._unsent = None
            return self._unsent is not None

    def _read(self, read_end: int) -> None:
        with open(read_end, "rb") as reports:
            self._send_first_line()
            while line := reports.readline(MAX_LINE_BYTES):
                if line.endswith(b"\n"):
                    self._handle_report(line)
                else:
                    _log.error("report_line_cut_off", child=self._spec.name, length_bytes=len(line))

    def _handle_report(self, line: bytes) -> None:
        try:
            self._listener.on_line(line)
        except ProtocolViolation:
            _log.exception("report_not_understood", child=self._spec.name)

    def _send_first_line(self) -> None:
        try:
            self._stdin.write(self._spec.first_line.encode() + b"\n")
            self._stdin.flush()
        except OSError as error:
            _log.info("child_does_not_read", child=self._spec.name, reason=str(error))
            return
        with self._input_lock:
            if not self._stdin.closed:
                os.set_blocking(self._stdin.fileno(), False)
                self._unsent = bytearray()

    def _wait(self) -> None:
        exit_code = self._process.wait(end_group=True)
        self._reader.join(_DRAIN_SECONDS)
        with self._input_lock:
            self._unsent = None
            try:
                self._stdin.close()
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
    """SIGTERM to all, SIGKILL to the rest after the grace period; returns when all are gone."""
    for child in children:
        child.send_signal(signal.SIGTERM)
    deadline = clock.monotonic() + grace_seconds
    left = [child for child in children if not child.exited.wait(max(0.0, deadline - clock.monotonic()))]
    for child in left:
        child.send_signal(signal.SIGKILL)
    for child in left:
        if not child.exited.wait(_DRAIN_SECONDS + grace_seconds):
            _log.error("child_does_not_end", pid=child.pid)
