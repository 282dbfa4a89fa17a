"""The coordinator: members, jobs, and the shell around each job's machine.

One lock guards everything, and `condition` is notified after every change. Nothing slow happens under the lock: what
takes time runs on the job's own thread and comes back as a fact. `tick` must be called several times a second; it ends
leases, feeds the machines with time, and retries what the store has not taken.
"""

from __future__ import annotations

import hashlib
import re
import threading
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace
from functools import partial

from hetpipe import failpoints
from hetpipe.clock import Clock
from hetpipe.coordinator.exchange import (
    Announce,
    ClocksTold,
    ClusterSeen,
    Input,
    Instruction,
    MemberGone,
    MemberSeen,
    SendCommand,
    StopAsked,
    Task,
    Tick,
)
from hetpipe.coordinator.job_host import JobHost, save
from hetpipe.coordinator.job_machine import JobMachine
from hetpipe.coordinator.mailboxes import Mailboxes
from hetpipe.coordinator.patience import LEASE_SECONDS, Patience
from hetpipe.coordinator.registry import Registry
from hetpipe.coordinator.requirements import ClusterView
from hetpipe.coordinator.store import JobRecord, MemberRecord, Store
from hetpipe.coordinator.tasks import JobTasks, Tools
from hetpipe.errors import (
    HetpipeError,
    PermissionDenied,
    ProtocolViolation,
    ResourceExhausted,
    StoreUnavailable,
    UnknownJob,
    UnknownMember,
)
from hetpipe.observe.log import bind_context, get_logger
from hetpipe.spec.commands import AgentNews, NumberedCommand, StageKey
from hetpipe.spec.events import JobEnded, JobState, NumberedEvent, StopMode, Submission
from hetpipe.spec.identity import StagePeer
from hetpipe.spec.ids import AgentId, JobId
from hetpipe.spec.job_json import job_from_json
from hetpipe.spec.members import Lease, Member, MemberId, MemberInfo, MemberRole, Registration, Renewal
from hetpipe.spec.run import AgentInfo, ClockSnapshot

_log = get_logger(__name__)

#: Ended jobs that stay in memory; the store has them longer.
MAX_ENDED_JOBS = 20

#: Jobs that have not ended: each has a thread, and a history of events.
MAX_OPEN_JOBS = 100

_REQUEST_ID = re.compile(r"[0-9A-Za-z-]{8,64}")
_ID_CHARACTERS = 12


def thread_per_job(job_id: JobId) -> Executor:
    """The usual executor of a job: one thread."""
    return ThreadPoolExecutor(
        max_workers=1, thread_name_prefix=f"job-{job_id}", initializer=partial(bind_context, job=job_id)
    )


