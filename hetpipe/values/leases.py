"""Leases and heartbeats: how long a process counts as alive without a heartbeat. The only place of these intervals."""

from __future__ import annotations

#: Seconds that a membership lasts without a heartbeat (`--lease` of a coordinator), and heartbeats per lease.
LEASE_SECONDS = 5.0
HEARTBEATS_PER_LEASE = 5

#: Seconds that a lead lasts without renewal (`--leader-lease`): how long the store may be unreachable before a
#: coordinator ends or holds, and how long a successor waits.
LEADER_LEASE_SECONDS = 5.0

#: Seconds after the expiry of a lease until all processes are aware of it.
AFTER_LEASE_SECONDS = 1.5


def heartbeat_seconds(lease_seconds: float) -> float:
    """The interval between heartbeats of a member with such a lease."""
    return lease_seconds / HEARTBEATS_PER_LEASE
