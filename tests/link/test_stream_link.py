"""The gRPC link keeps the contract of all links, tells a crash from a good-bye, and knows whom it talks to."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import grpc
import pytest
import torch

from hetpipe.certs.authority import Authority, new_key
from hetpipe.errors import (
    DeadlineExceeded,
    HetpipeError,
    LinkClosed,
    MalformedFrame,
    PeerUnreachable,
    PermissionDenied,
    PortInUse,
    ProtocolViolation,
    Unauthenticated,
)
from hetpipe.link.policy import Link, LinkLimits
from hetpipe.link.stream import credit_message, messages_of
from hetpipe.link.stream_link import StreamLink, StreamListener, call_stream
from hetpipe.link.wire import encode
from hetpipe.values.ids import Incarnation, JobId, Term
from hetpipe.values.requests import LinkHello, Requester
from hetpipe.wire import link_server, server
from hetpipe.wire.channel import as_is, open_channel
from hetpipe.wire.link_client import connect_link
from hetpipe.wire.link_stream import CALL, GrpcStream
from hetpipe.wire.tls import Tls
from tests.certs.cluster import AGENT, NoCertificate, cluster, stage_peer
from tests.link.between_processes import BetweenProcesses, Pace, close_together, closing_all, echoed_once
from tests.link.cuts import HOST, SECONDS, earlier, later, stage
from tests.support.forked import ForkedChild, start_forked
from tests.support.link_contract import Connect, LinkContract, frame, in_thread

_CHILD = """
from hetpipe.link.stream_link import StreamListener
from tests.link.cuts import earlier
listener = StreamListener(earlier(vw=0), host="127.0.0.1", offers_memory={memory})
print(listener.address, flush=True)
link = listener.accept(deadline_seconds=20)
link.send(link.receive(timeout_seconds=20), deadline_seconds=20)
{then}
"""


def connect(
    limits: LinkLimits,
    *,
    up: Pace = None,
    down: Pace = None,
    tls: tuple[Tls | None, Tls | None] = (None, None),
    memory: bool = False,
) -> tuple[Link, Link]:
    """Both ends of a new link, of the earlier and of the later stage, with the times of what they send."""
    listener = StreamListener(earlier(limits, pace=down), host=HOST, tls=tls[0], offers_memory=memory)
    called = call_stream(later(limits, pace=up), listener.address, tls=tls[1], deadline_seconds=SECONDS)
    return listener.accept(deadline_seconds=SECONDS), called


def tls_of(index: int, *, job: str = "job-1", vw: int = 3) -> Tls:
    return cluster().tls(stage_peer(job, vw, index, incarnation=4, term=2))


class TestGrpcLink(LinkContract):
    """The stage that serves sends."""

    @pytest.fixture
    def connect(self) -> Iterator[Connect]:
        with closing_all(connect) as made:
            yield made


class TestGrpcLinkWithTls(LinkContract):
    """The stage that calls sends."""

    @pytest.fixture
    def connect(self) -> Iterator[Connect]:
        with closing_all(lambda limits: connect(limits, tls=(tls_of(0), tls_of(1)))[::-1]) as made:
            yield made


class TestMemoryLink(LinkContract):
    """The stage that serves sends."""

    @pytest.fixture
    def connect(self) -> Iterator[Connect]:
        with closing_all(partial(connect, memory=True)) as made:
            yield made


class TestMemoryLinkWithTls(LinkContract):
    """The stage that calls sends."""

    @pytest.fixture
    def connect(self) -> Iterator[Connect]:
        with closing_all(lambda limits: connect(limits, tls=(tls_of(0), tls_of(1)), memory=True)[::-1]) as made:
            yield made


class TestGrpcBetweenProcesses(BetweenProcesses):
    memory = False

    def connect_paced(self, limits: LinkLimits, *, up: Pace = None, down: Pace = None) -> tuple[Link, Link]:
        return connect(limits, up=up, down=down, memory=self.memory)

    def with_child(self, then: str) -> tuple[Link, ForkedChild]:
        child = start_forked(_CHILD.format(then=then, memory=self.memory))
        address = child.line(timeout_seconds=SECONDS)
        return echoed_once(call_stream(later(vw=0), address, tls=None, deadline_seconds=SECONDS)), child


class TestMemoryBetweenProcesses(TestGrpcBetweenProcesses):
    memory = True


@pytest.fixture(params=[False, True], ids=["gRPC", "memory"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Link, Link]]:
    links = connect(LinkLimits(incoming_frames=3), memory=request.param)
    yield links
    close_together(*links)


def test_large_frames_arrive_bit_for_bit(pair: tuple[Link, Link]) -> None:
    tensors = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in (70_000, 1 << 20, 3_000_001, 5)]
    pair[1].send(frame(1, *tensors), deadline_seconds=SECONDS)
    received = pair[0].receive(timeout_seconds=SECONDS).tensors
    assert all(
        after is not None and torch.equal(before, after) for before, after in zip(tensors, received, strict=True)
    )


def test_credit_returns_for_as_long_as_frames_are_taken(pair: tuple[Link, Link]) -> None:
    for p in range(1, 50):
        pair[0].send(frame(p), deadline_seconds=SECONDS)
        received = pair[1].receive(timeout_seconds=SECONDS)
        assert received.minibatch == p


def test_sent_tensors_are_freed_once_they_are_gone(pair: tuple[Link, Link]) -> None:
    down, up = pair
    tensor = torch.ones(100_000)
    alive = tensor.untyped_storage()._weak_ref()
    down.send(frame(1, tensor), deadline_seconds=SECONDS)
    del tensor
    for p in (2, 3):  # the next frame's arrival shows that the one before was seen through
        down.send(frame(p), deadline_seconds=SECONDS)
    for _ in range(3):
        up.receive(timeout_seconds=SECONDS)
    down.close()
    assert torch.UntypedStorage._expired(alive)
    torch.UntypedStorage._free_weak_ref(alive)  # type: ignore[no-untyped-call]


# -- the end -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("victim", [0, 1], ids=["who serves", "who calls"])
def test_a_broken_stream_is_no_goodbye(pair: tuple[Link, Link], victim: int) -> None:
    broken, other = pair[victim], pair[1 - victim]
    assert isinstance(broken, StreamLink)
    thread, outcome = in_thread(lambda: other.receive(timeout_seconds=60, awaiting="the backward frame of minibatch 2"))
    broken._stream.cancel()
    thread.join(SECONDS)
    (error,) = outcome
    assert isinstance(error, LinkClosed)
    assert not error.orderly
    assert f"{other.peer} disconnected" in str(error)
    assert "the backward frame of minibatch 2" in str(error)
    with pytest.raises(LinkClosed, match=f"{other.peer} disconnected"):
        other.send(frame(2), deadline_seconds=SECONDS)


# -- a neighbour that breaks the rules ---------------------------------------------------------------------------------


def bare_call(listener: StreamListener, messages: list[bytes]) -> GrpcStream:
    """A caller with the right name that then sends what it likes."""
    stream = connect_link(
        listener.address, hello=LinkHello(stage(1), 3), neighbour=stage(0), tls=None, deadline_seconds=SECONDS
    )
    stream.send((message,) for message in messages)
    assert isinstance(stream, GrpcStream)
    return stream


def header_of(tensor: torch.Tensor) -> bytes:
    return b"".join(next(messages_of(encode(frame(1, tensor)))))


@pytest.mark.parametrize(
    ("messages", "match"),
    [
        ([b"nonsense"], "begins with b'n' between frames"),
        ([b""], "begins with b'' between frames"),
        ([credit_message(1)[:3]], "begins with b'C'"),
        ([header_of(torch.ones(400_000)), header_of(torch.ones(3))], "begins with b'F' within frames"),
        ([header_of(torch.ones(3)) + b"x"], "1 bytes follow the last tensor"),
        ([header_of(torch.ones(3))] * 4, "without credit: 3 are queued already"),
        ([header_of(torch.ones(0).reshape(0, 1 << 40))], "at most 1000 bytes"),
        ([b"F" + struct.pack("<I", 1 << 31) + b"HPF3"], "with a header of 2147483648"),
    ],
    ids=["nonsense", "nothing", "credit", "cut short", "too long", "no credit", "huge", "huge header"],
)
def test_a_broken_format_is_named_and_closes_the_link(messages: list[bytes], match: str) -> None:
    limits = LinkLimits(incoming_frames=3, frame_bytes=1000 if "1000" in match else 1 << 30)
    listener = StreamListener(earlier(limits), host=HOST)
    stream = bare_call(listener, messages)
    link = listener.accept(deadline_seconds=SECONDS)

    def receive_all() -> None:
        while True:
            link.receive(timeout_seconds=SECONDS) if "credit" not in match else threading.Event().wait(0.05)
            link.send(frame(1), deadline_seconds=SECONDS)

    with pytest.raises(MalformedFrame, match=f"stage 1 of virtual worker 3 violated the format.*{match}"):
        receive_all()
    with pytest.raises(PeerUnreachable):
        list(stream.incoming)
    stream.close()
    link.close()


def test_an_end_without_a_goodbye_is_no_good_order() -> None:
    listener = StreamListener(earlier(), host=HOST)
    stream = bare_call(listener, [])
    link = listener.accept(deadline_seconds=SECONDS)
    with pytest.raises(LinkClosed, match="without a goodbye") as caught:
        link.receive(timeout_seconds=SECONDS)
    assert not caught.value.orderly
    link.close()
    stream.close()


# -- who may come ------------------------------------------------------------------------------------------------------


def call_as(listener: StreamListener, own: Requester, neighbour: Requester, tls: Tls | None = None) -> Link:
    cut = replace(later(), own=own, neighbour=neighbour)
    return call_stream(cut, listener.address, tls=tls, deadline_seconds=SECONDS)


@pytest.fixture
def opened() -> Iterator[Callable[[Tls | None], StreamListener]]:
    with ExitStack() as stack:

        def listen(tls: Tls | None) -> StreamListener:
            listener = StreamListener(earlier(), host=HOST, tls=tls)
            stack.callback(listener.close)
            return listener

        yield listen


@pytest.mark.parametrize(
    "caller",
    [
        stage(2),
        stage(1, vw=4),
        replace(stage(1), job_id=JobId("job-2")),
        replace(stage(1), term=Term(3)),
        replace(stage(1), incarnation=Incarnation(5)),
    ],
    ids=["stage", "virtual worker", "job", "term", "incarnation"],
)
def test_only_the_neighbour_of_this_life_may_call(
    opened: Callable[[Tls | None], StreamListener], caller: Requester
) -> None:
    listener = opened(None)
    with pytest.raises(ProtocolViolation, match=r"connected where stage 1 of virtual worker 3 .* was expected"):
        call_as(listener, caller, stage(0))
    close_together(call_as(listener, stage(1), stage(0)), listener.accept(deadline_seconds=SECONDS))


def test_the_caller_looks_who_answers(opened: Callable[[Tls | None], StreamListener]) -> None:
    listener = opened(None)
    with pytest.raises(ProtocolViolation, match=r"stage 0 .* connected where stage 2 .* was expected"):
        call_as(listener, stage(1), stage(2))


def test_a_second_call_is_refused(opened: Callable[[Tls | None], StreamListener]) -> None:
    listener = opened(None)
    first = call_as(listener, stage(1), stage(0))
    with pytest.raises(ProtocolViolation, match="is already connected"):
        call_as(listener, stage(1), stage(0))
    close_together(first, listener.accept(deadline_seconds=SECONDS))


def test_room_for_nothing_is_refused(opened: Callable[[Tls | None], StreamListener]) -> None:
    with pytest.raises(ProtocolViolation, match="announced no capacity for a frame"):
        connect_link(
            opened(None).address, hello=LinkHello(stage(1), 0), neighbour=stage(0), tls=None, deadline_seconds=SECONDS
        )


@pytest.mark.parametrize("tls", [False, True], ids=["plaintext", "TLS"])
def test_who_says_nothing_is_not_waited_for(
    opened: Callable[[Tls | None], StreamListener], monkeypatch: pytest.MonkeyPatch, *, tls: bool
) -> None:
    monkeypatch.setattr(link_server, "HELLO_SECONDS", 0.05)
    monkeypatch.setattr(server, "_POLL_SECONDS", 0.02)
    listener = opened(tls_of(0) if tls else None)
    said = threading.Event()

    def nothing() -> Iterator[bytes]:
        said.wait(SECONDS)
        yield b""

    own = tls_of(1)
    credentials = own.channel_credentials(own.material) if tls else None
    name = stage_peer("job-1", 3, 0, incarnation=4, term=2).server_name
    with open_channel(listener.address, credentials=credentials, server_name=name) as channel:
        answers: Iterator[bytes] = iter(channel.stream_stream(CALL, as_is, as_is)(nothing()))
        with pytest.raises(grpc.RpcError, match=r"nothing was received for 0 s, and the limit is 0\.05 s"):
            next(answers)
        said.set()


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("another stage", PermissionDenied),
        ("another virtual worker", PermissionDenied),
        ("another job", PermissionDenied),
        ("an agent", PermissionDenied),
        ("a stranger", Unauthenticated),
        ("itself", Unauthenticated),
        ("the past", Unauthenticated),
        ("no certificate", Unauthenticated),
        ("nobody", HetpipeError),
    ],
)
def test_with_tls_only_the_certificate_of_the_neighbour_opens(
    opened: Callable[[Tls | None], StreamListener], name: str, error: type[HetpipeError]
) -> None:
    neighbour = stage_peer("job-1", 3, 1, incarnation=4, term=2)
    callers: dict[str, Callable[[], Tls | None]] = {
        "another stage": lambda: tls_of(2),
        "another virtual worker": lambda: tls_of(1, vw=4),
        "another job": lambda: tls_of(1, job="job-2"),
        "an agent": lambda: cluster().tls(AGENT),
        "a stranger": lambda: cluster().issued_by(
            Authority.new_root(), stage_peer("job-1", 3, 1, incarnation=4, term=2)
        ),
        "itself": lambda: cluster().issued_by(Authority(cluster().authority().certificate, new_key()), neighbour),
        "no certificate": lambda: NoCertificate(tls_of(1).folder),
        "the past": lambda: cluster().issued_by(cluster().authority(), neighbour, days=-0.001),
        "nobody": lambda: None,
    }
    listener = opened(tls_of(0))
    cut = later()
    with pytest.raises(error):
        call_stream(cut, listener.address, tls=callers[name](), deadline_seconds=0.3)
    close_together(call_as(listener, stage(1), stage(0), tls_of(1)), listener.accept(deadline_seconds=SECONDS))


def test_with_tls_nobody_else_can_play_the_stage_that_serves(opened: Callable[[Tls | None], StreamListener]) -> None:
    listener = opened(tls_of(2))
    with pytest.raises(Unauthenticated):
        call_stream(later(), listener.address, tls=tls_of(1), deadline_seconds=0.3)


# -- who does not come -------------------------------------------------------------------------------------------------


def test_a_neighbour_that_never_calls_is_named(opened: Callable[[Tls | None], StreamListener]) -> None:
    listener = opened(None)
    with pytest.raises(DeadlineExceeded, match=r"stage 0 of .* waited 0\.1 s for stage 1 of virtual worker 3 .* to"):
        listener.accept(deadline_seconds=0.1)


def test_a_neighbour_that_is_not_there_is_named() -> None:
    with pytest.raises(PeerUnreachable, match=r"stage 0 of virtual worker 3 .* at 127\.0\.0\.1:1 cannot be reached"):
        call_stream(later(), f"{HOST}:1", tls=None, deadline_seconds=0.2)


def test_a_taken_port_is_named() -> None:
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortInUse, match=rf"port {port} of {HOST}.*stage 0 .*choose other ports with --stage-port"):
            StreamListener(earlier(), host=HOST, port=port)
