"""Client of a fork server, which has imported torch and hetpipe in advance.

Where forking is not possible, a process is started as a separate program, which takes the time of its imports; the
reason is logged.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from hetpipe.errors import ProtocolViolation
from hetpipe.forking.environment import server_environment
from hetpipe.forking.messages import DONE, GO, PADDING, TITLE, ForkOrder, receive_message, send_message
from hetpipe.forking.process import Launch, Process, spawn
from hetpipe.observe.log import get_logger
from hetpipe.phases import LAUNCH

_log = get_logger(__name__)

#: Environment variable; 0 starts every process as a separate program.
VARIABLE = "HETPIPE_FORK_SERVER"

#: Timeout of a fork server's imports, which may come from a slow disk.
READY_SECONDS = 300.0

#: Timeout of its replies, and of the setup of a forked process.
ANSWER_SECONDS = 30.0

#: Consecutive deaths without a successful fork after which it is not restarted.
MOST_DEATHS = 3

#: prctl options: set and query whether orphaned descendants of this process become its children.
_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37

#: Fixes if the kernel refuses another process, as the end of a sentence.
_REMEDIES: Mapping[int, str] = {
    errno.EAGAIN: "; the limit of processes of the user or the container is reached (`ulimit -u`, pids.max): raise it, "
    "or run fewer stages here",
    errno.ENOMEM: "; give this node more memory, or run fewer stages on it",
}

#: Held while this process is a subreaper, which it must be for one fork server at a time.
_adopting = threading.Lock()


class _Unusable(Exception):
    """No fork server can be used; the message gives the reason."""


class _Lost(Exception):
    """The fork server has ended or does not reply, and the requested process was not created."""


class ForkServer:
    """The fork server of this process, with a fallback to separate programs. Thread-safe.

    It is started by `begin`, or with the first process that it can fork, and restarted after it died. Forked processes
    are children of this process and survive the fork server.
    """

    def __init__(self, environment: Mapping[str, str] | None, *, programs: Mapping[str, str] | None = None) -> None:
        """Create the client; nothing is started.

        Args:
            environment: common environment of the processes to start; None, or `HETPIPE_FORK_SERVER` set to 0 in it,
                disables forking.
            programs: name → `module:function` of the programs that it runs, instead of `hetpipe.launch.PROGRAMS`; it
                imports their modules.
        """
        self._environment = environment
        self._programs = programs or {}
        self._is_off = environment is None or environment.get(VARIABLE) == "0" or sys.platform != "linux"
        #: Guards the following attributes and the connection.
        self._lock = threading.RLock()
        self._connection: _Connection | None = None
        #: Deaths since the last successful fork.
        self._deaths = 0

    @property
    def pid(self) -> int | None:
        """Its process id; None if there is none."""
        connection = self._connection
        return None if connection is None else connection.pid

    def begin(self, command: Sequence[str] = (*LAUNCH, "hetpipe")) -> None:
        """Start it in the background, so that imports overlap with other work; errors are ignored.

        Runs in a thread that lives as long as the fork server, because the kernel ends the latter with that thread.

        Args:
            command: a command to start later; without effect if it cannot be forked.
        """
        with self._lock, suppress(_Unusable):
            if self._is_program(command):
                self._connect()

    def wait_ready(self, *, timeout_seconds: float) -> bool:
        """Whether it is ready or unusable within the timeout; True if none was started."""
        # A concurrent `start` waits for it as well, and holds the lock meanwhile.
        if not self._lock.acquire(timeout=timeout_seconds):
            return False
        try:
            return self._connection is None or self._connection.has_said_something(timeout_seconds)
        finally:
            self._lock.release()

    def look_after(self) -> None:
        """Restart it if it has died."""
        with self._lock:
            if self._connection is not None and self._connection.is_closed():
                self._lost("it has ended")
                self.begin()

    def close(self) -> None:
        """End it; forked processes continue. It can be started again."""
        with self._lock:
            if self._connection is not None:
                self._connection.end()
                self._connection = None

    def start(self, launch: Launch) -> Process:
        """Start a process, a child of this one.

        Raises:
            OSError: it could not be started.
        """
        order = self._order(launch)
        if order is None:
            return spawn(launch)
        with self._lock:
            while True:
                try:
                    process = self._connect().fork(order, launch)
                except _Lost as lost:
                    self._lost(str(lost))
                except _Unusable as unusable:
                    _log.warning("not_forked", program=order.program, reason=str(unusable))
                    break
                else:
                    self._deaths = 0
                    return process
        return spawn(launch)

    def _order(self, launch: Launch) -> ForkOrder | None:
        """The order for the fork server; None for other programs, or if forking is disabled."""
        if self._is_off or not self._is_program(launch.command):
            return None
        program, *arguments = launch.command[len(LAUNCH) :]
        return ForkOrder(
            program=program,
            arguments=tuple(arguments),
            environment=dict(launch.environment),
            title=(*LAUNCH, program),
            parent=os.getpid(),
            reports=launch.report is not None,
            starts_processes=launch.starts_processes,
        )

    @staticmethod
    def _is_program(command: Sequence[str]) -> bool:
        return tuple(command[: len(LAUNCH)]) == LAUNCH and len(command) > len(LAUNCH)

    def _connect(self) -> _Connection:
        """The fork server; started if there is none.

        Raises:
            _Unusable: it cannot be started, or has died too often.
        """
        if self._connection is not None:
            return self._connection
        if self._is_off or self._environment is None:
            raise _Unusable("processes are started as separate programs")
        inherited = _take_inherited()
        if inherited is not None:
            self._connection = inherited
            return inherited
        if self._deaths >= MOST_DEATHS:
            self._is_off = True
            raise _Unusable(f"the fork server has died {self._deaths} times in a row")
        self._connection = _exec_server(self._environment, self._programs)
        return self._connection

    def _lost(self, reason: str) -> None:
        assert self._connection is not None
        self._deaths += 1
        code = self._connection.end()
        _log.warning("fork_server_lost", pid=self._connection.pid, exit_code=code, reason=reason)
        self._connection = None


class _Connection:
    """Connection to a running fork server."""

    def __init__(self, connection: socket.socket, process: Process, *, is_ready: bool) -> None:
        self._socket = connection
        self._process = process
        self._is_ready = is_ready

    @property
    def pid(self) -> int:
        return self._process.pid

    def has_said_something(self, timeout_seconds: float) -> bool:
        """Whether it is ready, has refused or has ended within the timeout."""
        return self._is_ready or bool(self._poll(timeout_seconds))

    def is_closed(self) -> bool:
        """Whether it has ended; does not wait."""
        return bool(self._poll(0.0) & select.POLLHUP)

    def _poll(self, timeout_seconds: float) -> int:
        """Events on its socket within the timeout; 0 for none."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return sum(event for _, event in poll.poll(timeout_seconds * 1000.0))

    def end(self) -> int:
        """Kill it and any process being forked; returns its exit status, or minus the number of a signal."""
        self._socket.close()
        self._process.signal_group(signal.SIGKILL)
        code = self._process.wait(end_group=True)
        # A process that was forked but not handed over is a child of this process now, in the fork server's group.
        with suppress(ChildProcessError):
            while True:
                os.waitid(os.P_PGID, self.pid, os.WEXITED)
        return code

    def fork(self, order: ForkOrder, launch: Launch) -> Process:
        """Fork a process.

        Raises:
            OSError: the process could not be started.
            _Lost: the fork server has ended, or does not answer.
            _Unusable: it cannot fork this process with the requested environment.
        """
        self._wait_ready()
        talk, theirs = socket.socketpair()
        folder = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        standard = (launch.stdin, launch.stdout, launch.stderr)
        report = () if launch.report is None else (launch.report,)
        with talk:
            try:
                with theirs, _adopting_orphans():
                    answer = self._ask(order, (theirs.fileno(), folder, *standard, *report))
            finally:
                os.close(folder)
            return _handed_over(answer, talk)

    def _wait_ready(self) -> None:
        if self._is_ready:
            return
        answer = self._receive(READY_SECONDS, "its imports")
        if "ready" not in answer:
            raise _Unusable(str(answer.get("refused", answer)))
        self._is_ready = True

    def _ask(self, order: ForkOrder, descriptors: Sequence[int]) -> dict[str, Any]:
        self._socket.settimeout(ANSWER_SECONDS)
        try:
            send_message(self._socket, order.to_json(), descriptors)
        except OSError as error:
            raise _Lost(f"it did not accept the order: {error}") from error
        return self._receive(ANSWER_SECONDS, "its answer")

    def _receive(self, seconds: float, what: str) -> dict[str, Any]:
        self._socket.settimeout(seconds)
        try:
            message = receive_message(self._socket)
        except TimeoutError as error:
            raise _Lost(f"waited {seconds:.0f} s for {what}") from error
        except (OSError, ProtocolViolation) as error:
            raise _Lost(str(error)) from error
        if message is None:
            raise _Lost("it has ended")
        return message[0]


