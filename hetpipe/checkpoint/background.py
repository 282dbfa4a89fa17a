"""One thread for work on an object store, which a process that ends does not wait for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue


class Background:
    """Does one piece of work after the other, in a daemon thread that starts with the first."""

    def __init__(self, name: str) -> None:
        """`name`: of the thread."""
        self._name = name
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._queue: SimpleQueue[tuple[Future[None], Callable[[], None]] | None] = SimpleQueue()
        self._is_closed = False

    def submit(self, work: Callable[[], None]) -> Future[None]:
        """Do `work` after what was submitted before; its future is cancelled if this is closed first."""
        future: Future[None] = Future()
        with self._lock:
            if self._is_closed:
                future.cancel()
                return future
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._queue.put((future, work))
        return future

    def close(self) -> None:
        """Begin nothing more."""
        with self._lock:
            self._is_closed = True
            self._queue.put(None)

    def _run(self) -> None:
        while (entry := self._queue.get()) is not None:
            future, work = entry
            if self._is_closed:
                future.cancel()
            elif future.set_running_or_notify_cancel():
                try:
                    work()
                except BaseException as error:  # noqa: BLE001 - raised by whoever asks for the result
                    future.set_exception(error)
                else:
                    future.set_result(None)
