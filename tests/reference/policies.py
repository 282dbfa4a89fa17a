"""Which weights a minibatch sees under each weight policy, in the reference executor: the papers' equations.

*Through q* means: with the virtual worker's own updates of its minibatches 1 … q. Minibatch p runs at stage i of K, N
minibatches make a wave. The functions `through_…` are the policies; `SegmentEquations` adds what holds for all of them:
updates that several minibatches make together, published clocks (`wsp.md` §2) and barriers (§5).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hetpipe.values.ids import Clock, Minibatch


@dataclass(frozen=True, slots=True)
class Place:
    """A minibatch at a stage."""

    p: int
    stage: int
    """i, 0-based."""
    num_stages: int
    """K."""
    minibatches_per_wave: int
    """N."""


def through_wave(at: Place) -> int:
    """`wave` (HetPipe §4): p − N, on every stage."""
    return at.p - at.minibatches_per_wave


def through_stash(at: Place) -> int:
    """`stash` (PipeDream §3.3): p − (K − i), because K − i minibatches are in flight at stage i when p begins there."""
    return at.p - (at.num_stages - at.stage)


def through_vertical(at: Place) -> int:
    """`vertical` (PipeDream §3.3): p − K on every stage, which is what the first stage had when p began."""
    return at.p - at.num_stages


def through_flush(at: Place) -> int:
    """`flush` (GPipe, PipeDream-Flush): wave t sees W(t)."""
    return (at.p - 1) // at.minibatches_per_wave * at.minibatches_per_wave


def through_double_buffer(at: Place) -> int:
    """`double_buffer` (PipeDream-2BW, eq. 1): wave t sees W(t − 1), so W(t + 1) = W(t) − ν·∇f(W(t − 1))."""
    return ((at.p - 1) // at.minibatches_per_wave - 1) * at.minibatches_per_wave


def no_further(_stage: int) -> int:
    """The forward looks ahead to its backward, the backward not at all."""
    return 0


def further_spectrain(stage: int) -> int:
    """`spectrain` (SpecTrain): both look ⌊i/2⌋ updates further."""
    return stage // 2


@dataclass(frozen=True, slots=True)
class Policy:
    """One line of the table in `policies.md`."""

    through: Callable[[Place], int]
    """The last own update in the weights of the forward."""
    once_per_wave: bool = False
    """The gradients of a wave make one update."""
    fills_pipeline: bool = False
    """Needs N ≥ K."""
    decays_newest: bool = False
    """Weight decay is that of the newest weights, not of those that the minibatch used."""
    predicts: bool = False
    """The forward computes with the weights that it expects at its backward, the backward with the current ones."""
    further_ahead: Callable[[int], int] = no_further
    """Stage → updates by which both look further ahead."""
    clips_globally: bool = False
    """A norm over all stages does not hold up the pipeline."""


POLICIES: Mapping[str, Policy] = {
    "wave": Policy(through_wave, clips_globally=True),
    "stash": Policy(through_stash, fills_pipeline=True, decays_newest=True),
    "vertical": Policy(through_vertical, fills_pipeline=True, clips_globally=True),
    "double_buffer": Policy(
        through_double_buffer, once_per_wave=True, fills_pipeline=True, decays_newest=True, clips_globally=True
    ),
    "flush": Policy(through_flush, once_per_wave=True, clips_globally=True),
    "predict": Policy(through_stash, fills_pipeline=True, decays_newest=True, predicts=True),
    "spectrain": Policy(
        through_stash, fills_pipeline=True, decays_newest=True, predicts=True, further_ahead=further_spectrain
    ),
}


def required_clock(p: int, *, minibatches_per_wave: int, staleness: int | None, weights: str = "wave") -> int:
    """The published clock that minibatch `p` needs (`wsp.md` §2); 0 for D = ∞.

    max(0, ⌈(p + 1) / N⌉ − (D + 2)) where updates are made per minibatch; `flush`: max(0, ⌊(p − 1) / N⌋ − D);
    `double_buffer`: max(0, ⌊(p − 1) / N⌋ − 1 − D).

    >>> [required_clock(p, minibatches_per_wave=4, staleness=1) for p in (11, 12, 15, 16)]
    [0, 1, 1, 2]
    >>> [required_clock(p, minibatches_per_wave=4, staleness=1, weights="flush") for p in (8, 9, 12, 13)]
    [0, 1, 1, 2]
    >>> [required_clock(p, minibatches_per_wave=4, staleness=1, weights="double_buffer") for p in (12, 13, 16, 17)]
    [0, 1, 1, 2]
    """
    if staleness is None:
        return 0
    if weights == "flush":
        return max(0, (p - 1) // minibatches_per_wave - staleness)
    if weights == "double_buffer":
        return max(0, (p - 1) // minibatches_per_wave - 1 - staleness)
    rounded_up = (p + minibatches_per_wave) // minibatches_per_wave
    return max(0, rounded_up - (staleness + 2))


def pulled_clock(p: int, *, minibatches_per_wave: int, staleness: int, start: int, weights: str = "wave") -> int:
    """The clock that minibatch `p` uses with `pull: required`: that of the latest pull.

    The first pull is that of the barrier at `start`, and each other one D + 1 waves after the one before. What is
    pulled is the newest clock that may be used.

    >>> [pulled_clock(p, minibatches_per_wave=4, staleness=1, start=0) for p in (11, 12, 19, 20, 28)]
    [0, 2, 2, 4, 6]
    >>> [pulled_clock(p, minibatches_per_wave=4, staleness=1, start=1, weights="flush") for p in (12, 13, 20, 21)]
    [1, 3, 3, 5]
    """
    waves = (p - 1) // minibatches_per_wave if weights in ("flush", "double_buffer") else p // minibatches_per_wave
    newest = max(start, waves if weights == "flush" else waves - 1)
    return newest - (newest - start) % (staleness + 1)


@dataclass(frozen=True, slots=True)
class Version:
    """Weights: w^(clock), then own updates through `through`, then what `ahead` more updates are expected to add."""

    clock: Clock
    """W*."""
    through: Minibatch
    ahead: int = 0
    """s; 0: no prediction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentEquations:
    """The versions of one virtual worker between two barriers."""

    weights: str
    num_stages: int
    """K."""
    minibatches_per_wave: int
    """N."""
    accumulate: int
    """Minibatches that make one update; divides N. Not looked at where a policy makes one per wave."""
    staleness: int | None
    """D. None also where there are no shards: then everything is counted from the barrier."""
    start: Clock
    """The clock of the barrier where it starts: nothing older is ever used."""
    last: int
    """Its last own minibatch; start·N if it has none."""
    pulls_when_required: bool = False
    """`pull: required`; needs a D."""

    def forward(self, p: int, stage: int) -> Version:
        """What the forward of `p` computes with."""
        through = self._through(p, stage)
        if not self._policy.predicts:
            return Version(self._clock(p), through)
        behind = (self._newest_through(p) - through) // self._minibatches_per_update
        return Version(self._clock(p), through, behind + self._policy.further_ahead(stage))

    def backward(self, p: int, stage: int) -> Version:
        """What the backward of `p` reads."""
        if not self._policy.predicts:
            return self.forward(p, stage)
        newest = self.newest(p, stage)
        return Version(newest.clock, newest.through, self._policy.further_ahead(stage))

    def newest(self, p: int, stage: int) -> Version:
        """The newest local weights at the backward of `p` and at the update that follows it, in strict 1F1B order.

        K − i − 1 more forwards have begun by then, unless the segment has no more of them, and the latest one brought
        its anchor along (`policies.md`, Newest local weights). Where a wave makes one update, it is made on the wave's
        own anchor, whichever stage makes it.
        """
        further = 0 if self._policy.once_per_wave else self.num_stages - stage - 1
        latest = min(p + further, self.last)
        return Version(self._clock(latest), self._newest_through(p))

    def is_update(self, p: int) -> bool:
        """Whether an update follows the backward of `p`."""
        return p % self._minibatches_per_update == 0 or p == self.last

    @property
    def _policy(self) -> Policy:
        return POLICIES[self.weights]

    @property
    def _minibatches_per_update(self) -> int:
        return self.minibatches_per_wave if self._policy.once_per_wave else self.accumulate

    def _clock(self, p: int) -> Clock:
        n, d = self.minibatches_per_wave, self.staleness
        if self.pulls_when_required and d is not None:
            return Clock(pulled_clock(p, minibatches_per_wave=n, staleness=d, start=self.start, weights=self.weights))
        required = required_clock(p, minibatches_per_wave=n, staleness=d, weights=self.weights)
        return Clock(max(self.start, required))

    def _through(self, p: int, stage: int) -> Minibatch:
        return self._updated(self._policy.through(Place(p, stage, self.num_stages, self.minibatches_per_wave)))

    def _newest_through(self, p: int) -> Minibatch:
        return self._updated(p - 1)

    def _updated(self, through: int) -> Minibatch:
        """`through`, or the last one before it after which an update is made, or the barrier."""
        whole = through // self._minibatches_per_update * self._minibatches_per_update
        return Minibatch(max(whole, self.start * self.minibatches_per_wave))
