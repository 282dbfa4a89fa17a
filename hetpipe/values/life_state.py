"""Where a virtual worker stands, as the coordinator decides it and people see it."""

from __future__ import annotations

from enum import StrEnum


class LifeState(StrEnum):
    """Where a virtual worker stands."""

    STARTING = "starting"
    """Its stages were told to start."""
    READY = "ready"
    """All of them are linked: it computes, or joins at the next barrier."""
    LEAVING = "leaving"
    """It was asked to go: it computes until the next barrier, and what it did until then counts."""
    DONE = "done"
    """All of them came to the end of the run."""
    ENDING = "ending"
    """It is lost, or sent away with nothing done: the clock shard evicts it, and its processes are ended."""
    AWAITING = "awaiting"
    """Between two lives: for a pause, for its agents, for parameter servers."""
    ADMITTING = "admitting"
    """The clock shard is told of its next life."""
    OUT = "out"
    """It is not started anew, unless somebody asks for it."""


#: States in which processes of the newest life count.
UP = frozenset({LifeState.STARTING, LifeState.READY, LifeState.LEAVING, LifeState.DONE})

#: States in which all its stages are ready and it commits waves.
COMPUTING = frozenset({LifeState.READY, LifeState.LEAVING})

#: The same, and that in which it has computed the last one.
WORKING = COMPUTING | {LifeState.DONE}
