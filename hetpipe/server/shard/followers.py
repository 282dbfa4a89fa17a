"""Remote followers of a job's decision log, limited in number, excluding evicted incarnations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import grpc

from hetpipe.clock import Clock as TimeSource
from hetpipe.decide.sync.records import Record
from hetpipe.server.shard.clock_shard import ClockShard
from hetpipe.values.bounds import MAX_SHARDS, MAX_STAGES
from hetpipe.values.requests import Requester
from hetpipe.wire.watchers import Watchers

#: Streams of one job that may follow its log at a time.
MAX_FOLLOWERS = MAX_SHARDS + MAX_STAGES

#: Maximum delay of commits for followers that batch them, and of the end of an evicted follower's stream.
GATHER_SECONDS = 1.0


class Followers:
    """Followers of one clock shard: those that get every record at once, and those with batched commits."""

    def __init__(self, own: ClockShard, clock: TimeSource) -> None:
        self._own = own
        self._watchers = {
            gathered: Watchers(limit=limit, what="the decision log", condition=condition, clock=clock)
            for gathered, limit, condition in (
                (False, MAX_SHARDS, own.condition),
                (True, MAX_STAGES, own.stage_condition),
            )
        }

    def follow(
        self, start: int, context: grpc.ServicerContext, *, gathered: bool, who: Requester | None
    ) -> Iterator[Sequence[Record]]:
        """Stream the records from `start` until the client disconnects, the job ends, or the stream's time limit.

        Args:
            start: see `DecisionLog.records_from`.
            context: context of the call.
            gathered: whether commits are batched into fewer messages.
            who: the following stage; None for a shard.

        Raises:
            StaleIncarnation: the stage's incarnation is over, possibly only since the stream began.
            StaleTerm, ProtocolViolation: it belongs to another run, or the records do not exist.
        """
        position = start

        def after() -> Sequence[Record] | None:
            if who is not None:
                self._own.check_follower(who)
            return self._own.records_from(position, jumps=gathered) or None

        after()  # an invalid position is rejected before any wait
        # Streams of shards are reserved: stages cannot use them up.
        with self._watchers[gathered or who is not None].watch(context) as watch:
            while (records := watch.wait(after, look_seconds=GATHER_SECONDS)) is not None:
                position = records[-1].index + 1
                yield records

    def close(self) -> None:
        """End all streams."""
        for watchers in self._watchers.values():
            watchers.close()
