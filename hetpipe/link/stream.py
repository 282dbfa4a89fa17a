"""Encoding of frames as a stream of bounded messages, for links over gRPC and memory. Handles bytes and tensors only.

A message starts with a type byte:

    F   the beginning of a frame: length of its first message (u32, `hetpipe.link.wire`), the first message, and as many
        bytes of its large tensors as fit
    M   more bytes of those tensors, which follow each other without gaps
    C   credit: so many frames more (u32) may be sent to whoever says this

A frame that fits is one message. The goodbye is a frame without tensors.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from hetpipe.errors import MalformedFrame
from hetpipe.link.policy import Frame, LinkLimits
from hetpipe.link.wire import (
    FIRST_MESSAGE_BYTES,
    CloseHeader,
    EncodedFrame,
    FrameHeader,
    HeaderDecoder,
    encode,
    memory_of,
)
from hetpipe.wire.segment import SLOT_BYTES, Parts, address_of

#: Maximum bytes of large tensors in one message. Larger messages need fewer wake-ups, smaller ones are still in the
#: cache when they are copied; throughput is about the same from 0.5 to 4 MiB.
PAYLOAD_BYTES = 1024 * 1024

_BEGIN = struct.Struct("<cI")
_CREDIT = struct.Struct("<cI")
_BEGIN_TAG, _MORE_TAG, _CREDIT_TAG = b"F", b"M", b"C"
_BEGIN_CODE, _MORE_CODE, _CREDIT_CODE = (tag[0] for tag in (_BEGIN_TAG, _MORE_TAG, _CREDIT_TAG))


@dataclass(frozen=True, slots=True)
class Credit:
    """Credit for further frames."""

    frames: int


Received = Frame | CloseHeader | Credit


def credit_message(frames: int) -> bytes:
    """The message that grants `frames` more."""
    return _CREDIT.pack(_CREDIT_TAG, frames)


def messages_of(outgoing: EncodedFrame) -> Iterator[Parts]:
    """The messages of one frame, generated lazily, each in pieces of at most `SLOT_BYTES` together.

    The pieces are views of the frame's memory.
    """
    head: list[bytes | memoryview] = [_beginning(outgoing.first)]
    room = min(PAYLOAD_BYTES, SLOT_BYTES - len(head[0]))
    for parts in _portions([memory_of(tensor) for tensor in outgoing.following], room):
        yield head + parts
        head = [_MORE_TAG]


def message_of(frame: Frame) -> Parts:
    """The message of a frame that is one, as `messages_of` makes it."""
    outgoing = encode(frame)
    return (_beginning(outgoing.first), *map(memory_of, outgoing.following))


def _beginning(first: bytes | bytearray) -> bytes:
    return b"".join((_BEGIN.pack(_BEGIN_TAG, len(first)), first))


def _portions(payloads: Sequence[memoryview], room: int) -> Iterator[list[bytes | memoryview]]:
    """The bytes of `payloads` in order, at least one portion, which may be empty.

    Args:
        payloads: the bytes.
        room: how many there may be in the first portion; in the others, `PAYLOAD_BYTES`.
    """
    portion: list[bytes | memoryview] = []
    for payload in payloads:
        start = 0
        while start < len(payload):
            if room == 0:
                yield portion
                portion, room = [], PAYLOAD_BYTES
            piece = payload[start : start + room]
            portion.append(piece)
            start += len(piece)
            room -= len(piece)
    yield portion


class Assembler:
    """Reassembles the messages of one stream. Not thread-safe."""

    def __init__(self, limits: LinkLimits, *, admit: Callable[[], None]) -> None:
        """Check against `limits`; `admit` is called before anything is allocated for a frame, and may reject it."""
        self._headers = HeaderDecoder(limits)
        self._admit = admit
        #: The frame being reassembled, and its missing large tensors: the first one is being filled.
        self._header: FrameHeader | None = None
        self._tensors: tuple[torch.Tensor | None, ...] = ()
        self._missing: list[torch.Tensor] = []
        #: Bytes of the first missing tensor received so far.
        self._filled = 0

    def feed(self, message: bytes | memoryview) -> Received | None:
        """Process the next message; returns the frame or credit it completes.

        A view may be of memory that another process changes meanwhile: no byte is read twice, and what is checked is a
        copy.

        Raises:
            MalformedFrame: the message violates the format or the limits.
        """
        tag = message[0] if len(message) else None
        if tag == _CREDIT_CODE and len(message) == _CREDIT.size:
            return Credit(_CREDIT.unpack(message)[1])
        if tag == _MORE_CODE and self._header is not None and len(message) > 1:
            return self._fill(message, 1)
        if tag == _BEGIN_CODE and self._header is None:
            return self._begin(message)
        place = "within" if self._header else "between"
        raise MalformedFrame(f"a message of {len(message)} bytes begins with {bytes(message[:1])!r} {place} frames")

    def _begin(self, message: bytes | memoryview) -> Received | None:
        first_bytes = _BEGIN.unpack_from(message)[1] if len(message) >= _BEGIN.size else 0
        end = _BEGIN.size + first_bytes
        if not 0 < first_bytes <= FIRST_MESSAGE_BYTES or end > len(message):
            raise MalformedFrame(f"a message of {len(message)} bytes begins a frame with a header of {first_bytes}")
        first = bytes(message[_BEGIN.size : end])
        header = self._headers.decode(first)
        if isinstance(header, CloseHeader):
            return header
        self._admit()
        self._header = header
        self._tensors = tuple([None if t is None else torch.empty(t.shape, dtype=t.dtype) for t in header.tensors])
        self._missing, self._filled = [], 0
        for tensor, entry in zip(self._tensors, header.tensors, strict=True):
            if tensor is None or entry is None or not entry.num_bytes:
                continue
            if entry.offset is None:
                self._missing.append(tensor)
            else:
                _copy(tensor, 0, first, entry.offset, entry.num_bytes)
        return self._fill(message, end)

    def _fill(self, message: bytes | memoryview, position: int) -> Frame | None:
        """Copy the rest of `message`, from `position` on, into the missing tensors."""
        while position < len(message):
            if not self._missing:
                raise MalformedFrame(f"{len(message) - position} bytes follow the last tensor of a frame")
            tensor = self._missing[0]
            wanted = tensor.nbytes
            length = min(wanted - self._filled, len(message) - position)
            _copy(tensor, self._filled, message, position, length)
            position += length
            self._filled += length
            if self._filled == wanted:
                del self._missing[0]
                self._filled = 0
        if self._missing or self._header is None:
            return None
        frame = self._header.frame(self._tensors)
        self._header, self._tensors = None, ()
        return frame


def _copy(tensor: torch.Tensor, to: int, message: bytes | memoryview, start: int, length: int) -> None:
    """Copy bytes of `message` into `tensor`, without blocking other threads."""
    ctypes.memmove(tensor.data_ptr() + to, address_of(message) + start, length)
