"""Model buffers at a barrier: floating ones become their mean over the virtual workers, integer ones the maximum.

Added in virtual-worker order, then multiplied by 1/V, so that everyone computes the same bits (`wsp.md` §5, Buffers).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from hetpipe.errors import ClockNotPublished, SliceMismatch
from hetpipe.ps.chunks import ChunkReceiver, RunMap, chunks, slice_bytes
from hetpipe.spec.ids import Clock, VirtualWorkerIndex
from hetpipe.spec.plan import DTYPE_BYTES
from hetpipe.spec.requests import BuffersHeader
from hetpipe.weights.flat import FlatBuffer, FlatLayout


def buffers_layout(header: BuffersHeader) -> FlatLayout:
    """The layout in which the named buffers travel."""
    return FlatLayout([(b.parameter, (b.stop - b.start,), b.dtype) for b in header.buffers])


def run_map(header: BuffersHeader, layout: FlatLayout) -> RunMap:
    """Where the stream of the named buffers lies in a buffer of `layout`."""
    return RunMap(header.buffers, [layout.slot(b.parameter).offset for b in header.buffers])


class BufferExchange:
    """Collects every member's buffers of one barrier after the other. Thread-safe; holds one barrier's at a time."""

    #: Bytes of buffers that one stage may announce.
    MAX_BYTES = 1 << 30

    def __init__(self, members: Sequence[VirtualWorkerIndex]) -> None:
        self._members = tuple(members)
        self._lock = threading.Lock()
        self._clock = Clock(-1)
        #: buffer name → what each virtual worker sent, at `_clock`.
        self._sent: dict[str, dict[VirtualWorkerIndex, torch.Tensor]] = {}

    def receive(self, header: BuffersHeader) -> tuple[ChunkReceiver, FlatBuffer]:
        """Somewhere to write the announced buffers; call `sent` when they are complete.

        Raises:
            SliceMismatch: more bytes than `MAX_BYTES`, a buffer that is not whole, or an unknown dtype.
        """
        self._check(header)
        layout = buffers_layout(header)
        buffer = FlatBuffer(layout, torch.device("cpu"))
        return ChunkReceiver(buffer, run_map(header, layout)), buffer

    def sent(self, header: BuffersHeader, buffer: FlatBuffer) -> None:
        """A stage's buffers are all here. A repetition changes nothing."""
        with self._lock:
            if header.clock > self._clock:
                self._clock = header.clock
                self._sent = {}
            if header.clock == self._clock:
                for name, view in buffer.views.items():
                    self._sent.setdefault(name, {}).setdefault(header.requester.vw, view)

    def combined(self, header: BuffersHeader) -> FlatBuffer:
        """What the named buffers became.

        Raises:
            ClockNotPublished: a virtual worker's are still missing; the message names it.
            SliceMismatch: as `receive`, or a virtual worker sent a buffer of another size or dtype.
        """
        self._check(header)
        layout = buffers_layout(header)
        result = FlatBuffer(layout, torch.device("cpu"))
        with self._lock:
            for name, view in result.views.items():
                sent = self._sent.get(name, {}) if header.clock == self._clock else {}
                missing = [vw for vw in self._members if vw not in sent]
                if missing:
                    raise ClockNotPublished(f"buffer {name} of virtual workers {missing} at clock {header.clock}")
                parts = [sent[vw] for vw in self._members]
                if any(part.shape != view.shape or part.dtype != view.dtype for part in parts):
                    raise SliceMismatch(f"the virtual workers disagree about the size or dtype of buffer {name!r:.200}")
                _combine(view, parts)
        return result

    def stream(self, header: BuffersHeader) -> list[bytes]:
        """`combined` as chunks."""
        buffer = self.combined(header)
        return list(chunks(buffer, run_map(header, buffer.layout)))

    def _check(self, header: BuffersHeader) -> None:
        """Before anything is allocated."""
        for piece in header.buffers:
            if piece.start != 0 or piece.stop < 0 or piece.dtype not in DTYPE_BYTES:
                raise SliceMismatch(
                    f"{header.requester} names buffer {piece.parameter!r:.200} [{piece.start}, {piece.stop}) of dtype "
                    f"{piece.dtype!r:.40}; a buffer travels whole, in a known dtype"
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
