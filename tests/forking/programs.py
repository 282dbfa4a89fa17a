"""Programs for the tests of the fork server: importing them takes no time."""

from __future__ import annotations

import atexit
import gc
import json
import os
import random
import signal
import sys
import threading
from pathlib import Path

from hetpipe import fork_server, launch
from hetpipe.forking.environment import SERVICE_ENVIRONMENT
from hetpipe.forking.fork_server import ForkServer, own_fork_server
from hetpipe.forking.process import Launch, Process
from hetpipe.phases import LAUNCH, end_phases
from hetpipe.server.parent_death import follow_parent

#: What the fork servers of these tests can run.
PROGRAMS = {"show": "tests.forking.programs:show", "parent": "tests.forking.programs:parent"}


def environment() -> dict[str, str]:
    """That of fork servers and of what they fork."""
    return {**os.environ, **SERVICE_ENVIRONMENT}


def started(server: ForkServer, *arguments: str, report: int, stdin: int, starts_processes: bool = False) -> Process:
    """A program of `PROGRAMS`, started by `server`."""
    return server.start(
        Launch(
            command=[*LAUNCH, *arguments],
            environment=environment(),
            stdin=stdin,
            stdout=report,
            stderr=report,
            report=report,
            starts_processes=starts_processes,
        )
    )


def as_program() -> None:
    """Run a program of `PROGRAMS` in a process that was started for it; the end of `python -c`."""
    launch.run(sys.argv[1], sys.argv[2:], PROGRAMS)


def _report() -> int:
    end_phases()
    return int(sys.argv[sys.argv.index("--report-fd") + 1])


def facts() -> dict[str, object]:
    """What distinguishes a process from another one."""
    return {
        "is forked": getattr(sys.modules["__main__"].__spec__, "name", "") == "hetpipe.fork_server",
        "pid": os.getpid(),
        "parent": os.getppid(),
        "session": os.getsid(0),
        "group": os.getpgid(0),
        "folder": str(Path.cwd()),
        "arguments": sys.argv,
        "command line": Path("/proc/self/cmdline").read_text().rstrip("\0").split("\0"),
        "environment": dict(os.environ),
        "first environment": sorted(
            entry.partition("=")[0] for entry in Path("/proc/self/environ").read_text().split("\0") if entry
        ),
        "descriptors": sorted(fork_server.open_descriptors()),
        "handlers": {number.name: str(signal.getsignal(number)) for number in signal.Signals},
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "threads": sorted({thread.name for thread in threading.enumerate()} - {"phases"}),
        "collects": gc.isenabled(),
        "random": random.random(),
        "umask": next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("Umask")),
        "limits": Path("/proc/self/limits").read_text(),
    }


def show() -> None:
    """Report what this process is, then do as its arguments say."""
    report = _report()
    os.write(report, json.dumps(facts()).encode() + b"\n")
    match sys.argv[1]:
        case "wait":
            follow_parent(signal.SIGKILL, lambda: os._exit(1))
            threading.Event().wait()
        case "status":
            sys.exit(3)
        case "sentence":
            sys.exit("no luck")
        case "error":
            raise ValueError("of the program")
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "group":
            if os.fork() == 0:
                os.write(report, json.dumps({"pid": os.getpid()}).encode() + b"\n")
                signal.pause()
            signal.pause()
        case "thread":
            threading.Thread(target=_outlive, args=(threading.main_thread(),)).start()
        case "return":
            atexit.register(sys.stdout.write, "flushed, and what was registered is run\n")


def _outlive(other: threading.Thread) -> None:
    other.join(60.0)
    sys.stdout.write("a thread has gone on to its end\n")


def parent() -> None:
    """Start a process of its own, and end when asked; the process reports to the same descriptor."""
    report = _report()
    server = own_fork_server(environment())
    reading, _writing = os.pipe()
    child = started(server, "show", "wait", report=report, stdin=reading)
    os.write(report, json.dumps({"pid": os.getpid(), "fork server": server.pid, "child": child.pid}).encode() + b"\n")
    signal.pause()
