"""The weight versions of one stage under `wave`: which tensors exist, and their arithmetic (`wsp.md` §3).

Names as in the formula: anchor B, running sum ρ, update ũ of a wave, w_p = B + ρ_{v(p)}. A version never changes once
used. Between two switch points B is constant; at a switch point it becomes w^(W*) plus the stage's own whole waves
since.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from hetpipe.errors import NonFiniteUpdate
from hetpipe.spec.ids import Clock, Minibatch, Wave
from hetpipe.sync.gate import is_switch_point, local_through
from hetpipe.weights.flat import BufferPool, FlatBuffer
from hetpipe.weights.optimizer import WaveOptimizer


@dataclass(frozen=True, slots=True)
class _Version:
    buffer: FlatBuffer
    weights: Mapping[str, Tensor]


class WaveWeights:
    """Holds B, ρ, the running sums not yet due, the versions in use and the stage's own ũ that anchors still need.

    On the device these are B, ρ and at most N − 1 others: each minibatch q of the last N has a sum, which becomes the
    version of q + N, but for the one that ends a wave, where the version of q + N is B itself. The ũ are in host
    memory, on their way to the shards and until no anchor needs them.

    Not thread-safe: one compute thread uses it. Buffers handed out (`close_wave`) or in (`start`, `switch`) carry one
    holder, which changes hands.
    """

    def __init__(self, pool: BufferPool, optimizer: WaveOptimizer, rho: FlatBuffer, minibatches_per_wave: int) -> None:
        self._pool = pool
        self.optimizer = optimizer
        self._n = minibatches_per_wave
        #: ρ of the wave under way.
        self._rho = rho
        #: B, and the switch point from which on it counts.
        self._anchor: FlatBuffer | None = None
        self._anchor_from = 0
        self._anchor_clock = Clock(0)
        #: Own whole waves that B contains, up to this one (exclusive).
        self._anchor_through = Wave(0)
        #: q → ρ as it stood after q, or already B + ρ when B was known: minibatch q + N will use it.
        self._sums: dict[int, FlatBuffer] = {}
        self._ready: set[int] = set()
        self._versions: dict[int, _Version] = {}
        #: Own ũ of the waves since the clock in use, in host memory: at most D + 2.
        self._updates: dict[Wave, FlatBuffer] = {}
        self._start = Clock(0)

    def start(self, clock: Clock, published: FlatBuffer) -> None:
        """Begin a segment at a barrier: everything is w^(clock), ρ = 0."""
        assert not self._versions, "a barrier finds the pipeline drained"
        for buffer in (*self._sums.values(), *self._updates.values()):
            self._pool.release(buffer)
        self._sums.clear()
        self._ready.clear()
        self._updates.clear()
        if self._anchor is not None:
            self._pool.release(self._anchor)
        self._set_anchor(self._pool.to_device(published), clock, clock * self._n + 1, Wave(clock))
        self._start = clock
        self._rho.zero_()

    def switch(self, p: Minibatch, clock: Clock, published: FlatBuffer | None) -> None:
        """Minibatch `p` is a switch point and uses w^(clock); `published` is None if that was in use already."""
        through = Wave(local_through(p, minibatches_per_wave=self._n, start=self._start) // self._n)
        assert self._anchor is not None and (published or clock == self._anchor_clock), "no anchor to build on"
        first, anchor = self._anchor_through, self._anchor
        if published is not None:
            self._pool.release(anchor)
            first, anchor = Wave(clock), self._pool.to_device(published)
        assert through <= first or anchor.references == 1, "minibatch p − N, the last to use B itself, is complete"
        for wave in range(first, through):
            anchor.add_(self._updates[Wave(wave)])
        self._set_anchor(anchor, clock, p, through)
        for wave in [w for w in self._updates if w <= clock and w < through]:
            self._pool.release(self._updates.pop(wave))

    def version(self, p: Minibatch) -> Mapping[str, Tensor]:
        """w_p as leaf tensors that require gradients, by parameter name; stays until `step(p)`."""
        if p in self._versions:
            return self._versions[p].weights
        anchor = self._anchor
        assert anchor is not None, "no segment was started"
        v = local_through(p, minibatches_per_wave=self._n, start=self._start)
        if v % self._n == 0:
            buffer = self._pool.hold(anchor)
        else:
            buffer = self._sums.pop(v)
            if v in self._ready:
                self._ready.discard(v)
            else:
                buffer.add_(anchor)
        weights = {name: view.detach().requires_grad_() for name, view in buffer.views.items()}
        self._versions[p] = _Version(buffer, weights)
        return weights

    def step(self, p: Minibatch, gradients: dict[str, Tensor | None]) -> None:
        """Add u_p to ρ, and keep ρ_p if minibatch p + N will see it. Minibatch `p` is complete: its version is freed.

        Args:
            p: the minibatch.
            gradients: parameter name → its gradient, or None; they are taken out, and freed with the step.
        """
        version = self._versions.pop(p)
        self.optimizer.step(gradients, version.weights)
        self._pool.release(version.buffer)
        if p % self._n == 0:
            return
        kept = self._pool.take()
        due = p + self._n
        if self._anchor is not None and self._anchor_from <= due < self._next_switch():
            kept.set_sum_(self._anchor, self._rho)
            self._ready.add(p)
        else:
            kept.copy_(self._rho)
        self._sums[p] = kept

    def close_wave(self, wave: Wave, last: Minibatch) -> FlatBuffer:
        """End a wave whose last minibatch was `last`: ρ starts again at zero.

        Returns:
            ũ in host memory; one of its holders is the caller.

        Raises:
            NonFiniteUpdate: naming parameter and minibatch.
        """
        if not self._rho.is_finite():
            raise NonFiniteUpdate(self._blame(wave, last))
        update = self._pool.to_host(self._rho)
        self._updates[wave] = self._pool.hold(update)
        self._rho = self._pool.take().zero_()
        self.optimizer.rebind(self._rho)
        return update

    @property
    def anchor(self) -> FlatBuffer:
        """B; right after `start` these are the published weights of the barrier."""
        assert self._anchor is not None, "no segment was started"
        return self._anchor

    # -- inside ------------------------------------------------------------------------------------------------------

    def _set_anchor(self, anchor: FlatBuffer, clock: Clock, p: int, through: Wave) -> None:
        self._anchor, self._anchor_clock, self._anchor_from, self._anchor_through = anchor, clock, p, through

    def _next_switch(self) -> int:
        following = self._anchor_from + 1
        while not is_switch_point(following, minibatches_per_wave=self._n, start=self._start):
            following += 1
        return following

    def _blame(self, wave: Wave, last: Minibatch) -> str:
        """The first minibatch whose update is not finite: the sums after each one of the wave are still here."""
        for q in range(wave * self._n + 1, last):
            version = self._versions.get(q + self._n)
            after = self._sums.get(q) or (version and version.buffer)
            name = after.first_non_finite() if after else None
            if name is not None:
                return f"the update of minibatch {q} is not finite in parameter {name}"
        return f"the update of minibatch {last} is not finite in parameter {self._rho.first_non_finite()}"
