"""What a seed is about: a job, the cluster it runs on, and the mix of faults (swarm: each kind is there or not).

Two kinds of histories are drawn. A short one is a run of a few waves whose faults lie close together while it trains,
and which must come to its end by itself. A storm has jobs without end and some minutes in which anything may happen to
the whole cluster.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from hetpipe.values.policies import POLICIES
from tests.simulation.network import Weather

#: One of each kind of gate; the others choose their clocks as `wave` does.
_WEIGHTS = ("wave", "wave", "flush", "double_buffer")

#: How often each kind of fault is drawn in a storm, against the others; methods of `tests.simulation.faults.Faults`.
STORM: Mapping[str, float] = {
    "kill_stage": 3.0,
    "stage_exits": 1.0,
    "link_breaks": 1.5,
    "no_memory": 0.6,
    "own_fault": 0.15,
    "hang": 1.0,
    "pause_stage": 1.0,
    "slow": 1.5,
    "kill_agent": 1.5,
    "orphan_stages": 1.0,
    "cut_agent": 2.0,
    "depart": 1.5,
    "replace_agent": 0.7,
    "mute": 1.0,
    "kill_shard": 1.5,
    "kill_before_answer": 1.0,
    "kill_all_shards": 0.5,
    "cut_power": 2.0,
    "pause_shard": 1.0,
    "cut_shard": 1.0,
    "old_term": 1.0,
    "lose_disk": 0.4,
    "replace_coordinator": 2.0,
    "lose_node": 1.0,
    "store_away": 0.7,
    "flaky": 1.0,
    "pause": 0.7,
    "ask_barrier": 0.7,
    "drain": 3.0,
    "drain_and_kill": 1.0,
    "drain_all": 0.5,
    "add": 3.0,
    "stop": 0.15,
}

#: The same of a short history, of which a seed has some; what keeps the job from training for long is not among them.
SHORT: Mapping[str, float] = {
    "kill_stage": 2.0,
    "link_breaks": 1.0,
    "pause_stage": 2.0,
    "orphan_stages": 3.0,
    "cut_agent": 1.0,
    "replace_agent": 1.0,
    "kill_shard": 2.0,
    "kill_before_answer": 2.0,
    "kill_all_shards": 0.7,
    "cut_power": 1.0,
    "pause_shard": 1.0,
    "cut_shard": 1.5,
    "old_term": 1.0,
    "lose_disk": 0.2,
    "replace_coordinator": 1.0,
    "flaky": 0.5,
    "pause": 0.5,
    "ask_barrier": 1.5,
    "drain": 1.5,
    "drain_and_kill": 1.0,
    "drain_all": 0.7,
    "add": 1.5,
    "stop": 0.5,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One history's numbers."""

    seed: int
    job: Mapping[str, object]
    """Keys of the job file, dotted."""
    samples: int = 40
    num_agents: int = 2
    num_devices: int = 4
    """Of each agent."""
    num_shards: int = 2
    fsync: bool = False
    """Whether what shards acknowledge outlives their machine, too."""
    snapshots: float = 0.1
    """How likely a shard takes one when it has followed the log."""
    weather: Weather = field(default_factory=Weather)
    faults: Mapping[str, float]
    """Kind → weight."""
    steps: int
    """In which something may go wrong, half a second each."""
    often: float
    """How likely it does in a step."""
    bursts: tuple[int, ...]
    """How much at once then."""
    away: tuple[float, ...]
    """Seconds that somebody is away for."""
    first: float | None
    """Seconds until the first fault; None: it waits until the job trains."""
    another_at: int = -1
    """The step at which another job is handed in."""
    is_short: bool
    """Whether the job has to come to its end by itself."""
    does_without: bool = False
    """Whether afterwards somebody is away for long."""

    def describe(self) -> str:
        """In a few lines."""
        job = " ".join(f"{key}={value}" for key, value in self.job.items())
        cluster = (
            f"{self.num_agents} agents of {self.num_devices} devices, {self.num_shards} shards, fsync={self.fsync}"
        )
        faults = f"{self.steps} steps of {sorted(self.faults)}"
        return f"{job}\n{self.samples} samples, {cluster}, fsync={self.fsync}, {self.weather}\n{faults}"


Draw = Callable[[int], Setting]
"""The setting of a seed."""


