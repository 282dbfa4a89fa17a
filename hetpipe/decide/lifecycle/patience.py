"""How long a job waits for what."""

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
    """Bounds of a job's waits, in seconds."""

    inspection_seconds: float = 120.0
    """For a word of the process that imports the user's code, which may load data, and measures layers."""
    preparation_seconds: float = 60.0
    """For the plan and the shards; each call has a shorter deadline of its own."""
    ready_seconds: float = 120.0
    """For a word of a stage that is to link up."""
    stop_seconds: float = 600.0
    """For the barrier of a stop; minibatches under way must finish."""
    exit_seconds: float = 5.0
    """For processes that were told to end, or have come to their end."""
    settle_seconds: float = 1.0
    """For a failure nearer to the cause than the first one heard."""
    echo_seconds: float = LEASE_SECONDS + AFTER_LEASE_SECONDS
    """The same while only echoes were heard: whoever died silently has lost its lease by then."""
    retry_seconds: float = 1.0
    """Between two attempts to ask the clock shard for something that must be."""
    longest_tick_seconds: float = 2.0
    """Between two ticks; after more the coordinator itself was not there to hear anybody."""
    notice_seconds: float = 5.0
    """Until a wait is told, and between two such notices."""
    queue_notice_seconds: float = 60.0
    """Between two notices of a place in the queue that has not changed."""
    adoption_seconds: float = 60.0
    """For a parameter server that tells of a job whose coordinator is gone; then the job has failed."""
    picture_seconds: float = 1.0
    """Between two progress tables."""

    def of(self, job: Job) -> Patience:
        """The same with what the job says."""
        asked = job.patience
        return replace(
            self,
            inspection_seconds=asked.inspection.total_seconds(),
            preparation_seconds=asked.preparation.total_seconds(),
            ready_seconds=asked.ready.total_seconds(),
            stop_seconds=asked.stop.total_seconds(),
        )

    def decision_time(self, failures: Sequence[Failure]) -> float:
        """When to stop listening for a nearer cause, in monotonic seconds, given at least one failure."""
        return decision_time(failures, settle_seconds=self.settle_seconds, echo_seconds=self.echo_seconds)

    def limit(self, state: JobState, *, is_stopping_now: bool) -> tuple[float, str]:
        """How long a state may last without progress, in seconds, and the error's name after that."""
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
    """The usual patience in a cluster with such leases."""
    return Patience(echo_seconds=lease_seconds + AFTER_LEASE_SECONDS)
