"""A stage's view of the decision log."""

from __future__ import annotations

from dataclasses import replace

from hetpipe.decide.sync.log_view import LogView, is_counted, without_implied
from hetpipe.decide.sync.records import (
    BarrierRecord,
    CommitRecord,
    EvictRecord,
    InitializeRecord,
    PublishRecord,
    Record,
    SegmentMember,
    SegmentRecord,
    TermRecord,
)
from hetpipe.values.ids import Clock, Incarnation, Term, Wave
from tests.decide.sync.logs import VW, acknowledge, commit, started
from tests.decide.sync.scenario import LIFE


def segment(index: int, start: int, reasons: tuple[str, ...], *lives: int) -> SegmentRecord:
    """A segment of virtual workers 0, 1, … in these lives."""
    members = tuple(
        SegmentMember(VW[vw], Incarnation(life), 1, joined=start == 3 or life > 0) for vw, life in enumerate(lives)
    )
    return SegmentRecord(index, Clock(start), reasons, 0, members)


def test_it_follows_the_records() -> None:
    view = LogView(Clock(3))
    assert (view.published, view.barrier, view.segment, view.committed) == (2, None, None, {})
    view.follow([TermRecord(0, Term(1)), InitializeRecord(1, Clock(3), VW[0], LIFE)])
    assert (view.published, view.committed) == (2, {})
    founding, first = segment(3, 3, (), 0, 0), BarrierRecord(4, Clock(5), "checkpoint", 0)
    view.follow([PublishRecord(2, Clock(3), (Clock(3),)), founding, first, CommitRecord(5, VW[1], LIFE, Wave(3), 9)])
    assert (view.published, view.committed, view.segment, view.barrier) == (3, {0: 3, 1: 4}, founding, first)
    assert view.behind(Clock(3)) == []
    assert view.behind(Clock(4)) == [0]
    assert view.behind(Clock(5)) == [0, 1]
    lower = BarrierRecord(6, Clock(4), "stop", 0)
    view.follow([lower, CommitRecord(7, VW[0], LIFE, Wave(3), 9), PublishRecord(8, Clock(4), (Clock(4),))])
    assert (view.segment, view.barrier, view.is_over) == (founding, lower, False)
    last = segment(9, 4, ("stop",), 0, 0)
    view.follow([last])
    assert (view.segment, view.is_over) == (last, True)


def test_members_are_those_of_the_segment_but_for_the_evicted() -> None:
    view = LogView(Clock(3))
    view.follow([segment(0, 3, (), 0, 0), EvictRecord(1, VW[1], LIFE, Clock(3))])
    assert (view.members, view.committed) == ({0: 0}, {0: 3})
    assert view.segment is not None
    assert len(view.segment.members) == 2, "who was dealt something at its start"
    view.follow([segment(2, 7, ("evict", "join"), 0, 1)])
    assert (view.members, view.committed) == ({0: 0, 1: 1}, {0: 7, 1: 7})


def test_it_remembers_who_left_where() -> None:
    """Nobody waits for who leaves to see it."""
    view = LogView(Clock(3))
    view.follow([segment(0, 3, (), 0, 0)])
    leaver = SegmentMember(VW[1], LIFE, 1, joined=False)
    parting = replace(segment(5, 7, ("drain",), 0), left=(leaver,))
    view.follow([parting, segment(9, 8, ("epoch",), 0)])
    assert view.left == {(VW[1], LIFE): parting}
    assert view.members == {0: 0}


def test_it_may_begin_at_any_segment() -> None:
    view = LogView(Clock(0))
    view.follow([segment(20, 9, ("join",), 0, 1)])
    assert (view.published, view.members) == (9, {0: 0, 1: 1})


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


def test_commits_that_a_publication_implies_are_not_needed() -> None:
    """A view of fewer records is the same."""
    records: list[Record] = [
        segment(0, 3, (), 0, 0),
        CommitRecord(1, VW[0], LIFE, Wave(3), 9),
        CommitRecord(2, VW[0], LIFE, Wave(4), 9),
        EvictRecord(3, VW[1], LIFE, Clock(3)),
        PublishRecord(4, Clock(4), (Clock(4),)),
        CommitRecord(5, VW[0], LIFE, Wave(5), 9),
    ]
    needed = without_implied(records)
    assert [record.index for record in needed] == [0, 2, 3, 4, 5]
    assert without_implied(records[1:2]) == tuple(records[1:2]), "nothing is published yet"
    whole, short = LogView(Clock(3)), LogView(Clock(3))
    whole.follow(records)
    short.follow(needed)
    assert vars(whole) == vars(short)
    short = LogView(Clock(3))
    short.follow(without_implied(records[:5:2]))
    assert short.behind(Clock(4)) == [], "nobody is behind what is published"


def test_a_stage_is_counted_by_the_newest_segment() -> None:
    evicted = EvictRecord(1, VW[1], LIFE, Clock(3))
    assert is_counted([evicted], VW[1], LIFE, before=None) is None
    assert is_counted([segment(0, 3, (), 0, 0)], VW[1], LIFE, before=None) is True
    assert is_counted([segment(0, 3, (), 0, 0), evicted], VW[1], Incarnation(1), before=None) is False
    assert is_counted([segment(2, 7, ("join",), 0, 1)], VW[1], Incarnation(1), before=False) is True
    assert is_counted([segment(2, 7, ("join",), 0, 1)], VW[1], LIFE, before=True) is False
