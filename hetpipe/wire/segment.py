"""A segment: memory that two processes of one host share, and messages beside it (docs/semantics/shared-memory.md).

A segment is a sealed memfd of `NUM_SLOTS` slots. One process, the sender of a call, copies chunks into slots in turn
and announces them over a Unix socket; the receiver takes a private copy of each and releases the slot. No byte of a
segment is read twice, so later writes of the other process cannot change data that was validated.

A link between stages is one call in this sense, as long as the link itself, in one segment per direction.
"""

from __future__ import annotations

import ctypes
import fcntl
import math
import mmap
import os
import socket
import struct
import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from enum import IntEnum
from typing import TypeVar

from hetpipe.clock import SYSTEM_CLOCK, Clock
from hetpipe.errors import DeadlineExceeded, PeerUnreachable, ProtocolViolation

T = TypeVar("T")

#: A chunk in consecutive pieces.
Parts = Sequence[bytes | memoryview]

#: Room for one chunk: 1 MiB of payload and its head (`server/shard/chunks.py`), up to a whole page.
SLOT_BYTES = (1 << 20) + mmap.PAGESIZE
#: Few enough for a segment to stay in the processor's caches, and enough to overlap both sides.
NUM_SLOTS = 4
SEGMENT_BYTES = NUM_SLOTS * SLOT_BYTES

#: Without these a process could shrink the file under the other one's mapping, which would then die of SIGBUS.
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

#: Metadata key of a call whose chunks go through a segment: `NAME:NUMBER`.
SEGMENT_KEY = "hetpipe-segment"

#: Timeout without progress of the other process during a call.
IDLE_SECONDS = 30.0
#: Poll interval for a call that ended otherwise, such as by cancellation.
_POLL_MICROSECONDS = 50_000
#: Bytes that are copied while holding the GIL, which costs less than to release and acquire it.
_FEW_BYTES = 8 * 1024

#: Kind, slot, number of the call, bytes of the chunk.
_MESSAGE = struct.Struct("<BxHIQ")
_CREDENTIALS = struct.Struct("3i")
#: Seconds and microseconds, as of `SO_RCVTIMEO`; zeros: no timeout.
_TIMEVAL = struct.Struct("ll")


class _Kind(IntEnum):
    FILLED = 1
    """A slot is filled."""
    TAKEN = 2
    """Its content was copied: the slot is free."""
    END = 3
    """The sender has no more chunks, or the receiver accepts no more."""


_KINDS: Mapping[int, _Kind] = {kind.value: kind for kind in _Kind}


class SegmentRefused(PeerUnreachable):
    """A descriptor that was passed is not a segment; nothing was mapped."""


class SegmentBroken(PeerUnreachable):
    """The other process of a segment ended, or broke the protocol; the segment is unusable."""


