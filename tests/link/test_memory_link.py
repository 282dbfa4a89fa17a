"""Links through shared memory: what is refused, and what is left when an end is gone."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hetpipe.errors import LinkClosed, MalformedFrame, PeerUnreachable, ProtocolViolation, UserError
from hetpipe.link.policy import Link, LinkLimits
from hetpipe.link.stream_link import StreamLink, StreamListener, call_stream
from hetpipe.values.requests import LinkHello, LinkTransport, MemoryOffer
from hetpipe.wire import link_client, segment_server
from hetpipe.wire.channel import as_is, open_channel
from hetpipe.wire.codec import from_bytes, to_bytes
from hetpipe.wire.link_stream import CALL, GrpcStream, SegmentStream
from hetpipe.wire.segment import SEALS, SEGMENT_BYTES, Lane, SegmentRefused, make_segment
from hetpipe.wire.segment_client import fetch_segment
from tests.link.between_processes import close_together, echoed_once
from tests.link.cuts import HOST, SECONDS, earlier, later, stage
from tests.polling import wait_until
from tests.support.forked import start_forked
from tests.support.link_contract import frame, in_thread
from tests.support.segments import segments_of

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memfds are Linux's")


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = segments_of()
    yield
    wait_until(lambda: segments_of() == before, timeout_seconds=SECONDS, what="segments freed")
    assert "hetpipe-segment" not in "".join(path.name for path in Path("/dev/shm").iterdir())


def connected(limits: LinkLimits | None = None) -> tuple[StreamListener, Link, Link]:
    listener = StreamListener(earlier(limits), host=HOST, offers_memory=True)
    with ThreadPoolExecutor(1) as thread:
        accepted = thread.submit(listener.accept, deadline_seconds=SECONDS)
        called = call_stream(later(limits), listener.address, tls=None, deadline_seconds=SECONDS)
        return listener, accepted.result(), called


def stream_of(link: Link) -> object:
    assert isinstance(link, StreamLink)
    return link._stream


def test_frames_go_through_memory_and_the_port_is_free_again() -> None:
    listener, first, last = connected()
    assert isinstance(stream_of(first), SegmentStream)
    assert isinstance(stream_of(last), SegmentStream)
    assert listener.refusal == ""
    host, _, port = listener.address.rpartition(":")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)), timeout=SECONDS)
    tensors = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in (70_000, 1 << 20, 3_000_001, 5)]
    last.send(frame(1, *tensors), deadline_seconds=SECONDS)
    received = first.receive(timeout_seconds=SECONDS).tensors
    assert all(
        after is not None and torch.equal(before, after) for before, after in zip(tensors, received, strict=True)
    )
    close_together(first, last)


def test_a_frame_with_the_largest_head_fits() -> None:
    _, first, last = connected()
    sent = frame(1, *([torch.ones(60_000, dtype=torch.uint8)] + [torch.ones(1 << 20, dtype=torch.uint8)] * 3))
    first.send(sent, deadline_seconds=SECONDS)
    received = last.receive(timeout_seconds=SECONDS)
    assert [tensor is not None and tensor.numel() for tensor in received.tensors] == [60_000] + [1 << 20] * 3
    close_together(first, last)


# -- refusals ----------------------------------------------------------------------------------------------------------


def falls_back(why: str) -> None:
    """The link is made, through gRPC, says why, and works."""
    listener, first, last = connected()
    assert why in listener.refusal
    assert isinstance(stream_of(first), GrpcStream)
    assert isinstance(stream_of(last), GrpcStream)
    for sender, receiver in ((first, last), (last, first)):
        sender.send(frame(1, torch.ones(300_000)), deadline_seconds=SECONDS)
        assert receiver.receive(timeout_seconds=SECONDS).minibatch == 1
    close_together(first, last)


@pytest.fixture
def refusals(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    said: list[str] = []

    class Log:
        def warning(self, event: str, *, reason: str) -> None:
            said.append(f"{event}: {reason}")

        def info(self, event: str, **_: object) -> None:
            pass

    monkeypatch.setattr(segment_server, "_log", Log())
    return said


@pytest.mark.parametrize("which", [0, 1], ids=["first", "second"])
def test_a_wrong_token(monkeypatch: pytest.MonkeyPatch, refusals: list[str], which: int) -> None:
    asked: list[MemoryOffer] = []

    def fetch(offer: MemoryOffer) -> Lane:
        asked.append(offer)
        return fetch_segment(replace(offer, token="0" * 64) if len(asked) == which + 1 else offer)

    monkeypatch.setattr(link_client, "fetch_segment", fetch)
    falls_back("no segment was passed: the token was refused")
    assert refusals == ["segment_refused: the token is unknown, used already, or too old"]


@pytest.mark.parametrize(
    ("num_bytes", "seals", "why"),
    [
        (SEGMENT_BYTES, 0, "must be sealed against shrinking, growing and further seals"),
        (2 * SEGMENT_BYTES, SEALS, f"a segment has {SEGMENT_BYTES} bytes"),
    ],
    ids=["seals", "size"],
)
def test_a_wrong_size_and_missing_seals(monkeypatch: pytest.MonkeyPatch, num_bytes: int, seals: int, why: str) -> None:
    send_fds = socket.send_fds

    def passed(connection: socket.socket, data: list[bytes], _: Sequence[int]) -> int:
        bad = make_segment(num_bytes, seals=seals)
        try:
            return send_fds(connection, data, [bad])
        finally:
            os.close(bad)

    monkeypatch.setattr("hetpipe.wire.segment_server.socket.send_fds", passed)
    falls_back(why)


def test_a_system_without_memfds(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> int:
        raise OSError("no memfds")

    monkeypatch.setattr(segment_server, "make_segment", none)
    falls_back("this process cannot share memory")


def test_a_link_that_needs_memory_is_refused_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> int:
        raise OSError("no memfds")

    monkeypatch.setattr(segment_server, "make_segment", none)
    listener = StreamListener(earlier(), host=HOST, offers_memory=True)
    with pytest.raises(UserError, match="cannot share memory with stage 0"):
        call_stream(later(), listener.address, tls=None, deadline_seconds=SECONDS, needs_memory=True)
    with pytest.raises(PeerUnreachable, match="left while it was offered memory"):
        listener.accept(deadline_seconds=SECONDS)
    listener.close()


def bare_call(address: str, answer: Callable[[tuple[MemoryOffer, ...]], bytes]) -> None:
    """A neighbour with the right name that answers the offers as it likes."""
    offered: list[tuple[MemoryOffer, ...]] = []

    def messages() -> Iterator[bytes]:
        yield to_bytes(LinkHello(stage(1), 3))
        wait_until(lambda: bool(offered), timeout_seconds=SECONDS, what="offers")
        yield answer(offered[0])

    with open_channel(address) as channel:
        answers: Iterator[bytes] = iter(channel.stream_stream(CALL, as_is, as_is)(messages()))
        offered.append(from_bytes(LinkHello, next(answers)).memory)
        list(answers)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (to_bytes(LinkTransport("")), "claims a shared-memory segment that it has not fetched"),
        (b"\xff\xff", "not a valid LinkTransport"),
    ],
    ids=["not fetched", "garbage"],
)
def test_a_neighbour_that_answers_wrongly_is_refused(answer: bytes, why: str) -> None:
    listener = StreamListener(earlier(), host=HOST, offers_memory=True)
    with pytest.raises(Exception, match=why):
        bare_call(listener.address, lambda _: answer)
    with pytest.raises(ProtocolViolation, match=why):
        listener.accept(deadline_seconds=SECONDS)
    listener.close()


def test_a_broken_format_is_named_and_closes_the_link() -> None:
    listener = StreamListener(earlier(), host=HOST, offers_memory=True)
    hello = LinkHello(stage(1), 3)
    bare = link_client.connect_link(
        listener.address, hello=hello, neighbour=stage(0), tls=None, deadline_seconds=SECONDS, needs_memory=True
    )
    bare.send(iter([(b"nonsense",)]))
    link = listener.accept(deadline_seconds=SECONDS)
    with pytest.raises(MalformedFrame, match=r"violated the format of the link: a message of 8 bytes begins with b'n'"):
        link.receive(timeout_seconds=SECONDS)
    with pytest.raises(PeerUnreachable, match="the other process is gone"):
        list(bare.receive(bytes))
    bare.close()
    link.close()


def test_a_token_is_good_once(refusals: list[str]) -> None:
    listener = StreamListener(earlier(), host=HOST, offers_memory=True)

    def twice(offers: tuple[MemoryOffer, ...]) -> bytes:
        with closing(fetch_segment(offers[0])), pytest.raises(SegmentRefused, match="the token was refused"):
            fetch_segment(offers[0])
        return b"\xff\xff"

    with pytest.raises(Exception, match="not a valid LinkTransport"):
        bare_call(listener.address, twice)
    listener.close()
    assert refusals == ["segment_refused: the token is unknown, used already, or too old"]


# -- deaths ------------------------------------------------------------------------------------------------------------

_SERVES = """
from hetpipe.link.stream_link import StreamListener
from tests.link.cuts import earlier
listener = StreamListener(earlier(vw=0), host="127.0.0.1", offers_memory=True)
print(listener.address, flush=True)
link = listener.accept(deadline_seconds=20)
"""
_CALLS = """
import sys
from hetpipe.link.stream_link import call_stream
from tests.link.cuts import later
link = call_stream(later(vw=0), sys.argv[1], tls=None, deadline_seconds=20, needs_memory=True)
"""
_THEN = """
link.send(link.receive(timeout_seconds=20), deadline_seconds=20)
import signal
signal.pause()
"""


@pytest.mark.processes
@pytest.mark.parametrize("victim", ["who serves", "who calls"])
def test_a_neighbour_that_is_killed_leaves_nothing(victim: str) -> None:
    before = segments_of()
    if victim == "who serves":
        child = start_forked(_SERVES + _THEN)
        address = child.line(timeout_seconds=SECONDS)
        link = call_stream(later(vw=0), address, tls=None, deadline_seconds=SECONDS, needs_memory=True)
    else:
        listener = StreamListener(earlier(vw=0), host=HOST, offers_memory=True)
        child = start_forked(_CALLS + _THEN, listener.address)
        link = listener.accept(deadline_seconds=SECONDS)
    echoed_once(link)
    stream = stream_of(link)
    assert isinstance(stream, SegmentStream)
    ends = (stream._incoming.connection.getpeername(), stream._incoming.connection.getsockname())
    name = b"".join(filter(None, ends)).strip(b"\0").decode()
    assert name in Path("/proc/net/unix").read_text()
    assert segments_of(child.pid) == 4, "two mappings, and the descriptors that Python keeps with them"
    assert segments_of() == before + 4
    thread, outcome = in_thread(lambda: link.receive(timeout_seconds=60, awaiting="the next frame"))
    os.kill(child.pid, signal.SIGKILL)
    thread.join(SECONDS)
    (error,) = outcome
    assert isinstance(error, LinkClosed)
    assert not error.orderly
    assert f"{link.peer} disconnected" in str(error)
    child.wait(SECONDS)
    link.close()
    assert segments_of() == before
    assert name not in Path("/proc/net/unix").read_text()
