"""The deepest failure is told, not the loudest."""

from __future__ import annotations

import pytest

from hetpipe.decide.lifecycle.root_cause import Failure, Rank, decision_time, root_cause


def failure(rank: Rank, at: float = 0.0) -> Failure:
    return Failure(rank, "JobFailed", rank.name, at)


@pytest.mark.parametrize(("nearer", "farther"), list(zip(list(Rank)[:-1], list(Rank)[1:], strict=True)))
def test_a_nearer_failure_wins_even_when_it_comes_later(nearer: Rank, farther: Rank) -> None:
    assert root_cause([failure(farther, at=0.0), failure(nearer, at=0.9)]).rank is nearer


def test_among_equals_the_earliest_wins() -> None:
    late, early = failure(Rank.REPORTED, at=2.0), failure(Rank.REPORTED, at=1.0)

    assert root_cause([late, early]) is early


def test_echoes_alone_are_given_the_time_of_a_lease() -> None:
    echoes = [failure(Rank.ECHO, at=5.0), failure(Rank.ECHO, at=5.5)]

    assert decision_time(echoes, settle_seconds=1.0, echo_seconds=6.5) == 11.5
    assert decision_time([*echoes, failure(Rank.GONE, at=9.0)], settle_seconds=1.0, echo_seconds=6.5) == 6.0