def make_segment(num_bytes: int = SEGMENT_BYTES, *, seals: int = SEALS) -> int:
    """The descriptor of a new segment, zeros, closed when a program is executed."""
    descriptor = os.memfd_create("hetpipe-segment", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, num_bytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def map_segment(descriptor: int) -> mmap.mmap:
    """Map a segment; the descriptor may then be closed.

    Raises:
        SegmentRefused: its size or its seals are not those of a segment.
    """
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError:
        raise SegmentRefused("a descriptor without seals was passed, which is no segment") from None
    if seals & SEALS != SEALS:
        raise SegmentRefused(
            f"a segment must be sealed against shrinking, growing and further seals; it has {seals:#x}"
        )
    num_bytes = os.fstat(descriptor).st_size  # after the seals: it cannot change any more
    if num_bytes != SEGMENT_BYTES:
        raise SegmentRefused(f"a segment has {SEGMENT_BYTES} bytes; {num_bytes} were passed")
    memory = mmap.mmap(descriptor, SEGMENT_BYTES)
    memory.madvise(mmap.MADV_DONTFORK)  # children of a stage do not use it, and would keep it allocated
    return memory


def peer_user(connection: socket.socket) -> int:
    """The user id of the process at the other end of a Unix socket, from the kernel."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    user: int = _CREDENTIALS.unpack(raw)[1]
    return user


def is_same_user(connection: socket.socket) -> bool:
    """Whether the process at the other end belongs to the user of this one."""
    return peer_user(connection) == os.geteuid()


def address_of(data: bytes | memoryview) -> int:
    """The address of the bytes, for `ctypes.memmove`, which releases the GIL; valid as long as `data`.

    Args:
        data: not empty; a view must be writable.
    """
    if isinstance(data, bytes):
        return ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value or 0
    return ctypes.addressof(ctypes.c_char.from_buffer(data))


class Lane:
    """One end of a segment, for one call at a time; the holder of `turn` may use it."""

    def __init__(self, name: str, connection: socket.socket, memory: mmap.mmap, *, clock: Clock = SYSTEM_CLOCK) -> None:
        """Take ownership of socket and memory.

        Args:
            name: of the segment.
            connection: the socket to the other end, of type SOCK_SEQPACKET.
            memory: the mapped segment.
            clock: measures waits.
        """
        self.connection = connection
        self._memory = memory
        self._view = memoryview(memory)
        self._address = address_of(self._view)
        self._clock = clock
        self._closing = threading.Lock()
        #: Held during a call.
        self.turn = threading.Lock()
        #: Number of the last call.
        self.number = 0
        #: Name of the segment, by which the server finds its end.
        self.name = name
        self.is_closed = False
        #: Of the sender of the call: filled slots, and the next one.
        self._in_use = 0
        self._slot = 0
        #: A message that `send_now` has found, for `send`.
        self._unread: bytes | None = None

    def close(self) -> None:
        """Free this end; the memory is freed when both ends are. A call in progress raises `SegmentBroken`."""
        with self._closing:
            if self.is_closed:
                return
            self.is_closed = True
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
        if self.turn.acquire(blocking=False):  # otherwise its holder frees it
            self._free()
            self.turn.release()

    def take_turn(self) -> bool:
        """Begin a call; False during another one, and after `close`."""
        if not self.turn.acquire(blocking=False):
            return False
        if self.is_closed:
            self.turn.release()
        return not self.is_closed

    def end_turn(self) -> None:
        """End the call that `take_turn` began."""
        self.turn.release()
        if self.is_closed and self.turn.acquire(blocking=False):
            self._free()
            self.turn.release()

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The gRPC metadata that announces the chunks of call `number` in this segment."""
        return ((SEGMENT_KEY, f"{self.name}:{self.number}"),)

    def end_reading(self) -> None:
        """Make `receive` raise `SegmentBroken` after the chunks that have arrived."""
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RD)

    def send(self, chunks: Iterable[bytes | memoryview | Parts], *, is_over: Callable[[], bool] | None) -> bool:
        """Send the chunks of call `number`.

        Args:
            chunks: each of at most `SLOT_BYTES`; each is copied before the next one is requested.
            is_over: whether the call has ended otherwise, so that no answer will arrive here. None: it lasts until
                an end is closed, without a timeout.

        Returns:
            Whether the receiver accepted all; if not, the reply of the call has the reason.

        Raises:
            SegmentBroken: the other end is closed, or the call is over.
            DeadlineExceeded: no progress of the other end for `IDLE_SECONDS`.
        """
        self._in_use, self._slot, self._unread = 0, 0, None
        self._set_timeout(is_over)
        try:
            for chunk in chunks:
                if self._in_use == NUM_SLOTS and not self._is_taken(is_over):
                    return False
                self._put((chunk,) if isinstance(chunk, bytes | memoryview) else chunk)
            while self._in_use:  # leave no message of this call for the next one
                if not self._is_taken(is_over):
                    return False
            return True
        finally:
            # Also if `chunks` failed: the receiver gets the reason from the end of the call.
            with suppress(SegmentBroken):
                self._notify(_Kind.END)

    def send_now(self, make: Callable[[], Parts]) -> bool:
        """Send a chunk of the call, while `send` waits for its next one; False if no slot is free.

        Args:
            make: makes the chunk, if it is sent.

        Raises:
            SegmentBroken: the other end is closed.
        """
        if self._in_use == NUM_SLOTS and not self._is_one_free():
            return False
        self._put(make())
        return True

    def receive(self, *, is_over: Callable[[], bool] | None) -> Generator[memoryview, None, None]:
        """Yield each chunk of call `number`, in its slot; the slot is free when the next one is requested.

        The other process may still write to it: copy it, reading each byte once, and validate the copy.

        Args:
            is_over: as of `send`.

        Raises:
            SegmentBroken, DeadlineExceeded: as `send`.
        """
        with closing(self._filled(is_over)) as filled:
            for slot, length in filled:
                with self._chunk(slot, length) as chunk:
                    yield chunk
                self._release(slot)

    def receive_copies(self, copy: Callable[[memoryview], T]) -> Generator[T, None, None]:
        """Yield what `copy` makes of each chunk of a call that lasts until an end is closed.

        A slot is free before its copy is yielded, so that whoever gets it is not disturbed by that.

        Raises:
            SegmentBroken: as `send`.
        """
        with closing(self._filled(None)) as filled:
            for slot, length in filled:
                with self._chunk(slot, length) as chunk:
                    copied = copy(chunk)
                self._release(slot)
                yield copied

    def refuse(self) -> None:
        """Reject the rest of call `number`, and drop its pending chunks."""
        with suppress(SegmentBroken):
            self._notify(_Kind.END)
        with suppress(OSError):
            while self.connection.recv(_MESSAGE.size, socket.MSG_DONTWAIT):
                pass

    # -- internals ----------------------------------------------------------------------------------------------------

    def _filled(self, is_over: Callable[[], bool] | None) -> Generator[tuple[int, int], None, None]:
        """Slot and bytes of each chunk of call `number`; rejects the rest if it is closed before the end."""
        slot, is_complete = 0, False
        self._set_timeout(is_over)
        try:
            while True:
                kind, found, length = self._next(is_over)
                if kind is _Kind.END:
                    is_complete = True
                    return
                if kind is not _Kind.FILLED or found != slot or not 0 < length <= SLOT_BYTES:
                    raise self._broken("it broke the protocol of slots")
                yield slot, length
                slot = (slot + 1) % NUM_SLOTS
        finally:
            if not is_complete:
                self.refuse()

    def _chunk(self, slot: int, length: int) -> memoryview:
        start = slot * SLOT_BYTES
        return self._view[start : start + length]

    def _release(self, slot: int) -> None:
        with suppress(OSError):  # a sender that has ended sent everything before
            self._send_notice(_Kind.TAKEN, slot)

    def _put(self, parts: Parts) -> None:
        """Fill the next slot, which is free, and announce it."""
        length = sum(map(len, parts))
        if length > SLOT_BYTES:
            raise ProtocolViolation(f"a chunk of {length} bytes does not fit into a slot of {SLOT_BYTES}")
        self._fill(self._slot, parts)
        self._notify(_Kind.FILLED, self._slot, length)
        self._in_use, self._slot = self._in_use + 1, (self._slot + 1) % NUM_SLOTS

    def _is_taken(self, is_over: Callable[[], bool] | None) -> bool:
        """Wait for the receiver; whether it has taken a chunk instead of rejecting the rest."""
        if self._next(is_over)[0] is not _Kind.TAKEN:
            return False
        self._in_use -= 1
        return True

    def _is_one_free(self) -> bool:
        """Whether the receiver has taken a chunk, without waiting for it."""
        try:
            data = self.connection.recv(_MESSAGE.size, socket.MSG_DONTWAIT)
        except OSError:
            return False
        if len(data) == _MESSAGE.size and _MESSAGE.unpack(data)[::2] == (_Kind.TAKEN, self.number):
            self._in_use -= 1
            return True
        self._unread = data
        return False

    def _set_timeout(self, is_over: Callable[[], bool] | None) -> None:
        """Set the kernel's timeout of a message: Python's own takes another system call for each."""
        timeout = _TIMEVAL.pack(0, 0 if is_over is None else _POLL_MICROSECONDS)
        with suppress(OSError):  # closed: the next message reports it
            self.connection.settimeout(None)
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                self.connection.setsockopt(socket.SOL_SOCKET, option, timeout)

    def _fill(self, slot: int, parts: Parts) -> None:
        position = slot * SLOT_BYTES
        for part in parts:
            end = position + len(part)
            if len(part) <= _FEW_BYTES:
                self._view[position:end] = part
            else:
                ctypes.memmove(self._address + position, address_of(part), len(part))
            position = end

    def _next(self, is_over: Callable[[], bool] | None) -> tuple[_Kind, int, int]:
        """The next message of this call; those of earlier ones, which ended early, are skipped."""
        while True:
            data = self._receive(is_over)
            if not data:
                raise self._broken("it was closed on this side" if self.is_closed else "the other process is gone")
            if len(data) != _MESSAGE.size:
                raise self._broken("it broke the protocol of messages")
            kind, slot, number, length = _MESSAGE.unpack(data)
            if number < self.number:
                continue
            known = _KINDS.get(kind)
            if number > self.number or known is None:
                raise self._broken("it broke the protocol of messages")
            return known, slot, length

    def _receive(self, is_over: Callable[[], bool] | None) -> bytes:
        """The next message; empty at the end of the connection."""
        if self._unread is not None:
            data, self._unread = self._unread, None
            return data
        until = math.inf if is_over is None else self._clock.monotonic() + IDLE_SECONDS
        was_over = False
        while True:
            try:
                return self.connection.recv(_MESSAGE.size)
            except BlockingIOError:  # the timeout
                if self.is_closed:
                    raise self._broken("it was closed on this side") from None
                if was_over or is_over is None:
                    raise self._broken("the call ended") from None
                was_over = is_over()  # its last message may have arrived just before it ended: check once more
                if self._clock.monotonic() > until:
                    self.close()
                    raise DeadlineExceeded(f"waited {IDLE_SECONDS:g} s for the other process of a segment") from None
            except ConnectionResetError:
                continue  # it ended with unread messages, which is reported once: what it had sent can still be read
            except OSError as error:
                raise self._broken(str(error)) from error

    def _notify(self, kind: _Kind, slot: int = 0, length: int = 0) -> None:
        try:
            self._send_notice(kind, slot, length)
        except OSError as error:
            raise self._broken(str(error)) from error

    def _send_notice(self, kind: _Kind, slot: int, length: int = 0) -> None:
        self.connection.send(_MESSAGE.pack(kind, slot, self.number, length))

    def _broken(self, why: str) -> SegmentBroken:
        self.close()
        return SegmentBroken(f"a transfer through shared memory broke off: {why}")

    def _free(self) -> None:
        self.connection.close()
        self._view.release()
        self._memory.close()
