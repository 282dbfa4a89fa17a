"""The stage processes of one job: reports and exits. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from hetpipe import errors
from hetpipe.decide.lifecycle.root_cause import Failure, Rank
from hetpipe.decide.sync.segment import DRAIN, STOP, ends_run
from hetpipe.errors import (
    CheckpointError,
    DataWorkerLost,
    JobFailed,
    NonFiniteUpdate,
    ProtocolViolation,
    StaleIncarnation,
    StaleTerm,
    StateLost,
    UnknownJob,
)
from hetpipe.values.barrier_reasons import BarrierReasons
from hetpipe.values.commands import ChildExit, StageKey, exit_sentence
from hetpipe.values.ids import AgentId, StageIndex, VirtualWorkerIndex
from hetpipe.values.run import StageFailed

#: Errors of a process whose virtual worker, or a parameter server, is lost.
_ECHOES = (StaleIncarnation, StaleTerm, UnknownJob, StateLost)

#: torch's out-of-memory error, on every kind of device.
_OUT_OF_MEMORY = "OutOfMemoryError"


class StageState(StrEnum):
    """State of one stage process."""

    STARTING = "starting"
    READY = "ready"
    DONE = "done"
    FAILED = "failed"


@dataclass(slots=True)
class StageLife:
    """One stage process."""

    key: StageKey
    agent: AgentId
    host: str
    state: StageState = StageState.STARTING
    #: 0 until it reports.
    pid: int = 0
    #: Kind of the link to the next stage, and why; empty before it is ready, and on the last stage.
    link: str = ""
    #: Whether the process is known to have ended.
    exited: bool = False
    #: Reasons of the barrier at which it ended; empty before.
    done_reasons: BarrierReasons = BarrierReasons()
    #: Time of its last report, in monotonic seconds.
    last_report: float = 0.0
    #: Its startup phase before it is ready, if reported.
    phase: str = ""

    @property
    def has_left(self) -> bool:
        """Whether it ended at a barrier at which its virtual worker leaves, and the run continues."""
        return DRAIN in self.done_reasons and not ends_run(self.done_reasons)

    @property
    def shown_state(self) -> str:
        """The state as displayed by `status`."""
        if self.has_left:
            return "left"
        gone_early = self.exited and self.state in {StageState.STARTING, StageState.READY}
        return "exited" if gone_early else self.state.value

    def __str__(self) -> str:
        """Name for messages."""
        pid = f"pid {self.pid} " if self.pid else ""
        return f"{self.key} ({pid}on {self.host})"


class StageTable:
    """The stage processes of one job: those of the newest incarnation of each virtual worker."""

    def __init__(self) -> None:
        self._lives: dict[tuple[VirtualWorkerIndex, StageIndex], StageLife] = {}

    def __iter__(self) -> Iterator[StageLife]:
        """In order of virtual worker and stage."""
        return iter([self._lives[place] for place in sorted(self._lives)])

    def __len__(self) -> int:
        """Number of stages."""
        return len(self._lives)

    @property
    def links(self) -> str:
        """The links between the stages with reasons, as one sentence; empty without any."""
        kinds = Counter(life.link for life in self if life.link)
        shares = [f" ({count} of {kinds.total()})" if len(kinds) > 1 else "" for count in kinds.values()]
        text = "; ".join(kind + share for kind, share in zip(kinds, shares, strict=True))
        return f"links between stages: {text}" if text else ""

    def add(self, key: StageKey, agent: AgentId, host: str, *, now: float) -> None:
        """Add a stage being started, in place of an earlier incarnation."""
        self._lives[key.vw, key.stage] = StageLife(key, agent, host, last_report=now)

    def forget(self, vw: VirtualWorkerIndex) -> None:
        """Remove the stages of a virtual worker; its next incarnation may have fewer."""
        self._lives = {place: life for place, life in self._lives.items() if place[0] != vw}

    def get(self, key: StageKey) -> StageLife | None:
        """One stage; None for one of another incarnation or job."""
        life = self._lives.get((key.vw, key.stage))
        return life if life is not None and life.key == key else None

    def of(self, vw: VirtualWorkerIndex) -> list[StageLife]:
        """The stages of one virtual worker, first to last."""
        return [life for life in self if life.key.vw == vw]

    def all_ready(self, vw: VirtualWorkerIndex) -> bool:
        """Whether every stage of `vw` is linked with its neighbours, or past that."""
        return all(life.state in {StageState.READY, StageState.DONE} for life in self.of(vw))

    def all_done(self, vw: VirtualWorkerIndex) -> bool:
        """Whether every stage of `vw` has reached the end of the run."""
        return all(life.state is StageState.DONE and not life.has_left for life in self.of(vw))

    def all_left(self, vw: VirtualWorkerIndex) -> bool:
        """Whether every stage of `vw` has ended while the run continues."""
        return all(life.has_left for life in self.of(vw))

    @property
    def is_run_over(self) -> bool:
        """Whether a stage has reached the end of the run."""
        return any(life.state is StageState.DONE and not life.has_left for life in self)

    @property
    def all_exited(self) -> bool:
        """Whether no process is left."""
        return all(life.exited for life in self)

    @property
    def was_stopped(self) -> bool:
        """Whether the stages ended on request."""
        return any(STOP in life.done_reasons for life in self)

    def unready(self) -> list[StageLife]:
        """The stages that have not reported ready."""
        return [life for life in self if life.state is StageState.STARTING]

    def lose_agent(self, agent: AgentId) -> list[StageLife]:
        """Mark an agent's processes as gone; returns those that had not finished."""
        there = [life for life in self if life.agent == agent and not life.exited]
        for life in there:
            life.exited = True
        return [life for life in there if not life.has_left]


