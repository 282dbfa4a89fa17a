"""Weight versions of a stage with parameter servers: an anchor and running sums (`wsp.md` §3, Arithmetic).

Names as in the formula: anchor B, running sum ρ, update ũ of a wave, w through v = B + ρ_v. B is w^(W*) plus the
stage's own whole waves up to v; where v ends a wave the weights are B itself. A version never changes once used. The
optimizer steps in place on ρ, which starts at zero with each wave.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from hetpipe.decide.schedule.versions import VersionTable
from hetpipe.errors import NonFiniteUpdate
from hetpipe.values.ids import Clock, Minibatch, Wave
from hetpipe.weights.flat import BufferPool, FlatBuffer
from hetpipe.weights.optimizer import StageOptimizer
from hetpipe.weights.policy import ANCHOR, Succession, Version, predicted_version, version_of


class AnchoredWeights:
    """Stores B, ρ, sums needed later, the versions in use, and the stage's own ũ still needed by anchors.

    The ũ are in host memory until they are pushed and no anchor needs them; everything else is on the device. See
    `StageWeights`.
    """

    def __init__(self, pool: BufferPool, optimizer: StageOptimizer, rho: FlatBuffer, table: VersionTable) -> None:
        """Step on `rho`, which is zero and has this object as its only holder."""
        self._pool = pool
        self.optimizer = optimizer
        self._table = table
        self._n = table.minibatches_per_wave
        self._shift = 0
        self._start = Clock(0)
        #: ρ of the current wave, and the last minibatch whose update it contains; None: none.
        self._rho = rho
        self._rho_through: int | None = None
        #: B + ρ, while further minibatches use exactly this version.
        self._shared: FlatBuffer | None = None
        #: B, its published clock, and the own whole waves that it contains (exclusive).
        self._anchor: FlatBuffer | None = None
        self._anchor_clock = Clock(0)
        self._anchor_through = Wave(0)
        #: Number of waves closed.
        self._closed = Wave(0)
        #: The last minibatch whose forward has started.
        self._forwarded = 0
        #: The last one whose backward has ended, where used weights are kept for their decay.
        self._backwarded = 0
        #: q → ρ after q, before later updates, or already B + ρ: needed by later minibatches.
        self._sums: dict[int, FlatBuffer] = {}
        self._ready: set[int] = set()
        #: B + ρ, kept up to date where a policy predicts from it.
        self._newest: FlatBuffer | None = None
        #: Minibatches between their forward and their update, with their weights.
        self._used: dict[int, Version] = {}
        #: Own ũ of the waves since the clock in use, in host memory: at most D + 2.
        self._updates: dict[Wave, FlatBuffer] = {}
        #: Weights of minibatches whose forward is to come, from the version of the plan before.
        self._borrowed: dict[int, FlatBuffer] = {}
        self.peak_at_rest = 0

    def number_by(self, table: VersionTable, shift: int) -> None:
        """Use another table from the next segment on."""
        self._table, self._n, self._shift = table, table.minibatches_per_wave, shift

    def start(self, clock: Clock, published: FlatBuffer | None) -> None:
        """Start a segment: everything is w^(clock), ρ = 0."""
        assert published is not None, "the weights of a barrier come from the parameter servers"
        assert not self._used, "the pipeline must be drained at a barrier"
        for buffer in (*self._sums.values(), *self._updates.values()):
            self._pool.release(buffer)
        self._sums.clear()
        self._ready.clear()
        self._updates.clear()
        self._set_newest(None)
        self._set_shared(None)
        if self._anchor is not None:
            self._pool.release(self._anchor)
        self._anchor, self._anchor_clock, self._anchor_through = self._pool.to_device(published), clock, Wave(clock)
        self._start, self._closed = clock, Wave(clock)
        self._forwarded = self._backwarded = clock * self._n
        self._rho.zero_()
        self._rho_through = None
        if self._table.is_predicting:
            self._set_newest(self._anchor)

    def switch(self, p: Minibatch, clock: Clock, published: FlatBuffer) -> None:
        """Rebuild the anchor on w^(clock)."""
        assert self._anchor is not None, "no segment has been started"
        self._set_newest(None)
        self._set_shared(None)
        self._pool.release(self._anchor)
        self._anchor, self._anchor_clock, self._anchor_through = self._pool.to_device(published), clock, Wave(clock)
        self._grow(self._closed if self._table.is_predicting else self._waves_of(p))
        if self._table.is_predicting:
            self._follow()

    def forward(self, p: Minibatch) -> Version:
        """The weights of the forward of `p`."""
        self._forwarded = p
        self._let_go_before(p)
        if p in self._borrowed:
            version = version_of(self._borrowed.pop(p), self._table.forward_through(p, start=self._start))
        elif self._table.is_predicting:
            version = self._predicted(self._table.forward_steps_ahead(p, start=self._start))
        else:
            version = self._version(p)
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
        """Mark the backward of `p` as ended; weights that decay are kept until the step."""
        if not self._keeps_used:
            self._let_go(p)
            return
        self._backwarded = p
        self._let_go_before(p)

    def step(self, p: Minibatch, gradients: dict[str, Tensor | None] | None) -> None:
        """Add the update after `p` to ρ, if there is one."""
        self._save_sum()
        if gradients is not None:
            self.optimizer.step(gradients, self._decayed_from(p))
        self._rho_through = p
        for done in [q for q in self._used if q <= p and self._keeps_used]:
            self._let_go(done)
        if self._table.is_predicting and p % self._n:
            self._follow()
        self._note()

    def close_wave(self, wave: Wave, last: Minibatch) -> FlatBuffer:
        """Finish a wave; returns ũ and resets ρ to zero."""
        if not self._rho.is_finite():
            raise self._non_finite_update(wave, last)
        update = self._pool.to_host(self._rho)
        self._updates[wave] = self._pool.hold(update)
        self._closed = Wave(wave + 1)
        self._rho = self._pool.take().zero_()
        self._rho_through = None
        self.optimizer.rebind(self._rho)
        if self._table.is_predicting:
            self._set_newest(None)
            self._grow(self._closed)
            self._follow()
        self._note()
        return update

    def lend(self, p: Minibatch, clock: Clock, published: FlatBuffer | None) -> dict[str, Tensor]:
        """Copies of the weights of `p`, which the next version of the plan computes: the same terms in the same order.

        B itself does not grow for it, as forwards to come may need fewer waves.
        """
        v = self._table.forward_through(p, start=self._start)
        if v in self._ready:
            return {name: view.clone() for name, view in self._sums[v].views.items()}
        assert self._anchor is not None, "no segment has been started"
        own = self._anchor_through if published is None else Wave(clock)
        terms = [self._updates[Wave(wave)] for wave in range(own, v // self._n)]
        if v % self._n:
            terms.append(self._rho if v == self._rho_through else self._sums[v])
        copies = {}
        for name, view in self._anchor.views.items():
            copy = copies[name] = torch.empty_like(view).copy_(view if published is None else published.views[name])
            for term in terms:
                copy += term.views[name].to(copy.device)
        return copies

    def begin(self, start: Clock, through: int) -> None:
        """Begin inside the segment from `start`, after minibatch `through`, the last of a wave."""
        self._start, self._closed = start, Wave(through // self._n)
        self._forwarded = self._backwarded = through

    def borrow(self, minibatches: range, weights: Mapping[str, Tensor]) -> None:
        """Take the weights of some minibatches from the version before; each of them has a holder."""
        buffer = self._pool.take().fill_(weights)
        self._borrowed |= dict.fromkeys(minibatches, buffer)
        for _ in minibatches[1:]:
            self._pool.hold(buffer)

    def hand_over(self) -> Succession:
        """After the last wave of this version: its anchor, and the own waves that others are built from."""
        waves = {int(wave): update.views for wave, update in self._updates.items()}
        return Succession(self._anchor_clock, self._anchor_through, {ANCHOR: self.at_barrier.views, **waves})

    def take_over(self, found: Succession) -> None:
        """Go on from the anchor and the own waves of the version before; ρ is zero."""
        assert self._anchor is None and not self._updates, "it has nothing of its own yet"
        for key, tensors in found.terms.items():
            if key == ANCHOR:
                self._anchor = self._pool.take().fill_(tensors)
            else:
                self._updates[Wave(key)] = self._pool.take_on_host().fill_(tensors)
        self._anchor_clock, self._anchor_through = found.clock, found.through

    @property
    def at_barrier(self) -> FlatBuffer:
        """The weights of the barrier, right after `start`."""
        assert self._anchor is not None, "no segment has been started"
        return self._anchor

    def evaluated(self, p: Minibatch, published: FlatBuffer | None) -> FlatBuffer:
        """The weights of an evaluation before `p`."""
        if published is not None:
            return published
        assert p == self._start * self._n + 1, f"the anchor has changed since the barrier, before minibatch {p}"
        return self.at_barrier

    # -- versions ----------------------------------------------------------------------------------------------------

    def _waves_of(self, p: Minibatch) -> Wave:
        """The own whole waves in the weights of `p`."""
        return Wave(self._table.forward_through(p, start=self._start) // self._n)

    def _version(self, p: Minibatch) -> Version:
        """The weights of `p`, with a holder of their own."""
        v = self._table.forward_through(p, start=self._start)
        self._grow(Wave(v // self._n))
        if v % self._n == 0:
            return version_of(self._pool.hold(self.at_barrier), self._anchor_through * self._n)
        return version_of(self._inside_wave(v, is_last=self._table.last_user(v) == p), v)

    def _inside_wave(self, v: int, *, is_last: bool) -> FlatBuffer:
        """B + ρ_v; `is_last`: no later minibatch needs it."""
        assert self._anchor is not None, "no segment has been started"
        if v == self._rho_through:
            return self._newest_version(self._anchor, is_last=is_last)
        buffer = self._sums.pop(v) if is_last else self._sums[v]
        if v not in self._ready:
            if not is_last and self._changes_before(self._table.last_user(v)):
                return self._pool.take().set_sum_(self._anchor, buffer)
            buffer.add_(self._anchor)
            self._ready.add(v)
        if is_last:
            self._ready.discard(v)
            return buffer
        return self._pool.hold(buffer)

    def _newest_version(self, anchor: FlatBuffer, *, is_last: bool) -> FlatBuffer:
        """The current B + ρ, with a holder of its own."""
        buffer = self._shared
        if buffer is None:
            buffer = self._pool.take().set_sum_(anchor, self._rho)
            if not is_last:
                self._set_shared(buffer)
            return buffer
        self._pool.hold(buffer)
        if is_last:
            self._set_shared(None)
        return buffer

    def _save_sum(self) -> None:
        """Save ρ for later minibatches before it changes; B is added immediately if it is already theirs."""
        v, shared = self._rho_through, self._shared
        if v is not None and not self._table.is_predicting and self._table.last_user(v) > self._forwarded:
            assert self._anchor is not None, "no segment has been started"
            if v // self._n != self._anchor_through or self._changes_before(self._table.last_user(v)):
                self._sums[v] = self._pool.take().copy_(self._rho)
            elif shared is not None:
                self._sums[v] = self._pool.hold(shared)
                self._ready.add(v)
            else:
                self._sums[v] = self._pool.take().set_sum_(self._anchor, self._rho)
                self._ready.add(v)
        self._set_shared(None)

    def _changes_before(self, p: int) -> bool:
        """Whether another clock may come into use up to and including minibatch `p`."""
        return p // self._n != self._forwarded // self._n

    def _grow(self, through: Wave) -> None:
        """Add own whole waves to B, up to `through` (exclusive); a B in use is not modified."""
        assert self._anchor is not None, "no segment has been started"
        if through > self._anchor_through:
            self._set_shared(None)
        for wave in range(self._anchor_through, through):
            if self._anchor.references > 1:
                copy = self._pool.take().copy_(self._anchor)
                self._pool.release(self._anchor)
                self._anchor = copy
            self._anchor.add_(self._updates[Wave(wave)])
        self._anchor_through = Wave(max(through, self._anchor_through))
        done = min(self._anchor_clock + 1, self._anchor_through)
        if self._table.policy.one_update_per_wave:
            # Waves not seen by the forward may still be part of the weights that decay.
            done = min(done, self._closed - self._table.policy.waves_behind)
        for wave in [w for w in self._updates if w < done]:
            self._pool.release(self._updates.pop(wave))

    # -- predictions -------------------------------------------------------------------------------------------------

    def _predicted(self, steps: int) -> Version:
        assert self._newest is not None, "no segment has been started"
        through = self._closed * self._n if self._rho_through is None else self._rho_through
        return predicted_version(self._newest, steps, through=through, pool=self._pool, optimizer=self.optimizer)

    def _follow(self) -> None:
        """Update the newest weights."""
        assert self._anchor is not None, "no segment has been started"
        if self._rho_through is None:
            self._set_newest(self._anchor)
            return
        if self._newest is None or self._newest is self._anchor:
            self._set_newest(None)
            self._newest = self._pool.take()
        self._newest.set_sum_(self._anchor, self._rho)

    def _set_newest(self, buffer: FlatBuffer | None) -> None:
        if self._newest is not None:
            self._pool.release(self._newest)
        self._newest = None if buffer is None else self._pool.hold(buffer)

    def _set_shared(self, buffer: FlatBuffer | None) -> None:
        if self._shared is not None:
            self._pool.release(self._shared)
        self._shared = None if buffer is None else self._pool.hold(buffer)

    # -- internals ----------------------------------------------------------------------------------------------------

    @property
    def _keeps_used(self) -> bool:
        """Whether the weights of a minibatch are kept until its update: weight decay reads them."""
        policy = self._table.policy
        return policy.decay == "used" or policy.one_update_per_wave

    def _decayed_from(self, p: Minibatch) -> Mapping[str, Tensor]:
        """The weights whose decay is part of the update after `p`.

        Those used by minibatch p, or the newest: all updates before this one, on the clock of the latest forward. With
        one update per wave that is the forward of p, so the result depends neither on the cut nor on the time of the
        step.
        """
        if self._newest is not None:
            return self._newest.views
        policy = self._table.policy
        if policy.decay == "used":
            return self._used[p].weights
        if policy.one_update_per_wave:
            terms = [self._updates[Wave(wave)] for wave in range(self._waves_of(p), self._closed)]
            return SummedWeights([self._used[p].buffer, *terms]) if terms else self._used[p].weights
        assert self._anchor is not None, "no segment has been started"
        terms = [self._updates[Wave(wave)] for wave in range(self._anchor_through, self._closed)]
        return SummedWeights([self._anchor, *terms, *([] if self._rho_through is None else [self._rho])])

    def _let_go_before(self, p: int) -> None:
        """In the update that `p` belongs to, only the weights of the last minibatch decay."""
        group = self._table.minibatches_per_update
        for q in [q for q in self._used if q < p and q <= self._backwarded and (q - 1) // group == (p - 1) // group]:
            self._let_go(q)

    def _let_go(self, p: int) -> None:
        self._pool.release(self._used.pop(p).buffer)

    def _note(self) -> None:
        held = {id(version.buffer) for version in self._used.values()} | {id(buffer) for buffer in self._sums.values()}
        held |= {id(buffer) for buffer in (self._anchor, self._rho, self._newest, self._shared) if buffer is not None}
        self.peak_at_rest = max(self.peak_at_rest, len(held))

    def _non_finite_update(self, wave: Wave, last: Minibatch) -> NonFiniteUpdate:
        """The first minibatch with a non-finite update, if the sums of the wave are still available."""
        used: dict[int, FlatBuffer] = {
            self._table.forward_through(p, start=self._start): v.buffer for p, v in self._used.items()
        }
        for q in range(wave * self._n + 1, last):
            after = self._sums.get(q) or used.get(q)
            name = after.first_non_finite() if after else None
            if name is not None:
                return _not_finite(q + self._shift, name)
        return _not_finite(last + self._shift, self._rho.first_non_finite() or "")


def _not_finite(p: int, name: str) -> NonFiniteUpdate:
    return NonFiniteUpdate.in_parameter(name, quantity="update", minibatches=range(p, p + 1))


class SummedWeights(Mapping[str, Tensor]):
    """Buffers summed in order, lazily per requested tensor."""

    def __init__(self, terms: list[FlatBuffer]) -> None:
        self._terms = terms

    def __getitem__(self, name: str) -> Tensor:
        total = self._terms[0].views[name]
        for term in self._terms[1:]:
            total = total + term.views[name].to(total.device)
        return total

    def __iter__(self) -> Iterator[str]:
        return iter(self._terms[0].views)

    def __len__(self) -> int:
        return len(self._terms[0].views)
