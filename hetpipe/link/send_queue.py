"""The frames that a link has taken for sending and not sent yet, shared by all links that send in the background."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from hetpipe.clock import Clock
from hetpipe.errors import DeadlineExceeded
from hetpipe.link.frame_queue import Ends, describe
from hetpipe.link.policy import Frame, LinkLimits
from hetpipe.link.wire import portable
from hetpipe.values.run import LinkTime


class SendQueue:
    """At most `outgoing_frames` of them. Its condition is the sender's: hold it to look, notify it after a change."""

    def __init__(self, *, ends: Ends, limits: LinkLimits, pace: LinkTime | None, clock: Clock) -> None:
        """Begin empty.

        Args:
            ends: for errors.
            limits: how many frames.
            pace: emulation: each frame is held back for the time that its transfer would take, one after the other.
            clock: measures waits.
        """
        self._ends = ends
        self._limits = limits
        self._pace = pace
        self._clock = clock
        self.changed = threading.Condition()
        #: Oldest first; None is the good-bye. The first one stays until it is gone.
        self.frames: deque[Frame | None] = deque()

    def put(self, frame: Frame, *, deadline_seconds: float, has_ended: Callable[[], bool]) -> bool:
        """Take `frame` once there is room; False if the link has ended instead. `has_ended` is asked under the lock.

        Raises:
            DeadlineExceeded: no earlier frame got through in time.
            PlanError: a tensor of a layout, dtype or rank that cannot be sent.
            ResourceExhausted: more bytes or tensors than the limits allow.
        """
        ready = replace(frame, tensors=portable(frame.tensors, self._limits))
        with self.changed:
            self._wait_slot(frame, deadline_seconds, has_ended)
            if has_ended():
                return False
            self.frames.append(ready)
            self.changed.notify_all()
            return True

    def hold_back(self, frame: Frame, until: Callable[[], bool]) -> None:
        """Let the time of an emulated transfer pass, or what `until` waits for come first."""
        if self._pace is not None:
            num_bytes = sum(tensor.numel() * tensor.itemsize for tensor in frame.tensors if tensor is not None)
            with self.changed:
                self.changed.wait_for(until, self._pace.seconds(num_bytes))

    def say_goodbye(self, timeout_seconds: float, *, has_broken: Callable[[], bool]) -> bool:
        """Have the good-bye sent after all that is under way; False if that did not succeed in time."""
        with self.changed:
            if has_broken():
                return False
            self.frames.append(None)
            self.changed.notify_all()
            self.changed.wait_for(lambda: not self.frames or has_broken(), timeout_seconds)
            return not self.frames

    def wake(self) -> None:
        """Make whoever waits look again."""
        with self.changed:
            self.changed.notify_all()

    def _wait_slot(self, frame: Frame, deadline_seconds: float, has_ended: Callable[[], bool]) -> None:
        began = self._clock.monotonic()
        if not self.changed.wait_for(lambda: self._has_slot() or has_ended(), deadline_seconds):
            elapsed = self._clock.monotonic() - began
            raise DeadlineExceeded(
                f"{self._ends.own} waited {elapsed:.1f} s to send {describe(frame)} to {self._ends.peer}, "
                "which has not taken the frames before it"
            )

    def _has_slot(self) -> bool:
        return len(self.frames) < self._limits.outgoing_frames
