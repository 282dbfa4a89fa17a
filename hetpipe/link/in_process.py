"""Links between two threads of one process.

They promise what a network link promises, no more: every tensor is copied at `send`, so that the receiver may change
what it got (an in-place activation at the start of the next stage does) without reaching into the sender's autograd
graph, and so that what it gets is contiguous and aligned.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import torch

from hetpipe.clock import SYSTEM_CLOCK, Clock
from hetpipe.errors import DeadlineExceeded
from hetpipe.link.frame_queue import Ends, FrameQueue, closed_by, describe
from hetpipe.link.policy import Frame, Link, LinkLimits
from hetpipe.link.wire import portable


class InProcessLink:
    """One end of a pair; see `Link` for the guarantees. `send` copies in the calling thread."""

    def __init__(
        self, ends: Ends, *, inbox: FrameQueue, peer_inbox: FrameQueue, limits: LinkLimits, clock: Clock
    ) -> None:
        self._ends = ends
        self._inbox = inbox
        self._peer_inbox = peer_inbox
        self._limits = limits
        self._clock = clock
        self._closing = threading.Lock()

    @property
    def own(self) -> str:
        """Who holds this end."""
        return self._ends.own

    @property
    def peer(self) -> str:
        """Who holds the other end."""
        return self._ends.peer

    def send(self, frame: Frame, *, deadline_seconds: float) -> None:
        """See `Link.send`."""
        self._raise_if_ended(frame)
        copies = tuple(
            None if tensor is None else torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
            for tensor in portable(frame.tensors, self._limits)
        )
        began = self._clock.monotonic()
        if not self._peer_inbox.wait_room(deadline_seconds):
            elapsed = self._clock.monotonic() - began
            raise DeadlineExceeded(
                f"{self.own} waited {elapsed:.1f} s to send {describe(frame)} to {self.peer}, "
                "which has not taken the frames before it"
            )
        sent = replace(frame, tensors=copies)
        if not self._peer_inbox.put(sent):
            self._raise_if_ended(frame)

    def receive(self, *, timeout_seconds: float, awaiting: str = "a frame") -> Frame:
        """See `Link.receive`."""
        return self._inbox.take(timeout_seconds=timeout_seconds, awaiting=awaiting)

    def try_receive(self) -> Frame | None:
        """See `Link.try_receive`."""
        return self._inbox.try_take()

    def watch(self, callback: Callable[[], None]) -> None:
        """See `Link.watch`."""
        self._inbox.watch(callback)

    def close(self) -> None:
        """See `Link.close`."""
        with self._closing:
            ending = closed_by(self._ends.own, other=self._ends.peer)
            self._inbox.end(ending, drop=True)
            self._peer_inbox.end(ending)

    def _raise_if_ended(self, frame: Frame) -> None:
        # `close` of either end ends both inboxes, one after the other: look at both.
        ending = self._inbox.ending or self._peer_inbox.ending
        if ending is not None:
            raise ending.error(f" before {self.own} sent {describe(frame)}")


def in_process_pair(
    name_a: str, name_b: str, *, limits: LinkLimits | None = None, clock: Clock = SYSTEM_CLOCK
) -> tuple[Link, Link]:
    """Both ends of a new link, held by `name_a` and `name_b` (`stage 0 of virtual worker 1`)."""
    limits = limits or LinkLimits()
    a, b = Ends(own=name_a, peer=name_b), Ends(own=name_b, peer=name_a)
    # Nothing is "under way" here, so one queue has the room of both the sender's and the receiver's.
    capacity = limits.outgoing_frames + limits.incoming_frames
    to_a, to_b = FrameQueue(capacity, ends=a, clock=clock), FrameQueue(capacity, ends=b, clock=clock)
    return (
        InProcessLink(a, inbox=to_a, peer_inbox=to_b, limits=limits, clock=clock),
        InProcessLink(b, inbox=to_b, peer_inbox=to_a, limits=limits, clock=clock),
    )
