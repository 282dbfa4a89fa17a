"""Programs of tests that are forked from an interpreter that has imported their modules, instead of importing them.

`run_forked` runs several short ones in an interpreter of their own. `start_forked` starts one beside the test, from the
fork server of `multiprocessing`, which this process has one of.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory

from hetpipe.fork_server import run_to_end

#: Imported by the fork server: all that its programs need, and nothing that starts a thread.
_PRELOADED = [
    "hetpipe.wire",
    "hetpipe.link.gloo",
    "hetpipe.link.replicas",
    "hetpipe.link.stream_link",
    "tests.link.cuts",
]

ROOT = Path(__file__).resolve().parents[2]

#: The programs end as those of a fork server.
_FORKING = """
import importlib, json, os, sys
from hetpipe.fork_server import run_to_end
folder, imports, codes = json.loads(sys.argv[1])
for name in imports:
    importlib.import_module(name)
statuses = []
for number, code in enumerate(codes):
    child = os.fork()
    if child == 0:
        for descriptor in (1, 2):
            file = os.open(f"{folder}/{number}.{descriptor}", os.O_WRONLY | os.O_CREAT, 0o600)
            os.dup2(file, descriptor)
        sys.argv[1:] = []
        run_to_end(lambda: exec(code, {"__name__": "__main__"}))
    statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(json.dumps(statuses))
"""


def run_forked(
    codes: Sequence[str],
    *,
    imports: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    timeout_seconds: float = 60.0,
) -> list[subprocess.CompletedProcess[str]]:
    """Run each code as the main module of a process of its own, one after the other, in the folder of the project.

    Args:
        codes: what each runs.
        imports: modules that they all find imported; nothing of it may have started a thread.
        environment: the whole environment; None: that of this process.
        timeout_seconds: of all together.
    """
    with TemporaryDirectory() as folder:
        command = [sys.executable, "-c", _FORKING, json.dumps([folder, imports, codes])]
        parent = subprocess.run(
            command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment, timeout=timeout_seconds
        )
        assert parent.returncode == 0, parent.stderr
        return [
            subprocess.CompletedProcess(
                code,
                status,
                Path(folder, f"{number}.1").read_text(encoding="utf-8"),
                Path(folder, f"{number}.2").read_text(encoding="utf-8"),
            )
            for number, (code, status) in enumerate(zip(codes, json.loads(parent.stdout), strict=True))
        ]


def fork_server_context() -> ForkServerContext:
    """That of `multiprocessing`, whose fork server has imported the links."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    return context


class ForkedChild:
    """A process that runs a text."""

    def __init__(self, process: BaseProcess, told: Connection) -> None:
        self._process, self._told = process, told

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def line(self, *, timeout_seconds: float) -> str:
        """The first line that it prints."""
        assert self._told.poll(timeout_seconds), f"process {self.pid} says nothing"
        with os.fdopen(os.dup(self._told.fileno()), encoding="utf-8") as lines:
            return lines.readline().strip()

    def wait(self, timeout_seconds: float) -> int | None:
        """Its exit status; None if it is running still."""
        self._process.join(timeout_seconds)
        return self._process.exitcode


def start_forked(code: str, *arguments: str) -> ForkedChild:
    """Run `code` as the main module of a process of its own, which ends as those of a fork server of hetpipe."""
    context = fork_server_context()
    told, standard_output = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(code, arguments, standard_output), daemon=True)
    process.start()
    standard_output.close()
    return ForkedChild(process, told)


def _run(code: str, arguments: Sequence[str], standard_output: Connection) -> None:
    os.dup2(standard_output.fileno(), 1)
    standard_output.close()
    sys.argv[1:] = arguments
    run_to_end(lambda: exec(code, {"__name__": "__main__"}))
