"""The pure rules of the gate with the numbers of one run filled in (`wsp.md` §2, §3; `policies.md`)."""

from __future__ import annotations

from dataclasses import dataclass

from hetpipe.decide.sync.gate import ClockRule, is_switch_point, may_commit, starts_drained


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules(ClockRule):
    """When may a minibatch start, with which clock, and when may a wave be committed?"""

    @property
    def first_switch(self) -> int:
        """The first minibatch that may use a clock above 0; from then on every N-th is a switch point.

        At the switch points before it, v(p) is 0: nothing newer can be used yet.

        >>> Rules(weights="wave", minibatches_per_wave=4, staleness=0, deterministic=False).first_switch
        8
        >>> Rules(weights="flush", minibatches_per_wave=4, staleness=0, deterministic=False).first_switch
        5
        """
        n = self.minibatches_per_wave
        return next(
            p for p in range(n + 1, 2 * n + 1) if is_switch_point(p, minibatches_per_wave=n, weights=self.weights)
        )

    def starts_drained(self, p: int) -> bool:
        """Whether every minibatch before `p` must be through the whole pipeline first (`flush`)."""
        return starts_drained(p, minibatches_per_wave=self.minibatches_per_wave, weights=self.weights)

    def drains_after(self, p: int, last: int) -> int:
        """The minibatch from `p` on after whose forward the pipeline drains.

        Args:
            p: the next to start.
            last: of the run.

        >>> flush = Rules(weights="flush", minibatches_per_wave=4, staleness=0, deterministic=False)
        >>> flush.drains_after(1, last=6), flush.drains_after(5, last=6)
        (4, 6)
        """
        n = self.minibatches_per_wave
        if not self.starts_drained(n + 1):
            return last
        return min(-(-p // n) * n, last)

    def may_commit(self, wave: int, published: int) -> bool:
        """Whether a wave that is staged may be committed."""
        return may_commit(wave, published=published, staleness=self.staleness)
