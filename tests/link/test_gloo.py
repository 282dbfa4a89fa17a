"""The gloo link keeps the contract of all links, and tells a crash from a good-bye."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch

from hetpipe.errors import DeadlineExceeded, LinkClosed, MalformedFrame, PeerUnreachable, PortInUse, UserError
from hetpipe.link.gloo import GlooListener, call_gloo, connect_rendezvous, serve_rendezvous
from hetpipe.link.policy import Frame, FrameKind, Link, LinkLimits
from hetpipe.values.run import LinkTime
from tests.link.between_processes import BetweenProcesses, Pace, close_together, closing_all, echoed_once
from tests.link.cuts import HOST, SECONDS, earlier, later
from tests.support.forked import ForkedChild, start_forked
from tests.support.link_contract import Connect, LinkContract, frame, in_thread


def connect(limits: LinkLimits, *, up: Pace = None, down: Pace = None) -> tuple[Link, Link]:
    """Both ends of a new link, of the earlier and of the later stage, with the times of what they send."""
    listener = GlooListener(earlier(limits, pace=down), host=HOST)
    with ThreadPoolExecutor(1) as thread:
        accepted = thread.submit(listener.accept, deadline_seconds=SECONDS)
        called = call_gloo(later(limits, pace=up), listener.address, host=HOST, deadline_seconds=SECONDS)
    return accepted.result(), called


class TestGlooLink(LinkContract):
    @pytest.fixture
    def connect(self) -> Iterator[Connect]:
        with closing_all(connect) as made:
            yield made


class TestPacedGlooLink(LinkContract):
    """A link with emulated times promises the same."""

    @pytest.fixture
    def connect(self) -> Iterator[Connect]:
        pace = LinkTime(latency_seconds=0.001, bytes_per_second=1e9)
        with closing_all(partial(connect, up=pace, down=pace)) as made:
            yield made


class TestGlooBetweenProcesses(BetweenProcesses):
    def connect_paced(self, limits: LinkLimits, *, up: Pace = None, down: Pace = None) -> tuple[Link, Link]:
        return connect(limits, up=up, down=down)

    def with_child(self, then: str) -> tuple[Link, ForkedChild]:
        return with_child(then)


def test_the_ends_are_named() -> None:
    earlier, later = connect(LinkLimits())
    assert (later.own, later.peer) == ("stage 1 of virtual worker 3", "stage 0 of virtual worker 3")
    close_together(earlier, later)


_CHILD = """
import sys
from hetpipe.link.gloo import call_gloo
from tests.link.cuts import later
link = call_gloo(later(vw=0), sys.argv[1], host="127.0.0.1", deadline_seconds=20)
link.send(link.receive(timeout_seconds=20), deadline_seconds=20)
{then}
"""


def with_child(then: str) -> tuple[Link, ForkedChild]:
    """A link to a process that echoes one frame, then does `then`."""
    listener = GlooListener(earlier(vw=0), host=HOST)
    child = start_forked(_CHILD.format(then=then), listener.address)
    return echoed_once(listener.accept(deadline_seconds=SECONDS)), child


@pytest.mark.processes
def test_a_killed_neighbour_is_noticed_within_seconds() -> None:
    link, child = with_child("link.receive(timeout_seconds=60)")
    thread, outcome = in_thread(lambda: link.receive(timeout_seconds=60, awaiting="the backward frame of minibatch 2"))
    os.kill(child.pid, signal.SIGKILL)
    thread.join(5)
    (error,) = outcome
    assert isinstance(error, LinkClosed)
    assert not error.orderly
    assert "stage 1 of virtual worker 0 disconnected" in str(error)
    assert "the backward frame of minibatch 2" in str(error)
    with pytest.raises(LinkClosed, match="stage 1 of virtual worker 0 disconnected") as caught:
        link.send(frame(2), deadline_seconds=SECONDS)
    assert not caught.value.orderly
    child.wait(SECONDS)
    link.close()


def test_a_broken_format_is_named_and_closes_the_link() -> None:
    bad = (
        "import torch; from hetpipe.link.gloo import GlooChannel\n"
        "sender = link._sender\n"
        "queue = sender._queue\nwith queue.changed: queue.changed.wait_for(lambda: not queue.frames, 60)\n"
        "link._sender._connection.post_send(torch.full((100,), 7, dtype=torch.uint8), 0).wait()\n"
        "try: link.receive(timeout_seconds=60)\n"
        "except Exception: link.close()\n"
    )
    link, child = with_child(bad)
    with pytest.raises(MalformedFrame, match="stage 1 of virtual worker 0 violated the format"):
        link.receive(timeout_seconds=SECONDS)
    with pytest.raises(MalformedFrame):
        link.send(frame(2), deadline_seconds=SECONDS)
    link.close()
    child.wait(SECONDS)


def test_a_neighbour_that_never_connects_is_named() -> None:
    listener = GlooListener(earlier(vw=2), host=HOST)
    with pytest.raises(
        DeadlineExceeded, match=r"stage 0 of virtual worker 2 waited .* for stage 1 of virtual worker 2"
    ):
        listener.accept(deadline_seconds=0.2)


def test_a_rendezvous_that_nobody_serves() -> None:
    store, address = serve_rendezvous(HOST)
    del store
    with pytest.raises(PeerUnreachable, match=address):
        connect_rendezvous(address, deadline_seconds=0.2)


@pytest.mark.parametrize("address", ["nowhere", ":80", "host:", "host:http"])
def test_a_bad_rendezvous_address(address: str) -> None:
    with pytest.raises(UserError, match="HOST:PORT"):
        connect_rendezvous(address)


def test_an_address_of_another_machine_cannot_be_served() -> None:
    with pytest.raises(UserError, match=r"192\.0\.2\.1"):
        serve_rendezvous("192.0.2.1")


def test_a_taken_port_is_named() -> None:
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortInUse, match=f"port {port} of {HOST} is in use; choose other ports with --stage-port"):
            GlooListener(earlier(), host=HOST, port=port)


def test_the_rendezvous_listens_on_its_address_alone() -> None:
    store, address = serve_rendezvous(HOST)
    assert address == f"{HOST}:{store.port}"
    with pytest.raises(PeerUnreachable):
        connect_rendezvous(f"127.0.0.2:{store.port}", deadline_seconds=0.1)


def test_sent_tensors_are_freed_once_they_are_gone() -> None:
    down, up = connect(LinkLimits())
    tensor = torch.ones(100_000)
    alive = tensor.untyped_storage()._weak_ref()
    down.send(Frame(FrameKind.FORWARD, 1, 0, 0, (tensor,)), deadline_seconds=SECONDS)
    del tensor
    up.receive(timeout_seconds=SECONDS)
    for _ in range(2):  # the second frame's arrival shows that the first one was seen through
        down.send(frame(2), deadline_seconds=SECONDS)
        up.receive(timeout_seconds=SECONDS)
    down.close()
    assert torch.UntypedStorage._expired(alive)
    torch.UntypedStorage._free_weak_ref(alive)  # type: ignore[no-untyped-call]
    up.close()
