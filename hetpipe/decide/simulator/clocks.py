"""Model of the clock shard and the shards: commits and published clocks (`wsp.md` §4).

A wave is committed when all stages have staged it and the gate permits it. Every shard adds committed waves one at a
time, in the order of waves and, within a wave, of virtual workers. A clock is published when every shard has added its
last wave. Control messages take no time.

This models `decide.sync.decision_log` and `decide.sync.shard_state` in a fraction of their time: membership is fixed,
and samples are not counted. `tests/decide/simulator/test_real_decisions.py` compares the two: the same reports yield
the same commits, publications, updates and grants at the same instants (`docs/architecture.md`, "The simulator").
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

from hetpipe.decide.simulator.engine import Engine
from hetpipe.decide.sync.gate import Gate


class _Shards:
    """Shards that take equally long for an update, and so do the same at the same time: one update at a time."""

    __slots__ = ("_apply_ticks", "_built", "_clocks", "_count", "_engine", "_next")

    def __init__(self, engine: Engine, clocks: Clocks, apply_ticks: int, count: int) -> None:
        self._engine = engine
        self._clocks = clocks
        self._count = count
        #: Time to add one wave of one virtual worker.
        self._apply_ticks = apply_ticks
        #: Clocks complete here, and the virtual worker whose update of wave `_built` is next.
        self._built = self._next = 0
        self.go_on()

    def go_on(self) -> None:
        """Start the next update; if its wave is not committed, wait for its virtual worker."""
        if self._clocks.committed[self._next] > self._built:
            self._engine.at(self._engine.now + self._apply_ticks, self._added, 0)
        else:
            self._clocks.waiting[self._next].append(self)

    def _added(self, _: int) -> None:
        self._next += 1
        if self._next == len(self._clocks.committed):
            self._next = 0
            self._built += 1
            self._clocks.added(self._built, self._count)
        self.go_on()


class Clocks:
    """The clocks of a run.

    Invariant after `settle`: no virtual worker is more than D + 1 committed waves ahead of another.
    """

    __slots__ = (
        "_allowed",
        "_engine",
        "_exchange_ticks",
        "_gate",
        "_held",
        "_num_built",
        "_num_shards",
        "_num_stages",
        "_on_publish",
        "_reports",
        "committed",
        "is_changed",
        "max_distance",
        "published",
        "waiting",
    )

    def __init__(
        self,
        engine: Engine,
        gate: Gate,
        *,
        num_stages: Sequence[int],
        apply_ticks: Sequence[int],
        exchange_ticks: int = 0,
        on_publish: Callable[[int], None],
    ) -> None:
        """Start at clock 0.

        Args:
            engine: provides the time.
            gate: the run's gate.
            num_stages: number of stages of each virtual worker.
            apply_ticks: per shard, the time to add one wave of one virtual worker.
            exchange_ticks: delay after the last update until a clock counts as complete on a shard.
            on_publish: called with each published clock.
        """
        self._engine = engine
        self._gate = gate
        self._num_stages = num_stages
        self._on_publish = on_publish
        self._exchange_ticks = exchange_ticks
        #: Virtual worker → committed waves.
        self.committed = [0] * len(num_stages)
        self.published = 0
        self.max_distance = 0
        #: Whether an event has occurred since the last `settle`.
        self.is_changed = False
        #: Virtual worker → uncommitted wave → stages that have staged it.
        self._reports: list[dict[int, int]] = [{} for _ in num_stages]
        #: Virtual workers whose next wave is staged but not permitted yet.
        self._allowed: list[int] = []
        self._held: list[int] = []
        #: Virtual worker → shards waiting for its next commit.
        self.waiting: list[list[_Shards]] = [[] for _ in num_stages]
        #: Clock above the published one → shards on which it is complete. Shards without parameters do not count.
        self._num_built: dict[int, int] = {}
        counts = Counter(filter(None, apply_ticks))
        self._num_shards = counts.total()
        for ticks, count in counts.items():
            _Shards(engine, self, ticks, count)

    def staged(self, vw: int, wave: int) -> None:
        """Record that a stage of `vw` has its part of `wave` on every shard."""
        reports = self._reports[vw]
        reports[wave] = reports.get(wave, 0) + 1
        if self._is_staged(vw) and wave == self.committed[vw]:
            self._allowed.append(vw)
            self.is_changed = True

    def added(self, clock: int, count: int) -> None:
        """Record that `count` shards have added the last wave of `clock`."""
        if self._exchange_ticks:
            self._engine.at(self._engine.now + self._exchange_ticks, partial(self._built, count), clock)
        else:
            self._built(count, clock)

    def _built(self, count: int, clock: int) -> None:
        self._num_built[clock] = self._num_built.get(clock, 0) + count
        self.is_changed = True

    def settle(self) -> None:
        """Commit and publish as far as possible."""
        self.is_changed = False
        while True:
            if self._allowed:
                self._commit()
            if not self._is_built(self.published + 1):
                return
            self.published += 1
            self._num_built.pop(self.published, None)
            self._on_publish(self.published)
            self._allowed, self._held = self._held, self._allowed

    def _is_built(self, clock: int) -> bool:
        if self._num_shards:
            return self._num_built.get(clock) == self._num_shards
        return min(self.committed) >= clock

    def _is_staged(self, vw: int) -> bool:
        return self._reports[vw].get(self.committed[vw]) == self._num_stages[vw]

    def _commit(self) -> None:
        committed = self.committed
        for vw in self._allowed:
            while self._is_staged(vw):
                wave = committed[vw]
                if not self._gate.may_commit(wave, self.published):
                    self._held.append(vw)
                    break
                del self._reports[vw][wave]
                committed[vw] = wave + 1
                waiting, self.waiting[vw] = self.waiting[vw], []
                for shard in waiting:
                    shard.go_on()
        self._allowed.clear()
        self.max_distance = max(self.max_distance, max(committed) - min(committed))
