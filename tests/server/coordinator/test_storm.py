"""Whole coordinators in random storms: nothing breaks meanwhile, and afterwards everything goes on or says why not.

A seed gives a storm: `python -m tests.server.coordinator.test_storm 17` plays one again, and tells its story.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import pytest
from structlog.testing import capture_logs

from hetpipe.errors import UnknownJob
from hetpipe.values.events import StopMode
from hetpipe.values.policies import POLICIES, WeightPolicy
from tests.server.coordinator.storm.faults import Faults
from tests.server.coordinator.storm.promises import Broken, Promises
from tests.server.coordinator.storm.world import STEP_SECONDS, World
from tests.simulation.bugs import BUGS

#: How long everything may take to be well again once nothing goes wrong any more, and to end once it is told to.
_WELL_SECONDS = 400.0
_ENDED_SECONDS = 700.0
#: How long somebody may be away before that, and after how long everybody knows of it.
_AWAY_SECONDS, _TOLD_SECONDS = 100.0, 30.0


class Storm:
    """One."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.random = random = Random(seed)
        workers, stages = random.choice([2, 2, 3]), random.choice([1, 2, 2])
        num_agents = random.choice([2, 3])
        num_devices = -(-workers * stages // num_agents) + random.choice([0, 0, 1, 2, workers * stages])
        weights: WeightPolicy = random.choice(["wave", "wave", "flush", "double_buffer"])
        least = POLICIES[weights].least_minibatches_per_wave(stages)
        staleness = random.choice([0, 0, 1, 1, 4, None])
        bound = ["sync.kind=asp"] if staleness is None else [f"sync.D={staleness}"]
        if staleness is not None and random.random() < 0.3:
            bound.append("sync.deterministic=true")
        self.world = World(folder, random, num_agents=num_agents, num_devices=num_devices)
        self.faults = Faults(self.world)
        self.promises = Promises(self.world)
        self.overrides = [
            f"workers.count={workers}",
            f"workers.stages={stages}",
            f"epochs={random.choice([4, 20, 2000, 2000, 2000])}",
            f"survive.restarts={random.choice([0, 1, 5, 5])}",
            f"survive.absence={random.choice([20, 60])}s",
            "survive.stall=10s",
            f"checkpoint.every_waves={random.choice([3, 10])}",
            f"weights={weights}",
            f"batch_size={random.choice([2, 4])}",
            f"sync.minibatches_per_wave={max(random.choice([1, 2, 3]), least)}",
            *bound,
        ]

    def _step(self) -> None:
        self.promises.check()
        self.world.step()
        self.promises.check()

    def wait(self, seconds: float) -> None:
        for _ in range(round(seconds / STEP_SECONDS)):
            self._step()

    def blow(self) -> None:
        """Some minutes with faults."""
        self.world.submit(*self.overrides, request_id=f"{self.random.randrange(10**8):08d}")
        self.wait(self.random.choice([0.0, 5.0, 10.0, 20.0]))
        often, another_at = self.random.choice([0.03, 0.1, 0.3]), self.random.choice([10, 50, 10_000])
        for step in range(self.random.choice([60, 200, 400])):
            if step == another_at and self.world.coordinator is not None and not self.world.store.away:
                self.world.submit(*self.overrides, request_id=f"{self.random.randrange(10**8):08d}")
            if self.random.random() < often:
                for _ in range(self.random.choice([1, 1, 1, 4])):
                    self.faults.one()
            self._step()

    def settle(self) -> None:
        """Nothing goes wrong any more: everything is well again."""
        self._do_without(self.random.choice([*self.world.agents, "ps0", "ps1", *[""] * 5]))
        self.faults.heal()
        for _ in range(round(_WELL_SECONDS / STEP_SECONDS)):
            self._step()
            wrong = [why for job in self.world.jobs if (why := self.promises.why_not_well(job))]
            if not wrong:
                return
        raise Broken(f"after {_WELL_SECONDS:.0f} s without a fault: {wrong}")

    def _do_without(self, name: str) -> None:
        """All is well but for one who is away for long: a job goes on without it, or says for whom it waits."""
        if not name:
            return
        self.faults.heal()
        for step in range(round(_AWAY_SECONDS / STEP_SECONDS)):
            if name.startswith("ps"):
                self.world.shards.all[int(name[2:])].kill()
            else:
                self.world.agents[name].die()
            self._step()
            for job in self.world.jobs if step * STEP_SECONDS > _TOLD_SECONDS else ():
                self.promises.check_told(job)

    def end(self) -> None:
        """All jobs are told to stop, and nothing is left of them."""
        assert self.world.coordinator is not None
        for job in self.world.jobs:
            with suppress(UnknownJob):
                self.world.coordinator.stop_job(job, StopMode.CHECKPOINT)
        for _ in range(round(_ENDED_SECONDS / STEP_SECONDS)):
            self._step()
            if all(self.world.has_ended(job) for job in self.world.jobs):
                self.wait(30.0)
                left = [found for job in self.world.jobs if (found := self.promises.left_over(job))]
                if left:
                    raise Broken(left[0])
                return
        raise Broken(f"not ended {_ENDED_SECONDS:.0f} s after they were told to stop: {self.world.jobs}")


def play(folder: Path, seed: int) -> Storm:
    """One storm, from its beginning to its end.

    Raises:
        Broken: a promise is; the story is told.
    """
    storm = Storm(folder, seed)
    told = ""
    with capture_logs() as logs:
        try:
            storm.blow()
            storm.settle()
            storm.end()
        except Exception as error:  # noqa: BLE001 - whatever it is, the seed must be told
            told = f"{type(error).__name__}: {error}"
    errors = [line for line in logs if line["log_level"] == "error"]
    if told or errors:
        raise Broken("\n".join([f"seed {seed}: {told or errors[0]}", str(storm.overrides), *storm.faults.story]))
    return storm


@pytest.mark.matrix
def test_some_storms(tmp_path: Path) -> None:
    for seed in range(12):
        play(tmp_path / str(seed), seed)


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", range(100, 700, 100))
def test_many_storms(tmp_path: Path, first: int) -> None:
    for seed in range(first, first + 100):
        play(tmp_path / str(seed), seed)


#: Bugs of `tests/simulation/bugs.py` → a storm that shows them. The other five are too rare in storms.
_SEEN: dict[str, int] = {
    "answered-before-synced": 17,
    "answered-before-written": 5,
    "clock-begins-again": 5,
    "commit-off-by-one": 4,
    "dead-in-minimum": 2,
    "events-not-synced": 28,
    "eviction-takes-back": 31,
    "folder-not-synced": 17,
    "gate-off-by-one": 4,
    "held-clock-freed": 4,
    "hold-not-written": 20,
    "leaver-in-minimum": 2,
    "leaver-not-awaited": 19,
    "minimum-of-nothing": 0,
    "no-incarnation": 3,
    "old-barrier-drops": 6,
    "old-term": 35,
    "published-early": 1,
    "records-forgotten": 5,
    "rejoins-below": 2,
    "reported-early": 1,
    "serves-early": 9,
    "staged-in-memory": 5,
    "stranger-for-good": 2,
}


@pytest.mark.matrix
@pytest.mark.parametrize("name", sorted(_SEEN))
def test_a_storm_sees_a_bug(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the decision log and the shards: they are the real ones, whoever leads."""
    BUGS[name].patch(monkeypatch)
    # Where the machines have changed, another storm may be the one that shows it.
    seen = (_breaks(tmp_path / str(number), seed) for number, seed in enumerate((_SEEN[name], *range(40))))
    assert any(seen), f"nobody saw it: {BUGS[name].what}"


def _breaks(folder: Path, seed: int) -> bool:
    try:
        play(folder, seed)
    except Broken:
        return True
    return False


def main(seeds: Sequence[str]) -> None:
    """Play storms again by their seeds, and tell what happened."""
    for seed in map(int, seeds):
        with TemporaryDirectory() as folder:
            try:
                storm = play(Path(folder), seed)
                told = "\n".join([str(storm.overrides), *storm.faults.story, f"seed {seed}: all is well"])
            except Broken as error:
                told = str(error)
        sys.stdout.write(told + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
