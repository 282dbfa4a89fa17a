"""The server side of `CoordinatorService`: messages in, values to the handlers, values back, messages out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

import grpc

from hetpipe.errors import ProtocolViolation
from hetpipe.proto.v1 import coordinator_pb2 as pb
from hetpipe.values.bounds import MAX_LISTED, cut
from hetpipe.values.commands import AgentNews, NumberedCommand, StageKey
from hetpipe.values.conditions import Condition
from hetpipe.values.events import JobState, JobStatus, NumberedEvent, StopMode, Submission, WorkerStatus
from hetpipe.values.ids import AgentId, JobId, VirtualWorkerIndex
from hetpipe.values.link_measurement import LinksProgress
from hetpipe.values.members import Lease, Member, MemberId, MemberInfo, Registration, Renewal
from hetpipe.values.run import ClockSnapshot
from hetpipe.wire import coordinator_methods as methods
from hetpipe.wire.access import caller_of
from hetpipe.wire.checks import checked_job_id
from hetpipe.wire.convert import (
    clocks_from_proto,
    clocks_to_proto,
    command_to_proto,
    member_info_from_proto,
    member_to_proto,
    news_from_proto,
    stage_key_from_proto,
)
from hetpipe.wire.convert_conditions import job_conditions_from_proto
from hetpipe.wire.convert_jobs import (
    event_to_proto,
    state_to_proto,
    status_to_proto,
    stop_mode_from_proto,
    submission_from_proto,
    worker_to_proto,
)
from hetpipe.wire.method import service_handler, streaming_handler, unary_handler


class CoordinatorHandlers(Protocol):
    """What a coordinator answers. Called from many threads at once; errors are `HetpipeError`s.

    A job id of None means the newest job. The three iterators run in a thread of the server and end by themselves when
    the client goes away or the server stops.
    """

    def register(self, member: MemberInfo, *, owner: str) -> Lease:
        """Make a member of `owner`, or replace its registration."""
        ...

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
        owner: str,
    ) -> Renewal:
        """Renew a lease. Raises `UnknownMember`."""
        ...

    def leave(self, member_id: MemberId, registration: Registration, *, owner: str) -> None:
        """End a membership; nothing happens when there is none."""
        ...

    def watch_commands(
        self, agent: AgentId, registration: Registration, after: int, context: grpc.ServicerContext
    ) -> Iterator[NumberedCommand]:
        """The commands after number `after`. Raises `UnknownMember`."""
        ...

    def report(self, agent: AgentId, registration: Registration, batch: int, news: tuple[AgentNews, ...]) -> None:
        """Take a batch of news, once. Raises `UnknownMember`."""
        ...

    def certify_stage(self, agent: AgentId, registration: Registration, stage: StageKey, request_pem: bytes) -> bytes:
        """Certify the key of a stage on the agent's node. Raises `UnknownMember`, `PermissionDenied`."""
        ...

    def submit_job(self, submission: Submission, *, owner: str) -> JobId:
        """Take a job. Raises `JobError` when it cannot be read."""
        ...

    def stop_job(self, job_id: JobId | None, mode: StopMode) -> JobState:
        """Ask a job to stop. Raises `UnknownJob`."""
        ...

    def drain_worker(self, job_id: JobId | None, vw: VirtualWorkerIndex) -> WorkerStatus:
        """Ask a virtual worker to leave. Raises `UnknownJob`, `UserError`."""
        ...

    def add_worker(self, job_id: JobId | None, vw: VirtualWorkerIndex | None) -> tuple[WorkerStatus, ...]:
        """Ask a virtual worker back, or all that are out. Raises `UnknownJob`, `UserError`."""
        ...

    def depart(self, agent: AgentId, registration: Registration) -> None:
        """Take an agent's stages from it. Raises `UnknownMember`."""
        ...

    def measure_links(self, request_id: str, *, fresh: bool) -> LinksProgress:
        """Have links measured, or tell how far that is. Raises `ResourceExhausted`, `ProtocolViolation`."""
        ...

    def status(self, job_id: JobId | None) -> JobStatus:
        """One job's status. Raises `UnknownJob`."""
        ...

    def watch_job(self, job_id: JobId | None, after: int, context: grpc.ServicerContext) -> Iterator[NumberedEvent]:
        """The events after number `after`. Raises `UnknownJob`."""
        ...

    def members(self) -> tuple[Member, ...]:
        """The live members in order of registration."""
        ...

    def clocks(self, job_id: JobId | None) -> ClockSnapshot | None:
        """The newest clocks, or None. Raises `UnknownJob`."""
        ...

    def watch_clocks(self, job_id: JobId | None, context: grpc.ServicerContext) -> Iterator[ClockSnapshot]:
        """The clocks now and after every change. Raises `UnknownJob`."""
        ...


