"""What a coordinator asks of a parameter server."""

from __future__ import annotations

from typing import Protocol

from hetpipe.values.ids import Clock, Incarnation, JobId, Term, VirtualWorkerIndex
from hetpipe.values.run import ClockSnapshot
from hetpipe.values.run_document import RunDescription, RunDocument
from hetpipe.values.shard_config import ShardConfig


class ShardPort(Protocol):
    """The coordinator's side of one shard: `wire.shard_client.ShardControl`. Every call has its own deadline."""

    def configure(self, config: ShardConfig) -> None:
        """Serve a job."""
        ...

    def request_barrier(self, job_id: JobId, term: Term, reason: str) -> Clock:
        """Set a barrier; clock shard only."""
        ...

    def evict(self, job_id: JobId, term: Term, vw: VirtualWorkerIndex, incarnation: Incarnation) -> None:
        """A life of a virtual worker is over; clock shard only. Repeatable."""
        ...

    def admit(
        self, job_id: JobId, term: Term, vw: VirtualWorkerIndex, incarnation: Incarnation, num_stages: int
    ) -> None:
        """A new life of a virtual worker will come; clock shard only. Repeatable."""
        ...

    def drain(self, job_id: JobId, term: Term, vw: VirtualWorkerIndex, incarnation: Incarnation) -> None:
        """A life of a virtual worker is to leave at the next barrier; clock shard only. Repeatable."""
        ...

    def keep_run(self, job_id: JobId, term: Term, run: RunDocument) -> None:
        """Keep what the next coordinator is to be told of the run; clock shard only. Repeatable."""
        ...

    def describe(self, job_id: JobId) -> RunDescription:
        """The run, and what has become of it; clock shard only."""
        ...

    def clocks(self, job_id: JobId) -> ClockSnapshot:
        """The newest clocks; clock shard only."""
        ...

    def release(self, job_id: JobId) -> None:
        """Forget a job; nothing happens when it is not known."""
        ...

    def close(self) -> None:
        """End the connection."""
        ...
