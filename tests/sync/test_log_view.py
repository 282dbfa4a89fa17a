"""A stage's view of the decision log."""

from __future__ import annotations

from hetpipe.spec.ids import Clock, Incarnation, Term, Wave
from hetpipe.sync.log_view import LogView
from hetpipe.sync.records import (
    BarrierRecord,
    CommitRecord,
    EvictRecord,
    InitializeRecord,
    JoinRecord,
    PublishRecord,
    Record,
    TermRecord,
)

from .logs import VW, acknowledge, commit, started
from .scenario import LIFE


def test_it_follows_the_records() -> None:
    view = LogView(Clock(3))
    assert (view.published, view.barrier, view.passed, view.committed) == (2, None, None, {})
    first = BarrierRecord(1, Clock(5), "checkpoint", 0)
    begin: list[Record] = [
        TermRecord(0, Term(1)),
        first,
        JoinRecord(2, VW[0], LIFE, Clock(3)),
        JoinRecord(3, VW[1], LIFE, Clock(3)),
        InitializeRecord(4, Clock(3)),
    ]
    view.follow(begin)
    assert (view.published, view.barrier, view.committed) == (2, first, {0: 3, 1: 3})
    view.follow([PublishRecord(5, Clock(3), (Clock(3),)), CommitRecord(6, VW[1], LIFE, Wave(3), 9)])
    assert (view.published, view.committed, view.passed) == (3, {0: 3, 1: 4}, None)
    assert view.behind(Clock(3)) == []
    assert view.behind(Clock(4)) == [0]
    assert view.behind(Clock(5)) == [0, 1]
    lower = BarrierRecord(7, Clock(4), "stop", 0)
    view.follow([lower, CommitRecord(8, VW[0], LIFE, Wave(3), 9), PublishRecord(9, Clock(4), (Clock(4),))])
    assert view.passed == lower
    following = BarrierRecord(10, Clock(9), "end", 0)
    view.follow([following])
    assert (view.barrier, view.passed) == (following, lower)


def test_an_eviction_ends_the_life_it_names_and_no_other() -> None:
    view = LogView(Clock(0))
    view.follow([JoinRecord(0, VW[0], LIFE, Clock(0)), JoinRecord(1, VW[1], LIFE, Clock(0))])
    view.follow([EvictRecord(2, VW[1], LIFE, Clock(0)), JoinRecord(3, VW[1], Incarnation(1), Clock(7))])
    view.follow([EvictRecord(4, VW[1], LIFE, Clock(0))])
    assert view.committed == {0: 0, 1: 7}


def test_it_agrees_with_the_log() -> None:
    log = started()
    view = LogView(Clock(0))
    for wave in range(4):
        commit(log, 0, wave)
        commit(log, 1, wave)
        acknowledge(log)
    log.request_barrier("stop")
    view.follow(log.records)
    assert view.published == log.published == 4
    assert view.committed == {vw: member.committed for vw, member in log.members.items()}
    assert view.barrier is not None
    assert (view.barrier.clock, view.barrier.reason) == (log.segment.end, log.segment.reason)
