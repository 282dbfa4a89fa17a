"""Startup and exit of every child of an agent: parent-death signal, configuration line, reports on a descriptor."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from hetpipe.errors import HetpipeError, JobError
from hetpipe.phases import write_line
from hetpipe.pipeline.allowed_modules import OPTION, allow_only
from hetpipe.server.parent_death import follow_parent, ignore_input


def read_first_line() -> bytes:
    """The configuration on standard input, read byte by byte so that nothing after it is consumed."""
    line = bytearray()
    while (byte := os.read(sys.stdin.fileno(), 1)) and byte != b"\n":
        line += byte
    return bytes(line)


class ReportPipe:
    """Writes one line per report to the descriptor the agent gave. Thread-safe."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def write(self, line: str) -> None:
        """Send one line. A closed pipe is ignored: without its agent the process ends anyway."""
        write_line(self._descriptor, line)


def answer_once(pipe: ReportPipe, work: Callable[[], object]) -> int:
    """Report what `work` returns (plain JSON values) as `{"ok": ...}`; the exit status.

    An exception is reported as `{"error": NAME, "problems": [sentence, ...]}`. For an exception of the user's code, the
    traceback is written to standard error, and the sentence names the log file.
    """
    try:
        answer = {"ok": work()}
    except HetpipeError as error:
        problems = list(error.problems) if isinstance(error, JobError) else [str(error)]
        if error.__cause__ is not None and not isinstance(error.__cause__, HetpipeError):
            traceback.print_exc()
            problems[-1] += _where_the_traceback_is()
        answer = {"error": _public_name(error), "problems": problems}
    except Exception as error:  # noqa: BLE001 - the user's code may raise anything; reported as one sentence
        traceback.print_exc()
        answer = {"error": type(error).__name__, "problems": [f"{type(error).__name__}: {error}"]}
    pipe.write(json.dumps(answer))
    return 0 if "ok" in answer else 1


def _public_name(error: HetpipeError) -> str:
    """The error's class in `hetpipe.errors`, as classes derived elsewhere are unknown to the receiver."""
    return next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == HetpipeError.__module__)


def _where_the_traceback_is() -> str:
    """The end of a sentence; empty if standard error is not a file."""
    try:
        output = Path("/proc/self/fd/2").readlink()
    except OSError:
        return ""
    return f"; the traceback is in {output}" if output.is_file() else ""


def run_child(
    main: Callable[[ReportPipe, bytes], int], *, on_input: Callable[[bytes], None] = ignore_input
) -> NoReturn:
    """Run a child's `main` with its report pipe and its first line; never returns. What follows that line is input.

    SIGTERM ends it at once: all durable state is on the shards and on disk.
    """
    signal.signal(signal.SIGTERM, lambda *_: os._exit(128 + signal.SIGTERM))
    parser = argparse.ArgumentParser(description="Started by an agent; not for people.")
    parser.add_argument("--report-fd", type=int, required=True)
    parser.add_argument(OPTION, dest="allowed", action="append")
    options = parser.parse_args()
    if options.allowed is not None:
        allow_only(options.allowed)
    pipe = ReportPipe(options.report_fd)
    first_line = read_first_line()
    follow_parent(signal.SIGKILL, lambda: os._exit(1), on_input=on_input)
    status = main(pipe, first_line)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # threads blocked on the network must not delay the exit
