"""One shard of one job: the tensors behind `sync.ShardState`.

A push is staged in a buffer of the shard's own layout while its bytes arrive; the decision log, followed by one thread,
says when it is added. Published versions are never written again. Every buffer is recycled.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from hetpipe.errors import MalformedChunk, NonFiniteUpdate, ProtocolViolation
from hetpipe.observe.history import HistoryWriter
from hetpipe.ps.chunks import ChunkReceiver, Run, RunMap, chunks
from hetpipe.spec.ids import Clock
from hetpipe.spec.plan import SlicePlan
from hetpipe.spec.requests import PullHeader, PushHeader, Requester
from hetpipe.spec.run import ShardConfig
from hetpipe.sync.records import EvictRecord, Record
from hetpipe.sync.shard_state import (
    Admission,
    Apply,
    Close,
    Drop,
    Free,
    Initialize,
    Instruction,
    ShardState,
    StageKey,
    stage_key,
)
from hetpipe.weights.flat import BufferPool, FlatBuffer, FlatLayout, finite


def slice_name(piece: SlicePlan) -> str:
    """A slice's name within its shard."""
    return f"{piece.parameter.name}[{piece.start}:{piece.stop}]"


class PushSession:
    """The bytes of one admitted push on their way into the staging buffer.

    A resend that arrives while an earlier attempt is still under way takes over: the earlier one writes nothing more.
    """

    def __init__(self, shard: Shard, header: PushHeader, indices: tuple[int, ...], buffer: FlatBuffer) -> None:
        self._shard = shard
        self._header = header
        self._indices = indices
        self._buffer = buffer
        slots = shard.layout.slots
        self._receiver = ChunkReceiver(buffer, RunMap(header.slices, [slots[i].offset for i in indices]))
        self._lock = threading.Lock()
        #: Why nothing more may come of this session, once that is so.
        self._ended: ProtocolViolation | None = None

    def write(self, chunk: bytes) -> None:
        """Take the next chunk.

        Raises:
            MalformedChunk: see `ChunkReceiver.write`.
            NonFiniteUpdate: NaN or infinity, named by parameter; nothing of this wave will apply.
        """
        with self._lock:
            if self._ended is not None:
                raise self._ended
            try:
                for piece in self._receiver.write(chunk):
                    self._check_finite(piece)
            except ProtocolViolation as error:
                self._ended = error
                raise

    def finish(self) -> None:
        """All chunks are here: the push counts as staged.

        Raises:
            MalformedChunk: bytes are missing.
            ProtocolViolation: what ended the session before.
        """
        with self._lock:
            if self._ended is not None:
                raise self._ended
            self._receiver.finish()
            self._shard.staged(self._header, self._indices)

    def abandon(self) -> None:
        """Write nothing more: a resend took over, or the wave was dropped."""
        with self._lock:
            self._ended = MalformedChunk(f"this push of {self._header.requester} was given up for a later one")

    def _check_finite(self, piece: Run) -> None:
        start, end = piece.buffer, piece.buffer + piece.num_bytes
        for (dtype, first, last), region in zip(self._buffer.layout.regions, self._buffer.regions, strict=True):
            low, high = max(start, first), min(end, last)
            size = region.element_size()
            if low < high and not finite(region[(low - first) // size : -(-(high - first) // size)]):
                names = [s.name for s in self._buffer.layout.slots if s.offset < high and s.offset + s.num_bytes > low]
                what = "first weights" if self._header.wave is None else f"wave {self._header.wave}"
                raise NonFiniteUpdate(
                    f"{what} of {self._header.requester} is not finite ({dtype}) in or near {', '.join(names[:3])}"
                )


@dataclass(slots=True)
class ShardCounts:
    """What a shard has done so far."""

    pushes: int = 0
    """Staged."""
    pushed_bytes: int = 0
    duplicate_pushes: int = 0
    """Of what was staged already."""
    pulls: int = 0
    """Begun."""
    pulled_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardFacts:
    """A shard at one moment."""

    counts: ShardCounts
    followed_records: int
    staged_waves: int
    """First weights among them."""
    published: Clock
    retained_versions: int
    weight_bytes: int
    """Of all buffers in use."""


class Shard:
    """Stages, applies and serves the slices of one shard. Thread-safe; `follow` is for one thread.

    Bounded memory: per member at most D + 3 staged waves, and the clocks the log retains plus one being built.
    """

    def __init__(self, config: ShardConfig, history: HistoryWriter) -> None:
        self.config = config
        self._history = history
        self.layout = FlatLayout([(slice_name(s), (s.stop - s.start,), s.parameter.dtype) for s in config.slices])
        self._pool = BufferPool(self.layout, torch.device("cpu"))
        self._state = ShardState(
            job_id=config.job_id,
            term=config.term,
            slices=config.slices,
            members=config.membership.members,
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

    def begin_push(self, header: PushHeader) -> PushSession | None:
        """Admit a push before anything is allocated; None if it is staged already.

        Raises:
            ProtocolViolation: a kind of it, by `ShardState.admit`.
        """
        self._check_stage(header.requester)
        key = stage_key(header)
        with self._lock:
            verdict, indices = self._state.admit(header)
            if verdict is Admission.DUPLICATE:
                self._counts.duplicate_pushes += 1
                return None
            if key not in self._staging:
                self._staging[key] = self._pool.take()
            session = PushSession(self, header, indices, self._staging[key])
            earlier = self._sessions.get((key, header.requester.stage))
            self._sessions[key, header.requester.stage] = session
        if earlier is not None:
            earlier.abandon()
        return session

    def staged(self, header: PushHeader, indices: tuple[int, ...]) -> None:
        """A session received all its bytes."""
        with self._lock:
            self._sessions.pop((stage_key(header), header.requester.stage), None)
            self._state.staged_by(header, indices)
            self._counts.pushes += 1
            self._counts.pushed_bytes += self._num_bytes(indices)
        if header.wave is not None:
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
    def pull(self, header: PullHeader) -> Iterator[Iterator[bytes]]:
        """The chunks of the asked-for slices of w^(clock), inside a `with` that keeps the version alive.

        Raises:
            ClockNotPublished, ClockFreed, SliceMismatch, StaleTerm, StaleIncarnation: as named.
        """
        self._check_stage(header.requester)
        with self._lock:
            self._state.check_request(header.requester)
            indices = self._state.slice_indices(header.slices)
            self._state.check_pull(header.clock)
            version = self._pool.hold(self._versions[header.clock])
            self._counts.pulls += 1
            self._counts.pulled_bytes += self._num_bytes(indices)
        requester = header.requester
        self._history.pull(shard=self.config.shard, vw=requester.vw, stage=requester.stage, clock=header.clock)
        try:
            yield chunks(version, RunMap(header.slices, [self.layout.slots[i].offset for i in indices]))
        finally:
            self._pool.release(version)

    @property
    def num_records(self) -> int:
        """Records followed so far."""
        return self._state.followed

    def facts(self) -> ShardFacts:
        """How it stands."""
        with self._lock:
            return ShardFacts(
                counts=replace(self._counts),
                followed_records=self._state.followed,
                staged_waves=len(self._state.staged),
                published=self._state.published,
                retained_versions=len(self._state.alive),
                weight_bytes=self._pool.alive * self.layout.num_bytes,
            )

    def follow(self, record: Record) -> None:
        """Carry out the next record of the decision log. Called by one thread, in order."""
        with self._lock:
            instructions = self._state.follow(record)
        for instruction in instructions:
            self._carry_out(instruction)
        if isinstance(record, EvictRecord):
            self._end_pushes_of(record)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _num_bytes(self, indices: tuple[int, ...]) -> int:
        return sum(self.layout.slots[index].num_bytes for index in indices)

    def _check_stage(self, requester: Requester) -> None:
        """Refuse a stage that its virtual worker does not have; whether it has that one is for `ShardState` to say."""
        count = self.config.membership.num_stages.get(requester.vw)
        if count is not None and not 0 <= requester.stage < count:
            raise ProtocolViolation(f"virtual worker {requester.vw} has {count} stages; there is no {requester}")

    def _carry_out(self, instruction: Instruction) -> None:
        match instruction:
            case Initialize(clock, key):
                with self._lock:
                    self._versions[clock] = self._staging.pop(key) if key in self._staging else self._pool.take()
            case Apply():
                self._apply(instruction)
            case Close(clock):
                with self._lock:
                    previous = self._versions[Clock(clock - 1)]
                built = self._building or self._pool.take().copy_(previous)
                self._building = None
                with self._lock:
                    self._versions[clock] = built
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
            if self.config.sync.combine == "mean":
                update.mul_(1.0 / instruction.num_members)
            if self._building is None:
                self._building = update.add_(previous)  # the staging buffer becomes the version: no third buffer
            else:
                self._building.add_(update)
                self._discard(update)
        assert wave is not None, "only waves are applied"
        self._history.apply(shard=self.config.shard, vw=vw, incarnation=incarnation, wave=wave)

    def _end_pushes_of(self, record: EvictRecord) -> None:
        """Drop what an evicted virtual worker began to push and did not finish: nothing else will."""
        with self._lock:
            keys = {key for key, _ in self._sessions if key[:2] == (record.vw, record.incarnation)}
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
