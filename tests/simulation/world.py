"""The world: one cluster, its coordinators one after the other, and time in small steps. `faults` makes the weather."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from pathlib import Path
from random import Random
from typing import Any

from hetpipe.errors import HetpipeError, MemberReplaced, UnknownJob, UnknownMember
from hetpipe.job.file import load_job
from hetpipe.server.coordinator.coordinator import Coordinator
from hetpipe.storage.memory_store import MemoryStore
from hetpipe.values.ids import AgentId, JobId, ShardIndex, Term
from hetpipe.values.leases import LEASE_SECONDS, heartbeat_seconds
from hetpipe.values.members import MemberId, MemberInfo, MemberRole, Registration
from tests.server.coordinator.builders import BASE, agent_info, submission
from tests.server.coordinator.fakes import FlakyStore
from tests.simulation.agents import Agent, Training
from tests.simulation.parameter_servers import Shard, Shards
from tests.simulation.setting import Setting

STEP_SECONDS = 0.5

#: Of the time of stages and shards.
TICKS_PER_STEP = 5

_BEGAN_WALL = 1_700_000_000.0

STEPS_PER_BEAT = round(heartbeat_seconds(LEASE_SECONDS) / STEP_SECONDS)


class SimulatedClock:
    """A `hetpipe.clock.Clock` for one thread, which is asked the time by everybody all the while: it locks nothing."""

    def __init__(self) -> None:
        self._now = 0.0

    def monotonic(self) -> float:
        """Seconds since the beginning."""
        return self._now

    def wall(self) -> float:
        """Seconds since 1970."""
        return _BEGAN_WALL + self._now

    def sleep(self, seconds: float) -> None:
        """Let time pass at once."""
        self._now += seconds

    advance = sleep


class SlowExecutor(Executor):
    """Runs what was submitted in order, some at a time. One for each coordinator."""

    def __init__(self) -> None:
        self._queue: deque[Callable[[], Any]] = deque()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self._queue.append(lambda: fn(*args, **kwargs))
        return Future()

    def run(self, most: int) -> None:
        while self._queue and most:
            most -= 1
            self._queue.popleft()()


class Leading:
    """A lead: its number grows, unless the store forgets it; `hetpipe.server.coordinator.control_numbers.Election`."""

    outage = ""

    def __init__(self, fence: int) -> None:
        self.fence = fence

    def raise_fence(self, fence: int) -> None:
        self.fence = fence + 1


class World:
    """Everything there is. One setting gives one history."""

    def __init__(self, folder: Path, setting: Setting, *, traces: bool = False) -> None:
        self.setting = setting
        self.random = random = Random(f"hetpipe/world/{setting.seed}")
        self.folder = folder
        self.clock = SimulatedClock()
        self.shards = Shards(random, setting, traces=traces)
        self.store = FlakyStore(MemoryStore(self.clock))
        self.agents = {f"n{i}": self._agent(f"n{i}", 100) for i in range(setting.num_agents)}
        self._next_pid = 1000
        self._num_steps = 0
        self._shard_registrations: dict[int, Registration] = {}
        self.training = Training(self, random)
        #: What is to happen, and when.
        self.plans: list[tuple[float, Callable[[], None]]] = []
        self.executor = SlowExecutor()
        self.coordinator: Coordinator | None = None
        self.jobs: list[JobId] = []
        self.lead = Leading(0)
        #: Whether the store has ever lost its memory.
        self.was_wiped = False
        self.begin_coordinator()

    # -- who there is ------------------------------------------------------------------------------------------------

    def _agent(self, name: str, pid: int) -> Agent:
        return Agent(name, pid, self.setting.num_devices, self.setting.samples)

    @property
    def now(self) -> float:
        return self.clock.monotonic()

    def begin_coordinator(self, *, wiped: bool = False) -> None:
        """A coordinator begins, unless the store is away; what the one before had on its way is forgotten."""
        if wiped:
            self.was_wiped = True
            if self.coordinator is None:
                # One that leads gets its lead back, with its number.
                self.lead = Leading(0)
            # Now only shards know of terms, each as long as its process lasts or it serves the job.
            self.shards.terms.clear()
            self.store._behind = MemoryStore(self.clock)
        if self.coordinator is None and not self.store.away:
            self.executor = executor = SlowExecutor()
            self.lead = Leading(self.lead.fence + 1)
            self.coordinator = Coordinator(
                self.store,
                self.shards.tools,
                clock=self.clock,
                executor_of=lambda _: executor,
                election=self.lead,
            )

    def submit(self) -> JobId:
        """Hand in the job of the setting, once more."""
        assert self.coordinator is not None
        request_id = f"{self.random.randrange(10**8):08d}"
        handed_in = submission(load_job(BASE, self.setting.job), str(self.folder / request_id), request_id=request_id)
        self.jobs.append(self.coordinator.submit_job(handed_in))
        return self.jobs[-1]

    def new_agent(self, name: str) -> None:
        """A process begins under the name of one that has ended."""
        self._next_pid += 1
        self.agents[name] = self._agent(name, self._next_pid)

    def later(self, seconds: float, what: Callable[[], None]) -> None:
        self.plans.append((self.now + seconds, what))

    # -- time --------------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Half a second."""
        self.clock.advance(STEP_SECONDS)
        self._num_steps += 1
        due = [what for at, what in self.plans if at <= self.now]
        self.plans = [(at, what) for at, what in self.plans if at > self.now]
        for what in due:
            what()
        doings: list[Callable[[], None]] = [self.training.step, self._train, self._run_tasks, self._tick]
        doings += [lambda agent=agent: self._live(agent) for agent in self.agents.values()]  # type: ignore[misc]
        if self.is_beat:
            doings += [lambda shard=shard: self._beat_shard(shard) for shard in self.shards.all]  # type: ignore[misc]
        self.random.shuffle(doings)
        for do in doings:
            do()

    @property
    def is_beat(self) -> bool:
        """Whether members send heartbeats in this step, and stages report: they do once a second."""
        return self._num_steps % STEPS_PER_BEAT == 0

    def _train(self) -> None:
        scheduler = self.shards.scheduler
        scheduler.run_until(scheduler.now + TICKS_PER_STEP)
        self.shards.write_checkpoints()

    def _run_tasks(self) -> None:
        self.executor.run(self.random.choice([0, 1, 3, 100]))

    def _tick(self) -> None:
        if self.coordinator is not None:
            self.coordinator.tick()

    # -- members -----------------------------------------------------------------------------------------------------

    def _live(self, agent: Agent) -> None:
        """What an agent does in half a second."""
        if agent is not self.agents[agent.name] or not agent.is_alive:
            return
        if self.coordinator is not None and agent.cut_until <= self.now:
            try:
                self._talk(agent, self.coordinator)
            except MemberReplaced:
                agent.die()
            except UnknownMember:
                agent.registration = None
            except HetpipeError:
                """It tries again."""
        if agent.leaves_by is not None and (self.now >= agent.leaves_by or not agent.stages):
            self._leave(agent)

    def _talk(self, agent: Agent, coordinator: Coordinator) -> None:
        is_new = agent.registration is None
        if is_new:
            lease = coordinator.register(self._info(agent))
            assert lease.fence >= agent.fence, f"{agent.name} has seen lead {agent.fence}, and is led by {lease.fence}"
            agent.registered(lease.registration, lease.fence)
        assert agent.registration is not None
        me, registration = AgentId(agent.name), agent.registration
        if self.is_beat or is_new:
            jobs = tuple(sorted({key.job_id for key in agent.stages}))
            renewal = coordinator.heartbeat(
                MemberId(agent.name), registration, clocks={}, jobs=jobs, last_command=agent.done
            )
            for key in [key for key in agent.stages if key.job_id in renewal.ended_jobs]:
                agent.end(key, -15)
        if agent.leaves_by is not None and not agent.has_told_departure:
            coordinator.depart(me, registration)
            agent.has_told_departure = True
        for numbered in coordinator.commands(me, registration, after=agent.done)[: self.random.choice([0, 1, 2, 50])]:
            agent.obey(numbered)
        if agent.mute_until <= self.now:
            self._send_reports(agent, coordinator)

    def _send_reports(self, agent: Agent, coordinator: Coordinator) -> None:
        """The next batch, or the last one again, whose answer was lost."""
        assert agent.registration is not None
        if not agent.unconfirmed:
            if not agent.waiting:
                return
            agent.batch += 1
            agent.unconfirmed, agent.waiting = tuple(agent.waiting), []
        coordinator.report(AgentId(agent.name), agent.registration, agent.batch, agent.unconfirmed)
        if self.random.random() < 0.9:
            agent.unconfirmed = ()

    def _leave(self, agent: Agent) -> None:
        registration = agent.registration
        agent.die()
        if self.coordinator is not None and registration is not None and agent.cut_until <= self.now:
            self.coordinator.leave(MemberId(agent.name), registration)

    def _info(self, agent: Agent) -> MemberInfo:
        info = agent_info(agent.name, devices=agent.num_devices, pid=agent.pid)
        stages = tuple(sorted(agent.stages))
        return MemberInfo(
            MemberRole.AGENT,
            MemberId(agent.name),
            info.host,
            info.pid,
            devices=info.devices,
            highest_fence=agent.fence,
            stages=stages,
        )

    def _beat_shard(self, shard: Shard) -> None:
        if not shard.is_reachable or self.coordinator is None:
            return
        self.shards.follow_clock_shard(shard)
        member = MemberId(f"ps{shard.index}")
        try:
            if shard.index not in self._shard_registrations:
                lease = self.coordinator.register(self._shard_info(shard))
                self._shard_registrations[shard.index], shard.fence = lease.registration, lease.fence
            renewal = self.coordinator.heartbeat(
                member,
                self._shard_registrations[shard.index],
                clocks={job_id: served.log.snapshot() for job_id, served in shard.jobs.items() if served.run},
                jobs=tuple(sorted(shard.jobs)),
                last_command=0,
                lost=shard.lost,
            )
        except UnknownMember:
            self._shard_registrations.pop(shard.index, None)
        except HetpipeError:
            """It tries again."""
        else:
            for job_id in renewal.ended_jobs:
                shard.drop(job_id)
                shard.lost.pop(job_id, None)

    def _shard_info(self, shard: Shard) -> MemberInfo:
        return MemberInfo(
            MemberRole.PARAMETER_SERVER,
            MemberId(f"ps{shard.index}"),
            "shards.host",
            shard.pid,
            address=shard.address,
            shard_index=ShardIndex(shard.index),
            highest_term=shard.highest_term,
            highest_fence=shard.fence,
        )

    def begin_shard(self, shard: Shard) -> None:
        """A new process takes what is on the disk."""
        if not shard.is_alive:
            shard.pid += 10
            shard.begin()
            shard.highest_term = max((served.config.term for served in shard.jobs.values()), default=Term(0))
            self._shard_registrations.pop(shard.index, None)

    # -- questions ---------------------------------------------------------------------------------------------------

    def has_ended(self, job_id: JobId) -> bool:
        """Whether a job has, or nobody remembers it."""
        assert self.coordinator is not None
        try:
            return self.coordinator.record(job_id).state.is_terminal
        except UnknownJob:
            return True
