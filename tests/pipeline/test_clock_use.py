"""At which minibatches is a clock chosen, which one, and when are its weights asked for?"""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
import torch

from hetpipe.decide.sync.records import BarrierRecord, CommitRecord, PublishRecord, Record, SegmentMember, SegmentRecord
from hetpipe.errors import ClockNotPublished
from hetpipe.pipeline.clock_use import ClockUse
from hetpipe.pipeline.inbox import Inbox
from hetpipe.pipeline.setup import StageIdentity, StageParts
from hetpipe.values.ids import Clock, Incarnation, Minibatch, StageIndex, VirtualWorkerIndex, Wave
from hetpipe.values.policies import WEIGHT_POLICIES, WeightPolicy
from hetpipe.values.sync import SyncSpec
from hetpipe.weights.flat import BufferPool, FlatLayout

POOL = BufferPool(FlatLayout([("w", (1,), "float32")]), torch.device("cpu"))

#: What a first stage asks in the segment from clock 3 on, with N = 2: (p, number of the switch point, newest clock).
#: The first minibatches need no question: there is no other clock that they could use.
SWITCHES: dict[str, list[tuple[int, int, int]]] = {
    "wave": [(10, 5, 4), (12, 6, 5), (14, 7, 6)],
    "flush": [(9, 4, 4), (11, 5, 5), (13, 6, 6), (15, 7, 7)],
    "double_buffer": [(11, 5, 4), (13, 6, 5), (15, 7, 6)],
}


def switches(weights: str) -> list[tuple[int, int, int]]:
    return SWITCHES.get(weights, SWITCHES["wave"])


class Use:
    """A `ClockUse` and what it asked for."""

    def __init__(
        self,
        weights: WeightPolicy = "wave",
        *,
        n: int = 2,
        start: int = 3,
        staleness: int | None = 1,
        deterministic: bool = False,
        has_shards: bool = True,
    ) -> None:
        #: Numbers of switch points asked about, and (clock, ahead) of the fetches.
        self.held: list[int] = []
        self.fetches: list[tuple[int, bool]] = []
        #: What the clock shard says.
        self.answer: tuple[int, int] | None = (start, 100)
        self.num_moves = 0
        self.inbox = Inbox(None, None, Clock(start))
        self.records = 0
        parts = SimpleNamespace(
            shift=0,
            identity=StageIdentity(VirtualWorkerIndex(0), StageIndex(0), Incarnation(0), 1),
            sync=SyncSpec(n, staleness, "sum", deterministic, weights),
            has_shards=has_shards,
            synchroniser=SimpleNamespace(hold=self.hold, fetch=self.fetch),
        )
        self.clocks = ClockUse(cast("StageParts", parts), self.inbox, Clock(start))
        self.follow(BarrierRecord(0, Clock(100), "end", 0))

    def hold(self, switch: int) -> tuple[int, int, int]:
        self.held.append(switch)
        if self.answer is None:
            raise ClockNotPublished("not yet")
        return (*self.answer, self.num_moves)

    def fetch(self, clock: Clock, *, ahead: bool) -> None:
        self.fetches.append((clock, ahead))

    def follow(self, *records: Record) -> None:
        self.inbox.on_records(records)

    def publish(self, clock: int) -> None:
        self.follow(PublishRecord(0, Clock(clock), (Clock(clock),)))

    def arrive(self, clock: int) -> None:
        self.inbox.on_fetched(Clock(clock), POOL.take_on_host())

    def use(self, p: int) -> None:
        """Minibatch p has opened: its clock is in use from now on."""
        self.clocks.in_use = self.clocks.chosen(Minibatch(p))

    def opens(self, p: int) -> bool:
        return self.clocks.opens(Minibatch(p))


