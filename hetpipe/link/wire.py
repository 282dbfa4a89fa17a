"""Encoding of frames: conversion between `Frame` values and messages, shared by all links between processes.

A frame is one *first message* of at most `FIRST_MESSAGE_BYTES`, followed by one message per large tensor. The first
message contains a header and, as far as they fit, the small tensors themselves, so that a small frame costs one
message.

    prefix      magic "HPF3", kind (u8), scale_exponent (u8), tells_norms (u8; 0 or 1), number of tensors (u16),
                minibatch, clock, local_through, weight, version (i64)
    per tensor  dtype code (u8; 0 = no tensor), rank (u8), place (u8; 1 = in this message), sizes (i64 each)
    payloads    the tensors in this message, each starting at a multiple of 64 bytes

All integers are little-endian, and so are the raw elements of the tensors.
"""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from hetpipe.errors import MalformedFrame, PlanError, ResourceExhausted
from hetpipe.link.policy import MAX_RANK, MAX_TENSORS, Frame, FrameKind, LinkLimits
from hetpipe.values.plan import DTYPE_BYTES
from hetpipe.values.precision import LARGEST_SCALE_EXPONENT
from hetpipe.values.quantities import bytes_text

#: Size of the receive buffer that is kept posted. Large enough for every header, small enough that copying a tensor
#: through it costs less than the round trip of a separate message.
FIRST_MESSAGE_BYTES = 64 * 1024

_MAGIC = b"HPF3"
_PREFIX = struct.Struct("<4sBBBHqqqqq")
_TENSOR = struct.Struct("<BBB")
_SIZES = tuple(struct.Struct(f"<{rank}q") for rank in range(MAX_RANK + 1))
_CLOSE_CODE = 0
_NO_TENSOR = 0
_ALIGNMENT = 64

_KINDS = {kind.value: kind for kind in FrameKind}
_DTYPE_OF_CODE: dict[int, torch.dtype] = {
    code: getattr(torch, name) for code, name in enumerate(DTYPE_BYTES, start=_NO_TENSOR + 1)
}
_CODE_OF_DTYPE = {dtype: code for code, dtype in _DTYPE_OF_CODE.items()}


