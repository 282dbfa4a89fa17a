"""Model buffers at a barrier: means and maxima, whoever comes first."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hetpipe.decide.sync.records import SegmentMember, SegmentRecord
from hetpipe.errors import ClockNotPublished, MalformedChunk, ProtocolViolation, SliceMismatch, StaleIncarnation
from hetpipe.server.shard.buffer_exchange import Attendance, BufferExchange
from hetpipe.server.shard.buffer_files import BufferFiles
from hetpipe.values.ids import Clock, Incarnation
from hetpipe.values.ids import VirtualWorkerIndex as Vw
from hetpipe.values.requests import BuffersHeader, SliceHeader
from tests.server.shard.builders import decode, encode, requester

SLICES = (SliceHeader("mean", 0, 5, "float32"), SliceHeader("count", 0, 1, "int64"))


@dataclass
class Barrier:
    """Who is at the barrier at a clock: (virtual worker, whether it joins there)."""

    clock: int
    joins: dict[int, bool]
    evicted: set[int] = field(default_factory=set)
    left: tuple[int, ...] = ()
    """Who leaves there."""
    earlier: tuple[int, ...] = ()
    """Who left before."""

    def attendance(self) -> Attendance:
        members = [SegmentMember(Vw(vw), Incarnation(0), 1, joined=joins) for vw, joins in self.joins.items()]
        left = tuple(SegmentMember(Vw(vw), Incarnation(0), 1, joined=False) for vw in self.left)
        segment = SegmentRecord(0, Clock(self.clock), ("epoch",), 0, tuple(members), left)
        return Attendance(segment, self._present(self.joins), self._present((*self.left, *self.earlier)))

    def _present(self, lives: Iterable[int]) -> dict[Vw, Incarnation]:
        return {Vw(vw): Incarnation(0) for vw in lives if vw not in self.evicted}


def header(vw: int, clock: int = 3, slices: tuple[SliceHeader, ...] = SLICES) -> BuffersHeader:
    return BuffersHeader(requester(vw), Clock(clock), slices)


def exchange(members: int = 3) -> BufferExchange:
    """At a barrier at clock 3, at which nobody joins."""
    return BufferExchange(Barrier(3, dict.fromkeys(range(members), False)).attendance)


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
    mean, count = decode(buffers.stream(header(1)), SLICES)

    first, second, third = (buffers_of(vw)[0] for vw in range(3))
    assert torch.equal(mean, ((first + second) + third) * (1.0 / 3))
    assert count.tolist() == [13]


@pytest.mark.parametrize("members", [2, 3, 5, 7])
def test_equal_buffers_stay_as_they_are(members: int) -> None:
    """Such as those of frozen layers: the average of three equal numbers may be another number."""
    buffers, own = exchange(members), buffers_of(0)
    for vw in range(members):
        send(buffers, vw, own)
    assert all(found.equal(value) for found, value in zip(decode(buffers.stream(header(0)), SLICES), own, strict=True))


def test_one_worker_keeps_its_own() -> None:
    buffers = exchange(1)
    send(buffers, 0, buffers_of(0))

    assert torch.equal(decode(buffers.stream(header(0)), SLICES)[0], buffers_of(0)[0])


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

    assert torch.equal(decode(buffers.stream(header(0)), SLICES)[0], (buffers_of(0)[0] + buffers_of(1)[0]) * 0.5)


def read(at: BufferExchange, vw: int, clock: int = 3) -> list[Tensor]:
    return decode(at.stream(header(vw, clock)), SLICES)


def test_who_leaves_there_counts_in_its_place() -> None:
    """It has trained with them; whoever joins reads them, too."""
    buffers = BufferExchange(Barrier(3, {0: False, 2: False, 3: True}, left=(1,)).attendance)
    for vw in (3, 2, 0):
        send(buffers, vw, buffers_of(vw))
    with pytest.raises(ClockNotPublished, match=r"buffer mean of virtual workers \[1\] at clock 3"):
        read(buffers, 0)
    send(buffers, 1, buffers_of(1))
    first, second, third = (buffers_of(vw)[0] for vw in range(3))
    assert all(torch.equal(read(buffers, vw)[0], ((first + second) + third) * (1.0 / 3)) for vw in range(4))


def test_nobody_waits_for_who_was_to_leave_and_died() -> None:
    barrier = Barrier(3, {0: False}, left=(1,))
    buffers = BufferExchange(barrier.attendance)
    send(buffers, 0, buffers_of(0))
    barrier.evicted.add(1)
    assert torch.equal(read(buffers, 0)[0], buffers_of(0)[0])
    with pytest.raises(StaleIncarnation, match="not a member after the barrier at 3"):
        send(buffers, 1, buffers_of(1))


@pytest.mark.parametrize("is_begun", [False, True])
def test_who_left_may_ask_when_the_others_are_at_the_next_barrier(*, is_begun: bool) -> None:
    """They waited for what it sent, and not for it to read."""
    barrier = Barrier(3, {0: False}, left=(1,))
    buffers = BufferExchange(barrier.attendance)
    for vw in (0, 1):
        send(buffers, vw, buffers_of(vw))
    expected = read(buffers, 0)[0]
    barrier.clock, barrier.left, barrier.earlier = 6, (), (1,)
    if is_begun:
        send(buffers, 0, buffers_of(5), clock=6)
    assert torch.equal(read(buffers, 1)[0], expected)
    with pytest.raises(ProtocolViolation, match="of the barrier at 3, not at 6"):
        read(buffers, 0)
    with pytest.raises(StaleIncarnation, match="not a member after the barrier at 6"):
        read(buffers, 1, clock=6)
    barrier.clock = 9
    send(buffers, 0, buffers_of(6), clock=9)
    send(buffers, 0, buffers_of(6), clock=9)
    if is_begun:
        with pytest.raises(ProtocolViolation, match="requests buffers of the barrier at 3 too late"):
            read(buffers, 1)


def test_a_later_barrier_replaces_an_earlier_one() -> None:
    barrier = Barrier(3, {0: False})
    buffers = BufferExchange(barrier.attendance)
    send(buffers, 0, buffers_of(0))
    barrier.clock = 6
    send(buffers, 0, buffers_of(5), clock=6)
    with pytest.raises(ProtocolViolation, match="of the barrier at 3, not at 6"):
        send(buffers, 0, buffers_of(7), clock=3)
    with pytest.raises(ProtocolViolation, match="of the barrier at 3, not at 6"):
        read(buffers, 0, clock=3)

    assert torch.equal(read(buffers, 0, clock=6)[0], buffers_of(5)[0])


def test_who_joins_reads_what_the_others_had() -> None:
    buffers = BufferExchange(Barrier(3, {0: True, 1: False, 2: False}).attendance)
    for vw in (0, 2):
        send(buffers, vw, buffers_of(vw))
    with pytest.raises(ClockNotPublished, match=r"virtual workers \[1\] at clock 3"):
        read(buffers, 0)
    send(buffers, 1, buffers_of(1))

    mean, count = read(buffers, 0)
    assert torch.equal(mean, (buffers_of(1)[0] + buffers_of(2)[0]) * 0.5)
    assert count.tolist() == [13]
    assert all(torch.equal(a, b) for a, b in zip(read(buffers, 1), (mean, count), strict=True))


def test_an_evicted_one_is_not_waited_for_and_counts_with_what_it_sent() -> None:
    barrier = Barrier(3, dict.fromkeys(range(3), False))
    buffers = BufferExchange(barrier.attendance)
    mean_only = header(1, slices=SLICES[:1])
    receiver, buffer = buffers.receive(mean_only)
    receiver.write(encode(buffers_of(1)[:1])[0])
    receiver.finish()
    buffers.sent(mean_only, buffer)
    for vw in (0, 2):
        send(buffers, vw, buffers_of(vw))
    barrier.evicted = {1}
    with pytest.raises(StaleIncarnation, match="is not a member after the barrier at 3"):
        send(buffers, 1, buffers_of(1))

    mean, count = read(buffers, 0)
    first, second, third = (buffers_of(vw)[0] for vw in range(3))
    assert torch.equal(mean, ((first + second) + third) * (1.0 / 3))
    assert count.tolist() == [13]
    barrier.evicted = {1, 2}
    assert torch.equal(read(buffers, 0)[0], mean)


def test_if_nobody_is_left_the_buffers_of_the_barrier_before_stand() -> None:
    """Also those that nobody had read there, and those of a later barrier at which only some were sent."""
    barrier = Barrier(3, {0: False, 1: False})
    buffers = BufferExchange(barrier.attendance)
    for vw in range(2):
        send(buffers, vw, buffers_of(vw))
    barrier.clock, barrier.joins = 4, {0: False, 1: True}
    newest = header(0, 4, SLICES[1:])
    receiver, buffer = buffers.receive(newest)
    receiver.write(encode([torch.tensor([99])])[0])
    receiver.finish()
    buffers.sent(newest, buffer)
    barrier.evicted = {0}
    send(buffers, 1, buffers_of(4), clock=4)

    mean, count = read(buffers, 1, clock=4)
    assert torch.equal(mean, (buffers_of(0)[0] + buffers_of(1)[0]) * 0.5)
    assert count.tolist() == [99]


def test_the_first_newcomer_gives_what_nobody_else_ever_had() -> None:
    buffers = BufferExchange(Barrier(3, {0: True, 1: True}).attendance)
    send(buffers, 1, buffers_of(1))
    with pytest.raises(ClockNotPublished, match=r"virtual workers \[0\] at clock 3"):
        read(buffers, 1)
    send(buffers, 0, buffers_of(0))

    for vw in range(2):
        assert all(torch.equal(a, b) for a, b in zip(read(buffers, vw), buffers_of(0), strict=True))


def test_what_is_remembered_from_barrier_to_barrier_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    barrier = Barrier(0, {0: False})
    buffers = BufferExchange(barrier.attendance)
    monkeypatch.setattr(BufferExchange, "MAX_BYTES", 130)
    for clock in range(1, 4):
        barrier.clock = clock
        named = header(0, clock, (SliceHeader(f"b{clock}", 0, 16, "float32"),))
        receiver, buffer = buffers.receive(named)
        receiver.write(encode([torch.zeros(16)])[0])
        receiver.finish()
        buffers.sent(named, buffer)
    assert list(buffers._earlier) == ["b1", "b2"]
    barrier.clock = 4
    assert list(buffers.stream(header(0, 4, slices=()))) == []
    assert list(buffers._earlier) == ["b3"]


def test_stages_with_other_cuts_find_their_part() -> None:
    buffers = exchange(1)
    send(buffers, 0, buffers_of(0))

    assert decode(buffers.stream(header(0, slices=SLICES[1:])), SLICES[1:])[0].tolist() == [-7]
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
    monkeypatch.setattr("hetpipe.server.shard.buffer_exchange.FlatBuffer", None)
    for refuse in (buffers.receive, buffers.combined, buffers.stream):
        with pytest.raises(SliceMismatch):
            refuse(header(0, slices=(SLICES[1], wrong)))


@pytest.mark.parametrize("other", [SliceHeader("mean", 0, 4, "float32"), SliceHeader("mean", 0, 5, "float64")])
def test_workers_that_disagree_are_told(other: SliceHeader) -> None:
    buffers = exchange(2)
    send(buffers, 0, buffers_of(0))
    with pytest.raises(SliceMismatch, match="disagree"):
        buffers.sent(header(1, slices=(other,)), buffers.receive(header(1, slices=(other,)))[1])
    send(buffers, 1, buffers_of(1))
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


class TestAfterARestart:
    """The clock shard's process ended, and another one reads what it kept."""

    def test_what_was_sent_is_there(self, tmp_path: Path) -> None:
        barrier = Barrier(3, {0: False, 1: False, 2: True})
        first = BufferExchange(barrier.attendance, BufferFiles(tmp_path))
        send(first, 0, buffers_of(0))
        send(first, 2, buffers_of(2))
        again = BufferExchange(barrier.attendance, BufferFiles(tmp_path))
        with pytest.raises(ClockNotPublished, match=r"virtual workers \[1\] at clock 3"):
            read(again, 0)
        send(again, 1, buffers_of(1))

        assert torch.equal(read(again, 2)[0], (buffers_of(0)[0] + buffers_of(1)[0]) * 0.5)

    def test_so_is_what_the_buffers_became_before(self, tmp_path: Path) -> None:
        barrier = Barrier(3, {0: False})
        buffers = BufferExchange(barrier.attendance, BufferFiles(tmp_path))
        for clock in (3, 5, 8):
            barrier.clock = clock
            send(buffers, 0, buffers_of(clock), clock=clock)
        assert sorted(path.name for path in tmp_path.iterdir()) == [
            "clock-000000000005-vw-0-stage-0",
            "clock-000000000008-vw-0-stage-0",
        ]
        again = BufferExchange(barrier.attendance, BufferFiles(tmp_path))
        barrier.clock, barrier.joins = 9, {0: True}
        send(again, 0, buffers_of(0), clock=9)
        assert torch.equal(read(again, 0, clock=9)[0], buffers_of(8)[0])

    def test_a_damaged_file_counts_for_nothing(self, tmp_path: Path) -> None:
        barrier = Barrier(3, {0: False})
        send(BufferExchange(barrier.attendance, BufferFiles(tmp_path)), 0, buffers_of(0))
        (path,) = tmp_path.iterdir()
        whole = path.read_bytes()
        for damaged in (whole[:-1], whole[:-4] + b"abcd", b""):
            path.write_bytes(damaged)
            again = BufferExchange(barrier.attendance, BufferFiles(tmp_path))
            with pytest.raises(ClockNotPublished):
                read(again, 0)

    def test_a_disk_that_takes_nothing_stops_nobody(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        buffers = BufferExchange(Barrier(3, {0: False}).attendance, BufferFiles(tmp_path / "file"))
        send(buffers, 0, buffers_of(0))
        assert torch.equal(read(buffers, 0)[0], buffers_of(0)[0])
