"""Jobs that are under way when a coordinator begins: taken up again, adopted, or given up.

A job that had not begun to train is begun again from what was handed in. Of one that trains, the clock shard is asked
as soon as it tells of it, on a thread; `JobMachine.adopted` then goes on as if it had led the job from its beginning.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor

from hetpipe.coordinator.exchange import ClocksTold, MemberSeen, Tick
from hetpipe.coordinator.job_host import JobHost, Unsaved, save
from hetpipe.coordinator.job_hosts import JobHosts
from hetpipe.coordinator.job_machine import JobMachine
from hetpipe.coordinator.orphans import Orphan
from hetpipe.coordinator.store import JobRecord, Repairs, all_events
from hetpipe.errors import HetpipeError, JobError, JobFailed, Unavailable
from hetpipe.observe.log import get_logger
from hetpipe.spec.commands import AgentNews
from hetpipe.spec.events import JobEnded, JobState, NumberedEvent, StateChanged
from hetpipe.spec.ids import JobId
from hetpipe.spec.job_json import job_from_json
from hetpipe.spec.members import MemberInfo
from hetpipe.spec.run import ClockSnapshot
from hetpipe.spec.run_document import RunDescription

_log = get_logger(__name__)

#: States in which nothing is lost when a job is begun again.
_BEFORE_TRAINING = frozenset({JobState.SUBMITTED, JobState.INSPECTING, JobState.PLANNING})

_BEGUN_AGAIN = "a new coordinator begins the job again, which had not begun to train"


class Adopting(JobHosts):
    """The jobs of one coordinator, and those that it may come to lead."""

    def is_orphan(self, job_id: JobId) -> bool:
        """Whether a job is under way that nobody leads, and somebody may tell more of it."""
        with self.condition:
            return job_id in self._orphans and job_id not in self._hosts

    # -- for subclasses ----------------------------------------------------------------------------------------------

    def _remember_jobs(self) -> None:
        """Begin with what the store remembers, once it is whole.

        Raises:
            StoreUnavailable: it cannot be reached.
        """
        _tell(self._store.repair())
        for record in self._store.jobs():
            if record.state.is_terminal:
                self._has_ended(record.job_id)
                continue
            events = all_events(self._store, record.job_id)
            newest = events[-1].event if events else None
            if isinstance(newest, JobEnded):
                # Its coordinator has told the end, and was gone before it could keep it.
                ended = record.at(newest.state, failure=newest.sentence)
                save(self._store, Unsaved(ended, is_record=True, events=()))
                self._has_ended(record.job_id)
            elif record.state in _BEFORE_TRAINING and record.submission is not None and not _has_trained(events):
                self._begin_again(record, events)
            else:
                self._hear_of(record.job_id, record)

    def _hear_of(self, job_id: JobId, record: JobRecord | None = None) -> Orphan | None:
        """Somebody tells of a job. An orphan if it is one now; under the lock."""
        host = self._hosts.get(job_id)
        if job_id in self._ended or (host is not None and host.machine.state is not JobState.SUBMITTED):
            return None
        orphan = self._orphans.hear_of(job_id, now=self._clock.monotonic())
        if orphan is not None:
            orphan.record = orphan.record or record
        return orphan

    def _may_have_processes(self, job_id: JobId) -> bool:
        """Whether members may still do something for a job that they tell of; under the lock."""
        host = self._hosts.get(job_id)
        if host is not None:
            return host.machine.may_have_processes(now=self._clock.monotonic())
        self._hear_of(job_id)
        return job_id not in self._ended

    def _clock_told(self, shard: MemberInfo, job_id: JobId, clocks: ClockSnapshot) -> None:
        """A shard tells the clocks of a job; under the lock."""
        host = self._hosts.get(job_id)
        if host is not None and host.machine.shards and host.machine.shards[0].id == shard.id:
            self._feed(host, ClocksTold(clocks))
        elif self._hear_of(job_id) is not None:
            self._orphans.clock_told(job_id, shard, clocks.term, now=self._clock.monotonic())

    def _news_told(self, news: AgentNews) -> None:
        """An agent tells of a job; under the lock."""
        orphan = self._hear_of(news.job_id) if news.job_id in self._orphans else None
        host = self._hosts.get(news.job_id)
        if orphan is not None:
            orphan.news.append(news)
        elif host is not None:
            self._feed(host, news)

    def _look_after_orphans(self) -> None:
        """Ask whoever is to be asked, give up whoever is; under the lock."""
        now = self._clock.monotonic()
        for orphan in self._orphans.given_up(now=now):
            if orphan.job_id in self._hosts:
                # It was handed in again, and nobody knows more of it.
                self._orphans.pop(orphan.job_id)
            else:
                self._start(orphan, self._give_up)
        for orphan in self._orphans.due(now=now):
            self._start(orphan, self._ask)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _start(self, orphan: Orphan, work: Callable[[Orphan, Executor], None]) -> None:
        host = self._hosts.get(orphan.job_id)
        executor = self._askers.get(orphan.job_id) if host is None else host.executor
        if executor is None:
            executor = self._askers[orphan.job_id] = self._executor_of(orphan.job_id)
        try:
            executor.submit(work, orphan, executor)
        except RuntimeError:
            _log.info("task_not_started", job=orphan.job_id)

    def _begin_again(self, record: JobRecord, events: tuple[NumberedEvent, ...]) -> None:
        """Begin a job again that had not begun to train. Should it have, its clock shard will tell."""
        assert record.submission is not None
        try:
            job = job_from_json(record.submission.job_json)
        except JobError as error:
            self._fail(record, events, str(error))
            return
        now = self._clock.monotonic()
        machine = JobMachine(record.job_id, job, record.submission, patience=self._patience, now=now)
        host = JobHost(machine, record, self._executor_of(record.job_id), events=events, first=self._first_number())
        self._hosts[record.job_id] = host
        host.announce(StateChanged(JobState.SUBMITTED, _BEGUN_AGAIN))
        host.note_state()
        _log.info("job_begun_again", job=record.job_id)

    def _ask(self, orphan: Orphan, executor: Executor) -> None:
        """Ask the clock shard what has become of the job, and lead it. Not under the lock."""
        assert orphan.clock_shard is not None
        try:
            description = self._described(orphan.job_id, orphan.clock_shard)
            self._terms.check_description(description, orphan.clock_shard)
            record = self._store.create_job(_record_of(description, now_wall=self._clock.wall()))
            events = all_events(self._store, orphan.job_id)
            with self.condition:
                self._adopt(orphan, description, record, events, executor)
        except Exception as error:  # noqa: BLE001 - whatever it is, the job must not be forgotten
            is_known = isinstance(error, HetpipeError)
            _log.warning("job_not_adopted", job=orphan.job_id, reason=str(error), exc_info=None if is_known else error)
            with self.condition:
                is_passing = isinstance(error, Unavailable)
                now = self._clock.monotonic()
                self._orphans.not_adopted(orphan, str(error), is_passing=is_passing, now=now)

    def _described(self, job_id: JobId, clock_shard: MemberInfo) -> RunDescription:
        port = self._tools.open_shard(clock_shard.address)
        try:
            return port.describe(job_id)
        finally:
            port.close()

    def _adopt(
        self,
        orphan: Orphan,
        description: RunDescription,
        record: JobRecord,
        events: tuple[NumberedEvent, ...],
        executor: Executor,
    ) -> None:
        """Lead a job; under the lock.

        Raises:
            JobError: what its clock shard has kept cannot be read.
        """
        if record.state.is_terminal:
            self._lead_no_more(orphan)
            return
        now = self._clock.monotonic()
        host = self._hosts.get(orphan.job_id)
        stop = orphan.stop or (record if host is None else host.record).stop
        machine = JobMachine.adopted(description, stop=stop, patience=self._patience, now=now)
        if host is None:
            host = JobHost(machine, record, executor, events=events, first=self._first_number())
            self._hosts[orphan.job_id] = host
            self._hosts = dict(sorted(self._hosts.items(), key=lambda item: item[1].record.submitted_wall))
        host.machine = machine
        self._orphans.pop(orphan.job_id)
        self._askers.pop(orphan.job_id, None)
        _log.warning("job_adopted", job=orphan.job_id, state=machine.state, term=description.term)
        for member in self._registry.members(now=now):
            self._feed(host, MemberSeen(member.info))
        for news in orphan.news:
            self._feed(host, news)
        self._feed(host, Tick())
        self._offer_cluster()
        self.condition.notify_all()

    def _give_up(self, orphan: Orphan, _: Executor) -> None:
        """Nobody can lead the job any more. Not under the lock."""
        sentence = orphan.why_given_up
        try:
            if orphan.record is not None:
                self._fail(orphan.record, all_events(self._store, orphan.job_id), sentence)
        except HetpipeError as error:
            _log.warning("job_not_kept_yet", job=orphan.job_id, reason=str(error))
            with self.condition:
                self._orphans.not_adopted(orphan, str(error), is_passing=True, now=self._clock.monotonic())
            return
        with self.condition:
            self._lead_no_more(orphan)
        _log.warning("job_lost", job=orphan.job_id, sentence=sentence)

    def _lead_no_more(self, orphan: Orphan) -> None:
        """It has ended; under the lock."""
        self._orphans.pop(orphan.job_id)
        self._has_ended(orphan.job_id)
        asker = self._askers.pop(orphan.job_id, None)
        if asker is not None:
            asker.shutdown(wait=False)
        self.condition.notify_all()

    def _fail(self, record: JobRecord, events: tuple[NumberedEvent, ...], sentence: str) -> None:
        """Write down that a job has failed.

        Raises:
            StoreUnavailable: try again later.
        """
        number = max(self._first_number(), events[-1].sequence + 1 if events else 1)
        ended = NumberedEvent(number, JobEnded(JobState.FAILED, sentence, JobFailed.__name__))
        failed = record.at(JobState.FAILED, failure=sentence)
        save(self._store, Unsaved(failed, is_record=True, events=(ended,)))


def _tell(repairs: Repairs) -> None:
    """Write down what the store had lost, so that somebody looks for the cause."""
    if repairs.jobs or repairs.members:
        _log.error(
            "store_reindexed",
            jobs=repairs.jobs,
            members=repairs.members,
            cause="the store has lost the index of these records: Redis was started with an ACL that lets the default "
            "user run nothing, or its append-only file was damaged",
            fix="write its ACL anew with `hetpipe render redis-acl`",
        )
    if repairs.dropped_jobs:
        _log.warning("jobs_dropped", jobs=repairs.dropped_jobs, cause="their time was over, or the store has lost them")
    for job_id in repairs.renumbered:
        _log.error("events_renumbered", job=job_id, cause="they had numbers that nobody counts to")
    for job_id in repairs.lost_jobs:
        _log.error("job_record_lost", job=job_id, fix="unless a parameter server still tells of it, hand it in again")
    for key in repairs.unreadable:
        _log.error("record_unreadable", key=key, fix="look at it in Redis; it is no job or member of this version")


def _record_of(description: RunDescription, *, now_wall: float) -> JobRecord:
    """A job of which the store knows nothing; none was handed in later than now, and so is the newest for ever."""
    run = description.run
    return JobRecord(
        job_id=run.plan.job_id,
        name=str(run.job.get("name", "")),
        state=JobState.STARTING,
        run_dir=run.submission.first_run_dir,
        submitted_wall=min(run.submitted_wall, now_wall),
        submission=run.submission,
    )


def _has_trained(events: Sequence[NumberedEvent]) -> bool:
    """Whether the job has got further before: then it is on its way back to a checkpoint."""
    told = (numbered.event for numbered in events)
    return any(isinstance(event, StateChanged) and event.state is JobState.STARTING for event in told)
