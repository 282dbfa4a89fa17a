"""Everything around one stage, made up, so that the stage's own loop runs alone in one thread and never waits.

What the stage sends is gone at once. A frame is ready as soon as the one before it was taken; until the stage takes
it, its tensors are the link's, in host memory, so they are made `unseen` by whoever counts the stage's bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch import Tensor

from hetpipe.decide.sync.gate import Gate
from hetpipe.decide.sync.records import PublishRecord
from hetpipe.link.policy import Frame, FrameKind
from hetpipe.pipeline.chain import Values
from hetpipe.pipeline.inbox import Inbox
from hetpipe.values.ids import Clock, Wave
from hetpipe.values.plan import SlicePlan
from hetpipe.values.requests import Blocks
from hetpipe.values.sync import Progress, SyncSpec
from hetpipe.weights.flat import BufferPool, FlatBuffer

Unseen = Callable[[], AbstractContextManager[None]]


class _Neighbour:
    """What both neighbours have in common: a `Link` that loses whatever is sent."""

    own = "the stage"
    peer = "its neighbour"

    def __init__(self, unseen: Unseen) -> None:
        self._unseen = unseen
        #: The stage's own; set before the stage runs.
        self.inbox: Inbox | None = None

    def send(self, frame: Frame, *, deadline_seconds: float) -> None:
        """Take the frame and let go of it."""

    def receive(self, *, timeout_seconds: float, awaiting: str = "a frame") -> Frame:
        """Never called: a stage's loop only looks whether something is there."""
        raise AssertionError(awaiting)

    def watch(self, callback: Callable[[], None]) -> None:
        """Call nothing: frames are there before anybody looks for them."""

    def close(self) -> None:
        """Nothing is open."""


class PreviousStage(_Neighbour):
    """Has the next forward frame ready as soon as the last one was taken; then the barrier's."""

    def __init__(self, values: Values, sync: SyncSpec, num_minibatches: int, unseen: Unseen) -> None:
        """Send copies of `values` under the oldest clocks that `sync` allows."""
        super().__init__(unseen)
        self._values = values
        self._sync = sync
        self._num_minibatches = num_minibatches
        self._sent = 0

    def try_receive(self) -> Frame | None:
        """See `Link.try_receive`."""
        assert self.inbox is not None, "the stage is assembled"
        if self.inbox.from_upstream or self._sent > self._num_minibatches:
            return None
        self._sent += 1
        if self._sent > self._num_minibatches:
            return Frame(FrameKind.BARRIER, self._num_minibatches, 0, self._num_minibatches)
        gate = Gate(self._sync)
        clock = gate.required(gate.switch_minibatch(gate.switch_number(self._sent)))
        with self._unseen():
            copies = tuple(value.clone() for value in self._values)
        return Frame(FrameKind.FORWARD, self._sent, clock, 0, copies)


class NextStage(_Neighbour):
    """Answers every forward frame with gradients, one frame at a time."""

    def __init__(self, unseen: Unseen) -> None:
        super().__init__(unseen)
        #: Forward frames not yet answered, with tensors that have shapes and no bytes.
        self._owed: list[Frame] = []

    def send(self, frame: Frame, *, deadline_seconds: float) -> None:
        """Note what to answer."""
        if frame.kind is FrameKind.FORWARD:
            shapes = tuple(None if tensor is None else _shape_of(tensor) for tensor in frame.tensors)
            self._owed.append(Frame(FrameKind.BACKWARD, frame.minibatch, frame.clock, frame.local_through, shapes))

    def try_receive(self) -> Frame | None:
        """See `Link.try_receive`."""
        assert self.inbox is not None, "the stage is assembled"
        if self.inbox.from_downstream or not self._owed:
            return None
        owed = self._owed.pop(0)
        with self._unseen():
            gradients = tuple(None if like is None else torch.zeros_like(like, device="cpu") for like in owed.tensors)
        return Frame(FrameKind.BACKWARD, owed.minibatch, owed.clock, owed.local_through, gradients, weight=1)


def _shape_of(tensor: Tensor) -> Tensor | None:
    return torch.empty_like(tensor, device="meta") if tensor.is_floating_point() else None


class Shards:
    """A `Synchroniser` that applies a wave as soon as it is pushed, for a run of one virtual worker."""

    pushed_bytes = 0
    pulled_bytes = 0

    def __init__(self, pool: BufferPool, weights: FlatBuffer, inbox: Inbox) -> None:
        """Serve `weights`, which are not the stage's memory."""
        self._pool = pool
        self._weights = weights
        self._inbox = inbox

    def join(self) -> bool:
        """Never called within a segment."""
        raise AssertionError

    def push_initial_weights(self, weights: FlatBuffer) -> None:
        """Never called within a segment."""
        raise AssertionError(weights)

    def push_wave(
        self,
        wave: Wave,
        update: FlatBuffer | None,
        blocks: Blocks | None,
        *,
        segment: Clock,
        squares: dict[int, float] | None = None,
    ) -> None:
        """See `Synchroniser.push_wave`."""
        assert update is not None, "no wave is empty"
        self._weights.add_(update)
        self._pool.release(update)
        self._inbox.on_records([PublishRecord(wave, Clock(wave + 1), ())])

    def push_fresh(self, wave: Wave, weights: FlatBuffer, layers: Collection[int]) -> None:
        """See `Synchroniser.push_fresh`."""
        raise AssertionError(layers)

    def fetch(self, clock: Clock, *, ahead: bool) -> None:
        """See `Synchroniser.fetch`. The weights are always the newest ones: only their memory counts here."""
        self._inbox.on_fetched(clock, self._pool.take_on_host().copy_(self._weights))

    def prepared(self, index: int, *, can: bool) -> None:
        """Never called: no layers move."""
        raise AssertionError((index, can))

    def hold(self, switch: int) -> tuple[Clock, Clock, int]:
        """Never called: the clocks are the required ones."""
        raise AssertionError(switch)

    def progress(self) -> Progress:
        """Never called within a segment."""
        raise AssertionError

    def exchange_buffers(self, clock: Clock, mine: FlatBuffer, *, deadline_seconds: float) -> FlatBuffer:
        """Never called within a segment."""
        raise AssertionError(clock)

    def report_checkpoint(self, clock: Clock, path: Path | None, *, failure: str = "") -> bool:
        """Never called within a segment."""
        raise AssertionError(path)

    def is_complete(self, checkpoint: Path) -> bool:
        """Never called within a segment."""
        raise AssertionError(checkpoint)

    def change_layers(self, slices: Sequence[SlicePlan], pool: BufferPool, *, deadline_seconds: float) -> None:
        """See `Synchroniser.change_layers`; nothing moves."""
        raise AssertionError((slices, pool, deadline_seconds))

    def leave_out(self, inactive: Collection[int]) -> None:
        raise NotImplementedError

    def drain(self, *, deadline_seconds: float) -> None:
        """Everything is applied at once."""
