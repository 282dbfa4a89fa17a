"""The coordinator: members, jobs, and the exchange between them.

One lock guards all state, and `condition` is notified after every change. Nothing slow runs under the lock: long
operations run on the job's own thread and return as facts. `tick` must be called several times a second; it expires
leases, advances time in the state machines, and retries failed writes to the store.

Three components share the lock: `JobHosts` executes the instructions of the jobs' state machines, `DeviceClaims` offers
free devices to queued jobs, `Adoption` takes over jobs of an earlier coordinator.
"""

from __future__ import annotations

import re
import threading
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import replace

from hetpipe import failpoints
from hetpipe.clock import Clock
from hetpipe.decide.lifecycle.exchange import (
    AgentDeparts,
    ClocksReported,
    ConditionsReported,
    Input,
    MemberGone,
    MemberRegistered,
    ShardHeartbeat,
    StopRequested,
    Tick,
)
from hetpipe.decide.lifecycle.job_machine import JobMachine
from hetpipe.decide.lifecycle.job_queue import unknown_usage
from hetpipe.decide.lifecycle.link_survey import ClusterLinks, is_cluster_survey
from hetpipe.decide.lifecycle.orphans import Orphans
from hetpipe.decide.lifecycle.patience import Patience
from hetpipe.decide.lifecycle.registry import Mailboxes, Registry
from hetpipe.errors import (
    HetpipeError,
    JobError,
    JobFailed,
    PermissionDenied,
    ProtocolViolation,
    StoreUnavailable,
    Unavailable,
    UnknownJob,
    UnknownMember,
    VersionConflict,
)
from hetpipe.job.as_json import job_from_json
from hetpipe.loggers.kinds import missing
from hetpipe.observe.log import get_logger
from hetpipe.server.coordinator.adoption import Adoption, job_id_of
from hetpipe.server.coordinator.control_numbers import Election, Fences, NoElection, Terms
from hetpipe.server.coordinator.device_claims import DeviceClaims
from hetpipe.server.coordinator.job_hosts import Context, JobHost, JobHosts, UnsavedState, save, thread_per_job
from hetpipe.server.coordinator.tasks import Tools
from hetpipe.storage.store import JobRecord, MemberRecord, Store
from hetpipe.values.commands import (
    AgentReport,
    ChildExit,
    KeyedStageReport,
    LinkAwaited,
    LinkResult,
    NumberedCommand,
    StageKey,
)
from hetpipe.values.conditions import Condition, ConditionKind
from hetpipe.values.events import CodeArchive, JobEnded, JobState, NumberedEvent, StopMode, Submission
from hetpipe.values.ids import AgentId, JobId
from hetpipe.values.leases import LEASE_SECONDS
from hetpipe.values.link_measurement import LinksProgress
from hetpipe.values.members import Lease, Member, MemberId, MemberInfo, MemberRole, Registration, Renewal
from hetpipe.values.run import AgentInfo, ClockSnapshot

_log = get_logger(__name__)

_REQUEST_ID = re.compile(r"[0-9A-Za-z-]{8,64}")

_NO_JOB = "no job was submitted yet; hand one in with `hetpipe submit`"


#: Subject and reporter of the condition of the store.
_STORE = "Redis"
_COORDINATOR = "coordinator"

_STORE_IS_BACK = "Redis answers the coordinator again; events of the outage are stored now"


def _check_request_id(text: str) -> None:
    if not _REQUEST_ID.fullmatch(text):
        raise ProtocolViolation(f"request id {text!r:.80} must be 8 to 64 letters, digits or dashes")


def _named(report: AgentReport) -> str:
    """Name of a report's subject, for messages."""
    match report:
        case KeyedStageReport(key=key) | ChildExit(key=key):
            return str(key)
        case LinkAwaited() | LinkResult():
            return "a measured link"
        case _:
            return "an inspection"


