"""The lifecycle of a job, as a transition table.

`TABLE` defines all transitions: a step that is not in a state's row is illegal, and there is no fallback. The state
changes only through `Lifecycle.take`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from enum import StrEnum

from hetpipe.errors import InvalidTransition
from hetpipe.values.events import JobState


class JobStep(StrEnum):
    """Events of a job."""

    CLUSTER_LACKS = "cluster_lacks"
    """Too few devices or shards are free, or another job is ahead; or an agent of the job is shutting down."""
    CLUSTER_READY = "cluster_ready"
    """Enough devices and shards are available and claimed."""
    INSPECTED = "inspected"
    """The model is known."""
    PREPARED = "prepared"
    """The plan is made and every shard is configured."""
    ALL_READY = "all_ready"
    """Every stage is linked with its neighbours and about to compute."""
    STOP_ASKED = "stop_asked"
    """A user requests a stop, for the first time or again."""
    END_REACHED = "end_reached"
    """All stages reached the planned end."""
    STOP_REACHED = "stop_reached"
    """All stages stopped on request."""
    REWIND = "rewind"
    """Progress since its newest checkpoint is lost: it is rewound. One with a pending stop ends there."""
    FAIL = "fail"
    """A failure."""


_S = JobState

TABLE: Mapping[JobState, Mapping[JobStep, JobState]] = {
    _S.SUBMITTED: {
        JobStep.CLUSTER_LACKS: _S.PENDING,
        JobStep.CLUSTER_READY: _S.INSPECTING,
        JobStep.STOP_ASKED: _S.STOPPING,
        JobStep.FAIL: _S.FAILED,
    },
    _S.PENDING: {JobStep.CLUSTER_READY: _S.INSPECTING, JobStep.STOP_ASKED: _S.STOPPING, JobStep.FAIL: _S.FAILED},
    _S.INSPECTING: {
        JobStep.CLUSTER_LACKS: _S.PENDING,
        JobStep.INSPECTED: _S.PLANNING,
        JobStep.STOP_ASKED: _S.STOPPING,
        JobStep.FAIL: _S.FAILED,
    },
    _S.PLANNING: {JobStep.PREPARED: _S.STARTING, JobStep.STOP_ASKED: _S.STOPPING, JobStep.FAIL: _S.FAILED},
    _S.STARTING: {
        JobStep.ALL_READY: _S.RUNNING,
        JobStep.STOP_ASKED: _S.STOPPING,
        JobStep.REWIND: _S.PLANNING,
        JobStep.FAIL: _S.FAILED,
    },
    _S.RUNNING: {
        JobStep.STOP_ASKED: _S.STOPPING,
        JobStep.REWIND: _S.PLANNING,
        JobStep.END_REACHED: _S.FINISHED,
        JobStep.STOP_REACHED: _S.STOPPED,
        JobStep.FAIL: _S.FAILED,
    },
    _S.STOPPING: {
        JobStep.STOP_ASKED: _S.STOPPING,
        JobStep.END_REACHED: _S.FINISHED,
        JobStep.STOP_REACHED: _S.STOPPED,
        JobStep.REWIND: _S.STOPPED,
        JobStep.FAIL: _S.FAILED,
    },
    _S.FINISHED: {},
    _S.STOPPED: {},
    _S.FAILED: {},
}

#: Steps listed in the message of an illegal one.
_STORY_LENGTH = 12


class Lifecycle:
    """State and recent history of one job."""

    def __init__(self, name: str, state: JobState = JobState.SUBMITTED) -> None:
        """Start in the initial state, or in the state left by another coordinator."""
        self._name = name
        self._story: deque[str] = deque(maxlen=_STORY_LENGTH)
        #: Current state; changed by `take` only.
        self.state = state

    def take(self, step: JobStep, *, now: float) -> JobState:
        """Apply `step` at monotonic second `now`.

        Raises:
            InvalidTransition: the table has no such step; the message contains the recent history. The state is
                unchanged.
        """
        following = TABLE[self.state].get(step)
        if following is None:
            story = ", ".join(self._story) or "nothing has happened yet"
            raise InvalidTransition(f"job {self._name} cannot take {step} when it is {self.state}; its story: {story}")
        self._story.append(f"{self.state} --{step}--> {following} at {now:.1f} s")
        self.state = following
        return following
