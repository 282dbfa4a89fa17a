"""Waiting for a coordinator that went away."""

from __future__ import annotations

import pytest

from hetpipe.errors import PeerUnreachable
from hetpipe.runs.reconnection import RECONNECT_SECONDS, Reconnection
from tests.support.fake_clock import FakeClock

GONE = PeerUnreachable("gone")


class Case:
    def __init__(self, *, is_over: bool = False) -> None:
        self.clock = FakeClock(auto_advance=True)
        self.said: list[str] = []
        self.reconnection = Reconnection(self.clock, say=self.said.append, is_over=lambda: is_over)


def test_an_address_where_nobody_answered_yet_is_a_mistake() -> None:
    with pytest.raises(PeerUnreachable):
        Case().reconnection.failed(GONE)


def test_each_outage_is_told_once() -> None:
    case = Case()
    for _ in range(2):
        case.reconnection.succeeded()
        case.reconnection.failed(GONE)
        case.reconnection.failed(GONE)
    case.reconnection.succeeded()
    case.reconnection.succeeded()
    away = "the coordinator does not answer; retrying"
    assert case.said == [away, "the coordinator is reachable again after 1 s"] * 2


def test_a_coordinator_that_stays_away_is_lost() -> None:
    case = Case()
    case.reconnection.succeeded()
    for _ in range(int(RECONNECT_SECONDS / 0.5)):
        case.reconnection.failed(GONE)
    with pytest.raises(PeerUnreachable):
        case.reconnection.failed(GONE)


def test_what_is_mended_at_once_is_not_worth_a_word() -> None:
    case = Case()
    for _ in range(3):
        case.reconnection.succeeded()
        case.reconnection.failed(GONE)
    assert case.said == []


def test_what_is_over_needs_no_mending() -> None:
    case = Case(is_over=True)
    case.reconnection.succeeded()
    with pytest.raises(PeerUnreachable):
        case.reconnection.failed(GONE)
    assert case.said == []
