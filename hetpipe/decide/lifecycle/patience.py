"""Timeouts of a job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hetpipe.decide.lifecycle.root_cause import Failure, decision_time
from hetpipe.errors import DeadlineExceeded
from hetpipe.job.file import Job
from hetpipe.values.events import JobState
from hetpipe.values.leases import AFTER_LEASE_SECONDS, LEASE_SECONDS


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """Timeouts of a job, in seconds."""

    inspection_seconds: float = 120.0
    """Silence of the process that imports the user's code, which may load data, and measures layers."""
    preparation_seconds: float = 60.0
    """Planning and shard configuration; each call has a shorter deadline of its own."""
    ready_seconds: float = 120.0
    """Silence of a stage that is starting."""
    stop_seconds: float = 600.0
    """The barrier of a stop; minibatches in flight must complete."""
    exit_seconds: float = 5.0
    """Exit of processes that were ordered to end or have finished."""
    settle_seconds: float = 1.0
    """Wait for a failure closer to the root cause than the first one reported."""
    echo_seconds: float = LEASE_SECONDS + AFTER_LEASE_SECONDS
    """The same while only consequences were reported: the lease of a silently dead process has expired by then."""
    retry_seconds: float = 1.0
    """Retry interval of necessary requests to the clock shard."""
    longest_tick_seconds: float = 2.0
    """Expected interval of ticks; after a longer one the coordinator itself was suspended."""
    notice_seconds: float = 5.0
    """Time until a wait is reported, and between two reports."""
    queue_notice_seconds: float = 60.0
    """Interval of reports of an unchanged position in the queue."""
    adoption_seconds: float = 60.0
    """Wait for a parameter server to report a job without a coordinator; then the job fails."""
    picture_seconds: float = 1.0
    """Interval of progress tables."""

    def of(self, job: Job) -> Patience:
        """A copy with the job's settings."""
        requested = job.patience
        return replace(
            self,
            inspection_seconds=requested.inspection.total_seconds(),
            preparation_seconds=requested.preparation.total_seconds(),
            ready_seconds=requested.ready.total_seconds(),
            stop_seconds=requested.stop.total_seconds(),
        )

    def decision_time(self, failures: Sequence[Failure]) -> float:
        """When to stop waiting for a failure closer to the root cause, in monotonic seconds, after a first failure."""
        return decision_time(failures, settle_seconds=self.settle_seconds, echo_seconds=self.echo_seconds)

    def limit(self, state: JobState, *, is_stopping_now: bool) -> tuple[float, str]:
        """Maximum duration of a state without progress, in seconds, and the name of the error after that."""
        late = DeadlineExceeded.__name__
        match state:
            case JobState.INSPECTING:
                return self.inspection_seconds, late
            case JobState.PLANNING:
                return self.preparation_seconds, late
            case JobState.STARTING:
                return self.ready_seconds, late
            case _:
                return self.exit_seconds if is_stopping_now else self.stop_seconds, late


def patience_for(lease_seconds: float) -> Patience:
    """Default timeouts in a cluster with leases of this duration."""
    return Patience(echo_seconds=lease_seconds + AFTER_LEASE_SECONDS)