class Coordinator:
    """The logic of one coordinator. Thread-safe; `servicer` puts it on the network."""

    def __init__(
        self,
        store: Store,
        tools: Tools,
        *,
        clock: Clock,
        patience: Patience | None = None,
        lease_seconds: float = LEASE_SECONDS,
        executor_of: Callable[[JobId], Executor] = thread_per_job,
    ) -> None:
        """Begin with what `store` remembers: jobs that had not ended have failed with their coordinator.

        Raises:
            StoreUnavailable: the store cannot be reached.
        """
        self._store = store
        self._tools = tools
        self._clock = clock
        self._patience = patience or Patience()
        self._executor_of = executor_of
        #: Guards everything below; notified after every change.
        self.condition = threading.Condition()
        self._registry = Registry(lease_seconds)
        self._mailboxes = Mailboxes()
        #: When `tick` was last called.
        self._ticked = clock.monotonic()
        #: By id, in order of submission.
        self._hosts: dict[JobId, JobHost] = {}
        self._fail_lost_jobs()

    # -- members ---------------------------------------------------------------------------------------------------

    def register(self, info: MemberInfo) -> Lease:
        """Make a member. Another process under the same id is out from now on.

        Raises:
            ProtocolViolation: a member of another role has its id.
            ResourceExhausted: there are too many members.
            StoreUnavailable: membership changes wait for the store.
        """
        with self.condition:
            self._registry.check_new(info)
        registration = Registration(uuid.uuid4().hex)
        failpoints.reach("membership.lease_granted_not_recorded")
        record = self._store.put_member(info, registration, lease_seconds=self._registry.lease_seconds)
        failpoints.reach("membership.recorded_not_published")
        with self.condition:
            replaced = self._registry.put(record, now=self._clock.monotonic())
            if info.role is MemberRole.AGENT:
                self._mailboxes.open(AgentId(info.id))
            if replaced is not None:
                self._tell_gone(replaced, f"{replaced} was replaced by pid {info.pid} on {info.host}")
            for host in list(self._hosts.values()):
                self._feed(host, MemberSeen(info))
            self._offer_cluster()
            self.condition.notify_all()
        failpoints.reach("membership.published_not_seen")
        _log.info("member_registered", member=str(info), member_role=info.role.value)
        return Lease(registration, self._registry.lease_seconds, record.order)

    def heartbeat(
        self,
        member_id: MemberId,
        registration: Registration,
        *,
        clocks: Mapping[JobId, ClockSnapshot],
        jobs: tuple[JobId, ...],
        last_command: int,
    ) -> Renewal:
        """Renew a lease.

        Raises:
            UnknownMember: register again.
        """
        now = self._clock.monotonic()
        with self.condition:
            record = self._registry.renew(member_id, registration, now=now)
            self._mailboxes.acknowledge(AgentId(member_id), last_command)
            for job_id, snapshot in clocks.items():
                host = self._hosts.get(job_id)
                if host is not None and host.machine.shards and host.machine.shards[0].id == member_id:
                    self._feed(host, ClocksTold(snapshot))
            ended = tuple(job_id for job_id in jobs if not self._may_have_processes(job_id, now=now))
        self._renew_in_store(record)
        return Renewal(self._registry.lease_seconds, ended)

    def leave(self, member_id: MemberId, registration: Registration) -> None:
        """End a membership; nothing happens when there is none with this registration."""
        with self.condition:
            try:
                info = self._registry.check(member_id, registration).info
            except UnknownMember:
                return
            self._registry.remove(member_id)
            self._mailboxes.close(AgentId(member_id))
            self._tell_gone(info, f"{info} left the cluster")
        _log.info("member_left", member=member_id)
        try:
            self._store.remove_member(member_id, registration)
        except StoreUnavailable as error:
            _log.warning("leave_not_kept", member=member_id, reason=str(error))

    def members(self) -> tuple[Member, ...]:
        """The live members in order of registration."""
        with self.condition:
            return self._registry.members(now=self._clock.monotonic())

    def expired_leases(self) -> Mapping[MemberRole, int]:
        """Leases that ran out, by role."""
        with self.condition:
            return dict(self._registry.expired)

    @property
    def lease_seconds(self) -> float:
        """How long a lease lasts after a heartbeat."""
        return self._registry.lease_seconds

    def members_of(self, role: MemberRole) -> list[MemberInfo]:
        """The live members of one role; shards in index order."""
        with self.condition:
            return self._registry.of_role(role)

    def commands(self, agent: AgentId, registration: Registration, *, after: int) -> tuple[NumberedCommand, ...]:
        """The agent's commands after number `after`.

        Raises:
            UnknownMember: register again.
        """
        with self.condition:
            self._registry.check(MemberId(agent), registration)
            return self._mailboxes.after(agent, after)

    def report(self, agent: AgentId, registration: Registration, batch: int, news: tuple[AgentNews, ...]) -> None:
        """Take in a batch of news, once.

        Raises:
            UnknownMember: register again.
        """
        with self.condition:
            self._registry.check(MemberId(agent), registration)
            if not self._mailboxes.take_batch(agent, batch):
                return
            for item in news:
                host = self._hosts.get(item.job_id)
                if host is not None:
                    self._feed(host, item)

    def certify_stage(self, agent: AgentId, registration: Registration, stage: StageKey, request_pem: bytes) -> bytes:
        """The certificate of a stage, made with the key of a request.

        Raises:
            UnknownMember: register again.
            PermissionDenied: no stage of that name is to run on that agent's node.
            ProtocolViolation: this coordinator certifies nobody, as it works without TLS.
            UserError: the request cannot be used.
        """
        if self._tools.certify is None:
            raise ProtocolViolation("this coordinator certifies no stages: it was started without --tls")
        with self.condition:
            self._registry.check(MemberId(agent), registration)
            host = self._hosts.get(stage.job_id)
            lives = () if host is None else host.machine.stages
            if not any(life.key == stage and life.agent == agent and not life.exited for life in lives):
                raise PermissionDenied(f"no {stage} is to run on agent {agent}")
        return self._tools.certify(request_pem, StagePeer(stage.job_id, stage.vw, stage.stage))

    # -- jobs ------------------------------------------------------------------------------------------------------

    def submit_job(self, submission: Submission) -> JobId:
        """Take a job; the same request id gives the same job.

        Raises:
            JobError: the job cannot be read.
            ProtocolViolation: the request id cannot name a job.
            ResourceExhausted: too many jobs wait or run.
            StoreUnavailable: new jobs wait for the store.
        """
        if not _REQUEST_ID.fullmatch(submission.request_id):
            raise ProtocolViolation(
                f"request id {submission.request_id!r:.80} must be 8 to 64 letters, digits or dashes"
            )
        job = job_from_json(submission.job_json)
        job_id = job_id_of(job.name, submission.request_id)
        self._check_room(job_id)
        record = JobRecord(
            job_id=job_id,
            name=job.name,
            state=JobState.SUBMITTED,
            run_dir=submission.run_dir,
            submitted_wall=self._clock.wall(),
        )
        kept = self._store.create_job(record)
        with self.condition:
            if job_id in self._hosts or kept.state is not JobState.SUBMITTED:
                return job_id
            now = self._clock.monotonic()
            machine = JobMachine(job_id, job, submission, patience=self._patience, now=now)
            self._hosts[job_id] = JobHost(machine, kept, self._executor_of(job_id))
            _log.info("job_submitted", job=job_id, run_dir=submission.run_dir)
            self._offer_cluster()
            self.condition.notify_all()
        return job_id

    def stop_job(self, job_id: JobId | None, mode: StopMode) -> JobState:
        """Ask a job to stop; where it stands now.

        Raises:
            UnknownJob: there is no such job.
        """
        with self.condition:
            host = self._host(job_id)
            if host is None:
                return self.record(job_id).state
            _log.info("job_stop_asked", job=host.job_id, mode=mode)
            self._feed(host, StopAsked(mode))
            return host.machine.state

    def host(self, job_id: JobId | None) -> JobHost | None:
        """A job of this coordinator's life, or the newest one; look at it under the `condition` only."""
        with self.condition:
            return self._host(job_id)

    def hosts(self) -> tuple[JobHost, ...]:
        """The jobs of this coordinator's life, oldest first; look at them under the `condition` only."""
        with self.condition:
            return tuple(self._hosts.values())

    def record(self, job_id: JobId | None) -> JobRecord:
        """What is kept of a job, or of the newest one.

        Raises:
            UnknownJob: there is no such job.
        """
        with self.condition:
            host = self._host(job_id)
            if host is not None:
                return host.record
        kept = self._store.job(job_id) if job_id is not None else next(reversed(self._store.jobs()), None)
        if kept is None:
            raise UnknownJob(f"job {job_id!r:.80} is not known here" if job_id else "no job was submitted yet")
        return kept

    def kept_events(self, job_id: JobId, *, after: int) -> tuple[NumberedEvent, ...]:
        """Events of a job of an earlier coordinator."""
        return self._store.events(job_id, after=after)

    # -- time ------------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Let the time take effect. Never raises."""
        with self.condition:
            now = self._clock.monotonic()
            if now - self._ticked > self._patience.longest_tick_seconds:
                # It was this process that did not listen.
                self._registry.renew_all(now=now)
            self._ticked = now
            for gone in self._registry.expire(now=now):
                self._mailboxes.close(AgentId(gone.info.id))
                silent = self._registry.lease_seconds
                _log.warning("lease_ran_out", member=gone.info.id, silent_seconds=silent)
                self._tell_gone(gone.info, f"{gone.info} stopped answering: no heartbeat for {silent:.1f} s")
            self._offer_cluster()
            for host in list(self._hosts.values()):
                self._feed(host, Tick())
            self._forget_old_jobs()

    def drain(self) -> None:
        """Stop every job at once. The caller goes on with `tick` until `is_idle`."""
        with self.condition:
            for host in list(self._hosts.values()):
                self._feed(host, StopAsked(StopMode.NOW))

    @property
    def is_idle(self) -> bool:
        """True when no job is left that has not ended with all its processes."""
        with self.condition:
            now = self._clock.monotonic()
            return all(host.machine.is_settled(now=now) for host in self._hosts.values())

    def close(self) -> None:
        """Wait for the jobs' threads and give up the store."""
        with self.condition:
            hosts = list(self._hosts.values())
        for host in hosts:
            host.executor.shutdown()
        self._store.close()

    # -- inside ----------------------------------------------------------------------------------------------------

    def _check_room(self, job_id: JobId) -> None:
        """Whether another job can be taken."""
        with self.condition:
            num_open = sum(host.machine.ended is None for host in self._hosts.values())
            if job_id not in self._hosts and num_open >= MAX_OPEN_JOBS:
                raise ResourceExhausted(f"{num_open} jobs wait or run, which is the limit; stop one or let one end")

    def _host(self, job_id: JobId | None) -> JobHost | None:
        return self._hosts.get(job_id) if job_id else next(reversed(self._hosts.values()), None)

    def _feed(self, host: JobHost, fact: Input) -> None:
        """Give a machine a fact and carry out what it says. Under the lock."""
        try:
            instructions = host.machine.handle(fact, now=self._clock.monotonic())
        except Exception:  # noqa: BLE001 - one job's bug must not stop the others
            _log.exception("job_machine_failed", job=host.job_id, fact=type(fact).__name__)
            return
        for instruction in instructions:
            self._carry_out(host, instruction)
        host.note_state()
        if host.wants_save():
            _submit(host, self._save)
        if instructions or isinstance(fact, ClocksTold):
            self.condition.notify_all()

    def _carry_out(self, host: JobHost, instruction: Instruction) -> None:
        match instruction:
            case SendCommand(agent=agent, command=command):
                self._mailboxes.post(agent, command)
            case Announce(event=event):
                host.announce(event)
                if isinstance(event, JobEnded):
                    _log.info("job_ended", job=host.job_id, state=event.state, sentence=event.sentence)
            case task:
                _submit(host, partial(self._run_task, task=task))

    def _run_task(self, host: JobHost, *, task: Task) -> None:
        machine = host.machine
        tasks = JobTasks(
            machine.job_id, machine.job, machine.submission, store=self._store, tools=self._tools, clock=self._clock
        )
        answer = tasks.run(task)
        if answer is not None:
            with self.condition:
                self._feed(host, answer)

    def _save(self, host: JobHost) -> None:
        with self.condition:
            record, events = host.unsaved()
        try:
            kept = save(self._store, record, events, host.job_id)
        except HetpipeError as error:
            _log.warning("job_not_kept_yet", job=host.job_id, reason=str(error))
            with self.condition:
                host.saved(None, 0)
            return
        with self.condition:
            host.saved(kept, len(events))

    def _offer_cluster(self) -> None:
        for host in self._hosts.values():
            if host.machine.state is JobState.SUBMITTED:
                self._feed(host, ClusterSeen(self._cluster()))

    def _cluster(self) -> ClusterView:
        """What is free now."""
        now = self._clock.monotonic()
        busy = {
            device.device
            for host in self._hosts.values()
            if not host.machine.is_settled(now=now)
            for agent in host.machine.agents
            for device in agent.devices
        }
        agents = [member.agent_info for member in self._registry.of_role(MemberRole.AGENT)]
        return ClusterView(
            agents=tuple(_without(agent, busy) for agent in agents),
            busy_devices=sum(device.device in busy for agent in agents for device in agent.devices),
            shards=tuple(self._registry.of_role(MemberRole.PARAMETER_SERVER)),
        )

    def _may_have_processes(self, job_id: JobId, *, now: float) -> bool:
        host = self._hosts.get(job_id)
        return host is not None and host.machine.may_have_processes(now=now)

    def _tell_gone(self, info: MemberInfo, sentence: str) -> None:
        for host in list(self._hosts.values()):
            self._feed(host, MemberGone(info.id, sentence))

    def _renew_in_store(self, record: MemberRecord) -> None:
        """Let the store know; a store that is away or has lost its memory evicts nobody."""
        lease = self._registry.lease_seconds
        try:
            try:
                self._store.renew_member(record.info.id, record.registration, lease_seconds=lease)
            except UnknownMember:
                self._store.put_member(record.info, record.registration, lease_seconds=lease)
        except HetpipeError as error:
            _log.warning("lease_not_kept", member=record.info.id, reason=str(error))

    def _forget_old_jobs(self) -> None:
        now = self._clock.monotonic()
        ended = [host for host in self._hosts.values() if host.machine.is_settled(now=now)]
        for host in ended[:-MAX_ENDED_JOBS]:
            host.executor.shutdown(wait=False)
            del self._hosts[host.job_id]

    def _fail_lost_jobs(self) -> None:
        for record in self._store.jobs():
            if record.state.is_terminal:
                continue
            last, newest = 0, None
            while page := self._store.events(record.job_id, after=last):
                last, newest = page[-1].sequence, page[-1].event
            if isinstance(newest, JobEnded):
                # Its coordinator has told the end, and was gone before it could keep it.
                save(self._store, record.at(newest.state, failure=newest.sentence), (), record.job_id)
                continue
            sentence = f"the coordinator was restarted while job {record.job_id} was {record.state}"
            ended = NumberedEvent(last + 1, JobEnded(JobState.FAILED, sentence, "JobFailed"))
            save(self._store, record.at(JobState.FAILED, failure=sentence), (ended,), record.job_id)
            _log.warning("job_lost", job=record.job_id, sentence=sentence)


def job_id_of(name: str, request_id: str) -> JobId:
    """The id of a job: its name, for people, and a digest of its request, so that a resend means the same job."""
    return JobId(f"{name}-{hashlib.sha256(request_id.encode()).hexdigest()[:_ID_CHARACTERS]}")


def _submit(host: JobHost, work: Callable[[JobHost], None]) -> None:
    """Run `work` on the job's thread; a coordinator that is closing starts nothing new."""
    try:
        host.executor.submit(work, host)
    except RuntimeError:
        _log.info("task_not_started", job=host.job_id)


def _without(agent: AgentInfo, busy: set[str]) -> AgentInfo:
    return replace(agent, devices=tuple(device for device in agent.devices if device.device not in busy))
