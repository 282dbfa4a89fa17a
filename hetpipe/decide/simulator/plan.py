"""The simulator's input: the part of a plan that affects time."""

from __future__ import annotations

from dataclasses import dataclass

from hetpipe.decide.planner.shard_bytes import PlacedParameters
from hetpipe.values.ids import DeviceId
from hetpipe.values.memory import LayerPolicy


@dataclass(frozen=True, slots=True)
class SimulatedStage:
    """Consecutive layers [first, last) on one device."""

    device: DeviceId
    kind: str
    """The device's type."""
    first: int
    last: int
    recompute: bool = False
    memory: tuple[LayerPolicy, ...] = ()
    """Memory policy of each layer, if chosen per layer; empty: as `recompute` says."""
    policy_ticks: int = 0
    """Time per minibatch that these policies add to forward and backward."""


@dataclass(frozen=True, slots=True)
class SimulatedPlan:
    """Stages, devices and shards."""

    workers: tuple[tuple[SimulatedStage, ...], ...]
    """The stages of each virtual worker, first stage first."""
    minibatches_per_wave: tuple[int, ...]
    """N_v of each virtual worker."""
    placed: PlacedParameters
    """Parameters on each shard; without shards nothing is pushed or pulled."""
