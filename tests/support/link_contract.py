"""What every link must do, as a test suite that the tests of each implementation inherit.

A subclass gives the fixture `connect`: called with limits, it returns both ends of a new link, and closes them after
the test.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from hetpipe.errors import DeadlineExceeded, LinkClosed, PlanError, ResourceExhausted
from hetpipe.link.policy import MAX_RANK, MAX_TENSORS, Frame, FrameKind, Link, LinkLimits
from hetpipe.values.plan import DTYPE_BYTES

Connect = Callable[[LinkLimits], tuple[Link, Link]]

_SECONDS = 10.0
_SHORT = 0.05
_SMALL = LinkLimits(outgoing_frames=2, incoming_frames=3, close_seconds=_SECONDS)


def frame(minibatch: int, *tensors: torch.Tensor | None, kind: FrameKind = FrameKind.FORWARD) -> Frame:
    """A frame whose other numbers follow from `minibatch`."""
    return Frame(kind, minibatch, clock=minibatch // 4, local_through=max(0, minibatch - 4), tensors=tensors)


def bits(tensor: torch.Tensor) -> bytes:
    """The raw elements, so that NaNs compare equal when their bits do."""
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist())


def in_thread(call: Callable[[], object]) -> tuple[threading.Thread, list[BaseException | object]]:
    """Run `call` in a thread; the list gets its result or its exception."""
    outcome: list[BaseException | object] = []

    def run() -> None:
        try:
            outcome.append(call())
        except Exception as error:  # noqa: BLE001 - the test looks at it
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, outcome


class LinkContract:
    """Inherit and define the fixture `connect`."""

    @pytest.fixture
    def connect(self) -> Connect:
        """Makes both ends of a new link; subclasses override it."""
        raise NotImplementedError

    @pytest.fixture
    def pair(self, connect: Connect) -> tuple[Link, Link]:
        """Both ends of a link with small bounds."""
        return connect(_SMALL)

    def exchange(self, pair: tuple[Link, Link], sent: Frame) -> Frame:
        """Send from the first end, receive at the second."""
        pair[0].send(sent, deadline_seconds=_SECONDS)
        return pair[1].receive(timeout_seconds=_SECONDS)

    def test_header_arrives_as_sent_for_every_kind(self, pair: tuple[Link, Link]) -> None:
        for kind in FrameKind:
            received = self.exchange(pair, Frame(kind, 2**40, clock=7, local_through=3))
            assert (received.kind, received.minibatch, received.clock, received.local_through) == (kind, 2**40, 7, 3)
            assert received.tensors == ()

    @pytest.mark.parametrize("num_elements", [5, 40_000])
    def test_tensors_of_every_dtype_arrive_bit_for_bit(self, pair: tuple[Link, Link], num_elements: int) -> None:
        generator = torch.Generator().manual_seed(num_elements)
        for name in DTYPE_BYTES:
            dtype = getattr(torch, name)
            raw = torch.randint(0, 256, (num_elements * dtype.itemsize,), dtype=torch.uint8, generator=generator)
            tensor = (raw % 2).view(torch.bool) if dtype is torch.bool else raw.view(dtype)
            (received,) = self.exchange(pair, frame(1, tensor)).tensors
            assert received is not None
            assert received.dtype == dtype
            assert bits(received) == bits(tensor)

    def test_number_and_shapes_vary_from_frame_to_frame(self, pair: tuple[Link, Link]) -> None:
        shapes: list[tuple[tuple[int, ...], ...]] = [
            ((3, 4),),
            (),
            ((), (0, 5), (1,) * MAX_RANK),
            ((200, 100), (7,), (64, 1024), (0,), (2, 2)),
            ((512, 1024), (512, 1024)),
            ((1,),) * MAX_TENSORS,
        ]
        for p, wanted in enumerate(shapes, start=1):
            sent = frame(p, *(torch.randn(shape) for shape in wanted))
            received = self.exchange(pair, sent)
            assert received.minibatch == p
            assert [t is not None and tuple(t.shape) for t in received.tensors] == list(wanted)
            for before, after in zip(sent.tensors, received.tensors, strict=True):
                assert before is not None
                assert after is not None
                assert torch.equal(before, after)

    def test_a_missing_gradient_stays_missing(self, pair: tuple[Link, Link]) -> None:
        sent = frame(1, None, torch.ones(2), None, torch.ones(30_000), None, kind=FrameKind.BACKWARD)
        received = self.exchange(pair, sent)
        assert [t is None for t in received.tensors] == [True, False, True, False, True]

    def test_received_tensors_are_contiguous_aligned_and_detached(self, pair: tuple[Link, Link]) -> None:
        base = torch.randn(300, 200, dtype=torch.float64, requires_grad=True)
        channels_last = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
        sent = (base.t(), base[1:, 3:], base[0, 1:3], channels_last, torch.randn(()).expand(5, 5), base.flip(0))
        received = self.exchange(pair, frame(1, *sent)).tensors
        for before, after in zip(sent, received, strict=True):
            assert after is not None
            assert torch.equal(before, after)
            assert after.is_contiguous()
            assert after.data_ptr() % 64 == 0
            assert after.storage_offset() == 0
            assert not after.requires_grad

    @pytest.mark.parametrize("size", [4, 100_000])
    def test_the_receiver_may_change_what_it_got(self, pair: tuple[Link, Link], size: int) -> None:
        tensor = torch.ones(size)
        (received,) = self.exchange(pair, frame(1, tensor)).tensors
        assert received is not None
        received.add_(1)
        assert torch.equal(tensor, torch.ones(size))

    def test_frames_keep_their_order_both_ways_at_once(self, pair: tuple[Link, Link]) -> None:
        count = 60

        def send_all(link: Link) -> None:
            for p in range(1, count + 1):
                link.send(frame(p, torch.full(((p * 997) % 40_000,), p)), deadline_seconds=_SECONDS)

        threads = [in_thread(lambda link=link: send_all(link)) for link in pair]  # type: ignore[misc]
        for p in range(1, count + 1):
            for link in pair:
                received = link.receive(timeout_seconds=_SECONDS)
                assert received.minibatch == p
                (tensor,) = received.tensors
                assert tensor is not None
                assert torch.equal(tensor, torch.full(((p * 997) % 40_000,), p))
        for thread, outcome in threads:
            thread.join(_SECONDS)
            assert outcome == [None]

    def test_a_receive_that_times_out_names_the_wait_and_does_no_harm(self, pair: tuple[Link, Link]) -> None:
        with pytest.raises(DeadlineExceeded) as caught:
            pair[1].receive(timeout_seconds=_SHORT, awaiting="the forward frame of minibatch 5")
        for words in (pair[1].own, pair[1].peer, "the forward frame of minibatch 5", "0.1 s"):
            assert words in str(caught.value)
        assert self.exchange(pair, frame(5, torch.ones(3))).minibatch == 5

    def test_a_full_link_holds_the_sender_back_and_loses_nothing(self, pair: tuple[Link, Link]) -> None:
        a, b = pair
        room = _SMALL.outgoing_frames + _SMALL.incoming_frames
        for p in range(1, room + 1):
            a.send(frame(p, torch.full((30_000,), p)), deadline_seconds=_SECONDS)
        with pytest.raises(DeadlineExceeded) as caught:
            a.send(frame(99), deadline_seconds=_SHORT)
        for words in (a.own, a.peer, "forward frame of minibatch 99"):
            assert words in str(caught.value)
        received = [b.receive(timeout_seconds=_SECONDS).minibatch for _ in range(room)]
        assert received == list(range(1, room + 1))
        a.send(frame(100), deadline_seconds=_SECONDS)
        assert b.receive(timeout_seconds=_SECONDS).minibatch == 100

    def test_a_blocked_send_goes_on_when_there_is_room(self, pair: tuple[Link, Link]) -> None:
        a, b = pair
        count = 3 * (_SMALL.outgoing_frames + _SMALL.incoming_frames)

        def send_all() -> None:
            for p in range(count):
                a.send(frame(p), deadline_seconds=_SECONDS)

        thread, outcome = in_thread(send_all)
        assert [b.receive(timeout_seconds=_SECONDS).minibatch for _ in range(count)] == list(range(count))
        thread.join(_SECONDS)
        assert outcome == [None]

    @pytest.mark.parametrize(
        ("tensors", "error"),
        [
            ((torch.ones(2, dtype=torch.complex64),), PlanError),
            ((torch.ones(2, 2).to_sparse(),), PlanError),
            ((torch.ones((1,) * (MAX_RANK + 1)),), PlanError),
            ((torch.ones(1),) * (MAX_TENSORS + 1), ResourceExhausted),
            ((torch.ones(100), torch.ones(200)), ResourceExhausted),
        ],
        ids=["complex", "sparse", "rank", "number", "bytes"],
    )
    def test_what_cannot_be_sent_is_refused_and_does_no_harm(
        self, connect: Connect, tensors: tuple[torch.Tensor, ...], error: type[Exception]
    ) -> None:
        pair = connect(LinkLimits(frame_bytes=1000))
        with pytest.raises(error):
            pair[0].send(frame(1, *tensors), deadline_seconds=_SECONDS)
        assert self.exchange(pair, frame(2, torch.ones(250))).minibatch == 2

    def test_frames_sent_before_close_still_arrive(self, pair: tuple[Link, Link]) -> None:
        a, b = pair
        for p in (1, 2):
            a.send(frame(p, torch.full((50_000,), p)), deadline_seconds=_SECONDS)
        a.close()
        assert [b.receive(timeout_seconds=_SECONDS).minibatch for _ in range(2)] == [1, 2]
        for _ in range(2):
            with pytest.raises(LinkClosed) as caught:
                b.receive(timeout_seconds=_SECONDS, awaiting="the last gradient")
            assert caught.value.orderly
            assert a.own in str(caught.value)
            assert "the last gradient" in str(caught.value)
        with pytest.raises(LinkClosed) as caught:
            b.send(frame(3), deadline_seconds=_SECONDS)
        assert caught.value.orderly

    def test_close_is_idempotent_and_final(self, pair: tuple[Link, Link]) -> None:
        a, _ = pair
        a.close()
        a.close()
        with pytest.raises(LinkClosed):
            a.send(frame(1), deadline_seconds=_SECONDS)
        with pytest.raises(LinkClosed):
            a.receive(timeout_seconds=_SECONDS)
        with pytest.raises(LinkClosed):
            a.try_receive()

    def test_close_drops_what_was_not_received(self, pair: tuple[Link, Link]) -> None:
        a, b = pair
        arrived = threading.Event()
        b.watch(arrived.set)
        arrived.clear()
        a.send(frame(1), deadline_seconds=_SECONDS)
        assert arrived.wait(_SECONDS)
        b.close()
        with pytest.raises(LinkClosed):
            b.receive(timeout_seconds=_SECONDS)

    def test_close_ends_a_blocked_receive_at_both_ends(self, pair: tuple[Link, Link]) -> None:
        a, b = pair
        waits = [in_thread(lambda link=link: link.receive(timeout_seconds=60)) for link in pair]  # type: ignore[misc]
        a.close()
        for thread, outcome in waits:
            thread.join(_SECONDS)
            assert not thread.is_alive()
            (error,) = outcome
            assert isinstance(error, LinkClosed)
            assert error.orderly
        b.close()

    def test_close_of_the_other_end_ends_a_blocked_send(self, pair: tuple[Link, Link]) -> None:
        a, b = pair

        def send_for_ever() -> None:
            while True:
                a.send(frame(1, torch.ones(50_000)), deadline_seconds=60)

        thread, outcome = in_thread(send_for_ever)
        b.receive(timeout_seconds=_SECONDS)
        b.close()
        thread.join(_SECONDS)
        (error,) = outcome
        assert isinstance(error, LinkClosed)
        assert error.orderly

    def test_own_close_ends_a_blocked_send(self, connect: Connect) -> None:
        a, _ = connect(LinkLimits(outgoing_frames=1, incoming_frames=1, close_seconds=_SHORT))

        def send_for_ever() -> None:
            while True:
                a.send(frame(1, torch.ones(50_000)), deadline_seconds=60)

        thread, outcome = in_thread(send_for_ever)
        thread.join(_SHORT)
        a.close()
        thread.join(_SECONDS)
        (error,) = outcome
        assert isinstance(error, LinkClosed)

    def test_try_receive_never_blocks(self, pair: tuple[Link, Link]) -> None:
        a, b = pair
        assert b.try_receive() is None
        arrived = threading.Event()
        b.watch(arrived.set)
        assert arrived.is_set()
        arrived.clear()
        a.send(frame(8), deadline_seconds=_SECONDS)
        assert arrived.wait(_SECONDS)
        received = b.try_receive()
        assert received is not None
        assert received.minibatch == 8

    def test_watch_also_tells_of_the_end(self, pair: tuple[Link, Link]) -> None:
        a, b = pair
        told = threading.Semaphore(0)
        b.watch(lambda: told.release())  # noqa: PLW0108 - release takes an argument
        assert told.acquire(timeout=_SECONDS)
        a.close()
        assert told.acquire(timeout=_SECONDS)
        with pytest.raises(LinkClosed):
            b.try_receive()

    def test_names(self, pair: tuple[Link, Link]) -> None:
        a, b = pair
        assert a.own == b.peer != a.peer == b.own