def coordinator_service(handlers: CoordinatorHandlers) -> grpc.GenericRpcHandler:
    """All calls of the service, for `Server.add(SERVICE, …)`."""
    adapter = _Adapter(handlers)
    return service_handler(
        methods.SERVICE,
        dict(
            [
                unary_handler(methods.REGISTER, adapter.register),
                unary_handler(methods.HEARTBEAT, adapter.heartbeat),
                unary_handler(methods.LEAVE, adapter.leave),
                streaming_handler(methods.WATCH_COMMANDS, adapter.watch_commands),
                unary_handler(methods.REPORT, adapter.report),
                unary_handler(methods.CERTIFY_STAGE, adapter.certify_stage),
                unary_handler(methods.SUBMIT_JOB, adapter.submit_job),
                unary_handler(methods.STOP_JOB, adapter.stop_job),
                unary_handler(methods.DRAIN_WORKER, adapter.drain_worker),
                unary_handler(methods.ADD_WORKER, adapter.add_worker),
                unary_handler(methods.DEPART, adapter.depart),
                unary_handler(methods.MEASURE_LINKS, adapter.measure_links),
                unary_handler(methods.GET_STATUS, adapter.status),
                streaming_handler(methods.WATCH_JOB, adapter.watch_job),
                unary_handler(methods.LIST_MEMBERS, adapter.members),
                unary_handler(methods.GET_CLOCKS, adapter.clocks),
                streaming_handler(methods.WATCH_CLOCKS, adapter.watch_clocks),
            ]
        ),
    )


def _owner(context: grpc.ServicerContext) -> str:
    """Whose certificate the caller has; empty without TLS."""
    return str(caller_of(context) or "")


def _job(text: str) -> JobId | None:
    return JobId(text) if text else None


