"""Says whether a cluster and its job have got over a fault by themselves, and who else went down with it."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Set as AbstractSet
from typing import TypeVar

from hetpipe.clock import SYSTEM_CLOCK
from tests.chaos.cluster import Cluster
from tests.chaos.outcome import Case, Outcome
from tests.chaos.trial import MOVES_WAVES, Trial

#: Longest ways: to a whole cluster before a fault, and back to a whole cluster whose clock moves.
WHOLE_SECONDS = 60.0
RECOVER_SECONDS = 60.0

CaseT = TypeVar("CaseT", bound=Case)


class Watch:
    """Looks at one cluster and its job."""

    def __init__(self, cluster: Cluster, trial: Trial) -> None:
        self._cluster = cluster
        self._trial = trial

    def play(self, case: CaseT, hit: Callable[[CaseT], None], *, may_end: AbstractSet[str]) -> Outcome:
        """Do `hit` to a whole cluster and wait until the job has got over it.

        Args:
            case: the fault.
            hit: does it, and returns when it is over.
            may_end: processes that may end of it by themselves, to be started again.
        """
        started = SYSTEM_CLOCK.monotonic()
        healed = started
        before = {key: len(kept.lives) for key, kept in self._cluster.kept.items()}
        try:
            self.wait_whole("before the fault", WHOLE_SECONDS)
            hit(case)
            healed = SYSTEM_CLOCK.monotonic()
            self._wait_recovered()
            sentence = self._bystanders(before, may_end)
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

    def _bystanders(self, before: dict[str, int], may_end: AbstractSet[str]) -> str:
        """Who died although nobody hit it; empty if nobody did."""
        told = []
        for key, kept in self._cluster.kept.items():
            since = kept.lives[max(0, before[key] - 1) :]
            if key not in may_end and any(life.code is not None and not life.expected for life in since):
                told.append(f"{key} ended, too: {kept.story()}")
        return "; ".join(told)
