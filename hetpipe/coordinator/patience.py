"""How long a job waits for what."""

from __future__ import annotations

from dataclasses import dataclass

#: Seconds a membership lasts without a heartbeat, and between two heartbeats.
LEASE_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """Bounds of a job's waits, in seconds."""

    members_seconds: float = 30.0
    """For enough devices and shards."""
    inspection_seconds: float = 120.0
    """For the import of the user's code, which may load data, and for each layer that is measured."""
    preparation_seconds: float = 60.0
    """For the plan and the shards; each call has a shorter deadline of its own."""
    ready_seconds: float = 120.0
    """For all stages to link up."""
    stop_seconds: float = 600.0
    """For the barrier of a stop; minibatches under way must finish."""
    exit_seconds: float = 5.0
    """For processes that were told to end, or have come to their end."""
    settle_seconds: float = 1.0
    """For a failure nearer to the cause than the first one heard."""
    echo_seconds: float = LEASE_SECONDS + 1.5
    """The same while only echoes were heard: whoever died silently has lost its lease by then."""
    notice_seconds: float = 5.0
    """Until a wait is told, and between two such notices."""
    picture_seconds: float = 1.0
    """Between two progress tables."""
