"""When a service is started again, and when it is not."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hetpipe.runs.restarts import RULES, GiveUp, RestartAt, RestartRules, decide

#: Many deaths are fine, so that pauses can be looked at.
LENIENT = RestartRules(most_deaths=1_000)


def pause(*deaths: float, rules: RestartRules = LENIENT) -> float:
    decision = decide(deaths, rules)
    assert isinstance(decision, RestartAt)
    return round(decision.at_seconds - deaths[-1], 9)


def test_pauses_double_up_to_the_longest() -> None:
    deaths = [float(second) for second in range(9)]
    pauses = [pause(*deaths[: count + 1]) for count in range(9)]
    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0]


def test_pauses_begin_anew_after_a_life_that_was_long_enough() -> None:
    assert pause(0.0, 1.0, 61.0) == 0.1
    assert pause(0.0, 1.0, 60.9) == 0.4


def test_one_that_dies_now_and_then_is_never_given_up() -> None:
    deaths = [15.0 * count for count in range(16)]
    assert pause(*deaths, rules=RULES) == 5.0


def test_the_fifth_death_within_a_minute_is_one_too_many() -> None:
    assert isinstance(decide([0.0, 1.0, 2.0, 3.0]), RestartAt)
    assert isinstance(decide([0.0, 15.0, 30.0, 45.0, 60.0]), RestartAt)
    assert decide([0.0, 15.0, 30.0, 45.0, 59.0]) == GiveUp("it is not restarted, as it has died 5 times within 60 s")


@given(st.lists(st.floats(0.0, 1e6), min_size=1, max_size=20))
def test_what_was_long_ago_does_not_count(times: list[float]) -> None:
    deaths = sorted(times)
    recent = [death for death in deaths if deaths[-1] - death < RULES.within_seconds]
    decision = decide(deaths)
    assert isinstance(decision, GiveUp) is (len(recent) >= RULES.most_deaths)
    if isinstance(decision, RestartAt):
        assert deaths[-1] < decision.at_seconds <= deaths[-1] + RULES.longest_pause_seconds
