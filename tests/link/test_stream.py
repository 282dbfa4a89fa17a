"""Frames as bounded messages: cut and put together again, and everything that is no such message refused."""

from __future__ import annotations

import random

import pytest
import torch

from hetpipe.errors import MalformedFrame
from hetpipe.link.policy import Frame, FrameKind, LinkLimits
from hetpipe.link.stream import PAYLOAD_BYTES, Assembler, Credit, credit_message, messages_of
from hetpipe.link.wire import FIRST_MESSAGE_BYTES, CloseHeader, EncodedFrame, encode, encode_close
from hetpipe.wire.channel import MAX_MESSAGE_BYTES


def frame(*sizes: int) -> Frame:
    tensors = tuple(torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes)
    return Frame(FrameKind.FORWARD, 7, 3, 5, tensors, 4)


def assembler(limits: LinkLimits | None = None) -> Assembler:
    return Assembler(limits or LinkLimits(), admit=lambda: None)


@pytest.mark.parametrize(
    ("sizes", "num_messages"),
    [
        ((), 1),
        ((0,), 1),
        ((1000, 2000), 1),
        ((FIRST_MESSAGE_BYTES,), 1),
        ((PAYLOAD_BYTES,), 1),
        ((PAYLOAD_BYTES + 1,), 2),
        ((PAYLOAD_BYTES // 2, 10, PAYLOAD_BYTES // 2, 0), 1),
        ((PAYLOAD_BYTES - 1, PAYLOAD_BYTES - 1, PAYLOAD_BYTES - 1), 3),
    ],
)
def test_a_frame_travels_in_few_bounded_messages(sizes: tuple[int, ...], num_messages: int) -> None:
    sent, receiver = frame(*sizes), assembler()
    messages = [b"".join(parts) for parts in messages_of(encode(sent))]
    assert len(messages) == num_messages
    assert max(map(len, messages)) < MAX_MESSAGE_BYTES
    *others, received = [receiver.feed(message) for message in messages]
    assert not any(others)
    assert isinstance(received, Frame)
    assert (received.minibatch, received.clock, received.local_through, received.weight) == (7, 3, 5, 4)
    for before, after in zip(sent.tensors, received.tensors, strict=True):
        assert before is not None
        assert after is not None
        assert torch.equal(before, after)


def test_credit_and_goodbye() -> None:
    receiver = assembler()
    assert receiver.feed(credit_message(9)) == Credit(9)
    (goodbye,) = messages_of(EncodedFrame(encode_close(), ()))
    assert isinstance(receiver.feed(b"".join(goodbye)), CloseHeader)


def test_credit_may_come_within_a_frame() -> None:
    receiver = assembler()
    first, second = map(b"".join, messages_of(encode(frame(PAYLOAD_BYTES + 9))))
    receiver.feed(first)
    assert receiver.feed(credit_message(1)) == Credit(1)
    assert isinstance(receiver.feed(second), Frame)


def test_what_changes_after_it_was_read_changes_no_frame() -> None:
    receiver, sent = assembler(), frame(9, PAYLOAD_BYTES)
    received = None
    for parts in messages_of(encode(sent)):
        shared = bytearray(b"".join(parts))
        received = receiver.feed(memoryview(shared))
        shared[:] = bytes(len(shared))
    assert isinstance(received, Frame)
    for before, after in zip(sent.tensors, received.tensors, strict=True):
        assert before is not None
        assert after is not None
        assert torch.equal(before, after)


def test_a_frame_that_is_not_admitted_allocates_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise MalformedFrame("no credit")

    monkeypatch.setattr(torch, "empty", None)
    with pytest.raises(MalformedFrame, match="no credit"):
        Assembler(LinkLimits(), admit=refuse).feed(b"".join(next(messages_of(encode(frame(10))))))


def test_damaged_messages_give_typed_errors_only() -> None:
    """A thousand streams, each damaged somewhere: whatever comes out is a value or a `MalformedFrame`."""
    dice = random.Random(4)
    limits = LinkLimits(frame_bytes=1 << 20)
    frames = [list(map(b"".join, messages_of(encode(each)))) for each in (frame(3, 70_000, 9), frame(100_000))]
    whole = [*frames[0], credit_message(3), *frames[1]]
    refused = 0
    for _ in range(1000):
        messages = [bytearray(message[:200] if dice.random() < 0.2 else message) for message in whole]
        damaged = dice.choice(messages)
        for _ in range(dice.randint(1, 4)):
            damaged[dice.randrange(min(len(damaged), 60))] = dice.choice((0, 1, 127, 255, dice.randrange(256)))
        receiver = assembler(limits)
        try:
            for message in messages:
                receiver.feed(bytes(message))
        except MalformedFrame:
            refused += 1
    assert refused > 500
