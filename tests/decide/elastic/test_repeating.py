"""Which runs no script repeats, and why."""

from __future__ import annotations

import pytest

from hetpipe.decide.elastic.repeating import MemberEvent, Past, unrepeatable
from hetpipe.job.elastic import AddLine, DropLine, MoveLine, ScriptLine, ScriptMoment
from hetpipe.values.ids import Clock
from hetpipe.values.ids import VirtualWorkerIndex as Vw


def publish(clock: int) -> MemberEvent:
    return MemberEvent("publish", Clock(clock))


def join(vw: int, clock: int, *bounds: int) -> tuple[MemberEvent, MemberEvent]:
    return MemberEvent("join", Clock(clock), Vw(vw)), MemberEvent("plan", Clock(clock), Vw(vw), bounds or (0, 2, 4))


def evict(vw: int, clock: int) -> MemberEvent:
    return MemberEvent("evict", Clock(clock), Vw(vw))


def barrier(clock: int, *, ends_run: bool = False) -> MemberEvent:
    return MemberEvent("barrier", Clock(clock), ends_run=ends_run)


def drop(vw: int, clock: int) -> DropLine:
    return DropLine(at=ScriptMoment(clock=clock), do="drop", vw=vw)


def add(vw: int, clock: int, stages: tuple[int, ...] | None = None, devices: tuple[int, ...] | None = None) -> AddLine:
    return AddLine(at=ScriptMoment(clock=clock), do="add", vw=vw, stages=stages, devices=devices)


BEGIN = (*join(0, 0), *join(1, 0))
LEAVES: list[ScriptLine] = [drop(1, 3), add(1, 6)]


@pytest.mark.parametrize(
    ("script", "events", "reason"),
    [
        ([], BEGIN, None),
        ([], (*BEGIN, evict(1, 3)), "virtual worker 1 died, having committed 3 waves; what it did depends on when"),
        ([], (*BEGIN, barrier(4, ends_run=True), publish(4), evict(1, 4)), None),
        ([], (*BEGIN, barrier(4, ends_run=True), publish(3), evict(1, 3)), "virtual worker 1 died"),
        # Of a run that ends no barrier, or another one than that which was set first.
        ([], (*BEGIN, barrier(4, ends_run=True), barrier(3), publish(3), evict(1, 3)), "virtual worker 1 died"),
        ([], join(0, 0), "virtual worker 1 was not there when the run began"),
        ([add(1, 4)], (*join(0, 0), *join(1, 4)), None),
        (LEAVES, (*BEGIN, *join(1, 6)), None),
        (LEAVES, (*BEGIN, *join(1, 6, 0, 4)), "virtual worker 1 was restarted with another cut at clock 6"),
        (LEAVES, (*BEGIN, *join(1, 6, 0, 1, 4)), "virtual worker 1 was restarted with another cut at clock 6"),
        ([*LEAVES, add(1, 6, (1, 3))], (*BEGIN, *join(1, 6, 0, 1, 4)), None),
        (
            [MoveLine(at=ScriptMoment(clock=2), do="move", vw=1, stages=(1, 3)), *LEAVES],
            (*BEGIN, MemberEvent("plan", Clock(2), Vw(1), (0, 1, 4)), *join(1, 6, 0, 1, 4)),
            None,
        ),
        (
            [add(2, 2, (4,), (4,)), drop(2, 4), add(2, 6, (4,), (5,))],
            BEGIN,
            "virtual worker 2, which an operator has added, was lost in a rewind and added again",
        ),
    ],
)
def test_a_run_is_repeated_or_not(
    script: list[ScriptLine], events: tuple[MemberEvent, ...], reason: str | None
) -> None:
    found = unrepeatable(script, [Past(Clock(0), 2, events)], compresses=False, recuts=False)
    assert (found or "").startswith(reason or "nothing") or found is reason is None


@pytest.mark.parametrize(
    ("first", "later", "reason"),
    [
        ((publish(4), evict(1, 4)), BEGIN, None),
        ((evict(1, 2), publish(4)), BEGIN, "virtual worker 1 died, having committed 2 waves"),
        # A cut that was decided at the checkpoint itself holds from there on.
        ((publish(4), MemberEvent("plan", Clock(4), Vw(1), (0, 1, 4))), (*join(0, 4), *join(1, 4, 0, 1, 4)), None),
        ((publish(4),), (*join(0, 4), *join(1, 4, 0, 4)), "virtual worker 1 was restarted with another cut at clock 4"),
        ((publish(4), *join(1, 5, 0, 4)), (*join(0, 4), *join(1, 4)), None),
    ],
)
def test_what_lies_beyond_the_checkpoint_of_a_rewind_did_not_happen(
    first: tuple[MemberEvent, ...], later: tuple[MemberEvent, ...], reason: str | None
) -> None:
    pasts = [Past(Clock(0), 2, (*BEGIN, *first)), Past(Clock(4), 2, later)]
    found = unrepeatable([], pasts, compresses=False, recuts=False)
    assert (found or "").startswith(reason or "nothing") or found is reason is None


def test_who_is_absent_may_be_cut_anew_by_the_script_itself() -> None:
    past = Past(Clock(0), 2, (*BEGIN, *join(1, 6, 0, 1, 4)))
    assert unrepeatable(LEAVES, [past], compresses=False, recuts=True) is None
    later = Past(Clock(0), 3, BEGIN)
    assert unrepeatable([], [later], compresses=True, recuts=False) is None
