"""Client of a fork server, which has imported torch and hetpipe in advance.

Where forking is not possible, a process is started as a separate program, which takes as long as its imports; the
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

#: Environment variable; 0 makes every process start as a separate program.
VARIABLE = "HETPIPE_FORK_SERVER"

#: Timeout of a fork server's imports, whose disk may be slow.
READY_SECONDS = 300.0

#: Timeout of its replies, and of a forked process to be set up.
ANSWER_SECONDS = 30.0

#: Consecutive deaths, without a forked process in between, after which it is not restarted.
MOST_DEATHS = 3

#: prctl options: orphaned descendants of this process become its children, and whether they do.
_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37

#: The fix where the kernel refuses another process, as the end of a sentence.
_REMEDIES: Mapping[int, str] = {
    errno.EAGAIN: "; the user or the container has as many as it may (`ulimit -u`, pids.max): raise that limit, or run "
    "fewer stages here",
    errno.ENOMEM: "; give this node more memory, or run fewer stages on it",
}

#: Held while this process is a subreaper, which one fork server at a time needs.
_adopting = threading.Lock()


class _Unusable(Exception):
    """There is no usable fork server; the message gives the reason."""


class _Lost(Exception):
    """The fork server has ended or does not reply, and the requested process does not exist."""


class ForkServer:
    """The fork server of this process, with a fallback for starting processes without it. Thread-safe.

    It is started by `begin`, or with the first process that it can fork, and restarted when it has died. Forked
    processes are children of this process and outlive it.
    """

    def __init__(self, environment: Mapping[str, str] | None, *, programs: Mapping[str, str] | None = None) -> None:
        """Create the client; nothing is started.

        Args:
            environment: that of the processes it will be asked for, as far as they have it in common; None, or one in
                which `HETPIPE_FORK_SERVER` is 0, has every process started as a program of its own.
            programs: what it can run, instead of `hetpipe.launch.PROGRAMS`: name → `module:function`; it imports what
                these need.
        """
        self._environment = environment
        self._programs = programs or {}
        self._is_off = environment is None or environment.get(VARIABLE) == "0" or sys.platform != "linux"
        #: Guards the following attributes, and the conversation.
        self._lock = threading.RLock()
        self._connection: _Connection | None = None
        #: Deaths since the last successful fork.
        self._deaths = 0

    @property
    def pid(self) -> int | None:
        """Its process id; None while there is none."""
        connection = self._connection
        return None if connection is None else connection.pid

    def begin(self, command: Sequence[str] = (*LAUNCH, "hetpipe")) -> None:
        """Start it in the background, so that imports overlap with other work; errors are ignored.

        In a thread that lives as long as what is started: the kernel ends it with that thread.

        Args:
            command: what it will be asked for; nothing happens where that is no program that it can fork.
        """
        with self._lock, suppress(_Unusable):
            if self._is_program(command):
                self._connect()

    def wait_ready(self, *, timeout_seconds: float) -> bool:
        """Whether it can fork, or has turned out to be none, within that time; True without one that was begun."""
        # Whoever starts a process waits for it, too, and meanwhile holds the lock.
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
        """End it; forked processes live on. It can be started again."""
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
        """The order for the fork server; None for other programs, or without a fork server."""
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
        """The fork server, started if there is none.

        Raises:
            _Unusable: it cannot be started, or has died too often.
        """
        if self._connection is not None:
            return self._connection
        if self._is_off or self._environment is None:
            raise _Unusable("processes are started as programs of their own")
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
    """A running fork server, until it ends."""

    def __init__(self, connection: socket.socket, process: Process, *, is_ready: bool) -> None:
        self._socket = connection
        self._process = process
        self._is_ready = is_ready

    @property
    def pid(self) -> int:
        return self._process.pid

    def has_said_something(self, timeout_seconds: float) -> bool:
        """Whether it is ready, has refused or has ended within that time."""
        return self._is_ready or bool(self._poll(timeout_seconds))

    def is_closed(self) -> bool:
        """Whether it has ended; without a wait."""
        return bool(self._poll(0.0) & select.POLLHUP)

    def _poll(self, timeout_seconds: float) -> int:
        """What has happened to its socket within that time; 0 for nothing."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return sum(event for _, event in poll.poll(timeout_seconds * 1000.0))

    def end(self) -> int:
        """Kill it and what it is forking; its exit status, or minus the number of a signal."""
        self._socket.close()
        self._process.signal_group(signal.SIGKILL)
        code = self._process.wait(end_group=True)
        # What was forked and not handed over has become a child of this process, in the group of the fork server.
        with suppress(ChildProcessError):
            while True:
                os.waitid(os.P_PGID, self.pid, os.WEXITED)
        return code

    def fork(self, order: ForkOrder, launch: Launch) -> Process:
        """Fork a process.

        Raises:
            OSError: the process could not be started.
            _Lost: the fork server has ended, or does not answer.
            _Unusable: it cannot fork this process as it is to be.
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
            raise _Lost(f"it takes no order: {error}") from error
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
    """The process of an answer, once it is what was ordered; `talk` is the conversation with it.

    Raises:
        OSError: there is none.
        _Unusable: it would have been another one than was ordered.
    """
    if "differs" in answer:
        names = ", ".join(map(str, answer["differs"]))
        raise _Unusable(f"it differs from the fork server in what was read while that was loaded: {names}")
    if "pid" not in answer:
        number = int(answer["errno"])
        raise OSError(number, f"no process can be forked: {os.strerror(number)}{_REMEDIES.get(number, '')}")
    pid = int(answer["pid"])
    talk.settimeout(ANSWER_SECONDS)
    try:
        talk.sendall(GO)
        said = talk.recv(4096)
    except OSError as error:
        said = str(error).encode()
    if said == DONE:
        return Process(pid, lambda: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    try:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    except (ProcessLookupError, ChildProcessError) as error:
        raise _Unusable("the kernel has not made a forked process a child of this one") from error
    raise _failure_of(said)


def _failure_of(said: bytes) -> OSError:
    """Why a forked process is not what was ordered."""
    with suppress(ValueError, KeyError):
        told = json.loads(said)
        return OSError(int(told["errno"]), str(told["why"]))
    return OSError(f"a forked process ended before it was what was ordered{': ' if said else ''}{said.decode()}")


def _exec_server(environment: Mapping[str, str], programs: Mapping[str, str]) -> _Connection:
    """Start a fork server as a program of its own.

    Raises:
        _Unusable: there is no room for it.
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
    """Make this process the parent of what its descendants leave behind, for as long as a process is handed over.

    Raises:
        _Unusable: the kernel cannot do that.
    """
    with _adopting:
        was_on = _is_subreaper()
        _set_subreaper(is_on=True)
        try:
            yield
        finally:
            _set_subreaper(is_on=was_on)


def _is_subreaper() -> bool:
    """Whether this process is one anyway."""
    found = ctypes.c_int(0)
    ctypes.CDLL(None).prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(found), 0, 0, 0)
    return bool(found.value)


def _set_subreaper(*, is_on: bool) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, int(is_on), 0, 0, 0):
        raise _Unusable(f"this process cannot adopt what is forked: {os.strerror(ctypes.get_errno())}")


# -- the one of this process ------------------------------------------------------------------------------------------

_own: ForkServer | None = None
_inherited: _Connection | None = None


def own_fork_server(environment: Mapping[str, str]) -> ForkServer:
    """The fork server of this process, one for all that it starts; `environment` counts with the first call."""
    global _own  # noqa: PLW0603 - one per process
    if _own is None:
        _own = ForkServer(environment)
    return _own


def inherit(connection: socket.socket, pid: int) -> None:
    """Note the fork server that was forked for this process at its beginning."""
    global _inherited, _own
    server = Process(pid, lambda: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    _inherited, _own = _Connection(connection, server, is_ready=True), None


def _take_inherited() -> _Connection | None:
    """The fork server inherited by this process; None once taken, or without one."""
    global _inherited
    found, _inherited = _inherited, None
    return found
