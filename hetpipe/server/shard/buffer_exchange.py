"""Model buffers at a barrier: floating-point ones are averaged over the virtual workers, integer ones take the maximum.

Summed in virtual-worker order, then multiplied by 1/V, so that the bits do not depend on timing (`wsp.md` §5, Buffers).

Contributors are the members that passed the barrier, including those that leave there. Workers that join there read the
result. Buffers sent before an eviction count; missing ones of an evicted worker are not waited for. If no member that
passed the barrier sent a buffer, its result is that of the previous barrier; without one, the value of the first worker
that joined.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from hetpipe.decide.sync.records import SegmentRecord
from hetpipe.errors import (
    BuffersMissing,
    ClockNotPublished,
    ProtocolViolation,
    ResourceExhausted,
    SliceMismatch,
    StaleIncarnation,
)
from hetpipe.server.shard.buffer_files import BufferFiles, Sender
from hetpipe.server.shard.chunks import ChunkReceiver, RunMap, chunks, slice_bytes
from hetpipe.values.bounds import MAX_NAME_CHARACTERS
from hetpipe.values.ids import Clock, Incarnation, VirtualWorkerIndex
from hetpipe.values.plan import DTYPE_BYTES
from hetpipe.values.quantities import bytes_text
from hetpipe.values.requests import BuffersHeader, Requester, SliceHeader
from hetpipe.weights.flat import FlatBuffer, FlatLayout
from hetpipe.wire.call import Chunk


@dataclass(frozen=True, slots=True)
class Attendance:
    """Virtual workers at the newest passed barrier."""

    segment: SegmentRecord
    members: Mapping[VirtualWorkerIndex, Incarnation]
    """Its members that are not evicted."""
    leavers: Mapping[VirtualWorkerIndex, Incarnation] = field(default_factory=dict)
    """Workers that left there, or at an earlier barrier, and are not evicted."""

    @property
    def start(self) -> Clock:
        """Clock of the barrier."""
        return self.segment.start

    def check(self, requester: Requester, clock: Clock) -> None:
        """Reject a requester that is not at this barrier.

        Raises:
            ProtocolViolation: it is at another barrier.
            StaleIncarnation: its incarnation is over.
        """
        if clock != self.start:
            raise ProtocolViolation(f"{requester} sends buffers of the barrier at {clock}, not at {self.start}")
        if self.members.get(requester.vw) != requester.incarnation and not self.has_left(requester, clock):
            raise StaleIncarnation(f"{requester} is not a member after the barrier at {clock}")

    def has_left(self, requester: Requester, clock: Clock) -> bool:
        """Whether the requester left at this barrier, or before it if `clock` is that of an earlier one."""
        is_there = clock < self.start or requester.vw in {member.vw for member in self.segment.left}
        return is_there and self.leavers.get(requester.vw) == requester.incarnation

    def among(self, *, joined: bool) -> tuple[VirtualWorkerIndex, ...]:
        """Workers that joined at the barrier, or else those that passed it, in order; including later evicted ones."""
        return tuple(sorted(member.vw for member in self.segment.present if member.joined == joined))

    def is_gone(self, vw: VirtualWorkerIndex) -> bool:
        """Whether a worker at the barrier has since been evicted."""
        return vw not in self.members and vw not in self.leavers


def buffers_layout(header: BuffersHeader) -> FlatLayout:
    """Wire layout of the named buffers."""
    return FlatLayout([(b.parameter, (b.stop - b.start,), b.dtype) for b in header.buffers])


def run_map(header: BuffersHeader, layout: FlatLayout) -> RunMap:
    """Map from the stream of the named buffers to a buffer of `layout`."""
    return RunMap(header.buffers, [layout.slot(b.parameter).offset for b in header.buffers])


class BufferExchange:
    """Collects all members' buffers, barrier by barrier. Thread-safe; holds one barrier's at a time."""

    #: Maximum bytes of buffers in one announcement, and of one virtual worker at a time.
    MAX_BYTES = 1 << 30

    #: Maximum number of buffers in one announcement; each costs a view.
    MAX_BUFFERS = 10_000

    def __init__(self, attendance: Callable[[], Attendance], kept: BufferFiles | None = None) -> None:
        """Start empty, or restore the state of an earlier process.

        Args:
            attendance: called on every request; its results must be monotonic.
            kept: persists received buffers; None: no persistence.
        """
        self._attendance = attendance
        self._lock = threading.Lock()
        self._clock = Clock(-1)
        #: buffer name → the contribution of each virtual worker, at `_clock`.
        self._sent: dict[str, dict[VirtualWorkerIndex, torch.Tensor]] = {}
        #: The contributors that passed the barrier at `_clock`, as its members before it.
        self._stayed: set[VirtualWorkerIndex] = set()
        #: Bytes of these buffers per virtual worker.
        self._held: Counter[VirtualWorkerIndex] = Counter()
        #: buffer name → its average at `_clock`, and at the barriers before.
        self._results: dict[str, torch.Tensor] = {}
        self._earlier: dict[str, torch.Tensor] = {}
        #: The previous barrier.
        self._before = Clock(-1)
        self._kept = kept
        if kept is not None:
            for sender, buffer in kept.read(lambda header: FlatBuffer(buffers_layout(header), torch.device("cpu"))):
                self._begin(sender.header.clock)
                self._add(sender, buffer.views)

    def receive(self, header: BuffersHeader) -> tuple[ChunkReceiver, FlatBuffer]:
        """Allocate a target for the announced buffers; call `sent` when they are complete.

        Raises:
            SliceMismatch: more bytes than `MAX_BYTES`, a partial buffer, or an unknown dtype.
            ProtocolViolation, StaleIncarnation: the sender is not at this barrier.
        """
        self.check(header)
        self._attendance().check(header.requester, header.clock)
        layout = buffers_layout(header)
        buffer = FlatBuffer(layout, torch.device("cpu"))
        return ChunkReceiver(buffer, run_map(header, layout)), buffer

    def sent(self, header: BuffersHeader, buffer: FlatBuffer) -> None:
        """Register a stage's complete buffers. Idempotent.

        Raises:
            ProtocolViolation, StaleIncarnation: the sender is not at this barrier.
            SliceMismatch: another virtual worker sent one of them with another size or dtype.
            ResourceExhausted: its virtual worker would exceed `MAX_BYTES` here.
        """
        vw = header.requester.vw
        with self._lock:
            attendance = self._attend(header)
            new = {name: view for name, view in buffer.views.items() if vw not in self._sent.get(name, {})}
            if new and self._held[vw] + buffer.layout.num_bytes > self.MAX_BYTES:
                raise ResourceExhausted(f"virtual worker {vw} sends over {bytes_text(self.MAX_BYTES)} of model buffers")
            for name, view in new.items():
                if any(not _alike(view, other) for other in self._sent.get(name, {}).values()):
                    raise _disagreement(name)
            self._held[vw] += buffer.layout.num_bytes if new else 0
            sender = Sender(header, joined=vw in attendance.among(joined=True))
            if new and self._kept is not None:
                self._kept.write(sender, buffer)
            self._add(sender, new)

    def combined(self, header: BuffersHeader) -> FlatBuffer:
        """Averages of the named buffers.

        Raises:
            ClockNotPublished: buffers of a virtual worker are still missing; the message names it. BuffersMissing: the
            reader's own are missing: an earlier process received but did not persist them. SliceMismatch: as `receive`,
            or a buffer has another size or dtype. ProtocolViolation, StaleIncarnation: the reader is not at this
            barrier and did not leave at the previous one.
        """
        self.check(header)
        with self._lock:
            if (late := self._read_late(header)) is not None:
                found = late
            else:
                attendance = self._attend(header)
                self._check_own(header)
                found = {piece.parameter: self._result(piece, attendance) for piece in header.buffers}
        result = FlatBuffer(buffers_layout(header), torch.device("cpu"))
        for name, view in result.views.items():
            view.copy_(found[name])
        return result

    def stream(self, header: BuffersHeader) -> Iterator[Chunk]:
        """`combined` as chunks."""
        buffer = self.combined(header)
        return chunks(buffer, run_map(header, buffer.layout))

    def _read_late(self, header: BuffersHeader) -> dict[str, torch.Tensor] | None:
        """Averages for a virtual worker that left and was not waited for; None for any other."""
        attendance, clock = self._attendance(), header.clock
        if not clock < attendance.start or not attendance.has_left(header.requester, clock):
            return None
        known = self._known() if clock == self._clock else self._earlier if clock == self._before else {}
        for piece in header.buffers:
            if piece.parameter not in known or not _fits(piece, known[piece.parameter]):
                raise ProtocolViolation(f"{header.requester} requests buffers of the barrier at {clock} too late")
        return {piece.parameter: known[piece.parameter] for piece in header.buffers}

    def _attend(self, header: BuffersHeader) -> Attendance:
        """Switch to the barrier of the header, if it is new."""
        attendance = self._attendance()
        attendance.check(header.requester, header.clock)
        if attendance.start > self._clock:
            if self._kept is not None:
                self._kept.forget(before=self._clock)
            self._begin(attendance.start)
        return attendance

    def _begin(self, clock: Clock) -> None:
        if clock > self._clock:
            self._earlier, self._before = self._known(), self._clock
            self._clock = clock
            self._sent, self._stayed, self._results = {}, set(), {}
            self._held.clear()

    def _add(self, sender: Sender, views: Mapping[str, torch.Tensor]) -> None:
        vw = sender.header.requester.vw
        for name, view in views.items():
            self._sent.setdefault(name, {}).setdefault(vw, view)
        if not sender.joined:
            self._stayed.add(vw)

    def _known(self) -> dict[str, torch.Tensor]:
        """Averages of all buffers so far, including unrequested ones."""
        counted = {name: self._counted(name, sorted(self._stayed)) for name in self._sent}
        newest = {name: _combined(parts) for name, parts in counted.items() if parts} | self._results
        found = self._earlier | newest
        return found if sum(value.nbytes for value in found.values()) <= self.MAX_BYTES else newest

    def _counted(self, name: str, of: Sequence[VirtualWorkerIndex]) -> list[torch.Tensor]:
        sent = self._sent.get(name, {})
        return [sent[vw] for vw in of if vw in sent]

    def _result(self, piece: SliceHeader, attendance: Attendance) -> torch.Tensor:
        """Average of a buffer, computed once, so that all readers get the same."""
        name = piece.parameter
        result = self._results.get(name)
        if result is None:
            result = self._results[name] = self._decide(name, attendance)
        if not _fits(piece, result):
            raise _disagreement(name)
        return result

    def _decide(self, name: str, attendance: Attendance) -> torch.Tensor:
        stayed, joined = (attendance.among(joined=new) for new in (False, True))
        self._await(name, stayed, attendance)
        parts = self._counted(name, stayed)
        if parts:
            return _combined(parts)
        if name in self._earlier:
            return self._earlier[name]
        self._await(name, joined, attendance)
        return self._counted(name, joined)[0]

    def _check_own(self, header: BuffersHeader) -> None:
        vw, clock = header.requester.vw, header.clock
        for name in (piece.parameter for piece in header.buffers):
            if name not in self._results and vw not in self._sent.get(name, {}):
                raise BuffersMissing(f"buffer {name:.200} of virtual worker {vw} is missing here at clock {clock}")

    def _await(self, name: str, senders: Sequence[VirtualWorkerIndex], attendance: Attendance) -> None:
        sent = self._sent.get(name, {})
        missing = [vw for vw in senders if vw not in sent and not attendance.is_gone(vw)]
        if missing:
            raise ClockNotPublished(f"buffer {name:.200} of virtual workers {missing} at clock {attendance.start}")

    def check(self, header: BuffersHeader) -> None:
        """Validate an announcement or a request, before anything is allocated.

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
                    f"{piece.dtype!r:.40}; a buffer is sent whole, in a known dtype, under a name of at most "
                    f"{MAX_NAME_CHARACTERS} characters"
                )
        total = sum(slice_bytes(piece) for piece in header.buffers)
        if total > self.MAX_BYTES:
            raise SliceMismatch(
                f"{header.requester} announces {bytes_text(total, round_up=True)} of buffers; "
                f"the limit is {bytes_text(self.MAX_BYTES)}"
            )


def _fits(piece: SliceHeader, buffer: torch.Tensor) -> bool:
    return buffer.numel() == piece.stop and buffer.dtype is getattr(torch, piece.dtype)


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.numel() == other.numel() and one.dtype is other.dtype


def _combined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    total = parts[0].clone()
    if all(torch.equal(part, total) for part in parts[1:]):  # a constant: of three of them, the average is another
        return total
    for part in parts[1:]:
        if total.is_floating_point():
            total.add_(part)
        else:
            torch.maximum(total, part, out=total)
    return total.mul_(1.0 / len(parts)) if total.is_floating_point() else total


def _disagreement(name: str) -> SliceMismatch:
    return SliceMismatch(f"the virtual workers disagree about the size or dtype of buffer {name!r:.200}")
