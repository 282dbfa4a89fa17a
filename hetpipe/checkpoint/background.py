"""A background thread for work on an object store; the end of the process does not wait for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue


class Background:
    """Executes tasks in order on a daemon thread, which starts with the first task."""

    def __init__(self, name: str) -> None:
        """Create the executor; `name` is that of the thread."""
        self._name = name
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._queue: SimpleQueue[tuple[Future[None], Callable[[], None]] | None] = SimpleQueue()
        self._is_closed = False

    def submit(self, work: Callable[[], None]) -> Future[None]:
        """Queue `work`; its future is cancelled by `close` if it has not begun."""
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
        """Cancel all queued work."""
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
                except BaseException as error:  # noqa: BLE001 - raised to the reader of the result
                    future.set_exception(error)
                else:
                    future.set_result(None)