@dataclass(frozen=True, slots=True, eq=False)
class EncodedFrame:
    """A frame ready to be sent."""

    first: bytes | bytearray
    """The first message."""
    following: tuple[torch.Tensor, ...]
    """The tensors whose bytes are messages of their own, contiguous and on the CPU."""


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """The header of one tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int | None
    """Position of its bytes in the first message; None if they are sent in a message of their own."""
    num_bytes: int
    """Size of the payload."""


@dataclass(frozen=True, slots=True)
class FrameHeader:
    """A validated header."""

    kind: FrameKind
    minibatch: int
    clock: int
    local_through: int
    weight: int
    scale_exponent: int
    version: int
    tells_norms: bool
    tensors: tuple[TensorHeader | None, ...]

    def frame(self, tensors: tuple[torch.Tensor | None, ...]) -> Frame:
        """Build the frame from its tensors."""
        return Frame(
            self.kind,
            self.minibatch,
            self.clock,
            self.local_through,
            tensors,
            self.weight,
            self.scale_exponent,
            self.version,
            self.tells_norms,
        )


class CloseHeader:
    """The goodbye: nothing follows."""


def portable(tensors: Sequence[torch.Tensor | None], limits: LinkLimits) -> tuple[torch.Tensor | None, ...]:
    """`tensors` detached, on the CPU and contiguous; tensors that already comply are shared, not copied.

    Raises:
        PlanError: a tensor of a layout, dtype or rank that links do not support.
        ResourceExhausted: more tensors or bytes than the limits allow.
    """
    if len(tensors) > MAX_TENSORS:
        raise ResourceExhausted(f"{len(tensors)} tensors cross one cut; a frame holds at most {MAX_TENSORS}")
    num_bytes = 0
    for index, tensor in enumerate(tensors):
        if tensor is None:
            continue
        if tensor.dtype not in _CODE_OF_DTYPE or tensor.layout is not torch.strided:
            known = ", ".join(DTYPE_BYTES)
            raise PlanError(
                f"tensor {index} that crosses a cut is {tensor.layout} {tensor.dtype}; a link carries dense {known}"
            )
        if tensor.dim() > MAX_RANK:
            raise PlanError(f"tensor {index} that crosses a cut has {tensor.dim()} dimensions; at most {MAX_RANK}")
        num_bytes += tensor.nbytes
    if num_bytes > limits.frame_bytes:
        raise ResourceExhausted(
            f"a frame of {bytes_text(num_bytes, round_up=True)} exceeds the limit of {bytes_text(limits.frame_bytes)}"
        )
    return tuple(None if tensor is None else _portable(tensor) for tensor in tensors)


def _portable(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_cpu and tensor.is_contiguous() and not tensor.is_neg():
        return tensor.detach() if tensor.requires_grad else tensor
    return tensor.detach().resolve_neg().contiguous().to("cpu")


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A flat uint8 view of a contiguous CPU tensor."""
    return tensor.reshape(-1).view(torch.uint8)


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, which lives as long as they are viewed."""
    if not tensor.nbytes:
        return memoryview(b"")
    array = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    array.owner = tensor  # type: ignore[attr-defined]
    return memoryview(array).cast("B")


@dataclass(frozen=True, slots=True)
class _Layout:
    """What the first message of frames with tensors of these types and shapes looks like."""

    tensors: bytes
    """Their headers, and zeros up to the end of the message."""
    inside: tuple[tuple[int, int, int], ...]
    """Those in this message, but for empty ones: index, and the place of their bytes."""
    following: tuple[int, ...]
    """Indices of the others."""


@lru_cache(maxsize=256)
def _layout(specs: tuple[tuple[torch.dtype, torch.Size] | None, ...]) -> _Layout:
    """The layout for tensors of these types and shapes: the same for most frames of a cut."""
    header = bytearray()
    header_bytes = _PREFIX.size + sum(
        _TENSOR.size + (0 if each is None else _SIZES[len(each[1])].size) for each in specs
    )
    end = header_bytes
    inside: list[tuple[int, int, int]] = []
    following: list[int] = []
    for index, each in enumerate(specs):
        if each is None:
            header += _TENSOR.pack(_NO_TENSOR, 0, 0)
            continue
        dtype, shape = each
        start = _aligned(end)
        num_bytes = math.prod(shape) * dtype.itemsize
        fits = start + num_bytes <= FIRST_MESSAGE_BYTES
        header += _TENSOR.pack(_CODE_OF_DTYPE[dtype], len(shape), int(fits))
        header += _SIZES[len(shape)].pack(*shape)
        if not fits:
            following.append(index)
        elif num_bytes:
            end = start + num_bytes
            inside.append((index, start, end))
    header += bytes(end - header_bytes)
    return _Layout(bytes(header), tuple(inside), tuple(following))


def encode(frame: Frame) -> EncodedFrame:
    """The messages of `frame`, whose tensors are `portable`. Large tensors are shared with it, small ones copied."""
    tensors = frame.tensors
    layout = _layout(tuple([None if tensor is None else (tensor.dtype, tensor.shape) for tensor in tensors]))
    prefix = _PREFIX.pack(
        _MAGIC,
        frame.kind.value,
        frame.scale_exponent,
        frame.tells_norms,
        len(tensors),
        frame.minibatch,
        frame.clock,
        frame.local_through,
        frame.weight,
        frame.version,
    )
    if not layout.inside:
        return EncodedFrame(prefix + layout.tensors, tuple([_present(tensors[index]) for index in layout.following]))
    first = bytearray(prefix + layout.tensors)
    for index, start, end in layout.inside:
        first[start:end] = memory_of(_present(tensors[index]))
    return EncodedFrame(first, tuple([_present(tensors[index]) for index in layout.following]))


def _present(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None, "the layout names no absent tensor"
    return tensor


def encode_close() -> bytes:
    """Encode the goodbye."""
    return _PREFIX.pack(_MAGIC, _CLOSE_CODE, 0, 0, 0, 0, 0, 0, 0, 0)


def decode(message: bytes | memoryview, limits: LinkLimits) -> FrameHeader | CloseHeader:
    """Decode and validate the header of a first message; `message` may have trailing bytes. Allocates no tensor.

    Raises:
        MalformedFrame: the message violates the format or the limits.
    """
    return HeaderDecoder(limits).decode(message)


class HeaderDecoder:
    """Decodes and validates the headers of the first messages of one stream.

    It remembers the tensors of the last header: those of the next one are mostly the same, byte for byte, and then so
    is everything that was checked of them.
    """

    def __init__(self, limits: LinkLimits) -> None:
        """Validate against `limits`."""
        self._limits = limits
        #: Number of tensors and bytes of the last message, the bytes that described the tensors, and these.
        self._last: tuple[int, int, bytes, tuple[TensorHeader | None, ...]] = (0, -1, b"", ())

    def decode(self, message: bytes | memoryview) -> FrameHeader | CloseHeader:
        """Decode the next header, as the function `decode`."""
        if len(message) < _PREFIX.size:
            raise MalformedFrame(f"a frame of {len(message)} bytes is shorter than its header of {_PREFIX.size} bytes")
        magic, code, scale_exponent, tells_norms, num_tensors, *numbers = _PREFIX.unpack_from(message)
        if magic != _MAGIC:
            raise MalformedFrame(f"a frame starts with {bytes(magic)!r} instead of {_MAGIC!r}")
        if code == _CLOSE_CODE:
            return CloseHeader()
        if code not in _KINDS:
            raise MalformedFrame(f"unknown frame kind {code}")
        if scale_exponent > LARGEST_SCALE_EXPONENT:
            raise MalformedFrame(
                f"a frame announces a loss scale of 2^{scale_exponent}; at most 2^{LARGEST_SCALE_EXPONENT}"
            )
        if tells_norms > 1:
            raise MalformedFrame(f"a frame's byte about norms is {tells_norms} instead of 0 or 1")
        minibatch, clock, local_through, weight, version = numbers
        tensors = self._tensors(message, num_tensors)
        return FrameHeader(
            _KINDS[code], minibatch, clock, local_through, weight, scale_exponent, version, bool(tells_norms), tensors
        )

    def _tensors(self, message: bytes | memoryview, num_tensors: int) -> tuple[TensorHeader | None, ...]:
        count, length, described, tensors = self._last
        end = _PREFIX.size + len(described)
        if (count, length) == (num_tensors, len(message)) and message[_PREFIX.size : end] == described:
            return tensors
        tensors, end = _decode_tensors(message, num_tensors, self._limits)
        self._last = (num_tensors, len(message), bytes(message[_PREFIX.size : end]), tensors)
        return tensors


def _decode_tensors(
    message: bytes | memoryview, num_tensors: int, limits: LinkLimits
) -> tuple[tuple[TensorHeader | None, ...], int]:
    """The headers of the tensors, and where they end."""
    if num_tensors > MAX_TENSORS:
        raise MalformedFrame(f"a frame announces {num_tensors} tensors; at most {MAX_TENSORS} are allowed")
    parsed: list[tuple[torch.dtype, tuple[int, ...], bool] | None] = []
    position = _PREFIX.size
    for _ in range(num_tensors):
        code, rank, in_first = _unpack(_TENSOR, message, position)
        position += _TENSOR.size
        if code == _NO_TENSOR:
            parsed.append(None)
            continue
        if code not in _DTYPE_OF_CODE or rank > MAX_RANK or in_first > 1:
            raise MalformedFrame(f"a frame announces a tensor of dtype code {code}, rank {rank}, place {in_first}")
        shape = _unpack(_SIZES[rank], message, position)
        position += _SIZES[rank].size
        dtype = _DTYPE_OF_CODE[code]
        # An empty tensor may have other sizes that overflow its strides, so empty sizes count as 1 here.
        if min(shape, default=0) < 0 or math.prod(size or 1 for size in shape) * dtype.itemsize > limits.frame_bytes:
            raise MalformedFrame(
                f"a frame announces a {dtype} tensor of shape {shape}; at most {bytes_text(limits.frame_bytes)}"
            )
        parsed.append((dtype, shape, bool(in_first)))
    return _place(parsed, position, len(message), limits), position


def _place(
    parsed: Sequence[tuple[torch.dtype, tuple[int, ...], bool] | None], end: int, length: int, limits: LinkLimits
) -> tuple[TensorHeader | None, ...]:
    """Compute the position of each payload, like the sender, and check all sizes."""
    tensors: list[TensorHeader | None] = []
    total = 0
    for entry in parsed:
        if entry is None:
            tensors.append(None)
            continue
        dtype, shape, in_first = entry
        start = _aligned(end)
        num_bytes = math.prod(shape) * dtype.itemsize
        tensor = TensorHeader(dtype, shape, start if in_first else None, num_bytes)
        total += num_bytes
        if total > limits.frame_bytes:
            raise MalformedFrame(
                f"a frame announces over {bytes_text(total)}; the limit is {bytes_text(limits.frame_bytes)}"
            )
        if in_first and num_bytes:
            end = start + num_bytes
            if end > length:
                raise MalformedFrame(f"a payload of {num_bytes} bytes at {start} overruns its message of {length}")
        tensors.append(tensor)
    return tuple(tensors)


def _unpack(layout: struct.Struct, message: bytes | memoryview, position: int) -> tuple[int, ...]:
    if position + layout.size > len(message):
        raise MalformedFrame(f"a header overruns its message of {len(message)} bytes")
    return layout.unpack_from(message, position)


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT
