"""What links between two processes do beyond the contract of all links; the tests of each kind inherit it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from hetpipe.errors import LinkClosed
from hetpipe.link.policy import FrameKind, Link, LinkLimits
from hetpipe.values.run import LinkTime
from tests.link.cuts import SECONDS
from tests.support.forked import ForkedChild
from tests.support.link_contract import Connect, frame, in_thread

Pace = LinkTime | None


def close_together(*links: Link) -> None:
    """Ends that were left open close together, as the stages of a pipeline do."""
    for thread, _ in [in_thread(link.close) for link in links]:
        thread.join(SECONDS)


@contextmanager
def closing_all(connect: Connect) -> Iterator[Connect]:
    """What `connect` makes is closed at the end, and leaves no thread behind."""
    before = set(threading.enumerate())
    made: list[Link] = []

    def new_pair(limits: LinkLimits) -> tuple[Link, Link]:
        pair = connect(limits)
        made.extend(pair)
        return pair

    yield new_pair
    close_together(*made)
    leaked = [thread.name for thread in set(threading.enumerate()) - before if thread.name.startswith("link: ")]
    assert leaked == []


def echoed_once(link: Link) -> Link:
    """`link`, once the process at its other end has sent a frame back."""
    link.send(frame(1, torch.arange(100_000)), deadline_seconds=SECONDS)
    (tensor,) = link.receive(timeout_seconds=SECONDS).tensors
    assert tensor is not None
    assert torch.equal(tensor, torch.arange(100_000))
    return link


class BetweenProcesses:
    """Inherit and define both methods."""

    def connect_paced(self, limits: LinkLimits, *, up: Pace = None, down: Pace = None) -> tuple[Link, Link]:
        """Both ends of a new link, of the earlier and of the later stage, with the times of what they send."""
        raise NotImplementedError

    def with_child(self, then: str) -> tuple[Link, ForkedChild]:
        """A link to a process that echoes one frame, then does `then`."""
        raise NotImplementedError

    def test_a_paced_link_holds_each_frame_back(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[int] = []

        def seconds(_: LinkTime, num_bytes: int) -> float:
            asked.append(num_bytes)
            return 0.0

        monkeypatch.setattr(LinkTime, "seconds", seconds)
        down, up = self.connect_paced(LinkLimits(), down=LinkTime(1.0, 1.0))
        down.send(frame(1, torch.ones(10), None, torch.ones(1000, dtype=torch.float64)), deadline_seconds=SECONDS)
        assert up.receive(timeout_seconds=SECONDS).minibatch == 1
        up.send(frame(1, torch.ones(10), kind=FrameKind.BACKWARD), deadline_seconds=SECONDS)
        assert down.receive(timeout_seconds=SECONDS).minibatch == 1
        assert asked == [8040], "one way only is paced"
        close_together(down, up)

    @pytest.mark.processes
    def test_a_kill_ends_what_is_blocked(self) -> None:
        link, child = self.with_child("import signal; signal.pause()")

        def send_for_ever() -> None:
            while True:
                link.send(frame(1, torch.ones(50_000)), deadline_seconds=60)

        waits = [in_thread(send_for_ever), in_thread(lambda: link.receive(timeout_seconds=60))]
        os.kill(child.pid, signal.SIGKILL)
        for thread, outcome in waits:
            thread.join(5)
            (error,) = outcome
            assert isinstance(error, LinkClosed)
            assert not error.orderly
        child.wait(SECONDS)
        link.close()

    @pytest.mark.processes
    def test_a_process_that_forgets_to_close_still_says_goodbye(self) -> None:
        link, child = self.with_child("")
        with pytest.raises(LinkClosed) as caught:
            link.receive(timeout_seconds=SECONDS)
        assert caught.value.orderly
        assert child.wait(SECONDS) == 0
        link.close()
