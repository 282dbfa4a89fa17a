"""How a job goes back to its newest checkpoint when it cannot go on from where it is (`reliability.md`, P2). Pure.

The way back: all processes of the job are ended, everybody who holds weights must be there, and then the shell prepares
the job anew, in the next term and in a folder of its own. A job that loses what it trained since the same checkpoint
again and again gets no further, so the rewinds in a row without a newer one are bounded.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hetpipe import errors
from hetpipe.decide.elastic.virtual_workers import WorkersInput
from hetpipe.decide.lifecycle.exchange import DrainAsked, MemberGone, Prepared, Rewind, TaskFailed
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
class _WayBack:
    """One rewind under way."""

    cause: Failure
    from_clock: Clock
    #: When it began, and when the job may be prepared anew.
    since: float
    ready_at: float
    #: Nobody is left who knows how it was prepared: what follows is a whole preparation, from the inspection on.
    is_whole: bool = False
    #: The shell prepares the job anew.
    is_preparing: bool = False
    #: Since when it could not be prepared anew; None while nothing speaks against it.
    barred_since: float | None = None
    #: Why the shell could not do so the last time.
    refusal: str = ""


class Rewinds:
    """The rewinds of one job. Not thread-safe; every call gives the monotonic time."""

    def __init__(self, job: Job, submission: Submission, patience: Patience) -> None:
        """Begin without one under way."""
        self._survive = job.survive
        self._patience = patience
        #: Rewinds so far, and the number of the newest folder; those that were given up for another one have folders.
        self.count = self._number = submission.rewinds
        #: Those in a row that did not find a newer checkpoint.
        self._fruitless = 0
        #: Clock from which the job went on the last time; None before it was prepared.
        self._began_at: Clock | None = None
        #: Members that are gone, and what others were told when they registered again.
        self._absent: dict[MemberId, MemberGone] = {}
        self._known: dict[MemberId, MemberInfo] = {}
        #: Those that went, or are about to go, on notice: they are expected back, whenever that is.
        self._on_leave: set[MemberId] = set()
        #: Virtual workers that had been asked to leave and to stay out.
        self._out: tuple[VirtualWorkerIndex, ...] = ()
        self._way: _WayBack | None = None

    @property
    def is_under_way(self) -> bool:
        """Whether the job is on its way back."""
        return self._way is not None

    @property
    def is_waiting(self) -> bool:
        """Whether it is, and nobody prepares it yet."""
        return self._way is not None and not self._way.is_preparing

    # -- what is heard -----------------------------------------------------------------------------------------------

    def gone(self, gone: MemberGone) -> None:
        """A membership ended."""
        self._absent[gone.member] = gone

    def departs(self, agent: AgentId) -> None:
        """An agent was told to end, and begins nothing any more."""
        member = MemberId(agent)
        self._on_leave.add(member)
        self._absent[member] = MemberGone(member, f"agent {agent} was told to end")

    def seen(self, info: MemberInfo) -> None:
        """A process has registered."""
        self._absent.pop(info.id, None)
        self._on_leave.discard(info.id)
        self._known[info.id] = info

    def note_end(self, fact: WorkersInput, stages: StageTable) -> None:
        """Take in what is said of processes of which only the end is of interest any more."""
        match fact:
            case ChildExit(key=key):
                life = stages.get(key)
                if life is not None:
                    life.exited = True
            case MemberGone(member=member):
                stages.lose_agent(AgentId(member))
            case _:
                """Nothing else of them counts."""

    # -- the way back ------------------------------------------------------------------------------------------------

    def begin_whole(self, cause: Failure, *, now: float) -> None:
        """The job goes back because of `cause`, and has to be prepared from the inspection on."""
        self._way = _WayBack(cause, Clock(0), now, ready_at=now, is_whole=True)

    @property
    def is_whole(self) -> bool:
        """Whether one is under way that includes a whole preparation."""
        return self._way is not None and self._way.is_whole

    def clear(self, stages: StageTable, *, everybody: bool, now: float) -> None:
        """Let the whole preparation begin, if no process of before is left, or each has had the time to end.

        Args:
            stages: those of before.
            everybody: the job takes all devices there are, so whoever may still register is waited for.
            now: monotonic seconds.
        """
        way = self._way
        assert way is not None
        waited = now - way.since
        is_clear = stages.all_exited or waited >= self._patience.exit_seconds
        way.is_preparing = is_clear and (not everybody or waited >= self._patience.echo_seconds)

    def wait_again(self, *, now: float) -> None:
        """Somebody has come with processes of before, which are to end first."""
        assert self._way is not None
        self._way.is_preparing, self._way.since = False, now

    def may_prepare(self, members: JobPreparation, *, now: float) -> bool | Failure:
        """Whether the shell may try once more what it could not do before, or why that can never be."""
        way = self._way
        assert way is not None
        missing = self._missing(members)
        absent = {member for member in members.members if member in self._absent}
        if not (missing or way.refusal) or (absent and absent <= self._on_leave):
            way.barred_since = None
        elif way.barred_since is None:
            way.barred_since = now
        elif (waited := now - way.barred_since) >= self._survive.absence.total_seconds():
            why = f"for {waited:.0f} s the job could not go back to a checkpoint: {missing or way.refusal}"
            return Failure(Rank.GONE, JobFailed.__name__, f"{way.cause.sentence}; {why}", now)
        if missing or now < way.ready_at:
            return False
        way.is_preparing = True
        members.renew(self._known)
        return True

    def begin(self, cause: Failure, training: JobTraining, *, now: float) -> None:
        """The job goes back because of `cause`; what it was when it trained."""
        clock = Clock(0) if training.clocks is None else training.clocks.published
        pause = 2.0 ** (self._fruitless - 1) if self._fruitless else 0.0
        ready_at = now + min(pause, self._survive.backoff.total_seconds())
        self._way = _WayBack(cause, max(clock, self._began_at or clock), now, ready_at)
        self._out = tuple(life.vw for life in training.lives if life.stays_out)

    def check(
        self, stages: StageTable, members: JobPreparation, before: Prepared, *, now: float
    ) -> Rewind | Failure | None:
        """What is next: nothing yet, to prepare the job anew, or why that can never be.

        Args:
            stages: the processes of before.
            members: who carries the job out.
            before: how it was prepared the last time.
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
        """Whether a failure to prepare the job anew is one to wait out."""
        kind = getattr(errors, failed.error, None)
        if self._way is None or not (isinstance(kind, type) and issubclass(kind, Unavailable)):
            return False
        self._way.is_preparing, self._way.refusal = False, failed.sentence
        self._way.ready_at = now + self._patience.retry_seconds
        return True

    def prepared(self, prepared: Prepared, *, now: float) -> Rewound | Failure | None:
        """The job is prepared, for the first time or anew.

        Returns:
            What to tell of a rewind, or why the job is given up.
        """
        start = prepared.start.clock
        way, self._way = self._way, None
        before, self._began_at = self._began_at, start
        if way is None or prepared.submission is None:
            return None
        if way.is_whole:
            # How far it was, and how often it had gone back, tell its folders alone.
            self.count = self._number = prepared.submission.rewinds
            return Rewound(start, start, prepared.submission.run_dir, way.cause.sentence)
        self.count += 1
        if way.cause.is_notice or (before is not None and start > before):
            self._fruitless = 0
        else:
            self._fruitless += 1
        if self._fruitless > self._survive.restarts:
            times = "once" if self._fruitless == 1 else f"{self._fruitless} times in a row"
            why = f"the job had to go back to clock {start} {times} without a newer checkpoint, and is given up"
            return Failure(Rank.GONE, way.cause.error, f"{way.cause.sentence}; {why}", now)
        return Rewound(way.from_clock, start, prepared.submission.run_dir, way.cause.sentence)

    def old_news(self) -> Iterable[WorkersInput]:
        """What those who begin anew have to be told: who is gone, and who is to stay out."""
        yield from self._absent.values()
        yield from (DrainAsked(vw, "out") for vw in self._out)

    def awaited(self, stages: StageTable, members: JobPreparation) -> str:
        """For whom the way back waits, and for what."""
        if not stages.all_exited:
            return "all stages to end, before the job goes back to its newest checkpoint"
        why = self._missing(members) or ("" if self._way is None else self._way.refusal)
        return f"what it takes to go back to the newest checkpoint: {why or 'the pause between two rewinds'}"

    def _missing(self, members: JobPreparation) -> str:
        """Who of those that must be there is not, as a sentence; empty if nobody."""
        return "; ".join(self._absent[member].sentence for member in members.members if member in self._absent)
