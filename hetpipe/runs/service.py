"""One service process: start, readiness, monitoring, termination.

A service has a session of its own, so that Ctrl-C at the terminal does not reach it. It holds the read end of a pipe
whose write end is in this process, so that it ends with this process in any case (`--exit-with-parent`).
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetpipe.clock import SYSTEM_CLOCK, Clock
from hetpipe.errors import DeadlineExceeded, JobFailed
from hetpipe.forking.process import Launch, Starter, pipe, spawn
from hetpipe.phases import PHASE
from hetpipe.runs.remote import RemoteShell
from hetpipe.values.commands import exit_sentence, last_words

#: Polling interval of a starting service.
_POLL_SECONDS = 0.2

#: Bytes read from the end of a service's output for its last line.
_TAIL_BYTES = 4_096


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSpec:
    """A service process to start."""

    key: str
    """Name of its files and of its entry in run.json: `parameter-server-1`."""
    title: str
    """Its name in a sentence: `parameter server 1`."""
    command: Sequence[str]
    logs: Path
    """The folder of its log (`KEY.log`) and its output (`KEY.out`)."""
    starts_processes: bool = False
    """It starts processes of its own."""
    remote: RemoteShell | None = None
    """Runs it on another machine, where `logs` has the same path; None: on this one."""


@dataclass(frozen=True, slots=True)
class ServiceDeath:
    """The unexpected end of a service."""

    title: str
    pid: int
    exit_code: int
    """Exit status, or minus the number of the signal that ended it."""
    last_words: str
    """The last line of its output; empty without any."""
    verdict: str = ""
    """The consequence, as the end of the sentence; may be empty."""

    def __str__(self) -> str:
        """One sentence."""
        words = f": {self.last_words}" if self.last_words else ""
        verdict = f"; {self.verdict}" if self.verdict else ""
        return f"{self.title} (pid {self.pid}) {exit_sentence(self.exit_code)}{words}{verdict}"


class Service:
    """A running service. Thread-safe.

    Start it from a thread that lives as long as the run: the kernel sends a child's parent-death signal when the
    *thread* that started it ends.
    """

    def __init__(
        self,
        spec: ServiceSpec,
        *,
        environment: Mapping[str, str],
        on_death: Callable[[ServiceDeath], None],
        starter: Starter = spawn,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """Start the process.

        Args:
            spec: the process.
            environment: the whole environment of the process.
            on_death: called once, from a thread, when it ends unexpectedly.
            starter: launches it.
            clock: for the timeout of readiness.

        Raises:
            JobFailed: it could not be started.
        """
        self.spec = spec
        self._on_death = on_death
        self._output = spec.logs / f"{spec.key}.out"
        #: Set when it is ready or gone.
        self._settled = threading.Event()
        self._exited = threading.Event()
        self._asked_to_end = False
        self._address = ""
        self._clock = clock
        #: Its reported phase before it is ready, and the time of its last report.
        self._phase = ""
        self._last_line = clock.monotonic()
        command = [*spec.command, "--log", str(spec.logs / f"{spec.key}.log"), "--exit-with-parent"]
        if spec.remote is not None:
            command = spec.remote.command(command)
        try:
            with ExitStack() as its_ends, ExitStack() as our_ends:
                output = its_ends.enter_context(self._output.open("ab"))
                #: Offset of this process's output: an earlier process may have written to the file.
                self._output_start = output.tell()
                stdin, self._stdin = pipe(its_ends, our_ends)
                self._stdout, stdout = pipe(our_ends, its_ends)
                self._process = starter(
                    Launch(
                        command=command,
                        environment=environment,
                        stdin=stdin,
                        stdout=stdout,
                        stderr=output.fileno(),
                        starts_processes=spec.starts_processes,
                    )
                )
                our_ends.pop_all()
        except OSError as error:
            raise JobFailed(f"{spec.title} could not be started: {error}") from error
        for target, name in ((self._read, "ready"), (self._wait, "wait")):
            threading.Thread(target=target, name=f"{name}-{spec.key}", daemon=True).start()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def address(self) -> str:
        """The address it serves; empty before it is ready."""
        return self._address

    def wait_ready(self, *, patience_seconds: float) -> str:
        """Wait for its ready line; returns the address it serves.

        Raises:
            JobFailed: it ended before it was ready.
            DeadlineExceeded: it was silent for `patience_seconds`.
        """
        while not self._settled.wait(_POLL_SECONDS):
            if self.silent_seconds >= patience_seconds:
                raise DeadlineExceeded(self.silence)
        if not self._address:
            self._exited.wait(_KILLED_SECONDS)
            raise JobFailed(str(self._death()))
        return self._address

    @property
    def silent_seconds(self) -> float:
        """Seconds since its last report while it is not ready; 0 once it is ready or gone."""
        return 0.0 if self._settled.is_set() else self._clock.monotonic() - self._last_line

    @property
    def silence(self) -> str:
        """The error of a silent service, as a sentence."""
        last = f"; its last phase was {self._phase}" if self._phase else ""
        return (
            f"{self.spec.title} (pid {self.pid}) is not ready, and has reported nothing for {self.silent_seconds:.0f} s"
            f"{last}; its log is {self.spec.logs / self.spec.key}.log"
        )

    @property
    def awaited(self) -> str:
        """Its phase before it is ready, for a list; empty once it is ready or gone."""
        if self._settled.is_set():
            return ""
        return f"{self.spec.title} ({self._phase})" if self._phase else self.spec.title

    def terminate(self) -> None:
        """Send SIGTERM; its end is expected from now on."""
        self._asked_to_end = True
        self._process.send_signal(signal.SIGTERM)

    def wait_ended(self, *, timeout_seconds: float) -> bool:
        """Wait for its end; False on timeout."""
        return self._exited.wait(timeout_seconds)

    def kill(self) -> None:
        """Send SIGKILL; no effect if it has ended."""
        self._asked_to_end = True
        self._process.send_signal(signal.SIGKILL)

    def _read(self) -> None:
        with os.fdopen(self._stdout, "rb") as lines:
            for line in lines:
                self._last_line = self._clock.monotonic()
                self._phase = _phase_in(line) or self._phase
                address = _address_in(line)
                if address and not self._address:
                    self._address = address
                    self._settled.set()
        # Its output is closed because it has ended; `_wait` gets the exit status.

    def _wait(self) -> None:
        self._process.wait()
        os.close(self._stdin)
        death = self._death()
        if not death.last_words and not self._output_start:
            self._output.unlink(missing_ok=True)
        self._exited.set()
        self._settled.set()
        if not self._asked_to_end:
            self._on_death(death)

    def _death(self) -> ServiceDeath:
        exit_code = self._process.exit_code
        assert exit_code is not None, "the process has not ended"
        return ServiceDeath(self.spec.title, self.pid, exit_code, self._last_words())

    def _last_words(self) -> str:
        try:
            with self._output.open("rb") as output:
                output.seek(max(self._output_start, output.seek(0, os.SEEK_END) - _TAIL_BYTES))
                lines = output.read().decode(errors="replace").splitlines()
        except OSError:
            return ""
        return last_words(lines)


def _address_in(line: bytes) -> str:
    """The address in a ready line; empty for any other line."""
    return str(_object_in(line).get("address", ""))


def _phase_in(line: bytes) -> str:
    """The phase of a process and its duration, by a line of `hetpipe.phases`; empty for any other line."""
    message = _object_in(line)
    if message.get("kind") != PHASE or not isinstance(message.get("seconds"), int | float):
        return ""
    return f"{message.get('phase', '')}, {message['seconds']:.0f} s"


def _object_in(line: bytes) -> dict[str, Any]:
    """The JSON object in a line; empty if there is none."""
    try:
        value = json.loads(line)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def end_services(services: Sequence[Service], *, grace_seconds: float) -> None:
    """SIGTERM to all, SIGKILL to the rest after the grace period; returns when all are gone."""
    for service in services:
        service.terminate()
    timer = threading.Timer(grace_seconds, _kill_all, (services,))
    timer.daemon = True
    timer.start()
    try:
        for service in services:
            service.wait_ended(timeout_seconds=grace_seconds + _KILLED_SECONDS)
    finally:
        timer.cancel()


#: Timeout for the end of a killed process.
_KILLED_SECONDS = 5.0


def _kill_all(services: Sequence[Service]) -> None:
    for service in services:
        service.kill()
