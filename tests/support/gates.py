"""Gates for tests, by the numbers that they depend on."""

from __future__ import annotations

from hetpipe.decide.sync.gate import Gate
from hetpipe.values.ids import Clock
from hetpipe.values.policies import PullTiming, WeightPolicy
from hetpipe.values.sync import SyncSpec


def gate_of(
    minibatches_per_wave: int,
    staleness: int | None = 0,
    *,
    start: int = 0,
    weights: WeightPolicy = "wave",
    deterministic: bool = False,
    pull: PullTiming = "every_wave",
) -> Gate:
    """The gate of a segment that starts at `start`."""
    sync = SyncSpec(minibatches_per_wave, staleness, deterministic=deterministic, weights=weights, pull=pull)
    return Gate(sync, Clock(start))
