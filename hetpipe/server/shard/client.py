"""A stage's client of the shards: pushes and pulls in the background to overlap with compute.

One thread pushes waves in order and reports them staged; one prefetches published weights; one follows the decision
log, as its agent relays it or, without that, from the clock shard. Their results reach the stage through the
`SyncListener`, on their threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from hetpipe.checkpoint.manifest import MANIFEST, file_digest
from hetpipe.clock import Clock as TimeSource
from hetpipe.decide.sync.decision_log import FROM_NEWEST_SEGMENT
from hetpipe.decide.sync.log_view import is_counted
from hetpipe.errors import (
    BuffersMissing,
    ClockFreed,
    ClockNotPublished,
    DamagedChunk,
    DeadlineExceeded,
    HetpipeError,
    StaleIncarnation,
    WaveOutOfOrder,
)
from hetpipe.observe.log import get_logger
from hetpipe.observe.timeline import Activity, TimelineWriter
from hetpipe.pipeline.synchroniser import SyncListener
from hetpipe.server.shard.buffer_exchange import buffers_layout, run_map
from hetpipe.server.shard.chunks import ChunkReceiver, Chunks, RunMap
from hetpipe.server.shard.relayed_log import RelayedLog
from hetpipe.values.ids import Clock, ShardIndex, Wave
from hetpipe.values.plan import DTYPE_BYTES, SlicePlan
from hetpipe.values.requests import (
    Blocks,
    BuffersHeader,
    CheckpointFile,
    PullHeader,
    PushHeader,
    Requester,
    SliceHeader,
)
from hetpipe.values.sync import Progress, PushCompression
from hetpipe.weights.flat import BufferPool, FlatBuffer, FlatLayout
from hetpipe.wire import calls
from hetpipe.wire.call import Calls
from hetpipe.wire.calls import (
    FollowLogRequest,
    GetProgressRequest,
    HoldClockRequest,
    JoinRequest,
    LogRecords,
    ReportCheckpointRequest,
    ReportInitializedRequest,
    ReportPreparedRequest,
    ReportStagedRequest,
)

_log = get_logger(__name__)

#: Pause before polling again.
_FIRST_PAUSE_SECONDS = 0.002
_LONGEST_PAUSE_SECONDS = 0.1

#: Timeout for the other shards to reach a state that the clock shard has announced. They follow the clock shard, so it
#:#: is at least the timeout for an unavailable parameter server.
_SHOWN_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class _Share:
    """This stage's slices on one shard."""

    shard: ShardIndex
    headers: tuple[SliceHeader, ...]
    runs: RunMap


def shares_of(slices: Sequence[SlicePlan], layout: FlatLayout) -> tuple[_Share, ...]:
    """Group a stage's slices by shard and map each into the stage's own layout."""
    shares: list[_Share] = []
    for shard in sorted({piece.shard for piece in slices}):
        mine = [piece for piece in slices if piece.shard == shard]
        headers = tuple(SliceHeader(p.parameter.name, p.start, p.stop, p.parameter.dtype) for p in mine)
        offsets = [layout.slot(p.parameter.name).offset + p.start * DTYPE_BYTES[p.parameter.dtype] for p in mine]
        ends = [p.stop == p.parameter.num_elements for p in mine]
        shares.append(_Share(shard, headers, RunMap(headers, offsets, ends_slot=ends)))
    return tuple(shares)


