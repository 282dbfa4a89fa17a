"""The jobs of a coordinator, and the shell around the machine of each: facts in, instructions carried out.

One lock guards everything, and `condition` is notified after every change. Nothing slow happens under the lock: what
takes time runs on the job's own thread and comes back as a fact.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Container, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

from hetpipe.clock import Clock
from hetpipe.decide.lifecycle.exchange import (
    Announce,
    ClocksTold,
    ClusterSeen,
    Input,
    Instruction,
    MemberGone,
    SendCommand,
    Task,
)
from hetpipe.decide.lifecycle.job_queue import ClusterView, turns, untold
from hetpipe.decide.lifecycle.link_survey import ClusterLinks
from hetpipe.decide.lifecycle.mailboxes import Mailboxes
from hetpipe.decide.lifecycle.orphans import Orphans
from hetpipe.decide.lifecycle.patience import Patience
from hetpipe.decide.lifecycle.registry import Registry
from hetpipe.errors import HetpipeError, ResourceExhausted, Unavailable
from hetpipe.observe.log import bind_context, get_logger
from hetpipe.server.coordinator.evaluation_log import append_evaluations
from hetpipe.server.coordinator.fences import Election, Fences
from hetpipe.server.coordinator.job_host import JobHost, save
from hetpipe.server.coordinator.tasks import JobTasks, Tools
from hetpipe.server.coordinator.terms import Terms
from hetpipe.storage.store import Store
from hetpipe.values.counters import EVENTS_PER_LEAD
from hetpipe.values.events import JobEnded
from hetpipe.values.ids import JobId
from hetpipe.values.link_measurement import still_valid
from hetpipe.values.members import MemberInfo, MemberRole
from hetpipe.values.run import AgentInfo

_log = get_logger(__name__)

#: Ended jobs that stay in memory; the store has them longer.
MAX_ENDED_JOBS = 20

#: Jobs that have not ended: each has a thread, and a history of events.
MAX_OPEN_JOBS = 100

#: Of them, those that one operator has handed in to this coordinator.
MAX_OPEN_JOBS_OF_OWNER = 80

#: Jobs of which it is remembered that they have ended, so that who still does something for them hears of it.
_MAX_ENDED_IDS = 10_000


def thread_per_job(job_id: JobId) -> Executor:
    """The usual executor of a job: one thread."""
    return ThreadPoolExecutor(
        max_workers=1, thread_name_prefix=f"job-{job_id}", initializer=partial(bind_context, job=job_id)
    )


class JobHosts:
    """The jobs of one coordinator. What is guarded by the lock is used by subclasses, too."""

    def __init__(
        self,
        store: Store,
        tools: Tools,
        *,
        clock: Clock,
        patience: Patience,
        lease_seconds: float,
        executor_of: Callable[[JobId], Executor],
        election: Election,
    ) -> None:
        self._store = store
        self._tools = tools
        self._clock = clock
        self._patience = patience
        self._executor_of = executor_of
        #: When this coordinator began to lead, in monotonic seconds.
        self._began = clock.monotonic()
        #: Guards everything below; notified after every change.
        self.condition = threading.Condition()
        self._registry = Registry(lease_seconds)
        #: Locks itself; the store may be asked under it.
        self._fences = Fences(election)
        #: The same.
        self._terms = Terms(store)
        self._mailboxes = Mailboxes()
        #: What operators have measured.
        self._cluster_links = ClusterLinks()
        #: By id, in order of submission.
        self._hosts: dict[JobId, JobHost] = {}
        #: Jobs under way that nobody leads. One of them may have a host as well, which waits to be told more.
        self._orphans = Orphans(patience, now=clock.monotonic())
        #: Jobs that wait to be prepared, and whose clock shard does not let this coordinator lead them.
        self._refused: dict[JobId, None] = {}
        #: Their threads, as long as they have no host.
        self._askers: dict[JobId, Executor] = {}
        #: Jobs that have ended and have no host, oldest first; with the end of those of which the store knows nothing.
        self._ended: dict[JobId, str] = {}

    def host(self, job_id: JobId | None) -> JobHost | None:
        """A job that this coordinator leads, or the newest one; look at it under the `condition` only."""
        with self.condition:
            return self._hosts.get(job_id) if job_id else next(reversed(self._hosts.values()), None)

    def hosts(self) -> tuple[JobHost, ...]:
        """The jobs that this coordinator leads, oldest first; look at them under the `condition` only."""
        with self.condition:
            return tuple(self._hosts.values())

    def tell(self, host: JobHost, fact: Input) -> None:
        """Let a job take a fact in, and carry out what it says."""
        with self.condition:
            self._feed(host, fact)

    def free_devices(self) -> tuple[AgentInfo, ...]:
        """The agents in order of registration, with the devices that no job uses.

        Raises:
            Unavailable: that is not known yet.
        """
        with self.condition:
            cluster = self._cluster()
        if cluster.unled:
            raise Unavailable(f"the coordinator waits for {untold(cluster.unled[0])}; ask again in a few seconds")
        return cluster.agents

    # -- for subclasses, under the lock ------------------------------------------------------------------------------

    def _check_room(self, job_id: JobId, owner: str = "") -> None:
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

    def _first_number(self) -> int:
        """From here on this coordinator numbers events; every lead has numbers of its own."""
        return max(0, self._fences.own - 1) * EVENTS_PER_LEAD + 1

    def _feed(self, host: JobHost, fact: Input) -> None:
        """Give a machine a fact and carry out what it says."""
        try:
            instructions = host.machine.handle(fact, now=self._clock.monotonic())
        except Exception:  # noqa: BLE001 - one job's bug must not stop the others
            _log.exception("job_machine_failed", job=host.job_id, fact=type(fact).__name__)
            return
        for instruction in instructions:
            self._carry_out(host, instruction)
        self._keep(host)
        if instructions or isinstance(fact, ClocksTold):
            self.condition.notify_all()

    def _tell_gone(self, info: MemberInfo, sentence: str) -> None:
        for host in list(self._hosts.values()):
            self._feed(host, MemberGone(info.id, sentence))

    def _offer_cluster(self) -> None:
        """Let jobs that wait for members look at what is free, oldest first.

        Not those of which somebody may know more.
        """
        waiting = [host for host in self._hosts.values() if host.machine.state.is_queued]
        waiting = [host for host in waiting if host.job_id not in self._orphans]
        while waiting:
            cluster = self._cluster()
            places = turns([(host.job_id, host.machine.job) for host in waiting], cluster)
            for host, turn in zip(waiting, places, strict=True):
                self._feed(host, ClusterSeen(cluster, turn))
                if not host.machine.state.is_queued:
                    # It has what it needs, and the others look at what is left.
                    break
            else:
                return
            waiting = [host for host in waiting if host.machine.state.is_queued]

    def _has_ended(self, job_id: JobId, sentence: str = "") -> None:
        """It has ended, and has no host; `sentence` says why, if the store does not."""
        self._ended[job_id] = sentence
        while len(self._ended) > _MAX_ENDED_IDS:
            del self._ended[next(iter(self._ended))]

    def _forget_old_jobs(self) -> None:
        now = self._clock.monotonic()
        settled = [host for host in self._hosts.values() if host.is_saved and host.machine.is_settled(now=now)]
        for host in settled[:-MAX_ENDED_JOBS]:
            host.executor.shutdown(wait=False)
            del self._hosts[host.job_id]
            self._has_ended(host.job_id)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _keep(self, host: JobHost) -> None:
        """Let the store have what is new."""
        host.note_state()
        if host.wants_save():
            _submit(host, self._save)

    def _post(self, commands: Sequence[SendCommand]) -> None:
        """Queue commands that are of no job; under the lock."""
        for sent in commands:
            self._mailboxes.post(sent.agent, sent.command)
        if commands:
            self.condition.notify_all()

    def _known_agent(self, member: MemberInfo) -> AgentInfo:
        """An agent, with what is still valid of what is known of its links."""
        return replace(member.agent_info, links=still_valid(member.links, now=self._clock.wall()))

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
        machine = host.machine
        tasks = JobTasks(
            machine.job_id,
            machine.job,
            machine.submission,
            submitted_wall=host.record.submitted_wall,
            store=self._store,
            tools=self._tools,
            clock=self._clock,
        )
        answer = tasks.run(task)
        if answer is not None and machine is host.machine:
            self.tell(host, answer)

    def _save(self, host: JobHost) -> None:
        with self.condition:
            unsaved, run_dir = host.unsaved(), Path(host.machine.submission.first_run_dir)
        try:
            kept = save(self._store, unsaved)
        except HetpipeError as error:
            _log.warning("job_not_kept_yet", job=host.job_id, reason=str(error))
            with self.condition:
                host.saved(None, 0)
            return
        # After the store, which may have to be asked again: so each line is written once.
        append_evaluations(run_dir, (numbered.event for numbered in unsaved.events), self._clock)
        with self.condition:
            host.saved(kept, len(unsaved.events))

    def _cluster(self) -> ClusterView:
        """What is free now.

        A parameter server may serve a job that is under way: it is looked at once it has told of its jobs. What a job
        uses that nobody leads yet is not known.
        """
        now = self._clock.monotonic()
        users = {
            device.device: host.job_id
            for host in self._hosts.values()
            if not host.machine.is_settled(now=now)
            for agent in host.machine.agents
            for device in agent.devices
        }
        orphans = self._orphans
        #: What these have may be in use by a job of which only they tell.
        tellers = {
            member for orphan in orphans if not orphans.is_credible(orphan, now=now) for member in orphan.tellers
        }
        members, shards = (
            [member for member in self._registry.of_role(role) if member.id not in tellers]
            for role in (MemberRole.AGENT, MemberRole.PARAMETER_SERVER)
        )
        agents = [self._known_agent(member) for member in members if not self._registry.departs(member.id)]
        devices = [device.device for agent in agents for device in agent.devices]
        held = Counter(users[device] for device in devices if device in users)
        return ClusterView(
            agents=tuple(_without(agent, users) for agent in agents),
            busy_devices=held.total(),
            shards=tuple(shard for shard in shards if self._registry.has_told(shard.id)),
            unled=tuple(orphan.job_id for orphan in orphans if orphans.is_credible(orphan, now=now)),
            held=tuple(held.items()),
            is_settled=now - self._began >= self._patience.echo_seconds,
        )


def _submit(host: JobHost, work: Callable[[JobHost], None]) -> None:
    """Run `work` on the job's thread; a coordinator that is closing starts nothing new."""
    try:
        host.executor.submit(work, host)
    except RuntimeError:
        _log.info("task_not_started", job=host.job_id)


def _without(agent: AgentInfo, busy: Container[str]) -> AgentInfo:
    return replace(agent, devices=tuple(device for device in agent.devices if device.device not in busy))
