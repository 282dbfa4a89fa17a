"""One shard of one job: the tensors behind `sync.ShardState`.

A push is staged in a buffer of the shard's own layout while its bytes arrive; it is applied in the order of the
decision log, followed by one thread. Published versions are immutable. Every buffer is recycled.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from hetpipe import failpoints
from hetpipe.decide.sync.instructions import Apply, Close, Drop, Free, Initialize, Instruction, StageKey, stage_key
from hetpipe.decide.sync.records import CommitRecord, EvictRecord, PublishRecord, Record, SegmentRecord
from hetpipe.decide.sync.shard_state import Admission, ShardState
from hetpipe.errors import Busy, ClockFreed, ProtocolViolation
from hetpipe.observe.history import HistoryWriter
from hetpipe.server.shard.chunks import RunMap, chunks, fill
from hetpipe.server.shard.push_log import LoggedPush, Oldest, PushLog, RecoveredPush, RecoveredPushes
from hetpipe.server.shard.push_session import PushSession
from hetpipe.values.bounds import MAX_STAGES
from hetpipe.values.ids import Clock, VirtualWorkerIndex
from hetpipe.values.requests import PullHeader, PushHeader, Requester, SliceHeader, Watermarks
from hetpipe.values.shard_config import ShardConfig
from hetpipe.weights.flat import BufferPool, FlatBuffer, FlatLayout
from hetpipe.wire.call import Chunk


@dataclass(slots=True)
class ShardCounts:
    """Counters of a shard."""

    pushes: int = 0
    """Staged pushes."""
    pushed_bytes: int = 0
    duplicate_pushes: int = 0
    """Resends of staged pushes."""
    pulls: int = 0
    """Pulls begun."""
    pulled_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardFacts:
    """State of a shard at one moment."""

    counts: ShardCounts
    followed_records: int
    staged_waves: int
    """Including the initial weights."""
    published: Clock
    retained_versions: int
    weight_bytes: int
    """Bytes of all buffers in use."""
    staged_clock: Clock
    """Every member's waves below it are staged or committed."""
    committed_clock: Clock
    """Every member's waves below it are committed."""
    durable_clock: Clock
    """Every member's waves below it survive a restart; without a log, none does."""
    log_bytes: int
    """Size of the write-ahead log of pushes."""


def shard_layout(config: ShardConfig) -> FlatLayout:
    """Layout of a shard's slices in its buffers."""
    return FlatLayout([(s.name, (s.stop - s.start,), s.parameter.dtype) for s in config.slices])


