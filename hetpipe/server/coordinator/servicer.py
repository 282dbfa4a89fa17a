"""Network front end of the coordinator: call handlers, and streams with a limited number of watchers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial

from hetpipe import __version__
from hetpipe.clock import SYSTEM_CLOCK, Clock
from hetpipe.decide.lifecycle.registry import MAX_MEMBERS
from hetpipe.errors import ProtocolViolation, UnknownJob
from hetpipe.server.coordinator.coordinator import Coordinator
from hetpipe.server.coordinator.job_hosts import JobHost
from hetpipe.server.coordinator.worker_requests import WorkerRequests
from hetpipe.values.commands import NumberedCommand
from hetpipe.values.events import (
    CodeArchive,
    JobEnded,
    JobStatus,
    NumberedEvent,
    ProcessStatus,
    WorkerStatus,
)
from hetpipe.values.identity import Role
from hetpipe.values.ids import JobId
from hetpipe.values.link_measurement import LinksProgress
from hetpipe.values.members import Lease, MemberRole, Renewal
from hetpipe.values.run import ClockSnapshot
from hetpipe.wire import calls
from hetpipe.wire.access import caller_of
from hetpipe.wire.calls import (
    COORDINATOR_SERVICE,
    Certificate,
    CertifyStageRequest,
    FetchCodeRequest,
    GetClocksRequest,
    HeartbeatRequest,
    KnownClocks,
    LeaveRequest,
    ListMembersRequest,
    MeasureLinksRequest,
    Members,
    MoveWorkerRequest,
    MovingWorker,
    RegisterRequest,
    ReportRequest,
    StopJobRequest,
    StoppingJob,
    SubmitJobRequest,
    SubmittedJob,
    WatchClocksRequest,
    WatchCommandsRequest,
    WatchJobRequest,
    Workers,
)
from hetpipe.wire.checks import check_digest, check_submission
from hetpipe.wire.feeds import Feeds, Outlet
from hetpipe.wire.guard import address_of
from hetpipe.wire.server import Server
from hetpipe.wire.serving import Context, Handlers
from hetpipe.wire.watchers import Turns, Viewer, Watchers

#: Streams of agents, which occupy no thread, and of people: fewer than `NUM_THREADS`, so that calls always find one.
MAX_AGENT_STREAMS = MAX_MEMBERS[MemberRole.AGENT]
MAX_VIEWER_STREAMS = 32
NUM_THREADS = 192

#: Calls that run or wait for a thread: many members send their heartbeats at about the same time.
CONCURRENT_CALLS = 2 * NUM_THREADS + 1_024

#: Members of a page; each may have many devices and measured links.
MEMBERS_PER_PAGE = 250

#: Of those of people, as many as one of them may have, and as all monitors together: the others are for operators.
MAX_STREAMS_OF_VIEWER = 16
MAX_MONITOR_STREAMS = 16


class CoordinatorServicer:
    """Handlers of `CoordinatorService` over a `Coordinator`. Thread-safe."""

    def __init__(self, coordinator: Coordinator, *, host: str, clock: Clock = SYSTEM_CLOCK) -> None:
        """Serve `coordinator`, whose machine is reachable as `host`."""
        self._coordinator = coordinator
        self._worker_requests = WorkerRequests(coordinator)
        self._host = host
        condition = coordinator.condition
        #: An agent has one stream: a newer one ends the older.
        self._agents: Feeds[NumberedCommand] = Feeds(
            limit=MAX_AGENT_STREAMS, what="commands", condition=condition, clock=clock
        )
        self._viewers = Watchers(
            limit=MAX_VIEWER_STREAMS,
            what="jobs",
            condition=condition,
            clock=clock,
            turns=Turns(per_peer=MAX_STREAMS_OF_VIEWER, per_group={Role.MONITOR: MAX_MONITOR_STREAMS}),
        )

    def add_to(self, server: Server) -> None:
        """Register the handlers with `server`."""
        handlers = Handlers()
        handlers.on(calls.REGISTER, self._register)
        handlers.on(calls.HEARTBEAT, self._heartbeat)
        handlers.on(calls.LEAVE, self._leave)
        handlers.on_feed(calls.WATCH_COMMANDS, self._watch_commands)
        handlers.on(calls.REPORT, self._report)
        handlers.on(calls.CERTIFY_STAGE, self._certify_stage)
        handlers.on(calls.FETCH_CODE, self._fetch_code)
        handlers.on(calls.SUBMIT_JOB, self._submit_job)
        handlers.on(calls.STOP_JOB, self._stop_job)
        handlers.on(calls.DRAIN_WORKER, lambda request, _: self._worker_requests.drain(request.job_id, request.vw))
        handlers.on(calls.ADD_WORKER, lambda request, _: Workers(self._worker_requests.add(request.job_id, request.vw)))
        handlers.on(calls.MOVE_WORKER, self._move_worker)
        handlers.on(calls.DEPART, lambda request, _: self._coordinator.depart(request.agent_id, request.registration))
        handlers.on(calls.MEASURE_LINKS, self._measure_links)
        handlers.on(calls.GET_STATUS, lambda request, _: self.status(request.job_id))
        handlers.on_stream(calls.WATCH_JOB, self._watch_job)
        handlers.on(calls.LIST_MEMBERS, self._list_members)
        handlers.on(calls.GET_CLOCKS, self._clocks)
        handlers.on_stream(calls.WATCH_CLOCKS, self._watch_clocks)
        handlers.add_to(server, COORDINATOR_SERVICE)
        server.on_stop(self._agents.close)
        server.on_stop(self._viewers.close)

    def _register(self, request: RegisterRequest, context: Context) -> Lease:
        _check_version(request.version, str(request.member))
        return self._coordinator.register(request.member, owner=_owner(context))

    def _heartbeat(self, request: HeartbeatRequest, context: Context) -> Renewal:
        return self._coordinator.heartbeat(
            request.member_id,
            request.registration,
            clocks=request.clocks,
            jobs=request.jobs,
            last_command=request.last_command,
            lost=request.lost,
            conditions=request.conditions,
            owner=_owner(context),
        )

    def _list_members(self, request: ListMembersRequest, _: Context) -> Members:
        after = -1 if request.after is None else request.after
        found = self._coordinator.members(after=after, limit=MEMBERS_PER_PAGE + 1)
        return Members(found[:MEMBERS_PER_PAGE], has_more=len(found) > MEMBERS_PER_PAGE)

    def _leave(self, request: LeaveRequest, context: Context) -> None:
        self._coordinator.leave(request.member_id, request.registration, owner=_owner(context))

    def _watch_commands(self, request: WatchCommandsRequest, context: Context, outlet: Outlet[NumberedCommand]) -> None:
        after = request.after

        def take() -> NumberedCommand | None:
            nonlocal after
            command = next(iter(self._coordinator.commands(request.agent_id, request.registration, after=after)), None)
            after = after if command is None else command.sequence
            return command

        self._agents.open(context, outlet, take, key=request.agent_id)

    def _report(self, request: ReportRequest, _: Context) -> None:
        self._coordinator.report(request.agent_id, request.registration, request.batch, request.reports)

    def _certify_stage(self, request: CertifyStageRequest, _: Context) -> Certificate:
        agent, registration = request.agent_id, request.registration
        return Certificate(self._coordinator.certify_stage(agent, registration, request.stage, request.request_pem))

    def _fetch_code(self, request: FetchCodeRequest, _: Context) -> CodeArchive:
        check_digest(request.digest)
        return self._coordinator.code(request.agent_id, request.registration, request.digest)

    def _submit_job(self, request: SubmitJobRequest, context: Context) -> SubmittedJob:
        check_submission(request.submission)
        return SubmittedJob(self._coordinator.submit_job(request.submission, owner=_owner(context)))

    def _stop_job(self, request: StopJobRequest, _: Context) -> StoppingJob:
        return StoppingJob(self._coordinator.stop_job(request.job_id, request.mode))

    def _move_worker(self, request: MoveWorkerRequest, _: Context) -> MovingWorker:
        return MovingWorker(*self._worker_requests.move(request.job_id, request.vw, request.layers))

    def _measure_links(self, request: MeasureLinksRequest, _: Context) -> LinksProgress:
        return self._coordinator.measure_links(request.request_id, fresh=request.fresh)

    def status(self, job_id: JobId | None) -> JobStatus:
        """Status of a job, or of the newest one; without any job, only the cluster's processes.

        Raises:
            UnknownJob: the named job is not known.
        """
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

    def _watch_job(self, request: WatchJobRequest, context: Context) -> Iterator[NumberedEvent]:
        record, after = self._coordinator.record(request.job_id), request.after
        with self._viewers.watch(context, viewer=_viewer(context)) as watch:
            if not watch.wait(partial(self._is_settled, record.job_id)):
                return
            host = self._coordinator.host(record.job_id)
            if host is None:
                yield from self._coordinator.kept_events(record.job_id, after=after)
                return
            if after > (host.events[-1].sequence if host.events else 0):
                # The position is another coordinator's, whose store is lost. Everything here is new.
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
        """True once a job is led or has ended; otherwise None."""
        return None if self._coordinator.is_orphan(job_id) else True

    def _clocks(self, request: GetClocksRequest, _: Context) -> KnownClocks:
        record = self._coordinator.record(request.job_id)
        with self._coordinator.condition:
            host = self._coordinator.host(record.job_id)
            return KnownClocks(None if host is None else host.machine.clocks)

    def _watch_clocks(self, request: WatchClocksRequest, context: Context) -> Iterator[ClockSnapshot]:
        record = self._coordinator.record(request.job_id)
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


def _check_version(version: str, who: str) -> None:
    """Refuse a member of another version of hetpipe: calls may have the same form and another meaning.

    Raises:
        ProtocolViolation: it has.
    """
    if version != __version__:
        raise ProtocolViolation(
            f"{who} runs {f'hetpipe {version}' if version else 'an earlier hetpipe'}, and the coordinator hetpipe "
            f"{__version__}; run the same version on all machines (docs/upgrading.md)"
        )


def _owner(context: Context) -> str:
    """Identity of the caller's certificate; empty without TLS."""
    return str(caller_of(context) or "")