def _away(outage: str) -> str:
    """Message for a store outage: consequence and fix."""
    return (
        f"Redis is unreachable ({outage}): training continues, but nothing new starts, and new events are lost if "
        "the coordinator ends; restart Redis, or repair the network to it"
    )


class Coordinator:
    """Core of one coordinator. Thread-safe; `servicer` exposes it on the network."""

    def __init__(
        self,
        store: Store,
        tools: Tools,
        *,
        clock: Clock,
        patience: Patience | None = None,
        lease_seconds: float = LEASE_SECONDS,
        executor_of: Callable[[JobId], Executor] = thread_per_job,
        election: Election | None = None,
    ) -> None:
        """Load the jobs of `store`; each unfinished one is led again once its clock shard reports it.

        Raises:
            StoreUnavailable: the store cannot be reached.
        """
        self._store = store
        self._tools = tools
        self._clock = clock
        self._patience = patience or Patience()
        #: Guards everything below; notified after every change.
        self.condition = threading.Condition()
        self._registry = Registry(lease_seconds)
        #: These two have locks of their own; the store may be called under theirs.
        self._fences = Fences(election or NoElection())
        self._terms = Terms(store)
        self._mailboxes = Mailboxes()
        #: The measurements of links for operators.
        self._cluster_links = ClusterLinks()
        context = Context(store=store, tools=tools, clock=clock, patience=self._patience, condition=self.condition)
        self._jobs = JobHosts(
            context, self._mailboxes, executor_of=executor_of, first_number=self._fences.first_event_number
        )
        self._orphans = Orphans(self._patience, now=clock.monotonic())
        self._claims = DeviceClaims(context, self._jobs, self._registry, self._orphans)
        #: When `tick` was last called.
        self._ticked = clock.monotonic()
        #: Whether the store answers.
        self._store_condition = Condition(ConditionKind.STORE_UNREACHABLE, _STORE, cleared=clock.wall())
        self._adoption = Adoption(context, self._jobs, self._claims, self._registry, self._orphans, self._terms)

    # -- members ---------------------------------------------------------------------------------------------------

    def register(self, info: MemberInfo, *, owner: str = "") -> Lease:
        """Register a member. An earlier process with the same id is evicted.

        Args:
            info: its self-description.
            owner: identity of its certificate; empty without TLS.

        Raises:
            PermissionDenied: the name belongs to another owner.
            ProtocolViolation: a member of another role has its id, it reports on a foreign job, or a fence or term is
                out of range.
            ResourceExhausted: there are too many members.
            NotLeader: it has seen a newer coordinator, which leads.
            StoreUnavailable: membership changes need the store.
        """
        with self.condition:
            self._registry.check_new(info, owner=owner)
        self._terms.meet(info)
        self._fences.meet(info)
        registration = Registration(uuid.uuid4().hex)
        failpoints.reach("membership.lease_granted_not_recorded")
        record = self._store.put_member(info, registration, lease_seconds=self._registry.lease_seconds)
        failpoints.reach("membership.recorded_not_published")
        with self.condition:
            replaced = self._registry.put(record, now=self._clock.monotonic(), owner=owner)
            if info.role is MemberRole.AGENT:
                self._mailboxes.open(AgentId(info.id), is_new=replaced is not None)
            for job_id in {key.job_id for key in info.stages}:
                self._adoption.discover(job_id, reporter=info.id)
            if replaced is not None:
                self._announce_gone(replaced, f"{replaced} was replaced by pid {info.pid} on {info.host}")
            self._jobs.feed_all(MemberRegistered(info))
            self._claims.offer()
            self.condition.notify_all()
        failpoints.reach("membership.published_not_seen")
        _log.info("member_registered", member=str(info), member_role=info.role.value)
        return Lease(registration, self._registry.lease_seconds, record.order, self._fences.own)

    def heartbeat(
        self,
        member_id: MemberId,
        registration: Registration,
        *,
        clocks: Mapping[JobId, ClockSnapshot],
        jobs: tuple[JobId, ...],
        last_command: int,
        lost: Mapping[JobId, str] | None = None,
        conditions: Mapping[JobId, tuple[Condition, ...]] | None = None,
        owner: str = "",
    ) -> Renewal:
        """Renew a lease, and process the reports of the heartbeat.

        Args:
            member_id: id of the member.
            registration: its registration token.
            clocks: job → clocks, from a clock shard.
            jobs: jobs it works for.
            last_command: number of the last executed command.
            lost: job → reason why a shard no longer serves it.
            conditions: job → its conditions there; ignored unless the job has this shard.

        Raises:
            UnknownMember: register again.
            PermissionDenied: it belongs to another owner, or contains reports that its role cannot make.
            ProtocolViolation: the term of a clock is out of range.
        """
        self._terms.check_clocks(clocks, member_id)
        with self.condition:
            role = self._registry.check(member_id, registration, owner=owner).info.role
            _check_reports(role, of_shard=bool(clocks or lost or conditions), of_jobs=bool(jobs or last_command))
            is_first = not self._registry.has_reported(member_id)
            record = self._registry.renew(member_id, registration, now=self._clock.monotonic())
            self._mailboxes.acknowledge(AgentId(member_id), last_command)
            for job_id, snapshot in clocks.items():
                host = self._jobs.get(job_id)
                if host is not None and host.machine.is_clock_shard(member_id):
                    self._jobs.feed(host, ClocksReported(snapshot))
                else:
                    self._adoption.on_clock_report(record.info, job_id, snapshot)
            lost = lost or {}
            if record.info.role is MemberRole.PARAMETER_SERVER:
                self._adoption.on_shard_report(record.info, clocks, lost)
            for host in self._jobs:
                if any(shard.id == member_id for shard in host.machine.shards):
                    reason = lost.get(host.job_id, "")
                    self._jobs.feed(host, ShardHeartbeat(member_id, serves=host.job_id in jobs, reason=reason))
                    if reported := (conditions or {}).get(host.job_id):
                        self._jobs.feed(host, ConditionsReported(member_id, reported))
            ended = tuple(job_id for job_id in (*jobs, *lost) if not self._may_have_processes(job_id, member_id))
            self._adoption.tick()
            if is_first:
                self._claims.offer()
        self._renew_in_store(record)
        return Renewal(self._registry.lease_seconds, ended, self._fences.own)

    def leave(self, member_id: MemberId, registration: Registration, *, owner: str = "") -> None:
        """End a membership; a no-op without one under this registration.

        Raises:
            PermissionDenied: it is another owner's.
        """
        with self.condition:
            try:
                info = self._registry.check(member_id, registration, owner=owner).info
            except UnknownMember:
                return
            self._registry.remove(member_id)
            self._mailboxes.close(AgentId(member_id))
            self._announce_gone(info, f"{info} left the cluster")
        _log.info("member_left", member=member_id)
        try:
            self._store.remove_member(member_id, registration)
        except StoreUnavailable as error:
            _log.warning("leave_not_kept", member=member_id, reason=str(error))

    def depart(self, agent: AgentId, registration: Registration) -> None:
        """Drain an agent before it leaves; it gets no stages until it registers again.

        Raises:
            UnknownMember: it is no longer a member.
        """
        with self.condition:
            if not self._registry.depart(MemberId(agent), registration):
                return
            self._jobs.feed_all(AgentDeparts(agent))
        _log.info("agent_departs", member=agent)

    def members(self, *, after: int = -1, limit: int | None = None) -> tuple[Member, ...]:
        """Live members in order of registration: at most `limit` of those behind the order `after`."""
        with self.condition:
            return self._registry.members(now=self._clock.monotonic(), after=after, limit=limit)

    @property
    def conditions(self) -> tuple[Condition, ...]:
        """Conditions of the cluster itself."""
        with self.condition:
            return (self._store_condition,) if self._store_condition.times else ()

    def expired_leases(self) -> Mapping[MemberRole, int]:
        """Number of expired leases by role."""
        with self.condition:
            return dict(self._registry.expired)

    @property
    def lease_seconds(self) -> float:
        """Duration of a lease after a heartbeat."""
        return self._registry.lease_seconds

    def members_of(self, role: MemberRole) -> list[MemberInfo]:
        """Live members of one role; shards in index order."""
        with self.condition:
            return self._registry.of_role(role)

    def commands(self, agent: AgentId, registration: Registration, *, after: int) -> tuple[NumberedCommand, ...]:
        """Commands for the agent after number `after`.

        Raises:
            UnknownMember: register again.
        """
        with self.condition:
            self._registry.check(MemberId(agent), registration)
            return self._mailboxes.after(agent, after)

    def report(self, agent: AgentId, registration: Registration, batch: int, reports: tuple[AgentReport, ...]) -> None:
        """Process a batch of an agent's reports, exactly once.

        Raises:
            UnknownMember: register again.
            PermissionDenied: some reports are of stages or inspections of other agents; only the rest took effect.
        """
        with self.condition:
            self._registry.check(MemberId(agent), registration)
            if not self._mailboxes.take_batch(agent, batch):
                return
            foreign = [item for item in reports if not self._deliver_report(agent, item)]
        if foreign:
            what = _named(foreign[0])
            raise PermissionDenied(
                f"agent {agent} reports {what} of job {foreign[0].job_id}, which is not on its node; "
                f"{len(foreign)} of {len(reports)} reports are rejected"
            )

    def measure_links(self, request_id: str, *, fresh: bool) -> LinksProgress:
        """Start measuring the unknown links between nodes; returns the progress of a running measurement.

        Args:
            request_id: idempotency key of the survey.
            fresh: measure known links again.

        Raises:
            ProtocolViolation: the request id is invalid.
            ResourceExhausted: another measurement is running.
        """
        _check_request_id(request_id)
        with self.condition:
            members = self._registry.of_role(MemberRole.AGENT)
            agents = [self._claims.known_agent(member) for member in members if not self._registry.departs(member.id)]
            now = self._clock.monotonic()
            progress, sent = self._cluster_links.survey(request_id, agents, fresh=fresh, now=now)
            self._jobs.post(sent)
        return progress

    def certify_stage(self, agent: AgentId, registration: Registration, stage: StageKey, request_pem: bytes) -> bytes:
        """Issue a certificate for a stage, with the key of the request.

        Raises:
            UnknownMember: register again.
            PermissionDenied: no stage of that name is assigned to that agent's node.
            ProtocolViolation: this coordinator runs without TLS and cannot certify.
            UserError: the request is invalid.
        """
        if self._tools.certify is None:
            raise ProtocolViolation("this coordinator certifies no stages: it was started without --tls")
        with self.condition:
            self._registry.check(MemberId(agent), registration)
            host = self._jobs.get(stage.job_id)
            lives = () if host is None else host.machine.stages
            is_end = self._cluster_links.may_be(agent, stage)
            is_end = is_end or (host is not None and host.machine.may_be_end(agent, stage))
            if not is_end and not any(life.key == stage and life.agent == agent and not life.exited for life in lives):
                raise PermissionDenied(f"no {stage} is to run on agent {agent}")
        return self._tools.certify(request_pem, stage.peer)

    def code(self, agent: AgentId, registration: Registration, digest: str) -> CodeArchive:
        """The code that was sent along with a job led here.

        Raises:
            UnknownMember: register again.
            PermissionDenied: no job here was sent with it.
        """
        with self.condition:
            self._registry.check(MemberId(agent), registration)
            sent = (host.machine.submission.code for host in self._jobs)
            found = next((code for code in sent if code is not None and code.digest == digest), None)
        if found is None:
            raise PermissionDenied(f"no job that is led here was sent with code of the digest {digest:.64}")
        return found

    # -- jobs ------------------------------------------------------------------------------------------------------

    def host(self, job_id: JobId | None) -> JobHost | None:
        """A job led here, or the newest one; access it under `condition` only."""
        with self.condition:
            return self._jobs.get(job_id) if job_id else self._jobs.newest

    def hosts(self) -> tuple[JobHost, ...]:
        """Jobs led here, oldest first; access them under `condition` only."""
        with self.condition:
            return tuple(self._jobs)

    def feed_job(self, host: JobHost, fact: Input) -> None:
        """Pass a fact to a job, and execute the resulting instructions."""
        with self.condition:
            self._jobs.feed(host, fact)

    def free_devices(self) -> tuple[AgentInfo, ...]:
        """Agents in order of registration, with their free devices.

        Raises:
            Unavailable: unknown yet, as orphans may use some.
        """
        with self.condition:
            cluster = self._claims.view()
        if cluster.unled:
            raise Unavailable(f"the coordinator waits for {unknown_usage(cluster.unled[0])}; retry in a few seconds")
        return cluster.agents

    def is_orphan(self, job_id: JobId) -> bool:
        """Whether a job has no leader and members may still report it."""
        with self.condition:
            return job_id in self._orphans and job_id not in self._jobs

    def submit_job(self, submission: Submission, *, owner: str = "") -> JobId:
        """Accept a job; idempotent by request id.

        Args:
            submission: the request.
            owner: identity of the submitter's certificate; empty without TLS.

        Raises:
            JobError: the job file is invalid.
            UserError: it names folders outside of those of this coordinator.
            ProtocolViolation: the request id is invalid.
            ResourceExhausted: too many jobs are queued or running.
            StoreUnavailable: new jobs need the store.
        """
        _check_request_id(submission.request_id)
        job = job_from_json(submission.job_json)
        if lacking := missing(job.log.options):
            raise JobError(lacking)
        self._tools.roots.check_run(submission.run_dir, submission.restore, job.storage)
        self._tools.roots.check_initial_weights(job.init_from, submission.import_path)
        job_id = job_id_of(job.name, submission.request_id)
        with self.condition:
            self._jobs.check_room(job_id, owner)
        record = JobRecord(
            job_id=job_id,
            name=job.name,
            state=JobState.RUNNING if submission.has_begun else JobState.SUBMITTED,
            run_dir=submission.run_dir,
            submitted_wall=self._clock.wall(),
            submission=submission,
        )
        kept = self._store.create_job(record)
        with self.condition:
            if submission.has_begun and not kept.state.is_terminal:
                # Its clock shard may know more; otherwise it is rewound to its newest checkpoint.
                self._jobs.forget_end(job_id)
                self._adoption.discover(job_id, kept)
                return job_id
            if job_id in self._jobs or not kept.state.is_queued:
                return job_id
            now = self._clock.monotonic()
            machine = JobMachine(job_id, job, submission, patience=self._patience, now=now)
            self._jobs.lead(machine, kept).owner = owner
            _log.info("job_submitted", job=job_id, run_dir=submission.run_dir)
            self._claims.offer()
            self.condition.notify_all()
        return job_id

    def stop_job(self, job_id: JobId | None, mode: StopMode) -> JobState:
        """Request a job to stop; returns its current status.

        The request is stored before this returns, so that it survives a crash of this coordinator. During a store
        outage the job stops all the same.

        Raises:
            UnknownJob: there is no such job.
        """
        with self.condition:
            host = self.host(job_id)
            if host is None:
                return self._stop_orphan(self.record(job_id), mode)
            _log.info("job_stop_asked", job=host.job_id, mode=mode)
            host.request_stop(mode)
            self._jobs.feed(host, StopRequested(mode))
            state, record = host.machine.state, host.record
        try:
            # The job's own thread writes it again: it may have been writing the record without it.
            save(self._store, UnsavedState(record, is_record=True, events=()))
        except StoreUnavailable as error:
            _log.warning("job_not_kept_yet", job=record.job_id, reason=str(error))
        return state

    def _stop_orphan(self, record: JobRecord, mode: StopMode) -> JobState:
        """Store the stop request of an orphan: it stops once it is led, or ends if it cannot be."""
        if record.state.is_terminal:
            return record.state
        try:
            self._store.replace_job(replace(record, stop=mode))
        except VersionConflict:
            # Its end was written when it was given up.
            return self._stop_orphan(self.record(record.job_id), mode)
        self._adoption.request_stop(record.job_id, mode)
        _log.info("job_stop_asked", job=record.job_id, mode=mode)
        return record.state

    def awaited(self, job_id: JobId) -> str:
        """The obstacle to leading a job, as a sentence; empty if it is led or has ended."""
        with self.condition:
            return "" if job_id in self._jobs else self._orphans.awaited(job_id, now=self._clock.monotonic())

    def record(self, job_id: JobId | None) -> JobRecord:
        """Record of a job, or of the newest one.

        Raises:
            UnknownJob: there is no such job.
        """
        with self.condition:
            host = self.host(job_id)
            if host is not None:
                return host.record
        kept = self._store.job(job_id) if job_id is not None else next(reversed(self._store.jobs()), None)
        if kept is None:
            return self._forgotten(job_id)
        if not kept.state.is_terminal:
            with self.condition:
                # Every orphan is led, rewound or ended, even if an earlier step missed it.
                self._adoption.discover(kept.job_id, kept)
        return kept

    def _forgotten(self, job_id: JobId | None) -> JobRecord:
        """End of a job that is missing in the store.

        Raises:
            UnknownJob: it is unknown to the coordinator, the store and all members.
        """
        if job_id is None:
            raise UnknownJob(_NO_JOB)
        with self.condition:
            sentence, awaited = self._jobs.end_of(job_id), self.awaited(job_id)
        if not sentence:
            why = f"; {awaited}" if awaited else ""
            raise UnknownJob(f"job {job_id!r:.80} is not known here{why}")
        return JobRecord(
            job_id=job_id,
            name=job_id.rpartition("-")[0],
            state=JobState.FAILED,
            run_dir="",
            submitted_wall=self._clock.wall(),
            failure=sentence,
        )

    def kept_events(self, job_id: JobId, *, after: int) -> tuple[NumberedEvent, ...]:
        """Events of a job not led here; includes the end if it has ended.

        Raises:
            UnknownJob: it is unknown to the coordinator, the store and all members.
        """
        events = self._store.events(job_id, after=after)
        record = self.record(job_id)
        if events or not record.state.is_terminal:
            return events
        error = JobFailed.__name__ if record.state is JobState.FAILED else ""
        return (NumberedEvent(after + 1, JobEnded(record.state, record.failure, error)),)

    # -- time ------------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Advance time. Never raises."""
        with self.condition:
            now = self._clock.monotonic()
            if now - self._ticked > self._patience.longest_tick_seconds:
                # This process was suspended itself.
                self._registry.renew_all(now=now)
            self._ticked = now
            for gone in self._registry.expire(now=now):
                self._mailboxes.close(AgentId(gone.info.id))
                silent = self._registry.lease_seconds
                _log.warning("lease_ran_out", member=gone.info.id, silent_seconds=silent)
                self._announce_gone(gone.info, f"{gone.info} stopped answering: no heartbeat for {silent:.1f} s")
            self._adoption.tick()
            self._claims.offer()
            self._look_at_store()
            self._jobs.post(self._cluster_links.tick(now=now))
            for host in self._jobs:
                # A job about which reports may still arrive is not waiting yet.
                if host.job_id not in self._orphans:
                    self._jobs.feed(host, Tick())
            self._jobs.forget_old()

    def close(self) -> None:
        """Wait for the jobs' threads and close the store."""
        with self.condition:
            executors = [*(host.executor for host in self._jobs), *self._adoption.executors]
        for executor in executors:
            executor.shutdown()
        self._store.close()

    # -- inside ----------------------------------------------------------------------------------------------------

    def _announce_gone(self, info: MemberInfo, sentence: str) -> None:
        self._jobs.feed_all(MemberGone(info.id, sentence))

    def _may_have_processes(self, job_id: JobId, reporter: MemberId) -> bool:
        """Whether a member may still have processes of a job it reports; called under the lock."""
        if is_cluster_survey(job_id):
            return self._cluster_links.is_under_way(job_id)
        host = self._jobs.get(job_id)
        if host is not None:
            return host.machine.may_have_processes(now=self._clock.monotonic())
        self._adoption.discover(job_id, reporter=reporter)
        return not self._jobs.has_ended(job_id)

    def _deliver_report(self, agent: AgentId, report: AgentReport) -> bool:
        """Process an agent's report of a job; False if it may not report it. Called under the lock."""
        if is_cluster_survey(report.job_id):
            return isinstance(report, LinkAwaited | LinkResult) and self._deliver_to_survey(agent, report)
        host = self._jobs.get(report.job_id)
        if not self._adoption.keep_report(agent, report) and host is not None:
            if not host.machine.may_report(agent, report):
                return False
            if isinstance(report, LinkResult):
                self._registry.learn_links(report.measured)
            self._jobs.feed(host, report)
        return True

    def _deliver_to_survey(self, agent: AgentId, report: LinkAwaited | LinkResult) -> bool:
        """Process an agent's report of a link; False if none was requested. Called under the lock."""
        sent = self._cluster_links.handle(agent, report, now=self._clock.monotonic())
        if sent is None:
            return False
        if isinstance(report, LinkResult):
            self._registry.learn_links(report.measured)
        self._jobs.post(sent)
        return True

    def _look_at_store(self) -> None:
        """Notify every job of the store's availability after a reported outage; called under the lock."""
        before, outage = self._store_condition, self._fences.outage
        if outage and not before.holds:
            raised = replace(before, sentence=_away(outage), since=self._clock.wall(), cleared=None, clearance="")
            self._store_condition = replace(raised, times=before.times + 1)
            _log.error("store_unreachable", sentence=raised.sentence)
        elif before.holds and not outage:
            self._store_condition = replace(before, cleared=self._clock.wall(), clearance=_STORE_IS_BACK)
            _log.warning("store_reachable", sentence=_STORE_IS_BACK)
        for host in self._jobs:
            board = host.machine.conditions
            if self._store_condition.times or board.current[ConditionKind.STORE_UNREACHABLE]:
                self._jobs.feed(host, ConditionsReported(_COORDINATOR, (self._store_condition,)))

    def _renew_in_store(self, record: MemberRecord) -> None:
        """Renew a membership in the store; an outage or data loss of the store evicts no member."""
        lease = self._registry.lease_seconds
        try:
            try:
                self._store.renew_member(record.info.id, record.registration, lease_seconds=lease)
            except UnknownMember:
                self._store.put_member(record.info, record.registration, lease_seconds=lease)
        except HetpipeError as error:
            _log.warning("lease_not_kept", member=record.info.id, reason=str(error))


def _check_reports(role: MemberRole, *, of_shard: bool, of_jobs: bool) -> None:
    """Reject a heartbeat with reports that the member's role cannot make.

    Raises:
        PermissionDenied: it contains such reports.
    """
    if of_shard and role is not MemberRole.PARAMETER_SERVER:
        raise PermissionDenied(
            f"the heartbeat of an {role} reports clocks, conditions or lost jobs, which only parameter servers have"
        )
    if of_jobs and role is MemberRole.WORKER:
        raise PermissionDenied("the heartbeat of a user's own worker reports jobs, which it cannot serve")
