"""A pipeline without parameter traffic: answers the stage's synchroniser from memory, for one virtual worker."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from hetpipe.decide.sync.records import BarrierRecord, PublishRecord, SegmentMember, SegmentRecord
from hetpipe.decide.sync.segment import first_progress
from hetpipe.pipeline.synchroniser import SyncListener
from hetpipe.values.ids import Clock, Incarnation, VirtualWorkerIndex, Wave
from hetpipe.values.plan import SlicePlan
from hetpipe.values.requests import Blocks
from hetpipe.values.sync import DataSpec, Progress
from hetpipe.weights.flat import BufferPool, FlatBuffer


class AloneSynchroniser:
    """w^(0) is what the stage began with, and nothing newer is ever published before the end (D = ∞)."""

    def __init__(self, data: DataSpec, pool: BufferPool, first: FlatBuffer | None, num_waves: int) -> None:
        """Serve a run of `num_waves` waves; `first` is w^(0), or None if the stage keeps its weights itself."""
        self.pushed_bytes = 0
        self.pulled_bytes = 0
        self._data = data
        self._pool = pool
        self._first = first
        self._num_waves = num_waves
        self._member = SegmentMember(VirtualWorkerIndex(0), Incarnation(0), 1, joined=True)
        self.listener: SyncListener | None = None

    def begin(self, listener: SyncListener) -> None:
        """Publish the start and announce the end."""
        self.listener = listener
        listener.on_records(
            (
                PublishRecord(0, Clock(0), (Clock(0),)),
                SegmentRecord(1, Clock(0), (), 0, (self._member,)),
                BarrierRecord(2, Clock(self._num_waves), "end", 0),
            )
        )

    def join(self) -> bool:
        """The initial weights are available."""
        return False

    def push_initial_weights(self, weights: FlatBuffer) -> None:
        """Nobody asks for them."""
        raise NotImplementedError

    def push_wave(
        self,
        wave: Wave,
        update: FlatBuffer | None,
        blocks: Blocks | None,
        *,
        segment: Clock,
        squares: dict[int, float] | None = None,
    ) -> None:
        """Forget it."""
        del blocks
        if update is not None:
            self._pool.release(update)
        if wave + 1 == self._num_waves and self.listener is not None:
            end = Clock(self._num_waves)
            self.listener.on_records(
                (PublishRecord(3, end, (end,)), SegmentRecord(4, end, ("end",), 0, (self._member,)))
            )

    def push_fresh(self, wave: Wave, weights: FlatBuffer, layers: Collection[int]) -> None:
        """Never called: no layers are built anew."""
        raise AssertionError((wave, weights, layers))

    def fetch(self, clock: Clock, *, ahead: bool) -> None:
        """The initial weights, for every clock."""
        del ahead
        assert self.listener is not None, "begin first"
        assert self._first is not None, "the stage keeps its weights itself"
        self.listener.on_fetched(clock, self._pool.take().copy_(self._first))

    def prepared(self, index: int, *, can: bool) -> None:
        """Never called: no layers move."""
        raise AssertionError((index, can))

    def hold(self, switch: int) -> tuple[Clock, Clock, int]:
        """Always the start."""
        del switch
        return Clock(0), Clock(self._num_waves), 0

    def progress(self) -> Progress:
        """The start."""
        return first_progress(self._data)

    def exchange_buffers(self, clock: Clock, mine: FlatBuffer, *, deadline_seconds: float) -> FlatBuffer:
        """One virtual worker has nobody to exchange with."""
        raise NotImplementedError

    def report_checkpoint(self, clock: Clock, path: Path | None, *, failure: str = "") -> bool:
        """Forget it."""
        del clock, path, failure
        return True

    def is_complete(self, checkpoint: Path) -> bool:
        """There is none."""
        del checkpoint
        return True

    def change_layers(self, slices: Sequence[SlicePlan], pool: BufferPool, *, deadline_seconds: float) -> None:
        """Never called: nothing moves."""
        raise AssertionError((slices, pool, deadline_seconds))

    def leave_out(self, inactive: Collection[int]) -> None:
        """See `Synchroniser.leave_out`; all layers are active."""
        del inactive

    def drain(self, *, deadline_seconds: float) -> None:
        """Nothing is under way."""
