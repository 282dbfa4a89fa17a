"""The state of one job in one shard process: tensors, and on shard 0 the clock shard with its parts.

A follower thread reads the decision log (its own or, over a `Calls`, the clock shard's), carries each record
out, and acknowledges.
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
from hetpipe.decide.sync.records import EvictRecord, Record, SegmentRecord
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
from hetpipe.values.ids import Incarnation, ShardIndex, VirtualWorkerIndex
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

#: Longest sleep of a follower of its own log before it looks whether it was stopped.
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
        """Begin empty, or with the state of an earlier process.

        Args:
            config: the job.
            history: of this process.
            state: keeps it all on disk; None: it is lost with this process.
            conditions: those of the job in this process, which `state` raises, too; None: of its own.

        Raises:
            StateLost: that state cannot be used.
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

    def evict(self, vw: VirtualWorkerIndex, incarnation: Incarnation) -> None:
        """A life of a virtual worker is over; on the clock shard."""
        own, keeper = self.clock_shard, self.keeper
        keeper.follow(*own.passed())  # the log follower may lag
        if own.evict(vw, incarnation):
            keeper.evict(vw)

    def of_clock_shard(self, part: PartT | None) -> PartT:
        """`part`, which only the clock shard has. Raises ProtocolViolation on any other shard."""
        if part is None:
            raise ProtocolViolation(f"shard {self.config.shard} is not the clock shard; ask shard 0")
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
            clock_transport: how another shard reaches the clock shard, closed by `stop`; None on shard 0.
            clock: paces retries.
            on_lost: called when the state of an earlier process cannot be read any more, and the job is lost here.
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
        """Stop following; the tensors go with the object."""
        self._stopped.set()
        if self._checkpoints is not None:
            self._checkpoints.close()
        if self._keeper is not None:
            self._keeper.close()
        if self._clock_shard is not None:
            with self._clock_shard.bell:
                self._clock_shard.bell.notify_all()
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
        """Folders in which this process keeps something of the job, and bytes that it will write there next.

        That is two checkpoints in the folder of the run, by the newest complete one (with an object store, two of the
        own part), and two snapshots of the weights in the folder for state: while the second is written, the first is
        still there.
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
        """The clock shard serves a later term, which this shard has not been told of, and may never be.

        Whoever configured the clock shard does so here within moments. If it dies in between, nobody else knows that
        this shard lacks the term: what is kept of the old one is worth nothing, and must not pass for the new one's.
        """
        lost = StateLost(f"shard {self.config.shard} was not told of the job's newest term: {error}")
        lost.__cause__ = error
        return lost

    def _caught_up(self) -> None:
        """The first batch holds all that an earlier process may have followed."""
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
        """Do what the newest barrier asks for, in case that an earlier process has not: its record may be old news."""
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
        for vw in self._clock_shard.gone_leavers():
            self.keeper.evict(vw)
        self._checkpoints.take_up(records, self.keeper.adopt)

    @property
    def _durable(self) -> int | None:
        """Records that this shard will not ask for again after a restart; None: it will ask for none."""
        return None if self._state is None else self._state.pushes.durable_records

    @property
    def _is_applied(self) -> bool:
        """Whether what is staged now would be lost with this process."""
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
        if self._keeper is not None and isinstance(record, SegmentRecord | EvictRecord):
            self._keeper.follow(record, self.clock_shard.progress())
        assert self._checkpoints is not None, "it was started"
        self._checkpoints.follow(record)

    @property
    def _asks_again(self) -> bool:
        """Whether to read the last record that is known once more; without a state on disk the log may forget it."""
        return self._state is not None and (self._is_behind or self._last is not None)

    def _new(self, records: Sequence[Record]) -> list[Record]:
        """Those that are not carried out yet.

        Raises:
            StateLost: the one before them is another than it was.
        """
        last = self._last
        if last is not None and any(record.index == last.index and record != last for record in records):
            raise self._log_changed(f"record {last.index} was {last}")
        return [record for record in records if record.index >= self.shard.num_records]

    def _log_changed(self, how: str) -> StateLost:
        return StateLost(
            f"shard {self.config.shard} has followed another decision log than the clock shard has now ({how}): "
            "that one's machine or disk has failed; the job must go back to a checkpoint"
        )

    def _follow_own(self) -> Iterator[Sequence[Record]]:
        """The records of the own log; each batch is acknowledged once it is carried out."""
        own, position = self.clock_shard, self.shard.num_records
        yield own.records_from(position)
        position = self.shard.num_records
        while not self._stopped.is_set():
            own.acknowledge(self.config.shard, position, self._durable, applied=self._is_applied)
            with own.bell:
                while not (records := own.records_from(position)) and not self._stopped.is_set():
                    own.bell.wait(_LOOK_UP_SECONDS)
            position += len(records)
            yield records

    def _report_part(
        self, shard: ShardIndex, clock: ClockValue, files: Sequence[CheckpointFile], *, failure: str = ""
    ) -> bool:
        """Tell the clock shard, elsewhere, of this shard's part of a checkpoint."""
        assert self._transport is not None, "this is the clock shard"
        own = self.config
        request = ReportShardCheckpointRequest(own.job_id, own.term, shard, clock, tuple(files), failure)
        return self._transport.invoke(REPORT_SHARD_CHECKPOINT, request).complete

    def _acknowledge(self, transport: Calls) -> None:
        own, applied = self.config, self._is_applied
        done, durable = self.shard.num_records, self._durable
        transport.invoke(ACKNOWLEDGE, AcknowledgeRequest(own.job_id, own.term, own.shard, done, durable, applied))

    def _follow_remote(self, transport: Calls, clock: Clock) -> Iterator[Sequence[Record]]:
        """The records of the clock shard's log, however often the connection breaks.

        The last record that is known is asked for once more. After a restart there is an answer at once, and that holds
        every record that was there before; after a break it shows whether the log is still the same.
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
                    self._acknowledge(transport)
            except (Unavailable, Busy) as error:
                if not is_away:
                    log.warning("clock shard unreachable, trying again", sentence=str(error))
                is_away = True
                clock.sleep(_RETRY_SECONDS)
