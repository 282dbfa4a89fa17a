"""The weight version of each minibatch at a stage: the table of `policies.md`, for runtime, renderer and tests.

*Through q* means: with the virtual worker's own updates of its minibatches 1 … q. Minibatches are numbered p = 1, 2, …;
K is the number of stages, i one of them, N minibatches make a wave. A segment starts at the barrier at clock `start`,
where the pipeline is empty and every own update up to start·N is in the published weights.

>>> stash = VersionTable("stash", stage=0, num_stages=4, minibatches_per_wave=4)
>>> [stash.forward_through(p) for p in range(1, 9)]
[0, 0, 0, 0, 1, 2, 3, 4]
>>> two_buffers = VersionTable("double_buffer", stage=0, num_stages=4, minibatches_per_wave=4)
>>> [two_buffers.forward_through(p) for p in range(1, 17)]
[0, 0, 0, 0, 0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8]
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hetpipe.values.ids import Minibatch
from hetpipe.values.policies import POLICIES, Policy, WeightPolicy


@dataclass(frozen=True, slots=True)
class VersionTable:
    """The versions of one stage."""

    weights: WeightPolicy
    stage: int
    """i, 0-based."""
    num_stages: int
    """K."""
    minibatches_per_wave: int
    """N; a multiple of `accumulate`."""
    accumulate: int = 1
    """Minibatches whose gradients make one update together; under `flush` and `double_buffer` it is always N."""

    policy: Policy = field(init=False, repr=False, compare=False)
    """The row of `weights`."""
    minibatches_per_update: int = field(init=False, repr=False, compare=False)
    """N under `flush` and `double_buffer`, else `accumulate`."""
    _delay: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Precompute values used for every minibatch."""
        policy, n = POLICIES[self.weights], self.minibatches_per_wave
        object.__setattr__(self, "policy", policy)
        object.__setattr__(self, "minibatches_per_update", policy.minibatches_per_update(n, self.accumulate))
        object.__setattr__(self, "_delay", policy.delay(self.stage, self.num_stages, n))

    def forward_through(self, p: int, *, start: int = 0) -> Minibatch:
        """v_i(p): the newest own update in the weights of the forward of p; start·N if none of this segment is.

        >>> VersionTable("wave", 2, 3, 4).forward_through(9)
        5
        >>> [VersionTable("predict", i, 3, 4).forward_through(9) for i in range(3)]
        [6, 7, 8]
        """
        return self._updated(p - self._delay_of(p), start)

    def backward_through(self, p: int, *, start: int = 0) -> Minibatch:
        """The same for the backward: under `predict` and `spectrain` all updates before p, else as the forward.

        >>> VersionTable("predict", 0, 3, 4).backward_through(9), VersionTable("stash", 0, 3, 4).backward_through(9)
        (8, 6)
        """
        return self._updated(p - 1, start) if self.is_predicting else self.forward_through(p, start=start)

    def forward_steps_ahead(self, p: int, *, start: int = 0) -> int:
        """s: the number of updates by which the forward of p is ahead of its weights (PipeOptim eq. 4; 0: none).

        The updates that its backward will have seen beyond them, K − i − 1 in a full pipeline; under `spectrain`
        ⌊i/2⌋ more.

        >>> [VersionTable("predict", 0, 3, 4).forward_steps_ahead(p) for p in (1, 2, 3, 4)]
        [0, 1, 2, 2]
        >>> [VersionTable("spectrain", i, 4, 4).forward_steps_ahead(9) for i in range(4)]
        [3, 2, 2, 1]
        """
        if not self.is_predicting:
            return 0
        behind = self.backward_through(p, start=start) - self.forward_through(p, start=start)
        return behind // self.minibatches_per_update + self.backward_steps_ahead()

    def backward_steps_ahead(self) -> int:
        """S of the backward: ⌊i/2⌋ under `spectrain`, else 0."""
        return self.policy.steps_ahead(self.stage, self.num_stages, self.minibatches_per_wave)

    def is_of_the_barrier(self, p: int) -> bool:
        """Whether minibatch `p` of the segment, from 1, computes with the weights of its barrier, and no prediction.

        >>> [VersionTable("stash", i, 2, 4).is_of_the_barrier(2) for i in range(2)]
        [True, False]
        """
        through = (self.forward_through(p), self.backward_through(p))
        return through == (0, 0) and not self.forward_steps_ahead(p) and not self.backward_steps_ahead()

    def last_user(self, through: int) -> Minibatch:
        """The last minibatch that computes with the weights through `through`, which ends an update.

        >>> VersionTable("double_buffer", 0, 4, 4).last_user(4)
        12
        """
        if self.policy.one_update_per_wave:
            return Minibatch(through + (1 + self.policy.waves_behind) * self.minibatches_per_wave)
        return Minibatch(through + self.accumulate - 1 + self._delay_of(through))

    def is_update(self, p: int) -> bool:
        """Whether an update follows the backward of p (and after the last minibatch of a wave, however short)."""
        return p % self.minibatches_per_update == 0

    @property
    def is_predicting(self) -> bool:
        """Whether forward and backward of a minibatch see different weights."""
        return self.policy.predicts is not None

    def _delay_of(self, p: int) -> int:
        if self.policy.one_update_per_wave:
            return self._delay + (p - 1) % self.minibatches_per_wave + 1
        return self._delay

    def _updated(self, through: int, start: int) -> Minibatch:
        whole = through // self.minibatches_per_update * self.minibatches_per_update
        return Minibatch(max(whole, start * self.minibatches_per_wave))