def _handed_over(answer: Mapping[str, Any], talk: socket.socket) -> Process:
    """The process announced by `answer`, once it has reported its setup over `talk`.

    Raises:
        OSError: the process was not created.
        _Unusable: it would differ from the ordered process.
    """
    if "differs" in answer:
        names = ", ".join(map(str, answer["differs"]))
        raise _Unusable(f"it differs from the fork server in variables that are read at load time: {names}")
    if "pid" not in answer:
        number = int(answer["errno"])
        raise OSError(number, f"no process can be forked: {os.strerror(number)}{_REMEDIES.get(number, '')}")
    pid = int(answer["pid"])
    talk.settimeout(ANSWER_SECONDS)
    try:
        talk.sendall(GO)
        reply = talk.recv(4096)
    except OSError as error:
        reply = str(error).encode()
    if reply == DONE:
        return Process(pid, lambda: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    try:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    except (ProcessLookupError, ChildProcessError) as error:
        raise _Unusable("the kernel has not made the forked process a child of this one") from error
    raise _failure_of(reply)


def _failure_of(reply: bytes) -> OSError:
    """The error of a forked process whose setup failed."""
    with suppress(ValueError, KeyError):
        failure = json.loads(reply)
        return OSError(int(failure["errno"]), str(failure["why"]))
    return OSError(f"a forked process ended during its setup{': ' if reply else ''}{reply.decode()}")


def _exec_server(environment: Mapping[str, str], programs: Mapping[str, str]) -> _Connection:
    """Start a fork server as a separate program.

    Raises:
        _Unusable: it cannot be started.
    """
    own, theirs = socket.socketpair()
    given = [argument for name, function in programs.items() for argument in ("--program", f"{name}={function}")]
    arguments = ["--socket", str(theirs.fileno()), "--parent", str(os.getpid()), *given, PADDING]
    with theirs:
        try:
            process = subprocess.Popen(  # noqa: S603 - our own program
                [*TITLE, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env=server_environment(environment),
            )
        except OSError as error:
            own.close()
            raise _Unusable(f"the fork server cannot be started: {error}") from error
    _log.info("fork_server_started", pid=process.pid)
    return _Connection(own, Process(process.pid, process.wait), is_ready=False)


@contextmanager
def _adopting_orphans() -> Iterator[None]:
    """Make this process a subreaper, the parent of orphaned descendants, while a process is handed over.

    Raises:
        _Unusable: the kernel does not support it.
    """
    with _adopting:
        was_on = _is_subreaper()
        _set_subreaper(is_on=True)
        try:
            yield
        finally:
            _set_subreaper(is_on=was_on)


def _is_subreaper() -> bool:
    """Whether this process is a subreaper already."""
    found = ctypes.c_int(0)
    ctypes.CDLL(None).prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(found), 0, 0, 0)
    return bool(found.value)


def _set_subreaper(*, is_on: bool) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, int(is_on), 0, 0, 0):
        raise _Unusable(f"this process cannot become a subreaper: {os.strerror(ctypes.get_errno())}")


# -- the one of this process ------------------------------------------------------------------------------------------

_own: ForkServer | None = None
_inherited: _Connection | None = None


def own_fork_server(environment: Mapping[str, str]) -> ForkServer:
    """The fork server of this process, shared by all processes that it starts; only the first `environment` counts."""
    global _own  # noqa: PLW0603 - one per process
    if _own is None:
        _own = ForkServer(environment)
    return _own


def inherit(connection: socket.socket, pid: int) -> None:
    """Register the fork server that was forked for this process at its start."""
    global _inherited, _own
    server = Process(pid, lambda: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    _inherited, _own = _Connection(connection, server, is_ready=True), None


def _take_inherited() -> _Connection | None:
    """The inherited fork server; None if it was taken already, or there is none."""
    global _inherited
    found, _inherited = _inherited, None
    return found
