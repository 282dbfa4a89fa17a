"""The jobs that a coordinator leads, and the shell around the machine of each: facts in, instructions carried out.

One lock guards everything, and `Context.condition` is notified after every change. Nothing slow happens under the lock:
what takes time runs on the job's own thread and comes back as a fact.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from hetpipe.clock import Clock
from hetpipe.decide.lifecycle.exchange import Announce, ClocksTold, Input, Instruction, SendCommand, Task
from hetpipe.decide.lifecycle.job_machine import JobMachine
from hetpipe.decide.lifecycle.patience import Patience
from hetpipe.decide.lifecycle.registry import Mailboxes
from hetpipe.errors import HetpipeError, ResourceExhausted
from hetpipe.observe.log import bind_context, get_logger
from hetpipe.server.coordinator.job_host import JobHost, append_evaluations, save
from hetpipe.server.coordinator.tasks import JobTasks, Tools
from hetpipe.storage.store import JobRecord, Store
from hetpipe.values.events import JobEnded, NumberedEvent
from hetpipe.values.ids import JobId

_log = get_logger(__name__)

#: Ended jobs that stay in memory; the store has them longer.
MAX_ENDED_JOBS = 20

#: Jobs that have not ended: each has a thread, and a history of events.
MAX_OPEN_JOBS = 100

#: Of them, those that one operator has handed in to this coordinator.
MAX_OPEN_JOBS_OF_OWNER = 80

#: Jobs of which it is remembered that they have ended, so that who still does something for them hears of it.
_MAX_ENDED_IDS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What all parts of a coordinator share."""

    store: Store
    tools: Tools
    clock: Clock
    patience: Patience
    condition: threading.Condition
    """Guards all state of the coordinator; notified after every change."""


def thread_per_job(job_id: JobId) -> Executor:
    """The usual executor of a job: one thread."""
    return ThreadPoolExecutor(
        max_workers=1, thread_name_prefix=f"job-{job_id}", initializer=partial(bind_context, job=job_id)
    )


