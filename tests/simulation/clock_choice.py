"""The first stage's choice of the published clock of a minibatch: what `pipeline.clock_use` does."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from hetpipe.decide.sync.gate import Gate
from hetpipe.errors import ClockNotPublished, HetpipeError
from hetpipe.values.ids import Clock

if TYPE_CHECKING:
    from tests.simulation.stage import Stage


class ClockChoice:
    """Which clock is in use, and which comes next."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._job = stage.job
        #: The clock in use.
        self.clock = 0
        self._start = 0
        #: The latest switch point that has a clock, with it.
        self._chosen: tuple[int, int] | None = None
        self._is_asking = False

    def restart(self, start: int) -> None:
        """A segment begins."""
        self.clock = self._start = start
        self._chosen = None

    def opens(self, p: int) -> bool:
        """Whether minibatch `p` may begin; then `clock` is its clock."""
        stage, gate = self._stage, self._gate
        if stage.completed < self._seen_through(p):
            return False
        if gate.starts_drained(p) and stage.begun > stage.completed:
            return False
        if not gate.is_switch_point(p) or gate.newest_usable(p) <= self._start:
            return True
        if self._chosen is None or self._chosen[0] != p:
            self._choose(p)
        if self._chosen is None or self._chosen[0] != p:
            return False
        clock = self._chosen[1]
        if clock != self.clock and clock not in stage.fetched:
            stage.fetch(clock)
            return False
        self.clock = clock
        return True

    def _seen_through(self, p: int) -> int:
        if self._job.weights == "wave":
            return self._gate.local_through(p)
        return self._gate.newest_usable(p) * self._job.n

    @property
    def _gate(self) -> Gate:
        return Gate(self._job.sync, Clock(self._start))

    def required(self, p: int) -> int:
        """The clock that `p` needs."""
        return self._gate.required(p)

    def _choose(self, p: int) -> None:
        stage, required = self._stage, self.required(p)
        if stage.log.published < required or self._is_asking:
            return
        if self._job.deterministic:
            self._chosen = (p, required)
            return
        self._is_asking = True
        switch = self._gate.switch_number(p)
        first = stage.world.servers[0]
        stage.ask(
            0,
            f"hold {switch}",
            lambda: first.clock_part.hold(stage.requester, switch),
            lambda answer: self._held(p, answer),
            self._refused,
            retries=False,
        )

    def _held(self, p: int, answer: object) -> None:
        self._is_asking = False
        clock, end = cast("tuple[Clock, Clock]", answer)
        if self._stage.end_of_segment() != end:
            # The answer is ahead of what was read of the log: minibatches after `p` must know this barrier, too.
            self._stage.world.scheduler.at(2, self._stage.look, self._stage)
            return
        if p <= end * self._job.n:
            self._chosen = (p, clock)
        self._stage.look()

    def _refused(self, error: HetpipeError) -> None:
        self._is_asking = False
        if not isinstance(error, ClockNotPublished):  # it has yet to hear of a barrier
            self._stage.refused("hold", error)
