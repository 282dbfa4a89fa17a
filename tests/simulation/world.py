"""One history: a job, its processes, its faults, and whether every promise held."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from hetpipe.values.ids import VirtualWorkerIndex
from hetpipe.values.policies import POLICIES
from tests.decide.sync.scenario import NUM_LAYERS
from tests.simulation.coordinator import Coordinator
from tests.simulation.job import FAULTY_TICKS, Job, draw
from tests.simulation.nemesis import Nemesis
from tests.simulation.network import Network
from tests.simulation.promises import Promises
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


class World:
    """All of it."""

    def __init__(self, job: Job, seed: int, *, traces: bool = False) -> None:
        self.job = job
        self.scheduler = Scheduler(seed, traces=traces)
        self.network = Network(self.scheduler, job.faults.weather)
        self.promises = Promises(job)
        self.servers = [Server(self, index) for index in range(job.scenario.num_shards)]
        self.coordinator = Coordinator(self)
        #: Virtual worker → its newest life, as the agents know it.
        self.lives: dict[int, int] = {}
        #: Life → its stages.
        self.stages: dict[tuple[int, int], list[Stage]] = {}
        #: Link → when its latest frame arrives: frames keep their order.
        self._frame_times: dict[tuple[Stage, int], int] = {}
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

    def is_gone(self, vw: int, incarnation: int) -> bool:
        """Whether the clock shard would say that a life is over."""
        log, index = self.servers[0].clock_part.log, VirtualWorkerIndex(vw)
        lives = (log.members.get(index), log.newcomers.get(index), log.leavers.get(index))
        return not any(life is not None and life.incarnation == incarnation for life in lives)

    def kill_stages(self, vw: int, incarnation: int) -> None:
        """The agents are told to; one that cannot be reached leaves a zombie."""
        for stage in self.stages[vw, incarnation]:
            if stage.alive and self.scheduler.random.random() < 0.7:
                self.crash_stage(stage)

    def crash_stage(self, stage: Stage) -> None:
        """Kill it."""
        if stage.alive:
            self.scheduler.trace(stage, "is killed")
            stage.end()
            self.close_links(stage)

    def close_links(self, stage: Stage) -> None:
        """The neighbours of a stage that is gone notice."""
        for other in self.stages[stage.vw, stage.incarnation]:
            if abs(other.index - stage.index) == 1 and other.alive:
                self.scheduler.at(3, partial(other.leave, "ends: lost its neighbour"), other)

    def send_frame(self, sender: Stage, index: int, take: Callable[[Stage], None]) -> None:
        """From a stage to its neighbour, in order."""
        receiver = self.stages[sender.vw, sender.incarnation][index]
        link = (sender, index)
        arrival = max(self.scheduler.now + self.compute_ticks(), self._frame_times.get(link, 0))
        self._frame_times[link] = arrival
        self.scheduler.at(arrival - self.scheduler.now, lambda: take(receiver), receiver)

    def compute_ticks(self) -> int:
        """How long a minibatch takes at a stage."""
        return self.scheduler.random.randint(1, 3)

    def request_barrier(self, reason: str) -> object:
        """At shard 0."""
        if reason == "stop" and not self.promises.finished and self.promises.start >= 0:
            self.promises.stop_is_asked = True
        return self.servers[0].clock_part.decide("request_barrier", reason)


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
