"""Ctrl-C and SIGTERM while a run is followed: deferred, so that the run can reach a barrier first."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType
from typing import Any, Self


class Interrupts:
    """Handles the signals in a `with` block; the previous handlers are restored at its end.

    Until `listen` each signal raises `KeyboardInterrupt` in the main thread, as Python does for Ctrl-C; after that the
    listener is called instead. A no-op outside the main thread, where Python allows no handlers.
    """

    def __init__(self, signals: Sequence[signal.Signals] = (signal.SIGINT, signal.SIGTERM)) -> None:
        self._signals = signals
        self._before: dict[signal.Signals, Any] = {}
        self._listener: Callable[[signal.Signals], None] | None = None
        #: The newest signal; None before the first.
        self.newest: signal.Signals | None = None
        #: Number of signals so far.
        self.count = 0

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._on_signal) for number in self._signals}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def listen(self, listener: Callable[[signal.Signals], None] | None) -> None:
        """Call `listener` with each signal from now on, in the main thread; None: raise again. It must be reentrant."""
        self._listener = listener

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self.count += 1
        self.newest = signal.Signals(number)
        if self._listener is None:
            raise KeyboardInterrupt
        self._listener(self.newest)
