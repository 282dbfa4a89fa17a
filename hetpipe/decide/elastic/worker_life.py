"""One virtual worker over all its lives: a table of steps, and what is known of the newest life. Pure.

`TABLE` is the whole truth: a step that a state's row does not name is illegal there, and there is no fallback. A
virtual worker only moves through `WorkerLife.take`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from hetpipe.decide.lifecycle.root_cause import Failure
from hetpipe.errors import InvalidTransition
from hetpipe.values.events import WorkerStatus
from hetpipe.values.ids import Clock, Incarnation, VirtualWorkerIndex
from hetpipe.values.life_state import UP, LifeState


class LifeStep(StrEnum):
    """What can happen to a virtual worker."""

    GOT_READY = "got_ready"
    """Every stage is linked with its neighbours."""
    GOT_DONE = "got_done"
    """Every stage came to its end."""
    LOST = "lost"
    """A process of it died, hangs, or did not get ready."""
    DRAIN_ASKED = "drain_asked"
    """It is to go: after the next barrier if it computes, else at once."""
    LEFT = "left"
    """All its stages have passed the barrier at which it goes, and their processes have ended."""
    ADD_ASKED = "add_asked"
    """It is to be started anew although it was out."""
    ENDED = "ended"
    """It is evicted, its processes are gone, and the reason is known."""
    RETURNS = "returns"
    """The pause is over, and its agents are there."""
    ADMITTED = "admitted"
    """The clock shard expects the next life: its stages are told to start."""
    GIVEN_UP = "given_up"
    """It is not worth another life, was asked to stay out, or the run needs none any more."""


_S = LifeState

TABLE: Mapping[LifeState, Mapping[LifeStep, LifeState]] = {
    _S.STARTING: {
        LifeStep.GOT_READY: _S.READY,
        LifeStep.GOT_DONE: _S.DONE,
        LifeStep.LOST: _S.ENDING,
        LifeStep.DRAIN_ASKED: _S.ENDING,
        LifeStep.GIVEN_UP: _S.OUT,
    },
    _S.READY: {LifeStep.GOT_DONE: _S.DONE, LifeStep.LOST: _S.ENDING, LifeStep.DRAIN_ASKED: _S.LEAVING},
    _S.LEAVING: {LifeStep.GOT_DONE: _S.DONE, LifeStep.LOST: _S.ENDING, LifeStep.LEFT: _S.AWAITING},
    _S.DONE: {},
    _S.ENDING: {LifeStep.ENDED: _S.AWAITING, LifeStep.GIVEN_UP: _S.OUT},
    _S.AWAITING: {LifeStep.RETURNS: _S.ADMITTING, LifeStep.GIVEN_UP: _S.OUT},
    _S.ADMITTING: {
        LifeStep.ADMITTED: _S.STARTING,
        LifeStep.DRAIN_ASKED: _S.ENDING,
        LifeStep.GIVEN_UP: _S.OUT,
    },
    _S.OUT: {LifeStep.ADD_ASKED: _S.AWAITING},
}

#: Lives that may end for want of memory: with the same plan the next one will, too.
_MOST_WANTS = 2


@dataclass(slots=True)
class WorkerLife:
    """One virtual worker. `take` alone changes its state."""

    vw: VirtualWorkerIndex
    #: When the state was entered, in monotonic seconds.
    since: float
    state: LifeState = LifeState.STARTING
    #: The newest life; while the next one is being admitted, that one.
    incarnation: Incarnation = Incarnation(0)
    #: Lives that ended before the run.
    deaths: int = 0
    #: Of these the latest ones in a row that had not committed a wave, and all that wanted more memory than there is.
    crashes: int = 0
    wants: int = 0
    #: What went wrong with the newest life, and what of it was the cause; None until that is decided.
    failures: list[Failure] = field(default_factory=list)
    cause: Failure | None = None
    #: Whether the clock shard has evicted the newest life.
    evicted: bool = False
    #: Whether the newest life was ended before it had done anything, because it was asked to go: that has no cause.
    sent_away: bool = False
    #: Whether it is to stay out once its newest life is over, as it was asked to go.
    stays_out: bool = False
    #: Whether its next life computes by another plan, and the clock of the barrier at which its newest life has left;
    #: None if it has not.
    is_replanned: bool = False
    left_at: Clock | None = None
    #: When to ask the clock shard; None while it is being asked, or need not be.
    ask_at: float | None = None
    #: Since when it could not be asked, and the latest reason.
    unheard_since: float | None = None
    unheard: str = ""
    #: When the pause ends.
    returns_at: float = 0.0
    #: Its local clock when the newest life was first heard to count, and whether it has committed a wave since.
    first_clock: Clock | None = None
    has_committed: bool = False
    #: When it was last told what is waited for.
    noticed: float = 0.0

    def __str__(self) -> str:
        """Name for a sentence."""
        return f"virtual worker {self.vw}"

    @property
    def is_up(self) -> bool:
        """Whether processes of its newest life count."""
        return self.state in UP

    @property
    def will_train(self) -> bool:
        """Whether it computes on, or comes back by itself."""
        return self.state not in {LifeState.DONE, LifeState.OUT} and not self.stays_out

    @property
    def status(self) -> WorkerStatus:
        """As people see it."""
        return WorkerStatus(self.vw, self.incarnation, self.deaths, self.state)

    def take(self, step: LifeStep, *, now: float) -> None:
        """Make `step` at monotonic second `now`.

        Raises:
            InvalidTransition: the table has no such step. The state stays.
        """
        following = TABLE[self.state].get(step)
        if following is None:
            raise InvalidTransition(
                f"{self} cannot take {step} when it is {self.state} (life {self.incarnation}, lost {self.deaths} times)"
            )
        self.state = following
        self.since = self.noticed = now

    def begins(self) -> None:
        """Nothing is known of the newest life yet."""
        self.failures, self.cause = [], None
        self.evicted = self.sent_away = False
        self.first_clock, self.has_committed = None, False
        self.left_at = None
        self.heard_from_shard()

    def not_asked(self, sentence: str, *, again_at: float, now: float) -> None:
        """The clock shard could not be asked, for the reason in `sentence`; ask again at `again_at`."""
        self.ask_at, self.unheard = again_at, sentence
        if self.unheard_since is None:
            self.unheard_since = now

    def unheard_seconds(self, now: float) -> float:
        """Since when the clock shard could not be asked."""
        return 0.0 if self.unheard_since is None else now - self.unheard_since

    def heard_from_shard(self) -> None:
        """The clock shard has answered."""
        self.ask_at = self.unheard_since = None
        self.unheard = ""

    def has_clock(self, clock: Clock) -> None:
        """The clock shard has told its local clock."""
        if self.first_clock is None:
            self.first_clock = clock
        self.has_committed = clock > self.first_clock or self.has_committed

    def is_wanted(self, *, now: float) -> None:
        """Whatever was before, its next life is to begin as soon as it can."""
        self.stays_out = False
        if not self.is_up:
            self.crashes = self.wants = 0
            self.returns_at = now

    def ends(self) -> None:
        """The newest life is over."""
        self.deaths += 1
        self.crashes = 0 if self.has_committed else self.crashes + 1

    def is_hopeless(self, most_crashes: int) -> bool:
        """Whether another life is likely to end like the latest ones."""
        return self.crashes >= most_crashes or self.wants >= _MOST_WANTS

    @property
    def pause_seconds(self) -> float:
        """Before the next life: none the first time, then 1, 2, 4, … s while none commits a wave."""
        return 0.0 if self.crashes <= 1 else 2.0 ** (self.crashes - 2)
