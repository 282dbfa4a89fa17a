"""Model buffers of the newest barriers, persisted by the clock shard across restarts.

A worker that has read the averages continues and does not resend its own buffers, so they are persisted before their
receipt is acknowledged. They survive the process; after a power failure a file may be missing or torn, and then the
barrier's other buffers count.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import structlog

from hetpipe.errors import ProtocolViolation, StateLost
from hetpipe.storage.wal import NewLogRecord, read_snapshot, write_record
from hetpipe.values import wire
from hetpipe.values.ids import Clock
from hetpipe.values.requests import BuffersHeader
from hetpipe.weights.flat import FlatBuffer

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Sender:
    """Sender and contents of one file."""

    header: BuffersHeader
    joined: bool
    """The sender became a member at this barrier."""


class BufferFiles:
    """The files, one per upload of buffers by a stage. Not thread-safe."""

    def __init__(self, folder: Path) -> None:
        """Use `folder`, which is created on the first write."""
        self._folder = folder

    def write(self, sender: Sender, buffer: FlatBuffer) -> None:
        """Persist the buffers of a stage. Disk failures are only logged, and training continues."""
        requester = sender.header.requester
        name = f"{_prefix(sender.header.clock)}vw-{requester.vw}-stage-{requester.stage}"
        temporary = self._folder / f"{name}.tmp"
        record = NewLogRecord(sender.header.clock, 0, wire.to_json(Sender, sender).encode(), [buffer.memory()])
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            try:
                write_record(descriptor, record)
            finally:
                os.close(descriptor)
            temporary.replace(self._folder / name)
        except OSError as error:
            log.warning("buffers_not_kept", path=str(temporary), reason=error.strerror or str(error))

    def read(self, room: Callable[[BuffersHeader], FlatBuffer]) -> Iterator[tuple[Sender, FlatBuffer]]:
        """Read the stored buffers, in barrier order; `room` allocates their tensors."""
        for path in sorted(self._folder.glob("clock-*")):
            try:
                record = read_snapshot(path)
                sender: Sender = wire.from_json(Sender, record.header)
                buffer = room(sender.header)
                record.payload.read_into(buffer.memory())
            except (StateLost, ProtocolViolation) as error:
                log.warning("buffers_not_read", reason=str(error))
            else:
                yield sender, buffer

    def forget(self, before: Clock) -> None:
        """Delete the buffers of barriers below a clock."""
        for path in self._folder.glob("clock-*"):
            if path.name < _prefix(before):
                path.unlink(missing_ok=True)


def _prefix(clock: Clock) -> str:
    return f"clock-{clock:012d}-"
