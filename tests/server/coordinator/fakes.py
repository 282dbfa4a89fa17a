"""Stand-ins for what a coordinator talks to: shards, threads, agents."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from hetpipe.errors import CheckpointError, HetpipeError, PeerUnreachable, StoreUnavailable, UnknownJob
from hetpipe.server.coordinator.coordinator import Coordinator
from hetpipe.server.coordinator.tasks import Tools
from hetpipe.storage.memory_store import MemoryStore
from hetpipe.storage.store import Store
from hetpipe.values.commands import (
    ChildExit,
    Command,
    InspectCommand,
    InspectionResult,
    KeyedStageReport,
    LinkAwaited,
    LinkResult,
    LinkTask,
    MeasureLinkCommand,
    StartStageCommand,
    StopJobCommand,
    StopVirtualWorkerCommand,
)
from hetpipe.values.events import JobState
from hetpipe.values.ids import AgentId, Clock, JobId
from hetpipe.values.link_measurement import MeasuredLinks
from hetpipe.values.members import MemberId, MemberInfo
from hetpipe.values.run import ClockSnapshot, StageDone, StageReady
from hetpipe.values.run_document import RunDescription
from hetpipe.values.shard_config import ShardConfig
from hetpipe.values.sync import Progress
from hetpipe.wire.calls import (
    AdmitRequest,
    Barrier,
    DescribeRunRequest,
    DrainRequest,
    EvictRequest,
    GetShardClocksRequest,
    KeepRunRequest,
    MoveRequest,
    ReleaseRequest,
    RequestBarrierRequest,
)
from tests.decide.lifecycle.test_known_links import NOW, link
from tests.server.coordinator.builders import (
    JOB_ID,
    agent_member,
    clocks,
    job,
    measured,
    model,
    shard_member,
    submission,
)
from tests.support.fake_clock import FakeClock
from tests.support.method_calls import MethodCalls

T = TypeVar("T")


class FakeShards:
    """All shards of a cluster, by address. `calls` is what was asked of them, in order."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, Any]] = []
        self.dead: set[str] = set()
        #: The jobs that each serves, by address, as heartbeats tell.
        self.serving: dict[str, set[JobId]] = {}
        self.last_clocks = clocks(6, 6, samples=80, minibatches=20)
        self.progress: dict[str, Progress] = {}
        self.newest_checkpoint: str | None = None
        #: What the clock shard says of a job that it serves.
        self.descriptions: dict[JobId, RunDescription] = {}
        #: What evictions and admissions are refused with.
        self.refusals: dict[str, HetpipeError] = {}

    def open(self, shard: MemberInfo) -> FakeShard:
        return FakeShard(self, shard.address)

    def read_progress(self, folder: str) -> Progress:
        if folder not in self.progress:
            raise CheckpointError(f"{folder}: there is no checkpoint")
        return self.progress[folder]

    @property
    def tools(self) -> Tools:
        return Tools(
            open_shard=self.open,
            read_progress=self.read_progress,
            newest_checkpoint=lambda _: self.newest_checkpoint,
            listed_checkpoint=lambda _: self.newest_checkpoint,
        )

    def asked(self, call: str) -> list[tuple[str, Any]]:
        return [(address, argument) for address, name, argument in self.calls if name == call]


