"""The client side of `CoordinatorService`: values in, values out. Used by agents, shards, the CLI and `hetpipe.Client`.

The watching methods hide that a stream is reopened every `STREAM_SECONDS` from the last position seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing

from hetpipe.clock import SYSTEM_CLOCK, Clock
from hetpipe.errors import NobodyLeads, UnknownJob
from hetpipe.proto.v1 import coordinator_pb2 as pb
from hetpipe.values.commands import AgentNews, NumberedCommand, StageKey
from hetpipe.values.conditions import Condition
from hetpipe.values.events import JobEnded, JobState, JobStatus, NumberedEvent, StopMode, Submission, WorkerStatus
from hetpipe.values.identity import Role, server_name
from hetpipe.values.ids import AgentId, JobId, VirtualWorkerIndex
from hetpipe.values.link_measurement import LinksProgress
from hetpipe.values.members import Lease, Member, MemberId, MemberInfo, Registration, Renewal
from hetpipe.values.run import ClockSnapshot
from hetpipe.wire import coordinator_methods as methods
from hetpipe.wire.caller import Caller
from hetpipe.wire.connection import Target
from hetpipe.wire.convert import (
    clocks_from_proto,
    clocks_to_proto,
    command_from_proto,
    member_from_proto,
    member_info_to_proto,
    news_to_proto,
    stage_key_to_proto,
)
from hetpipe.wire.convert_conditions import job_conditions_to_proto
from hetpipe.wire.convert_jobs import (
    event_from_proto,
    state_from_proto,
    status_from_proto,
    stop_mode_to_proto,
    submission_to_proto,
    worker_from_proto,
)
from hetpipe.wire.tls import Tls
from hetpipe.wire.watchers import STREAM_DEADLINE_SECONDS

#: Deadline of a call that the coordinator answers at once.
CALL_SECONDS = 5.0

#: Deadline of a heartbeat: shorter than a lease, so that a second one can still save it.
HEARTBEAT_SECONDS = 2.0

#: How long a coordinator that answers may tell nothing of a job. One that is led tells something every few seconds, and
#: one that nobody leads is led on, sent back to a checkpoint or ended after a minute (`decide.lifecycle.patience`).
SILENT_SECONDS = 180.0

#: Deadline of a good-bye, which nobody needs: whoever says it is about to end, and has been given ten seconds.
LEAVE_SECONDS = 2.0


class CoordinatorClient:
    """Typed calls to one coordinator. Thread-safe; `close` ends the calls under way.

    Every method raises `PeerUnreachable` or `DeadlineExceeded` when the coordinator is away, and what the coordinator
    itself raises. `job_id=None` means the newest job.
    """

    def __init__(self, address: str, *, tls: Tls | None = None, clock: Clock = SYSTEM_CLOCK) -> None:
        self.address = address
        self._clock = clock
        target = Target(address=address, role="coordinator", tls=tls, server_name=server_name(Role.COORDINATOR))
        self._caller = Caller(target, service=methods.SERVICE, clock=clock)

    def close(self) -> None:
        """End all calls and the connection."""
        self._caller.close()

    def certify_stage(self, agent: AgentId, registration: Registration, stage: StageKey, request_pem: bytes) -> bytes:
        """The certificate of a stage that the plan puts on `agent`'s node, as PEM."""
        request = pb.CertifyStageRequest(
            agent_id=agent, registration=registration, stage=stage_key_to_proto(stage), request_pem=request_pem
        )
        response = self._caller.unary(
            methods.CERTIFY_STAGE, request, deadline_seconds=CALL_SECONDS, awaited="a certificate"
        )
        return response.certificate_pem

    def register(self, member: MemberInfo) -> Lease:
        """Make `member` a member, or replace its registration."""
        request = pb.RegisterRequest(member=member_info_to_proto(member))
        response = self._caller.unary(methods.REGISTER, request, deadline_seconds=CALL_SECONDS, awaited="a lease")
        return Lease(Registration(response.registration), response.lease_seconds, response.order, response.fence)

    def heartbeat(
        self,
        member_id: MemberId,
        registration: Registration,
        *,
        clocks: Mapping[JobId, ClockSnapshot] | None = None,
        jobs: Sequence[JobId] = (),
        last_command: int = 0,
        lost: Mapping[JobId, str] | None = None,
        conditions: Mapping[JobId, Sequence[Condition]] | None = None,
    ) -> Renewal:
        """Renew a lease, and tell what is new.

        Args:
            member_id: the member.
            registration: its newest token.
            clocks: per job; clock shards only.
            jobs: the jobs the member does something for.
            last_command: number of the last command carried out; agents only.
            lost: per job that the member served, why it does so no more; shards only.
            conditions: per job, what endangers it at the member, or has; shards only.

        Raises:
            UnknownMember: the lease ran out, or a newer registration replaced it.
        """
        request = pb.HeartbeatRequest(
            member_id=member_id,
            registration=registration,
            clocks={job: clocks_to_proto(snapshot) for job, snapshot in (clocks or {}).items()},
            job_ids=jobs,
            last_command=last_command,
            lost_jobs={str(job): reason for job, reason in (lost or {}).items()},
            conditions=job_conditions_to_proto(conditions or {}),
        )
        response = self._caller.unary(
            methods.HEARTBEAT, request, deadline_seconds=HEARTBEAT_SECONDS, awaited="the renewal of a lease"
        )
        ended = tuple(JobId(job) for job in response.ended_job_ids)
        return Renewal(response.lease_seconds, ended, response.fence)

    def leave(self, member_id: MemberId, registration: Registration) -> None:
        """End a membership; nothing happens when there is none."""
        request = pb.LeaveRequest(member_id=member_id, registration=registration)
        self._caller.unary(methods.LEAVE, request, deadline_seconds=LEAVE_SECONDS)

    def watch_commands(self, agent: AgentId, registration: Registration, *, after: int) -> Iterator[NumberedCommand]:
        """One stream of the commands after number `after`; ends after `STREAM_SECONDS`, then open the next.

        Raises:
            UnknownMember: register again.
        """
        request = pb.WatchCommandsRequest(agent_id=agent, registration=registration, after_sequence=after)
        responses = self._caller.stream(
            methods.WATCH_COMMANDS, request, deadline_seconds=STREAM_DEADLINE_SECONDS, awaited="the next command"
        )
        with closing(responses):
            for response in responses:
                yield command_from_proto(response)

    def report(self, agent: AgentId, registration: Registration, *, batch: int, news: Sequence[AgentNews]) -> None:
        """Tell what happened to an agent's children. A batch sent twice under one number counts once.

        Raises:
            UnknownMember: register again.
        """
        request = pb.ReportRequest(
            agent_id=agent, registration=registration, batch=batch, news=[news_to_proto(item) for item in news]
        )
        self._caller.unary(methods.REPORT, request, deadline_seconds=CALL_SECONDS)

    def submit_job(self, submission: Submission) -> JobId:
        """Hand in a job; a resend of the same `request_id` gives the same id. Errors found later come as events.

        Raises:
            JobError: the job cannot be read; all its problems.
        """
        response = self._caller.unary(
            methods.SUBMIT_JOB, submission_to_proto(submission), deadline_seconds=CALL_SECONDS, awaited="a job id"
        )
        return JobId(response.job_id)

    def stop_job(self, job_id: JobId | None = None, *, mode: StopMode) -> JobState:
        """Ask a job to stop; its events tell when it has. Nothing happens when it has ended.

        Raises:
            UnknownJob: there is no such job.
        """
        request = pb.StopJobRequest(job_id=job_id or "", mode=stop_mode_to_proto(mode))
        response = self._caller.unary(methods.STOP_JOB, request, deadline_seconds=CALL_SECONDS)
        return state_from_proto(response.state)

    def drain_worker(self, vw: VirtualWorkerIndex, job_id: JobId | None = None) -> WorkerStatus:
        """Ask a virtual worker to leave, after the next barrier if it computes; where it stands now. Repeatable.

        Raises:
            UnknownJob: there is no such job.
            UserError: it has no such virtual worker, or that one cannot leave.
        """
        request = pb.DrainWorkerRequest(job_id=job_id or "", vw=vw)
        response = self._caller.unary(methods.DRAIN_WORKER, request, deadline_seconds=CALL_SECONDS)
        return worker_from_proto(response.worker)

    def add_worker(self, vw: VirtualWorkerIndex | None = None, job_id: JobId | None = None) -> tuple[WorkerStatus, ...]:
        """Ask a virtual worker back that has left or is not started anew; None: all of these, or if none is, a new one.

        Repeatable with a name; without one each call may bring another new one.

        Returns:
            Where those that were asked for stand now.

        Raises:
            UnknownJob: there is no such job.
            UserError: it has no such virtual worker, or none is out and no device is free for a new one.
        """
        request = pb.AddWorkerRequest(job_id=job_id or "", vw=vw)
        response = self._caller.unary(methods.ADD_WORKER, request, deadline_seconds=CALL_SECONDS)
        return tuple(worker_from_proto(worker) for worker in response.workers)

    def depart(self, agent: AgentId, registration: Registration) -> None:
        """Tell that an agent is about to leave: its stages end at the next barrier, and it gets no others. Repeatable.

        Raises:
            UnknownMember: it is no member any more.
        """
        request = pb.DepartRequest(agent_id=agent, registration=registration)
        self._caller.unary(methods.DEPART, request, deadline_seconds=CALL_SECONDS)

    def measure_links(self, request_id: str, *, fresh: bool = False) -> LinksProgress:
        """Have agents measure the links between their nodes that nobody knows, or tell how far that is.

        Args:
            request_id: names the wish: with the same one it is not begun again.
            fresh: measure also what is known.

        Raises:
            ResourceExhausted: links are measured for somebody else.
        """
        request = pb.MeasureLinksRequest(request_id=request_id, fresh=fresh)
        told = self._caller.unary(methods.MEASURE_LINKS, request, deadline_seconds=CALL_SECONDS)
        return LinksProgress(done=told.done, total=told.total, awaited=told.awaited, remark=told.remark)

    def status(self, job_id: JobId | None = None) -> JobStatus:
        """One job's status; with no job at all, the cluster's processes alone.

        Raises:
            UnknownJob: the named job is not known.
        """
        request = pb.GetStatusRequest(job_id=job_id or "")
        response = self._caller.unary(methods.GET_STATUS, request, deadline_seconds=CALL_SECONDS)
        return status_from_proto(response.status)

    def watch_job(self, job_id: JobId | None = None, *, after: int = 0) -> Iterator[NumberedEvent]:
        """The events after number `after` as they come, until `JobEnded`, which is the last.

        Raises:
            UnknownJob: there is no such job.
            NobodyLeads: for `SILENT_SECONDS` there was nothing to tell of it.
        """
        job_id = self._known_job(job_id)
        heard = self._clock.monotonic()
        while True:
            request = pb.WatchJobRequest(job_id=job_id, after_sequence=after)
            responses = self._caller.stream(
                methods.WATCH_JOB,
                request,
                deadline_seconds=STREAM_DEADLINE_SECONDS,
                awaited="the next event of the job",
            )
            with closing(responses):
                for response in responses:
                    numbered = event_from_proto(response)
                    after = max(after, numbered.sequence)
                    yield numbered
                    if isinstance(numbered.event, JobEnded):
                        return
                    heard = self._clock.monotonic()
            self._check_silence(job_id, since=heard)

    def members(self) -> tuple[Member, ...]:
        """The live members in order of registration."""
        response = self._caller.unary(methods.LIST_MEMBERS, pb.ListMembersRequest(), deadline_seconds=CALL_SECONDS)
        return tuple(member_from_proto(member) for member in response.members)

    def clocks(self, job_id: JobId | None = None) -> ClockSnapshot | None:
        """The newest clocks, or None while the clock shard has told none.

        Raises:
            UnknownJob: there is no such job.
        """
        request = pb.GetClocksRequest(job_id=job_id or "")
        response = self._caller.unary(methods.GET_CLOCKS, request, deadline_seconds=CALL_SECONDS)
        return clocks_from_proto(response.clocks) if response.HasField("clocks") else None

    def watch_clocks(self, job_id: JobId | None = None) -> Iterator[ClockSnapshot]:
        """The clocks now and after every change, until the job has ended.

        Raises:
            UnknownJob: there is no such job.
            NobodyLeads: for `SILENT_SECONDS` nobody has led it.
        """
        job_id = self._known_job(job_id)
        last: ClockSnapshot | None = None
        led = self._clock.monotonic()
        while True:
            status = self.status(job_id)
            if status.is_led:
                led = self._clock.monotonic()
            self._check_silence(job_id, since=led)
            request = pb.WatchClocksRequest(job_id=job_id)
            responses = self._caller.stream(
                methods.WATCH_CLOCKS, request, deadline_seconds=STREAM_DEADLINE_SECONDS, awaited="the next clock"
            )
            with closing(responses):
                for response in responses:
                    snapshot = clocks_from_proto(response.clocks)
                    if snapshot != last:
                        last = snapshot
                        yield snapshot
            if status.state is not None and status.state.is_terminal:
                return

    def _check_silence(self, job_id: JobId, *, since: float) -> None:
        """Refuse to wait any longer for a job of which nothing was told.

        Raises:
            NobodyLeads: since then it is too long.
        """
        silent = self._clock.monotonic() - since
        if silent < SILENT_SECONDS:
            return
        status = self.status(job_id)
        state = "of no state" if status.state is None else status.state.value
        why = f": {status.failure}" if status.failure else ""
        raise NobodyLeads(
            f"the coordinator at {self.address} answers, but for {silent:.0f} s it has told nothing of job {job_id}, "
            f"which it has as {state}{why}"
        )

    def _known_job(self, job_id: JobId | None) -> JobId:
        """`job_id`, or the newest job's id: a watch must not change over to a newer job half-way."""
        known = job_id or self.status().job_id
        if known is None:
            raise UnknownJob(f"the coordinator at {self.address} has no job yet; submit one first")
        return known
