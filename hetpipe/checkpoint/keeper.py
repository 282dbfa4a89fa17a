"""Completion of checkpoints at the clock shard: collects the reports of shards and stages, and decides.

The decision-log record of a barrier that requires a checkpoint starts a set of parts. It is complete when all shards
and all virtual workers that pass the barrier have reported. A virtual worker evicted in the meantime is no longer
waited for: the checkpoint then lacks its optimizer state. Shards write the weights, and two virtual workers
the buffers, so a set is abandoned only if both of these are gone, if a part could not be written, or if two newer sets
were started. This is reported and costs only that checkpoint: training continues, and the previous checkpoint stays.

An object store may be slow: the keeper accesses it on a thread of its own, without holding the lock, so that no report
and no eviction blocks on it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from hetpipe.checkpoint.background import Background
from hetpipe.checkpoint.layout import NUM_KEEPERS, PartLabel, shard_file, stage_file, stage_files
from hetpipe.checkpoint.manifest import VERSION, Manifest, check_files
from hetpipe.checkpoint.store import CheckpointStore
from hetpipe.clock import SYSTEM_CLOCK
from hetpipe.clock import Clock as TimeSource
from hetpipe.conditions import Conditions
from hetpipe.decide.sync.records import EvictRecord, HandoverRecord, Record, SegmentRecord
from hetpipe.decide.sync.segment import CHECKPOINTS, ends_run
from hetpipe.errors import CheckpointError, CheckpointNotWritten, HetpipeError, ProtocolViolation
from hetpipe.failpoints import reach
from hetpipe.observe.log import get_logger
from hetpipe.values.conditions import ConditionKind
from hetpipe.values.ids import Clock, JobId, ShardIndex, VirtualWorkerIndex
from hetpipe.values.requests import CheckpointFile, Requester
from hetpipe.values.sync import Progress

_log = get_logger(__name__)

#: Subject of the condition raised when a checkpoint is abandoned.
_WHO = "checkpoints"

#: Maximum number of pending sets: shards write in the background while training continues.
MAX_SETS = 2


@dataclass(slots=True)
class PartSet:
    """The parts of one checkpoint. Pure."""

    progress: Progress
    num_shards: int
    num_stages: dict[VirtualWorkerIndex, int]
    """Files of the virtual workers still waited for, or with complete parts."""
    keepers: tuple[VirtualWorkerIndex, ...]
    retries_until: float
    """Time until which a failed write of the manifest is retried."""
    parts: dict[str, CheckpointFile] = field(default_factory=dict)
    """Reported files by name."""
    is_closing: bool = False
    """Its manifest is being written."""

    def wanted(self) -> Iterator[str]:
        """The files of the checkpoint, in the manifest's order."""
        yield from (shard_file(ShardIndex(shard)) for shard in range(self.num_shards))
        yield from stage_files(self.num_stages)

    def evict(self, vw: VirtualWorkerIndex) -> None:
        """Stop waiting for `vw`; its part counts if it is complete."""
        own = set(stage_files({vw: self.num_stages.get(vw, 0)}))
        if not own <= self.parts.keys():
            del self.num_stages[vw]
            self.parts = {name: part for name, part in self.parts.items() if name not in own}

    @property
    def missing(self) -> list[str]:
        """Files not reported yet."""
        return [name for name in self.wanted() if name not in self.parts]

    @property
    def is_lost(self) -> bool:
        """Whether all writers of the shared content are gone."""
        return not any(vw in self.num_stages for vw in self.keepers)


def worth_keeping(
    complete: Sequence[Clock], keep: int, members: Callable[[Clock], frozenset[VirtualWorkerIndex]]
) -> list[Clock]:
    """The newest `keep` checkpoints, and for every virtual worker without state in those the newest with its state.

    Such a virtual worker is absent and restarts from there. Pure except for `members`.

    Args:
        complete: oldest first.
        keep: at least 1.
        members: the virtual workers with optimizer state in a checkpoint; none if it is corrupted.
    """
    kept = list(complete[-keep:])
    covered = {vw for clock in kept for vw in members(clock)}
    for clock in reversed(complete[:-keep]):
        if not members(clock) <= covered:
            covered |= members(clock)
            kept.append(clock)
    return kept