def ran_out_of_memory(report: StageFailed) -> bool:
    """Whether a device ran out of memory."""
    return report.error == _OUT_OF_MEMORY


def failure_of_report(life: StageLife, report: StageFailed, *, is_lost: bool, now: float) -> Failure:
    """The failure reported by a stage. Its name is prepended to a sentence that does not begin with it.

    Args:
        life: the stage.
        report: its report.
        is_lost: whether its virtual worker no longer counts, so that its calls are rejected.
        now: monotonic seconds.
    """
    named = report.sentence.startswith(str(life.key))
    sentence = report.sentence if named else f"{life} failed: {report.sentence}"
    return Failure(_rank(life, report, is_lost=is_lost), report.error, sentence, now)


def _rank(life: StageLife, report: StageFailed, *, is_lost: bool) -> Rank:
    kind = getattr(errors, report.error, None)
    is_refusal = isinstance(kind, type) and issubclass(kind, ProtocolViolation) and kind is not NonFiniteUpdate
    if report.secondary or kind in _ECHOES or (is_lost and is_refusal):
        return Rank.ECHO
    if ran_out_of_memory(report) or kind is DataWorkerLost:
        return Rank.EXITED
    # The checkpoint that a restarted stage loads may have been replaced by a newer one meanwhile.
    if kind is CheckpointError and life.key.incarnation > 0:
        return Rank.EXITED
    return Rank.REPORTED


def failure_of_exit(life: StageLife, report: ChildExit, *, is_lost: bool, now: float) -> Failure | None:
    """The failure indicated by the end of a process; None if it was expected or already reported.

    Args:
        life: the stage.
        report: its exit, which an earlier coordinator may have ordered.
        is_lost: whether its virtual worker no longer counts.
        now: monotonic seconds.
    """
    if life.state in {StageState.DONE, StageState.FAILED} or (report.ordered and is_lost):
        return None
    kind, how = JobFailed.__name__, exit_sentence(report.exit_code)
    if report.exit_code < 0:
        return Failure(Rank.KILLED, kind, f"{life} {how}", now)
    words = f"; its last output: {report.last_output}" if report.last_output else ""
    return Failure(Rank.EXITED, kind, f"{life} {how} before the run did{words}", now)
