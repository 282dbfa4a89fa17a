"""Rewind of a job to its newest checkpoint when it cannot continue (`reliability.md`, P2). Pure.

In a rewind all processes of the job are ended, all members that hold weights must be available, and then the shell
prepares the job again, in the next term and in a folder of its own. A job that repeatedly loses its progress since the
same checkpoint does not advance, so the number of consecutive rewinds without a newer one is bounded.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hetpipe import errors
from hetpipe.decide.elastic.virtual_workers import WorkersInput
from hetpipe.decide.lifecycle.exchange import DrainRequested, MemberGone, Prepared, Rewind, TaskFailed
from hetpipe.decide.lifecycle.patience import Patience
from hetpipe.decide.lifecycle.preparation import JobPreparation
from hetpipe.decide.lifecycle.root_cause import Failure, Rank
from hetpipe.decide.lifecycle.stage_table import StageTable
from hetpipe.decide.lifecycle.training import JobTraining
from hetpipe.errors import JobFailed, Unavailable
from hetpipe.job.file import Job
from hetpipe.values.commands import ChildExit
from hetpipe.values.events import Rewound, Submission
from hetpipe.values.ids import AgentId, Clock, VirtualWorkerIndex
from hetpipe.values.members import MemberId, MemberInfo


@dataclass(slots=True)
class _Rewind:
    """One rewind in progress."""

    cause: Failure
    from_clock: Clock
    #: Its start, and when the job may be prepared again.
    since: float
    ready_at: float
    #: Whether the previous preparation is unknown: the job is prepared completely, from the inspection on.
    is_whole: bool = False
    #: Whether the shell is preparing the job.
    is_preparing: bool = False
    #: Since when preparation has failed; None while nothing prevents it.
    barred_since: float | None = None
    #: The reason of the last failure.
    refusal: str = ""


class Rewinds:
    """The rewinds of one job. Not thread-safe; every call takes the monotonic time."""

    def __init__(self, job: Job, submission: Submission, patience: Patience) -> None:
        """Start without a rewind in progress."""
        self._survive = job.survive
        self._patience = patience
        #: Number of rewinds, and of the newest folder; abandoned rewinds have folders as well.
        self.count = self._number = submission.rewinds
        #: Consecutive rewinds without a newer checkpoint.
        self._fruitless = 0
        #: Clock at which the job last continued; None before it was prepared.
        self._began_at: Clock | None = None
        #: Members that are gone, and notices about re-registered ones.
        self._absent: dict[MemberId, MemberGone] = {}
        self._known: dict[MemberId, MemberInfo] = {}
        #: Agents that left, or are about to leave, after an announcement: they are expected to return.
        self._on_leave: set[MemberId] = set()
        #: Virtual workers drained on request.
        self._out: tuple[VirtualWorkerIndex, ...] = ()
        self._way: _Rewind | None = None

    @property
    def is_under_way(self) -> bool:
        """Whether a rewind is in progress."""
        return self._way is not None

    @property
    def is_waiting(self) -> bool:
        """Whether a rewind is in progress and not being prepared yet."""
        return self._way is not None and not self._way.is_preparing

    # -- facts
    # ----------------------------------------------------------------------------------------------------------

    def gone(self, gone: MemberGone) -> None:
        """Record the end of a membership."""
        self._absent[gone.member] = gone

    def departs(self, agent: AgentId) -> None:
        """Record that an agent is shutting down and starts no more processes."""
        member = MemberId(agent)
        self._on_leave.add(member)
        self._absent[member] = MemberGone(member, f"agent {agent} is shutting down")

    def seen(self, info: MemberInfo) -> None:
        """Record a registration."""
        self._absent.pop(info.id, None)
        self._on_leave.discard(info.id)
        self._known[info.id] = info

    def note_end(self, fact: WorkersInput, stages: StageTable) -> None:
        """Process a fact about processes; only their end matters."""
        match fact:
            case ChildExit(key=key):
                life = stages.get(key)
                if life is not None:
                    life.exited = True
            case MemberGone(member=member):
                stages.lose_agent(AgentId(member))
            case _:
                """all other reports are ignored"""

    # -- the rewind
    # -----------------------------------------------------------------------------------------------------

    def begin_whole(self, cause: Failure, *, now: float) -> None:
        """Start a rewind because of `cause` with a complete preparation, from the inspection on."""
        self._way = _Rewind(cause, Clock(0), now, ready_at=now, is_whole=True)

    @property
    def is_whole(self) -> bool:
        """Whether a rewind with a complete preparation is in progress."""
        return self._way is not None and self._way.is_whole

    def clear(self, stages: StageTable, *, everybody: bool, now: float) -> None:
        """Whether the complete preparation can start: all earlier processes have ended, or have had the time to.

        Args:
            stages: the earlier processes.
            everybody: whether the job uses all devices, so that members that may still register are waited for.
            now: monotonic seconds.
        """
        way = self._way
        assert way is not None
        waited = now - way.since
        is_clear = stages.all_exited or waited >= self._patience.exit_seconds
        way.is_preparing = is_clear and (not everybody or waited >= self._patience.echo_seconds)

    def wait_again(self, *, now: float) -> None:
        """Wait again: a member has registered with earlier processes, which must end first."""
        assert self._way is not None
        self._way.is_preparing, self._way.since = False, now

    def may_prepare(self, members: JobPreparation, *, now: float) -> bool | Failure:
        """Whether the shell may retry; a failure if retrying is hopeless."""
        way = self._way
        assert way is not None
        missing = self._missing(members)
        absent = {member for member in members.members if member in self._absent}
        if not (missing or way.refusal) or (absent and absent <= self._on_leave):
            way.barred_since = None
        elif way.barred_since is None:
            way.barred_since = now
        elif (waited := now - way.barred_since) >= self._survive.absence.total_seconds():
            why = f"for {waited:.0f} s the job could not be rewound to a checkpoint: {missing or way.refusal}"
            return Failure(Rank.GONE, JobFailed.__name__, f"{way.cause.sentence}; {why}", now)
        if missing or now < way.ready_at:
            return False
        way.is_preparing = True
        members.renew(self._known)
        return True

    def begin(self, cause: Failure, training: JobTraining, *, now: float) -> None:
        """Start a rewind because of `cause`, given the state of the training."""
        clock = Clock(0) if training.clocks is None else training.clocks.published
        pause = 2.0 ** (self._fruitless - 1) if self._fruitless else 0.0
        ready_at = now + min(pause, self._survive.backoff.total_seconds())
        self._way = _Rewind(cause, max(clock, self._began_at or clock), now, ready_at)
        self._out = tuple(life.vw for life in training.lives if life.stays_out)

    def check(
        self, stages: StageTable, members: JobPreparation, before: Prepared, *, now: float
    ) -> Rewind | Failure | None:
        """The next step: None to wait, prepare the job again, or fail.

        Args:
            stages: the earlier processes.
            members: the members of the job.
            before: the previous preparation.
            now: monotonic seconds.
        """
        way = self._way
        assert way is not None
        if not stages.all_exited and now - way.since < self._patience.exit_seconds:
            return None
        may = self.may_prepare(members, now=now)
        if isinstance(may, Failure):
            return may
        if not may:
            return None
        self._number += 1
        return Rewind(self._number, before, members.agents, members.shards, members.eval_samples)

    def is_retryable(self, failed: TaskFailed, *, now: float) -> bool:
        """Whether a failed preparation should be retried."""
        kind = getattr(errors, failed.error, None)
        if self._way is None or not (isinstance(kind, type) and issubclass(kind, Unavailable)):
            return False
        self._way.is_preparing, self._way.refusal = False, failed.sentence
        self._way.ready_at = now + self._patience.retry_seconds
        return True

    def prepared(self, prepared: Prepared, *, now: float) -> Rewound | Failure | None:
        """Record that the job is prepared, for the first time or again.

        Returns:
            The event of a rewind, or why the job is abandoned.
        """
        start = prepared.start.clock
        way, self._way = self._way, None
        before, self._began_at = self._began_at, start
        if way is None or prepared.submission is None:
            return None
        if way.is_whole:
            # The previous progress and number of rewinds are only known from its folders.
            self.count = self._number = prepared.submission.rewinds
            return Rewound(start, start, prepared.submission.run_dir, way.cause.sentence)
        self.count += 1
        if way.cause.is_notice or (before is not None and start > before):
            self._fruitless = 0
        else:
            self._fruitless += 1
        if self._fruitless > self._survive.restarts:
            times = "once" if self._fruitless == 1 else f"{self._fruitless} times in a row"
            why = f"the job was rewound to clock {start} {times} without a newer checkpoint, and is abandoned"
            return Failure(Rank.GONE, way.cause.error, f"{way.cause.sentence}; {why}", now)
        return Rewound(way.from_clock, start, prepared.submission.run_dir, way.cause.sentence)

    def pending_facts(self) -> Iterable[WorkersInput]:
        """Facts for the new training: missing members, and drained virtual workers."""
        yield from self._absent.values()
        yield from (DrainRequested(vw, "out") for vw in self._out)

    def awaited(self, stages: StageTable, members: JobPreparation) -> str:
        """Description of the current wait."""
        if not stages.all_exited:
            return "all stages to end, before the job is rewound to its newest checkpoint"
        why = self._missing(members) or ("" if self._way is None else self._way.refusal)
        return f"the requirements of a rewind to the newest checkpoint: {why or 'the pause between two rewinds'}"

    def _missing(self, members: JobPreparation) -> str:
        """Missing required members, as a sentence; empty if none."""
        return "; ".join(self._absent[member].sentence for member in members.members if member in self._absent)