# -- the first stage chooses -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", WEIGHT_POLICIES)
def test_a_clock_is_chosen_at_the_switch_points_of_the_policy(weights: WeightPolicy) -> None:
    """The answer is what counts, and it is asked for once; its weights are fetched before the minibatch opens."""
    use = Use(weights)
    use.publish(50)
    for p in range(7, 16):
        found = [(number, clock) for at, number, clock in switches(weights) if at == p]
        if not found:
            assert use.opens(p)
            assert use.clocks.chosen(Minibatch(p)) == use.clocks.in_use
            continue
        ((number, clock),) = found
        use.answer = (clock, 100)
        assert not use.opens(p)
        assert use.clocks.wait_reason == (f"w^({clock}) from the parameter servers", False)
        use.arrive(clock)
        assert use.opens(p)
        assert use.clocks.chosen(Minibatch(p)) == clock
        assert use.held[-1] == number
        use.use(p)
    assert use.held == [number for _, number, _ in switches(weights)]
    assert use.fetches == [(clock, False) for _, _, clock in switches(weights)]


@pytest.mark.parametrize(
    ("weights", "expected"), [("wave", [2, 3, 4]), ("flush", [2, 3, 4]), ("double_buffer", [3, 4])]
)
def test_waves_of_one_minibatch(weights: WeightPolicy, expected: list[int]) -> None:
    use = Use(weights, n=1, start=0)
    use.publish(50)
    for p in range(1, 5):
        use.answer = (p - 1 if weights != "double_buffer" else p - 2, 100)
        if not use.opens(p):
            use.arrive(use.answer[0])
            assert use.opens(p)
            use.use(p)
    assert [clock for clock, _ in use.fetches] == [1, 2, 3][: len(expected)]
    first = 0 if weights == "wave" else 1
    assert use.held == [p - first for p in expected]


def test_the_clock_in_use_may_be_the_answer() -> None:
    """Nothing newer is published: the minibatch opens at once."""
    use = Use()
    use.publish(3)
    assert use.opens(10)
    assert (use.clocks.chosen(Minibatch(10)), use.held, use.fetches) == (3, [5], [])


@pytest.mark.parametrize(
    ("weights", "p", "required"),
    [("wave", 12, 4), ("stash", 12, 4), ("flush", 11, 4), ("double_buffer", 13, 4)],
)
def test_a_clock_that_is_not_published_is_waited_for_by_name(weights: WeightPolicy, p: int, required: int) -> None:
    """The required one, D = 1 wave before the newest usable; the clock shard is not asked in vain."""
    use = Use(weights)
    members = (SegmentMember(VirtualWorkerIndex(vw), Incarnation(0), 1, joined=True) for vw in (0, 1, 2))
    use.follow(SegmentRecord(0, Clock(3), (), 0, tuple(members)))
    use.follow(CommitRecord(0, VirtualWorkerIndex(1), Incarnation(0), Wave(3), 1))
    use.publish(3)
    assert not use.opens(p)
    reason, is_for_clock = use.clocks.wait_reason
    assert is_for_clock
    assert reason.startswith(f"clock {required}, which minibatch {p} needs and virtual workers 0, 2 must finish first")
    for vw in (0, 2):
        use.follow(CommitRecord(0, VirtualWorkerIndex(vw), Incarnation(0), Wave(3), 1))
    assert not use.opens(p)
    assert "the parameter servers must finish first (published: 3)" in use.clocks.wait_reason[0]
    assert use.held == []

    use.publish(4)
    use.answer = (4, 100)
    use.arrive(4)
    assert use.opens(p)


def test_the_clock_shard_may_know_less_than_the_log_said() -> None:
    use = Use()
    use.publish(9)
    use.answer = None
    assert not use.opens(10)
    use.answer = (3, 100)
    assert use.opens(10)
    assert use.held == [5, 5]


def test_a_barrier_of_which_the_log_has_not_told_yet_is_waited_for() -> None:
    """Nothing opens beyond it, whatever clock the answer names."""
    use = Use()
    use.publish(9)
    use.answer = (3, 5)
    assert not use.opens(10)
    assert use.clocks.wait_reason == ("the record of the barrier at clock 5", True)
    use.follow(BarrierRecord(1, Clock(5), "stop", 0))
    assert use.opens(10), "the last minibatch before it"
    use.answer = (4, 5)
    assert not use.opens(12)
    assert use.fetches == []


# -- no choice -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", WEIGHT_POLICIES)
def test_a_deterministic_run_uses_what_is_required_and_asks_nobody(weights: WeightPolicy) -> None:
    use = Use(weights, deterministic=True)
    use.publish(50)
    for p in range(7, 16):
        if not use.opens(p):
            use.arrive(use.fetches[-1][0])
            assert use.opens(p)
        use.use(p)
    assert use.held == []
    assert use.fetches == [(clock - 1, False) for _, _, clock in switches(weights)[1:]]


