"""Model buffers at a barrier: floating ones become their mean over the virtual workers, integer ones the maximum.

Added in virtual-worker order, then multiplied by 1/V, so that everyone computes the same bits (`wsp.md` §5, Buffers).
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence

import torch

from hetpipe.errors import ClockNotPublished, ResourceExhausted, SliceMismatch
from hetpipe.ps.chunks import ChunkReceiver, RunMap, chunks, slice_bytes
from hetpipe.spec.bounds import MAX_NAME_CHARACTERS
from hetpipe.spec.ids import Clock, VirtualWorkerIndex
from hetpipe.spec.plan import DTYPE_BYTES
from hetpipe.spec.requests import BuffersHeader, SliceHeader
from hetpipe.weights.flat import FlatBuffer, FlatLayout


def buffers_layout(header: BuffersHeader) -> FlatLayout:
    """The layout in which the named buffers travel."""
    return FlatLayout([(b.parameter, (b.stop - b.start,), b.dtype) for b in header.buffers])


def run_map(header: BuffersHeader, layout: FlatLayout) -> RunMap:
    """Where the stream of the named buffers lies in a buffer of `layout`."""
    return RunMap(header.buffers, [layout.slot(b.parameter).offset for b in header.buffers])


class BufferExchange:
    """Collects every member's buffers of one barrier after the other. Thread-safe; holds one barrier's at a time."""

    #: Bytes of buffers that one stage may announce, and that one virtual worker may have here at a time.
    MAX_BYTES = 1 << 30

    #: Buffers that one stage may announce; each costs a view of its own.
    MAX_BUFFERS = 10_000

    def __init__(self, members: Sequence[VirtualWorkerIndex]) -> None:
        self._members = tuple(members)
        self._lock = threading.Lock()
        self._clock = Clock(-1)
        #: buffer name → what each virtual worker sent, at `_clock`.
        self._sent: dict[str, dict[VirtualWorkerIndex, torch.Tensor]] = {}
        #: Bytes of it per virtual worker.
        self._held: Counter[VirtualWorkerIndex] = Counter()

    def receive(self, header: BuffersHeader) -> tuple[ChunkReceiver, FlatBuffer]:
        """Somewhere to write the announced buffers; call `sent` when they are complete.

        Raises:
            SliceMismatch: more bytes than `MAX_BYTES`, a buffer that is not whole, or an unknown dtype.
        """
        self.check(header)
        layout = buffers_layout(header)
        buffer = FlatBuffer(layout, torch.device("cpu"))
        return ChunkReceiver(buffer, run_map(header, layout)), buffer

    def sent(self, header: BuffersHeader, buffer: FlatBuffer) -> None:
        """A stage's buffers are all here. A repetition changes nothing.

        Raises:
            ResourceExhausted: with them its virtual worker would have more than `MAX_BYTES` here.
        """
        vw = header.requester.vw
        with self._lock:
            if header.clock > self._clock:
                self._clock = header.clock
                self._sent = {}
                self._held.clear()
            if header.clock < self._clock:
                return
            new = {name: view for name, view in buffer.views.items() if vw not in self._sent.get(name, {})}
            if new and self._held[vw] + buffer.layout.num_bytes > self.MAX_BYTES:
                raise ResourceExhausted(f"virtual worker {vw} sends over {self.MAX_BYTES} bytes of model buffers")
            self._held[vw] += buffer.layout.num_bytes if new else 0
            for name, view in new.items():
                self._sent.setdefault(name, {})[vw] = view

    def combined(self, header: BuffersHeader) -> FlatBuffer:
        """What the named buffers became.

        Raises:
            ClockNotPublished: a virtual worker's are still missing; the message names it.
            SliceMismatch: as `receive`, or a virtual worker sent a buffer of another size or dtype.
        """
        self.check(header)
        with self._lock:
            parts = {piece.parameter: self._parts(piece, header.clock) for piece in header.buffers}
        result = FlatBuffer(buffers_layout(header), torch.device("cpu"))
        for name, view in result.views.items():
            _combine(view, parts[name])
        return result

    def stream(self, header: BuffersHeader) -> Iterator[bytes]:
        """`combined` as chunks."""
        buffer = self.combined(header)
        return chunks(buffer, run_map(header, buffer.layout))

    def _parts(self, piece: SliceHeader, clock: Clock) -> list[torch.Tensor]:
        """What each virtual worker sent of a buffer."""
        sent = self._sent.get(piece.parameter, {}) if clock == self._clock else {}
        missing = [vw for vw in self._members if vw not in sent]
        if missing:
            raise ClockNotPublished(f"buffer {piece.parameter:.200} of virtual workers {missing} at clock {clock}")
        parts = [sent[vw] for vw in self._members]
        dtype: torch.dtype = getattr(torch, piece.dtype)
        if any(part.numel() != piece.stop or part.dtype != dtype for part in parts):
            raise SliceMismatch(
                f"the virtual workers disagree about the size or dtype of buffer {piece.parameter!r:.200}"
            )
        return parts

    def check(self, header: BuffersHeader) -> None:
        """Judge what is announced or asked for, before anything is allocated.

        Raises:
            SliceMismatch: see `receive`.
        """
        if len({piece.parameter for piece in header.buffers}) < len(header.buffers):
            raise SliceMismatch(f"{header.requester} names a buffer twice")
        if len(header.buffers) > self.MAX_BUFFERS:
            raise SliceMismatch(f"{header.requester} names {len(header.buffers)} buffers; at most {self.MAX_BUFFERS}")
        for piece in header.buffers:
            long = len(piece.parameter) > MAX_NAME_CHARACTERS
            if long or piece.start != 0 or piece.stop < 0 or piece.dtype not in DTYPE_BYTES:
                raise SliceMismatch(
                    f"{header.requester} names buffer {piece.parameter!r:.200} [{piece.start}, {piece.stop}) of dtype "
                    f"{piece.dtype!r:.40}; a buffer travels whole, in a known dtype, under a name of at most "
                    f"{MAX_NAME_CHARACTERS} characters"
                )
        total = sum(slice_bytes(piece) for piece in header.buffers)
        if total > self.MAX_BYTES:
            raise SliceMismatch(f"{header.requester} announces {total} bytes of buffers; the limit is {self.MAX_BYTES}")


def _combine(target: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    target.copy_(parts[0])
    for part in parts[1:]:
        if target.is_floating_point():
            target.add_(part)
        else:
            torch.maximum(target, part, out=target)
    if target.is_floating_point():
        target.mul_(1.0 / len(parts))
