"""Imported by every Python process of a chaos cluster as it starts: lets the nemesis arm a failpoint while it runs.

The nemesis writes `FOLDER/PID`, with the entries of `HETPIPE_FAILPOINTS` in its first line and the folder of the marks
in its second one; the process with that number takes them and removes the file. `FOLDER` is `HETPIPE_CHAOS_ARM`.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

_PAUSE_SECONDS = 0.05


def _listen(order: Path) -> None:
    pause = threading.Event()
    while not pause.wait(_PAUSE_SECONDS):
        if order.exists():
            # Not before: most processes here are no hetpipe's.
            from hetpipe import failpoints

            entries, once = order.read_text().splitlines()
            failpoints.disarm()
            failpoints.arm({failpoints.VARIABLE: entries, failpoints.ONCE_VARIABLE: once}, is_allowed=True)
            order.unlink()


def _start(folder: str) -> None:
    threading.Thread(target=_listen, args=(Path(folder) / str(os.getpid()),), name="chaos", daemon=True).start()


def _start_in_what_is_forked(folder: str) -> None:
    """A fork server has one thread; each process that it forks begins with `hetpipe.launch.run`."""
    from hetpipe import launch

    run = launch.run

    def run_listening(program: str, arguments: Sequence[str], programs: Mapping[str, str]) -> None:
        _start(folder)
        run(program, arguments, programs)

    launch.run = run_listening


if folder := os.environ.get("HETPIPE_CHAOS_ARM"):
    is_fork_server = "hetpipe.fork_server" in sys.orig_argv
    (_start_in_what_is_forked if is_fork_server else _start)(folder)