class FakeShard(MethodCalls):
    """One shard's control connection."""

    def __init__(self, shards: FakeShards, address: str) -> None:
        self._shards = shards
        self._address = address

    def _note(self, call: str, argument: Any) -> None:
        self._shards.calls.append((self._address, call, argument))
        if self._address in self._shards.dead:
            raise PeerUnreachable(f"parameter server at {self._address} cannot be reached: {call}")
        if call in self._shards.refusals:
            raise self._shards.refusals[call]

    def configure(self, config: ShardConfig) -> None:
        self._note("configure", config)
        self._shards.serving.setdefault(self._address, set()).add(config.job_id)

    def request_barrier(self, request: RequestBarrierRequest) -> Barrier:
        self._note("request_barrier", (request.job_id, request.term, request.reason))
        return Barrier(Clock(7))

    def evict(self, request: EvictRequest) -> None:
        self._note("evict", (request.job_id, request.term, request.vw, request.incarnation))

    def admit(self, request: AdmitRequest) -> None:
        self._note("admit", (request.job_id, request.term, request.vw, request.incarnation, request.num_stages))

    def move(self, request: MoveRequest) -> None:
        self._note("move", (request.job_id, request.term, request.vw, request.move))

    def drain(self, request: DrainRequest) -> None:
        self._note("drain", (request.job_id, request.term, request.vw, request.incarnation))

    def keep_run(self, request: KeepRunRequest) -> None:
        self._note("keep_run", (request.job_id, request.term, request.run))

    def describe_run(self, request: DescribeRunRequest) -> RunDescription:
        self._note("describe", request.job_id)
        if request.job_id not in self._shards.descriptions:
            raise UnknownJob(f"this parameter server does not serve job {request.job_id}")
        return self._shards.descriptions[request.job_id]

    def get_shard_clocks(self, request: GetShardClocksRequest) -> ClockSnapshot:
        self._note("clocks", request.job_id)
        return self._shards.last_clocks

    def release(self, request: ReleaseRequest) -> None:
        self._note("release", request.job_id)
        self._shards.serving.get(self._address, set()).discard(request.job_id)


class ManualExecutor(Executor):
    """Runs what was submitted when told to, in order, in the caller's thread. One for all jobs of a test."""

    def __init__(self) -> None:
        self._queue: deque[Callable[[], Any]] = deque()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self._queue.append(lambda: fn(*args, **kwargs))
        return Future()

    def run_all(self) -> None:
        while self._queue:
            self._queue.popleft()()


class FlakyStore:
    """A store that can be away. Everything else is the store behind it."""

    def __init__(self, behind: Store) -> None:
        self._behind = behind
        self.away = False

    def __getattr__(self, name: str) -> Any:
        if self.away and name != "close":
            raise StoreUnavailable("the store is away")
        return getattr(self._behind, name)


