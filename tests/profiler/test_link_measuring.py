"""Both ends of a measured link, over the transports of runs, and copies to the devices of a node."""

from __future__ import annotations

import queue
import threading
from dataclasses import replace

import pytest
import torch

from hetpipe.clock import SYSTEM_CLOCK
from hetpipe.errors import DeadlineExceeded, HetpipeError, PeerUnreachable
from hetpipe.profiler.link_measuring import carry_out_links
from hetpipe.profiler.link_order import LinkAnswer, LinkOrder
from hetpipe.profiler.machine import versions
from hetpipe.spec import wire
from hetpipe.spec.policies import LinkKind
from tests.profiler.test_link_speed import BRIEF

AWAIT = LinkOrder(role="await", node="a", other="b", deadline_seconds=20)


@pytest.mark.parametrize("transport", ["gloo", "grpc"])
def test_a_link_is_measured_between_its_two_ends(transport: LinkKind) -> None:
    addresses: queue.SimpleQueue[str] = queue.SimpleQueue()
    ends: list[LinkAnswer | HetpipeError] = []

    def other_end() -> None:
        order = LinkOrder(role="call", node="b", other="a", transport=transport, address=addresses.get(timeout=20))
        try:
            ends.append(carry_out_links(order, SYSTEM_CLOCK, addresses.put))
        except HetpipeError as error:
            ends.append(error)

    thread = threading.Thread(target=other_end, daemon=True)
    thread.start()
    answer = carry_out_links(replace(AWAIT, transport=transport), SYSTEM_CLOCK, addresses.put, BRIEF)
    thread.join(20)
    assert ends == [LinkAnswer()], "the other end heard the good-bye"
    link = answer.link
    assert link is not None
    assert (link.between, link.transport) == (("a", "b"), transport)
    assert link.versions == versions()
    assert 0 < link.speed.latency_seconds < 1
    assert link.speed.bytes_per_second > 1e5
    assert wire.from_json(LinkAnswer, wire.to_json(LinkAnswer, answer)) == answer


def test_an_end_that_nobody_comes_to_does_not_wait_for_ever() -> None:
    addresses: list[str] = []
    with pytest.raises((DeadlineExceeded, PeerUnreachable)):
        carry_out_links(replace(AWAIT, transport="grpc", deadline_seconds=0.1), SYSTEM_CLOCK, addresses.append)
    assert len(addresses) == 1


def test_copies_of_a_node_without_gpus_are_marked_as_of_memory() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    (copy,) = carry_out_links(LinkOrder(role="copies", node="a"), SYSTEM_CLOCK, print, BRIEF).copies
    assert (copy.node, copy.device_type, copy.method) == ("a", "cpu", "memcpy")