class _Adapter:
    def __init__(self, handlers: CoordinatorHandlers) -> None:
        self._handlers = handlers

    def register(self, request: pb.RegisterRequest, context: grpc.ServicerContext) -> pb.RegisterResponse:
        lease = self._handlers.register(member_info_from_proto(request.member), owner=_owner(context))
        return pb.RegisterResponse(
            registration=lease.registration,
            lease_seconds=lease.lease_seconds,
            order=lease.order,
            fence=lease.fence,
        )

    def heartbeat(self, request: pb.HeartbeatRequest, context: grpc.ServicerContext) -> pb.HeartbeatResponse:
        if max(len(request.clocks), len(request.job_ids), len(request.lost_jobs)) > MAX_LISTED:
            raise ProtocolViolation(f"a heartbeat tells of {len(request.job_ids)} jobs; at most {MAX_LISTED} are taken")
        renewal = self._handlers.heartbeat(
            MemberId(request.member_id),
            Registration(request.registration),
            clocks={checked_job_id(job): clocks_from_proto(request.clocks[job]) for job in sorted(request.clocks)},
            jobs=tuple(checked_job_id(job) for job in request.job_ids),
            last_command=request.last_command,
            lost={checked_job_id(job): cut(request.lost_jobs[job]) for job in sorted(request.lost_jobs)},
            conditions=job_conditions_from_proto(request.conditions),
            owner=_owner(context),
        )
        return pb.HeartbeatResponse(
            lease_seconds=renewal.lease_seconds, ended_job_ids=renewal.ended_jobs, fence=renewal.fence
        )

    def leave(self, request: pb.LeaveRequest, context: grpc.ServicerContext) -> pb.LeaveResponse:
        registration = Registration(request.registration)
        self._handlers.leave(MemberId(request.member_id), registration, owner=_owner(context))
        return pb.LeaveResponse()

    def watch_commands(
        self, request: pb.WatchCommandsRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.WatchCommandsResponse]:
        agent, registration = AgentId(request.agent_id), Registration(request.registration)
        for command in self._handlers.watch_commands(agent, registration, request.after_sequence, context):
            yield command_to_proto(command)

    def report(self, request: pb.ReportRequest, _: grpc.ServicerContext) -> pb.ReportResponse:
        news = tuple(news_from_proto(item) for item in request.news)
        self._handlers.report(AgentId(request.agent_id), Registration(request.registration), request.batch, news)
        return pb.ReportResponse()

    def certify_stage(self, request: pb.CertifyStageRequest, _: grpc.ServicerContext) -> pb.CertifyStageResponse:
        agent, registration = AgentId(request.agent_id), Registration(request.registration)
        stage = stage_key_from_proto(request.stage)
        certificate = self._handlers.certify_stage(agent, registration, stage, request.request_pem)
        return pb.CertifyStageResponse(certificate_pem=certificate)

    def submit_job(self, request: pb.SubmitJobRequest, context: grpc.ServicerContext) -> pb.SubmitJobResponse:
        job_id = self._handlers.submit_job(submission_from_proto(request), owner=_owner(context))
        return pb.SubmitJobResponse(job_id=job_id)

    def stop_job(self, request: pb.StopJobRequest, _: grpc.ServicerContext) -> pb.StopJobResponse:
        state = self._handlers.stop_job(_job(request.job_id), stop_mode_from_proto(request.mode))
        return pb.StopJobResponse(state=state_to_proto(state))

    def drain_worker(self, request: pb.DrainWorkerRequest, _: grpc.ServicerContext) -> pb.DrainWorkerResponse:
        worker = self._handlers.drain_worker(_job(request.job_id), VirtualWorkerIndex(request.vw))
        return pb.DrainWorkerResponse(worker=worker_to_proto(worker))

    def add_worker(self, request: pb.AddWorkerRequest, _: grpc.ServicerContext) -> pb.AddWorkerResponse:
        vw = VirtualWorkerIndex(request.vw) if request.HasField("vw") else None
        workers = self._handlers.add_worker(_job(request.job_id), vw)
        return pb.AddWorkerResponse(workers=[worker_to_proto(worker) for worker in workers])

    def depart(self, request: pb.DepartRequest, _: grpc.ServicerContext) -> pb.DepartResponse:
        self._handlers.depart(AgentId(request.agent_id), Registration(request.registration))
        return pb.DepartResponse()

    def measure_links(self, request: pb.MeasureLinksRequest, _: grpc.ServicerContext) -> pb.MeasureLinksResponse:
        told = self._handlers.measure_links(request.request_id, fresh=request.fresh)
        return pb.MeasureLinksResponse(done=told.done, total=told.total, awaited=told.awaited, remark=told.remark)

    def status(self, request: pb.GetStatusRequest, _: grpc.ServicerContext) -> pb.GetStatusResponse:
        return pb.GetStatusResponse(status=status_to_proto(self._handlers.status(_job(request.job_id))))

    def watch_job(self, request: pb.WatchJobRequest, context: grpc.ServicerContext) -> Iterator[pb.WatchJobResponse]:
        for event in self._handlers.watch_job(_job(request.job_id), request.after_sequence, context):
            yield event_to_proto(event)

    def members(self, _request: pb.ListMembersRequest, _: grpc.ServicerContext) -> pb.ListMembersResponse:
        return pb.ListMembersResponse(members=[member_to_proto(member) for member in self._handlers.members()])

    def clocks(self, request: pb.GetClocksRequest, _: grpc.ServicerContext) -> pb.GetClocksResponse:
        clocks = self._handlers.clocks(_job(request.job_id))
        return pb.GetClocksResponse(clocks=None if clocks is None else clocks_to_proto(clocks))

    def watch_clocks(
        self, request: pb.WatchClocksRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.WatchClocksResponse]:
        for clocks in self._handlers.watch_clocks(_job(request.job_id), context):
            yield pb.WatchClocksResponse(clocks=clocks_to_proto(clocks))