class Cluster:
    """A coordinator with fake shards and agents that do what they are told when a test says so."""

    def __init__(self, run_dir: Path, *, store: Store | None = None) -> None:
        self.run_dir = run_dir
        self.clock = FakeClock()
        self.shards = FakeShards()
        self.executor = ManualExecutor()
        self.store = store or MemoryStore(self.clock)
        self.registrations: dict[str, Any] = {}
        self._addresses: dict[str, str] = {}
        self._received: dict[str, int] = {}
        self._batches: dict[str, int] = {}
        self.coordinator = self.new_coordinator()

    def new_coordinator(self) -> Coordinator:
        return Coordinator(self.store, self.shards.tools, clock=self.clock, executor_of=lambda _: self.executor)

    def join(self, info: MemberInfo) -> None:
        self.registrations[info.id] = self.coordinator.register(info).registration
        self._addresses[info.id] = info.address
        self._received[info.id] = 0
        self._batches[info.id] = 0
        self.beat(info.id)

    def usual(self) -> Cluster:
        """Two agents with two devices each, and two shards."""
        for name in ("n0", "n1"):
            self.join(agent_member(name, devices=2))
        for index in range(2):
            self.join(shard_member(index))
        return self

    def beat(self, member: str, **values: Any) -> Any:
        return self.coordinator.heartbeat(
            MemberId(member),
            self.registrations[member],
            **{"clocks": {}, "jobs": self._jobs_of(member), "last_command": 0, **values},
        )

    def _jobs_of(self, member: str) -> tuple[JobId, ...]:
        return tuple(sorted(self.shards.serving.get(self._addresses[member], ())))

    def wait(self, seconds: float, *, silent: tuple[str, ...] = ()) -> None:
        """Let time pass; everybody but the silent sends heartbeats."""
        for _ in range(round(seconds / 0.5)):
            self.clock.advance(0.5)
            for member in list(self.registrations):
                if member not in silent:
                    self.beat(member)
            self.coordinator.tick()
            self.executor.run_all()

    def take(self, agent: str) -> list[Command]:
        """The agent's next commands."""
        commands = self.coordinator.commands(AgentId(agent), self.registrations[agent], after=self._received[agent])
        if commands:
            self._received[agent] = commands[-1].sequence
        return [numbered.command for numbered in commands]

    def tell(self, agent: str, *reports: Any) -> None:
        self._batches[agent] += 1
        self.coordinator.report(AgentId(agent), self.registrations[agent], self._batches[agent], reports)
        self.executor.run_all()

    def obey(self, *, num_layers: int = 4) -> list[Command]:
        """Let every agent carry out its commands; the commands."""
        obeyed: list[Command] = []
        self.executor.run_all()
        for agent in [member for member in self.registrations if member.startswith("n")]:
            for command in self.take(agent):
                obeyed.append(command)
                match command:
                    case InspectCommand(job_id=job_id):
                        found = model(num_layers) if command.with_model else None
                        measurements = tuple(measured(kind, num_layers) for kind in command.measure)
                        self.tell(agent, InspectionResult(job_id, found, measurements=measurements))
                    case MeasureLinkCommand(job_id=job_id, task=task):
                        self._measure(agent, job_id, task)
                    case StartStageCommand():
                        self.tell(agent, KeyedStageReport(command.key, StageReady(pid=1)))
                    case StopJobCommand(job_id=job_id):
                        self.end_stages(agent, job_id, code=-15)
                    case StopVirtualWorkerCommand(job_id=job_id):
                        for key in filter(command.means, self.stages(agent, job_id)):
                            self.tell(agent, ChildExit(key, 1, -9, ordered=True))
        return obeyed

    def _measure(self, agent: str, job_id: JobId, task: LinkTask) -> None:
        """One end of a link: it awaits the other one, and has measured as soon as that has come."""
        if task.address:
            found = MeasuredLinks(links=(link(task.other, agent, 1e9, latency=5e-5, age=NOW - self.clock.wall()),))
            self.tell(agent, LinkResult(job_id, task.number))
            self.tell(task.other, LinkResult(job_id, task.number, found))
        else:
            self.tell(agent, LinkAwaited(job_id, task.number, f"{agent}.host:7000"))

    def train(self) -> None:
        """Obey until nothing is left to do."""
        while self.obey():
            """Again."""

    def stages(self, agent: str, job_id: JobId) -> list[Any]:
        host = self.coordinator.host(job_id)
        assert host is not None
        return [life.key for life in host.machine.stages if life.agent == agent]

    def end_stages(self, agent: str, job_id: JobId, *, code: int = 0) -> None:
        for key in self.stages(agent, job_id):
            self.tell(agent, ChildExit(key, 1, code))

    def finish(self, job_id: JobId, reason: str = "end") -> None:
        for agent in ("n0", "n1"):
            for key in self.stages(agent, job_id):
                self.tell(agent, KeyedStageReport(key, StageDone(Clock(6), reason)))
        for agent in ("n0", "n1"):
            self.end_stages(agent, job_id)


def submit(
    cluster: Cluster, *overrides: str, request_id: str = "0123456789abcdef", restore: str | None = None
) -> JobId:
    handed_in = submission(job(*overrides), str(cluster.run_dir), request_id=request_id)
    return cluster.coordinator.submit_job(replace(handed_in, restore=restore))


def state(cluster: Cluster, job_id: JobId = JOB_ID) -> JobState:
    return cluster.coordinator.record(job_id).state


def failure(cluster: Cluster, job_id: JobId = JOB_ID) -> str:
    return cluster.coordinator.record(job_id).failure


def events(cluster: Cluster, kind: type[T]) -> list[T]:
    host = cluster.coordinator.host(JOB_ID)
    assert host is not None
    return [numbered.event for numbered in host.events if isinstance(numbered.event, kind)]
