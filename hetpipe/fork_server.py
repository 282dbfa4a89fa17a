"""`python -m hetpipe.fork_server`: imports torch and hetpipe, and forks on request.

It has a single thread, which reads an order, forks, and answers. User code, gRPC and CUDA are only started in forked
processes. A process is forked twice, and the intermediate process exits immediately: the kernel then reparents the new
process to the client, which is a subreaper at that moment. The client can therefore wait for it, signal it and read its
exit status as for any other child, and the process survives the fork server.
"""

from __future__ import annotations

import argparse
import atexit
import ctypes
import errno
import gc
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from hetpipe import launch
from hetpipe.errors import ProtocolViolation
from hetpipe.forking.environment import differences, forked_environment
from hetpipe.forking.fork_server import inherit
from hetpipe.forking.messages import DONE, GO, PADDING, TITLE, ForkOrder, receive_message, send_message
from hetpipe.forking.process import REPORT_FD
from hetpipe.server.parent_death import die_with_parent

#: Modules that the programs of `launch.PROGRAMS` import at run time: the service of `hetpipe serve NAME`, and the
#: compiler support of optimizers, which takes as long as torch itself.
_IMPORTED_LATER = (
    "hetpipe.server.coordinator.main:main",
    "hetpipe.server.shard.main:main",
    "hetpipe.server.agent.main:main",
    "torch._dynamo:disable",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerState:
    """The state of a fork server, which forked processes inherit."""

    programs: Mapping[str, str]
    start: Mapping[str, str]
    """Its environment when it started."""
    now: Mapping[str, str]
    """Environment after its imports."""
    descriptors: frozenset[int]
    """Descriptors opened by its imports."""
    fork: Callable[[], int] = field(default=os.fork)


def main() -> None:
    """Serve until the other end of the socket is closed."""
    die_with_parent()  # first, as imports may take long
    parser = argparse.ArgumentParser(description="Forks processes; started by hetpipe itself, not by users.")
    parser.add_argument("--socket", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--program", action="append", default=[], metavar="NAME=MODULE:FUNCTION")
    parser.add_argument("padding")
    options = parser.parse_args()
    if os.getppid() != options.parent:
        sys.exit("the process that started this fork server is gone")
    show_as(TITLE)
    connection = socket.socket(fileno=options.socket)
    programs = dict(given.split("=", 1) for given in options.program) or launch.PROGRAMS
    start = dict(os.environ)
    # Frozen, because the garbage collector of a forked process would otherwise unshare the memory of imported objects.
    gc.disable()
    refusal = prepare([*programs.values(), *([] if options.program else _IMPORTED_LATER)])
    if refusal:
        send_message(connection, {"refused": refusal})
        sys.exit(refusal)
    opened = open_descriptors() - {0, 1, 2, connection.fileno()}
    send_message(connection, {"ready": os.getpid()})
    program = serve(connection, ServerState(programs=programs, start=start, now=dict(os.environ), descriptors=opened))
    run_to_end(program)


def prepare(functions: Sequence[str]) -> str:
    """Import the modules of `functions` (`module:function`); returns why this process cannot be forked, or ""."""
    try:
        import hetpipe.wire  # noqa: F401 - first, for what it says to gRPC's own library

        for name in functions:
            launch.entry(name)
    except Exception as error:  # noqa: BLE001 - whatever it is: processes are started in another way, and say so
        return f"preloading the imports of its processes failed: {type(error).__name__}: {error}"
    gc.collect()
    gc.freeze()
    return "; ".join(started_things())


def started_things() -> Iterator[str]:
    """Describe threads and contexts of this process that do not survive a fork, as sentences."""
    threads = len(list(Path("/proc/self/task").iterdir()))
    if threads != 1:
        yield f"its imports have started {threads - 1} threads, which a forked process would lack"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        yield "its imports have initialised CUDA, which a forked process cannot use"


def open_descriptors() -> frozenset[int]:
    """Open file descriptors of this process."""
    listed = [int(path.name) for path in Path("/proc/self/fd").iterdir()]
    found = set()
    for number in listed:  # includes the descriptor of the listing itself
        with suppress(OSError):
            os.fstat(number)
            found.add(number)
    return frozenset(found)


# -- one order after the other ----------------------------------------------------------------------------------------


def serve(connection: socket.socket, state: ServerState) -> Callable[[], None]:
    """Execute orders until the other end of the socket is closed.

    Returns:
        In a forked process only, the function to run.
    """
    while True:
        try:
            message = receive_message(connection)
        except (ProtocolViolation, OSError):
            os._exit(1)
        if message is None:
            os._exit(0)
        values, descriptors = message
        program = _carry_out(connection, values, descriptors, state)
        if program is not None:
            return program
        for descriptor in descriptors:
            os.close(descriptor)


def _carry_out(
    connection: socket.socket, values: dict[str, Any], descriptors: Sequence[int], state: ServerState
) -> Callable[[], None] | None:
    """Answer an order; in a forked process, returns the function to run."""
    order = ForkOrder.from_json(values)
    unlike = differences(state.start, state.now, order.environment)
    if unlike or order.program not in state.programs:
        answer: dict[str, Any] = {"differs": list(unlike) or [order.program]}
    else:
        try:
            pid = _fork_orphan(state.fork)
        except OSError as error:
            answer = {"errno": error.errno or errno.EAGAIN}
        else:
            if pid == 0:
                connection.close()
                return _become(order, descriptors, state)
            answer = {"pid": pid}
    try:
        send_message(connection, answer)
    except OSError:
        os._exit(0)  # the client is gone
    return None


def _fork_orphan(fork: Callable[[], int]) -> int:
    """Fork a process whose parent is the nearest subreaper; returns its id, and 0 in itself.

    Raises:
        OSError: the process limit or the memory is exhausted.
    """
    reading, writing = os.pipe()
    try:
        between = fork()
        if between == 0:
            os.close(reading)
            return _fork_between(fork, writing)
        # Once it is reaped, its child is reparented.
        os.waitpid(between, 0)
    except BaseException:
        os.close(reading)
        raise
    finally:
        os.close(writing)
    with os.fdopen(reading, "rb") as reply:
        number = int(reply.read() or -errno.EAGAIN)
    if number < 0:
        raise OSError(-number, os.strerror(-number))
    return number


def _fork_between(fork: Callable[[], int], writing: int) -> int:
    """Fork once more, report the process id or the error, and exit; 0 in the new process."""
    try:
        child = fork()
    except OSError as error:
        child = -(error.errno or errno.EAGAIN)
    if child == 0:
        return 0
    os.write(writing, str(child).encode())
    os._exit(0)


# -- in a forked process ----------------------------------------------------------------------------------------------


def _become(order: ForkOrder, descriptors: Sequence[int], state: ServerState) -> Callable[[], None]:
    """Turn this process into the ordered one, and report success; returns the function to run."""
    talk = socket.socket(fileno=descriptors[0])
    if talk.recv(1) != GO:
        os._exit(0)  # the client has abandoned the order
    try:
        _check_parent(order.parent)
        os.setsid()
        nested = _nest(state) if order.starts_processes else None
        if nested is not None:
            return nested
        os.fchdir(descriptors[1])
        for number, descriptor in enumerate(descriptors[2:5]):
            os.dup2(descriptor, number)
        _take_environment(forked_environment(state.start, state.now, order.environment))
    except OSError as error:
        talk.sendall(json.dumps({"errno": error.errno, "why": error.strerror}).encode())
        os._exit(1)
    for descriptor in descriptors[1:5]:
        os.close(descriptor)
    report = [] if not order.reports else [REPORT_FD, str(descriptors[5])]
    arguments = (*order.arguments, *report)
    show_as((*order.title, *arguments))
    gc.enable()
    talk.sendall(DONE)
    talk.close()
    return partial(launch.run, order.program, arguments, state.programs)


def run_to_end(program: Callable[[], None]) -> NoReturn:
    """Run a program and exit with its status as the interpreter would, but without finalisation.

    Finalisation would touch every module imported by the fork server, in memory that is shared until then (0.4 s of
    processor time per process, measured).
    """
    status: object = 0
    try:
        program()
    except SystemExit as end:
        status = end.code
    except BaseException:  # noqa: BLE001 - the outermost frame
        sys.excepthook(*sys.exc_info())
        status = 1
    if status is not None and not isinstance(status, int):
        sys.stderr.write(f"{status}\n")
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001 - the interpreter's own: threads that are no daemons end
    atexit._run_exitfuncs()  # noqa: SLF001 - the only way to them
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # the reader is gone
            stream.flush()
    os._exit((status or 0) & 0xFF)


def _check_parent(wanted: int) -> None:
    if os.getppid() != wanted:
        raise OSError(errno.ECHILD, "the kernel has assigned the forked process another parent")


def _nest(state: ServerState) -> Callable[[], None] | None:
    """Fork a fork server for this process. Also returns in processes forked by it, with the function to run."""
    own, theirs = socket.socketpair()
    parent = os.getpid()
    try:
        pid = state.fork()
    except OSError:  # this process starts one itself if it needs one
        own.close()
        theirs.close()
        return None
    if pid:
        theirs.close()
        inherit(own, pid)
        return None
    os.setsid()
    die_with_parent()
    if os.getppid() != parent:
        os._exit(0)
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(nothing, number)
    own.detach()
    for descriptor in open_descriptors() - {0, 1, 2, theirs.fileno()} - state.descriptors:
        os.close(descriptor)
    show_as(TITLE)
    return serve(theirs, state)


def _take_environment(environment: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    time.tzset()
    # Python reseeds `random` in a forked process; NumPy's generator would be equal in all of them.
    numpy_random: Any = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()


def show_as(command: Sequence[str]) -> None:
    """Show `command` in `ps` and `/proc/PID/cmdline`, truncated to the space of this process's own command line."""
    try:
        fields = Path("/proc/self/stat").read_bytes().rsplit(b")", 1)[1].split()
        begin, end = int(fields[45]), int(fields[46])
    except (OSError, IndexError, ValueError):
        return
    room = end - begin
    if begin <= 0 or room < len(PADDING):
        return  # another program, to which these arguments belong
    shown = b"\0".join(os.fsencode(part) for part in command)[: room - 1]
    ctypes.memmove(begin, shown + bytes(room - len(shown)), room)


if __name__ == "__main__":
    main()
