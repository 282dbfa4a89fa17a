"""The persistent state of one job on a parameter server's disk, and its recovery after a restart.

The folder of a job and term is `JOB@TERM` in the folder of the process:

    job               the shard's configuration; written last, so a folder without it is empty
    lost              replaces `job` while the disk fails: the contents are incomplete and must not be used
    pushes/           log of pushes, snapshot of weights (`push_log`)
    decisions/        on the clock shard: log of events, snapshot of the decision log (`journal`)

A restarted process replays its state and writes history again: `ReplayFilter` drops the lines that are already there,
one for one, so that the history gets missing lines and no duplicates (`wsp.md` §7).
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

import structlog

from hetpipe.clock import SYSTEM_CLOCK, Clock
from hetpipe.conditions import Conditions
from hetpipe.durable import make_dir, write_durably
from hetpipe.errors import DurabilityLost, HistoryIncomplete, ProtocolViolation, StateLost, UserError
from hetpipe.observe.history import HistoryWriter, Value
from hetpipe.server.shard.buffer_files import BufferFiles
from hetpipe.server.shard.journal import Journal, RecoveredDecisions, recovered_decisions
from hetpipe.server.shard.push_log import PushLimits, PushLog, RecoveredPushes, push_limits, recovered_pushes
from hetpipe.storage.wal import (
    SYSTEM_DISK,
    DiskIO,
    RecoveredLog,
    SnapshottedLog,
    StorageOptions,
    read_snapshot,
    recover,
    write_snapshot,
)
from hetpipe.values import wire
from hetpipe.values.conditions import ConditionKind
from hetpipe.values.counters import FENCES, TERMS
from hetpipe.values.ids import JobId
from hetpipe.values.members import NO_FENCE
from hetpipe.values.plan import DTYPE_BYTES, SlicePlan
from hetpipe.values.shard_config import ShardConfig, shard_name
from hetpipe.weights.flat import aligned
from hetpipe.wire.fencing import FenceGuard


class AckLevel(StrEnum):
    """Durability guarantee of an acknowledged push (`reliability.md` P2)."""

    DURABLE = "durable"
    """It survives the process; with `fsync` also the machine."""
    APPLIED = "applied"
    """It is in memory only, because the disk failed."""


class ReplayFilter(HistoryWriter):
    """Writes to another history, except lines present there since a given position."""

    def __init__(self, history: HistoryWriter, since: int) -> None:
        """Read the existing lines.

        Args:
            history: the underlying history.
            since: `position` from which lines may be repeated.
        """
        self._history = history
        self._replayed = Counter(_key(event, fields) for event, fields in history.since(since) if event != "pull")

    def position(self) -> int:
        """Implement `HistoryWriter.position`."""
        return self._history.position()

    def on_alarm(self, listener: Callable[[HistoryIncomplete], None]) -> None:
        """Implement `HistoryWriter.on_alarm`."""
        self._history.on_alarm(listener)

    def write(self, event: str, **fields: Value) -> None:
        """Write one event, unless the history has it from before a restart; pulls are always written."""
        if self._replayed and event != "pull":
            key = _key(event, fields)
            if self._replayed[key] > 0:
                self._replayed[key] -= 1
                return
        self._history.write(event, **fields)

    def is_up_to_date(self) -> None:
        """Stop filtering: all further lines are new."""
        self._replayed = Counter()


def _key(event: str, fields: dict[str, Value]) -> str:
    return event + json.dumps(fields, sort_keys=True)


log = structlog.get_logger(__name__)

T = TypeVar("T")

#: Lock file of the process that owns the folder; not a job.
_OWNER = "owner"
#: File with the highest fence seen, as text; not a job.
_FENCE = "fence"
#: In a run's folder: the folders of its parameter servers.
_STATE = "state"
_JOB = "job"
_LOST = "lost"
_PUSHES = "pushes"
_DECISIONS = "decisions"
_BUFFERS = "buffers"


@dataclass(frozen=True, slots=True, kw_only=True)
class StateOptions:
    """Configuration of a parameter server's storage."""

    root: Path | None = None
    """A folder for this process alone; None: `state/shard-I` in the folder of each run."""
    fsync: bool = False
    """Acknowledged data survives the machine, too."""
    disk: DiskIO = SYSTEM_DISK
    limits: PushLimits | None = None
    """Limits of logs of pushes; None: by the size of the shard."""
    clock: Clock = SYSTEM_CLOCK
    """Measures the duration of snapshots."""

    def root_of(self, config: ShardConfig) -> Path:
        """The folder of a job."""
        return self.root or Path(config.run_dir) / _STATE / f"shard-{config.shard}"

    def folder_of(self, config: ShardConfig) -> Path:
        """The folder of a job."""
        return self.root_of(config) / f"{config.job_id}@{config.term}"


