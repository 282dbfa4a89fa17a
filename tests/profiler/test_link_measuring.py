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
from hetpipe.values import wire
from hetpipe.values.commands import end_key
from hetpipe.values.policies import LinkKind
from hetpipe.wire.tls import Tls
from tests.certs.cluster import cluster
from tests.profiler.test_link_speed import BRIEF
from tests.server.coordinator.builders import JOB_ID

AWAIT = LinkOrder(role="await", node="a", other="b", deadline_seconds=20)


def both_ends(
    order: LinkOrder, *, tls: Tls | None = None, other_tls: Tls | None = None
) -> tuple[LinkAnswer, LinkAnswer | HetpipeError]:
    """What the end that awaits answers, and what becomes of the other one."""
    addresses: queue.SimpleQueue[str] = queue.SimpleQueue()
    ends: list[LinkAnswer | HetpipeError] = []

    def other_end() -> None:
        called = replace(order, role="call", node="b", other="a", address=addresses.get(timeout=20))
        try:
            ends.append(carry_out_links(called, SYSTEM_CLOCK, addresses.put, BRIEF, tls=other_tls))
        except HetpipeError as error:
            ends.append(error)

    thread = threading.Thread(target=other_end, daemon=True)
    thread.start()
    try:
        answer = carry_out_links(order, SYSTEM_CLOCK, addresses.put, BRIEF, tls=tls)
    finally:
        thread.join(20)
    return answer, ends[0]


@pytest.mark.parametrize("transport", ["gloo", "grpc"])
def test_a_link_is_measured_between_its_two_ends(transport: LinkKind) -> None:
    answer, other = both_ends(replace(AWAIT, transport=transport))
    assert other == LinkAnswer(), "the other end heard the good-bye"
    link = answer.link
    assert link is not None
    assert (link.between, link.transport) == (("a", "b"), transport)
    assert link.versions == versions()
    assert 0 < link.speed.latency_seconds < 1
    assert link.speed.bytes_per_second > 1e5
    assert wire.from_json(LinkAnswer, wire.to_json(LinkAnswer, answer)) == answer


def end_tls(number: int, *, is_first: bool) -> Tls:
    return cluster().tls(end_key(JOB_ID, number, is_first=is_first).peer)


def test_with_tls_both_ends_prove_which_measurement_they_are_of() -> None:
    order = replace(AWAIT, transport="grpc", job_id=JOB_ID, number=3, deadline_seconds=20)
    answer, other = both_ends(order, tls=end_tls(3, is_first=True), other_tls=end_tls(3, is_first=False))
    assert answer.link is not None
    assert (answer.link.transport, other) == ("grpc", LinkAnswer())
    stranger = end_tls(4, is_first=False)
    with pytest.raises((DeadlineExceeded, PeerUnreachable)):
        both_ends(replace(order, deadline_seconds=1), tls=end_tls(3, is_first=True), other_tls=stranger)


def test_both_ends_tell_of_copies_on_their_own_node() -> None:
    answer, other = both_ends(replace(AWAIT, with_copies=True))
    assert isinstance(other, LinkAnswer)
    assert other.link is None
    assert ({copy.node for copy in answer.copies}, {copy.node for copy in other.copies}) == ({"a"}, {"b"})


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
