"""What the job's own thread does for a move of layers: it tells the clock shard, and waits for a checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hetpipe.decide.lifecycle.configs import data_of, fresh_progress, run_document
from hetpipe.decide.lifecycle.exchange import Admit, AdmitAcknowledged, ShardCallFailed
from hetpipe.decide.planner.partition import plan_job
from hetpipe.server.coordinator.tasks import JobTasks
from hetpipe.storage.memory_store import MemoryStore
from hetpipe.values.ids import Clock, Incarnation
from hetpipe.values.ids import VirtualWorkerIndex as Vw
from hetpipe.values.run_document import RunDescription
from tests.decide.elastic.test_repartitions import FOLDER, SLOW, Run
from tests.server.coordinator.builders import JOB_ID, clocks, job, model, submission
from tests.server.coordinator.fakes import FakeShards
from tests.server.coordinator.machine_driver import Driver
from tests.support.fake_clock import FakeClock


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def admit_of(run: Run) -> Admit:
    run.go_on(SLOW, windows=7)
    run.answer()
    run.leave()
    return run.tasks(Admit)[-1]


def tasks_of(shards: FakeShards, clock: FakeClock) -> JobTasks:
    of = job()
    return JobTasks(
        JOB_ID, of, submission(of), submitted_wall=1.0, store=MemoryStore(), tools=shards.tools, clock=clock
    )


def test_a_life_by_a_new_plan_waits_a_while_for_its_checkpoint(run: Run) -> None:
    admit = admit_of(run)
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

    assert tasks.run(admit) == AdmitAcknowledged(Vw(1), Incarnation(1), FOLDER)
    assert admit.replan is not None
    [(_, (_, _, kept))] = shards.asked("keep_run")
    assert kept == replace(description(run).run, plan=admit.replan.plan)


def test_it_does_not_wait_for_ever(run: Run) -> None:
    admit = admit_of(run)
    shards, clock = FakeShards(), FakeClock()
    shards.descriptions[JOB_ID] = description(run)
    assert admit.replan is not None
    clock.advance(admit.replan.awaited_until - 0.1 - clock.monotonic())
    assert isinstance(tasks_of(shards, clock).run(admit), ShardCallFailed)
    clock.advance(0.1)

    assert tasks_of(shards, clock).run(admit) == AdmitAcknowledged(Vw(1), Incarnation(1), None)


def description(run: Run) -> RunDescription:
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
