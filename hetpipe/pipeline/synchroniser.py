"""What a stage needs of whoever keeps the virtual workers in step. `server.shard.client.ShardClient` is one answer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from hetpipe.decide.sync.records import Record
from hetpipe.values.ids import Clock, Wave
from hetpipe.values.requests import Blocks
from hetpipe.values.sync import Progress
from hetpipe.weights.flat import FlatBuffer


class SyncListener(Protocol):
    """Hears what background threads find out. Called on their threads; must be quick and must not raise."""

    def on_records(self, records: Sequence[Record]) -> None:
        """More of the decision log, in order."""
        ...

    def on_fetched(self, clock: Clock, published: FlatBuffer | None) -> None:
        """w^(clock) is here, in host memory (its one holder is the listener), or None: freed before it was needed."""
        ...

    def on_error(self, error: Exception) -> None:
        """A background thread cannot go on."""
        ...


class Synchroniser(Protocol):
    """For the compute thread of one stage. Calls that transfer weights return at once; the others block briefly."""

    #: Bytes of weights sent and received so far.
    pushed_bytes: int
    pulled_bytes: int

    def join(self) -> bool:
        """Say that this stage is there; returns whether the first weights are awaited of it. Repeatable.

        Raises:
            StaleIncarnation: this life of its virtual worker is over.
        """
        ...

    def push_first_weights(self, weights: FlatBuffer) -> None:
        """Stage w_0, which is in host memory, on every shard and report it. Blocks."""
        ...

    def push_wave(self, wave: Wave, update: FlatBuffer | None, blocks: Blocks | None, *, segment: Clock) -> None:
        """Push ũ, which is in host memory, and report it, after all earlier waves.

        The holder of `update` passes over; None for an empty wave.
        """
        ...

    def fetch(self, clock: Clock, *, ahead: bool) -> None:
        """Pull w^(clock); it arrives at `SyncListener.on_fetched`. `ahead`: a guess, which may come too late."""
        ...

    def hold(self, switch: int) -> tuple[Clock, Clock]:
        """The clock for minibatch switch·N, and the next barrier. Raises `ClockNotPublished`: not yet."""
        ...

    def progress(self) -> Progress:
        """The progress at the start of the segment under way."""
        ...

    def exchange_buffers(self, clock: Clock, mine: FlatBuffer, *, deadline_seconds: float) -> FlatBuffer:
        """Send this stage's model buffers; returns what they became over all who were members before the barrier."""
        ...

    def report_checkpoint(self, clock: Clock, path: Path | None, *, failure: str = "") -> bool:
        """This stage's part of the checkpoint is on disk; returns whether all parts are. May be asked again.

        Args:
            clock: of the barrier.
            path: of the part; None: it could not be written.
            failure: why not.

        Raises:
            CheckpointNotWritten: the checkpoint was given up.
        """
        ...

    def is_complete(self, checkpoint: Path) -> bool:
        """Whether the checkpoint in this folder is complete."""
        ...

    def drain(self, *, deadline_seconds: float) -> None:
        """Wait until everything pushed so far is staged and reported."""
        ...
