"""Where does a segment end, for a stage that reads the log late?"""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

from hetpipe.decide.sync.log_view import LogView
from hetpipe.decide.sync.records import BarrierRecord, PublishRecord, SegmentMember, SegmentRecord
from hetpipe.pipeline.segment_run import SegmentRun
from hetpipe.values.ids import Clock, Incarnation, VirtualWorkerIndex


def end(view: LogView, start: int) -> Clock | None:
    """What the run of the segment from `start` on takes for its end."""
    run = SimpleNamespace(_inbox=SimpleNamespace(log=view), _start=Clock(start))
    return cast("property", SegmentRun._end).fget(run)  # type: ignore[misc, no-any-return]


def segment(index: int, start: int) -> SegmentRecord:
    """One virtual worker, alone."""
    return SegmentRecord(
        index, Clock(start), (), 0, (SegmentMember(VirtualWorkerIndex(0), Incarnation(0), 1, joined=start == 0),)
    )


def test_the_next_segments_barrier_is_not_taken_for_this_ones() -> None:
    """Its waves are all committed before it reads that a barrier was set behind them; the next one is known by then."""
    view = LogView(Clock(0))
    assert end(view, 0) is None
    view.follow([PublishRecord(0, Clock(0), (Clock(0),)), segment(1, 0), BarrierRecord(2, Clock(9), "end", 0)])
    assert end(view, 0) == 9
    lower = BarrierRecord(3, Clock(2), "join", 0)
    view.follow([lower, PublishRecord(4, Clock(2), (Clock(2),)), segment(5, 2), BarrierRecord(6, Clock(9), "end", 0)])
    assert end(view, 0) == 2
    assert end(view, 2) == 9
