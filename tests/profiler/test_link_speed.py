"""Latency and bytes per second of links and copies: the law is found again, and the two ends keep their rules."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from hetpipe.clock import SYSTEM_CLOCK
from hetpipe.errors import DeadlineExceeded, HetpipeError, LinkClosed, MalformedFrame
from hetpipe.link.in_process import in_process_pair
from hetpipe.link.policy import Frame, FrameKind, Link
from hetpipe.profiler.link_measuring import (
    LIMITS,
    MAX_BYTES,
    CopyTrips,
    LinkSampling,
    LinkTrips,
    answer_trips,
    speed_of,
)
from hetpipe.profiler.sampling import Sampling
from tests.support.fake_clock import FakeClock

BRIEF = LinkSampling(
    first_bytes=64 << 10,
    largest_bytes=1 << 20,
    small=Sampling(warm_up=2, least=5, most=5),
    large=Sampling(warm_up=1, least=3, most=3),
)


class Wire:
    """Takes the time that its law says, on a clock of its own."""

    def __init__(self, *, latency: float, there: float, back: float) -> None:
        self.clock = FakeClock()
        self.sizes: list[tuple[int, int]] = []
        self._latency = latency
        self._there = there
        self._back = back

    def __call__(self, num_bytes: int, num_bytes_back: int) -> float:
        self.sizes.append((num_bytes, num_bytes_back))
        seconds = 2 * self._latency + num_bytes / self._there + num_bytes_back / self._back
        self.clock.advance(seconds)
        return seconds


def test_the_law_of_a_link_is_found_again_and_the_slower_direction_counts() -> None:
    wire = Wire(latency=40e-6, there=2e9, back=1e9)
    found = speed_of(wire, LinkSampling(), wire.clock)
    assert found.latency_seconds == pytest.approx(40e-6, rel=0.01)
    assert found.bytes_per_second == pytest.approx(1e9, rel=0.01)
    assert found.repeats >= 5


def test_a_slow_link_gets_small_messages_and_little_time() -> None:
    """10 Mbit/s: what suits a fast link would take 13 s a message."""
    wire = Wire(latency=1e-3, there=1.25e6, back=1.25e6)
    found = speed_of(wire, LinkSampling(), wire.clock)
    assert found.bytes_per_second == pytest.approx(1.25e6, rel=0.01)
    assert found.large_bytes == 256 << 10
    assert wire.clock.monotonic() < 10


def test_a_fast_link_gets_large_messages() -> None:
    wire = Wire(latency=5e-6, there=50e9, back=50e9)
    assert speed_of(wire, LinkSampling(), wire.clock).large_bytes == MAX_BYTES
    assert max(max(sizes) for sizes in wire.sizes) == MAX_BYTES


@contextmanager
def answered() -> Iterator[tuple[Link, list[HetpipeError]]]:
    """A link whose other end answers, and what went wrong there."""
    near, far = in_process_pair("a", "b", limits=LIMITS)
    failures: list[HetpipeError] = []

    def answer() -> None:
        try:
            answer_trips(far, patience_seconds=20)
        except HetpipeError as error:
            failures.append(error)
            far.close()

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    yield near, failures
    near.close()
    thread.join(20)
    assert not thread.is_alive()
    far.close()


def test_frames_go_there_and_back_until_the_link_is_closed() -> None:
    with answered() as (link, failures):
        found = speed_of(LinkTrips(link, SYSTEM_CLOCK, deadline_seconds=20), BRIEF, SYSTEM_CLOCK)
    assert failures == []
    assert found.bytes_per_second > 0
    assert found.small_bytes == 256


@pytest.mark.parametrize("wrong", [Frame(FrameKind.EVALUATE, 1, 0, 0), Frame(FrameKind.FORWARD, 1, 0, 0, (), 1 << 40)])
def test_who_answers_allocates_nothing_that_no_measurement_asks_for(wrong: Frame) -> None:
    with answered() as (link, failures):
        link.send(wrong, deadline_seconds=20)
        with pytest.raises(LinkClosed):
            link.receive(timeout_seconds=20)
    (error,) = failures
    assert isinstance(error, MalformedFrame)
    assert f"at most {MAX_BYTES}" in str(error)


def test_another_answer_than_the_one_asked_for_is_refused() -> None:
    near, far = in_process_pair("a", "b", limits=LIMITS)
    far.send(Frame(FrameKind.BACKWARD, 1, 0, 0, (torch.zeros(3, dtype=torch.uint8),)), deadline_seconds=20)
    with pytest.raises(MalformedFrame, match="answered 4 bytes of round trip 1 with 3 bytes"):
        LinkTrips(near, SYSTEM_CLOCK, deadline_seconds=20)(8, 4)
    near.close()
    far.close()


def test_a_measurement_has_one_deadline_for_all_its_round_trips() -> None:
    near, far = in_process_pair("a", "b", limits=LIMITS)
    with pytest.raises(DeadlineExceeded, match="4 bytes of a measurement"):
        LinkTrips(near, SYSTEM_CLOCK, deadline_seconds=0.01)(8, 4)
    near.close()
    far.close()


def test_copies_of_host_memory_are_timed() -> None:
    found = speed_of(CopyTrips(torch.device("cpu"), SYSTEM_CLOCK), BRIEF, SYSTEM_CLOCK)
    assert found.bytes_per_second > 1e7
    assert found.latency_seconds < 0.1