def identity_of(config: ShardConfig) -> str:
    """Identity of the state: never read as that of another job, term, shard, model or partition."""
    slices = wire.to_json(tuple[SlicePlan, ...], config.slices).encode()
    return json.dumps(
        {
            "job": config.job_id,
            "term": config.term,
            "shard": config.shard,
            "num_shards": config.num_shards,
            "slices": hashlib.sha256(slices).hexdigest(),
        }
    )


def old_jobs(root: Path) -> Iterator[tuple[JobId, ShardConfig | StateLost]]:
    """Newest term of every job persisted in `root`, or the reason why it is unusable.

    Older terms and incomplete folders are deleted.
    """
    newest: dict[str, Path] = {}
    for folder in sorted(root.glob("*@*"), key=_term):
        older = newest.get(_job(folder))
        if not (folder / _JOB).exists() and not (folder / _LOST).exists():
            shutil.rmtree(folder, ignore_errors=True)
            continue
        if older is not None:
            delete(older)
        newest[_job(folder)] = folder
    for job, folder in newest.items():
        try:
            found: ShardConfig | StateLost = read_config(folder)
        except StateLost as error:
            found = error
        yield JobId(job), found


def claim(root: Path) -> int:
    """Lock a folder for this process; returns a file descriptor to keep open.

    Raises:
        UserError: another process uses it, or it cannot be written.
    """
    try:
        make_dir(root)
        descriptor = os.open(root / _OWNER, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise UserError(f"state cannot be written to {root}: {error.strerror}; give another folder") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise UserError(
            f"another process uses the state in {root}; give each parameter server a folder of its own (--state)"
        ) from None
    except OSError as error:
        log.warning("state_not_locked", folder=str(root), reason=error.strerror or str(error))
    return descriptor


def disclaim(root: Path, descriptor: int) -> None:
    """Undo `claim`; an empty folder is removed."""
    if {path.name for path in root.glob("*")} <= {_OWNER, _FENCE}:
        for name in (_OWNER, _FENCE):
            (root / name).unlink(missing_ok=True)
    os.close(descriptor)
    _remove_empty(root)


def kept_fences(root: Path) -> FenceGuard:
    """Highest fence seen by this process and earlier ones, in a claimed folder.

    After a disk failure only later processes lack it; fencing in this one is not affected.
    """

    def keep(fence: int) -> None:
        try:
            write_durably(root / _FENCE, str(fence).encode())
        except OSError as error:
            log.warning("fence_not_kept", folder=str(root), fence=fence, reason=error.strerror or str(error))

    try:
        highest = read_fence(root)
    except StateLost as error:
        log.warning("fence_not_read", folder=str(root), reason=str(error))
        highest = NO_FENCE
    return FenceGuard(highest, keep=keep)


def read_fence(root: Path) -> int:
    """Highest fence stored in a folder; 0 without one.

    Raises:
        StateLost: it is not a valid fence: no coordinator could have a higher one.
    """
    try:
        highest = int((root / _FENCE).read_text(encoding="ascii"))
    except FileNotFoundError:
        return NO_FENCE
    except (OSError, ValueError) as error:
        raise StateLost(f"{root / _FENCE} cannot be read: {error}") from None
    if not NO_FENCE <= highest < FENCES.limit:
        raise StateLost(f"{root / _FENCE} has the fence {highest}, and fences are below {FENCES.limit}")
    return highest


def _remove_empty(root: Path) -> None:
    """Remove empty folders in that of a finished run."""
    with suppress(OSError):
        root.rmdir()
        if root.parent.name == _STATE:
            root.parent.rmdir()


def read_config(folder: Path) -> ShardConfig:
    """The shard's configuration for the job in `folder`.

    Raises:
        StateLost: it is incomplete.
    """
    if (folder / _LOST).exists():
        raise StateLost(f"{folder} lacks waves pushed while its disk failed; the job must be rewound to a checkpoint")
    try:
        config: ShardConfig = wire.from_json(ShardConfig, read_snapshot(folder / _JOB).header)
    except ProtocolViolation as error:
        raise StateLost(f"{folder / _JOB} cannot be read: {error}") from None
    return config


def forget_job(root: Path, job_id: JobId) -> None:
    """Delete the unusable state of a job that is not served."""
    for folder in root.glob("*@*"):
        if _job(folder) == job_id:
            delete(folder)


def delete(folder: Path) -> None:
    """Delete the job in `folder`, atomically with respect to recovery; on a failing disk it stays."""
    try:
        for name in (_JOB, _LOST):
            (folder / name).unlink(missing_ok=True)
    except OSError as error:
        log.warning("state_not_deleted", folder=str(folder), reason=error.strerror or str(error))
        return
    shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class UnusableJob:
    """A job that was deleted."""

    job_id: JobId
    term: int
    run_dir: str
    """Location of its checkpoints; empty if that could not be read."""


@dataclass(frozen=True, slots=True)
class StateRepair:
    """Recovered and deleted jobs of a folder."""

    fence: int | None
    """The stored fence; None if it is not a valid fence."""
    is_fence_forgotten: bool
    jobs: tuple[UnusableJob, ...]


def repair_state(root: Path, *, forget_fence: bool = False) -> StateRepair:
    """Delete fences and terms that no coordinator accepts, so that the parameter server can register again.

    They are in the reserve above all valid reports (`values.counters`).

    Args:
        root: its `--state`, while it is stopped.
        forget_fence: delete any fence; the next coordinator sends its own.

    Raises:
        UserError: there is no such folder, a process uses it, or it cannot be written.
    """
    if not root.is_dir():
        raise UserError(f"{root} is not a folder; give the folder that a parameter server has as --state")
    descriptor = claim(root)
    try:
        try:
            fence: int | None = read_fence(root)
        except StateLost:
            fence = None
        forget_fence = fence is None or fence > FENCES.largest_reported or (forget_fence and (root / _FENCE).exists())
        if forget_fence:
            (root / _FENCE).unlink()
        jobs = tuple(_unusable_job(folder) for folder in sorted(root.glob("*@*")) if _is_unusable(folder))
        for folder in filter(_is_unusable, root.glob("*@*")):
            delete(folder)
    except OSError as error:
        raise UserError(f"the state in {root} cannot be repaired: {error.strerror}") from error
    finally:
        os.close(descriptor)
    return StateRepair(fence, forget_fence, jobs)


def _is_unusable(folder: Path) -> bool:
    return _term(folder) > TERMS.largest_reported


def _unusable_job(folder: Path) -> UnusableJob:
    try:
        run_dir = read_config(folder).run_dir
    except StateLost:
        run_dir = ""
    return UnusableJob(JobId(_job(folder)), _term(folder), run_dir)


class JobStorage:
    """Folder of one job on its parameter server's disk; its parts are for the job's `Shard` and `ClockShard`."""

    def __init__(
        self,
        config: ShardConfig,
        options: StateOptions,
        history: HistoryWriter,
        conditions: Conditions | None = None,
    ) -> None:
        """Restore this term of the job, or create its folder.

        Args:
            config: configuration of the job.
            options: storage options.
            history: history of this process.
            conditions: notified when the stored state is incomplete; None: no notification.

        Raises:
            StateLost: the existing state is unusable.
        """
        self._config = config
        self._folder = options.folder_of(config)
        #: Folder of the state of all jobs.
        self.root = options.root_of(config)
        self._lock = threading.Lock()
        self._conditions = conditions or Conditions()
        #: Logs with a failing disk, and the reasons; guarded by the lock.
        self._failing: dict[Path, DurabilityLost] = {}
        #: The folder's marker of completeness is up to date.
        self._is_marker_current = True
        identity = identity_of(config)
        storage = StorageOptions(
            identity=identity,
            fsync=options.fsync,
            disk=options.disk,
            on_alarm=self._on_alarm,
            clock=options.clock,
        )
        pushes, decisions = self._find(identity)
        #: State of an earlier process; None without one.
        self.recovered_pushes: RecoveredPushes | None = None if pushes is None else _in_terms(recovered_pushes, pushes)
        self.recovered_decisions: RecoveredDecisions | None = (
            None if decisions is None else _in_terms(recovered_decisions, decisions)
        )
        self._replay_filter = self._filter_replay(history)
        self.pushes = PushLog(
            SnapshottedLog(self._folder / _PUSHES, storage, recovered=pushes),
            _limits(config, options.limits),
            num_members=len(config.membership.members),
            start=config.progress.clock,
            history_position=history.position,
            is_complete=lambda: self.level is AckLevel.DURABLE,
        )
        if self.recovered_pushes is not None and pushes is not None:
            self.pushes.restore(self.recovered_pushes, pushes)
        self.journal: Journal | None = None
        self.buffers: BufferFiles | None = None
        if config.shard == 0:
            self.buffers = BufferFiles(self._folder / _BUFFERS)
            self.journal = Journal(SnapshottedLog(self._folder / _DECISIONS, storage, recovered=decisions))
        self.history: HistoryWriter = history if self._replay_filter is None else self._replay_filter
        with self._lock:
            if pushes is None:
                self._write_down()
            else:
                self._report_level("; ".join(map(str, self._failing.values())))
        if pushes is None:
            self._delete_other_terms(options.root_of(config))

    @property
    def level(self) -> AckLevel:
        """Current guarantee of acknowledgements."""
        return AckLevel.DURABLE if self._is_marker_current and not self._failing else AckLevel.APPLIED

    def caught_up(self) -> None:
        """Handle the end of replay: the state of the earlier process is restored."""
        if self._replay_filter is not None:
            self._replay_filter.is_up_to_date()

    def try_again(self) -> None:
        """Retry failed writes of the folder's status. At barriers, as `PushLog` and `Journal` do."""
        if not self._is_marker_current:
            with self._lock:
                self._write_down()

    def wait_idle(self) -> None:
        """Wait until no snapshot is in progress."""
        self.pushes.wait_idle()
        if self.journal is not None:
            self.journal.wait_idle()

    def close(self) -> None:
        """Close the files, and keep them."""
        self.pushes.close()
        if self.journal is not None:
            self.journal.close()

    def delete(self) -> None:
        """Close and delete the files."""
        self.close()
        delete(self._folder)
        _remove_empty(self._folder.parent)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _find(self, identity: str) -> tuple[RecoveredLog | None, RecoveredLog | None]:
        """Recover the contents of the push log and of the journal."""
        if not (self._folder / _JOB).exists() and not (self._folder / _LOST).exists():
            shutil.rmtree(self._folder, ignore_errors=True)
            return None, None
        if identity_of(read_config(self._folder)) != identity:
            raise StateLost(
                f"{self._folder} is the state of another model or partition, though of the same job and term"
            )
        pushes = recover(self._folder / _PUSHES, identity=identity)
        decisions = recover(self._folder / _DECISIONS, identity=identity) if self._config.shard == 0 else None
        return pushes, decisions

    def _filter_replay(self, history: HistoryWriter) -> ReplayFilter | None:
        places = [old.history for old in (self.recovered_pushes, self.recovered_decisions) if old is not None]
        return ReplayFilter(history, min(places)) if places else None

    def _on_alarm(self, folder: Path, alarm: DurabilityLost | None) -> None:
        with self._lock:
            if alarm is not None:
                self._failing[folder] = alarm
            else:
                self._failing.pop(folder, None)
            self._write_down()

    def _write_down(self) -> None:
        """Record in the folder whether its state is complete. With the lock held."""
        job, lost = self._folder / _JOB, self._folder / _LOST
        was_current, self._is_marker_current = self._is_marker_current, False
        try:
            if self._failing:
                if job.exists():
                    job.replace(lost)
            elif lost.exists():
                lost.replace(job)
            elif not job.exists():
                write_snapshot(job, 0, wire.to_json(ShardConfig, self._config).encode(), points="")
            self._is_marker_current = True
        except OSError as error:
            reason = error.strerror or str(error)
            if was_current:
                log.warning("state_not_written", folder=str(self._folder), reason=reason)
            self._report_level(f"{self._folder} cannot be written ({reason}): free disk space, or replace the disk")
        else:
            self._report_level("; ".join(map(str, self._failing.values())))

    def _report_level(self, why: str) -> None:
        """Report the current guarantee to the coordinator; `why` is the problem, if any."""
        who = shard_name(self._config.shard)
        if self.level is AckLevel.APPLIED:
            sentence = f"{who} cannot persist staged waves (level {AckLevel.APPLIED}): {why}"
            self._conditions.raise_(ConditionKind.DURABILITY_LOST, who, sentence)
        else:
            self._conditions.clear(ConditionKind.DURABILITY_LOST, who, f"{who} persists staged waves again")

    def _delete_other_terms(self, root: Path) -> None:
        for folder in root.glob(f"{self._config.job_id}@*"):
            if folder != self._folder:
                delete(folder)


def _limits(config: ShardConfig, given: PushLimits | None) -> Callable[[int], PushLimits]:
    """Limits by number of virtual workers."""
    num_bytes = sum(aligned((s.stop - s.start) * DTYPE_BYTES[s.parameter.dtype]) for s in config.slices)
    return lambda count: given or push_limits(num_bytes, num_members=count, staleness=config.sync.staleness)


def _in_terms(read: Callable[[RecoveredLog], T], found: RecoveredLog) -> T:
    try:
        return read(found)
    except ProtocolViolation as error:
        raise StateLost(f"the persisted state cannot be read: {error}") from None


def _job(folder: Path) -> str:
    return folder.name.rpartition("@")[0]


def _term(folder: Path) -> int:
    term = folder.name.rpartition("@")[2]
    return int(term) if term.isascii() and term.isdigit() else -1