class CheckpointKeeper:
    """Completes the checkpoints of one job, and deletes old ones. Thread-safe; every call is idempotent."""

    def __init__(
        self,
        *,
        job_id: JobId,
        store: CheckpointStore,
        num_shards: int,
        keep: int,
        conditions: Conditions | None = None,
        last_checkpoint_seconds: float = 0.0,
        time: TimeSource = SYSTEM_CLOCK,
    ) -> None:
        """Keep the newest `keep` complete checkpoints in `store`, those of `worth_keeping`, and the best one.

        Args:
            job_id: the job.
            store: of the run's checkpoints.
            num_shards: parameter servers that write parts.
            keep: at least 1.
            conditions: notified when a checkpoint is abandoned, and when one is complete again; None: no notification.
            last_checkpoint_seconds: how long the manifest of the run's last one is retried.
            time: now.
        """
        self._conditions = conditions or Conditions()
        self._last_checkpoint_seconds = last_checkpoint_seconds
        self._time = time
        self._job_id = job_id
        self._store = store
        self._num_shards = num_shards
        self._keep = keep
        self._lock = threading.RLock()
        #: Executes operations on a remote store; None: the caller's thread does.
        self._worker = Background("checkpoint-keeper") if store.is_remote else None
        #: Clocks of the newest checkpoints completed by this process.
        self._completed: deque[Clock] = deque(maxlen=8)
        #: Pending sets, oldest first.
        self._sets: dict[Clock, PartSet] = {}
        #: The clock of the newest checkpoint known to be complete; None before there is one.
        self.newest_complete: Clock | None = None
        #: Its size on disk; 0 while unknown.
        self.newest_bytes = 0
        #: The newest clock at which a set was started.
        self._newest = Clock(-1)
        #: Reasons of abandoned sets by clock; the newest `MAX_SETS`.
        self._given_up: dict[Clock, str] = {}

    def follow(self, record: Record | None, progress: Progress) -> None:
        """Process the next relevant record of the decision log.

        Args:
            record: of any kind; None: there is none.
            progress: at the start of the current segment.
        """
        match record:
            case SegmentRecord(start=clock, reasons=reasons) if CHECKPOINTS.intersection(reasons):
                if clock == progress.clock:  # an older one is read again after a restart
                    num_stages = {member.vw: member.num_stages for member in record.present}
                    self.begin(progress, num_stages, is_last=ends_run(reasons))
            case EvictRecord(vw=vw) | HandoverRecord(vw=vw, whole=False):
                self.evict(vw)
            case _:
                pass

    def begin(self, progress: Progress, num_stages: Mapping[VirtualWorkerIndex, int], *, is_last: bool = False) -> None:
        """Start a set for a barrier with a checkpoint, passed by these virtual workers, some of which may leave there.

        `is_last`: the run ends at it.
        """
        clock = progress.clock
        with self._lock:
            if clock <= self._newest:
                return
            self._newest = clock
            if not self._store.is_remote and self._store.is_complete(clock):
                self._found_complete(clock)  # after a restart of this process; `adopt` asks a remote store
                return
            self._remove_given_up()
            while len(self._sets) >= MAX_SETS:
                oldest = min(self._sets)
                what = next(iter(self._sets[oldest].missing), "its manifest")
                self._give_up(oldest, f"two barriers later {what} is still missing")
            keepers = tuple(sorted(num_stages)[:NUM_KEEPERS])
            until = self._time.monotonic() + (self._last_checkpoint_seconds if is_last else 0.0)
            self._sets[clock] = PartSet(progress, self._num_shards, dict(num_stages), keepers, until)

    def evict(self, vw: VirtualWorkerIndex) -> None:
        """Handle the eviction of a virtual worker."""
        with self._lock:
            for clock, parts in list(self._sets.items()):
                if vw in parts.num_stages:
                    parts.evict(vw)
                    self._settle(clock)

    def report(self, requester: Requester, clock: Clock, files: Sequence[CheckpointFile], *, failure: str = "") -> bool:
        """Handle a stage's report of its part; returns whether the checkpoint is complete.

        Raises:
            ProtocolViolation: no barrier requires it, or the files are not those of this stage.
            CheckpointNotWritten: it was abandoned.
        """
        name = stage_file(requester.vw, requester.stage)
        return self._take(str(requester), name, clock, files, failure)

    def report_shard(
        self, shard: ShardIndex, clock: Clock, files: Sequence[CheckpointFile], *, failure: str = ""
    ) -> bool:
        """Handle a shard's report of its part, as `report` does for stages."""
        if not 0 <= shard < self._num_shards:
            raise ProtocolViolation(f"there is no shard {shard}; the job has {self._num_shards}")
        is_complete = self._take(f"shard {shard}", shard_file(shard), clock, files, failure)
        if not is_complete:
            reach("snapshot.manifest_on_some_shards")
        return is_complete

    def adopt(self) -> None:
        """Treat existing files as reported: reports may have been lost in a restart. Reads those files."""
        with self._lock:
            pending = [(clock, tuple(parts.missing)) for clock, parts in self._sets.items()]
        for clock, missing in pending:
            is_complete = self._store.is_remote and self._store.is_complete(clock)
            found = {} if is_complete else self._existing(clock, missing)
            with self._lock:
                parts = self._sets.get(clock)
                if parts is None:
                    continue
                if is_complete:
                    del self._sets[clock]
                    self._found_complete(clock)
                    continue
                wanted = set(parts.wanted())
                parts.parts = {**{name: file for name, file in found.items() if name in wanted}, **parts.parts}
                self._settle(clock)

    def close(self) -> None:
        """Cancel queued operations on a remote store."""
        if self._worker is not None:
            self._worker.close()

    def _existing(self, clock: Clock, missing: Sequence[str]) -> dict[str, CheckpointFile]:
        found: dict[str, CheckpointFile] = {}
        for name in missing:
            try:
                file = self._store.delivered(PartLabel(self._job_id, clock, name))
            except (CheckpointError, OSError) as error:
                _log.warning("checkpoint_part_not_adopted", clock=clock, part=name, reason=str(error))
                continue
            if file is not None:
                found[name] = file
        return found

    def _work(self, work: Callable[[], None]) -> None:
        """Run an operation on the store: at once for a folder, else in the background without the lock."""
        if self._worker is None:
            work()
            return
        self._worker.submit(partial(self._logged, work))

    @staticmethod
    def _logged(work: Callable[[], None]) -> None:
        try:
            work()
        except Exception:  # noqa: BLE001 - no caller gets its result
            _log.exception("checkpoint_keeper_failed")

    # -- internals; the lock is held ----------------------------------------------------------------------------------

    def _found_complete(self, clock: Clock) -> None:
        self.newest_complete = clock
        self._completed.append(clock)
        with suppress(CheckpointError):
            self.newest_bytes = sum(file.num_bytes for file in self._store.manifest(clock).files)

    def _take(self, who: str, name: str, clock: Clock, files: Sequence[CheckpointFile], failure: str) -> bool:
        check_files(files, f"{who} reports")
        if not failure and [file.name for file in files] != [name]:
            raise ProtocolViolation(f"{who} reports {len(files)} checkpoint files that are not the ones it must write")
        with self._lock:
            parts = self._sets.get(clock)
            if parts is not None and failure:
                self._give_up(clock, f"{who} could not write its part: {failure}")
            elif parts is not None:
                if name in parts.wanted():
                    parts.parts[name] = files[0]
                self._settle(clock)
            if clock in self._sets:
                return False
            if clock in self._completed:
                return True
        return self._was_completed(who, clock)

    def _was_completed(self, who: str, clock: Clock) -> bool:
        """Whether a set that is not pending was completed; without the lock."""
        if clock >= 0 and clock not in self._given_up and self._store.is_complete(clock):
            return True
        if clock > self._newest or clock < 0:
            raise ProtocolViolation(
                f"{who} reports a part of a checkpoint at clock {clock}, but no barrier requires one there"
            )
        reason = self._given_up.get(clock, "a newer one was completed before")
        raise CheckpointNotWritten(f"the checkpoint at clock {clock} was abandoned: {reason}")

    def _settle(self, clock: Clock) -> None:
        """Complete or abandon a set if it is due."""
        parts = self._sets[clock]
        if parts.is_lost:
            self._give_up(clock, f"virtual workers {list(parts.keepers)}, the only writers of the buffers, are gone")
        elif not parts.missing and not parts.is_closing:
            parts.is_closing = True
            files = tuple(parts.parts[name] for name in parts.wanted())
            manifest = Manifest(VERSION, self._job_id, parts.progress, dict(parts.num_stages), files, parts.num_shards)
            self._work(partial(self._complete, manifest))

    def _complete(self, manifest: Manifest) -> None:
        """Write the manifest; without the lock if the store is remote."""
        clock = manifest.progress.clock
        try:
            self._store.complete(manifest)
        except (OSError, HetpipeError) as error:  # the latter only in tests
            self._not_completed(clock, f"its manifest could not be written: {error}")
            return
        _log.info("checkpoint_complete", clock=clock, files=len(manifest.files))
        # Before its completion is visible: the run may end then.
        self._conditions.clear(
            ConditionKind.CHECKPOINT_GIVEN_UP, _WHO, f"checkpoints are written again at clock {clock}"
        )
        with self._lock:
            self.newest_complete = max(clock, self.newest_complete or clock)
            self.newest_bytes = sum(file.num_bytes for file in manifest.files)
            self._completed.append(clock)
            self._sets.pop(clock, None)
            self._given_up.pop(clock, None)
        self._prune(clock)

    def _not_completed(self, clock: Clock, reason: str) -> None:
        with self._lock:
            parts = self._sets.get(clock)
            if parts is None:
                return
            parts.is_closing = False
            if self._time.monotonic() < parts.retries_until:
                _log.warning("checkpoint_manifest_waits", clock=clock, reason=reason)  # by the next report of a part
            else:
                self._give_up(clock, reason)

    def _give_up(self, clock: Clock, reason: str) -> None:
        _log.error("checkpoint_given_up", error=CheckpointNotWritten.__name__, clock=clock, reason=reason)
        newest = self._newest_clock()
        none = "this process has completed none" if self._store.is_remote else "there is no earlier one"
        before = none if newest is None else f"the newest complete one is at clock {newest}"
        sentence = f"the checkpoint at clock {clock} was abandoned, {before}: {reason}"
        self._conditions.raise_(ConditionKind.CHECKPOINT_GIVEN_UP, _WHO, sentence)
        del self._sets[clock]
        self._given_up[clock] = reason
        while len(self._given_up) > MAX_SETS:
            del self._given_up[min(self._given_up)]

    def _newest_clock(self) -> Clock | None:
        """The clock of the newest complete checkpoint, from memory or the folder; a remote store is not read."""
        if self.newest_complete is None and not self._store.is_remote:
            with suppress(OSError):
                for clock in sorted((c for c, done in self._store.clocks().items() if done), reverse=True):
                    with suppress(CheckpointError):
                        return self._store.manifest(clock).progress.clock
        return self.newest_complete

    def _remove_given_up(self) -> None:
        """Delete the files of abandoned sets, which have no writers any more."""
        for clock in self._given_up:
            self._work(partial(self._remove_incomplete, clock))

    def _remove_incomplete(self, clock: Clock) -> None:
        if not self._store.is_complete(clock):
            self._store.remove(clock)

    def _prune(self, newest: Clock) -> None:
        """Delete checkpoints that need not be kept, and incomplete ones older than a complete one."""
        try:
            found = {clock: done for clock, done in self._store.clocks().items() if clock <= newest}
            complete = sorted(clock for clock, done in found.items() if done)
            kept = {*worth_keeping(complete, self._keep, self._members), *self._sets, self._store.best()}
            for clock in sorted(found.keys() - kept):
                self._store.remove(clock)
        except OSError as error:
            _log.warning("checkpoints_not_pruned", reason=str(error))  # by the next one
        with suppress(HetpipeError):  # the deletion is done; no one needs the result
            reach("snapshot.old_deleted")

    def _members(self, clock: Clock) -> frozenset[VirtualWorkerIndex]:
        """The virtual workers with optimizer state in a checkpoint; empty if it is corrupted."""
        try:
            return frozenset(self._store.manifest(clock).num_stages)
        except CheckpointError:
            return frozenset()
