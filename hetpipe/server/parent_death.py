"""Termination with the parent process: by the kernel's parent-death signal, and at the end of standard input."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable

#: prctl option: the signal sent to this process when the thread that started it ends.
_PR_SET_PDEATHSIG = 1

#: Capacity of a pipe.
_READ_BYTES = 65_536


def die_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send `number` to this process when its parent ends. No effect if that has already ended."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)


def ignore_input(_data: bytes) -> None:
    """Do nothing with what the parent writes."""


def follow_parent(
    number: signal.Signals, on_gone: Callable[[], None], *, on_input: Callable[[bytes], None] = ignore_input
) -> None:
    """Watch the parent: the kernel sends `number` when it dies; `on_gone` is called when standard input is closed.

    Args:
        number: SIGTERM for a process that shuts down gracefully, else SIGKILL.
        on_gone: called from a thread; or immediately, if the parent ended before the signal was registered.
        on_input: gets what the parent writes to standard input, on that thread; raises nothing.
    """
    parent = os.getppid()
    die_with_parent(number)
    if os.getppid() != parent:
        on_gone()

    def watch() -> None:
        # Not through `sys.stdin`: a thread that blocks in its buffer aborts the interpreter's shutdown.
        while data := os.read(sys.stdin.fileno(), _READ_BYTES):
            on_input(data)
        on_gone()

    threading.Thread(target=watch, name="parent", daemon=True).start()
