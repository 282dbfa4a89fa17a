"""Computation times of a stage: the profile's times, a straggler's factor, and optional jitter."""

from __future__ import annotations

import math
import random


class Durations:
    """The sequence of computation times of one stage.

    Forwards and backwards draw from separate streams, so that the draw of a minibatch does not depend on the order in
    which a stage computes: runs that differ in D or schedule have the same jitter.
    """

    __slots__ = ("_backward_random", "_backward_ticks", "_forward_random", "_forward_ticks", "_mu", "_sigma")

    def __init__(self, forward_ticks: int, backward_ticks: int, *, jitter_cv: float, seed: str) -> None:
        """Create the random streams.

        Args:
            forward_ticks: mean time of a forward.
            backward_ticks: mean time of a backward.
            jitter_cv: standard deviation over mean of a lognormal factor with mean 1; 0 for no jitter.
            seed: seed of the draws.
        """
        self._forward_ticks = forward_ticks
        self._backward_ticks = backward_ticks
        # A lognormal factor has mean exp(μ + σ²/2) and squared coefficient of variation exp(σ²) − 1.
        self._sigma = math.sqrt(math.log1p(jitter_cv * jitter_cv))
        self._mu = -self._sigma * self._sigma / 2
        self._forward_random = random.Random(f"hetpipe/{seed}/forward")  # noqa: S311 - a simulation, no secret
        self._backward_random = random.Random(f"hetpipe/{seed}/backward")  # noqa: S311

    def forward(self) -> int:
        """Ticks of the next forward."""
        return self._drawn(self._forward_ticks, self._forward_random)

    def backward(self) -> int:
        """Ticks of the next backward."""
        return self._drawn(self._backward_ticks, self._backward_random)

    def _drawn(self, ticks: int, source: random.Random) -> int:
        if not self._sigma:
            return ticks
        return round(ticks * source.lognormvariate(self._mu, self._sigma))
