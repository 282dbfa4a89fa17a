"""The stage processes of one job: what each has reported, and how each ended. Pure."""

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

#: What a process hears because another one has forgotten it: its virtual worker is lost, or a parameter server is.
_ECHOES = (StaleIncarnation, StaleTerm, UnknownJob, StateLost)

#: What torch raises for it, on every kind of device.
_OUT_OF_MEMORY = "OutOfMemoryError"


class StageState(StrEnum):
    """Where one stage process stands."""

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
    #: What its link to the next stage is, and why; empty until it is ready, and on the last stage.
    link: str = ""
    #: True once the process is known to be gone.
    exited: bool = False
    #: Of the barrier at which it came to its end; none before.
    done_reasons: BarrierReasons = BarrierReasons()
    #: When it last reported anything, in monotonic seconds.
    heard: float = 0.0
    #: What it is doing before it is ready, if it has said so.
    phase: str = ""

    @property
    def has_left(self) -> bool:
        """Whether it came to its end at a barrier at which its virtual worker leaves, and the run goes on."""
        return DRAIN in self.done_reasons and not ends_run(self.done_reasons)

    @property
    def shown_state(self) -> str:
        """The state as `status` shows it."""
        if self.has_left:
            return "left"
        gone_early = self.exited and self.state in {StageState.STARTING, StageState.READY}
        return "exited" if gone_early else self.state.value

    def __str__(self) -> str:
        """Name for a sentence."""
        pid = f"pid {self.pid} " if self.pid else ""
        return f"{self.key} ({pid}on {self.host})"


class StageTable:
    """The stage processes of one job: of each virtual worker those of its newest life."""

    def __init__(self) -> None:
        self._lives: dict[tuple[VirtualWorkerIndex, StageIndex], StageLife] = {}

    def __iter__(self) -> Iterator[StageLife]:
        """In order of virtual worker and stage."""
        return iter([self._lives[place] for place in sorted(self._lives)])

    def __len__(self) -> int:
        """Stages."""
        return len(self._lives)

    @property
    def links(self) -> str:
        """What the links between the stages are, and why, as one sentence; empty without any."""
        kinds = Counter(life.link for life in self if life.link)
        shares = [f" ({count} of {kinds.total()})" if len(kinds) > 1 else "" for count in kinds.values()]
        told = "; ".join(kind + share for kind, share in zip(kinds, shares, strict=True))
        return f"links between stages: {told}" if told else ""

    def add(self, key: StageKey, agent: AgentId, host: str, *, now: float) -> None:
        """A stage is being started, in the place of an earlier life of it."""
        self._lives[key.vw, key.stage] = StageLife(key, agent, host, heard=now)

    def forget(self, vw: VirtualWorkerIndex) -> None:
        """A later life of a virtual worker begins, which may have fewer stages."""
        self._lives = {place: life for place, life in self._lives.items() if place[0] != vw}

    def get(self, key: StageKey) -> StageLife | None:
        """One stage; None for one of another life or job."""
        life = self._lives.get((key.vw, key.stage))
        return life if life is not None and life.key == key else None

    def of(self, vw: VirtualWorkerIndex) -> list[StageLife]:
        """The stages of one virtual worker, first to last."""
        return [life for life in self if life.key.vw == vw]

    def all_ready(self, vw: VirtualWorkerIndex) -> bool:
        """True when every stage of `vw` is linked with its neighbours, or past that."""
        return all(life.state in {StageState.READY, StageState.DONE} for life in self.of(vw))

    def all_done(self, vw: VirtualWorkerIndex) -> bool:
        """True when every stage of `vw` came to the end of the run."""
        return all(life.state is StageState.DONE and not life.has_left for life in self.of(vw))

    def all_left(self, vw: VirtualWorkerIndex) -> bool:
        """True when every stage of `vw` came to its end while the run goes on."""
        return all(life.has_left for life in self.of(vw))

    @property
    def is_run_over(self) -> bool:
        """True when one of them came to the end of the run."""
        return any(life.state is StageState.DONE and not life.has_left for life in self)

    @property
    def all_exited(self) -> bool:
        """True when no process is left."""
        return all(life.exited for life in self)

    @property
    def was_stopped(self) -> bool:
        """True when the stages came to their end because somebody asked for it."""
        return any(STOP in life.done_reasons for life in self)

    def unready(self) -> list[StageLife]:
        """The stages that have not reported ready."""
        return [life for life in self if life.state is StageState.STARTING]

    def lose_agent(self, agent: AgentId) -> list[StageLife]:
        """The agent is gone, and its children with it: those that were there and had something left to do."""
        there = [life for life in self if life.agent == agent and not life.exited]
        for life in there:
            life.exited = True
        return [life for life in there if not life.has_left]


def wants_memory(report: StageFailed) -> bool:
    """Whether a device did not have enough memory for it."""
    return report.error == _OUT_OF_MEMORY


def failure_of_report(life: StageLife, report: StageFailed, *, is_lost: bool, now: float) -> Failure:
    """A stage says why it cannot go on. Its name goes before a sentence that does not begin with it.

    Args:
        life: the stage.
        report: what it says.
        is_lost: its virtual worker counts no more, which is why its calls are refused.
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
    # The checkpoint that a later life begins from may have been replaced by a newer one meanwhile.
    if wants_memory(report) or (kind is CheckpointError and life.key.incarnation > 0):
        return Rank.EXITED
    return Rank.REPORTED


def failure_of_exit(life: StageLife, news: ChildExit, *, is_lost: bool, now: float) -> Failure | None:
    """What the end of a process means; None when it was to be expected or was reported already.

    Args:
        life: the stage.
        news: how it ended. Whoever ordered it may be an earlier coordinator, which nobody else knows of.
        is_lost: its virtual worker counts no more.
        now: monotonic seconds.
    """
    if life.state in {StageState.DONE, StageState.FAILED} or (news.ordered and is_lost):
        return None
    kind, how = JobFailed.__name__, exit_sentence(news.exit_code)
    if news.exit_code < 0:
        return Failure(Rank.KILLED, kind, f"{life} {how}", now)
    words = f"; its last words: {news.last_output}" if news.last_output else ""
    return Failure(Rank.EXITED, kind, f"{life} {how} before the run did{words}", now)
