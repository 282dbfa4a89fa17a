"""Outgoing frames of a link that are not sent yet; shared by all links that send in the background."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from operator import is_

from hetpipe.clock import Clock
from hetpipe.errors import DeadlineExceeded
from hetpipe.link.frame_queue import Ends, describe
from hetpipe.link.policy import Frame, LinkLimits
from hetpipe.link.wire import portable
from hetpipe.values.run import LinkTime


class SendQueue:
    """At most `outgoing_frames` frames. Its condition is the sender's: hold it to read, notify it after a change."""

    def __init__(self, *, ends: Ends, limits: LinkLimits, pace: LinkTime | None, clock: Clock) -> None:
        """Create an empty queue.

        Args:
            ends: for errors.
            limits: its capacity.
            pace: emulation: each frame is delayed by the duration of its transfer, one after the other.
            clock: measures waits.
        """
        self._ends = ends
        self._limits = limits
        self._pace = pace
        self._clock = clock
        self.changed = threading.Condition()
        #: Oldest first; None is the goodbye. The first one stays until it is sent.
        self.frames: deque[Frame | None] = deque()

    def put(
        self,
        frame: Frame,
        *,
        deadline_seconds: float,
        has_ended: Callable[[], bool],
        send_now: Callable[[Frame], bool] = lambda _: False,
    ) -> bool:
        """Queue `frame` once there is room; False if the link has ended instead.

        Args:
            frame: to be sent.
            deadline_seconds: of the wait for room.
            has_ended: asked under the lock.
            send_now: called under the lock if no frame is before this one; whether it has sent the frame.

        Raises:
            DeadlineExceeded: no earlier frame was sent in time.
            PlanError: a tensor of a layout, dtype or rank that cannot be sent.
            ResourceExhausted: more bytes or tensors than the limits allow.
        """
        tensors = portable(frame.tensors, self._limits)
        ready = frame if all(map(is_, tensors, frame.tensors)) else replace(frame, tensors=tensors)
        with self.changed:
            if not self.frames and not has_ended() and send_now(ready):
                return True
            self._wait_slot(frame, deadline_seconds, has_ended)
            if has_ended():
                return False
            self.frames.append(ready)
            self.changed.notify_all()
            return True

    def hold_back(self, frame: Frame, until: Callable[[], bool]) -> None:
        """Wait for the duration of an emulated transfer, or until `until` is true."""
        if self._pace is not None:
            num_bytes = sum(tensor.numel() * tensor.itemsize for tensor in frame.tensors if tensor is not None)
            with self.changed:
                self.changed.wait_for(until, self._pace.seconds(num_bytes))

    def say_goodbye(self, timeout_seconds: float, *, has_broken: Callable[[], bool]) -> bool:
        """Queue the goodbye after all pending frames; False if it could not be sent in time."""
        with self.changed:
            if has_broken():
                return False
            self.frames.append(None)
            self.changed.notify_all()
            self.changed.wait_for(lambda: not self.frames or has_broken(), timeout_seconds)
            return not self.frames

    def wake(self) -> None:
        """Wake all waiting threads."""
        with self.changed:
            self.changed.notify_all()

    def _wait_slot(self, frame: Frame, deadline_seconds: float, has_ended: Callable[[], bool]) -> None:
        began = self._clock.monotonic()
        if not self.changed.wait_for(lambda: self._has_slot() or has_ended(), deadline_seconds):
            elapsed = self._clock.monotonic() - began
            raise DeadlineExceeded(
                f"{self._ends.own} waited {elapsed:.1f} s to send {describe(frame)} to {self._ends.peer}, which "
                "has not accepted the frames before it"
            )

    def _has_slot(self) -> bool:
        return len(self.frames) < self._limits.outgoing_frames
