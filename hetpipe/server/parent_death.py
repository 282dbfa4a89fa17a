"""Not outliving the process that started this one: the kernel's help, and the end of standard input."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable

#: prctl option: the signal this process gets when the thread that started it ends.
_PR_SET_PDEATHSIG = 1


def die_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send this process `number` when its parent ends; not if it has ended before."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)


def follow_parent(number: signal.Signals, on_gone: Callable[[], None]) -> None:
    """Have the kernel send `number` when the parent dies, and call `on_gone` when it is gone or closes standard input.

    Args:
        number: SIGKILL for a child that has nothing to put in order, SIGTERM for one that has.
        on_gone: called from a thread, or at once if the parent was gone before the kernel knew that we care.
    """
    parent = os.getppid()
    die_with_parent(number)
    if os.getppid() != parent:
        on_gone()

    def watch() -> None:
        # Not through `sys.stdin`: a thread that blocks in its buffer aborts the interpreter's shutdown.
        while os.read(sys.stdin.fileno(), 4096):
            """What a parent writes means nothing."""
        on_gone()

    threading.Thread(target=watch, name="parent", daemon=True).start()
