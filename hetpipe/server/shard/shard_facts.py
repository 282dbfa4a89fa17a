"""What a shard tells about itself, for metrics."""

from __future__ import annotations

from dataclasses import dataclass

from hetpipe.values.ids import Clock


@dataclass(slots=True)
class ShardCounts:
    """What a shard has done so far."""

    pushes: int = 0
    """Staged."""
    pushed_bytes: int = 0
    duplicate_pushes: int = 0
    """Of what was staged already."""
    pulls: int = 0
    """Begun."""
    pulled_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardFacts:
    """A shard at one moment."""

    counts: ShardCounts
    followed_records: int
    staged_waves: int
    """First weights among them."""
    published: Clock
    retained_versions: int
    weight_bytes: int
    """Of all buffers in use."""
    staged_clock: Clock
    """Every member's waves below it are here whole, or count."""
    committed_clock: Clock
    """Every member's waves below it count."""
    durable_clock: Clock
    """Every member's waves below it are here after a restart, too; without a log, none is."""
    log_bytes: int
    """Of the write-ahead log of pushes."""
