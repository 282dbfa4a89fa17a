"""Jobs in progress when a coordinator starts: restarted, adopted, rewound, or ended.

A job that had not begun to train is restarted from its submission. For one that trains, the clock shard is queried on a
thread as soon as it reports the job; `JobMachine.adopted` then continues as if it had led the job from its beginning.
If the clock shard has lost the job, or no member reports it in time, `JobMachine.going_back` prepares the submission
again, from the newest checkpoint in the run's folder.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace

from hetpipe.decide.lifecycle.exchange import MemberRegistered, Tick
from hetpipe.decide.lifecycle.job_machine import ENDS_AT_CHECKPOINT, JobMachine
from hetpipe.decide.lifecycle.orphans import Orphan, Orphans
from hetpipe.decide.lifecycle.registry import Registry
from hetpipe.decide.lifecycle.root_cause import Failure, Rank
from hetpipe.errors import HetpipeError, JobError, JobFailed, PermissionDenied, StateLost, Unavailable
from hetpipe.job.as_json import job_from_json
from hetpipe.observe.log import get_logger
from hetpipe.server.coordinator.control_numbers import Terms
from hetpipe.server.coordinator.device_claims import DeviceClaims
from hetpipe.server.coordinator.job_hosts import Context, JobHost, JobHosts, UnsavedState, discard_model, save
from hetpipe.storage.store import JobRecord, Repairs, all_events
from hetpipe.values.commands import AgentReport
from hetpipe.values.events import JobEnded, JobState, NumberedEvent, StateChanged, StopMode
from hetpipe.values.ids import AgentId, JobId
from hetpipe.values.members import MemberId, MemberInfo, MemberRole
from hetpipe.values.run import ClockSnapshot
from hetpipe.values.run_document import RunDescription
from hetpipe.wire.calls import DESCRIBE_RUN, DescribeRunRequest

_log = get_logger(__name__)

#: States in which nothing is lost when a job is begun again.
_BEFORE_TRAINING = frozenset({JobState.SUBMITTED, JobState.PENDING, JobState.INSPECTING, JobState.PLANNING})

#: The fix for a job without any remaining state.
_FORGOTTEN = (
    "the store has nothing of it, either, so its submission is lost: resume from its newest checkpoint with "
    "`hetpipe submit --resume RUN_DIR --coordinator HOST:PORT`"
)

_ID_CHARACTERS = 12

_BEGUN_AGAIN = "a new coordinator begins the job again, which had not begun to train"


class Adoption:
    """Jobs that a coordinator may adopt. Every method is called under the lock, unless stated otherwise."""

    def __init__(
        self,
        context: Context,
        jobs: JobHosts,
        claims: DeviceClaims,
        registry: Registry,
        orphans: Orphans,
        terms: Terms,
    ) -> None:
        """Begin with what the store remembers, once it is whole.

        Raises:
            StoreUnavailable: it cannot be reached.
        """
        self._context = context
        self._jobs = jobs
        self._claims = claims
        self._registry = registry
        #: Orphans. One of them may have a host as well, which waits for more reports.
        self._orphans = orphans
        self._terms = terms
        #: Jobs that wait to be prepared, and whose clock shard does not let this coordinator lead them.
        self._refused: dict[JobId, None] = {}
        #: Their threads, as long as they have no host.
        self._askers: dict[JobId, Executor] = {}
        self._remember_jobs()

    @property
    def executors(self) -> tuple[Executor, ...]:
        """Threads of orphans."""
        return tuple(self._askers.values())

    def _remember_jobs(self) -> None:
        """Load the jobs from the store, once it is intact.

        Raises:
            StoreUnavailable: it cannot be reached.
        """
        _log_repairs(self._context.store.repair())
        for record in self._context.store.jobs():
            if record.state.is_terminal:
                discard_model(self._context.tools, record)
                self._jobs.note_end(record.job_id)
                continue
            events = all_events(self._context.store, record.job_id)
            newest = events[-1].event if events else None
            if isinstance(newest, JobEnded):
                # Its coordinator announced the end, and died before it could store it.
                ended = record.at(newest.state, failure=newest.sentence)
                save(self._context.store, UnsavedState(ended, is_record=True, events=()))
                discard_model(self._context.tools, ended)
                self._jobs.note_end(record.job_id)
            elif record.state in _BEFORE_TRAINING and not _has_trained(record, events):
                self._begin_again(record, events)
            else:
                self.discover(record.job_id, record)

    def discover(
        self,
        job_id: JobId,
        record: JobRecord | None = None,
        *,
        reporter: MemberId | None = None,
        from_clock_shard: bool = False,
    ) -> Orphan | None:
        """Register a job from the store (`record`) or from a member's report. Returns its orphan, if it is one now.

        For a job about to be rewound, only its late clock shard may still report more.
        """
        host = self._jobs.get(job_id)
        if self._jobs.has_ended(job_id) or (host is not None and not host.machine.state.is_queued):
            return None
        if host is not None and host.machine.goes_back and not from_clock_shard:
            return None
        orphan = self._orphans.discover(job_id, now=self._context.clock.monotonic(), reporter=reporter)
        if orphan is not None:
            orphan.record = orphan.record or record
        return orphan

    def on_clock_report(self, shard: MemberInfo, job_id: JobId, clocks: ClockSnapshot) -> None:
        """Handle a shard's clocks of a job that this coordinator does not lead."""
        if job_id not in self._refused and self.discover(job_id, reporter=shard.id, from_clock_shard=True) is not None:
            self._orphans.on_clock_report(job_id, shard, clocks.term, now=self._context.clock.monotonic())

    def on_shard_report(
        self, shard: MemberInfo, clocks: Mapping[JobId, ClockSnapshot], lost: Mapping[JobId, str]
    ) -> None:
        """Handle a parameter server's heartbeat: jobs whose clock shard it is, and jobs it has lost."""
        for orphan in self._orphans:
            if self._clock_shard_of(orphan) == shard.id:
                job_id = orphan.job_id
                self._orphans.on_shard_report(job_id, shard, serves=job_id in clocks, reason=lost.get(job_id, ""))

    def _clock_shard_of(self, orphan: Orphan) -> MemberId | None:
        """The parameter server with a job's clock shard, if known for certain.

        The store has its name. If only the submission is left, it is the first of the job's parameter servers, provided
        that no other choice was possible.
        """
        record = orphan.record
        if record is None:
            return None
        if record.shards:
            return record.shards[0]
        shards = self._registry.of_role(MemberRole.PARAMETER_SERVER)
        wanted = _num_shards(record)
        return shards[0].id if wanted and [shard.shard_index for shard in shards] == list(range(wanted)) else None

    def keep_report(self, agent: AgentId, report: AgentReport) -> bool:
        """Store an agent's reports of an orphan; False if the job is led, and its leader gets the report.

        Whether the agent may report it is checked at adoption.
        """
        orphan = self.discover(report.job_id) if report.job_id in self._orphans else None
        if orphan is None:
            return False
        orphan.reports[agent].append(report)
        return True

    def request_stop(self, job_id: JobId, mode: StopMode) -> None:
        """Request a stop; it takes effect once the job is led, or ends it if it cannot be."""
        orphan = self._orphans.get(job_id)
        if orphan is not None:
            orphan.stop = mode

    def tick(self) -> None:
        """Query the clock shards of orphans, and end those past their deadline."""
        now = self._context.clock.monotonic()
        for orphan in self._orphans.given_up(now=now):
            if orphan.job_id in self._jobs:
                # It was resubmitted or is rewound, and no member has more of it.
                self._orphans.pop(orphan.job_id)
                if orphan.refusal:
                    self._refused[orphan.job_id] = None
            else:
                self._start(orphan, self._give_up)
        for orphan in self._orphans.due(now=now):
            self._start(orphan, self._ask)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _start(self, orphan: Orphan, work: Callable[[Orphan, Executor], None]) -> None:
        host = self._jobs.get(orphan.job_id)
        executor = self._askers.get(orphan.job_id) if host is None else host.executor
        if executor is None:
            executor = self._askers[orphan.job_id] = self._jobs.executor_of(orphan.job_id)
        try:
            executor.submit(work, orphan, executor)
        except RuntimeError:
            _log.info("task_not_started", job=orphan.job_id)

    def _begin_again(self, record: JobRecord, events: tuple[NumberedEvent, ...]) -> None:
        """Restart a job that had not begun to train. If it had, its clock shard will report it."""
        assert record.submission is not None
        try:
            job = job_from_json(record.submission.job_json)
        except JobError as error:
            self._end(record, events, JobEnded(JobState.FAILED, str(error), JobFailed.__name__))
            return
        now = self._context.clock.monotonic()
        machine = JobMachine(record.job_id, job, record.submission, patience=self._context.patience, now=now)
        host = self._jobs.lead(machine, record, events=events)
        machine.recall(events)
        host.announce(StateChanged(JobState.SUBMITTED, _BEGUN_AGAIN))
        host.note_state()
        _log.info("job_begun_again", job=record.job_id)

    def _ask(self, orphan: Orphan, executor: Executor) -> None:
        """Query the clock shard for the run, and lead the job. Called without the lock."""
        clock_shard = orphan.clock_shard
        assert clock_shard is not None
        try:
            description = self._described(orphan.job_id, clock_shard)
            self._terms.check_description(description, clock_shard)
            record = self._context.store.create_job(_record_of(description, now_wall=self._context.clock.wall()))
            events = all_events(self._context.store, orphan.job_id)
            with self._context.condition:
                self._adopt(orphan, description, record, events, executor)
        except Exception as error:  # noqa: BLE001 - after any error the job must not be forgotten
            is_known = isinstance(error, HetpipeError)
            _log.warning("job_not_adopted", job=orphan.job_id, reason=str(error), exc_info=None if is_known else error)
            with self._context.condition:
                if isinstance(error, PermissionDenied):
                    self._orphans.refuse(orphan, clock_shard)
                is_passing = isinstance(error, Unavailable)
                now = self._context.clock.monotonic()
                self._orphans.not_adopted(orphan, str(error), is_passing=is_passing, now=now)

    def _described(self, job_id: JobId, clock_shard: MemberInfo) -> RunDescription:
        """The clock shard's description of a job.

        Raises:
            PermissionDenied: that parameter server may not report it.
        """
        port = self._context.tools.open_shard(clock_shard)
        try:
            description = port.invoke(DESCRIBE_RUN, DescribeRunRequest(job_id))
        finally:
            port.close()
        _check_sender(job_id, clock_shard, description)
        return description

    def _adopt(
        self,
        orphan: Orphan,
        description: RunDescription,
        record: JobRecord,
        events: tuple[NumberedEvent, ...],
        executor: Executor,
    ) -> None:
        """Lead a job.

        Raises:
            JobError: the state of its clock shard cannot be read.
        """
        if record.state.is_terminal:
            self._lead_no_more(orphan)
            return
        now = self._context.clock.monotonic()
        host = self._jobs.get(orphan.job_id)
        stop = orphan.stop or (record if host is None else host.record).stop
        machine = JobMachine.adopted(description, stop=stop, patience=self._context.patience, now=now)
        if host is None:
            host = self._jobs.lead(machine, record, events=events, executor=executor)
            self._jobs.sort()
        machine.recall(host.events)
        host.machine = machine
        _log.warning("job_adopted", job=orphan.job_id, state=machine.state, term=description.term)
        self._led(orphan, host)

    def _led(self, orphan: Orphan, host: JobHost) -> None:
        """Pass current members and pending reports to a newly led job."""
        self._orphans.pop(orphan.job_id)
        self._askers.pop(orphan.job_id, None)
        for member in self._registry.members(now=self._context.clock.monotonic()):
            self._jobs.feed(host, MemberRegistered(member.info))
        for agent, reports in orphan.reports.items():
            for report in reports:
                if host.machine.may_report(agent, report):
                    self._jobs.feed(host, report)
        self._jobs.feed(host, Tick())
        self._claims.offer()
        self._context.condition.notify_all()

    def _give_up(self, orphan: Orphan, executor: Executor) -> None:
        """Handle the loss of a job's clocks: rewind to the newest checkpoint, or end it. Called without the lock."""
        try:
            # By its id, whatever else the store has lost of it; and as it is now.
            record = self._context.store.job(orphan.job_id) or orphan.record
            if record is not None and not record.state.is_terminal:
                events = all_events(self._context.store, orphan.job_id)
                ended = _end_of(orphan, record)
                if ended is None:
                    self._go_back(orphan, record, events, executor)
                    return
                self._end(record, events, ended)
        except HetpipeError as error:
            _log.warning("job_not_kept_yet", job=orphan.job_id, reason=str(error))
            with self._context.condition:
                self._orphans.not_adopted(orphan, str(error), is_passing=True, now=self._context.clock.monotonic())
            return
        loss = "" if record is not None else f"{orphan.why_given_up}; {_FORGOTTEN}"
        with self._context.condition:
            self._lead_no_more(orphan, loss)
        _log.warning("job_lost", job=orphan.job_id, sentence=loss or orphan.why_given_up)

    def _go_back(
        self, orphan: Orphan, record: JobRecord, events: tuple[NumberedEvent, ...], executor: Executor
    ) -> None:
        """Lead a job from its newest checkpoint. Called without the lock.

        Raises:
            StoreUnavailable: the submission cannot be read, and that could not be recorded.
        """
        submission = record.submission
        assert submission is not None
        try:
            job = job_from_json(submission.job_json)
        except JobError as error:
            self._end(record, events, JobEnded(JobState.FAILED, str(error), JobError.__name__))
            with self._context.condition:
                self._lead_no_more(orphan)
            return
        with self._context.condition:
            now = self._context.clock.monotonic()
            cause = Failure(Rank.GONE, StateLost.__name__, orphan.why_given_up, now)
            machine = JobMachine.going_back(
                orphan.job_id, job, submission, cause=cause, patience=self._context.patience, now=now
            )
            kept = replace(record, submission=replace(submission, has_begun=True))
            host = self._jobs.lead(machine, kept, events=events, executor=executor)
            self._jobs.sort()
            machine.recall(host.events)
            _log.warning("job_goes_back", job=orphan.job_id, sentence=cause.sentence)
            self._led(orphan, host)

    def _lead_no_more(self, orphan: Orphan, sentence: str = "") -> None:
        """Stop leading a job and record its end, with the reason if the store has none."""
        self._orphans.pop(orphan.job_id)
        self._jobs.note_end(orphan.job_id, sentence)
        asker = self._askers.pop(orphan.job_id, None)
        if asker is not None:
            asker.shutdown(wait=False)
        self._context.condition.notify_all()

    def _end(self, record: JobRecord, events: tuple[NumberedEvent, ...], ended: JobEnded) -> None:
        """Record the end of a job.

        Raises:
            StoreUnavailable: try again later.
        """
        number = max(self._jobs.first_number(), events[-1].sequence + 1 if events else 1)
        kept = record.at(ended.state, failure=ended.sentence)
        save(self._context.store, UnsavedState(kept, is_record=True, events=(NumberedEvent(number, ended),)))
        discard_model(self._context.tools, kept)


