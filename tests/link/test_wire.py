"""The frame format: a round trip for every frame, a typed refusal for everything else."""

from __future__ import annotations

import contextlib
import random
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hetpipe.errors import MalformedFrame
from hetpipe.link.policy import MAX_RANK, MAX_TENSORS, Frame, FrameKind, LinkLimits
from hetpipe.link.wire import (
    FIRST_MESSAGE_BYTES,
    CloseHeader,
    FrameHeader,
    HeaderDecoder,
    TensorHeader,
    decode,
    encode,
    encode_close,
)
from hetpipe.values.plan import DTYPE_BYTES

_LIMITS = LinkLimits(frame_bytes=1 << 20)


def message_of(data: bytes | bytearray) -> memoryview:
    """The first message as it lies in a receiver's buffer, with rubbish behind it."""
    return memoryview(data + b"\xff" * (FIRST_MESSAGE_BYTES - len(data)))


def prefix(*, kind: int = 1, num_tensors: int = 0, magic: bytes = b"HPF3") -> bytes:
    """The fixed part of a header, written here a second time so that a change of the format is noticed."""
    return struct.pack("<4sBxxHqqqqq", magic, kind, num_tensors, 5, 6, 7, 8, 9)


tensors = st.one_of(
    st.none(),
    st.builds(
        lambda name, shape: torch.zeros(shape, dtype=getattr(torch, name)),
        st.sampled_from(sorted(DTYPE_BYTES)),
        st.lists(st.integers(0, 12), max_size=4),
    ),
)


@given(
    st.sampled_from(FrameKind),
    st.tuples(st.integers(0, 2**62), st.integers(-1, 99), st.integers(0, 2**62)),
    st.lists(tensors, max_size=6).map(tuple),
)
def test_a_header_says_what_the_frame_was(
    kind: FrameKind, numbers: tuple[int, int, int], sent: tuple[torch.Tensor | None, ...]
) -> None:
    minibatch, clock, weight = numbers
    outgoing = encode(Frame(kind, minibatch, clock, 3, sent, weight))
    header = decode(message_of(outgoing.first), _LIMITS)
    assert isinstance(header, FrameHeader)
    assert (header.kind, header.minibatch, header.clock, header.local_through) == (kind, minibatch, clock, 3)
    assert header.weight == weight
    assert len(header.tensors) == len(sent)
    following = iter(outgoing.following)
    for tensor, entry in zip(sent, header.tensors, strict=True):
        if tensor is None:
            assert entry is None
            continue
        assert entry is not None
        assert (entry.dtype, entry.shape) == (tensor.dtype, tuple(tensor.shape))
        if entry.offset is None:
            assert next(following).nbytes == entry.num_bytes
        else:
            assert entry.offset % 64 == 0
            assert entry.offset + entry.num_bytes <= max(len(outgoing.first), entry.offset)
    assert next(following, None) is None


@pytest.mark.parametrize(
    ("frame", "kind", "weight"),
    [
        (Frame(FrameKind.FORWARD, 7, 2, 4, (torch.ones(3, 2),), 3), 1, 3),
        (Frame(FrameKind.FORWARD, 7, 2, 4, (torch.ones(3, 2),), 3, scale_exponent=24), 1, 3),
        (Frame(FrameKind.FORWARD, 7, 2, 4, tells_norms=True), 1, 0),
        (Frame(FrameKind.BARRIER, 7, 2, 7), 3, 0),
        (Frame(FrameKind.SQUARES, 7, 0, 0, (torch.tensor([0.25, 0.0, 1e-300], dtype=torch.float64),)), 5, 0),
        (Frame(FrameKind.NORM, 7, 0, 0, (torch.tensor([1 / 3], dtype=torch.float64),)), 6, 0),
    ],
    ids=lambda value: value.kind.name if isinstance(value, Frame) else "",
)
def test_a_small_frame_arrives_bit_for_bit_in_one_message(frame: Frame, kind: int, weight: int) -> None:
    """The code of a kind and the place of the weight are said here a second time: they never change."""
    outgoing = encode(frame)
    assert outgoing.following == ()
    message = message_of(outgoing.first)
    assert struct.unpack_from("<4sBBBHqqqqq", message) == (
        *(b"HPF3", kind, frame.scale_exponent, frame.tells_norms, len(frame.tensors)),
        *(frame.minibatch, frame.clock, frame.local_through, weight, frame.version),
    )
    header = decode(message, _LIMITS)
    assert isinstance(header, FrameHeader)
    received = header.frame(tuple(inside(message, entry) for entry in header.tensors))
    for name in ("kind", "minibatch", "clock", "local_through", "weight", "scale_exponent", "version", "tells_norms"):
        assert getattr(received, name) == getattr(frame, name)
    for found, sent in zip(received.tensors, frame.tensors, strict=True):
        assert found is not None and sent is not None
        assert found.dtype == sent.dtype and torch.equal(found, sent)


def inside(message: memoryview, entry: TensorHeader | None) -> torch.Tensor:
    """A tensor that travelled in the first message."""
    assert entry is not None and entry.offset is not None
    data = bytearray(message[entry.offset : entry.offset + entry.num_bytes])
    return torch.frombuffer(data, dtype=entry.dtype).reshape(entry.shape)


