"""What a user may ask of the planner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hetpipe.planner.reach_tables import Recompute
from hetpipe.planner.shard_bytes import PlacementName
from hetpipe.schedule.in_flight import WeightPolicy
from hetpipe.spec.ids import DeviceId

AllocationName = Literal["NP", "ED", "HD", "auto", "explicit", "parallel"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """The choices of `hetpipe plan`, with their defaults."""

    allocation: AllocationName = "auto"
    workers: tuple[tuple[DeviceId, ...], ...] | None = None
    """The devices of each virtual worker; needed by `explicit`, and only there."""
    minibatches_per_wave: int | None = None
    """N; None: the best."""
    placement: PlacementName = "round_robin"
    staleness: int | None = 0
    """D; None: no bound."""
    weights: WeightPolicy = "wave"
    optimizer_slots: int = 0
    """Tensors of parameter size that the optimizer keeps per parameter."""
    recompute: Recompute = "auto"
    reserve_bytes: int = 0
    """What the framework takes on every device."""
    num_shards: int | None = None
    """Parameter-server shards; None: one on each node that computes."""
    max_batch: int | None = None
    """The largest global batch that is safe; needed by `parallel`, and only there."""