def test_without_a_bound_the_start_is_enough() -> None:
    use = Use(staleness=None)
    use.publish(3)
    for p in range(7, 20):
        assert use.opens(p)
    assert use.held == [5, 6, 7, 8, 9]


@pytest.mark.parametrize("weights", WEIGHT_POLICIES)
def test_without_shards_it_asks_all_the_same_and_stays_where_it_is(weights: WeightPolicy) -> None:
    """The clock shard must know who may have begun what: it sets barriers by it."""
    use = Use(weights, staleness=None, has_shards=False)
    for p in range(7, 16):
        use.publish(p // 2)
        use.answer = (p // 2 - 1, 100)
        assert use.opens(p)
        assert use.clocks.chosen(Minibatch(p)) == 3
        use.use(p)
        use.clocks.fetch_ahead(p)
    assert use.held == [number for _, number, _ in switches(weights)]
    assert use.fetches == []


def test_without_shards_a_barrier_stops_it_too() -> None:
    use = Use("flush", staleness=None, has_shards=False)
    use.publish(3)
    use.answer = (3, 4)
    assert not use.opens(9)
    assert use.clocks.wait_reason == ("the record of the barrier at clock 4", True)
    use.follow(BarrierRecord(1, Clock(4), "stop", 0))
    assert not use.opens(9)


# -- ahead of need ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", WEIGHT_POLICIES)
def test_weights_of_the_next_switch_point_are_fetched_once_they_are_published(weights: WeightPolicy) -> None:
    """From its predecessor on, and never newer ones than it may use."""
    (before, _, _), (p, _, clock), *_ = switches(weights)
    use = Use(weights)
    use.publish(clock - 1)
    use.clocks.in_use = Clock(clock - 1)
    use.clocks.fetch_ahead(before)
    assert use.fetches == []
    use.publish(50)
    use.clocks.fetch_ahead(before - 1)
    assert use.fetches == [], "the switch point before it may not use them"
    use.clocks.fetch_ahead(before)
    use.clocks.fetch_ahead(p - 1)
    assert use.fetches == [(clock, True)]
    use.answer = (clock, 100)
    assert not use.opens(p)
    assert use.fetches == [(clock, True)], "it is on its way"
    use.arrive(clock)
    assert use.opens(p)


def test_one_is_under_way_at_a_time_and_then_the_newest() -> None:
    use = Use(staleness=4)
    for clock in (4, 5, 6):
        use.publish(clock)
        use.clocks.fetch_ahead(15)
    assert use.fetches == [(4, True)]
    use.arrive(4)
    use.clocks.fetch_ahead(15)
    assert use.fetches == [(4, True), (6, True)]


def test_a_deterministic_run_fetches_what_will_be_required() -> None:
    use = Use(deterministic=True)
    use.publish(50)
    use.clocks.fetch_ahead(10)
    assert use.fetches == [(4, True)], "for minibatch 12, which might use 5"
    use = Use(deterministic=True)
    use.publish(3)
    use.clocks.fetch_ahead(10)
    assert use.fetches == [], "not published"


def test_a_guess_that_came_too_late_is_asked_for_again_when_it_is_needed() -> None:
    use = Use()
    use.publish(4)
    use.clocks.fetch_ahead(8)
    use.inbox.on_fetched(Clock(4), None)
    use.clocks.fetch_ahead(8)
    assert use.fetches == [(4, True)]
    assert not use.clocks.is_here(Clock(4))
    assert use.fetches == [(4, True), (4, False)]
    assert not use.clocks.is_here(Clock(4))
    assert len(use.fetches) == 2
    use.arrive(4)
    assert use.clocks.is_here(Clock(4))


def test_a_guess_that_came_too_late_keeps_no_other_from_being_made() -> None:
    use = Use()
    use.publish(4)
    use.clocks.fetch_ahead(10)
    use.inbox.on_fetched(Clock(4), None)
    use.publish(5)
    use.clocks.fetch_ahead(10)
    assert use.fetches == [(4, True), (5, True)]
