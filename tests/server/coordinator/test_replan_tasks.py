"""What the job's own thread does for another plan: it tells the clock shard, and waits for a checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hetpipe.decide.lifecycle.configs import data_of, fresh_progress, run_document
from hetpipe.decide.lifecycle.exchange import (
    AdmitAcknowledged,
    FileJudgement,
    MoveAnswered,
    MoveLayers,
    ShardCallFailed,
)
from hetpipe.decide.planner.partition import plan_job
from hetpipe.errors import PeerUnreachable, StaleIncarnation
from hetpipe.server.coordinator.tasks import JobTasks
from hetpipe.server.decisions_file import read_decisions
from hetpipe.storage.memory_store import MemoryStore
from hetpipe.values.decisions import MoveJudgement
from hetpipe.values.ids import Clock, Incarnation, Term
from hetpipe.values.ids import VirtualWorkerIndex as Vw
from hetpipe.values.run_document import RunDescription
from hetpipe.values.sync import PlanMove
from tests.server.coordinator.builders import JOB_ID, clocks, job, model, shard_member, submission
from tests.server.coordinator.fakes import FakeShard, FakeShards
from tests.server.coordinator.machine_driver import Driver
from tests.server.coordinator.test_fewer_devices import Alone
from tests.support.fake_clock import FakeClock

FOLDER = "/run/checkpoints/clock-00000040"


@pytest.fixture
def run(tmp_path: Path) -> Alone:
    return Alone(tmp_path, on_notice=True)


def tasks_of(shards: FakeShards, clock: FakeClock) -> JobTasks:
    of = job()
    return JobTasks(
        JOB_ID, of, submission(of), submitted_wall=1.0, store=MemoryStore(), tools=shards.tools, clock=clock
    )


def test_a_life_by_a_new_plan_waits_a_while_for_its_checkpoint(run: Alone) -> None:
    admit = run.admit()
    shards, clock = FakeShards(), FakeClock()
    shards.newest_checkpoint = FOLDER
    shards.progress[FOLDER] = replace(fresh_progress(40), clock=Clock(39))
    shards.descriptions[JOB_ID] = description(run)
    tasks = tasks_of(shards, clock)
    refused = tasks.run(admit)
    assert isinstance(refused, ShardCallFailed)
    assert refused.sentence == "the checkpoint of clock 40 is not complete yet; it is waited for"
    assert shards.asked("admit") == []
    shards.progress[FOLDER] = replace(fresh_progress(40), clock=Clock(40))

    assert tasks.run(admit) == AdmitAcknowledged(Vw(0), Incarnation(1), FOLDER)
    assert admit.replan is not None
    [(_, (_, _, kept))] = shards.asked("keep_run")
    assert kept == replace(description(run).run, plan=admit.replan.plan)


def test_it_does_not_wait_for_ever(run: Alone) -> None:
    admit = run.admit()
    shards, clock = FakeShards(), FakeClock()
    shards.descriptions[JOB_ID] = description(run)
    assert admit.replan is not None
    clock.advance(admit.replan.awaited_until - 0.1 - clock.monotonic())
    assert isinstance(tasks_of(shards, clock).run(admit), ShardCallFailed)
    clock.advance(0.1)

    assert tasks_of(shards, clock).run(admit) == AdmitAcknowledged(Vw(0), Incarnation(1), None)


def description(run: Alone) -> RunDescription:
    """What the clock shard knows, as far as it counts here."""
    lives = run.machine.lives
    assert lives is not None
    assignment = lives.assignment
    plan = plan_job(run.job, model(), assignment.agents, Driver.TERM, JOB_ID)
    kept = run_document(
        replace(assignment, plan=plan),
        data_of(run.job, model()),
        fresh_progress(40),
        eval_samples=None,
        submitted_wall=1.0,
    )
    return RunDescription(Driver.TERM, kept, (), clocks(40, 40), (), is_over=False)


MOVE = PlanMove(Incarnation(0), (0, 3, 4), "straggler", "stage 1 is slow", 0.5)


def test_the_clock_shard_is_asked_for_a_move() -> None:
    shards = FakeShards()
    tasks = tasks_of(shards, FakeClock())
    task = MoveLayers(Vw(1), MOVE, Term(1), shard_member(0))

    assert tasks.run(task) == MoveAnswered(Vw(1), Incarnation(0), "accepted")
    [(_, asked)] = shards.asked("move")
    assert asked == (JOB_ID, Term(1), Vw(1), MOVE)


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (PeerUnreachable("gone"), "unreachable"),
        (StaleIncarnation("it is evicted"), "refused"),
        (RuntimeError("a bug"), "refused"),
    ],
)
def test_a_clock_shard_that_does_not_take_it(error: Exception, outcome: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise error

    monkeypatch.setattr(FakeShard, "move", refuse)
    answer = tasks_of(FakeShards(), FakeClock()).run(MoveLayers(Vw(1), MOVE, Term(1), shard_member(0)))

    assert isinstance(answer, MoveAnswered)
    assert answer.outcome == outcome


def test_what_a_move_has_gained_is_filed_once(tmp_path: Path) -> None:
    of = job()
    tasks = JobTasks(
        JOB_ID,
        of,
        submission(of, str(tmp_path)),
        submitted_wall=1.0,
        store=MemoryStore(),
        tools=FakeShards().tools,
        clock=FakeClock(),
    )
    for _ in range(2):
        assert tasks.run(FileJudgement(Vw(1), 3, 0.25, "faster")) is None
    (line,) = read_decisions(tmp_path)

    assert isinstance(line, MoveJudgement)
    assert (line.vw, line.version, line.measured_gain) == (1, 3, 0.25)
