"""The threads of a server: they run handlers, and a call takes one only once its request is there.

gRPC gives a call a thread first, which then waits until the request has been read. Here the request of a call with a
single one is read before (`wire.reading_ahead`), so that the call passes from thread to thread once instead of
twice, and a peer that sends nothing holds no thread. That is limited in number and bytes; beyond, gRPC's own way is
taken, and the thread counts as its peer's (`wire.limits`).

At most one thread at a time is about to take work. It wakes the next one as it does so, and one that has ended its work
takes more before any other is woken: as few threads run as the handlers leave idle processors, and they do not compete
for the interpreter. One that waits in a handler holds nobody up.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc

from hetpipe.clock import Clock
from hetpipe.observe.log import get_logger
from hetpipe.wire.reading_ahead import Task, behaviour_of, call_of, read_ahead

_log = get_logger(__name__)

#: Thread name, as shown by the system, of pool threads; the pool grows to the maximum number of concurrent calls.
POOL_THREADS = "rpc-pool"

#: A server reads at most one request ahead for as many threads; and none while requests of so many bytes wait for one.
THREADS_PER_READING = 3
MAX_WAITING_BYTES = 16 << 20


class Ended:
    """What gRPC gets for a task: a future of which it only wants the end. Thread-safe."""

    __slots__ = ("_callback", "_lock", "_over")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._over = False
        self._callback: Callable[[Any], object] | None = None

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        """Call `callback` at the end, or now."""
        with self._lock:
            self._callback, is_over = callback, self._over
        if is_over:
            callback(self)

    def end(self) -> None:
        """The task has ended."""
        with self._lock:
            self._over, callback = True, self._callback
        if callback is not None:
            callback(self)


def reads_ahead(behaviour: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a handler of a stream of requests that takes a single one: it may be given an `Arrived`."""
    behaviour.reads_ahead = True  # type: ignore[attr-defined]
    return behaviour


class ServerThreads:
    """The pool of one server, for `grpc.server`. Thread-safe."""

    def __init__(self, num_threads: int, clock: Clock) -> None:
        """Start without threads; `clock` measures how long peers take to send."""
        self.max_threads = num_threads
        #: Requests that are read ahead at a time.
        self.max_reading = max(1, num_threads // THREADS_PER_READING)
        self._clock = clock
        self._lock = threading.Lock()
        #: Since when requests are read, by the end of their calls.
        self._reading: dict[Ended, tuple[float, Task]] = {}
        self._ready: deque[tuple[Ended, Task, int]] = deque()
        self._ready_bytes = 0
        #: The locks on which idle threads sleep; the last one has worked last.
        self._idle: list[threading.Lock] = []
        self._num_threads = 0
        #: Whether a thread is about to take work.
        self._is_starting = False
        self._is_closed = False

    def submit(self, *task: Any) -> Ended:
        """Run a task, of gRPC: a function and its arguments."""
        ended = Ended()
        behaviour = behaviour_of(task)
        if behaviour is not None and getattr(behaviour, "reads_ahead", False):
            with self._lock:
                ahead = len(self._reading) < self.max_reading and self._ready_bytes < MAX_WAITING_BYTES
                if ahead:
                    self._reading[ended] = (self._clock.monotonic(), task)
            if ahead:
                read_ahead(task, lambda ready, num_bytes: self._put(ended, ready, num_bytes))
                return ended
        self._put(ended, task, 0)
        return ended

    @property
    def num_reading(self) -> int:
        """Number of requests that are being read ahead."""
        with self._lock:
            return len(self._reading)

    def silent_since(self, moment: float) -> list[tuple[str, grpc.ServicerContext]]:
        """The calls of which a request has been read since `moment` at least; each is returned once.

        A call that is then cancelled is given to its handler, as one without a request.
        """
        with self._lock:
            found = [(ended, task) for ended, (since, task) in self._reading.items() if since <= moment]
            for ended, _ in found:
                del self._reading[ended]
        return [call_of(task) for _, task in found]

    def shutdown(self) -> None:
        """End idle threads, and the others once there is no work."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
        for wake in idle:
            wake.release()

    def _put(self, ended: Ended, task: Task, num_bytes: int) -> None:
        with self._lock:
            self._reading.pop(ended, None)
            self._ready.append((ended, task, num_bytes))
            self._ready_bytes += num_bytes
            self._wake_one()

    def _wake_one(self) -> None:
        """See that a thread takes the next task, if any. With the lock held."""
        if self._is_starting or not self._ready:
            return
        if self._idle:
            self._is_starting = True
            self._idle.pop().release()
        elif self._num_threads < self.max_threads:
            self._is_starting = True
            self._num_threads += 1
            thread = threading.Thread(target=self._work, name=f"{POOL_THREADS}_{self._num_threads}", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the system has no more threads: one that works takes the task
                self._is_starting = False
                self._num_threads -= 1
                _log.warning("no_thread", num_threads=self._num_threads)

    def _work(self) -> None:
        _name_thread()
        wake, is_woken = threading.Lock(), True
        wake.acquire()
        while True:
            with self._lock:
                if is_woken:
                    self._is_starting = False
                if self._ready:
                    ended, task, num_bytes = self._ready.popleft()
                    self._ready_bytes -= num_bytes
                    self._wake_one()
                elif self._is_closed:
                    self._num_threads -= 1
                    return
                else:
                    self._idle.append(wake)
                    ended = None
            is_woken = ended is None
            if ended is None:
                wake.acquire()
                continue
            try:
                task[0](*task[1:])
            except Exception:  # noqa: BLE001 - gRPC's own: none is expected, and the thread goes on
                _log.exception("task_failed")
            finally:
                ended.end()
            del task, ended


def _name_thread() -> None:
    """Name a pool thread for system tools. Before 3.14, Python does not set the system's thread name."""
    with suppress(OSError):
        Path("/proc/thread-self/comm").write_text(POOL_THREADS, encoding="ascii")
