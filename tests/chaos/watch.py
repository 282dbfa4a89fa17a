"""Says whether a cluster and its job have got over a fault by themselves, and who else went down with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from hetpipe.clock import SYSTEM_CLOCK
from tests.chaos.cluster import Cluster
from tests.chaos.keeper import Kept
from tests.chaos.outcome import CaseT, Outcome
from tests.chaos.trial import MOVES_WAVES, Trial

#: Longest ways: to a whole cluster before a fault, and back to a whole cluster whose clock moves.
WHOLE_SECONDS = 60.0
RECOVER_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """A whole cluster, as it looks at one time."""

    kept: Mapping[str, Kept]
    lives: Mapping[str, int]
    """How many lives each process has had."""
    members: Mapping[int, int]
    """Virtual worker → its life."""
    term: int

    def bystanders(self, later: Sight, *, may_end: AbstractSet[str], may_leave: AbstractSet[int]) -> Iterator[str]:
        """A sentence for whoever died, or was started anew, although nobody hit it; and for a term that fell."""
        for key, kept in self.kept.items():
            since = kept.lives[max(0, self.lives[key] - 1) :]
            if key not in may_end and any(life.code is not None and not life.expected for life in since):
                yield f"{key} ended, too: {kept.story()}"
        for vw, life in self.members.items():
            if vw not in may_leave and later.members.get(vw) != life:
                yield f"virtual worker {vw}, which nobody hit, was life {life} and is {later.members.get(vw)}"
        if later.term < self.term:
            yield f"the term fell from {self.term} to {later.term}"


class Watch:
    """Looks at one cluster and its job."""

    def __init__(self, cluster: Cluster, trial: Trial) -> None:
        self._cluster = cluster
        self._trial = trial

    def play(
        self,
        case: CaseT,
        hit: Callable[[CaseT], None],
        *,
        may_end: AbstractSet[str],
        may_leave: AbstractSet[int],
    ) -> Outcome:
        """Do `hit` to a whole cluster and wait until the job has got over it.

        Args:
            case: the fault.
            hit: does it, and returns when it is over.
            may_end: processes that may end of it by themselves, to be started again.
            may_leave: virtual workers that may be evicted of it; the lives of the others must go on.
        """
        started = SYSTEM_CLOCK.monotonic()
        healed = started
        try:
            self.wait_whole("before the fault", WHOLE_SECONDS)
            before = self._look()
            hit(case)
            healed = SYSTEM_CLOCK.monotonic()
            self._wait_recovered()
            sentence = "; ".join(before.bystanders(self._look(), may_end=may_end, may_leave=may_leave))
        except AssertionError as error:
            sentence = " ".join(str(error).split())
        now = SYSTEM_CLOCK.monotonic()
        return Outcome(
            case=case,
            survived=not sentence,
            sentence=sentence,
            seconds=now - started,
            recovery_seconds=now - healed,
        )

    def wait_whole(self, when: str, timeout_seconds: float) -> None:
        """Until everybody is there.

        Raises:
            AssertionError: it took too long, or somebody cannot start; the message says who.
        """

        def is_whole() -> bool:
            self._cluster.check_starts()
            return self._cluster.is_up and self._trial.is_whole()

        try:
            self._trial.wait(is_whole, timeout_seconds=timeout_seconds, what=f"whole cluster {when}")
        except AssertionError as error:
            raise AssertionError(f"{error}: {self._missing()}") from None

    def _missing(self) -> str:
        down = [f"{key} is down: {kept.story()}" for key, kept in self._cluster.kept.items() if not kept.is_up]
        return "; ".join([*down, self._trial.story()])

    def _wait_recovered(self) -> None:
        deadline = SYSTEM_CLOCK.monotonic() + RECOVER_SECONDS
        self.wait_whole("after the fault", RECOVER_SECONDS)
        left = max(1.0, deadline - SYSTEM_CLOCK.monotonic())
        self._trial.wait_moving(waves=MOVES_WAVES, timeout_seconds=left)

    def _look(self) -> Sight:
        status = self._trial.status()
        self._trial.published()
        return Sight(
            kept=self._cluster.kept,
            lives={key: len(kept.lives) for key, kept in self._cluster.kept.items()},
            members=dict(self._trial.tail.members),
            term=0 if status is None or status.clocks is None else status.clocks.term,
        )
