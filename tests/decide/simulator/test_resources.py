"""Messages that share a resource get equal parts of it, and work is neither lost nor done twice."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from hypothesis import given, settings
from hypothesis import strategies as st

from hetpipe.decide.simulator.engine import Engine
from hetpipe.decide.simulator.flow import Flow, Part
from hetpipe.decide.simulator.resources import SharedResource


def _arrivals(starts_and_work: list[tuple[int, int]], *, latency: int = 0, resources: int = 1) -> list[int]:
    """When each of some messages arrives: all of different flows through the same resources."""
    engine = Engine()
    shared = [SharedResource() for _ in range(resources)]
    found = [0] * len(starts_and_work)

    def arrived(index: int, _: int) -> None:
        found[index] = engine.now

    for index, (start, work) in enumerate(starts_and_work):
        flow = Flow(engine, partial(arrived, index))
        flow.add(Part(work + latency, latency, [(resource, work) for resource in shared]), log=None)
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
    flow = Flow(engine, lambda number: found.append((number, engine.now)))
    flow.add(Part(alone_ticks=10, latency_ticks=0, shares=()), log=None)
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


class Plain:
    """A resource that does everything at its time: message by message, with an event for each departure."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.left: list[tuple[int, Callable[[], None]]] = []
        self.progress = self.updated = 0

    def admit(self, work: int, served: Callable[[], None]) -> None:
        if self.left:
            self.progress += (self.engine.now - self.updated) // len(self.left)
        self.updated = self.engine.now
        self.left.append((self.progress + work, served))
        self.schedule()

    def schedule(self) -> None:
        if self.left:
            due = self.updated + (min(finish for finish, _ in self.left) - self.progress) * len(self.left)
            self.engine.at(due, self.depart, due)

    def depart(self, due: int) -> None:
        first = min((finish for finish, _ in self.left), default=0)
        if not self.left or due != self.updated + (first - self.progress) * len(self.left):
            return
        gone = [served for finish, served in self.left if finish == first]
        self.left = [(finish, served) for finish, served in self.left if finish != first]
        self.progress, self.updated = first, due
        self.schedule()
        for served in gone:
            served()


#: A part: latency, and the work at each of some resources.
_Part = tuple[int, dict[int, int]]
#: A message: start and parts.
_Message = tuple[int, list[_Part]]

PARTS = st.lists(
    st.tuples(
        st.sampled_from([0, 7, 7, 20]),
        st.dictionaries(st.integers(0, 3), st.sampled_from([0, 1, 5, 5, 8, 40]), min_size=1, max_size=2),
    ),
    min_size=1,
    max_size=6,
)


@given(st.lists(st.tuples(st.integers(0, 60), PARTS), min_size=1, max_size=8))
@settings(max_examples=200)
def test_parts_arrive_as_they_do_one_by_one(messages: list[_Message]) -> None:
    """A bundle's arrival is that of its last part, to the tick, whatever else joins and leaves."""
    assert _simulated(messages, log=None) == _simulated(messages, log=lambda *_: None) == _plainly(messages)


def _simulated(messages: list[_Message], *, log: Callable[[int, int, int], None] | None) -> list[int]:
    """When each message arrives; with a log no parts are bundled."""
    engine, shared, found = Engine(), [SharedResource() for _ in range(4)], [0] * len(messages)

    def arrived(index: int, _: int) -> None:
        found[index] = engine.now

    for index, (start, parts) in enumerate(messages):
        flow = Flow(engine, partial(arrived, index))
        for latency, works in parts:
            shares = [(shared[resource], work) for resource, work in works.items()]
            flow.add(Part(latency + max(works.values()), latency, shares), log=log)
        engine.at(start, flow.send, 1)
    engine.run(lambda: None)
    return found


def _plainly(messages: list[_Message]) -> list[int]:
    """The same, by plain resources."""
    engine, found = Engine(), [0] * len(messages)
    shared = [Plain(engine) for _ in range(4)]

    def begin(index: int) -> None:
        start, parts = messages[index]
        for latency, works in parts:
            left = set(works)

            def served(resource: int, left: set[int], latency: int, alone: int) -> None:
                left.remove(resource)
                if not left:
                    found[index] = max(found[index], engine.now + latency, start + latency + alone)

            for resource, work in works.items():
                shared[resource].admit(work, partial(served, resource, left, latency, max(works.values())))

    for index, (start, _) in enumerate(messages):
        engine.at(start, begin, index)
    engine.run(lambda: None)
    return found
