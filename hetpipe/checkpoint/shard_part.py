"""A shard's part of checkpoints: its slices of w^(c), written in the background while training continues.

The weights of a checkpoint come from the shards rather than the stages, so they are available whichever stage dies
after the barrier. A version being written is held, so at most `MAX_SETS` additional versions are kept in memory. If
another checkpoint falls due while the disk is still busy with these, the shard skips it, and the run loses that
checkpoint.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from torch import Tensor

from hetpipe.checkpoint.format import save_slices
from hetpipe.checkpoint.keeper import MAX_SETS
from hetpipe.checkpoint.layout import PartLabel, StoredSlice, shard_file
from hetpipe.checkpoint.manifest import file_digest, read_label
from hetpipe.checkpoint.store import CheckpointStore, store_of
from hetpipe.clock import SYSTEM_CLOCK
from hetpipe.clock import Clock as TimeSource
from hetpipe.decide.sync.records import Record, SegmentRecord
from hetpipe.decide.sync.segment import CHECKPOINTS, ends_run
from hetpipe.errors import Busy, CheckpointError, CheckpointNotWritten, ClockFreed, HetpipeError, Unavailable
from hetpipe.observe.log import bind_context, get_logger
from hetpipe.storage.objects import RETRY_SECONDS
from hetpipe.values.ids import Clock, ShardIndex
from hetpipe.values.requests import CheckpointFile
from hetpipe.values.shard_config import ShardConfig

_log = get_logger(__name__)

_TOO_SLOW = (
    "older ones have not been written yet: the disk, or the object store, is too slow; increase checkpoint.every_waves"
)

#: Pause before repeating a report to an unreachable clock shard.
_RETRY_SECONDS = 0.2

#: Pause before retrying to write a part of the run's last checkpoint.
_WRITE_AGAIN_SECONDS = 1.0


class HeldWeights(Protocol):
    """A published version that is neither changed nor freed while it is held."""

    @property
    def views(self) -> Mapping[str, Tensor]:
        """Slices by `SlicePlan.name` → elements, flattened."""
        ...


W = TypeVar("W", bound=HeldWeights)


class CheckpointedShard(Protocol[W]):
    """The shard whose weights are written."""

    @property
    def config(self) -> ShardConfig:
        """Its configuration: slices and run folder."""
        ...

    def hold(self, clock: Clock) -> W:
        """Hold w^(clock), to be released once.

        Raises:
            ClockFreed: it has been freed.
        """
        ...

    def release(self, weights: W) -> None:
        """Release a held version."""
        ...


class ReportShardPart(Protocol):
    """Reports a shard's part to the clock shard (`wire.calls.ReportShardCheckpointRequest`)."""

    def __call__(self, shard: ShardIndex, clock: Clock, files: Sequence[CheckpointFile], *, failure: str = "") -> bool:
        """Report; returns whether all parts are complete."""
        ...


