"""How does a stage reach the shards? The question, with two answers beside it: `in_process` and `grpc`.

Guarantees of every answer. Thread-safe. Errors are the shard's own typed ones, or `PeerUnreachable`/`DeadlineExceeded`
that name the shard. Repeating any call is safe: a push staged before, a wave reported before, a stage that has joined
before get the same answer. Nothing here waits for another virtual worker: "not yet" is an answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from hetpipe.decide.sync.records import Record
from hetpipe.values.ids import Clock, ShardIndex, Wave
from hetpipe.values.requests import (
    Blocks,
    BuffersHeader,
    CheckpointFile,
    Meeting,
    PullHeader,
    PushHeader,
    PushReply,
    Requester,
)
from hetpipe.values.sync import Progress


class ShardTransport(Protocol):
    """The bulk calls, to any shard."""

    def push(self, header: PushHeader, chunks: Iterable[bytes]) -> PushReply:
        """Stage slices.

        Who waits for a shard that is away (`server.shard.patient`) iterates `chunks` again for each attempt.
        """
        ...

    def pull(self, header: PullHeader) -> Iterator[bytes]:
        """The chunks of the asked-for slices. Raises `ClockNotPublished` before the first one if it is too early."""
        ...

    def close(self) -> None:
        """Free the connection; calls under way end with `PeerUnreachable`."""
        ...


class ClockTransport(Protocol):
    """The calls only the clock shard answers."""

    def join(
        self, requester: Requester, link_address: str = "", replicas_address: str = "", *, ready: bool = True
    ) -> Meeting:
        """Say that a stage is there, and where it awaits others; returns where others await it.

        Args:
            requester: the stage.
            link_address: `HOST:PORT` for the next stage of its virtual worker; empty: nowhere, or said before.
            replicas_address: `HOST:PORT` for the same stage of the other virtual workers; virtual worker 0 only.
            ready: it could begin at once. Its virtual worker becomes a member when all stages are ready, and from then
                on the others wait for its waves; until then it only meets its neighbours.
        """
        ...

    def initialized(self, requester: Requester) -> None:
        """This stage's part of the first weights is on every shard."""
        ...

    def staged(self, requester: Requester, wave: Wave, blocks: Blocks | None, *, segment: Clock) -> None:
        """This stage's part of a wave is on every shard.

        `segment` is the clock at which the segment began that the stage works in: a barrier may have dropped an empty
        wave, and a late copy of its report must not count for the wave of that number in the next segment.
        """
        ...

    def hold(self, requester: Requester, switch: int) -> tuple[Clock, Clock]:
        """The clock for minibatch switch·N, and the next barrier. Raises `ClockNotPublished`: not yet."""
        ...

    def progress(self, requester: Requester) -> Progress:
        """The progress at the start of the segment under way."""
        ...

    def follow(self, start: int, *, gathered: bool = False) -> Iterator[Sequence[Record]]:
        """The records of the log from `start` on, as they come; ends now and then, then follow again.

        `gathered`: commits may come late, together with the next record of another kind. Shards act on commits; stages
        only say by them whom they wait for.
        """
        ...

    def acknowledge(
        self, shard: ShardIndex, num_records: int, durable: int | None = None, *, applied: bool = False
    ) -> None:
        """A shard has carried out records.

        Args:
            shard: which.
            num_records: how many.
            durable: so many of them it will not ask for again; None: none of them.
            applied: its disk fails, or it has none: what is staged there now would be lost with its process.
        """
        ...

    def report_checkpoint(
        self, requester: Requester, clock: Clock, files: Sequence[CheckpointFile], *, failure: str = ""
    ) -> bool:
        """This stage's part of the checkpoint is on disk, or (`failure`) why not; returns whether all parts are.

        Raises:
            CheckpointNotWritten: the checkpoint was given up.
        """
        ...

    def report_shard_checkpoint(
        self, shard: ShardIndex, clock: Clock, files: Sequence[CheckpointFile], *, failure: str = ""
    ) -> bool:
        """The same of a shard's part."""
        ...

    def push_buffers(self, header: BuffersHeader, chunks: Iterable[bytes]) -> None:
        """Send the model buffers of this stage at a barrier."""
        ...

    def pull_buffers(self, header: BuffersHeader) -> Iterator[bytes]:
        """What the buffers became. Raises `ClockNotPublished` while a virtual worker's are missing."""
        ...

    def close(self) -> None:
        """Free the connection; calls under way end."""
        ...
