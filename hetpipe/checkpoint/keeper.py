"""Completion of checkpoints at the clock shard: collects the reports of shards and stages, and decides.

The decision-log record of a barrier that requires a checkpoint starts a set of parts. It is complete when all shards
have reported and all virtual workers that share the next segment, or leave there. A virtual worker evicted meanwhile is
no longer waited for: the checkpoint then lacks its optimizer state. Shards write the weights, and two virtual workers
the buffers, so a set is abandoned only if both of these are gone, if a part could not be written, or if two newer sets
were started. This is reported and costs only that checkpoint: training continues, and the previous checkpoint stays.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from hetpipe.checkpoint.layout import NUM_KEEPERS, PartLabel, shard_file, stage_file, stage_files
from hetpipe.checkpoint.manifest import (
    MANIFEST,
    VERSION,
    Manifest,
    check_files,
    checkpoint_dir,
    file_digest,
    manifest_bytes,
    newest_listed,
    read_label,
    read_manifest,
)
from hetpipe.clock import SYSTEM_CLOCK
from hetpipe.clock import Clock as TimeSource
from hetpipe.conditions import Conditions
from hetpipe.decide.sync.records import EvictRecord, Record, SegmentRecord
from hetpipe.decide.sync.segment import CHECKPOINTS, ends_run
from hetpipe.durable import sync_dir, write_durably
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
    """Of the virtual workers that are waited for, or whose parts have all been reported."""
    keepers: tuple[VirtualWorkerIndex, ...]
    retries_until: float
    """Time until which a failed write of the manifest is retried."""
    parts: dict[str, CheckpointFile] = field(default_factory=dict)
    """By file name."""

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
        """Whether no writer of the shared content is left."""
        return not any(vw in self.num_stages for vw in self.keepers)


def worth_keeping(complete: Sequence[Path], keep: int) -> list[Path]:
    """The newest `keep` checkpoints, and for every virtual worker without state in those the newest one with its state.

    Such a virtual worker is absent and restarts from there.

    Args:
        complete: folders, oldest first.
        keep: at least 1.
    """
    kept = list(complete[-keep:])
    told = {vw for folder in kept for vw in _members(folder)}
    for folder in reversed(complete[:-keep]):
        if not _members(folder) <= told:
            told |= _members(folder)
            kept.append(folder)
    return kept


def _members(folder: Path) -> frozenset[VirtualWorkerIndex]:
    """The virtual workers with optimizer state in a checkpoint; empty if it is corrupted."""
    try:
        return frozenset(read_manifest(folder).num_stages)
    except CheckpointError:
        return frozenset()


class CheckpointKeeper:
    """Completes the checkpoints of one job, and deletes old ones. Thread-safe; every call is idempotent."""

    def __init__(
        self,
        *,
        job_id: JobId,
        run_dir: Path,
        num_shards: int,
        keep: int,
        conditions: Conditions | None = None,
        last_checkpoint_seconds: float = 0.0,
        time: TimeSource = SYSTEM_CLOCK,
    ) -> None:
        """Keep the newest `keep` complete checkpoints in `run_dir`, and those of `worth_keeping`.

        Args:
            job_id: the job.
            run_dir: the folder of its run.
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
        self._run_dir = run_dir
        self._num_shards = num_shards
        self._keep = keep
        self._lock = threading.Lock()
        #: Pending sets, oldest first.
        self._sets: dict[Clock, PartSet] = {}
        #: The clock of the newest checkpoint known to be complete; None before there is one.
        self.newest_complete: Clock | None = None
        #: Its size on disk; 0 while unknown.
        self.newest_bytes = 0
        #: The newest clock at which a set was started.
        self._newest = Clock(-1)
        #: Why sets were abandoned; at most `MAX_SETS`, the newest ones.
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
            case EvictRecord(vw=vw):
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
            if (self._folder(clock) / MANIFEST).exists():
                self.newest_complete = clock
                with suppress(CheckpointError):
                    self.newest_bytes = sum(file.num_bytes for file in read_manifest(self._folder(clock)).files)
                return  # after a restart of this process
            self._remove_given_up()
            while len(self._sets) >= MAX_SETS:
                oldest = min(self._sets)
                self._give_up(oldest, f"two barriers later {self._sets[oldest].missing[0]} is still missing")
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
            for clock, parts in list(self._sets.items()):
                for name in parts.missing:
                    path = self._folder(clock) / name
                    try:
                        if path.is_file() and read_label(path) == PartLabel(self._job_id, clock, name):
                            parts.parts[name] = file_digest(path)
                    except (CheckpointError, OSError) as error:
                        _log.warning("checkpoint_part_not_adopted", path=str(path), reason=str(error))
                self._settle(clock)

    # -- internals; the lock is held ----------------------------------------------------------------------------------

    def _take(self, who: str, name: str, clock: Clock, files: Sequence[CheckpointFile], failure: str) -> bool:
        check_files(files, f"{who} reports")
        if not failure and [file.name for file in files] != [name]:
            raise ProtocolViolation(f"{who} reports {len(files)} checkpoint files, which are not those it has to write")
        with self._lock:
            parts = self._sets.get(clock)
            if parts is not None and failure:
                self._give_up(clock, f"{who} could not write its part: {failure}")
            elif parts is not None:
                if name in parts.wanted():
                    parts.parts[name] = files[0]
                self._settle(clock)
            return self._is_complete(who, clock)

    def _is_complete(self, who: str, clock: Clock) -> bool:
        if clock in self._sets:
            return False
        if (self._folder(clock) / MANIFEST).exists():
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
        elif not parts.missing:
            self._complete(clock, parts)

    def _complete(self, clock: Clock, parts: PartSet) -> None:
        files = tuple(parts.parts[name] for name in parts.wanted())
        manifest = Manifest(VERSION, self._job_id, parts.progress, parts.num_stages, files, parts.num_shards)
        folder = self._folder(clock)
        try:
            write_durably(folder / MANIFEST, manifest_bytes(manifest), points="snapshot")
            for parent in folder.parents[:2]:  # the folder itself, and on first use its parent, is new
                sync_dir(parent)
        except (OSError, HetpipeError) as error:  # the latter only in tests
            with suppress(OSError):
                (folder / MANIFEST).unlink(missing_ok=True)
            reason = f"its manifest could not be written: {error}"
            if self._time.monotonic() < parts.retries_until:
                _log.warning("checkpoint_manifest_waits", clock=clock, reason=reason)  # by the next report of a part
            else:
                self._give_up(clock, reason)
            return
        _log.info("checkpoint_complete", clock=clock, files=len(files))
        self.newest_complete = clock
        self.newest_bytes = sum(file.num_bytes for file in files)
        del self._sets[clock]
        self._prune(folder)
        self._conditions.clear(
            ConditionKind.CHECKPOINT_GIVEN_UP, _WHO, f"checkpoints are written again at clock {clock}"
        )

    def _give_up(self, clock: Clock, reason: str) -> None:
        _log.error("checkpoint_given_up", error=CheckpointNotWritten.__name__, clock=clock, reason=reason)
        newest = self._newest_clock()
        before = "there is no earlier one" if newest is None else f"the newest complete one is at clock {newest}"
        sentence = f"the checkpoint at clock {clock} was abandoned, {before}: {reason}"
        self._conditions.raise_(ConditionKind.CHECKPOINT_GIVEN_UP, _WHO, sentence)
        del self._sets[clock]
        self._given_up[clock] = reason
        while len(self._given_up) > MAX_SETS:
            del self._given_up[min(self._given_up)]

    def _newest_clock(self) -> Clock | None:
        """The clock of the newest complete checkpoint of the run, including those of earlier processes."""
        if self.newest_complete is None:
            with suppress(CheckpointError, OSError):
                folder = newest_listed(self._run_dir)
                return None if folder is None else read_manifest(folder).progress.clock
        return self.newest_complete

    def _remove_given_up(self) -> None:
        """Delete the files of abandoned sets, which have no writers any more."""
        for clock in self._given_up:
            shutil.rmtree(self._folder(clock), ignore_errors=True)

    def _prune(self, newest: Path) -> None:
        """Delete checkpoints that need not be kept, and incomplete ones older than a complete one."""
        older = sorted(path for path in newest.parent.glob("clock-*") if path.name <= newest.name)
        complete = [path for path in older if (path / MANIFEST).is_file()]
        under_way = [self._folder(clock) for clock in self._sets]
        for folder in set(older) - set(worth_keeping(complete, self._keep)) - set(under_way):
            (folder / MANIFEST).unlink(missing_ok=True)
            shutil.rmtree(folder, ignore_errors=True)
        with suppress(HetpipeError):  # the deletion is done; no one needs the result
            reach("snapshot.old_deleted")

    def _folder(self, clock: Clock) -> Path:
        return checkpoint_dir(self._run_dir, clock)