class ShardCheckpoints(Generic[W]):
    """Writes one shard's parts and reports them. `follow` is called by the thread that follows the log."""

    def __init__(
        self,
        shard: CheckpointedShard[W],
        report: ReportShardPart,
        clock: TimeSource = SYSTEM_CLOCK,
        store: CheckpointStore | None = None,
    ) -> None:
        """Write parts of `shard`; `clock` paces repeated reports. `store`: the run's; None: by its configuration."""
        self._shard = shard
        self._store = store or store_of(shard.config.run_dir, shard.config.storage)
        self._report = report
        self._clock = clock
        self._stopped = threading.Event()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._lock = threading.Lock()
        self._num_waiting = 0
        self._name = shard_file(shard.config.shard)

    def follow(self, record: Record) -> None:
        """Start writing if the record passes a barrier with a checkpoint."""
        if isinstance(record, SegmentRecord) and CHECKPOINTS.intersection(record.reasons):
            self._begin(record.start, is_last=ends_run(record.reasons))

    def take_up(self, records: Sequence[Record], adopt: Callable[[], None] | None = None) -> None:
        """After a restart, write the newest barrier's checkpoint unless it is complete.

        Args:
            records: of the log, from that barrier's record on, which an earlier process may have followed already.
            adopt: on the clock shard, counts the parts that others have written in the meantime.
        """
        for record in records[:1]:
            if not isinstance(record, SegmentRecord) or not self._store.is_complete(record.start):
                self.follow(record)
        if adopt is not None:
            self._writer.submit(adopt)

    def close(self) -> None:
        """Stop writing and reporting."""
        self._stopped.set()
        self._writer.shutdown(wait=False, cancel_futures=True)

    # -- internals ----------------------------------------------------------------------------------------------------

    def _begin(self, clock: Clock, *, is_last: bool) -> None:
        patience = self._shard.config.last_checkpoint_seconds if is_last else 0.0
        until = self._clock.monotonic() + patience
        with self._lock:
            is_late = self._num_waiting >= MAX_SETS and not is_last
            self._num_waiting += 1
        weights: W | CheckpointNotWritten
        try:
            weights = CheckpointNotWritten(_TOO_SLOW) if is_late else self._shard.hold(clock)
        except ClockFreed as error:
            weights = CheckpointNotWritten(str(error))
        self._writer.submit(self._write, clock, weights, until)

    def _write(self, clock: Clock, weights: W | CheckpointNotWritten, until: float) -> None:
        """Write a part on the writer's thread and release `weights`. An error in their place is reported instead.

        A failed write is retried `until` that time.
        """
        bind_context(job=self._shard.config.job_id, shard=self._shard.config.shard)
        try:
            self._save_and_report(clock, weights, until)
        except CheckpointNotWritten as error:
            _log.error("checkpoint_not_written", error=type(error).__name__, clock=clock, reason=str(error))
        except (HetpipeError, OSError) as error:
            _log.warning("checkpoint_not_reported", clock=clock, reason=str(error))
        finally:
            with self._lock:
                self._num_waiting -= 1

    def _save_and_report(self, clock: Clock, weights: W | CheckpointNotWritten, until: float) -> None:
        folder, label = self._store.folder(clock), PartLabel(self._shard.config.job_id, clock, self._name)
        try:
            try:
                if not self._is_written(folder / label.name, label):
                    self._save(folder, label, weights, until)
            finally:
                if not isinstance(weights, CheckpointNotWritten):
                    self._shard.release(weights)
            file = file_digest(folder / label.name)
            left = until - self._clock.monotonic()
            self._store.deliver(clock, file, retry_seconds=max(RETRY_SECONDS, left))
        except CheckpointNotWritten as error:
            self._report_files(clock, [], failure=str(error))
            raise
        self._report_files(clock, [file])

    @staticmethod
    def _is_written(path: Path, label: PartLabel) -> bool:
        """Whether an earlier process has written it, and possibly reported it."""
        try:
            return path.exists() and read_label(path) == label
        except CheckpointError:
            return False

    def _save(self, folder: Path, label: PartLabel, weights: W | CheckpointNotWritten, until: float) -> None:
        if isinstance(weights, CheckpointNotWritten):
            raise weights
        pieces = [
            (StoredSlice(s.parameter.name, s.start, s.stop, s.parameter.shape), weights.views[s.name])
            for s in self._shard.config.slices
        ]
        while True:
            try:
                save_slices(folder, label, pieces)
            except CheckpointNotWritten as error:
                if self._clock.monotonic() >= until or self._stopped.is_set():
                    raise
                _log.warning("checkpoint_waits_for_room", clock=label.clock, reason=str(error))
                self._clock.sleep(_WRITE_AGAIN_SECONDS)
            else:
                return

    def _report_files(self, clock: Clock, files: Sequence[CheckpointFile], *, failure: str = "") -> None:
        """Report until it is delivered: the clock shard may be restarting."""
        while not self._stopped.is_set():
            try:
                self._report(self._shard.config.shard, clock, files, failure=failure)
            except (Unavailable, Busy) as error:
                _log.warning("checkpoint_report_waits", clock=clock, reason=str(error))
                self._clock.sleep(_RETRY_SECONDS)
            else:
                return
