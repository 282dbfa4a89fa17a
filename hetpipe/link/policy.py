"""Interface of links, which transport activations and gradients between neighbouring stages of a virtual worker.

A `Link` is one end of a connection towards *one* neighbour; a stage in the middle of a pipeline holds two. The unit of
transfer is a `Frame`: a small typed header and a flat tuple of tensors, whose number, shapes and dtypes may differ from
frame to frame. Each implementation is a sibling file, and all of them pass `tests.support.link_contract`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

#: Upper bounds on a frame; a frame beyond them is rejected before anything is allocated.
MAX_RANK = 8
MAX_TENSORS = 512


class FrameKind(enum.Enum):
    """Type of a frame. The value is its code on the wire: never reuse one; 0 is taken."""

    FORWARD = 1
    """Activations of a training minibatch; sent downstream."""
    BACKWARD = 2
    """Gradients of a training minibatch; sent upstream."""
    BARRIER = 3
    """Instead of a forward: the barrier at `clock` starts here (`wsp.md` §5). Carries no tensors."""
    EVALUATE = 4
    """Activations of an evaluation minibatch, without a reply. Sent between two forwards, or at a barrier."""
    SQUARES = 5
    """Squared gradient norms of the update after `minibatch`, parameter by parameter from the sender's first one to the
    pipeline's last, as one float64 tensor; sent upstream.
    """
    NORM = 6
    """The norm of that update's gradient over all stages, as a float64 tensor of one; sent downstream."""
    HANDOVER = 7
    """Part of the state of layers that move to the receiver at the barrier at `clock` (`pipeline.handover`)."""
    MOVE = 8
    """Part of what the receiver needs of layers that move to it without a barrier (`pipeline.live_move`): `version` is
    that of the plan with them, `clock` where the segment began, `weight` the number of a message, `local_through` that
    of its frames, and `minibatch` that of this one, from 0 on."""


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """One message between neighbouring stages. Compared by identity, as tensors have no cheap equality.

    Ownership: after `send`, the sent tensors must not be modified (they are read in the background); the tensors of a
    received frame belong to the receiver, which may modify them.
    """

    kind: FrameKind
    minibatch: int
    """p, from 1 on; for a barrier the last minibatch before it, 0 if there is none; for an evaluation the number of its
    minibatch, from 1 on, and 0 after the last one; in a handover the number of frames of it that follow."""
    clock: int
    """W*: the published clock whose weights this minibatch uses, or that an evaluation is of; for a barrier its own
    clock, as read by the first stage.
    """
    local_through: int
    """v(p): the last minibatch whose local update those weights include."""
    tensors: tuple[torch.Tensor | None, ...] = ()
    """None means "no gradient for this tensor" in a backward frame."""
    weight: int = 0
    """In a backward frame, the weight of the minibatch in means over several (job key `mean_over`); in one of a link's
    measurement, the bytes of its answer.
    """
    scale_exponent: int = 0
    """Binary logarithm of the scale of the minibatch's loss, in a forward frame; 0: the loss itself."""
    version: int = 0
    """The version of the virtual worker's plan by which the minibatch is computed, in a forward or backward frame."""
    tells_norms: bool = False
    """In a forward frame, whether the stages tell the norms of the minibatch's gradients (`freezing.md` §2)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkLimits:
    """The limits of one link. The defaults suit tests; a runner derives its own from the schedule.

    To keep a pipeline free of deadlocks, `incoming_frames` of every link must be at least the number of minibatches in
    flight (N) plus one for a barrier: then no sender ever blocks on a neighbour that is itself blocked in a send.
    """

    outgoing_frames: int = 4
    """Frames being sent at once; their tensors are kept alive until they are sent. ≥ 1."""
    incoming_frames: int = 16
    """Received frames that wait for `receive`; when full, the sender is blocked. ≥ 1."""
    frame_bytes: int = 4 << 30
    """Maximum tensor bytes of one frame."""
    close_seconds: float = 2.0
    """Maximum time `close` waits for frames that are still being sent."""

    def __post_init__(self) -> None:
        """Reject limits under which nothing could be sent.

        Raises:
            ValueError: a bound is out of range.
        """
        if self.outgoing_frames < 1 or self.incoming_frames < 1:
            raise ValueError(f"a link needs room for at least one frame each way: {self}")
        if self.frame_bytes < 0 or self.close_seconds < 0:
            raise ValueError(f"the limits of a link cannot be negative: {self}")


class Link(Protocol):
    """One end of a connection towards one neighbouring stage.

    * Order: frames arrive in the order in which they were sent, each at most once. Frames are lost only through the
      death of a process or `close` of the receiving end.
    * Threads: one thread may send while one other receives; `close`, `watch` may be called from any thread.
    * Bits: a received tensor is on the CPU, detached, contiguous, 64-byte aligned and equal to the sent one bit for
      bit. Tensors on a device are copied to the CPU by `send`, which then waits for that copy.
    * End: when the other end closes or dies, frames that arrived completely can still be received, then `LinkClosed` is
      raised by every call. Its `orderly` tells whether the other end said goodbye.
    """

    @property
    def own(self) -> str:
        """Name of this end: `stage 0 of virtual worker 1`."""
        ...

    @property
    def peer(self) -> str:
        """Name of the other end."""
        ...

    def send(self, frame: Frame, *, deadline_seconds: float) -> None:
        """Send `frame`; returns before it has arrived.

        Blocks only while `outgoing_frames` earlier frames are pending. After any error, `frame` was not sent.

        Raises:
            DeadlineExceeded: no earlier frame was sent within `deadline_seconds`; the link stays usable.
            LinkClosed: either end is closed, or the other end disconnected.
            PlanError: a tensor of a layout, dtype or rank that cannot be sent.
            ResourceExhausted: more bytes or tensors than the limits allow.
        """
        ...

    def receive(self, *, timeout_seconds: float, awaiting: str = "a frame") -> Frame:
        """Wait for the next frame. `awaiting` describes the expected frame in errors.

        Raises:
            DeadlineExceeded: none arrived within `timeout_seconds`; the link stays usable.
            LinkClosed: either end is closed, or the other end disconnected.
            MalformedFrame: the other end violated the format; the link is closed.
        """
        ...

    def try_receive(self) -> Frame | None:
        """The next frame if one has arrived, else None. Never blocks; raises like `receive` when the link has ended."""
        ...

    def watch(self, callback: Callable[[], None]) -> None:
        """Register `callback` for every arrival and the end of the link, so that one thread can wait for many.

        It runs on a background thread, must be quick and must not raise. It is called once immediately, in the calling
        thread, so that no earlier arrival is missed. A second call replaces the first callback.
        """
        ...

    def close(self) -> None:
        """Send pending frames (for at most `close_seconds`), say goodbye, release all resources. Idempotent.

        A `receive` or `send` blocked in another thread ends immediately with `LinkClosed`; frames not yet received are
        dropped.
        """
        ...
