"""Model buffers at a barrier: means and maxima, whoever comes first."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from hetpipe.errors import ClockNotPublished, MalformedChunk, SliceMismatch
from hetpipe.ps.buffer_exchange import BufferExchange
from hetpipe.spec.ids import Clock, VirtualWorkerIndex
from hetpipe.spec.requests import BuffersHeader, SliceHeader

from .builders import decode, encode, requester

SLICES = (SliceHeader("mean", 0, 5, "float32"), SliceHeader("count", 0, 1, "int64"))


def header(vw: int, clock: int = 3, slices: tuple[SliceHeader, ...] = SLICES) -> BuffersHeader:
    return BuffersHeader(requester(vw), Clock(clock), slices)


def exchange(members: int = 3) -> BufferExchange:
    return BufferExchange([VirtualWorkerIndex(vw) for vw in range(members)])


def buffers_of(vw: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(vw)
    return [torch.randn(5, generator=generator), torch.tensor([10 * vw - 7])]


def send(to: BufferExchange, vw: int, tensors: Sequence[Tensor], clock: int = 3) -> None:
    receiver, buffer = to.receive(header(vw, clock))
    for chunk in encode(tensors):
        receiver.write(chunk)
    receiver.finish()
    to.sent(header(vw, clock), buffer)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_the_result_does_not_depend_on_who_comes_first(order: tuple[int, ...]) -> None:
    buffers = exchange()
    for vw in order:
        send(buffers, vw, buffers_of(vw))
    mean, count = decode(list(buffers.stream(header(1))), SLICES)

    first, second, third = (buffers_of(vw)[0] for vw in range(3))
    assert torch.equal(mean, ((first + second) + third) * (1.0 / 3))
    assert count.tolist() == [13]


def test_one_worker_keeps_its_own() -> None:
    buffers = exchange(1)
    send(buffers, 0, buffers_of(0))

    assert torch.equal(decode(list(buffers.stream(header(0))), SLICES)[0], buffers_of(0)[0])


def test_who_is_missing_is_named() -> None:
    buffers = exchange()
    send(buffers, 1, buffers_of(1))
    with pytest.raises(ClockNotPublished, match=r"buffer mean of virtual workers \[0, 2\] at clock 3"):
        list(buffers.stream(header(1)))


def test_a_repetition_changes_nothing() -> None:
    buffers = exchange(2)
    send(buffers, 0, buffers_of(0))
    send(buffers, 0, buffers_of(8))
    send(buffers, 1, buffers_of(1))

    assert torch.equal(decode(list(buffers.stream(header(0))), SLICES)[0], (buffers_of(0)[0] + buffers_of(1)[0]) * 0.5)


def test_a_later_barrier_replaces_an_earlier_one() -> None:
    buffers = exchange(1)
    send(buffers, 0, buffers_of(0), clock=3)
    send(buffers, 0, buffers_of(5), clock=6)
    send(buffers, 0, buffers_of(7), clock=3)  # comes too late

    assert torch.equal(decode(list(buffers.stream(header(0, 6))), SLICES)[0], buffers_of(5)[0])
    with pytest.raises(ClockNotPublished):
        list(buffers.stream(header(0, 3)))


def test_stages_with_other_cuts_find_their_part() -> None:
    buffers = exchange(1)
    send(buffers, 0, buffers_of(0))

    assert decode(list(buffers.stream(header(0, slices=SLICES[1:]))), SLICES[1:])[0].tolist() == [-7]
    assert list(buffers.stream(header(0, slices=()))) == []


@pytest.mark.parametrize(
    "wrong",
    [
        SliceHeader("mean", 1, 5, "float32"),
        SliceHeader("mean", 0, -1, "float32"),
        SliceHeader("mean", 0, 2**62, "float32"),
        SliceHeader("mean", 0, BufferExchange.MAX_BYTES // 4 + 1, "float32"),
        SliceHeader("mean", 0, 5, "object"),
        SliceHeader("mean", 0, 5, ""),
    ],
)
def test_nonsense_is_refused_before_anything_is_allocated(wrong: SliceHeader, monkeypatch: pytest.MonkeyPatch) -> None:
    buffers = exchange(1)
    monkeypatch.setattr("hetpipe.ps.buffer_exchange.FlatBuffer", None)
    for refuse in (buffers.receive, buffers.combined, buffers.stream):
        with pytest.raises(SliceMismatch):
            refuse(header(0, slices=(SLICES[1], wrong)))


@pytest.mark.parametrize("other", [SliceHeader("mean", 0, 4, "float32"), SliceHeader("mean", 0, 5, "float64")])
def test_workers_that_disagree_are_told(other: SliceHeader) -> None:
    buffers = exchange(1)
    send(buffers, 0, buffers_of(0))
    with pytest.raises(SliceMismatch, match="disagree"):
        buffers.combined(header(0, slices=(other,)))


def test_half_of_the_bytes_do_not_count() -> None:
    buffers = exchange(1)
    receiver, _ = buffers.receive(header(0))
    receiver.write(encode(buffers_of(0)[:1])[0])
    with pytest.raises(MalformedChunk):
        receiver.finish()
    with pytest.raises(ClockNotPublished):
        buffers.combined(header(0))
