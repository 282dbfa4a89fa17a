"""State of a virtual worker, as decided by the coordinator and displayed to users."""

from __future__ import annotations

from enum import StrEnum


class LifeState(StrEnum):
    """State of a virtual worker."""

    STARTING = "starting"
    """Its stages are being started."""
    READY = "ready"
    """All of them are linked: it computes, or joins at the next barrier."""
    LEAVING = "leaving"
    """It is being drained: it computes until the next barrier, and its work until then counts."""
    DONE = "done"
    """All of them have reached the end of the run."""
    ENDING = "ending"
    """It is lost, or was removed before it did any work: the clock shard evicts it, and its processes are ended."""
    AWAITING = "awaiting"
    """Between two incarnations: it waits for a back-off, for its agents, or for parameter servers."""
    ADMITTING = "admitting"
    """The clock shard is being notified of its next incarnation."""
    OUT = "out"
    """It is not restarted, unless requested."""


#: States in which processes of the newest incarnation count.
UP = frozenset({LifeState.STARTING, LifeState.READY, LifeState.LEAVING, LifeState.DONE})

#: States in which all its stages are ready and it commits waves.
COMPUTING = frozenset({LifeState.READY, LifeState.LEAVING})

#: Those, and the state after the last wave.
WORKING = COMPUTING | {LifeState.DONE}
