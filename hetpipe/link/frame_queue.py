"""The receiving half of a link: a bounded, closable queue of complete frames.

The producer of frames (a thread on a socket, or the other end itself) calls `put`; the stage calls `take`. The end is
part of the queue: frames that arrived before it can still be taken, after which `take` raises the reason.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from hetpipe.clock import Clock
from hetpipe.errors import DeadlineExceeded, LinkClosed, MalformedFrame
from hetpipe.link.policy import Frame


@dataclass(frozen=True, slots=True)
class Ends:
    """Names of the two ends of a link."""

    own: str
    peer: str


@dataclass(frozen=True, slots=True)
class LinkClosure:
    """The reason for the end of a link."""

    sentence: str
    orderly: bool
    violation: bool = False
    """The other end violated the format."""

    def error(self, detail: str = "") -> LinkClosed | MalformedFrame:
        """A new exception with the reason."""
        if self.violation:
            return MalformedFrame(self.sentence + detail)
        return LinkClosed(self.sentence + detail, orderly=self.orderly)


def closed_by(closer: str, *, other: str) -> LinkClosure:
    """The ending after `closer` closed its end regularly."""
    return LinkClosure(f"{closer} closed its link to {other}", orderly=True)


def describe(frame: Frame) -> str:
    """Describe `frame` for an error message: `the forward frame of minibatch 12`."""
    return f"the {frame.kind.name.lower()} frame of minibatch {frame.minibatch}"


class FrameQueue:
    """A bounded FIFO queue of frames with an ending. Thread-safe."""

    def __init__(self, capacity: int, *, ends: Ends, clock: Clock) -> None:
        self._capacity = capacity
        self._ends = ends
        self._clock = clock
        self._frames: deque[Frame] = deque()
        #: Set once; the first ending wins. No frame is added after it.
        self._ending: LinkClosure | None = None
        self._watcher: Callable[[], None] | None = None
        self._lock = threading.Lock()
        #: A frame or the ending arrived.
        self._arrived = threading.Condition(self._lock)
        #: A frame was taken, or the queue ended.
        self._room = threading.Condition(self._lock)

    @property
    def ending(self) -> LinkClosure | None:
        """The reason why no further frame will be added; None while some may."""
        with self._lock:
            return self._ending

    def wait_ending(self, timeout_seconds: float) -> LinkClosure | None:
        """The ending, waiting up to `timeout_seconds` for it."""
        with self._lock:
            self._arrived.wait_for(lambda: self._ending is not None, timeout_seconds)
            return self._ending

    def wait_room(self, timeout_seconds: float | None = None) -> bool:
        """Block until a frame fits or the queue ends; False on timeout."""
        with self._lock:
            return self._room.wait_for(self._has_room_or_ended, timeout_seconds)

    def put(self, frame: Frame) -> bool:
        """Add a frame for which there is room; False if the queue has ended. Wakes the consumer."""
        with self._lock:
            if self._ending is not None:
                return False
            assert len(self._frames) < self._capacity, "wait_room was not called"
            self._frames.append(frame)
            self._arrived.notify_all()
            watcher = self._watcher
        if watcher is not None:
            watcher()
        return True

    def take(self, *, timeout_seconds: float, awaiting: str) -> Frame:
        """Take the oldest frame; raises the errors of `Link.receive`."""
        with self._lock:
            if not self._frames and self._ending is None:
                self._wait_arrival(timeout_seconds, awaiting)
            return self._pop(awaiting)

    def try_take(self) -> Frame | None:
        """The oldest frame or None; raises like `take` once the end is reached."""
        with self._lock:
            if not self._frames and self._ending is None:
                return None
            return self._pop("a frame")

    def end(self, ending: LinkClosure, *, drop: bool = False) -> None:
        """End the queue; with `drop`, waiting frames are discarded. The first ending wins."""
        with self._lock:
            if drop:
                self._frames.clear()
            if self._ending is None:
                self._ending = ending
            self._arrived.notify_all()
            self._room.notify_all()
            watcher = self._watcher
        if watcher is not None:
            watcher()

    def watch(self, callback: Callable[[], None]) -> None:
        """Call `callback` now, after each arrival and at the end."""
        with self._lock:
            self._watcher = callback
        callback()

    def _has_room_or_ended(self) -> bool:
        return len(self._frames) < self._capacity or self._ending is not None

    def _wait_arrival(self, timeout_seconds: float, awaiting: str) -> None:
        began = self._clock.monotonic()
        if self._arrived.wait_for(lambda: self._frames or self._ending is not None, timeout_seconds):
            if not self._frames and self._ending is not None:
                elapsed = self._clock.monotonic() - began
                raise self._ending.error(f", {elapsed:.1f} s after {self._ends.own} began to wait for {awaiting}")
            return
        elapsed = self._clock.monotonic() - began
        raise DeadlineExceeded(
            f"{self._ends.own} waited {elapsed:.1f} s for {awaiting} from {self._ends.peer}, "
            "which is connected but sent nothing"
        )

    def _pop(self, awaiting: str) -> Frame:
        if not self._frames:
            assert self._ending is not None
            raise self._ending.error(f" before {self._ends.own} received {awaiting}")
        frame = self._frames.popleft()
        self._room.notify_all()
        return frame
