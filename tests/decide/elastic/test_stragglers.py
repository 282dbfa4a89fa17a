"""Who straggles: by what was foreseen or by who is alike, after patience, and not under noise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetpipe.decide.elastic.repartitions import Stragglers
from hetpipe.decide.elastic.replanning import Expected
from hetpipe.values.commands import StageKey
from hetpipe.values.events import Straggling
from hetpipe.values.ids import Incarnation, StageIndex, Term
from hetpipe.values.ids import VirtualWorkerIndex as Vw
from tests.server.coordinator.builders import JOB_ID, progress

PATIENCE = 5

#: Four stages of two virtual workers, each foreseen to take a tenth of a second for a minibatch.
PLACES = [(vw, stage) for vw in (0, 1) for stage in (0, 1)]


class Told:
    """What stages report, one window after the other."""

    def __init__(self, seconds: float | None = 0.1, *, patience: int = PATIENCE) -> None:
        expected = {Vw(vw): [Expected(("layers", stage), seconds) for stage in (0, 1)] for vw in (0, 1)}
        self.of = Stragglers(expected, factor=2.0, patience_windows=patience)
        self.waves: dict[tuple[int, int], int] = {}
        self.seconds: dict[tuple[int, int], float] = {}
        self.window({})

    def report(self, vw: int, stage: int, seconds: float, *, life: int = 0, waves: int = 1) -> bool:
        """A stage has computed two minibatches in each wave, `seconds` for each minibatch."""
        place = (vw, stage)
        self.waves[place] = self.waves.get(place, 0) + waves
        self.seconds[place] = self.seconds.get(place, 0.0) + 2 * waves * seconds
        clock = self.waves[place]
        report = progress(clock=clock, minibatches=2 * clock, compute_seconds=self.seconds[place])
        return self.of.add(StageKey(JOB_ID, Vw(vw), StageIndex(stage), Incarnation(life), Term(1)), report)

    def window(self, seconds: Mapping[tuple[int, int], float], others: float = 0.1, *, waves: int = 1) -> None:
        for place in PLACES:
            self.report(*place, seconds.get(place, others), waves=waves)

    @property
    def names(self) -> list[tuple[int, int, float]]:
        return [(one.vw, one.stage, round(one.factor, 3)) for one in self.of.straggling]


@pytest.mark.parametrize("seconds", [0.1, None])
@pytest.mark.parametrize("waves", [1, 7])
def test_a_stage_that_is_ten_times_slower_is_named_when_patience_ends(seconds: float | None, waves: int) -> None:
    told = Told(seconds)
    told.window({})
    for _ in range(PATIENCE - 1):
        told.window({(1, 0): 1.0}, waves=waves)
        assert told.names == []
        assert not told.of.is_off(Vw(1))
    told.window({(1, 0): 1.0}, waves=waves)

    assert told.names == [(1, 0, 10.0)]
    assert told.of.is_off(Vw(1))
    assert not told.of.is_off(Vw(0))
    assert told.of.seconds(Vw(1)) == pytest.approx((1.0, 0.1))
    assert told.of.reference(Vw(1)) == pytest.approx((0.1, 0.1))


def test_one_that_is_named_is_not_told_by_a_single_window() -> None:
    told = Told()
    for seconds in (1.0,) * PATIENCE + (0.1, 1.0, 0.1):
        told.window({(1, 0): seconds})

    assert told.names == [(1, 0, 10.0)], "the last window was well, most were not"


def test_where_nothing_was_foreseen_one_that_is_slow_from_the_start_is_compared_with_its_like() -> None:
    told = Told(None)
    for _ in range(PATIENCE):
        told.window({(1, 0): 1.0})

    assert told.names == [(1, 0, 10.0)]


@pytest.mark.parametrize("seconds", [0.1, None])
def test_if_everything_takes_longer_nothing_straggles(seconds: float | None) -> None:
    told = Told(seconds)
    told.window({})
    for _ in range(3 * PATIENCE):
        told.window({}, others=1.0)

    assert told.names == []
    assert not told.of.is_off(Vw(0))


def test_a_single_window_that_is_well_begins_it_anew() -> None:
    told = Told()
    for _ in range(PATIENCE - 1):
        told.window({(1, 0): 1.0})
    told.window({})
    for _ in range(PATIENCE - 1):
        told.window({(1, 0): 1.0})

    assert told.names == []


def test_it_is_named_until_it_is_clearly_well_for_as_long() -> None:
    told = Told()
    for _ in range(PATIENCE):
        told.window({(1, 0): 1.0})
    for _ in range(2 * PATIENCE):
        told.window({(1, 0): 0.19})
    assert told.names == [(1, 0, 1.9)]
    for _ in range(PATIENCE):
        told.window({(1, 0): 0.14})

    assert told.names == []


def test_one_that_is_faster_than_foreseen_is_off_and_no_straggler() -> None:
    told = Told()
    for _ in range(PATIENCE):
        told.window({(1, 0): 0.01})

    assert told.of.is_off(Vw(1))
    assert told.names == []


def test_the_start_of_a_life_counts_nothing() -> None:
    told = Told()
    for _ in range(PATIENCE):
        told.window({(1, 0): 1.0})
    told.waves, told.seconds = {}, {}
    assert not told.report(1, 0, 9.0, life=1)
    assert told.report(1, 0, 0.1, life=1)
    assert not told.report(1, 0, 1.0, life=0)

    assert told.names == []
    assert told.of.seconds(Vw(1)) is None


def test_a_report_without_a_whole_wave_closes_no_window() -> None:
    told = Told()
    key = StageKey(JOB_ID, Vw(0), StageIndex(0), Incarnation(0), Term(1))

    assert not told.of.add(key, progress(clock=1, minibatches=3, compute_seconds=9.0))
    assert not told.of.add(
        StageKey(JOB_ID, Vw(7), StageIndex(0), Incarnation(0), Term(1)), progress(clock=9, minibatches=9)
    )


def test_by_another_plan_it_is_compared_with_what_that_foresees() -> None:
    told = Told()
    for _ in range(PATIENCE):
        told.window({(1, 0): 1.0})
    told.of.expect(Vw(1), [Expected("new", 0.5), Expected("new", 0.25)])
    assert told.names == []
    for _ in range(PATIENCE + 1):
        told.window({(1, 0): 0.5, (1, 1): 0.25})

    assert told.names == []
    assert not told.of.is_off(Vw(1))
    assert told.of.straggling == ()
    assert told.of.seconds(Vw(1)) == pytest.approx((0.5, 0.25))


@settings(max_examples=25)
@given(
    st.lists(st.tuples(*[st.floats(0.6, 1.15)] * len(PLACES)), min_size=1, max_size=40),
    st.sampled_from([0.1, None]),
)
def test_noise_names_nobody(windows: Sequence[Sequence[float]], seconds: float | None) -> None:
    told = Told(seconds)
    for noise in windows:
        told.window({place: 0.1 * factor for place, factor in zip(PLACES, noise, strict=True)})

    assert told.names == []
    assert not any(told.of.is_off(Vw(vw)) for vw in (0, 1))


@settings(max_examples=25)
@given(st.lists(st.floats(0.5, 20.0), min_size=1, max_size=60))
def test_names_change_at_most_once_in_as_many_windows_as_patience_says(factors: Sequence[float]) -> None:
    told, changes = Told(), []
    before: tuple[Straggling, ...] = ()
    for at, factor in enumerate(factors):
        told.window({(1, 0): 0.1 * factor})
        if bool(told.of.straggling) != bool(before):
            changes.append(at)
        before = told.of.straggling

    assert all(later - earlier >= PATIENCE for earlier, later in pairwise(changes))