class ShardClient:
    """One stage's connection to all shards. Methods must be called from one thread."""

    def __init__(  # noqa: PLR0913 - a stage's share of the weights, who has it, and how it is exchanged
        self,
        requester: Requester,
        slices: Sequence[SlicePlan],
        pool: BufferPool,
        *,
        shards: Sequence[Calls],
        clock_shard: Calls,
        listener: SyncListener,
        clock: TimeSource,
        timeline: TimelineWriter,
        compression: PushCompression = "none",
        relayed: RelayedLog | None = None,
    ) -> None:
        self.requester = requester
        self._relayed = relayed
        self._compression = compression
        self._slices = tuple(slices)
        self._shares = self._pushed = shares_of(slices, pool.layout)
        self._pool = pool
        self._shards = shards
        self.clock_shard = clock_shard
        self._listener = listener
        self._clock = clock
        self._timeline = timeline
        self._stopped = threading.Event()
        self._pusher = ThreadPoolExecutor(1, thread_name_prefix="push")
        self._fetcher = ThreadPoolExecutor(1, thread_name_prefix="pull")
        self._bulk = ThreadPoolExecutor(max(1, 2 * len(shards)), thread_name_prefix="transfer")
        self._follower: threading.Thread | None = None
        #: Whether this stage is a member of the current segment; None before the first.
        self._is_counted: bool | None = None
        #: Who sent the last records.
        self._source = ""
        #: The latest part of a checkpoint, and its digest.
        self._part: tuple[Path | None, list[CheckpointFile]] = (None, [])
        #: Bytes of weights sent and received, gaps between slices included.
        self.pushed_bytes = 0
        self.pulled_bytes = 0

    def start(self) -> None:
        """Follow the decision log from the start of the newest segment."""
        self._follower = threading.Thread(target=self._follow, name="follow-log", daemon=True)
        self._follower.start()

    def join(self) -> bool:
        """Implement `Synchroniser.join`."""
        return self.clock_shard.invoke(calls.JOIN, JoinRequest(self.requester)).makes_weights

    def push_initial_weights(self, weights: FlatBuffer) -> None:
        """Implement `Synchroniser.push_initial_weights`."""
        self._push(None, weights, self._shares)
        self.clock_shard.invoke(calls.REPORT_INITIALIZED, ReportInitializedRequest(self.requester))

    def push_wave(
        self,
        wave: Wave,
        update: FlatBuffer | None,
        blocks: Blocks | None,
        *,
        segment: Clock,
        squares: dict[int, float] | None = None,
    ) -> None:
        """Stage ũ on every shard and report it, in the background, after all earlier waves.

        Args:
            wave: the wave.
            update: its ũ in host memory, owned by this call from now on; None for an empty wave.
            blocks: samples of its minibatches, on the first stage.
            segment: start of its segment.
            squares: layer → squared norm of its gradients, where norms decide what freezes.
        """
        request = ReportStagedRequest(self.requester, wave, blocks or (), segment, squares or {})
        shares, pool = self._pushed, self._pool
        self._submit(self._pusher, lambda: self._push_and_report(wave, update, request, shares, pool))

    def push_fresh(self, wave: Wave, weights: FlatBuffer, layers: Collection[int]) -> None:
        """Implement `Synchroniser.push_fresh`, in the background."""
        pool = self._pool
        shares = shares_of([piece for piece in self._slices if piece.layer in layers], pool.layout)

        def push() -> None:
            try:
                self._push(wave, weights, shares, fresh=True)
            finally:
                pool.release(weights)

        self._submit(self._pusher, push)

    def fetch(self, clock: Clock, *, ahead: bool) -> None:
        """Pull w^(clock) into host memory in the background; the result goes to `SyncListener.on_fetched`."""

        def pull() -> None:
            try:
                published: FlatBuffer | None = self._pull(clock)
            except (ClockFreed, StaleIncarnation):
                # A leaving stage may have prefetched weights beyond the barrier.
                if not ahead:
                    raise
                published = None
            self._listener.on_fetched(clock, published)

        self._submit(self._fetcher, pull)

    def hold(self, switch: int) -> tuple[Clock, Clock, int]:
        """Implement `Synchroniser.hold`."""
        held = self.clock_shard.invoke(calls.HOLD_CLOCK, HoldClockRequest(self.requester, switch))
        return held.clock, held.barrier, held.moves

    def prepared(self, index: int, *, can: bool) -> None:
        """Implement `Synchroniser.prepared`."""
        self.clock_shard.invoke(calls.REPORT_PREPARED, ReportPreparedRequest(self.requester, index, can))

    def progress(self) -> Progress:
        """Implement `Synchroniser.progress`."""
        return self.clock_shard.invoke(calls.GET_PROGRESS, GetProgressRequest(self.requester))

    def report_checkpoint(self, clock: Clock, path: Path | None, *, failure: str = "") -> bool:
        """Implement `Synchroniser.report_checkpoint`."""
        part = self._part  # uploads are reported from a thread of their own
        if path is not None and path != part[0]:
            part = self._part = (path, [file_digest(path)])
        files = () if path is None else tuple(part[1])
        request = ReportCheckpointRequest(self.requester, clock, files, failure)
        return self.clock_shard.invoke(calls.REPORT_CHECKPOINT, request).complete

    def is_complete(self, checkpoint: Path) -> bool:
        """Implement `Synchroniser.is_complete`."""
        return (checkpoint / MANIFEST).exists()

    def exchange_buffers(self, clock: Clock, mine: FlatBuffer, *, deadline_seconds: float) -> FlatBuffer:
        """Send this stage's model buffers at a barrier; return their averages over all workers. Blocks.

        Raises:
            DeadlineExceeded: another virtual worker did not send its buffers in time; the message names it.
        """
        slots = mine.layout.slots
        headers = tuple(SliceHeader(s.name, 0, s.num_bytes // DTYPE_BYTES[s.dtype], s.dtype) for s in slots)
        header = BuffersHeader(self.requester, clock, headers)
        runs = run_map(header, buffers_layout(header))
        result = FlatBuffer(mine.layout, mine.data.device)
        is_sent = False

        def exchange() -> None:
            nonlocal is_sent
            if not is_sent:
                self.clock_shard.upload(calls.PUSH_BUFFERS, header, Chunks(mine, runs))
                is_sent = True
            receiver = ChunkReceiver(result, runs, restarts=True)
            try:
                for chunk in self.clock_shard.download(calls.PULL_BUFFERS, header):
                    receiver.write(chunk)
            except BuffersMissing:
                is_sent = False  # the clock shard was restarted, and had not persisted them
                raise
            receiver.finish()

        self._until_published(exchange, deadline_seconds)
        return result

    def change_layers(self, slices: Sequence[SlicePlan], pool: BufferPool, *, deadline_seconds: float) -> None:
        """Implement `Synchroniser.change_layers`.

        Raises:
            DeadlineExceeded: a pull for the old layers did not end in time.
        """
        # The barrier's weights may be in transfer twice: prefetched, and requested now.
        idle = self._fetcher.submit(lambda: None)
        if wait([idle], timeout=deadline_seconds).not_done:
            raise DeadlineExceeded(f"{self.requester} waited {deadline_seconds:.0f} s for a pull to end")
        self._slices = tuple(slices)
        self._shares = self._pushed = shares_of(slices, pool.layout)
        self._pool = pool

    def leave_out(self, inactive: Collection[int]) -> None:
        """Implement `Synchroniser.leave_out`."""
        active = [piece for piece in self._slices if piece.layer not in inactive]
        self._pushed = shares_of(active, self._pool.layout)

    def close(self) -> None:
        """Stop background work and close the connections; operations in progress fail silently."""
        self._stopped.set()
        if self._relayed is not None:
            self._relayed.close()
        for shard in self._shards:
            shard.close()
        for executor in (self._pusher, self._fetcher, self._bulk):
            executor.shutdown(wait=False, cancel_futures=True)

    def drain(self, *, deadline_seconds: float) -> None:
        """Wait until everything pushed so far is staged and reported.

        Raises:
            DeadlineExceeded: not done in time.
        """
        done = self._pusher.submit(lambda: None)
        if wait([done], timeout=deadline_seconds).not_done:
            raise DeadlineExceeded(f"{self.requester} waited {deadline_seconds:.0f} s for its pushes to be staged")

    # -- on the background threads -----------------------------------------------------------------------------------

    def _submit(self, executor: ThreadPoolExecutor, work: Callable[[], None]) -> None:
        def guarded() -> None:
            try:
                work()
            except Exception as error:  # noqa: BLE001 - passed to the compute thread, which raises it
                if not self._stopped.is_set():
                    self._listener.on_error(error)

        try:
            executor.submit(guarded)
        except RuntimeError:  # closed meanwhile, by another thread
            if not self._stopped.is_set():
                raise

    def _push_and_report(
        self,
        wave: Wave,
        update: FlatBuffer | None,
        request: ReportStagedRequest,
        shares: tuple[_Share, ...],
        pool: BufferPool,
    ) -> None:
        """Push by the layers that the stage had when it asked."""
        try:
            if update is not None:
                with self._timeline.span(Activity.PUSH, wave=wave):
                    self._push_update(wave, update, shares, pool)
        finally:
            if update is not None:
                pool.release(update)
        try:
            self.clock_shard.invoke(calls.REPORT_STAGED, request)
        except WaveOutOfOrder:
            if update is not None:
                raise  # only an empty wave can be beyond a barrier that was set after it was sent

    def _push_update(self, wave: Wave, update: FlatBuffer, shares: tuple[_Share, ...], pool: BufferPool) -> None:
        """Push ũ as it is or rounded; the stage goes on with the exact one, which it may still hold."""
        if self._compression == "none":
            self._push(wave, update, shares)
            return
        rounded = pool.take_on_host().set_rounded_(update)
        try:
            self._push(wave, rounded, shares, in_halves=True)
        finally:
            pool.release(rounded)

    def _push(
        self,
        wave: Wave | None,
        buffer: FlatBuffer,
        shares: tuple[_Share, ...],
        *,
        in_halves: bool = False,
        fresh: bool = False,
    ) -> None:
        sent: dict[ShardIndex, int] = {}

        def attempt(share: _Share) -> None:
            header = PushHeader(self.requester, wave, share.headers, fresh)
            counted = Chunks(buffer, share.runs, in_halves=in_halves)
            self._shards[share.shard].upload(calls.PUSH, header, counted)
            sent[share.shard] = counted.payload_bytes

        def to(share: _Share) -> None:
            self._until_published(lambda: attempt(share), _SHOWN_SECONDS)

        self._on_all_shards(shares, to)
        self.pushed_bytes += sum(sent.values())

    def _pull(self, clock: Clock) -> FlatBuffer:
        target = self._pool.take_on_host()

        def attempt(share: _Share) -> None:
            receiver = ChunkReceiver(target, share.runs, restarts=True)
            header = PullHeader(self.requester, clock, share.headers)
            for chunk in self._shards[share.shard].download(calls.PULL, header):
                receiver.write(chunk)
            receiver.finish()

        try:
            with self._timeline.span(Activity.PULL, clock=clock):
                shares = self._shares
                self._on_all_shards(shares, lambda share: self._until_published(lambda: attempt(share), _SHOWN_SECONDS))
        except BaseException:
            self._pool.release(target)
            raise
        self.pulled_bytes += sum(share.runs.num_bytes for share in self._shares)
        return target

    def _on_all_shards(self, shares: tuple[_Share, ...], work: Callable[[_Share], None]) -> None:
        """Run `work` for every shard in parallel; raise the first failure once all have ended."""
        if len(shares) == 1:
            work(shares[0])
            return
        futures: list[Future[None]] = [self._bulk.submit(work, share) for share in shares]
        failures: list[Exception] = []
        for future in futures:
            try:
                future.result()  # not `wait`, which does not wake for a future that `close` cancelled
            except Exception as error:  # noqa: BLE001 - raised once all have ended
                failures.append(error)
        if failures:
            raise failures[0]

    def _until_published(self, work: Callable[[], None], deadline_seconds: float) -> None:
        """Retry `work` until its result is published and undamaged. The deadline excludes outages of a shard."""
        waited = 0.0
        pause = _FIRST_PAUSE_SECONDS
        while True:
            try:
                return work()
            except (ClockNotPublished, DamagedChunk) as error:
                if waited > deadline_seconds or self._stopped.is_set():
                    raise DeadlineExceeded(f"{self.requester} waited {waited:.1f} s: {error}") from error
                self._clock.sleep(pause)
                waited += pause
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def _follow(self) -> None:
        position = FROM_NEWEST_SEGMENT
        try:
            while not self._stopped.is_set():
                for found in self._log_from(position):
                    position = found.records[-1].index + 1
                    own, before = self.requester, self._is_counted
                    self._is_counted = is_counted(found.records, own.vw, own.incarnation, before=before)
                    self._listener.on_records(found.records)
        except HetpipeError as error:
            if not self._stopped.is_set():
                self._listener.on_error(error)

    def _log_from(self, position: int) -> Iterable[LogRecords]:
        """The next records: one message of the agent, or a stream of the clock shard.

        The eviction of a stage that is not a member has no record: only the clock shard can tell it.
        """
        if self._relayed is not None and self._is_counted is not False:
            relayed = self._relayed.take(position)
            if relayed is not None or self._stopped.is_set():
                self._note_source("agent")
                return () if relayed is None else (relayed,)
        self._note_source("clock shard")
        own = self.requester
        request = FollowLogRequest(own.job_id, own.term, position, gathered=True, requester=own)
        return self.clock_shard.stream(calls.FOLLOW_LOG, request)

    def _note_source(self, source: str) -> None:
        if source != self._source:
            _log.info("log_followed", source=source)
            self._source = source
