"""The life of a job, as a table.

`TABLE` is the whole truth: a step that a state's row does not name is illegal there, and there is no fallback. A job
only moves through `Lifecycle.take`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from enum import StrEnum

from hetpipe.errors import InvalidTransition
from hetpipe.values.events import JobState


class JobStep(StrEnum):
    """What can happen to a job."""

    CLUSTER_LACKS = "cluster_lacks"
    """Too few devices or shards are free, or another job goes first; or an agent of the job was told to end."""
    CLUSTER_READY = "cluster_ready"
    """Enough devices and shards are there and are claimed."""
    INSPECTED = "inspected"
    """The model is known."""
    PREPARED = "prepared"
    """The plan is made and every shard is configured."""
    ALL_READY = "all_ready"
    """Every stage is linked with its neighbours and about to compute."""
    STOP_ASKED = "stop_asked"
    """A user wants it to stop, for the first time or again."""
    END_REACHED = "end_reached"
    """All stages came to the planned end."""
    STOP_REACHED = "stop_reached"
    """All stages stopped because they were asked to."""
    REWIND = "rewind"
    """What it was trained since its newest checkpoint is lost: it goes back to that. One that is to stop ends there."""
    FAIL = "fail"
    """Something went wrong."""


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

#: Steps an illegal one tells of.
_STORY_LENGTH = 12


class Lifecycle:
    """One job's state and the recent story of how it came there."""

    def __init__(self, name: str, state: JobState = JobState.SUBMITTED) -> None:
        """Begin at the beginning, or where another coordinator has left the job."""
        self._name = name
        self._story: deque[str] = deque(maxlen=_STORY_LENGTH)
        #: Where the job stands; changed by `take` alone.
        self.state = state

    def take(self, step: JobStep, *, now: float) -> JobState:
        """Make `step` at monotonic second `now`.

        Raises:
            InvalidTransition: the table has no such step; the message tells the recent story. The state stays.
        """
        following = TABLE[self.state].get(step)
        if following is None:
            story = ", ".join(self._story) or "nothing has happened yet"
            raise InvalidTransition(f"job {self._name} cannot take {step} when it is {self.state}; its story: {story}")
        self._story.append(f"{self.state} --{step}--> {following} at {now:.1f} s")
        self.state = following
        return following
