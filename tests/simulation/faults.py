"""What goes wrong, and what people want meanwhile; most of it heals by itself. `setting` says what, and how often."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial

from hetpipe.decide.sync.segment import CHECKPOINT
from hetpipe.errors import HetpipeError
from hetpipe.server.coordinator.worker_requests import WorkerRequests
from hetpipe.values.events import StopMode
from hetpipe.values.ids import VirtualWorkerIndex
from tests.simulation.agents import Agent, Child
from tests.simulation.network import Weather
from tests.simulation.parameter_servers import Shard
from tests.simulation.scheduler import Process
from tests.simulation.world import TICKS_PER_STEP, World


class Faults:
    """One at a time, drawn by the world's dice."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._random = world.random
        #: What happened, for people.
        self.story: list[str] = []
        #: Kinds that happened.
        self.kinds: set[str] = set()
        #: Parameter server → calls that it answers before it is killed.
        self._armed: dict[int, int] = {}
        world.shards.network.after_serving = self._after_serving
        #: Kinds that there are, and how likely each is.
        self._kinds, self._weights = [*world.setting.faults], [*world.setting.faults.values()]

    def one(self) -> None:
        """Draw one; it happens within the next half second."""
        [kind] = self._random.choices(self._kinds, self._weights)
        self._world.shards.scheduler.at(self._random.randrange(TICKS_PER_STEP), partial(self._happen, kind))

    def _happen(self, kind: str) -> None:
        told = getattr(self, f"_{kind}")()
        self.story.append(f"{self._world.now:6.1f} {kind} {told}")
        self.kinds.add(kind)
        self._world.shards.scheduler.trace("fault", kind, told)

    def heal(self) -> None:
        """Nothing goes wrong any more, and who was away comes back."""
        world = self._world
        world.shards.flakiness = 0.0
        world.shards.network.weather = Weather()
        world.shards.network.cuts.clear()
        self._armed.clear()
        world.store.away = False
        world.plans = []
        for shard in world.shards.all:
            shard.resume()
            world.begin_shard(shard)
        for agent in list(world.agents.values()):
            agent.cut_until = agent.mute_until = 0.0
            if not agent.is_alive:
                world.new_agent(agent.name)
            elif agent.leaves_by is not None:
                # It was told to end a moment ago, and comes back as it would have.
                self._back_later(agent, 9.0)
        world.begin_coordinator()
        self.story.append(f"{world.now:6.1f} heal")

    # -- stages ------------------------------------------------------------------------------------------------------

    def _stage(self) -> tuple[Agent, Child] | None:
        there = [(agent, stage) for agent in self._world.agents.values() for stage in agent.stages.values()]
        return self._random.choice(there) if there else None

    def _with_stage(self, do: Callable[[Agent, Child], None]) -> str:
        found = self._stage()
        if found is None:
            return "nobody"
        do(*found)
        return f"{found[1].key.vw}.{found[1].key.stage} life {found[1].key.incarnation}"

    def _kill_stage(self) -> str:
        return self._with_stage(lambda agent, stage: agent.end(stage.key, -9))

    def _stage_exits(self) -> str:
        return self._with_stage(lambda agent, stage: agent.end(stage.key, self._random.choice([0, 1])))

    def _link_breaks(self) -> str:
        return self._with_stage(lambda agent, stage: agent.fail(stage.key, "LinkClosed", secondary=True))

    def _no_memory(self) -> str:
        return self._with_stage(lambda agent, stage: agent.fail(stage.key, "OutOfMemoryError"))

    def _own_fault(self) -> str:
        return self._with_stage(lambda agent, stage: agent.fail(stage.key, "ValueError"))

    def _hang(self) -> str:
        return self._with_stage(lambda agent, stage: stage.hang())

    def _pause_stage(self) -> str:
        """It may have been given up when it goes on."""
        seconds = self._random.choice([1.0, 6.0, 12.0])

        def pause(_: Agent, stage: Child) -> None:
            stage.hang()
            self._world.later(seconds, stage.wake)

        return f"{self._with_stage(pause)} for {seconds}"

    def _slow(self) -> str:
        def slow(_: Agent, stage: Child) -> None:
            stage.slowness = self._random.choice([1.0, 10.0])

        return self._with_stage(slow)

    # -- agents ------------------------------------------------------------------------------------------------------

    def _agent(self) -> Agent:
        return self._random.choice(list(self._world.agents.values()))

    def _back_later(self, agent: Agent, seconds: float) -> None:
        def come() -> None:
            if self._world.agents[agent.name] is agent and not agent.is_alive:
                self._world.new_agent(agent.name)
            elif self._world.agents[agent.name] is agent:
                self._back_later(agent, 5.0)

        self._world.later(seconds, come)

    def _seconds(self) -> float:
        return self._random.choice(self._world.setting.away)

    def _kill_agent(self) -> str:
        agent, seconds = self._agent(), self._seconds()
        agent.die()
        self._back_later(agent, seconds)
        return f"{agent.name} for {seconds}"

    def _orphan_stages(self) -> str:
        """Its processes do not notice for a while: they are given up, and train on."""
        agent, scheduler = self._agent(), self._world.shards.scheduler
        orphans = [stage for stage in agent.stages.values() if stage.process is not None]
        agent.die(leaves_orphans=True)
        for stage in orphans:
            scheduler.at(self._random.choice([3, 15, 60, 120]), stage.stop)
        self._back_later(agent, self._random.choice([0.5, 2.0]))
        return agent.name

    def _replace_agent(self) -> str:
        """Another process begins while the old one lives on, until it hears of it."""
        agent = self._agent()
        agent.die()
        self._world.new_agent(agent.name)
        return agent.name

    def _cut_agent(self) -> str:
        agent, seconds = self._agent(), self._seconds()
        agent.cut_until = self._world.now + seconds
        return f"{agent.name} for {seconds}"

    def _mute(self) -> str:
        agent, seconds = self._agent(), self._random.choice([1.0, 3.0, 10.0])
        agent.mute_until = self._world.now + seconds
        return f"{agent.name} for {seconds}"

    def _depart(self) -> str:
        agent = self._agent()
        if not agent.is_alive:
            return "nobody"
        agent.leaves_by = self._world.now + self._random.choice([0.5, 9.0])
        self._back_later(agent, 9.0 + self._seconds())
        return agent.name

    # -- parameter servers, the coordinator and its store -------------------------------------------------------------

    def _kill_shard(self) -> str:
        return self._away(self._random.choice(self._world.shards.all))

    def _away(self, shard: Shard, *, power: bool = False) -> str:
        seconds = self._seconds()
        shard.kill(power=power)
        self._world.later(seconds, lambda: self._world.begin_shard(shard))
        return f"{shard.index} for {seconds}"

    def _kill_before_answer(self) -> str:
        """It does what it was asked for, and nobody hears of it."""
        shard, calls = self._random.choice(self._world.shards.all), self._random.randint(1, 40)
        self._armed[shard.index] = calls
        return f"{shard.index} after {calls} calls"

    def _after_serving(self, process: Process, _: str) -> None:
        for index, calls in list(self._armed.items()):
            shard = self._world.shards.all[index]
            if any(served.server is process for served in shard.jobs.values()):
                self._armed[index] = calls - 1
                if calls <= 1:
                    del self._armed[index]
                    self._away(shard)

    def _kill_all_shards(self) -> str:
        return ", ".join(self._away(shard) for shard in self._world.shards.all)

    def _cut_power(self) -> str:
        """Without `fsync` a machine must not fail."""
        return self._away(self._random.choice(self._world.shards.all), power=self._world.setting.fsync)

    def _pause_shard(self) -> str:
        shard, seconds = self._random.choice(self._world.shards.all), self._random.choice([0.5, 2.0, 7.0, 15.0])
        shard.pause()
        self._world.later(seconds, shard.resume)
        return f"{shard.index} for {seconds}"

    def _cut_shard(self) -> str:
        """From a stage, or from another shard."""
        jobs = [served for shard in self._world.shards.all for served in shard.jobs.values()]
        if not jobs:
            return "nobody"
        served = self._random.choice(jobs)
        others: list[Process] = [*served.training.servers]
        others += [stage for stages in served.training.stages.values() for stage in stages if stage.alive]
        if not others:
            return "nobody"
        pair, cuts = (served.server.name, self._random.choice(others).name), self._world.shards.network.cuts
        cuts.add(pair)
        self._world.later(self._seconds(), lambda: cuts.discard(pair))
        return " from ".join(pair)

    def _ask_barrier(self) -> str:
        """Somebody wants one."""
        jobs = [served for served in self._world.shards.all[0].jobs.values() if served.training.servers]
        if not jobs or not self._world.shards.all[0].is_reachable:
            return "nobody"
        served = self._random.choice(jobs)
        with suppress(HetpipeError):
            served.training.request_barrier(served.server, CHECKPOINT)
        return str(served.config.job_id)

    def _old_term(self) -> str:
        """A stage of the term before this one wakes up and pushes what it had to push."""
        found = self._stage()
        process = None if found is None else found[1].process
        if process is None or not process.alive or process.segment is None:
            return "nobody"
        process.pusher.push_in_term(process.job.term - 1)
        return str(process)

    def _lose_disk(self) -> str:
        shard = self._random.choice(self._world.shards.all)
        told = self._kill_shard()
        shard = self._world.shards.all[int(told[0])]
        shard.lost = dict.fromkeys(shard.jobs, "its disk is gone") if self._random.random() < 0.5 else {}
        shard.lose_disk()
        return told

    def _lose_node(self) -> str:
        """The coordinator and the clock shard's disk are gone at once."""
        shard, seconds = self._world.shards.all[0], self._seconds()
        shard.lose_disk()
        shard.lost = {}
        self._world.later(seconds, lambda: self._world.begin_shard(shard))
        return f"clock shard for {seconds}, coordinator {self._replace_coordinator(may_be_wiped=0.1)}"

    def _replace_coordinator(self, *, may_be_wiped: float = 0.4) -> str:
        is_wiped, seconds = self._random.random() < may_be_wiped, self._random.choice([0.5, 3.0, 12.0])
        # Some of what it had ordered is still done, and nobody hears of it.
        self._world.executor.run(self._random.choice([0, 0, 1, 2]))
        self._world.coordinator = None
        self._world.later(seconds, lambda: self._world.begin_coordinator(wiped=is_wiped))
        return f"after {seconds}{', wiped' if is_wiped else ''}"

    def _store_away(self) -> str:
        world, seconds = self._world, self._seconds()
        world.store.away = True

        def back() -> None:
            world.store.away = False
            world.begin_coordinator()

        world.later(seconds, back)
        return f"for {seconds}"

    def _flaky(self) -> str:
        seconds = self._seconds()
        self._world.shards.flakiness = self._random.choice([0.1, 0.5])

        def well() -> None:
            self._world.shards.flakiness = 0.0

        self._world.later(seconds, well)
        return f"for {seconds}"

    def _pause(self) -> str:
        """Nobody computes for a while, the coordinator included."""
        seconds = self._random.choice([3.0, 7.0])
        self._world.clock.advance(seconds)
        return f"for {seconds}"

    # -- people ------------------------------------------------------------------------------------------------------

    def _wish(self, wish: Callable[[WorkerRequests], object]) -> str:
        if self._world.coordinator is None:
            return "nobody there"
        try:
            return str(wish(WorkerRequests(self._world.coordinator)))
        except HetpipeError as error:
            return f"refused: {error}"

    def _drain(self) -> str:
        vw = VirtualWorkerIndex(self._random.randrange(3))
        return self._wish(lambda wishes: wishes.drain(self._random.choice(self._world.jobs), vw))

    def _drain_and_kill(self) -> str:
        """Somebody who was asked to leave dies on its way out, or with it behind it."""
        told, found = self._drain(), self._stage()
        if found is not None:
            agent, stage = found

            def kill() -> None:
                if agent.stages.get(stage.key) is stage:
                    agent.end(stage.key, -9)

            self._world.shards.scheduler.at(self._random.randint(1, 40), kill)
        return told

    def _drain_all(self) -> str:
        job = self._random.choice(self._world.jobs)
        return "; ".join(
            self._wish(lambda wishes, vw=vw: wishes.drain(job, vw))  # type: ignore[misc]
            for vw in map(VirtualWorkerIndex, range(3))
        )

    def _add(self) -> str:
        vw = self._random.choice([None, *map(VirtualWorkerIndex, range(3))])
        return self._wish(lambda wishes: wishes.add(self._random.choice(self._world.jobs), vw))

    def _stop(self) -> str:
        if self._world.coordinator is None:
            return "nobody there"
        mode = self._random.choice(list(StopMode))
        job = self._random.choice(self._world.jobs)
        with suppress(HetpipeError):
            self._world.coordinator.stop_job(job, mode)
        return mode