def _draw_weather(chance: random.Random) -> Weather:
    """How bad the network of a seed is; in four of ten histories it only takes its time."""
    if chance.random() >= 0.6:
        return Weather()
    return Weather(
        loss=chance.choice([0.0, 0.02, 0.1]),
        duplication=chance.choice([0.0, 0.05, 0.2]),
        slowness=chance.choice([1, 3, 10]),
        lateness=chance.choice([5, 40, 120]),
    )


def _bound(staleness: int | None, *, deterministic: bool) -> Mapping[str, object]:
    if staleness is None:
        return {"sync.kind": "asp"}
    return {"sync.D": staleness} | ({"sync.deterministic": True} if deterministic else {})


def draw_short(seed: int) -> Setting:
    """The short history of a seed."""
    chance = random.Random(f"hetpipe/history/{seed}")
    pick = chance.choice
    workers = [pick([1, 1, 2, 2, 3]) for _ in range(pick([1, 2, 2, 2, 3]))]
    weights = pick(_WEIGHTS)
    staleness = pick([0, 0, 1, 1, 2, 4, None])
    least = POLICIES[weights].least_minibatches_per_wave(max(workers))
    length: dict[str, object] = {"epochs": pick([1, 1, 2])}
    if chance.random() < 0.5:
        length = {"epochs": None, "minibatches": chance.randint(4, 20)}
    job = {
        "workers.count": len(workers),
        "workers.stages": [_cut(count) for count in workers],
        "parameter_servers.count": pick([1, 2, 2, 3]),
        "batch_size": pick([1, 1, 2]),
        "weights": weights,
        "sync.minibatches_per_wave": max(pick([1, 1, 2, 3]), least),
        **_bound(staleness, deterministic=chance.random() < 0.4),
        **length,
        "checkpoint.every_waves": pick([None, None, 1, 2, 3]),
        "survive.restarts": 1000,
        "survive.backoff": "1s",
        "survive.stall": "7s",
    }
    kinds = [kind for kind in SHORT if chance.random() < 0.4]
    num_agents = pick([1, 2, 3])
    return Setting(
        seed=seed,
        job=job,
        samples=chance.randint(4, 16),
        num_agents=num_agents,
        num_devices=-(-sum(workers) // num_agents) + pick([0, 0, 1, 3]),
        num_shards=int(str(job["parameter_servers.count"])),
        fsync=chance.random() < 0.5,
        weather=_draw_weather(chance),
        faults={kind: SHORT[kind] for kind in kinds},
        steps=26,
        often=pick([0.1, 0.2, 0.4]) if kinds else 0.0,
        bursts=(1, 1, 1, 3),
        away=(0.5, 1.0, 2.0, 5.5),
        first=None,
        is_short=True,
    )


def _cut(num_stages: int) -> list[int]:
    """Layers of each stage, of the four there are."""
    return {1: [4], 2: [1, 3], 3: [1, 1, 2]}[num_stages]


def draw_storm(seed: int) -> Setting:
    """The storm of a seed."""
    chance = random.Random(f"hetpipe/storm/{seed}")
    pick = chance.choice
    workers, stages, num_agents = pick([2, 2, 3]), pick([1, 2, 2]), pick([2, 3])
    weights = pick(_WEIGHTS)
    job = {
        "workers.count": workers,
        "workers.stages": stages,
        "epochs": pick([4, 20, 2000, 2000, 2000]),
        "survive.restarts": pick([0, 1, 5, 5]),
        "survive.absence": pick(["20s", "60s"]),
        "survive.stall": "10s",
        "checkpoint.every_waves": pick([3, 10]),
        "weights": weights,
        "batch_size": pick([2, 4]),
        "sync.minibatches_per_wave": max(pick([1, 2, 3]), POLICIES[weights].least_minibatches_per_wave(stages)),
        **_bound(pick([0, 0, 1, 1, 4, None]), deterministic=chance.random() < 0.3),
    }
    return Setting(
        seed=seed,
        job=job,
        num_agents=num_agents,
        num_devices=-(-workers * stages // num_agents) + pick([0, 0, 1, 2, workers * stages]),
        fsync=chance.random() < 0.5,
        weather=_draw_weather(chance),
        faults=STORM,
        steps=pick([60, 200, 400]),
        often=pick([0.03, 0.1, 0.3]),
        bursts=(1, 1, 1, 4),
        away=(0.5, 2.0, 5.5, 8.0, 15.0, 40.0, 70.0),
        first=pick([0.0, 5.0, 10.0, 20.0]),
        another_at=pick([10, 50, -1]),
        is_short=False,
        does_without=True,
    )