def _end_of(orphan: Orphan, record: JobRecord) -> JobEnded | None:
    """Reason to end a job with lost clocks; None if it is rewound to its newest checkpoint."""
    stop = orphan.stop or record.stop
    if stop is StopMode.NOW:
        return JobEnded(JobState.STOPPED)
    if not orphan.refusal:
        if stop is not None or record.state is JobState.STOPPING:
            return JobEnded(JobState.STOPPED, f"{orphan.why_given_up}; {ENDS_AT_CHECKPOINT}")
        if record.submission is not None:
            return None
    return JobEnded(JobState.FAILED, orphan.why_given_up, JobFailed.__name__)


def _num_shards(record: JobRecord) -> int:
    """Number of parameter servers of the job; 0 if unknown."""
    if record.submission is None:
        return 0
    try:
        return job_from_json(record.submission.job_json).parameter_servers.count
    except JobError:
        return 0


def _log_repairs(repairs: Repairs) -> None:
    """Log data losses of the store for the operator."""
    if repairs.jobs or repairs.members:
        _log.error(
            "store_reindexed",
            jobs=repairs.jobs,
            members=repairs.members,
            cause="the store has lost the index of these records: Redis was started with an ACL that lets the default "
            "user run nothing, or its append-only file was damaged",
            fix="rewrite its ACL with `hetpipe render redis-acl`",
        )
    if repairs.dropped_jobs:
        _log.warning("jobs_dropped", jobs=repairs.dropped_jobs, cause="their time was over, or the store has lost them")
    for job_id in repairs.renumbered:
        _log.error("events_renumbered", job=job_id, cause="their numbers were impossible")
    for job_id in repairs.lost_jobs:
        _log.error("job_record_lost", job=job_id, fix="submit it again, unless a parameter server still reports it")
    for key in repairs.unreadable:
        _log.error("record_unreadable", key=key, fix="inspect it in Redis; it is not a job or member of this version")


