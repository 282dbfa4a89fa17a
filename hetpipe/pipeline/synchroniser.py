"""The stage's interface to the synchronisation of virtual workers, implemented by `server.shard.client.ShardClient`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Protocol

from hetpipe.decide.sync.records import Record
from hetpipe.values.ids import Clock, Wave
from hetpipe.values.plan import SlicePlan
from hetpipe.values.requests import Blocks
from hetpipe.values.sync import Progress
from hetpipe.weights.flat import BufferPool, FlatBuffer


class SyncListener(Protocol):
    """Callbacks on the synchroniser's background threads; they must be quick and must not raise."""

    def on_records(self, records: Sequence[Record]) -> None:
        """Receive the next records of the decision log, in order."""
        ...

    def on_fetched(self, clock: Clock, published: FlatBuffer | None) -> None:
        """Receive w^(clock) in host memory, with ownership; None if it was freed before it was needed."""
        ...

    def on_error(self, error: Exception) -> None:
        """Receive the error with which a background thread ended."""
        ...


class Synchroniser(Protocol):
    """Used by the compute thread of one stage. Transfers of weights are asynchronous; other calls block briefly."""

    #: Bytes of weights sent and received so far.
    pushed_bytes: int
    pulled_bytes: int

    def join(self) -> bool:
        """Register this stage; returns whether it must provide the initial weights. Idempotent.

        Raises:
            StaleIncarnation: this incarnation of its virtual worker has ended.
        """
        ...

    def push_initial_weights(self, weights: FlatBuffer) -> None:
        """Stage the initial weights w_0, in host memory, on every shard and report them. Blocks."""
        ...

    def push_wave(
        self,
        wave: Wave,
        update: FlatBuffer | None,
        blocks: Blocks | None,
        *,
        segment: Clock,
        squares: dict[int, float] | None = None,
    ) -> None:
        """Push ũ, in host memory, and report it after all earlier waves. Takes ownership of `update`.

        `update` is None for an empty wave. `squares`: layer → squared norm of its gradients, where norms decide what
        freezes.
        """
        ...

    def push_fresh(self, wave: Wave, weights: FlatBuffer, layers: Collection[int]) -> None:
        """Stage the weights of layers that are built anew for the segment that begins with `wave`, before that wave.

        In host memory; takes ownership of `weights`, of which other layers are ignored.
        """
        ...

    def fetch(self, clock: Clock, *, ahead: bool) -> None:
        """Pull w^(clock) for `SyncListener.on_fetched`. With `ahead`, a prefetch, which may be too late."""
        ...

    def prepared(self, index: int, *, can: bool) -> None:
        """Report that the stage is prepared for the move of layers of a record, or that it cannot be."""
        ...

    def hold(self, switch: int) -> tuple[Clock, Clock, int]:
        """Hold the clock for minibatch switch·N; returns it, the next barrier, and the number of announced moves.

        Raises:
            ClockNotPublished: the clock is not published yet.
        """
        ...

    def progress(self) -> Progress:
        """The progress at the start of the current segment."""
        ...

    def exchange_buffers(self, clock: Clock, mine: FlatBuffer, *, deadline_seconds: float) -> FlatBuffer:
        """Send this stage's model buffers; returns their average over the members before the barrier."""
        ...

    def report_checkpoint(self, clock: Clock, path: Path | None, *, failure: str = "") -> bool:
        """Report this stage's part of the checkpoint; returns whether all parts are on disk. Idempotent.

        Args:
            clock: clock of the barrier.
            path: path of the part; None if it could not be written.
            failure: why it could not be written.

        Raises:
            CheckpointNotWritten: the checkpoint was abandoned.
        """
        ...

    def is_complete(self, checkpoint: Path) -> bool:
        """Whether the checkpoint in this folder is complete."""
        ...

    def change_layers(self, slices: Sequence[SlicePlan], pool: BufferPool, *, deadline_seconds: float) -> None:
        """Push and pull these slices from now on, in buffers of `pool`. Waits for pulls under way."""
        ...

    def leave_out(self, inactive: Collection[int]) -> None:
        """Push no slices of these layers from now on; they are pulled as before."""
        ...

    def drain(self, *, deadline_seconds: float) -> None:
        """Wait until all pushes so far are staged and reported."""
        ...
