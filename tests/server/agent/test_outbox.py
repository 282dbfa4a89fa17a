"""News go out in batches that keep their number until they are confirmed."""

from __future__ import annotations

import pytest

from hetpipe.server.agent.outbox import MAX_BATCH, MAX_WAITING, Outbox
from hetpipe.values.commands import AgentReport, ChildExit, InspectionStep, KeyedStageReport, StageKey
from hetpipe.values.conditions import Condition, ConditionKind
from hetpipe.values.ids import Clock, StageIndex, Term
from hetpipe.values.ids import VirtualWorkerIndex as Vw
from hetpipe.values.measurement import ProfileStep
from hetpipe.values.members import Registration
from hetpipe.values.run import StageConditions, StageEvaluation, StageReady, StageReport, StageWaiting
from tests.server.coordinator.builders import FIRST_LIFE, JOB_ID, progress
from tests.support.fake_clock import FakeClock

TOKEN = Registration("token")


def of_stage(report: StageReport, stage: int = 0) -> AgentReport:
    return KeyedStageReport(StageKey(JOB_ID, Vw(0), StageIndex(stage), FIRST_LIFE, Term(1)), report)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def outbox(clock: FakeClock) -> Outbox:
    outbox = Outbox(clock)
    outbox.restart(TOKEN)
    return outbox


def test_urgent_news_are_due_at_once_with_all_before_them(outbox: Outbox) -> None:
    first, second = of_stage(progress(samples=1)), of_stage(StageReady(1))
    outbox.put(first)
    assert outbox.take(timeout_seconds=0.0) is None
    outbox.put(second)

    batch = outbox.take(timeout_seconds=0.0)

    assert batch is not None
    assert (batch.registration, batch.number, batch.reports) == (TOKEN, 1, (first, second))


def test_others_wait_for_half_a_second(outbox: Outbox, clock: FakeClock) -> None:
    outbox.put(of_stage(progress(samples=1)))
    clock.advance(0.49)
    assert outbox.take(timeout_seconds=0.0) is None
    clock.advance(0.01)
    assert outbox.take(timeout_seconds=0.0) is not None


def test_of_the_conditions_of_a_stage_only_the_newest_goes_out(outbox: Outbox, clock: FakeClock) -> None:
    first, second = (
        of_stage(
            StageConditions((Condition(ConditionKind.HISTORY_INCOMPLETE, "stage 0", "no room", 1.0, times=times),))
        )
        for times in (1, 2)
    )
    outbox.put(first)
    outbox.put(second)
    clock.advance(0.5)
    batch = outbox.take(timeout_seconds=0.0)
    assert batch is not None
    assert batch.reports == (second,)


def test_steps_of_an_inspection_go_out_however_often_they_come(outbox: Outbox, clock: FakeClock) -> None:
    for done in range(6):
        outbox.put(InspectionStep(JOB_ID, ProfileStep("cpu", "a", done, 100)))
        clock.advance(0.1)

    batch = outbox.take(timeout_seconds=0.0)

    assert batch is not None
    assert batch.reports == (InspectionStep(JOB_ID, ProfileStep("cpu", "a", 5, 100)),)


def test_newer_progress_replaces_older_of_the_same_stage(outbox: Outbox, clock: FakeClock) -> None:
    for samples in (1, 2, 3):
        outbox.put(of_stage(progress(samples=samples)))
        outbox.put(of_stage(progress(samples=10 * samples), stage=1))
        outbox.put(of_stage(StageWaiting("a waits for b", samples)))
    clock.advance(1.0)

    batch = outbox.take(timeout_seconds=0.0)

    assert batch is not None
    assert batch.reports == (
        of_stage(progress(samples=3)),
        of_stage(progress(samples=30), stage=1),
        of_stage(StageWaiting("a waits for b", 3)),
    )


def test_nothing_else_is_replaced(outbox: Outbox) -> None:
    for clock_value in (1, 2):
        outbox.put(of_stage(StageEvaluation(Clock(clock_value), 0, 1, {"loss": 1.0})))

    batch = outbox.take(timeout_seconds=0.0)

    assert batch is not None
    assert len(batch.reports) == 2


def test_a_batch_is_the_same_until_it_is_confirmed(outbox: Outbox) -> None:
    outbox.put(of_stage(StageReady(1)))
    first = outbox.take(timeout_seconds=0.0)
    outbox.put(of_stage(StageReady(2)))
    assert outbox.take(timeout_seconds=0.0) is first
    assert first is not None
    outbox.confirm(first)
    second = outbox.take(timeout_seconds=0.0)
    assert second is not None
    assert (second.number, second.reports) == (2, (of_stage(StageReady(2)),))
    outbox.confirm(first)
    assert outbox.take(timeout_seconds=0.0) is second


def test_a_new_registration_takes_along_what_is_not_confirmed(outbox: Outbox) -> None:
    outbox.put(of_stage(StageReady(1)))
    outbox.take(timeout_seconds=0.0)
    outbox.put(of_stage(StageReady(2)))
    outbox.restart(Registration("newer"))
    batch = outbox.take(timeout_seconds=0.0)
    assert batch is not None
    assert (batch.registration, batch.number, batch.reports) == (
        "newer",
        1,
        (of_stage(StageReady(1)), of_stage(StageReady(2))),
    )
    outbox.confirm(batch)
    outbox.restart(Registration("newest"))
    assert outbox.take(timeout_seconds=0.0) is None


def test_batches_and_the_outbox_are_bounded(outbox: Outbox) -> None:
    key = StageKey(JOB_ID, Vw(0), StageIndex(0), FIRST_LIFE, Term(1))
    for pid in range(MAX_WAITING + 5):
        outbox.put(ChildExit(key, pid, 0))
    pids: list[int] = []
    while batch := outbox.take(timeout_seconds=0.0):
        assert len(batch.reports) <= MAX_BATCH
        pids += [item.pid for item in batch.reports if isinstance(item, ChildExit)]
        outbox.confirm(batch)

    assert pids == list(range(5, MAX_WAITING + 5))


def test_a_closed_outbox_gives_nothing(outbox: Outbox) -> None:
    outbox.put(of_stage(StageReady(1)))
    outbox.close()
    assert outbox.take(timeout_seconds=10.0) is None
