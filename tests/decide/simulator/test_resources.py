"""Messages that share a resource get equal parts of it, and work is neither lost nor done twice."""

from __future__ import annotations

from functools import partial

from hypothesis import given
from hypothesis import strategies as st

from hetpipe.decide.simulator.engine import Engine
from hetpipe.decide.simulator.resources import Flow, SharedResource


def _arrivals(starts_and_work: list[tuple[int, int]], *, latency: int = 0, resources: int = 1) -> list[int]:
    """When each of some messages arrives: all of different flows through the same resources."""
    engine = Engine()
    shared = [SharedResource(engine) for _ in range(resources)]
    found = [0] * len(starts_and_work)

    def arrived(index: int, _: int) -> None:
        found[index] = engine.now

    for index, (start, work) in enumerate(starts_and_work):
        flow = Flow(
            engine,
            index,
            alone_ticks=work + latency,
            latency_ticks=latency,
            shares=[(resource, work) for resource in shared],
            deliver=partial(arrived, index),
            log=None,
        )
        engine.at(start, flow.send, 1)
    engine.run(lambda: None)
    return found


def test_alone_a_message_takes_its_time() -> None:
    assert _arrivals([(5, 100)], latency=7, resources=2) == [112]


def test_two_messages_halve_the_resource() -> None:
    assert _arrivals([(0, 100), (0, 100)]) == [200, 200]
    # Alone until 60, then side by side until the first has got its other 40, then alone again.
    assert _arrivals([(0, 100), (60, 100)]) == [140, 200]


def test_a_short_message_is_not_held_up_by_a_long_one() -> None:
    long, short = _arrivals([(0, 1_000_000), (500, 10)])
    assert (long, short) == (1_000_010, 520)


def test_latency_occupies_nothing() -> None:
    assert _arrivals([(0, 100), (100, 100)], latency=50) == [150, 250]


def test_a_flow_moves_one_message_at_a_time() -> None:
    engine = Engine()
    found: list[tuple[int, int]] = []
    flow = Flow(
        engine,
        0,
        alone_ticks=10,
        latency_ticks=0,
        shares=(),
        deliver=lambda number: found.append((number, engine.now)),
        log=None,
    )
    for number in (1, 2, 3):
        flow.send(number)
    engine.run(lambda: None)
    assert found == [(1, 10), (2, 20), (3, 30)]


@given(st.lists(st.tuples(st.integers(0, 10_000), st.integers(1, 5_000)), min_size=1, max_size=12))
def test_a_busy_resource_does_all_its_work(messages: list[tuple[int, int]]) -> None:
    """As fast as first come, first served on the whole, and for nobody faster than alone."""
    found = _arrivals(messages)
    end = 0
    for start, work in sorted(messages):
        end = max(end, start) + work
    # Rounding down at each arrival costs every message present up to a tick.
    assert end <= max(found) <= end + len(messages) ** 2
    assert all(arrival >= start + work for arrival, (start, work) in zip(found, messages, strict=True))