class JobHosts:
    """The jobs of one coordinator, oldest first. Every method is called under the lock."""

    def __init__(
        self,
        context: Context,
        mailboxes: Mailboxes,
        *,
        executor_of: Callable[[JobId], Executor],
        first_number: Callable[[], int],
    ) -> None:
        """Begin without any.

        Args:
            context: of the coordinator.
            mailboxes: of the agents.
            executor_of: makes the thread of a job.
            first_number: from which on this coordinator numbers events; every lead has numbers of its own.
        """
        self._context = context
        self._mailboxes = mailboxes
        self.executor_of = executor_of
        self.first_number = first_number
        #: By id, in order of submission.
        self._hosts: dict[JobId, JobHost] = {}
        #: Jobs that have ended and have no host, oldest first; with the end of those of which the store knows nothing.
        self._ended: dict[JobId, str] = {}

    def __contains__(self, job_id: JobId) -> bool:
        """Whether this coordinator leads it, or has led it to its end a moment ago."""
        return job_id in self._hosts

    def __iter__(self) -> Iterator[JobHost]:
        """Over those of this moment."""
        return iter(list(self._hosts.values()))

    def get(self, job_id: JobId) -> JobHost | None:
        """One of them."""
        return self._hosts.get(job_id)

    @property
    def newest(self) -> JobHost | None:
        """The one that was handed in last."""
        return next(reversed(self._hosts.values()), None)

    def lead(
        self,
        machine: JobMachine,
        record: JobRecord,
        *,
        events: Sequence[NumberedEvent] = (),
        executor: Executor | None = None,
    ) -> JobHost:
        """Lead a job from here on.

        Args:
            machine: what decides.
            record: as it is kept.
            events: those that are kept, told by earlier coordinators.
            executor: its thread, if it has one.
        """
        executor = executor or self.executor_of(machine.job_id)
        host = JobHost(machine, record, executor, events=events, first=self.first_number())
        self._hosts[machine.job_id] = host
        return host

    def sort(self) -> None:
        """Put them in order of submission, after one was found that is older than others."""
        self._hosts = dict(sorted(self._hosts.items(), key=lambda item: item[1].record.submitted_wall))

    def remove(self, job_id: JobId) -> None:
        """Lead it no more."""
        del self._hosts[job_id]

    def check_room(self, job_id: JobId, owner: str = "") -> None:
        """Whether another job of `owner` can be taken.

        Raises:
            ResourceExhausted: there are too many, of its or of all.
        """
        under_way = [host for host in self._hosts.values() if host.machine.ended is None]
        num_open, own = len(under_way), sum(host.owner == owner for host in under_way)
        if owner and job_id not in self._hosts and own >= MAX_OPEN_JOBS_OF_OWNER:
            raise ResourceExhausted(f"{own} jobs of {owner} wait or run, which is the limit; stop one or let one end")
        if job_id not in self._hosts and num_open >= MAX_OPEN_JOBS:
            raise ResourceExhausted(f"{num_open} jobs wait or run, which is the limit; stop one or let one end")

    def feed(self, host: JobHost, fact: Input) -> None:
        """Give a machine a fact and carry out what it says."""
        try:
            instructions = host.machine.handle(fact, now=self._context.clock.monotonic())
        except Exception:  # noqa: BLE001 - one job's bug must not stop the others
            _log.exception("job_machine_failed", job=host.job_id, fact=type(fact).__name__)
            return
        for instruction in instructions:
            self._carry_out(host, instruction)
        self._keep(host)
        if instructions or isinstance(fact, ClocksTold):
            self._context.condition.notify_all()

    def feed_all(self, fact: Input) -> None:
        """Give the same fact to every job."""
        for host in self:
            self.feed(host, fact)

    def post(self, commands: Sequence[SendCommand]) -> None:
        """Queue commands that are of no job."""
        for sent in commands:
            self._mailboxes.post(sent.agent, sent.command)
        if commands:
            self._context.condition.notify_all()

    def forget_old(self) -> None:
        """Keep no more than `MAX_ENDED_JOBS` of those that have ended."""
        now = self._context.clock.monotonic()
        settled = [host for host in self._hosts.values() if host.is_saved and host.machine.is_settled(now=now)]
        for host in settled[:-MAX_ENDED_JOBS]:
            host.executor.shutdown(wait=False)
            self.remove(host.job_id)
            self.note_end(host.job_id)

    def note_end(self, job_id: JobId, sentence: str = "") -> None:
        """It has ended, and has no host; `sentence` says why, if the store does not."""
        self._ended[job_id] = sentence
        while len(self._ended) > _MAX_ENDED_IDS:
            del self._ended[next(iter(self._ended))]

    def has_ended(self, job_id: JobId) -> bool:
        """Whether a job is known to have ended, and is not led any more."""
        return job_id in self._ended

    def end_of(self, job_id: JobId) -> str:
        """Why it has ended, if the store does not know."""
        return self._ended.get(job_id, "")

    def forget_end(self, job_id: JobId) -> None:
        """It was handed in once more as one that has begun."""
        self._ended.pop(job_id, None)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _keep(self, host: JobHost) -> None:
        """Let the store have what is new."""
        host.note_state()
        if host.wants_save():
            _submit(host, self._save)

    def _carry_out(self, host: JobHost, instruction: Instruction) -> None:
        match instruction:
            case SendCommand(agent=agent, command=command):
                self._mailboxes.post(agent, command)
            case Announce(event=event):
                host.announce(event)
                if isinstance(event, JobEnded):
                    # First of all, so that no successor takes the job for one that goes on.
                    self._keep(host)
                    _log.info("job_ended", job=host.job_id, state=event.state, sentence=event.sentence)
            case task:
                _submit(host, partial(self._run_task, task=task))

    def _run_task(self, host: JobHost, *, task: Task) -> None:
        """On the job's thread, without the lock."""
        machine = host.machine
        tasks = JobTasks(
            machine.job_id,
            machine.job,
            machine.submission,
            submitted_wall=host.record.submitted_wall,
            store=self._context.store,
            tools=self._context.tools,
            clock=self._context.clock,
        )
        answer = tasks.run(task)
        if answer is not None and machine is host.machine:
            with self._context.condition:
                self.feed(host, answer)

    def _save(self, host: JobHost) -> None:
        """On the job's thread, without the lock."""
        with self._context.condition:
            unsaved, run_dir = host.unsaved(), Path(host.machine.submission.first_run_dir)
        try:
            kept = save(self._context.store, unsaved)
        except HetpipeError as error:
            _log.warning("job_not_kept_yet", job=host.job_id, reason=str(error))
            with self._context.condition:
                host.saved(None, 0)
            return
        # After the store, which may have to be asked again: so each line is written once.
        append_evaluations(run_dir, (numbered.event for numbered in unsaved.events), self._context.clock)
        with self._context.condition:
            host.saved(kept, len(unsaved.events))


def _submit(host: JobHost, work: Callable[[JobHost], None]) -> None:
    """Run `work` on the job's thread; a coordinator that is closing starts nothing new."""
    try:
        host.executor.submit(work, host)
    except RuntimeError:
        _log.info("task_not_started", job=host.job_id)
