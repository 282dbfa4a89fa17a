"""Which checkpoint is complete? The clock shard's side: it gathers what shards and stages report, and decides.

A set of parts is begun by the decision log's record of a barrier that asks for a checkpoint, and waits for every shard
and for every virtual worker that shares the segment after it, or leaves there. One that is evicted meanwhile is waited
for no longer: what the checkpoint lacks then is its optimizer state. Shards write the weights, and two virtual workers
the buffers, so a set is given up only if both of these are gone, if somebody could not write, or if two newer ones were
begun. Giving up is loud, and costs that checkpoint: training goes on, and the checkpoint before it stays.
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

#: Whose condition it is when they are given up.
_WHO = "checkpoints"

#: Sets that may be under way at a time: shards write in the background while training goes on.
MAX_SETS = 2


@dataclass(slots=True)
class PartSet:
    """The parts of one checkpoint. Pure."""

    progress: Progress
    num_shards: int
    num_stages: dict[VirtualWorkerIndex, int]
    """Of the virtual workers that are waited for, or whose parts are all here."""
    keepers: tuple[VirtualWorkerIndex, ...]
    retries_until: float
    """The time up to which a manifest that cannot be written is tried again."""
    parts: dict[str, CheckpointFile] = field(default_factory=dict)
    """By file name."""

    def wanted(self) -> Iterator[str]:
        """The files of the checkpoint, in the manifest's order."""
        yield from (shard_file(ShardIndex(shard)) for shard in range(self.num_shards))
        yield from stage_files(self.num_stages)

    def evict(self, vw: VirtualWorkerIndex) -> None:
        """Wait for `vw` no longer; what it wrote counts if all of it is there."""
        own = set(stage_files({vw: self.num_stages.get(vw, 0)}))
        if not own <= self.parts.keys():
            del self.num_stages[vw]
            self.parts = {name: part for name, part in self.parts.items() if name not in own}

    @property
    def missing(self) -> list[str]:
        """Files that are waited for."""
        return [name for name in self.wanted() if name not in self.parts]

    @property
    def is_lost(self) -> bool:
        """Nobody is left who wrote what is the same for all."""
        return not any(vw in self.num_stages for vw in self.keepers)


def worth_keeping(complete: Sequence[Path], keep: int) -> list[Path]:
    """The newest `keep` checkpoints, and of every virtual worker that none of them has state of the newest that does.

    It is away, and begins from there when it comes back.

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
    """Whose optimizer state is in a checkpoint; of nobody's if it is damaged."""
    try:
        return frozenset(read_manifest(folder).num_stages)
    except CheckpointError:
        return frozenset()


