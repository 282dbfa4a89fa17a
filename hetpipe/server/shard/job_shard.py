"""The state of one job in one shard process: tensors, and on shard 0 the clock shard with its parts.

A follower thread reads the decision log (its own or, over a `Calls`, the clock shard's), executes each record, and
acknowledges it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import structlog

from hetpipe.checkpoint.keeper import CheckpointKeeper
from hetpipe.checkpoint.shard_part import ShardCheckpoints
from hetpipe.checkpoint.store import store_of
from hetpipe.clock import SYSTEM_CLOCK, Clock
from hetpipe.conditions import Conditions
from hetpipe.decide.sync.decision_log import FROM_NEWEST_SEGMENT
from hetpipe.decide.sync.records import EvictRecord, HandoverRecord, Record, SegmentRecord
from hetpipe.decide.sync.segment import ends_run
from hetpipe.errors import Busy, HistoryIncomplete, ProtocolViolation, StaleTerm, StateLost, Unavailable, UnknownJob
from hetpipe.observe.history import HistoryWriter
from hetpipe.observe.log import bind_context
from hetpipe.server.shard.buffer_exchange import BufferExchange
from hetpipe.server.shard.clock_shard import ClockShard
from hetpipe.server.shard.job_storage import AckLevel, JobStorage
from hetpipe.server.shard.shard import Shard
from hetpipe.values.conditions import ConditionKind
from hetpipe.values.ids import Clock as ClockValue
from hetpipe.values.ids import ShardIndex
from hetpipe.values.plan import DTYPE_BYTES
from hetpipe.values.requests import CheckpointFile
from hetpipe.values.shard_config import ShardConfig, shard_name
from hetpipe.weights.flat import FlatBuffer
from hetpipe.wire.call import Calls
from hetpipe.wire.calls import (
    ACKNOWLEDGE,
    FOLLOW_LOG,
    REPORT_SHARD_CHECKPOINT,
    AcknowledgeRequest,
    FollowLogRequest,
    ReportShardCheckpointRequest,
)

log = structlog.get_logger(__name__)

#: Pause before following the log again after it could not be reached.
_RETRY_SECONDS = 0.2

#: Polling interval of a follower of its own log for the stop.
_LOOK_UP_SECONDS = 1.0

PartT = TypeVar("PartT")


class JobShard:
    """One job on one shard. `start` begins to follow the log; `stop` ends it."""

    def __init__(
        self,
        config: ShardConfig,
        history: HistoryWriter,
        state: JobStorage | None = None,
        conditions: Conditions | None = None,
    ) -> None:
        """Start empty, or restore the state of an earlier process.

        Args:
            config: configuration of the job.
            history: history of this process.
            state: persists the shard on disk; None: no persistence.
            conditions: conditions of the job in this process, shared with `state`; None: private ones.

        Raises:
            StateLost: the state cannot be restored.
        """
        self.config = config
        self._state = state
        #: The conditions of the job in this process.
        self.conditions = conditions or Conditions()
        history.on_alarm(self._history_ends)
        history = history if state is None else state.history
        self.shard = Shard(config, history, None if state is None else state.pushes)
        self._clock_shard: ClockShard | None = None
        self._buffers: BufferExchange | None = None
        self._keeper: CheckpointKeeper | None = None
        if config.shard == 0:
            journal, decisions = (None, None) if state is None else (state.journal, state.recovered_decisions)
            keeper = CheckpointKeeper(
                job_id=config.job_id,
                store=store_of(config.run_dir, config.storage),
                num_shards=config.num_shards,
                keep=config.checkpoint_keep,
                last_checkpoint_seconds=config.last_checkpoint_seconds,
                conditions=self.conditions,
            )
            self._clock_shard = ClockShard(
                config,
                history,
                journal,
                decisions,
                newest_checkpoint=lambda: keeper.newest_complete or config.progress.clock,
            )
            self._buffers = BufferExchange(self._clock_shard.attendance, None if state is None else state.buffers)
            self._keeper = keeper
        if state is not None and state.recovered_pushes is not None:
            self.shard.restore(state.recovered_pushes)
        #: Whether this process still replays records of an earlier one.
        self._is_behind = state is not None and state.recovered_pushes is not None
        #: Whether the work of the last barrier before the restart is still to be done.
        self._is_checkpoint_open = False
        #: The last record executed; None before the first.
        self._last: Record | None = None
        #: What the clock shard was last told of `_is_applied`.
        self._was_applied = False
        #: Whether the run's last barrier is passed.
        self._is_over = False
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._transport: Calls | None = None
        self._checkpoints: ShardCheckpoints[FlatBuffer] | None = None

    @property
    def clock_shard(self) -> ClockShard:
        """The clock shard. Raises ProtocolViolation on any other shard."""
        return self.of_clock_shard(self._clock_shard)

    @property
    def buffers(self) -> BufferExchange:
        """The buffer exchange, on the clock shard."""
        return self.of_clock_shard(self._buffers)

    @property
    def keeper(self) -> CheckpointKeeper:
        """The checkpoint keeper, on the clock shard."""
        return self.of_clock_shard(self._keeper)

    def of_clock_shard(self, part: PartT | None) -> PartT:
        """Return `part`, which only the clock shard has. Raises ProtocolViolation on any other shard."""
        if part is None:
            raise ProtocolViolation(f"shard {self.config.shard} is not the clock shard; send the request to shard 0")
        return part

    def start(
        self,
        clock_transport: Calls | None,
        clock: Clock = SYSTEM_CLOCK,
        *,
        on_lost: Callable[[StateLost], None] = lambda _: None,
    ) -> None:
        """Follow the decision log in the background.

        Args:
            clock_transport: connection to the clock shard, closed by `stop`; None on shard 0.
            clock: paces retries.
            on_lost: called when the state of an earlier process has become unreadable, and the job is lost here.
        """
        self._on_lost = on_lost
        if self._clock_shard is not None:
            batches = self._follow_own()
            self._checkpoints = ShardCheckpoints(self.shard, self.keeper.report_shard, clock)
        else:
            assert clock_transport is not None, "a shard other than 0 needs a way to the clock shard"
            self._transport = clock_transport
            batches = self._follow_remote(clock_transport, clock)
            self._checkpoints = ShardCheckpoints(self.shard, self._report_part, clock)
        self._thread = threading.Thread(target=self._run, args=(batches,), name="follow-log", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop following; the tensors are freed with the object."""
        self._stopped.set()
        if self._checkpoints is not None:
            self._checkpoints.close()
        if self._keeper is not None:
            self._keeper.close()
        if self._clock_shard is not None:
            with self._clock_shard.condition:
                self._clock_shard.condition.notify_all()
        if self._transport is not None:
            self._transport.close()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=5.0)
        if self._state is not None and self._is_over:
            self._state.delete()
        elif self._state is not None:
            self._state.close()

    def forget(self) -> None:
        """Stop, and delete the state on disk."""
        self._is_over = True
        self.stop()

    def disk_needs(self) -> dict[Path, int]:
        """Folders in which this process stores data of the job, and the bytes it will write there next.

        These are two checkpoints in the run's folder, sized as the newest complete one (with an object store, two of
        the own part), and two snapshots of the weights in the state folder: the first is kept while the second is
        written.
        """
        own_bytes = sum((s.stop - s.start) * DTYPE_BYTES[s.parameter.dtype] for s in self.config.slices)
        is_shared = self._keeper is not None and self.config.storage is None
        checkpoint = own_bytes if self._keeper is None or not is_shared else max(self._keeper.newest_bytes, own_bytes)
        needs = {Path(self.config.run_dir): 2 * checkpoint}
        return needs if self._state is None else {**needs, self._state.root: 2 * own_bytes}

    # -- inside ------------------------------------------------------------------------------------------------------

    def _history_ends(self, alarm: HistoryIncomplete) -> None:
        self.conditions.raise_(ConditionKind.HISTORY_INCOMPLETE, shard_name(self.config.shard), str(alarm))

    def _run(self, batches: Iterator[Sequence[Record]]) -> None:
        bind_context(job=self.config.job_id, shard=self.config.shard)
        try:
            for records in batches:
                for record in records:
                    self._carry_out(record)
                self._caught_up()
        except UnknownJob as error:
            log.info("the clock shard is done with this job", sentence=str(error))
        except StaleTerm as error:
            self._on_lost(self._term_over(error))
        except StateLost as error:
            self._on_lost(error)
        except ProtocolViolation as error:
            self._on_lost(self._log_changed(str(error)))
        except Exception:
            if self._stopped.is_set():
                return  # the connection was closed under it
            log.exception("following the decision log failed; this shard applies nothing more")

    def _term_over(self, error: StaleTerm) -> StateLost:
        """Handle a later term of the clock shard for which this shard has not been configured, and may never be.

        The coordinator that configured the clock shard configures this shard moments later. If it dies in between, no
        other process knows that this shard lacks the term: state of the old term must not be mistaken for the new
        one's.
        """
        lost = StateLost(f"shard {self.config.shard} was not configured for the job's newest term: {error}")
        lost.__cause__ = error
        return lost

    def _caught_up(self) -> None:
        """Handle the end of the first batch, which has all records that an earlier process may have followed."""
        if self._is_behind:
            self._is_behind = False
            self.shard.caught_up()
            if self._state is not None:
                self._state.caught_up()
            log.info("recovered", followed_records=self.shard.num_records)
            self._is_checkpoint_open = True
        if self._is_checkpoint_open:
            with suppress(Unavailable):  # then after the next batch
                self._take_up_checkpoint()
                self._is_checkpoint_open = False

    def _take_up_checkpoint(self) -> None:
        """Start the newest barrier's checkpoint if an earlier process has not: its record may be old."""
        assert self._checkpoints is not None, "it was started"
        if self._clock_shard is None:
            assert self._transport is not None, "a shard other than 0 has a way to the clock shard"
            request = FollowLogRequest(self.config.job_id, self.config.term, FROM_NEWEST_SEGMENT)
            found = next(iter(self._transport.stream(FOLLOW_LOG, request)), None)
            self._checkpoints.take_up(() if found is None else found.records)
            return
        records = self._clock_shard.records_from(FROM_NEWEST_SEGMENT)
        for record in records:
            self.keeper.follow(record, self._clock_shard.progress())
        self._checkpoints.take_up(records, self.keeper.adopt)

    @property
    def _durable(self) -> int | None:
        """Number of records that a restart does not need; None: a restart reads no records."""
        return None if self._state is None else self._state.pushes.durable_records

    @property
    def _is_applied(self) -> bool:
        """Whether staged waves would be lost with this process (level `applied`)."""
        return self._state is None or self._state.level is AckLevel.APPLIED

    def _carry_out(self, record: Record) -> None:
        self.shard.follow(record)
        self._last = record
        if isinstance(record, SegmentRecord) and ends_run(record.reasons):
            self._is_over = True
        if isinstance(record, SegmentRecord) and self._state is not None:
            self._state.try_again()
        if self._is_behind:
            return  # an earlier process wrote the checkpoints of old barriers; the newest is taken up afterwards
        if self._keeper is not None and isinstance(record, SegmentRecord | EvictRecord | HandoverRecord):
            self._keeper.follow(record, self.clock_shard.progress())
        assert self._checkpoints is not None, "it was started"
        self._checkpoints.follow(record)

    @property
    def _asks_again(self) -> bool:
        """Whether to reread the last known record; without state on disk the log may truncate it."""
        return self._state is not None and (self._is_behind or self._last is not None)

    def _new(self, records: Sequence[Record]) -> list[Record]:
        """The records not executed yet.

        Raises:
            StateLost: the record before them has changed.
        """
        last = self._last
        if last is not None and any(record.index == last.index and record != last for record in records):
            raise self._log_changed(f"record {last.index} was {last}")
        return [record for record in records if record.index >= self.shard.num_records]

    def _log_changed(self, how: str) -> StateLost:
        return StateLost(
            f"shard {self.config.shard} has followed another decision log than the clock shard's current one ({how}): "
            "the clock shard's machine or disk has failed; the job must be rewound to a checkpoint"
        )

    def _follow_own(self) -> Iterator[Sequence[Record]]:
        """Follow the own log; a batch is acknowledged once executed if a clock may wait for that."""
        own, position = self.clock_shard, self.shard.num_records
        yield own.records_from(position)
        position = self.shard.num_records
        while not self._stopped.is_set():
            if own.awaits_shards or self._is_applied != self._was_applied:
                self._was_applied = self._is_applied
                own.acknowledge(self.config.shard, position, self._durable, applied=self._was_applied)
            with own.condition:
                while not (records := own.records_from(position)) and not self._stopped.is_set():
                    own.condition.wait(_LOOK_UP_SECONDS)
            position += len(records)
            yield records

    def _report_part(
        self, shard: ShardIndex, clock: ClockValue, files: Sequence[CheckpointFile], *, failure: str = ""
    ) -> bool:
        """Report this shard's part of a checkpoint to the remote clock shard."""
        assert self._transport is not None, "this is the clock shard"
        own = self.config
        request = ReportShardCheckpointRequest(own.job_id, own.term, shard, clock, tuple(files), failure)
        return self._transport.invoke(REPORT_SHARD_CHECKPOINT, request).complete

    def _acknowledge(self, transport: Calls) -> None:
        own, applied = self.config, self._is_applied
        self._was_applied = applied
        done, durable = self.shard.num_records, self._durable
        transport.invoke(ACKNOWLEDGE, AcknowledgeRequest(own.job_id, own.term, own.shard, done, durable, applied))

    def _follow_remote(self, transport: Calls, clock: Clock) -> Iterator[Sequence[Record]]:
        """Follow the clock shard's log, across reconnects.

        The last known record is requested again. After a restart the reply is immediate and has every record from
        before; after a disconnect it shows whether the log is still the same.
        """
        is_away = False
        while not self._stopped.is_set():
            position = self.shard.num_records
            try:
                self._acknowledge(transport)
                is_away = False
                start = max(0, position - 1) if self._asks_again else position
                request = FollowLogRequest(self.config.job_id, self.config.term, start)
                for found in transport.stream(FOLLOW_LOG, request):
                    yield self._new(found.records)
                    if not found.acknowledge_later or self._is_applied != self._was_applied:
                        self._acknowledge(transport)
            except (Unavailable, Busy) as error:
                if not is_away:
                    log.warning("clock shard unreachable, trying again", sentence=str(error))
                is_away = True
                clock.sleep(_RETRY_SECONDS)
