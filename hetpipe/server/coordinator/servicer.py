"""The coordinator on the network: streams with bounded watchers, everything else handed through."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from functools import partial

import grpc

from hetpipe.clock import SYSTEM_CLOCK, Clock
from hetpipe.errors import UnknownJob
from hetpipe.server.coordinator.coordinator import Coordinator
from hetpipe.server.coordinator.job_hosts import JobHost
from hetpipe.server.coordinator.worker_wishes import WorkerWishes
from hetpipe.values.commands import AgentNews, NumberedCommand, StageKey
from hetpipe.values.conditions import Condition
from hetpipe.values.events import (
    JobEnded,
    JobState,
    JobStatus,
    NumberedEvent,
    ProcessStatus,
    StopMode,
    Submission,
    WorkerStatus,
)
from hetpipe.values.identity import Role
from hetpipe.values.ids import AgentId, JobId, VirtualWorkerIndex
from hetpipe.values.link_measurement import LinksProgress
from hetpipe.values.members import Lease, Member, MemberId, MemberInfo, MemberRole, Registration, Renewal
from hetpipe.values.run import ClockSnapshot
from hetpipe.wire.access import caller_of
from hetpipe.wire.coordinator_methods import SERVICE
from hetpipe.wire.coordinator_service import coordinator_service
from hetpipe.wire.guard import address_of
from hetpipe.wire.server import Server
from hetpipe.wire.watchers import Turns, Viewer, Watch, Watchers

#: Streams of agents, and of people: together fewer than `NUM_THREADS`, so that calls always find a thread.
MAX_AGENT_STREAMS = 64
MAX_VIEWER_STREAMS = 32
NUM_THREADS = 192

#: Of those of people, as many as one of them may have, and as all monitors together: the others are for operators.
MAX_STREAMS_OF_VIEWER = 16
MAX_MONITOR_STREAMS = 16


class CoordinatorServicer:
    """`CoordinatorHandlers` over a `Coordinator`."""

    def __init__(self, coordinator: Coordinator, *, host: str, clock: Clock = SYSTEM_CLOCK) -> None:
        """Serve `coordinator`, whose machine others reach as `host`."""
        self._coordinator = coordinator
        self._wishes = WorkerWishes(coordinator)
        self._host = host
        condition = coordinator.condition
        self._agents = Watchers(limit=MAX_AGENT_STREAMS, what="commands", condition=condition, clock=clock)
        self._viewers = Watchers(
            limit=MAX_VIEWER_STREAMS,
            what="jobs",
            condition=condition,
            clock=clock,
            turns=Turns(per_peer=MAX_STREAMS_OF_VIEWER, per_group={Role.MONITOR: MAX_MONITOR_STREAMS}),
        )
        #: The newest stream of each agent: an older one ends when it comes.
        self._agent_watches: dict[AgentId, Watch] = {}
        self._lock = threading.Lock()

    def add_to(self, server: Server) -> None:
        """Let `server` serve this."""
        server.add(SERVICE, coordinator_service(self))
        server.on_stop(self._agents.close)
        server.on_stop(self._viewers.close)

    def register(self, member: MemberInfo, *, owner: str = "") -> Lease:
        """As `CoordinatorHandlers.register`."""
        return self._coordinator.register(member, owner=owner)

    def heartbeat(
        self,
        member_id: MemberId,
        registration: Registration,
        *,
        clocks: Mapping[JobId, ClockSnapshot],
        jobs: tuple[JobId, ...],
        last_command: int,
        lost: Mapping[JobId, str],
        conditions: Mapping[JobId, tuple[Condition, ...]],
        owner: str = "",
    ) -> Renewal:
        """As `CoordinatorHandlers.heartbeat`."""
        return self._coordinator.heartbeat(
            member_id,
            registration,
            clocks=clocks,
            jobs=jobs,
            last_command=last_command,
            lost=lost,
            conditions=conditions,
            owner=owner,
        )

    def leave(self, member_id: MemberId, registration: Registration, *, owner: str = "") -> None:
        """As `CoordinatorHandlers.leave`."""
        self._coordinator.leave(member_id, registration, owner=owner)

    def watch_commands(
        self, agent: AgentId, registration: Registration, after: int, context: grpc.ServicerContext
    ) -> Iterator[NumberedCommand]:
        """As `CoordinatorHandlers.watch_commands`."""
        with self._agents.watch(context) as watch:
            with self._lock:
                older, self._agent_watches[agent] = self._agent_watches.get(agent), watch
            if older is not None:
                older.end()
            while commands := watch.wait(partial(self._commands, agent, registration, after)):
                yield from commands
                after = commands[-1].sequence

    def _commands(self, agent: AgentId, registration: Registration, after: int) -> tuple[NumberedCommand, ...] | None:
        return self._coordinator.commands(agent, registration, after=after) or None

    def report(self, agent: AgentId, registration: Registration, batch: int, news: tuple[AgentNews, ...]) -> None:
        """As `CoordinatorHandlers.report`."""
        self._coordinator.report(agent, registration, batch, news)

    def certify_stage(self, agent: AgentId, registration: Registration, stage: StageKey, request_pem: bytes) -> bytes:
        """As `CoordinatorHandlers.certify_stage`."""
        return self._coordinator.certify_stage(agent, registration, stage, request_pem)

    def submit_job(self, submission: Submission, *, owner: str = "") -> JobId:
        """As `CoordinatorHandlers.submit_job`."""
        return self._coordinator.submit_job(submission, owner=owner)

    def stop_job(self, job_id: JobId | None, mode: StopMode) -> JobState:
        """As `CoordinatorHandlers.stop_job`."""
        return self._coordinator.stop_job(job_id, mode)

    def drain_worker(self, job_id: JobId | None, vw: VirtualWorkerIndex) -> WorkerStatus:
        """As `CoordinatorHandlers.drain_worker`."""
        return self._wishes.drain(job_id, vw)

    def add_worker(self, job_id: JobId | None, vw: VirtualWorkerIndex | None) -> tuple[WorkerStatus, ...]:
        """As `CoordinatorHandlers.add_worker`."""
        return self._wishes.add(job_id, vw)

    def depart(self, agent: AgentId, registration: Registration) -> None:
        """As `CoordinatorHandlers.depart`."""
        self._coordinator.depart(agent, registration)

    def measure_links(self, request_id: str, *, fresh: bool) -> LinksProgress:
        """As `CoordinatorHandlers.measure_links`."""
        return self._coordinator.measure_links(request_id, fresh=fresh)

    def status(self, job_id: JobId | None) -> JobStatus:
        """As `CoordinatorHandlers.status`."""
        processes = self._cluster_processes()
        try:
            record = self._coordinator.record(job_id)
        except UnknownJob:
            if job_id is not None:
                raise
            return JobStatus(None, "", None, "", "", tuple(processes), conditions=self._coordinator.conditions)
        with self._coordinator.condition:
            host = self._coordinator.host(record.job_id)
            clocks, progress, rewinds = None, None, 0
            queue, proof, evaluations = None, None, None
            workers: tuple[WorkerStatus, ...] = ()
            conditions = self._coordinator.conditions
            if host is not None:
                clocks, progress, workers = host.machine.clocks, host.picture, host.machine.workers
                rewinds, queue, proof = host.machine.rewinds, host.machine.queue_place, host.machine.proof
                conditions, evaluations = host.machine.conditions.all, host.machine.evaluations.summary
                processes += _stage_processes(host)
        return JobStatus(
            record.job_id,
            record.name,
            record.state,
            record.run_dir,
            record.failure or self._coordinator.awaited(record.job_id),
            tuple(processes),
            clocks,
            progress,
            workers,
            rewinds,
            queue,
            conditions,
            proof,
            evaluations,
        )

    def watch_job(self, job_id: JobId | None, after: int, context: grpc.ServicerContext) -> Iterator[NumberedEvent]:
        """As `CoordinatorHandlers.watch_job`."""
        record = self._coordinator.record(job_id)
        with self._viewers.watch(context, viewer=_viewer(context)) as watch:
            if not watch.wait(partial(self._is_settled, record.job_id)):
                return
            host = self._coordinator.host(record.job_id)
            if host is None:
                yield from self._coordinator.kept_events(record.job_id, after=after)
                return
            if after > (host.events[-1].sequence if host.events else 0):
                # Another coordinator has told that, and its store has forgotten it. All that is here is new.
                after = 0
            seen_pictures = 0
            while fresh := watch.wait(partial(_fresh, host, after, seen_pictures)):
                events, seen_pictures = fresh
                for event in events:
                    yield event
                    if isinstance(event.event, JobEnded):
                        return
                    after = max(after, event.sequence)

    def _is_settled(self, job_id: JobId) -> bool | None:
        """True once somebody leads a job, or it has ended; None before."""
        return None if self._coordinator.is_orphan(job_id) else True

    def members(self) -> tuple[Member, ...]:
        """As `CoordinatorHandlers.members`."""
        return self._coordinator.members()

    def clocks(self, job_id: JobId | None) -> ClockSnapshot | None:
        """As `CoordinatorHandlers.clocks`."""
        record = self._coordinator.record(job_id)
        with self._coordinator.condition:
            host = self._coordinator.host(record.job_id)
            return None if host is None else host.machine.clocks

    def watch_clocks(self, job_id: JobId | None, context: grpc.ServicerContext) -> Iterator[ClockSnapshot]:
        """As `CoordinatorHandlers.watch_clocks`."""
        record = self._coordinator.record(job_id)
        last: ClockSnapshot | None = None
        with self._viewers.watch(context, viewer=_viewer(context)) as watch:
            if not watch.wait(partial(self._is_settled, record.job_id)):
                return
            host = self._coordinator.host(record.job_id)
            if host is None:
                return
            while fresh := watch.wait(partial(_fresh_clocks, host, last)):
                if fresh[0] is None:
                    return
                last = fresh[0]
                yield last

    def _cluster_processes(self) -> list[ProcessStatus]:
        processes = [ProcessStatus("coordinator", 0, None, self._host, os.getpid(), "up")]
        for index, shard in enumerate(self._coordinator.members_of(MemberRole.PARAMETER_SERVER)):
            processes.append(ProcessStatus("parameter_server", index, None, shard.host, shard.pid, "up"))
        for index, agent in enumerate(self._coordinator.members_of(MemberRole.AGENT)):
            processes.append(ProcessStatus("agent", index, None, agent.host, agent.pid, "up"))
        return processes


def _viewer(context: grpc.ServicerContext) -> Viewer:
    """Who wants to look; without TLS an address, behind which a whole cluster may be."""
    peer = caller_of(context)
    return Viewer(address_of(context.peer())) if peer is None else Viewer(str(peer), peer.role)


def _stage_processes(host: JobHost) -> list[ProcessStatus]:
    return [
        ProcessStatus("stage", life.key.stage, life.key.vw, life.host, life.pid, life.shown_state)
        for life in host.machine.stages
    ]


def _fresh(host: JobHost, after: int, seen_pictures: int) -> tuple[list[NumberedEvent], int] | None:
    """Events after number `after`, and the newest picture unless it was seen; None when there is neither."""
    events = [event for event in host.events if event.sequence > after]
    if host.picture is not None and host.num_pictures > seen_pictures and host.machine.ended is None:
        events.append(NumberedEvent(0, host.picture))
    return (events, host.num_pictures) if events else None


def _fresh_clocks(host: JobHost, last: ClockSnapshot | None) -> tuple[ClockSnapshot | None] | None:
    """The clocks if they differ from `last`; nothing in the tuple when the job has ended and they do not."""
    clocks = host.machine.clocks
    if clocks is not None and clocks != last:
        return (clocks,)
    return (None,) if host.machine.ended is not None else None
