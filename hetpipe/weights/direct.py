"""Weight versions of a stage without parameter servers: the optimizer steps on the newest weights (`policies.md`).

An update is made in place, or in a copy where a minibatch still needs the version that it would overwrite. The buffers
at rest are thus exactly the versions in use and those needed later.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from hetpipe.decide.schedule.versions import VersionTable
from hetpipe.errors import NonFiniteUpdate
from hetpipe.values.ids import Clock, Minibatch, Wave
from hetpipe.weights.flat import BufferPool, FlatBuffer
from hetpipe.weights.optimizer import StageOptimizer
from hetpipe.weights.policy import ANCHOR, Succession, Version, predicted_version, version_of


class DirectWeights:
    """Stores the newest weights and the older versions required by the table. See `StageWeights`."""

    def __init__(self, pool: BufferPool, optimizer: StageOptimizer, first: FlatBuffer, table: VersionTable) -> None:
        """Start from the weights `first`, which the optimizer steps on; this object is their only holder."""
        self._pool = pool
        self.optimizer = optimizer
        self._table = table
        self._shift = 0
        self._start = Clock(0)
        self._newest = first
        #: The last minibatch whose update is in the newest weights.
        self._through = 0
        #: The minibatch after which it began inside a segment.
        self._begun_after = 0
        #: Older versions still needed, by the minibatch they include.
        self._older: dict[int, FlatBuffer] = {}
        #: Minibatches between their forward and the end of their backward, with their weights.
        self._used: dict[int, Version] = {}
        self.peak_at_rest = 1

    def number_by(self, table: VersionTable, shift: int) -> None:
        """Use another table from the next segment on."""
        self._table, self._shift = table, shift

    def start(self, clock: Clock, published: FlatBuffer | None) -> None:
        """Start a segment from the newest weights; nothing is ever published here."""
        assert published is None, "no other process has these weights"
        assert not self._used, "the pipeline must be drained at a barrier"
        for through in list(self._older):
            self._pool.release(self._older.pop(through))
        self._start = clock
        self._through = clock * self._table.minibatches_per_wave

    def switch(self, p: Minibatch, clock: Clock, published: FlatBuffer) -> None:
        """Never called: no clock is pulled."""
        raise AssertionError(clock)

    def forward(self, p: Minibatch) -> Version:
        """The weights of the forward of `p`."""
        through = self._table.forward_through(p, start=self._start)
        if self._table.is_predicting:
            assert through == self._through, f"minibatch {p} needs the weights through {through}, not {self._through}"
            version = self._predicted(self._table.forward_steps_ahead(p, start=self._start))
        else:
            version = version_of(self._pool.hold(self._buffer(through)), through)
        self._used[p] = version
        return version

    def forwarded(self, p: Minibatch) -> None:
        """Mark the forward of `p` as ended."""
        if self._table.is_predicting:
            self._let_go(p)
        self._note()

    def backward(self, p: Minibatch) -> Version:
        """The weights of the backward of `p`."""
        if self._table.is_predicting:
            self._used[p] = self._predicted(self._table.backward_steps_ahead())
        return self._used[p]

    def backwarded(self, p: Minibatch) -> None:
        """Mark the backward of `p` as ended."""
        self._let_go(p)

    def step(self, p: Minibatch, gradients: dict[str, Tensor | None] | None) -> None:
        """Make the update after `p` on the newest weights, if there is one."""
        table, before, through = self._table, self._newest, self._through
        used = self._decayed_from(p)
        done = -(-p // table.minibatches_per_update) * table.minibatches_per_update  # a short wave is the last one
        if not table.is_predicting and table.last_user(through) > done:
            self._older[through] = before
            self._newest = self._pool.take().copy_(before)
        self.optimizer.rebind(self._newest)
        if gradients is not None:
            self.optimizer.step(gradients, used)
        self._through = p
        for old in [t for t in self._older if table.last_user(t) <= done]:
            self._pool.release(self._older.pop(old))
        self._note()

    def close_wave(self, wave: Wave, last: Minibatch) -> None:
        """Finish a wave; returns None, as nothing is pushed."""
        name = None if self._newest.is_finite() else self._newest.first_non_finite()
        if name is not None:
            first = wave * self._table.minibatches_per_wave + 1 + self._shift
            minibatches = range(first, last + 1 + self._shift)
            raise NonFiniteUpdate.in_parameter(name, quantity="update", minibatches=minibatches)

    def lend(self, p: Minibatch, clock: Clock, published: FlatBuffer | None) -> dict[str, Tensor]:
        """Copies of the weights of `p`, which the next version of the plan computes; nothing is published here."""
        through = self._table.forward_through(p, start=self._start)
        return {name: view.clone() for name, view in self._buffer(through).views.items()}

    def begin(self, start: Clock, through: int) -> None:
        """Begin inside the segment from `start`; the newest weights are not known before `take_over`."""
        self._start, self._through, self._begun_after = start, -1, through

    def borrow(self, minibatches: range, weights: Mapping[str, Tensor]) -> None:
        """Take the weights of some minibatches from the version before."""
        through = self._table.forward_through(minibatches[0], start=self._start)
        self._older[through] = self._pool.take().fill_(weights)

    def hand_over(self) -> Succession:
        """After the last wave of this version: the newest weights."""
        return Succession(self._start, Wave(self._start), {ANCHOR: self._newest.views})

    def take_over(self, found: Succession) -> None:
        """Go on from the newest weights of the version before."""
        self._newest.fill_(found.terms[ANCHOR])
        self._through = self._begun_after

    @property
    def at_barrier(self) -> FlatBuffer:
        """The weights of the barrier, right after `start`."""
        return self._newest

    def evaluated(self, p: Minibatch, published: FlatBuffer | None) -> FlatBuffer:
        """The weights of an evaluation before `p`."""
        assert published is None, "no other process has these weights"
        return self._buffer(self._table.forward_through(p, start=self._start))

    # -- internals ----------------------------------------------------------------------------------------------------

    def _buffer(self, through: int) -> FlatBuffer:
        return self._newest if through == self._through else self._older[through]

    def _predicted(self, steps: int) -> Version:
        return predicted_version(self._newest, steps, through=self._through, pool=self._pool, optimizer=self.optimizer)

    def _decayed_from(self, p: Minibatch) -> Mapping[str, Tensor] | None:
        """The weights whose decay is part of the update after `p`; None: those it is made on."""
        if self._table.policy.decay != "used":
            return None
        through = self._table.forward_through(p, start=self._start)
        return None if through == self._through else self._buffer(through).views

    def _let_go(self, p: Minibatch) -> None:
        self._pool.release(self._used.pop(p).buffer)

    def _note(self) -> None:
        self.peak_at_rest = max(self.peak_at_rest, 1 + len(self._older))
