"""What a seed is about: the numbers of a job, and the mix of faults (swarm: each kind is there or not)."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from hetpipe.decide.sync.decision_log import LogConfig
from hetpipe.values import policies
from hetpipe.values.ids import Incarnation, JobId, StageIndex, Term, VirtualWorkerIndex, Wave
from hetpipe.values.plan import SlicePlan
from hetpipe.values.requests import PushHeader, Requester, SliceHeader
from tests.decide.sync.scenario import JOB, NUM_LAYERS, POLICIES, TERM, Scenario, slice_header
from tests.simulation.network import Weather

#: After so many ticks no new fault happens.
FAULTY_TICKS = 160


@dataclass(slots=True, kw_only=True)
class Faults:
    """How often each kind happens; most are 0 in most histories."""

    weather: Weather = field(default_factory=Weather)
    stage_crashes: int = 0
    stage_pauses: int = 0
    false_evictions: int = 0
    server_crashes: int = 0
    server_pauses: int = 0
    all_servers_crash: int = 0
    """All shards at once."""
    power_cuts: int = 0
    """A shard's machine, if it syncs its disk."""
    coordinator_crashes: int = 0
    clock_jumps: int = 0
    """Of the coordinator: every lease has run out."""
    cuts: int = 0
    """Pairs of processes that do not reach each other for a while."""
    barriers: int = 0
    """That somebody asks for."""
    drains: int = 0
    """Virtual workers that leave at a barrier."""
    old_terms: int = 0
    """Pushes by a stage of an earlier term."""
    stop: int = 0
    drains_of_all: int = 0
    """All virtual workers at once."""
    drained_evictions: int = 0
    """Virtual workers that are evicted on their way out, or with it behind them."""


def slices_of(scenario: Scenario) -> dict[int, tuple[SlicePlan, ...]]:
    """What each shard holds."""
    return {shard: scenario.slices_of_shard(shard) for shard in range(scenario.num_shards)}


class Job:
    """A scenario with what everybody looks up all the time, and its faults."""

    def __init__(
        self,
        scenario: Scenario,
        faults: Faults,
        *,
        fsync: bool,
        name: tuple[JobId, Term] = (JOB, TERM),
        log_config: LogConfig | None = None,
    ) -> None:
        """A job of `scenario`; `log_config`: the one that a coordinator has sent, should there be one."""
        self.scenario = scenario
        self.id, self.term = name
        self.log_config = log_config or scenario.log_config()
        self.members = self.log_config.membership.members
        self.progress = self.log_config.progress
        self.faults = faults
        self.fsync = fsync
        self.n, self.d, self.sync = scenario.n, scenario.d, scenario.sync
        self.weights, self.deterministic = scenario.weights, scenario.deterministic
        self.data = scenario.data
        self.slices = slices_of(scenario)
        self._headers: dict[tuple[int, int, int], tuple[SliceHeader, ...]] = {}

    def headers(self, num_stages: int, stage: int, shard: int) -> tuple[SliceHeader, ...]:
        """What a stage holds of a shard: layer l belongs to stage l, the last stage takes the rest."""
        key = (num_stages, stage, shard)
        found = self._headers.get(key)
        if found is None:
            mine = (s for s in self.slices[shard] if min(s.layer, num_stages - 1) == stage)
            found = self._headers[key] = tuple(slice_header(s) for s in mine)
        return found

    def describe(self) -> str:
        """In a few lines."""
        present = {name: value for name in Faults.__slots__ if (value := getattr(self.faults, name))}
        return f"{self.scenario}\nfsync={self.fsync} {present}"


def push_header(requester: Requester, wave: int | None, slices: tuple[SliceHeader, ...]) -> PushHeader:
    """A push of `slices`."""
    return PushHeader(requester, None if wave is None else Wave(wave), slices)


def draw(seed: int) -> Job:
    """The job of a seed."""
    chance = random.Random(f"hetpipe/job/{seed}")
    pick = chance.choice
    staleness = pick([0, 0, 1, 1, 2, 4, None])
    by_epochs = chance.random() < 0.5
    num_samples = chance.randint(4, 16)
    workers = pick([1, 2, 2, 2, 3])
    num_stages = tuple(pick([1, 1, 2, 2, NUM_LAYERS]) for _ in range(workers))
    weights = pick([*POLICIES, "wave"])
    scenario = Scenario(
        num_stages=num_stages,
        num_shards=pick([1, 2, 2, 3]),
        n=max(pick([1, 1, 2, 3]), policies.POLICIES[weights].least_minibatches_per_wave(max(num_stages))),
        d=staleness,
        weights=weights,
        deterministic=staleness is not None and chance.random() < 0.4,
        num_samples=num_samples,
        batch_size=pick([1, 1, 2]),
        epochs=pick([1, 1, 2]) if by_epochs else None,
        total_minibatches=None if by_epochs else chance.randint(4, 20),
        every=pick([None, None, 1, 2, 3]),
    )
    return Job(scenario, _draw_faults(chance), fsync=chance.random() < 0.5)


def draw_weather(chance: random.Random) -> Weather:
    """How bad the network of a seed is; in four of ten histories it only takes its time."""
    if chance.random() >= 0.6:
        return Weather()
    return Weather(
        loss=chance.choice([0.0, 0.02, 0.1]),
        duplication=chance.choice([0.0, 0.05, 0.2]),
        slowness=chance.choice([1, 3, 10]),
        lateness=chance.choice([5, 40, 120]),
    )


def _draw_faults(chance: random.Random) -> Faults:
    def some(*counts: int) -> int:
        return chance.choice(counts) if chance.random() < 0.4 else 0

    return Faults(
        weather=draw_weather(chance),
        stage_crashes=some(1, 2, 3),
        stage_pauses=some(1, 2),
        false_evictions=some(1, 2),
        server_crashes=some(1, 2, 4),
        server_pauses=some(1, 2),
        all_servers_crash=some(1),
        power_cuts=some(1, 2),
        coordinator_crashes=some(1, 2),
        clock_jumps=some(1),
        cuts=some(1, 2, 3),
        barriers=some(1, 2),
        drains=some(1, 2),
        old_terms=some(1, 3),
        stop=some(0, 0, 1),
        drains_of_all=some(1),
        drained_evictions=some(1, 2),
    )


def requester(job: JobId, vw: int, incarnation: int, stage: int, term: int) -> Requester:
    """How a stage names itself."""
    return Requester(job, Term(term), VirtualWorkerIndex(vw), Incarnation(incarnation), StageIndex(stage))
