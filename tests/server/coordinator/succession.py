"""A job that runs under one coordinator, and then under another one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from hetpipe.server.coordinator.coordinator import Coordinator
from hetpipe.server.coordinator.job_hosts import JobHost
from hetpipe.storage.memory_store import MemoryStore
from hetpipe.values.commands import (
    KeyedStageReport,
    StageKey,
)
from hetpipe.values.events import JobState
from hetpipe.values.ids import Incarnation, StageIndex, Term
from hetpipe.values.ids import VirtualWorkerIndex as Vw
from hetpipe.values.run import StageReady
from hetpipe.values.run_document import LifeSeen, LifeStanding, RunDescription, RunDocument
from tests.server.coordinator.builders import JOB_ID, agent_member, clocks, job, shard_member, submission
from tests.server.coordinator.fakes import Cluster


def seen(vw: int, incarnation: int = 0, standing: LifeStanding = "member", **values: Any) -> LifeSeen:
    return LifeSeen(Vw(vw), Incarnation(incarnation), 0 if standing == "gone" else 2, standing, **values)


def key(vw: int, stage: int, incarnation: int = 0) -> StageKey:
    return StageKey(JOB_ID, Vw(vw), StageIndex(stage), Incarnation(incarnation), Term(1))


def stages(agent: str, *incarnations: int) -> tuple[StageKey, ...]:
    """What an agent has by the plan, when the virtual workers are in these lives: virtual worker i is on agent i."""
    vw = int(agent[1:])
    return tuple(key(vw, stage, incarnations[vw]) for stage in (0, 1))


class Succession:
    """A job that runs under one coordinator, which is then gone, with or without its store."""

    def __init__(self, folder: Path) -> None:
        self.cluster = Cluster(folder / "run").usual()
        self.submit()
        self.cluster.train()
        self.cluster.wait(0.5)
        assert self.state() is JobState.RUNNING
        ((_, config), _) = self.cluster.shards.asked("configure")
        self.run: RunDocument = config.run
        self.describe()

    def submit(self) -> None:
        self.cluster.coordinator.submit_job(submission(job(), str(self.cluster.run_dir)))

    def describe(self, *lives: LifeSeen, **changes: Any) -> None:
        """What the clock shard tells."""
        told = lives or (seen(0), seen(1))
        usual = RunDescription(self.run.plan.term, self.run, told, clocks(3, 2), (), is_over=False)
        self.cluster.shards.descriptions[JOB_ID] = replace(usual, **changes)

    def replace(self, *, wiped: bool = False) -> None:
        if wiped:
            self.cluster.store = MemoryStore(self.cluster.clock)
        self.cluster.coordinator = self.cluster.new_coordinator()
        self.cluster.registrations.clear()

    def forget_submission(self) -> None:
        """The store does not know what was handed in: a parameter server alone has told of the job."""
        kept = self.cluster.store.job(JOB_ID)
        assert kept is not None
        self.cluster.store.replace_job(replace(kept, submission=None))

    def die_on_the_way(self) -> None:
        """The coordinator is replaced just when it has kept that the job is being prepared anew."""
        kept = self.cluster.store.job(JOB_ID)
        assert kept is not None
        self.cluster.store.replace_job(kept.at(JobState.PLANNING, failure=""))
        self.cluster.executor._queue.clear()
        self.replace()

    def come(
        self, *members: str, lives: tuple[int, int] = (0, 0), have: dict[str, tuple[StageKey, ...]] | None = None
    ) -> None:
        """Members register anew; agents with the stages of these lives, unless `have` says otherwise."""
        for name in members:
            if name.startswith("n"):
                held = (have or {}).get(name, stages(name, *lives))
                self.cluster.join(replace(agent_member(name, devices=2), stages=held))
                for stage in held:
                    self.cluster.tell(name, KeyedStageReport(stage, StageReady(pid=77)))
            else:
                self.cluster.join(shard_member(int(name[2:])))
        if "ps0" in members:
            self.tell_clocks()

    def tell_clocks(self) -> None:
        self.cluster.beat("ps0", clocks={JOB_ID: clocks(3, 2)}, jobs=(JOB_ID,))
        self.cluster.executor.run_all()

    def succeed(self, **values: Any) -> None:
        self.replace(**values)
        self.come("n0", "n1", "ps0", "ps1")

    @property
    def coordinator(self) -> Coordinator:
        return self.cluster.coordinator

    @property
    def host(self) -> JobHost:
        host = self.coordinator.host(JOB_ID)
        assert host is not None
        return host

    @property
    def machine(self) -> Any:
        return self.host.machine

    def state(self) -> JobState:
        return self.host.machine.state

    def events(self, kind: type) -> list[Any]:
        return [event.event for event in self.host.events if isinstance(event.event, kind)]

    def asked(self, call: str) -> list[Any]:
        return [argument for _, argument in self.cluster.shards.asked(call)]

    def commands(self, agent: str, kind: type) -> list[Any]:
        return [command for command in self.cluster.take(agent) if isinstance(command, kind)]
