"""Log of one shard's pushes: a restarted shard continues with the same weights.

Every push is appended to a write-ahead log (`hetpipe.storage.wal`) before it counts as staged. A snapshot holds the
oldest live weights, w^(R): the oldest clock never decreases, so recovery needs one snapshot and the pushes of waves ≥
R.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog

from hetpipe.checksum import Bytes
from hetpipe.decide.sync.shard_state import ClosedState
from hetpipe.errors import Busy
from hetpipe.storage.wal import Extent, RecoveredLog, SnapshottedLog
from hetpipe.values import wire
from hetpipe.values.ids import Clock, Incarnation, StageIndex, VirtualWorkerIndex, Wave
from hetpipe.values.quantities import bytes_text
from hetpipe.weights.flat import FlatBuffer

log = structlog.get_logger(__name__)

#: Minimum bytes of pushes since a snapshot that trigger the next one, besides the limit that grows with the shard. For
#: a smaller shard it is the size of one copy, while snapshots are cheap (`SnapshottedLog.is_cheap`).
_FLOOR_BYTES = 64 << 20

#: Waves since a snapshot that trigger the next one, however small they are: their replay takes time.
_WORTH_WAVES = 500

#: Ratio of the maximum size of a log to the size that triggers a snapshot.
_FULL = 4

#: Stands for D = ∞ where the log's size is bounded.
_MANY_WAVES = 16


@dataclass(frozen=True, slots=True)
class LoggedPush:
    """Header of a push's record; the payload is the push's bytes."""

    vw: VirtualWorkerIndex
    incarnation: Incarnation
    stage: StageIndex
    wave: Wave | None
    followed: int
    """The number of decision-log records that the shard had executed."""
    slices: tuple[int, ...]
    """Positions of its slices in the shard."""
    fresh: bool = False
    """`PushHeader.fresh`."""


@dataclass(frozen=True, slots=True)
class RecoveredPush:
    """A logged push of an earlier process."""

    push: LoggedPush
    payload: Extent


@dataclass(frozen=True, slots=True)
class RecoveredPushes:
    """Recovered pushes and state."""

    closed: ClosedState | None
    """The state in which to begin; None: a fresh one."""
    weights: Extent | None
    """The weights of `closed`."""
    pushes: tuple[RecoveredPush, ...]
    history: int
    """Position in the history from which on lines may be repeated."""


@dataclass(frozen=True, slots=True)
class PushLimits:
    """Size that triggers a snapshot, and maximum size of the log."""

    worth_bytes: int
    """Bytes since a snapshot that trigger the next one at any cost."""
    cheap_bytes: int
    """The same where snapshots are cheap."""
    barrier_bytes: int
    """The same at a barrier."""
    max_bytes: int
    """With more, pushes ahead of the clock under construction are rejected."""


def push_limits(shard_bytes: int, *, num_members: int, staleness: int | None, floor: int = _FLOOR_BYTES) -> PushLimits:
    """Limits of a shard's log.

    Where snapshots are cheap, one is taken after V + 1 copies of the shard and another copy, but at most `floor`. So
    each byte of a snapshot is paid for by V + 2 bytes of pushes or more, as it is with a large shard.

    Args:
        shard_bytes: size of one copy of its weights.
        num_members: V.
        staleness: D.
        floor: minimum bytes of log that trigger a snapshot, however small the shard is.
    """
    copies = max(2, num_members + 1) * shard_bytes
    worth = copies + floor
    cheap = copies + min(floor, shard_bytes)
    ahead = _MANY_WAVES if staleness is None else staleness
    # A member commits up to D + 1 waves beyond the slowest, is at most D + 3 ahead of that, and R is D + 1 behind.
    needed = num_members * (3 * ahead + 6) * shard_bytes
    return PushLimits(worth, cheap, shard_bytes + floor // 4, max(_FULL * worth, worth + needed))


def recovered_pushes(found: RecoveredLog) -> RecoveredPushes:
    """Decode a recovered log.

    Raises:
        ProtocolViolation: another version wrote it.
    """
    pushes = tuple(RecoveredPush(wire.from_json(LoggedPush, record.header), record.payload) for record in found.records)
    snapshot = found.snapshot
    if snapshot is None:
        return RecoveredPushes(None, None, pushes, 0)
    closed: ClosedState = wire.from_json(ClosedState, snapshot.header.content)
    return RecoveredPushes(closed, snapshot.payload, pushes, snapshot.header.history)


@dataclass(slots=True)
class _LoggedWave:
    """Logged pushes of one wave, of all virtual workers."""

    lsn: int
    """LSN of the first push."""
    history: int
    """Position of the history before it."""
    num_bytes: int = 0


#: Acquires the oldest live weights, with the state at their completion.
Oldest = tuple[ClosedState, FlatBuffer]


class PushLog:
    """The log of one shard's pushes. Thread-safe."""

    def __init__(
        self,
        storage: SnapshottedLog,
        limits: Callable[[int], PushLimits],
        *,
        num_members: int,
        start: Clock,
        history_position: Callable[[], int],
        is_complete: Callable[[], bool],
    ) -> None:
        """Create the log without entries.

        Args:
            storage: the write-ahead log.
            limits: limits by number of virtual workers.
            num_members: initial number of virtual workers.
            start: the run's first clock.
            history_position: returns the current position in the history of this process.
            is_complete: whether the stored state of the job suffices for a restart.
        """
        self._storage = storage
        self._limits_for = limits
        self.set_num_members(num_members)
        self._start = start
        self._history_position = history_position
        self._is_complete = is_complete
        #: The log was full at the last check; logged at the transition.
        self._was_full = False
        #: Guards the following attributes; never held during disk operations.
        self._lock = threading.Lock()
        #: Pushes that the oldest weights lack; the others are only counted, from the start of the newest snapshot.
        self._waves: dict[int, _LoggedWave] = {}
        self._num_behind = 0
        self._bytes_behind = 0
        #: clock → position of the history when its weights were complete, for live weights.
        self._completed_at: dict[Clock, int] = {}
        #: Number of decision-log records not needed with the newest snapshot.
        self.durable_records = 0

    def restore(self, old: RecoveredPushes, found: RecoveredLog) -> None:
        """Continue from the recovered state."""
        with self._lock:
            for record, push in zip(found.records, old.pushes, strict=True):
                self._note(record.lsn, self._wave(push.push.wave), push.payload.num_bytes, old.history)
        if old.closed is not None:
            self.durable_records = _superfluous(old.closed)
            self._completed_at[old.closed.built] = old.history

    def set_num_members(self, num_members: int) -> None:
        """Set the limits for a new number of virtual workers."""
        self._limits = self._limits_for(num_members)
        self._storage.log.max_bytes = self._limits.max_bytes

    # -- pushes ------------------------------------------------------------------------------------------------------

    def append(self, push: LoggedPush, stream: Sequence[Bytes], *, sums: Sequence[bytes] | None) -> None:
        """Append a push, and wait for the durability of the fsync policy.

        Args:
            push: its header.
            stream: its bytes, in pieces.
            sums: their checksums, if known; None: computed here.
        """
        wave = self._wave(push.wave)
        header = wire.to_bytes(LoggedPush, push)
        num_bytes = sum(memoryview(piece).nbytes for piece in stream)
        with self._lock:
            history = 0 if wave in self._waves else self._history_position()
            # Before it is written: a concurrent snapshot must not truncate it.
            self._note(self._storage.log.next_lsn, wave, num_bytes, history)
        self._storage.log.sync(self._storage.log.append(header, stream, sums=sums))

    def note_complete(self, clock: Clock) -> None:
        """Record that the weights of `clock` are complete, before the history has any line of the next one."""
        with self._lock:
            self._completed_at[clock] = self._history_position()

    def check_room(self, wave: Wave | None, *, built: Clock) -> None:
        """Reject a push without room; never one for the clock under construction, which would deadlock.

        Raises:
            Busy: the log is full; retry later.
        """
        if wave is None or wave <= built:
            return
        is_full = self._storage.log.is_full
        was_full, self._was_full = self._was_full, is_full
        if not is_full:
            return
        sentence = (
            f"the log of pushes has {bytes_text(self.num_bytes)}, its limit is {bytes_text(self.max_bytes)}; "
            "it shrinks once slower virtual workers have committed their waves"
        )
        if not was_full:
            log.warning("write_ahead_log_full", sentence=sentence)
        raise Busy(sentence)

    def durable_clock(self, staged: Clock) -> Clock:
        """Clock below which waves survive a restart, given that those below `staged` are here now.

        While the disk fails, a restart would discard the log and rewind the job to a checkpoint.
        """
        return staged if self._is_complete() else self._start

    @property
    def max_bytes(self) -> int:
        """Maximum size; beyond it the log is full."""
        return self._limits.max_bytes

    @property
    def num_bytes(self) -> int:
        """Size of the log."""
        return self._storage.log.num_bytes

    # -- snapshots ---------------------------------------------------------------------------------------------------

    def consider_snapshot(
        self, oldest: Clock, hold: Callable[[], Oldest], release: Callable[[FlatBuffer], None], *, at_barrier: bool
    ) -> None:
        """Start a snapshot of the oldest weights in the background, if due and none is in progress.

        Args:
            oldest: their clock.
            hold: acquires them.
            release: releases them.
            at_barrier: whether a barrier was just passed, a good moment for a snapshot.
        """
        if self._storage.is_busy:
            return
        self._go_past(oldest)
        if at_barrier and self._storage.log.alarm is not None:
            self._storage.log.reopen()
        newest = self._storage.newest
        if (newest is not None and oldest <= newest) or not self._is_worth_while(oldest, at_barrier=at_barrier):
            return
        self._num_behind = self._bytes_behind = 0  # should it fail, the next one is tried after as many again
        closed, weights = hold()

        def work() -> None:
            try:
                self._snapshot(closed, weights)
            finally:
                release(weights)

        self._storage.in_background(work, "snapshot")

    def wait_idle(self) -> None:
        """Wait until no snapshot is in progress."""
        self._storage.wait_idle()

    def close(self) -> None:
        """Close the log."""
        self._storage.close()

    # -- inside ------------------------------------------------------------------------------------------------------

    def _wave(self, wave: Wave | None) -> int:
        """The wave of a push; initial weights count as the wave before the first one."""
        return self._start - 1 if wave is None else wave

    def _note(self, lsn: int, wave: int, num_bytes: int, history: int) -> None:
        """Record that a push has this number in the log, or a larger one. With the lock held."""
        logged = self._waves.setdefault(wave, _LoggedWave(lsn, history))
        logged.num_bytes += num_bytes

    def _go_past(self, oldest: Clock) -> None:
        """Drop entries older than the oldest live weights, even during a long disk failure."""
        with self._lock:
            for wave in [wave for wave in self._waves if wave < oldest]:
                self._num_behind += 1
                self._bytes_behind += self._waves.pop(wave).num_bytes
            for clock in [clock for clock in self._completed_at if clock < oldest]:
                del self._completed_at[clock]

    def _is_worth_while(self, oldest: Clock, *, at_barrier: bool) -> bool:
        if self._storage.log.alarm is not None:
            return self._storage.log.is_complete_from(self._first_needed(oldest))
        worth = self._limits.barrier_bytes if at_barrier else self._limits.worth_bytes
        if self._bytes_behind > worth or self._num_behind > _WORTH_WAVES:
            return True
        return self._bytes_behind > self._limits.cheap_bytes and self._storage.is_cheap

    def _first_needed(self, clock: Clock) -> int:
        """First record needed to start from the weights of `clock`, the oldest ones."""
        with self._lock:
            # The newest present record; a noted one may never arrive.
            newest = self._storage.log.next_lsn - 1
            return min([newest, *(logged.lsn for wave, logged in self._waves.items() if wave >= clock)])

    def _snapshot(self, closed: ClosedState, weights: FlatBuffer) -> None:
        since = self._first_needed(closed.built)
        with self._lock:
            needed = [logged.history for wave, logged in self._waves.items() if wave >= closed.built]
            history = min([self._completed_at[closed.built], *needed])
        content = wire.to_json(ClosedState, closed)
        if not self._storage.snapshot(closed.built, content, [weights.memory()], since=since, history=history):
            return
        if self._storage.log.is_complete_from(since):
            self._storage.log.clear_alarm()
        self._storage.log.rotate()
        self.durable_records = _superfluous(closed)


def _superfluous(closed: ClosedState) -> int:
    """Number of decision-log records not needed after a start from `closed`: all that it followed but the last."""
    return max(0, closed.followed - 1)
