"""Everything one shard process holds for one job: tensors, and on shard 0 the clock shard with what goes with it.

A follower thread reads the decision log (its own or, over a `ClockTransport`, the clock shard's), carries each record
out, and acknowledges.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import structlog

from hetpipe.clock import SYSTEM_CLOCK, Clock
from hetpipe.errors import ProtocolViolation, StaleTerm, Unavailable, UnknownJob
from hetpipe.observe.history import HistoryWriter
from hetpipe.observe.log import bind_context
from hetpipe.ps.buffer_exchange import BufferExchange
from hetpipe.ps.clock_shard import ClockShard
from hetpipe.ps.manifest import CheckpointKeeper
from hetpipe.ps.shard import Shard
from hetpipe.ps.transport import ClockTransport
from hetpipe.spec.run import ShardConfig
from hetpipe.sync.records import Record

log = structlog.get_logger(__name__)

#: Pause before following the log again after it could not be reached.
_RETRY_SECONDS = 0.2

#: Longest sleep of a follower of its own log before it looks whether it was stopped.
_LOOK_UP_SECONDS = 1.0

PartT = TypeVar("PartT")


class JobShard:
    """One job on one shard. `start` begins to follow the log; `stop` ends it."""

    def __init__(self, config: ShardConfig, history: HistoryWriter) -> None:
        self.config = config
        self.shard = Shard(config, history)
        self._clock_shard: ClockShard | None = None
        self._buffers: BufferExchange | None = None
        self._keeper: CheckpointKeeper | None = None
        if config.shard == 0:
            self._clock_shard = ClockShard(config, history)
            self._buffers = BufferExchange(config.membership.members)
            self._keeper = CheckpointKeeper(
                job_id=config.job_id,
                run_dir=Path(config.run_dir),
                membership=config.membership,
                keep=config.checkpoint_keep,
            )
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._transport: ClockTransport | None = None

    @property
    def clock_shard(self) -> ClockShard:
        """The clock shard. Raises ProtocolViolation on any other shard."""
        return self._of_clock_shard(self._clock_shard)

    @property
    def buffers(self) -> BufferExchange:
        """The buffer exchange, on the clock shard."""
        return self._of_clock_shard(self._buffers)

    @property
    def keeper(self) -> CheckpointKeeper:
        """The checkpoint keeper, on the clock shard."""
        return self._of_clock_shard(self._keeper)

    def start(self, clock_transport: ClockTransport | None, clock: Clock = SYSTEM_CLOCK) -> None:
        """Follow the decision log in the background.

        Args:
            clock_transport: how another shard reaches the clock shard, closed by `stop`; None on shard 0.
            clock: paces retries.
        """
        if self._clock_shard is not None:
            batches = self._follow_own()
        else:
            assert clock_transport is not None, "a shard other than 0 needs a way to the clock shard"
            self._transport = clock_transport
            batches = self._follow_remote(clock_transport, clock)
        self._thread = threading.Thread(target=self._run, args=(batches,), name="follow-log", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop following; the tensors go with the object."""
        self._stopped.set()
        if self._clock_shard is not None:
            with self._clock_shard.bell:
                self._clock_shard.bell.notify_all()
        if self._transport is not None:
            self._transport.close()
        if self._thread is not None:
            self._thread.join(timeout=5.0)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _of_clock_shard(self, part: PartT | None) -> PartT:
        if part is None:
            raise ProtocolViolation(f"shard {self.config.shard} is not the clock shard; ask shard 0")
        return part

    def _run(self, batches: Iterator[Sequence[Record]]) -> None:
        bind_context(job=self.config.job_id, shard=self.config.shard)
        try:
            for records in batches:
                for record in records:
                    self.shard.follow(record)
        except (UnknownJob, StaleTerm) as error:
            log.info("the clock shard is done with this job", sentence=str(error))
        except Exception:
            if self._stopped.is_set():
                return  # the connection was closed under it
            log.exception("following the decision log failed; this shard applies nothing more")

    def _follow_own(self) -> Iterator[Sequence[Record]]:
        """The records of the own log; each batch is acknowledged once it is carried out."""
        own, position = self.clock_shard, 0
        while not self._stopped.is_set():
            with own.bell:
                records = own.records_from(position)
                if not records and not self._stopped.is_set():
                    own.bell.wait(_LOOK_UP_SECONDS)
            if records:
                position += len(records)
                yield records
                own.acknowledge(self.config.shard, position)

    def _follow_remote(self, transport: ClockTransport, clock: Clock) -> Iterator[Sequence[Record]]:
        """The records of the clock shard's log, however often the connection breaks."""
        position = 0
        while not self._stopped.is_set():
            try:
                transport.acknowledge(self.config.shard, position)
                for records in transport.follow(position):
                    position += len(records)
                    yield records
                    transport.acknowledge(self.config.shard, position)
            except Unavailable as error:
                log.warning("clock shard unreachable, trying again", sentence=str(error))
                clock.sleep(_RETRY_SECONDS)
