"""The gloo link keeps the contract of all links, and tells a crash from a good-bye."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
import torch

from hetpipe.errors import DeadlineExceeded, LinkClosed, MalformedFrame, PeerUnreachable, UserError
from hetpipe.link.gloo import connect_gloo, connect_rendezvous, serve_rendezvous
from hetpipe.link.policy import Frame, FrameKind, Link, LinkLimits
from hetpipe.spec.run import LinkTime
from hetpipe.testing.link_contract import Connect, LinkContract, frame, in_thread

_HOST = "127.0.0.1"
_SECONDS = 20.0


Pace = LinkTime | None


def connect_stages(
    num_stages: int, limits: LinkLimits, *, paces: tuple[Pace, Pace] = (None, None)
) -> list[tuple[Link | None, Link | None]]:
    """The links of all stages of one virtual worker, each connected from a thread of its own."""
    store, address = serve_rendezvous(_HOST)
    links: list[tuple[Link | None, Link | None]] = [(None, None)] * num_stages

    def connect(stage: int) -> None:
        own = store if stage == 0 else connect_rendezvous(address)
        links[stage] = connect_gloo(
            own,
            vw=3,
            stage=stage,
            num_stages=num_stages,
            host=_HOST,
            deadline_seconds=_SECONDS,
            limits=limits,
            paces=paces,
        )

    threads = [in_thread(lambda stage=stage: connect(stage)) for stage in range(num_stages)]  # type: ignore[misc]
    for thread, outcome in threads:
        thread.join(_SECONDS)
        assert outcome == [None]
    return links


class TestGlooLink(LinkContract):
    @pytest.fixture
    def connect(self) -> Iterator[Connect]:
        before = set(threading.enumerate())
        made: list[Link] = []

        def connect(limits: LinkLimits) -> tuple[Link, Link]:
            (_, down), (up, _) = connect_stages(2, limits)
            assert down is not None
            assert up is not None
            made.extend((down, up))
            return down, up

        yield connect
        # Ends that were left open close together, as the stages of a pipeline do.
        for thread, _ in [in_thread(link.close) for link in made]:
            thread.join(_SECONDS)
        leaked = [thread.name for thread in set(threading.enumerate()) - before if thread.name.startswith("link: ")]
        assert leaked == []


class TestPacedGlooLink(LinkContract):
    """A link with emulated times promises the same."""

    @pytest.fixture
    def connect(self) -> Iterator[Connect]:
        made: list[Link] = []

        def connect(limits: LinkLimits) -> tuple[Link, Link]:
            pace = LinkTime(latency_seconds=0.001, bytes_per_second=1e9)
            (_, down), (up, _) = connect_stages(2, limits, paces=(pace, pace))
            assert down is not None
            assert up is not None
            made.extend((down, up))
            return down, up

        yield connect
        for thread, _ in [in_thread(link.close) for link in made]:
            thread.join(_SECONDS)


def test_a_paced_link_holds_each_frame_back(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def seconds(_: LinkTime, num_bytes: int) -> float:
        asked.append(num_bytes)
        return 0.0

    monkeypatch.setattr(LinkTime, "seconds", seconds)
    (_, down), (up, _) = connect_stages(2, LinkLimits(), paces=(None, LinkTime(1.0, 1.0)))
    assert down is not None
    assert up is not None
    down.send(frame(1, torch.ones(10), None, torch.ones(1000, dtype=torch.float64)), deadline_seconds=_SECONDS)
    assert up.receive(timeout_seconds=_SECONDS).minibatch == 1
    up.send(frame(1, torch.ones(10), kind=FrameKind.BACKWARD), deadline_seconds=_SECONDS)
    assert down.receive(timeout_seconds=_SECONDS).minibatch == 1
    assert asked == [8040], "one way only is paced"
    for thread, _ in [in_thread(link.close) for link in (down, up)]:
        thread.join(_SECONDS)


def test_three_stages_find_their_neighbours() -> None:
    links = connect_stages(3, LinkLimits())
    assert links[0][0] is None
    assert links[2][1] is None
    (_, first), (up, down), (last, _) = links
    assert first is not None
    assert up is not None
    assert down is not None
    assert last is not None
    assert (up.own, up.peer) == ("stage 1 of virtual worker 3", "stage 0 of virtual worker 3")
    first.send(frame(1, torch.ones(4)), deadline_seconds=_SECONDS)
    down.send(up.receive(timeout_seconds=_SECONDS), deadline_seconds=_SECONDS)
    assert last.receive(timeout_seconds=_SECONDS).minibatch == 1
    for link in (first, up, down, last):
        link.close()


def test_one_stage_has_no_links() -> None:
    assert connect_stages(1, LinkLimits()) == [(None, None)]


_CHILD = """
import sys
from hetpipe.link.gloo import connect_gloo, connect_rendezvous
store = connect_rendezvous(sys.argv[1])
link, _ = connect_gloo(store, vw=0, stage=1, num_stages=2, host="127.0.0.1", deadline_seconds=20)
link.send(link.receive(timeout_seconds=20), deadline_seconds=20)
{then}
"""


def with_child(then: str) -> tuple[Link, subprocess.Popen[bytes]]:
    """A link to a process that echoes one frame, then does `then`."""
    store, address = serve_rendezvous(_HOST)
    child = subprocess.Popen([sys.executable, "-c", _CHILD.format(then=then), address])
    _, link = connect_gloo(store, vw=0, stage=0, num_stages=2, host=_HOST, deadline_seconds=_SECONDS)
    assert link is not None
    sent = frame(1, torch.arange(100_000))
    link.send(sent, deadline_seconds=_SECONDS)
    (tensor,) = link.receive(timeout_seconds=_SECONDS).tensors
    assert tensor is not None
    assert torch.equal(tensor, torch.arange(100_000))
    return link, child


@pytest.mark.processes
def test_a_killed_neighbour_is_noticed_within_seconds() -> None:
    link, child = with_child("link.receive(timeout_seconds=60)")
    thread, outcome = in_thread(lambda: link.receive(timeout_seconds=60, awaiting="the backward frame of minibatch 2"))
    os.kill(child.pid, signal.SIGKILL)
    thread.join(5)
    (error,) = outcome
    assert isinstance(error, LinkClosed)
    assert not error.orderly
    assert "stage 1 of virtual worker 0 went away" in str(error)
    assert "the backward frame of minibatch 2" in str(error)
    with pytest.raises(LinkClosed, match="stage 1 of virtual worker 0 went away") as caught:
        link.send(frame(2), deadline_seconds=_SECONDS)
    assert not caught.value.orderly
    child.wait(_SECONDS)
    link.close()


@pytest.mark.processes
def test_a_kill_ends_a_blocked_send() -> None:
    link, child = with_child("import signal; signal.pause()")

    def send_for_ever() -> None:
        while True:
            link.send(frame(1, torch.ones(50_000)), deadline_seconds=60)

    thread, outcome = in_thread(send_for_ever)
    os.kill(child.pid, signal.SIGKILL)
    thread.join(5)
    (error,) = outcome
    assert isinstance(error, LinkClosed)
    assert not error.orderly
    child.wait(_SECONDS)
    link.close()


@pytest.mark.processes
def test_a_process_that_forgets_to_close_still_says_goodbye() -> None:
    link, child = with_child("")
    with pytest.raises(LinkClosed) as caught:
        link.receive(timeout_seconds=_SECONDS)
    assert caught.value.orderly
    assert child.wait(_SECONDS) == 0
    link.close()


def test_a_broken_format_is_named_and_closes_the_link() -> None:
    bad = (
        "import torch; from hetpipe.link.gloo_halves import Connection\n"
        "sender = link._sender\n"
        "with sender._changed: sender._changed.wait_for(lambda: not sender._under_way, 60)\n"
        "link._sender._connection.post_send(torch.full((100,), 7, dtype=torch.uint8), 0).wait()\n"
        "try: link.receive(timeout_seconds=60)\n"
        "except Exception: link.close()\n"
    )
    link, child = with_child(bad)
    with pytest.raises(MalformedFrame, match="stage 1 of virtual worker 0 broke the format"):
        link.receive(timeout_seconds=_SECONDS)
    with pytest.raises(MalformedFrame):
        link.send(frame(2), deadline_seconds=_SECONDS)
    link.close()
    child.wait(_SECONDS)


def test_a_neighbour_that_never_connects_is_named() -> None:
    store, _ = serve_rendezvous(_HOST)
    with pytest.raises(
        DeadlineExceeded, match=r"stage 0 of virtual worker 2 waited .* for stage 1 of virtual worker 2"
    ):
        connect_gloo(store, vw=2, stage=0, num_stages=2, host=_HOST, deadline_seconds=0.2)


def test_a_rendezvous_that_nobody_serves() -> None:
    store, address = serve_rendezvous(_HOST)
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


def test_the_rendezvous_listens_on_its_address_alone() -> None:
    store, address = serve_rendezvous(_HOST)
    assert address == f"{_HOST}:{store.port}"
    with pytest.raises(PeerUnreachable):
        connect_rendezvous(f"127.0.0.2:{store.port}", deadline_seconds=0.1)


def test_sent_tensors_are_freed_once_they_are_gone() -> None:
    (_, down), (up, _) = connect_stages(2, LinkLimits())
    assert down is not None
    assert up is not None
    tensor = torch.ones(100_000)
    alive = tensor.untyped_storage()._weak_ref()
    down.send(Frame(FrameKind.FORWARD, 1, 0, 0, (tensor,)), deadline_seconds=_SECONDS)
    del tensor
    up.receive(timeout_seconds=_SECONDS)
    for _ in range(2):  # the second frame's arrival shows that the first one was seen through
        down.send(frame(2), deadline_seconds=_SECONDS)
        up.receive(timeout_seconds=_SECONDS)
    down.close()
    assert torch.UntypedStorage._expired(alive)
    torch.UntypedStorage._free_weak_ref(alive)  # type: ignore[no-untyped-call]
    up.close()
