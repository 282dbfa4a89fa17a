"""One history: a job, its processes, its faults, and whether every promise held."""

from __future__ import annotations

from dataclasses import dataclass

from hetpipe.values.policies import POLICIES
from tests.decide.sync.scenario import NUM_LAYERS
from tests.simulation.coordinator import Coordinator
from tests.simulation.job import FAULTY_TICKS, Job, draw
from tests.simulation.nemesis import Nemesis
from tests.simulation.network import Network
from tests.simulation.run import Run
from tests.simulation.scheduler import Scheduler, Violation
from tests.simulation.server import Server
from tests.simulation.stage import Stage

#: A run that is not over so long after the last fault stands still (P5).
_LONGEST_TICKS = FAULTY_TICKS + 6000


@dataclass(frozen=True, slots=True)
class History:
    """What happened under a seed."""

    seed: int
    ticks: int
    records: int
    lives: int
    faults: tuple[str, ...]
    violation: str | None


class World(Run):
    """One run, with a coordinator of few lines, so that ten thousand histories take a minute."""

    def __init__(self, job: Job, seed: int, *, traces: bool = False) -> None:
        scheduler = Scheduler(seed, traces=traces)
        super().__init__(job, scheduler, Network(scheduler, job.faults.weather))
        self.servers = [Server(self, index) for index in range(job.scenario.num_shards)]
        self.coordinator = Coordinator(self)
        #: Virtual worker → its newest life, as the agents know it.
        self.lives: dict[int, int] = {}
        self.nemesis = Nemesis(self)

    # -- running -----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Until the run is over everywhere. Raises `Violation`, or what a machine of hetpipe asserts."""
        for server in self.servers:
            server.start()
        for vw in range(len(self.job.scenario.num_stages)):
            self.begin_life(vw, 0)
        self.coordinator.start()
        self.nemesis.start()
        while not self._is_over():
            if not self.scheduler.step() or self.scheduler.now > _LONGEST_TICKS:
                log = self.servers[0].clock_part.log
                raise Violation(f"P5: nothing moves any more: {log.pending_publish_reason()}; {log.snapshot()}")
        self.promises.check_the_end()

    def _is_over(self) -> bool:
        if not self.promises.finished or self.scheduler.now <= self.nemesis.ends_at:
            return False
        num_records = len(self.promises.records)
        caught_up = all(server.shard.state.followed == num_records for server in self.servers)
        return caught_up and not any(stage.alive for stages in self.stages.values() for stage in stages)

    # -- virtual workers ---------------------------------------------------------------------------------------------

    def num_stages(self, vw: int, incarnation: int) -> int:
        """Of a life; a later one may be cut otherwise."""
        count = self.job.scenario.num_stages[vw]
        if incarnation % 3 == 2:
            count = 1 + count % NUM_LAYERS
        # Some weight policies need as many minibatches per wave as there are stages.
        return count if POLICIES[self.job.weights].least_minibatches_per_wave(count) <= self.job.n else 1

    def begin_life(self, vw: int, incarnation: int) -> None:
        """Start the stage processes of a new life, unless somebody did."""
        if self.lives.get(vw, -1) >= incarnation:
            return
        self.lives[vw] = incarnation
        count = self.num_stages(vw, incarnation)
        stages = [Stage(self, vw, incarnation, index, count) for index in range(count)]
        self.stages[vw, incarnation] = stages
        for stage in stages:
            self.scheduler.at(self.scheduler.random.randint(1, 6), stage.start, stage)

    def has_failed(self, vw: int, incarnation: int, lease: int) -> bool:
        """Whether the agents would say so: a stage is gone, or silent."""
        now = self.scheduler.now
        return any(
            (not stage.alive and not stage.is_done)
            or (stage.paused_since is not None and now - stage.paused_since > lease)
            for stage in self.stages[vw, incarnation]
        )

    def has_left(self, vw: int, incarnation: int) -> bool:
        """Whether all stages of a life have ended in order."""
        return all(stage.is_done for stage in self.stages[vw, incarnation])

    def kill_stages(self, vw: int, incarnation: int) -> None:
        """The agents are told to; one that cannot be reached leaves a zombie."""
        for stage in self.stages[vw, incarnation]:
            if stage.alive and self.scheduler.random.random() < 0.7:
                self.crash_stage(stage)


def run(seed: int, *, traces: bool = False, job: Job | None = None) -> History:
    """The history of a seed; what broke is in it."""
    job = job or draw(seed)
    world = World(job, seed, traces=traces)
    violation = None
    try:
        world.run()
    except Exception as error:  # noqa: BLE001 - whatever a machine raises where it should not
        violation = f"{type(error).__name__}: {error}"
    return History(
        seed,
        world.scheduler.now,
        len(world.promises.records),
        len(world.stages),
        tuple(world.nemesis.done),
        violation,
    )
