"""Remote followers of a job's decision log, limited in number, excluding evicted incarnations."""

from __future__ import annotations

import math

import grpc

from hetpipe.clock import Clock as TimeSource
from hetpipe.decide.sync.log_view import only_commits, without_implied
from hetpipe.server.shard.clock_shard import ClockShard
from hetpipe.values.bounds import MAX_SHARDS, MAX_STAGES
from hetpipe.values.requests import Requester
from hetpipe.wire.calls import LogRecords
from hetpipe.wire.feeds import Feeds, Outlet

#: Feeds of one job that may follow its log at a time.
MAX_FOLLOWERS = MAX_SHARDS + MAX_STAGES

#: Maximum delay of the end of an evicted follower's feed; and of commits for followers that batch them, in a job of at
#: most so many virtual workers, and in proportion for more. Commits only name who is behind, and each goes to every
#: stage: a stage reads no more of them per second, however many virtual workers there are.
GATHER_SECONDS = 1.0
GATHERED_WORKERS = 20

#: Delay of commits for shards, unless a clock waits for them, and messages to all shards together: many virtual workers
#: commit at about the same time, and each message costs both ends a fraction of a millisecond.
_PACE_SECONDS = 0.01
_MESSAGES_PER_SECOND = 1_000.0


class Followers:
    """Followers of one clock shard: those that get every record at once, and those with batched commits."""

    def __init__(self, own: ClockShard, clock: TimeSource) -> None:
        self._own = own
        self._clock = clock
        #: Feeds of shards are reserved: stages cannot use them up.
        self._shards: Feeds[LogRecords] = Feeds(
            limit=MAX_SHARDS,
            what="the decision log",
            condition=own.condition,
            clock=clock,
            look_seconds=GATHER_SECONDS,
            pace_seconds=_PACE_SECONDS,
            replies_per_second=_MESSAGES_PER_SECOND,
            is_urgent=lambda: own.awaits_shards,
        )
        self._stages: Feeds[LogRecords] = Feeds(
            limit=MAX_STAGES,
            what="the decision log",
            condition=own.stage_condition,
            clock=clock,
            look_seconds=GATHER_SECONDS,
        )
        #: The batches of the newest record: followers at the same position are sent the same object.
        self._batches: dict[tuple[int, bool], LogRecords] = {}
        self._end = 0

    def follow(
        self,
        start: int,
        context: grpc.ServicerContext,
        outlet: Outlet[LogRecords],
        *,
        gathered: bool,
        who: Requester | None,
    ) -> None:
        """Send the records from `start` until the client disconnects, the job ends, or the feed's time limit.

        Args:
            start: see `DecisionLog.records_from`.
            context: context of the call.
            outlet: the way to its client.
            gathered: whether commits are batched into fewer messages, without those that a publication implies.
            who: the following stage, whose older feed ends; None for a shard or an agent.

        Raises:
            StaleIncarnation: the stage's incarnation is over; it ends the feed if it is over later.
            StaleTerm, ProtocolViolation: it belongs to another run, or the records do not exist.
        """
        position, told_at = start, -math.inf

        def take() -> LogRecords | None:
            nonlocal position, told_at
            if who is not None:
                self._own.check_follower(who)
            batch, now = self._batch(position, gathered=gathered), self._clock.monotonic()
            if batch is None or (gathered and now < told_at + self._gather_seconds and only_commits(batch.records)):
                return None
            position, told_at = batch.records[-1].index + 1, now
            return batch

        feeds = self._stages if gathered or who is not None else self._shards
        feeds.open(context, outlet, take, key=who)

    @property
    def _gather_seconds(self) -> float:
        return GATHER_SECONDS * max(1.0, self._own.num_members / GATHERED_WORKERS)

    def _batch(self, start: int, *, gathered: bool) -> LogRecords | None:
        """The records from `start`; None if there are none yet. Called with the log's lock held."""
        end = self._own.num_records
        if end != self._end:
            self._batches, self._end = {}, end
        known = self._batches.get((start, gathered))
        if known is None:
            found = self._own.records_from(start, jumps=gathered)
            records = without_implied(found) if gathered else tuple(found)
            if not records:
                return None
            known = self._batches[start, gathered] = LogRecords(records, acknowledge_later=not self._own.awaits_shards)
        return known

    def close(self) -> None:
        """End all feeds."""
        self._shards.close()
        self._stages.close()
