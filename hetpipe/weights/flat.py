"""Tensors stored in one flat buffer, so that versions are copied and added in one pass.

Every tensor starts at a multiple of 64 bytes, on a GPU of 256, as tensors do that torch allocates one by one: some
kernels of matrix products are chosen by the alignment of their arguments, and round differently. The gaps are zero and
stay zero: the operations here are additions of equally laid out buffers, and everything else writes through the
tensors' own views.
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hetpipe.values.alignment import ALIGNMENT_BYTES
from hetpipe.values.plan import DTYPE_BYTES

#: Elements that torch processes on one thread, regardless of the number of threads (its grain size).
_SERIAL_ELEMENTS = 32_768

#: What NumPy passes over fast, and elements of which the second pass still finds in the cache.
_OF_NUMPY = (torch.float32, torch.float64)
_BLOCK_ELEMENTS = 1 << 18


@dataclass(frozen=True, slots=True)
class Slot:
    """One tensor of a layout."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    """Bytes from the start of the buffer."""
    num_bytes: int
    end: int
    """Offset of the next slot: the end of this one, rounded up to the alignment."""


def aligned(num_bytes: int, alignment: int = ALIGNMENT_BYTES) -> int:
    """`num_bytes` rounded up to a multiple of `alignment`."""
    return -(-num_bytes // alignment) * alignment


class FlatLayout:
    """Positions of tensors in a buffer. Immutable."""

    def __init__(
        self, tensors: Sequence[tuple[str, tuple[int, ...], str]], *, alignment: int = ALIGNMENT_BYTES
    ) -> None:
        """Lay out `tensors`, given as (name, shape, dtype), in order, each at a multiple of `alignment` bytes."""
        slots: list[Slot] = []
        regions: list[tuple[str, int, int]] = []
        offset = 0
        for name, shape, dtype in tensors:
            num_bytes = DTYPE_BYTES[dtype]
            for size in shape:
                num_bytes *= size
            slot = Slot(name, shape, dtype, offset, num_bytes, aligned(offset + num_bytes, alignment))
            slots.append(slot)
            if regions and regions[-1][0] == dtype:
                regions[-1] = (dtype, regions[-1][1], slot.end)
            else:
                regions.append((dtype, offset, slot.end))
            offset = slot.end
        self.slots: tuple[Slot, ...] = tuple(slots)
        #: (dtype, first byte, end byte): the runs of equal dtype, gaps included.
        self.regions: tuple[tuple[str, int, int], ...] = tuple(regions)
        self.num_bytes = offset

    def slot(self, name: str) -> Slot:
        """The slot of `name`."""
        return next(slot for slot in self.slots if slot.name == name)


class FlatBuffer:
    """One buffer of a layout: views by name, arithmetic over all of it.

    `references` counts its holders; `BufferPool` recycles it when the last one releases it.
    """

    def __init__(self, layout: FlatLayout, device: torch.device, *, page_locked: bool = False) -> None:
        """Fill with zeros. `page_locked`: host memory that a GPU copies from and to at full speed."""
        self.layout = layout
        self.data = torch.zeros(layout.num_bytes, dtype=torch.uint8, device=device, pin_memory=page_locked)
        self.regions: tuple[Tensor, ...] = tuple(
            self.data[start:end].view(getattr(torch, dtype)) for dtype, start, end in layout.regions
        )
        self.views: dict[str, Tensor] = {
            slot.name: self.data[slot.offset : slot.offset + slot.num_bytes]
            .view(getattr(torch, slot.dtype))
            .view(slot.shape)
            for slot in layout.slots
        }
        self.references = 1
        #: Whether a pool accounts it as host memory.
        self.on_host = False

    def zero_(self) -> FlatBuffer:
        """Fill with zeros."""
        self.data.zero_()
        return self

    def copy_(self, other: FlatBuffer) -> FlatBuffer:
        """Copy the contents of `other`."""
        self.data.copy_(other.data)
        return self

    def fill_(self, tensors: Mapping[str, Tensor]) -> FlatBuffer:
        """Copy the tensors of these names into its views; others are ignored."""
        for name, view in self.views.items():
            view.copy_(tensors[name])
        return self

    def carry_over_(self, other: FlatBuffer, slots: Iterable[Slot]) -> FlatBuffer:
        """Copy the contents of `other` in some slots of the layout."""
        for slot in slots:
            self.data[slot.offset : slot.end].copy_(other.data[slot.offset : slot.end])
        return self

    def add_(self, other: FlatBuffer) -> FlatBuffer:
        """Add `other`, possibly from another device, element by element."""
        for mine, theirs in zip(self.regions, other.regions, strict=True):
            mine.add_(theirs.to(mine.device))
        return self

    def set_sum_(self, left: FlatBuffer, right: FlatBuffer) -> FlatBuffer:
        """Set to left + right."""
        for mine, a, b in zip(self.regions, left.regions, right.regions, strict=True):
            torch.add(a, b, out=mine)
        return self

    def set_rounded_(self, other: FlatBuffer) -> FlatBuffer:
        """Set to `other`, each `float32` element rounded to the nearest number of `bfloat16`, ties to even."""
        for mine, theirs in zip(self.regions, other.regions, strict=True):
            mine.copy_(theirs.bfloat16() if theirs.dtype == torch.float32 else theirs)
        return self

    def mul_(self, factor: float) -> FlatBuffer:
        """Multiply every floating-point element by `factor`."""
        for mine in self.regions:
            if mine.is_floating_point():
                mine.mul_(factor)
        return self

    def is_finite(self) -> bool:
        """Whether no element is NaN or infinite. One pass."""
        return all(finite(region) for region in self.regions)

    def first_non_finite(self) -> str | None:
        """The name of the first tensor with a NaN or an infinity."""
        return next((name for name, view in self.views.items() if not finite(view)), None)

    def memory(self) -> memoryview:
        """The bytes of a CPU buffer; valid as long as the buffer lives."""
        if self.layout.num_bytes == 0:
            return memoryview(b"")
        kind = ctypes.c_char * self.layout.num_bytes
        return memoryview(kind.from_address(self.data.data_ptr())).cast("B")


def finite(tensor: Tensor) -> bool:
    """Whether no element of `tensor` is NaN or infinite.

    Minimum and maximum say so: a NaN makes both one. In host memory this uses only the calling thread: torch would
    distribute the pass over its threads, and if the cores are busy, synchronizing these takes far longer than the pass
    itself (measured on 1 MiB with 2 threads on 2 busy cores: 3 to 7 ms of processor time). NumPy takes 30 µs
    on the calling thread, torch 130 in portions of its grain size, each of which acquires the GIL again.
    """
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return True
    if tensor.device.type != "cpu":
        if bool(torch.isfinite(tensor.sum())):
            return True
        low, high = torch.aminmax(tensor)
        return bool(torch.isfinite(low) & torch.isfinite(high))
    flat = tensor.detach().flatten()
    if tensor.dtype in _OF_NUMPY:
        array = flat.numpy()
        blocks = (array[first : first + _BLOCK_ELEMENTS] for first in range(0, array.size, _BLOCK_ELEMENTS))
        return all(math.isfinite(block.min()) and math.isfinite(block.max()) for block in blocks)
    parts = (flat[first : first + _SERIAL_ELEMENTS] for first in range(0, flat.numel(), _SERIAL_ELEMENTS))
    ends = [end for part in parts for end in torch.aminmax(part)]
    return bool(torch.isfinite(torch.stack(ends)).all())


class BufferPool:
    """Recycles the buffers of one layout, to avoid allocations and page faults in the training loop.

    A buffer is on the device, or in host memory while it is transferred to or from the shards (page-locked where the
    device is a GPU). Where the device is the CPU both are the same memory: buffers then move without a copy, and only
    the accounting differs.

    Thread-safe. It never keeps more free buffers than were in use at once.
    """

    def __init__(self, layout: FlatLayout, device: torch.device) -> None:
        self.layout = layout
        self.device = device
        self._free: list[FlatBuffer] = []
        self._shares_memory = device.type == "cpu"
        self._free_on_host: list[FlatBuffer] = self._free if self._shares_memory else []
        self._lock = threading.Lock()
        #: Buffers on the device with at least one holder, now and at peak.
        self.alive = 0
        self.peak = 0
        #: Likewise in host memory.
        self.host_alive = 0
        self.host_peak = 0

    def take(self) -> FlatBuffer:
        """Take a buffer on the device, with unspecified contents (gaps are zero) and the caller as its only holder."""
        return self._take(on_host=False)

    def take_on_host(self) -> FlatBuffer:
        """Take a buffer in host memory, likewise."""
        return self._take(on_host=True)

    def to_host(self, buffer: FlatBuffer) -> FlatBuffer:
        """Move `buffer` to host memory; its only holder becomes that of the result."""
        return self._move(buffer, on_host=True)

    def to_device(self, buffer: FlatBuffer) -> FlatBuffer:
        """Move `buffer` to the device; its only holder becomes that of the result."""
        return self._move(buffer, on_host=False)

    def hold(self, buffer: FlatBuffer) -> FlatBuffer:
        """Add a holder."""
        with self._lock:
            assert buffer.references > 0, "a buffer without a holder cannot be held again"
            buffer.references += 1
        return buffer

    def release(self, buffer: FlatBuffer) -> None:
        """Remove a holder; the last one returns the buffer to the pool."""
        with self._lock:
            buffer.references -= 1
            assert buffer.references >= 0, "a buffer was released more often than held"
            if buffer.references == 0:
                self._count(-1, on_host=buffer.on_host)
                (self._free_on_host if buffer.on_host else self._free).append(buffer)

    # -- internals ----------------------------------------------------------------------------------------------------

    def _take(self, *, on_host: bool) -> FlatBuffer:
        free = self._free_on_host if on_host else self._free
        with self._lock:
            self._count(1, on_host=on_host)
            buffer = free.pop() if free else None
        if buffer is None:
            where = torch.device("cpu") if on_host else self.device
            buffer = FlatBuffer(self.layout, where, page_locked=on_host and self.device.type == "cuda")
        buffer.references = 1
        buffer.on_host = on_host
        return buffer

    def _move(self, buffer: FlatBuffer, *, on_host: bool) -> FlatBuffer:
        if buffer.on_host == on_host:
            return buffer
        assert buffer.references == 1, "only the sole holder may move a buffer"
        if not self._shares_memory:
            moved = self._take(on_host=on_host).copy_(buffer)
            self.release(buffer)
            return moved
        with self._lock:
            self._count(-1, on_host=buffer.on_host)
            self._count(1, on_host=on_host)
            buffer.on_host = on_host
        return buffer

    def _count(self, change: int, *, on_host: bool) -> None:
        if on_host:
            self.host_alive += change
            self.host_peak = max(self.host_peak, self.host_alive)
        else:
            self.alive += change
            self.peak = max(self.peak, self.alive)