class Shard:
    """Stages, applies and serves the slices of one shard. Thread-safe; `follow` is for one thread.

    Bounded memory: per member at most D + 3 staged waves, and what layers that are built anew begin with; the clocks
    retained by the log, one under construction, and two being written to checkpoints.
    """

    def __init__(self, config: ShardConfig, history: HistoryWriter, pushes: PushLog | None = None) -> None:
        """Start without contents.

        Args:
            config: configuration of the job.
            history: history of this process.
            pushes: persists staged pushes; None: no persistence.
        """
        self.config = config
        self._history = history
        self._pushes = pushes
        self.layout = shard_layout(config)
        self._pool = BufferPool(self.layout, torch.device("cpu"))
        self._state = ShardState(
            job_id=config.job_id,
            term=config.term,
            slices=config.slices,
            founders=config.membership.members,
            start=config.progress.clock,
            staleness=config.sync.staleness,
        )
        #: Guards everything below and the state; never held while bytes are copied or added.
        self._lock = threading.Lock()
        self._staging: dict[StageKey, FlatBuffer] = {}
        self._sessions: dict[tuple[StageKey, int], PushSession] = {}
        self._versions: dict[Clock, FlatBuffer] = {}
        self._building: FlatBuffer | None = None
        self._counts = ShardCounts()
        #: Staged pushes of an earlier process that this one has not reached yet, in order.
        self._old: deque[RecoveredPush] = deque()
        #: There may be records that an earlier process followed and this one has not: until they are replayed, requests
        #:#: may be ahead of this shard's state.
        self._is_behind = False

    # -- after a restart ---------------------------------------------------------------------------------------------

    def restore(self, old: RecoveredPushes) -> None:
        """Restore the state of an earlier process, before any other call. `caught_up` ends it.

        Raises:
            StateLost: the weights or a push are unreadable.
        """
        self._is_behind = True
        self._old = deque(sorted(old.pushes, key=lambda each: each.push.followed))
        if old.closed is not None and old.weights is not None:
            self._state.restore(old.closed)
            weights = self._pool.take()
            old.weights.read_into(weights.memory())
            self._versions[old.closed.built] = weights
            if self._pushes is not None:
                self._pushes.set_num_members(old.closed.num_members)
        self._restage()
        for instruction in self._state.resume():
            self._carry_out(instruction)

    def caught_up(self) -> None:
        """End recovery: all records of an earlier process are executed again."""
        self._is_behind = False

    def _restage(self) -> None:
        """Stage the pushes again that an earlier process had staged at this record."""
        while self._old and self._old[0].push.followed <= self._state.followed:
            old = self._old.popleft()
            header = self._header_of(old.push)
            with self._lock:
                if not self._state.restage(header, old.push.slices):
                    continue
                key = stage_key(header)
                if key not in self._staging:
                    self._staging[key] = self._pool.take()
                buffer = self._staging[key]
            fill(buffer, self._run_map(header.slices, old.push.slices), old.payload.blocks())
            self._report_staged(header, old.push.slices)

    def _header_of(self, push: LoggedPush) -> PushHeader:
        requester = Requester(self.config.job_id, self.config.term, push.vw, push.incarnation, push.stage)
        slices = [self.config.slices[index] for index in push.slices]
        return PushHeader(
            requester,
            push.wave,
            tuple(SliceHeader(s.parameter.name, s.start, s.stop, s.parameter.dtype) for s in slices),
            push.fresh,
        )

    # -- pushes and pulls --------------------------------------------------------------------------------------------

    def begin_push(self, header: PushHeader) -> PushSession | Watermarks:
        """Admit a push before any allocation; for one already staged, return the watermark of its worker.

        Raises:
            ProtocolViolation: a kind of it, by `ShardState.admit`.
            Busy: the push log is full, or this shard is still replaying the decision log after a restart.
        """
        self._check_stage(header.requester)
        self._check_caught_up()
        key = stage_key(header)
        with self._lock:
            verdict, indices = self._state.admit(header)
            if verdict is Admission.DUPLICATE:
                self._counts.duplicate_pushes += 1
                return self._watermarks(header.requester.vw)
            if self._pushes is not None:
                self._pushes.check_room(header.wave, built=self._state.built)
            if key not in self._staging:
                self._staging[key] = self._pool.take()
            session = PushSession(header, indices, self._staging[key], self._complete)
            earlier = self._sessions.get((key, header.requester.stage))
            self._sessions[key, header.requester.stage] = session
        if earlier is not None:
            earlier.abandon()
        return session

    def _complete(self, session: PushSession) -> Watermarks:
        """Handle the end of a session: persist the bytes and count the push as staged.

        Raises:
            MalformedChunk: a resend took over, or the wave was dropped.
        """
        header, indices = session.header, session.indices
        who = header.requester
        if self._pushes is not None:
            push = LoggedPush(
                who.vw, who.incarnation, who.stage, header.wave, self._state.followed, indices, header.fresh
            )
            self._pushes.append(push, session.stream, sums=session.sums)
            failpoints.reach("push.after_durable")
        place = stage_key(header), who.stage
        with self._lock:
            if self._sessions.get(place) is not session:
                raise session.given_up()
            del self._sessions[place]
            self._state.staged_by(header, indices)
            self._counts.pushes += 1
            self._counts.pushed_bytes += self._num_bytes(indices)
            # Under the lock, so that no incarnation is acknowledged as staged after its eviction was executed.
            self._report_staged(header, indices)
            return self._watermarks(who.vw)

    def _watermarks(self, vw: VirtualWorkerIndex) -> Watermarks:
        """Watermarks of the virtual workers. With the lock held."""
        staged, committed = self._state.clocks_of(vw)
        return Watermarks(staged, committed, self._durable_clock(staged))

    def _durable_clock(self, staged: Clock) -> Clock:
        return self.config.progress.clock if self._pushes is None else self._pushes.durable_clock(staged)

    def _report_staged(self, header: PushHeader, indices: tuple[int, ...]) -> None:
        if header.wave is not None and not header.fresh:
            requester = header.requester
            self._history.staged(
                vw=requester.vw,
                incarnation=requester.incarnation,
                stage=requester.stage,
                wave=header.wave,
                shard=self.config.shard,
                slices=indices,
            )

    @contextmanager
    def pull(self, header: PullHeader) -> Iterator[Iterator[Chunk]]:
        """Context manager: chunks of the requested slices of w^(clock), which stays alive inside.

        Raises:
            ClockNotPublished, ClockFreed, SliceMismatch, StaleTerm, StaleIncarnation: as named.
            Busy: this shard is still replaying the decision log after a restart.
        """
        self._check_stage(header.requester)
        self._check_caught_up()
        with self._lock:
            self._state.check_request(header.requester)
            indices = self._state.slice_index.of(header.slices)
            self._state.check_pull(header.clock)
            version = self._pool.hold(self._versions[header.clock])
            self._counts.pulls += 1
            self._counts.pulled_bytes += self._num_bytes(indices)
        requester = header.requester
        self._history.pull(shard=self.config.shard, vw=requester.vw, stage=requester.stage, clock=header.clock)
        try:
            yield chunks(version, self._run_map(header.slices, indices))
        finally:
            self._pool.release(version)

    def hold(self, clock: Clock) -> FlatBuffer:
        """Acquire w^(clock), kept alive until `release`; read-only.

        Raises:
            ClockFreed: it is not available, or no longer.
        """
        with self._lock:
            version = self._versions.get(clock)
            if version is None:
                raise ClockFreed(f"w^({clock}) is not on shard {self.config.shard}")
            return self._pool.hold(version)

    def release(self, version: FlatBuffer) -> None:
        """Release what `hold` acquired."""
        self._pool.release(version)

    @property
    def num_records(self) -> int:
        """Records followed so far."""
        return self._state.followed

    def facts(self) -> ShardFacts:
        """Current state."""
        with self._lock:
            staged = self._state.staged_clock
            return ShardFacts(
                counts=replace(self._counts),
                followed_records=self._state.followed,
                staged_waves=len(self._state.staged),
                published=self._state.published,
                retained_versions=len(self._state.alive),
                weight_bytes=self._pool.alive * self.layout.num_bytes,
                staged_clock=staged,
                committed_clock=self._state.committed_clock,
                durable_clock=self._durable_clock(staged),
                log_bytes=0 if self._pushes is None else self._pushes.num_bytes,
            )

    def follow(self, record: Record) -> None:
        """Execute the next record of the decision log. Called by one thread, in order.

        Raises:
            StateLost: the logged push of an earlier process is missing or unreadable.
        """
        with self._lock:
            instructions = self._state.follow(record)
        for instruction in instructions:
            self._carry_out(instruction)
        self._restage()
        if self._pushes is not None and isinstance(record, SegmentRecord):
            self._pushes.set_num_members(len(record.members))
        if self._pushes is not None and isinstance(record, PublishRecord | SegmentRecord):
            oldest, at_barrier = min(self._state.alive), isinstance(record, SegmentRecord)
            self._pushes.consider_snapshot(oldest, self._hold_oldest, self._pool.release, at_barrier=at_barrier)
        if isinstance(record, CommitRecord):
            failpoints.reach("commit.after_some_shards")
        if isinstance(record, EvictRecord):
            # The unfinished pushes of an evicted virtual worker: nothing else drops them.
            self._end_pushes(lambda key: key[:2] == (record.vw, record.incarnation))

    def check_requester(self, requester: Requester) -> None:
        """Reject a stage of another job, term or incarnation.

        Raises:
            StaleTerm, StaleIncarnation, ProtocolViolation: as named.
            ClockNotPublished: it may be a member whose record this shard has not reached yet.
        """
        self._check_stage(requester)
        with self._lock:
            self._state.check_request(requester)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _hold_oldest(self) -> Oldest:
        with self._lock:
            clock = min(self._state.alive)
            return self._state.closed(clock), self._pool.hold(self._versions[clock])

    def _check_caught_up(self) -> None:
        if self._is_behind:
            raise Busy(
                f"shard {self.config.shard} of job {self.config.job_id} was restarted and is reading the decision log"
            )

    def _run_map(self, slices: tuple[SliceHeader, ...], indices: tuple[int, ...]) -> RunMap:
        return RunMap(slices, [self.layout.slots[index].offset for index in indices])

    def _num_bytes(self, indices: tuple[int, ...]) -> int:
        return sum(self.layout.slots[index].num_bytes for index in indices)

    def _check_stage(self, requester: Requester) -> None:
        """Reject a stage index its virtual worker does not have; `ShardState` checks the virtual worker itself.

        Only the clock shard has the number of stages of later incarnations, and rejects joins of others.
        """
        founded = self.config.membership.num_stages.get(requester.vw, MAX_STAGES)
        count = founded if requester.incarnation == 0 else MAX_STAGES
        if not 0 <= requester.stage < count:
            raise ProtocolViolation(f"virtual worker {requester.vw} has {count} stages; there is no {requester}")

    def _carry_out(self, instruction: Instruction) -> None:
        match instruction:
            case Initialize(clock, key):
                with self._lock:
                    self._versions[clock] = self._staging.pop(key) if key in self._staging else self._pool.take()
                # Another incarnation that began to push them may have died; there is no record for one that is no
                # member yet.
                self._end_pushes(lambda key: key[2] is None)
                self._completed(clock)
            case Apply():
                self._apply(instruction)
            case Close(clock):
                with self._lock:
                    previous = self._versions[Clock(clock - 1)]
                built = self._building or self._pool.take().copy_(previous)
                if self._building is not None and self._state.idle:
                    # Nothing of them was pushed: what was added in their places is not defined.
                    built.carry_over_(previous, [self.layout.slots[index] for index in self._state.idle])
                self._building = None
                with self._lock:
                    self._versions[clock] = built
                self._completed(clock)
            case Drop(key):
                self._drop(key)
            case Free(clock):
                with self._lock:
                    self._discard(self._versions.pop(clock, None))

    def _apply(self, instruction: Apply) -> None:
        vw, incarnation, wave = instruction.key
        with self._lock:
            update = self._staging.pop(instruction.key, None)
            previous = self._versions[Clock(instruction.clock - 1)]
        if update is not None:
            sync = self.config.sync
            if sync.combine == "mean":
                update.mul_(instruction.mean_factor(one_update_per_wave=sync.policy.one_update_per_wave))
            if instruction.fresh is not None:
                self._add_to_fresh(instruction.fresh, update, previous)
            elif self._building is None:
                self._building = update.add_(previous)  # the staging buffer becomes the version: no third buffer
            else:
                self._building.add_(update)
                self._discard(update)
        assert wave is not None, "only waves are applied"
        failpoints.reach("push.after_apply")
        self._history.apply(shard=self.config.shard, vw=vw, incarnation=incarnation, wave=wave)

    def _add_to_fresh(self, key: StageKey, update: FlatBuffer, previous: FlatBuffer) -> None:
        """Add the first wave of a segment to `previous`, where layers that are built anew have what `key` has staged.

        `previous` itself stays as it is: it is what the barrier was evaluated with, and its checkpoint has.
        """
        with self._lock:
            base = self._staging.pop(key)
        kept = [slot for index, slot in enumerate(self.layout.slots) if index not in self._state.fresh]
        self._building = update.add_(base.carry_over_(previous, kept))
        self._discard(base)

    def _completed(self, clock: Clock) -> None:
        if self._pushes is not None:
            self._pushes.note_complete(clock)

    def _end_pushes(self, concerns: Callable[[StageKey], bool]) -> None:
        """Drop unfinished pushes."""
        with self._lock:
            keys = {key for key, _ in self._sessions if concerns(key)}
        for key in keys:
            self._drop(key)

    def _drop(self, key: StageKey) -> None:
        with self._lock:
            buffer = self._staging.pop(key, None)
            late = [self._sessions.pop(place) for place in tuple(self._sessions) if place[0] == key]
        for session in late:
            session.abandon()  # before the buffer is recycled, or late bytes would end up in another wave
        self._discard(buffer)

    def _discard(self, buffer: FlatBuffer | None) -> None:
        if buffer is not None:
            self._pool.release(buffer)
