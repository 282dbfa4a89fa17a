"""One term of a job: its shards, its stages, and what was promised. Every simulated world trains such runs.

Shards hold the real decision log and real shard states (`server`), stages are models (`stage`). Who begins, ends and
evicts stages is the world's to say, which derives from `Run` or has several of them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from hetpipe.values.ids import VirtualWorkerIndex
from hetpipe.values.requests import SliceHeader
from tests.simulation.job import Job
from tests.simulation.network import Network
from tests.simulation.promises import Promises
from tests.simulation.scheduler import Scheduler
from tests.simulation.server import Server
from tests.simulation.stage import Stage


class Run:
    """What stages and shards know of the world."""

    def __init__(self, job: Job, scheduler: Scheduler, network: Network) -> None:
        self.job = job
        self.scheduler = scheduler
        self.network = network
        self.promises = Promises(job)
        self.servers: list[Server] = []
        #: Life → its stages.
        self.stages: dict[tuple[int, int], list[Stage]] = {}
        #: Link → when its latest frame arrives: frames keep their order.
        self._frame_times: dict[tuple[Stage, int], int] = {}

    # -- what stages ask ---------------------------------------------------------------------------------------------

    def headers(self, stage: Stage, shard: int) -> tuple[SliceHeader, ...]:
        """What a stage holds of a shard."""
        return self.job.headers(stage.num_stages, stage.index, shard)

    def has_met(self, stage: Stage) -> bool:
        """Whether a stage that begins has found its neighbours: here the stages of a life begin together."""
        return len(self.stages[stage.vw, stage.incarnation]) == stage.num_stages

    def makes_weights(self, vw: int) -> bool:
        """Whether a virtual worker shall make the first weights."""
        return self.servers[0].clock_part.log.makes_weights(VirtualWorkerIndex(vw))

    def is_gone(self, vw: int, incarnation: int) -> bool:
        """Whether the clock shard would say that a life is over."""
        log, index = self.servers[0].clock_part.log, VirtualWorkerIndex(vw)
        lives = (log.members.get(index), log.newcomers.get(index), log.leavers.get(index))
        return not any(life is not None and life.incarnation == incarnation for life in lives)

    def send_frame(self, sender: Stage, index: int, take: Callable[[Stage], None]) -> None:
        """From a stage to its neighbour, in order."""
        receiver = next(one for one in self.stages[sender.vw, sender.incarnation] if one.index == index)
        link = (sender, index)
        arrival = max(self.scheduler.now + self.compute_ticks(), self._frame_times.get(link, 0))
        self._frame_times[link] = arrival
        self.scheduler.at(arrival - self.scheduler.now, lambda: take(receiver), receiver)

    def compute_ticks(self) -> int:
        """How long a minibatch takes at a stage."""
        return self.scheduler.random.randint(1, 3)

    # -- what happens to it ------------------------------------------------------------------------------------------

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
                self.scheduler.at(3, partial(other.leave, "ends: lost its neighbour", "LinkClosed"), other)

    def request_barrier(self, first: Server, reason: str) -> None:
        """At the clock shard."""
        if reason == "stop" and not self.promises.finished and self.promises.start >= self.job.progress.clock:
            self.promises.stop_is_asked = True
        first.clock_part.decide("request_barrier", reason)