def _viewer(context: Context) -> Viewer:
    """Identity of a viewer; without TLS its address, possibly shared by a whole cluster."""
    peer = caller_of(context)
    return Viewer(address_of(context.peer())) if peer is None else Viewer(str(peer), peer.role)


def _stage_processes(host: JobHost) -> list[ProcessStatus]:
    return [
        ProcessStatus("stage", life.key.stage, life.key.vw, life.host, life.pid, life.shown_state)
        for life in host.machine.stages
    ]


def _fresh(host: JobHost, after: int, seen_pictures: int) -> tuple[list[NumberedEvent], int] | None:
    """Events after number `after`, and the newest progress table unless already sent; None if there is neither."""
    events = [event for event in host.events if event.sequence > after]
    if host.picture is not None and host.num_pictures > seen_pictures and host.machine.ended is None:
        events.append(NumberedEvent(0, host.picture))
    return (events, host.num_pictures) if events else None


def _fresh_clocks(host: JobHost, last: ClockSnapshot | None) -> tuple[ClockSnapshot | None] | None:
    """The clocks if they differ from `last`; an empty tuple if the job has ended and they do not."""
    clocks = host.machine.clocks
    if clocks is not None and clocks != last:
        return (clocks,)
    return (None,) if host.machine.ended is not None else None