def test_small_tensors_travel_inside_large_ones_behind() -> None:
    frame = Frame(FrameKind.FORWARD, 1, 0, 0, (torch.ones(8), torch.ones(1 << 17), torch.ones(8)))
    outgoing = encode(frame)
    assert len(outgoing.first) < 500
    assert [tensor.nbytes for tensor in outgoing.following] == [1 << 19]


def test_the_largest_header_fits_into_the_first_message() -> None:
    sent = (torch.empty((1,) * MAX_RANK),) * MAX_TENSORS
    outgoing = encode(Frame(FrameKind.FORWARD, 1, 0, 0, sent))
    assert len(outgoing.first) <= FIRST_MESSAGE_BYTES
    assert isinstance(decode(message_of(outgoing.first), _LIMITS), FrameHeader)


def test_large_tensors_are_not_copied() -> None:
    tensor = torch.ones(100_000)
    (message,) = encode(Frame(FrameKind.FORWARD, 1, 0, 0, (tensor,))).following
    assert message.data_ptr() == tensor.data_ptr()


def test_a_decoder_that_remembers_reads_as_one_that_does_not() -> None:
    """Frames of some cuts in turn, some of them damaged behind the numbers."""
    dice, remembers = random.Random(7), HeaderDecoder(_LIMITS)
    cuts: list[tuple[torch.Tensor | None, ...]] = [
        (torch.ones(3, 2),),
        (torch.ones(3, 2), None),
        (torch.ones(2, 3),),
        (torch.ones(70_000),),
        (),
    ]
    outcomes = set()
    for number in range(600):
        message = bytearray(encode(Frame(FrameKind.FORWARD, number, 1, 2, cuts[number // 4 % 5])).first)
        if number % 3 == 0 and len(message) > 49:
            message[dice.randrange(49, min(len(message), 80))] ^= 1 << dice.randrange(8)
        found = []
        for decoder in (remembers, HeaderDecoder(_LIMITS)):
            try:
                found.append(str(decoder.decode(bytes(message))))
            except MalformedFrame as error:
                found.append(str(error))
        assert found[0] == found[1]
        outcomes.add(found[0].startswith("FrameHeader"))
    assert outcomes == {True, False}


def test_a_scale_above_the_largest_is_malformed() -> None:
    message = bytearray(message_of(encode(Frame(FrameKind.FORWARD, 1, 0, 0)).first))
    message[5] = 25
    with pytest.raises(MalformedFrame, match=r"announces a loss scale of 2\^25; at most 2\^24"):
        decode(memoryview(message), _LIMITS)


def test_a_byte_about_norms_that_says_neither_yes_nor_no_is_malformed() -> None:
    message = bytearray(message_of(encode(Frame(FrameKind.FORWARD, 1, 0, 0, tells_norms=True)).first))
    message[6] = 2
    with pytest.raises(MalformedFrame, match="byte about norms is 2 instead of 0 or 1"):
        decode(memoryview(message), _LIMITS)


def test_goodbye() -> None:
    assert isinstance(decode(message_of(encode_close()), _LIMITS), CloseHeader)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"HPF3", "shorter than its header"),
        (prefix(magic=b"JUNK"), "JUNK"),
        (prefix(kind=200), "unknown frame kind 200"),
        (prefix(num_tensors=MAX_TENSORS + 1), "513 tensors"),
        (prefix(num_tensors=1), "overruns"),
        (prefix(num_tensors=1) + b"\x63\x01\x00" + bytes(8), "dtype code 99"),
        (prefix(num_tensors=1) + b"\x01\x09\x00" + bytes(72), "rank 9"),
        (prefix(num_tensors=1) + b"\x01\x01\x02" + bytes(8), "place 2"),
        (prefix(num_tensors=1) + b"\x01\x01\x00" + bytes(4), "overruns"),
        (prefix(num_tensors=1) + b"\x01\x01\x00" + struct.pack("<q", -1), "shape"),
        (prefix(num_tensors=1) + b"\x01\x01\x00" + struct.pack("<q", 1 << 40), "at most 1 MiB"),
        (prefix(num_tensors=1) + b"\x01\x03\x00" + struct.pack("<qqq", 0, 1 << 62, 1 << 62), "at most 1 MiB"),
        (prefix(num_tensors=2) + (b"\x01\x01\x00" + struct.pack("<q", 1 << 17)) * 2, "limit is 1 MiB"),
        (prefix(num_tensors=1) + b"\x01\x01\x01" + struct.pack("<q", 100), "overruns its message"),
    ],
)
def test_a_broken_header_is_refused(data: bytes, words: str) -> None:
    with pytest.raises(MalformedFrame, match=words):
        decode(memoryview(data), _LIMITS)


@given(st.binary(max_size=200), st.booleans())
def test_rubbish_never_does_worse_than_malformed(data: bytes, with_prefix: bool) -> None:  # noqa: FBT001 - hypothesis
    if with_prefix:
        data = prefix(num_tensors=3) + data
    with contextlib.suppress(MalformedFrame):
        decode(memoryview(data), _LIMITS)
