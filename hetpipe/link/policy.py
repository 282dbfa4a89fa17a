"""How do activations and gradients move between neighbouring stages of one virtual worker?

A `Link` is one end of a connection towards *one* neighbour; a stage in the middle of a pipeline holds two. What moves
is a `Frame`: a small typed header and a flat tuple of tensors, whose number, shapes and dtypes may differ from frame to
frame. Each answer to the question is one sibling file, and all of them pass `tests.support.link_contract`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

#: Upper bounds of what a frame may hold; a frame beyond them is refused before anything is allocated.
MAX_RANK = 8
MAX_TENSORS = 512


class FrameKind(enum.Enum):
    """What a frame asks its receiver to do. The value is its code on the wire: never reuse one; 0 is taken."""

    FORWARD = 1
    """Activations of a training minibatch; goes downstream."""
    BACKWARD = 2
    """Gradients of a training minibatch; goes upstream."""
    BARRIER = 3
    """In place of a forward: the barrier at `clock` begins here (`wsp.md` §5). No tensors are needed."""
    EVALUATE = 4
    """Activations of an evaluation minibatch; nothing comes back. Between two forwards, or at a barrier."""
    SQUARES = 5
    """Squared gradient norms of the update after `minibatch`, parameter by parameter from the sender's first one to the
    pipeline's last, as one float64 tensor; goes upstream."""
    NORM = 6
    """The norm of that update's gradient over all stages, as a float64 tensor of one; goes downstream."""


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """One message between neighbouring stages. Compared by identity, as tensors have no cheap equality.

    Ownership: from `send` on, nobody may change the sent tensors (they are read in the background); the tensors of a
    received frame belong to the receiver alone, which may change them.
    """

    kind: FrameKind
    minibatch: int
    """p, from 1 on; for a barrier the last minibatch before it, 0 if there is none; for an evaluation the number of its
    minibatch, from 1 on, and 0 after the last one."""
    clock: int
    """W*: the published clock whose weights this minibatch uses, or that an evaluation is of; for a barrier its own, as
    read by the first stage."""
    local_through: int
    """v(p): the last minibatch whose local update those weights include."""
    tensors: tuple[torch.Tensor | None, ...] = ()
    """None stands for "no gradient for this tensor" in a backward frame."""
    samples: int = 0
    """Samples of the minibatch, in a forward frame."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkLimits:
    """The bounds of one link. The defaults suit tests; a runner derives its own from the schedule.

    For a pipeline to be free of deadlock, `incoming_frames` of every link must be at least the number of minibatches in
    flight (N) plus one for a barrier: then no sender ever blocks on a neighbour that is itself blocked in a send.
    """

    outgoing_frames: int = 4
    """Frames that are being sent at once; their tensors stay alive until they are gone. ≥ 1."""
    incoming_frames: int = 16
    """Received frames that wait for `receive`; when full, the sender is held back. ≥ 1."""
    frame_bytes: int = 4 << 30
    """Most tensor bytes that one frame may hold."""
    close_seconds: float = 2.0
    """Longest time `close` waits for frames that are still being sent."""

    def __post_init__(self) -> None:
        """Refuse bounds with which nothing could ever be sent.

        Raises:
            ValueError: a bound is out of range.
        """
        if self.outgoing_frames < 1 or self.incoming_frames < 1:
            raise ValueError(f"a link needs room for at least one frame each way: {self}")
        if self.frame_bytes < 0 or self.close_seconds < 0:
            raise ValueError(f"a link's limits cannot be negative: {self}")


class Link(Protocol):
    """One end of a connection towards one neighbouring stage.

    * Order: frames arrive in the order in which they were sent, each at most once. Nothing is lost but by the death of
      a process or by `close` of the receiving end.
    * Threads: one thread may send while one other receives; `close`, `watch` may be called from any thread.
    * Bits: a received tensor is on the CPU, detached, contiguous, 64-byte aligned and equal to the sent one bit for
      bit. Tensors on a device are copied to the CPU by `send`, which then waits for that copy.
    * End: when the other end closes or dies, the frames that arrived whole are still received, then `LinkClosed` is
      raised, now and ever after. Its `orderly` says whether the other end said good-bye.
    """

    @property
    def own(self) -> str:
        """Who holds this end, in words: `stage 0 of virtual worker 1`."""
        ...

    @property
    def peer(self) -> str:
        """Who holds the other end, in words."""
        ...

    def send(self, frame: Frame, *, deadline_seconds: float) -> None:
        """Hand `frame` over for sending; returns before it has arrived.

        Blocks only while `outgoing_frames` earlier frames are under way. After any error, `frame` was not sent.

        Raises:
            DeadlineExceeded: no earlier frame got through within `deadline_seconds`; the link stays usable.
            LinkClosed: either end is closed, or the other end went away.
            PlanError: a tensor of a layout, dtype or rank that cannot be sent.
            ResourceExhausted: more bytes or tensors than the limits allow.
        """
        ...

    def receive(self, *, timeout_seconds: float, awaiting: str = "a frame") -> Frame:
        """The next frame; blocks until it is there. `awaiting` says in errors what the caller hopes for.

        Raises:
            DeadlineExceeded: none came within `timeout_seconds`; the link stays usable.
            LinkClosed: either end is closed, or the other end went away.
            MalformedFrame: the other end broke the format; the link is closed.
        """
        ...

    def try_receive(self) -> Frame | None:
        """The next frame if one is there, else None. Never blocks; raises as `receive` does when the link ended."""
        ...

    def watch(self, callback: Callable[[], None]) -> None:
        """Have `callback` called after every arrival and when the link ends, so that one thread can wait for many.

        It runs on a background thread, must be quick and must not raise. It is called once at once, in the calling
        thread, so that nothing that came earlier is missed. A second call replaces the first callback.
        """
        ...

    def close(self) -> None:
        """Send what is under way (for at most `close_seconds`), say good-bye, free everything. Idempotent.

        A `receive` or `send` blocked in another thread ends at once with `LinkClosed`; frames not yet received are
        dropped.
        """
        ...
