"""A stop that is under way when a parameter server loses its disk: the real coordinator, logs and shards, simulated."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetpipe.decide.lifecycle.job_machine import ENDS_AT_CHECKPOINT
from hetpipe.values.events import JobState, StopMode
from hetpipe.values.ids import JobId
from tests.simulation.coordinator_promises import CoordinatorPromises
from tests.simulation.setting import Setting
from tests.simulation.world import World

#: A job that has checkpoints and would train for a long time, and nothing that goes wrong by itself.
SETTING = Setting(
    seed=11,
    job={"workers.count": 2, "workers.stages": 2, "epochs": 2000, "checkpoint.every_waves": 3, "sync.D": 1},
    num_devices=2,
    faults={},
    steps=0,
    often=0.0,
    bursts=(),
    away=(),
    first=None,
    is_short=False,
)


class Stopping:
    """A job that has trained past a checkpoint."""

    def __init__(self, folder: Path) -> None:
        self.world = World(folder, SETTING)
        self.promises = CoordinatorPromises(self.world)
        self.job: JobId = self.world.submit()
        self.until(lambda: self.state is JobState.RUNNING and len(self.checkpoints) >= 2)

    @property
    def state(self) -> JobState:
        assert self.world.coordinator is not None
        return self.world.coordinator.record(self.job).state

    @property
    def checkpoints(self) -> list[object]:
        return [found for told in self.world.shards.checkpoints.values() for found in told]

    def until(self, happened: object, *, seconds: float = 120.0) -> None:
        assert callable(happened)
        for _ in range(round(seconds / 0.5)):
            if happened():
                return
            self.promises.check()
            self.world.step()
        raise AssertionError(f"not within {seconds:.0f} s; the job is {self.state}")

    def lose_disk(self, index: int) -> None:
        shard = self.world.shards.all[index]
        shard.kill()
        shard.lose_disk()
        self.world.later(5.0, lambda: self.world.begin_shard(shard))


@pytest.mark.parametrize("index", [0, 1])
def test_it_ends_at_the_newest_checkpoint_and_says_so(tmp_path: Path, index: int) -> None:
    case = Stopping(tmp_path)
    world = case.world
    assert world.coordinator is not None
    world.coordinator.stop_job(case.job, StopMode.CHECKPOINT)
    case.lose_disk(index)
    case.until(lambda: world.has_ended(case.job))

    record = world.coordinator.record(case.job)
    assert record.state is JobState.STOPPED
    assert f"parameter server ps{index} " in record.failure
    assert record.failure.endswith(f"; {ENDS_AT_CHECKPOINT}")
    case.until(lambda: not case.promises.left_over(case.job), seconds=30.0)


def test_also_where_the_coordinator_goes_with_the_disk(tmp_path: Path) -> None:
    case = Stopping(tmp_path)
    world = case.world
    assert world.coordinator is not None
    world.coordinator.stop_job(case.job, StopMode.CHECKPOINT)
    case.lose_disk(0)
    world.coordinator = None
    world.later(2.0, world.begin_coordinator)
    case.until(lambda: world.coordinator is not None)
    case.until(lambda: world.has_ended(case.job))

    assert world.coordinator is not None
    record = world.coordinator.record(case.job)
    assert record.state is JobState.STOPPED
    assert record.failure.endswith(f"; {ENDS_AT_CHECKPOINT}")
    case.until(lambda: not case.promises.left_over(case.job), seconds=30.0)


def test_a_stop_without_a_fault_ends_at_its_barrier(tmp_path: Path) -> None:
    """And says nothing: the same job, with its disks."""
    case = Stopping(tmp_path)
    assert case.world.coordinator is not None
    case.world.coordinator.stop_job(case.job, StopMode.CHECKPOINT)
    case.until(lambda: case.world.has_ended(case.job))

    record = case.world.coordinator.record(case.job)
    assert (record.state, record.failure) == (JobState.STOPPED, "")