class CheckpointKeeper:
    """Completes the checkpoints of one job, and deletes old ones. Thread-safe; every call may be repeated."""

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
        """Keep the newest `keep` complete checkpoints in `run_dir`, and what `worth_keeping` says.

        Args:
            job_id: the job.
            run_dir: the folder of its run.
            num_shards: parameter servers that write parts.
            keep: at least 1.
            conditions: hears when a checkpoint is given up, and when one is complete again; None: nobody does.
            last_checkpoint_seconds: how long the manifest of the run's last one is tried again.
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
        #: Sets under way, oldest first.
        self._sets: dict[Clock, PartSet] = {}
        #: The clock of the newest checkpoint that is known to be complete; None before there is one.
        self.newest_complete: Clock | None = None
        #: What that one takes on the disk; 0 while it is not known.
        self.newest_bytes = 0
        #: The newest clock at which a set was begun.
        self._newest = Clock(-1)
        #: Why sets were given up; at most `MAX_SETS`, the newest ones.
        self._given_up: dict[Clock, str] = {}

    def follow(self, record: Record | None, progress: Progress) -> None:
        """Take the next record of the decision log that may matter here.

        Args:
            record: of any kind; None: there is none.
            progress: at the start of the segment under way.
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
        """A barrier that asks for a checkpoint is passed by these virtual workers, some of which may leave there.

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
                return  # this process was started anew
            self._remove_given_up()
            while len(self._sets) >= MAX_SETS:
                oldest = min(self._sets)
                self._give_up(oldest, f"two barriers later {self._sets[oldest].missing[0]} is still missing")
            keepers = tuple(sorted(num_stages)[:NUM_KEEPERS])
            until = self._time.monotonic() + (self._last_checkpoint_seconds if is_last else 0.0)
            self._sets[clock] = PartSet(progress, self._num_shards, dict(num_stages), keepers, until)

    def evict(self, vw: VirtualWorkerIndex) -> None:
        """A virtual worker is gone."""
        with self._lock:
            for clock, parts in list(self._sets.items()):
                if vw in parts.num_stages:
                    parts.evict(vw)
                    self._settle(clock)

    def report(self, requester: Requester, clock: Clock, files: Sequence[CheckpointFile], *, failure: str = "") -> bool:
        """A stage's part is on disk, or could not be written; returns whether the checkpoint is complete.

        Raises:
            ProtocolViolation: no barrier asked for it, or files that this stage would not write.
            CheckpointNotWritten: it was given up.
        """
        name = stage_file(requester.vw, requester.stage)
        return self._take(str(requester), name, clock, files, failure)

    def report_shard(
        self, shard: ShardIndex, clock: Clock, files: Sequence[CheckpointFile], *, failure: str = ""
    ) -> bool:
        """The same of a shard."""
        if not 0 <= shard < self._num_shards:
            raise ProtocolViolation(f"there is no shard {shard}; the job has {self._num_shards}")
        is_complete = self._take(f"shard {shard}", shard_file(shard), clock, files, failure)
        if not is_complete:
            reach("snapshot.manifest_on_some_shards")
        return is_complete

    def adopt(self) -> None:
        """Count what lies on disk as reported: after a restart nobody may know that it was. Reads those files."""
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

    # -- inside; the lock is held ------------------------------------------------------------------------------------

    def _take(self, who: str, name: str, clock: Clock, files: Sequence[CheckpointFile], failure: str) -> bool:
        check_files(files, f"{who} reports")
        if not failure and [file.name for file in files] != [name]:
            raise ProtocolViolation(f"{who} reports {len(files)} checkpoint files that are not its own, or none")
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
            raise ProtocolViolation(f"{who} has a part of a checkpoint at clock {clock}, where no barrier asks for one")
        reason = self._given_up.get(clock, "a newer one was complete before")
        raise CheckpointNotWritten(f"the checkpoint at clock {clock} was given up: {reason}")

    def _settle(self, clock: Clock) -> None:
        """Complete a set, or give it up, if its time has come."""
        parts = self._sets[clock]
        if parts.is_lost:
            self._give_up(clock, f"virtual workers {list(parts.keepers)}, who alone wrote the buffers, are gone")
        elif not parts.missing:
            self._complete(clock, parts)

    def _complete(self, clock: Clock, parts: PartSet) -> None:
        files = tuple(parts.parts[name] for name in parts.wanted())
        manifest = Manifest(VERSION, self._job_id, parts.progress, parts.num_stages, files, parts.num_shards)
        folder = self._folder(clock)
        try:
            write_durably(folder / MANIFEST, manifest_bytes(manifest), points="snapshot")
            for parent in folder.parents[:2]:  # where the folder itself, and the first time the one above it, is new
                sync_dir(parent)
        except (OSError, HetpipeError) as error:  # the latter only where a test asks for it
            with suppress(OSError):
                (folder / MANIFEST).unlink(missing_ok=True)
            reason = f"its manifest could not be written: {error}"
            if self._time.monotonic() < parts.retries_until:
                _log.warning("checkpoint_manifest_waits", clock=clock, reason=reason)  # for the next report of a part
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
        before = "there is none before it" if newest is None else f"the newest complete one is at clock {newest}"
        sentence = f"the checkpoint at clock {clock} was given up, {before}: {reason}"
        self._conditions.raise_(ConditionKind.CHECKPOINT_GIVEN_UP, _WHO, sentence)
        del self._sets[clock]
        self._given_up[clock] = reason
        while len(self._given_up) > MAX_SETS:
            del self._given_up[min(self._given_up)]

    def _newest_clock(self) -> Clock | None:
        """Of the newest complete checkpoint of the run, also if an earlier process completed it."""
        if self.newest_complete is None:
            with suppress(CheckpointError, OSError):
                folder = newest_listed(self._run_dir)
                return None if folder is None else read_manifest(folder).progress.clock
        return self.newest_complete

    def _remove_given_up(self) -> None:
        """Delete what was written of sets that were given up: by now nobody writes there."""
        for clock in self._given_up:
            shutil.rmtree(self._folder(clock), ignore_errors=True)

    def _prune(self, newest: Path) -> None:
        """Keep what is worth it; what never became complete goes too, once something newer is."""
        older = sorted(path for path in newest.parent.glob("clock-*") if path.name <= newest.name)
        complete = [path for path in older if (path / MANIFEST).is_file()]
        under_way = [self._folder(clock) for clock in self._sets]
        for folder in set(older) - set(worth_keeping(complete, self._keep)) - set(under_way):
            (folder / MANIFEST).unlink(missing_ok=True)
            shutil.rmtree(folder, ignore_errors=True)
        with suppress(HetpipeError):  # it is done; there is nobody to tell
            reach("snapshot.old_deleted")

    def _folder(self, clock: Clock) -> Path:
        return checkpoint_dir(self._run_dir, clock)