def job_id_of(name: str, request_id: str) -> JobId:
    """Job id: its name, for readability, and a digest of the request, so that retries map to the same job."""
    return JobId(f"{name}-{hashlib.sha256(request_id.encode()).hexdigest()[:_ID_CHARACTERS]}")


def _check_sender(job_id: JobId, shard: MemberInfo, description: RunDescription) -> None:
    """Reject reports of an orphan that are not from its clock shard.

    The id of a job is derived from its request, which only its clock shard gets from the coordinator.

    Raises:
        PermissionDenied: the report is of another job, or on other parameter servers.
    """
    run = description.run
    if run.plan.job_id != job_id or job_id_of(str(run.job.get("name", "")), run.submission.request_id) != job_id:
        raise PermissionDenied(f"{shard} reports for job {job_id} the run of another job")
    if not run.shards or run.shards[0].id != shard.id:
        raise PermissionDenied(f"{shard} reports job {job_id}, of which it is not the clock shard")


def _record_of(description: RunDescription, *, now_wall: float) -> JobRecord:
    """Record of a job missing in the store; its submission time is now, so that it does not stay the newest."""
    run = description.run
    return JobRecord(
        job_id=run.plan.job_id,
        name=str(run.job.get("name", "")),
        state=JobState.STARTING,
        run_dir=run.submission.first_run_dir,
        submitted_wall=min(run.submitted_wall, now_wall),
        submission=run.submission,
        shards=tuple(shard.id for shard in run.shards),
    )


def _has_trained(record: JobRecord, events: Sequence[NumberedEvent]) -> bool:
    """Whether the job has trained before, or may have; it is then being rewound to a checkpoint."""
    if record.submission is None or record.submission.has_begun:
        return True
    return any(
        isinstance(numbered.event, StateChanged) and numbered.event.state is JobState.STARTING for numbered in events
    )
