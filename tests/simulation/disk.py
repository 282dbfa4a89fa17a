"""A simulated disk of one process: a snapshot, and what was appended since.

The page cache outlives the process, so a crash of the process loses nothing that was appended. A crash of the machine
loses what was not synced; the first lost entry may be half there, which a checksum shows, so it counts as lost.
"""

from __future__ import annotations

import random
from typing import Generic, TypeVar

SnapshotT = TypeVar("SnapshotT")
EntryT = TypeVar("EntryT")


class Disk(Generic[SnapshotT, EntryT]):
    """What a process finds when it starts again."""

    def __init__(self, *, fsync: bool) -> None:
        self._fsync = fsync
        self.snapshot: SnapshotT | None = None
        self.entries: list[EntryT] = []
        self._synced = 0

    def append(self, entry: EntryT) -> None:
        """Keep an entry; on return it outlives the process, with `fsync` the machine, too."""
        self.entries.append(entry)
        if self._fsync:
            self._synced = len(self.entries)

    def replace(self, snapshot: SnapshotT, entries: list[EntryT]) -> None:
        """Put a snapshot in place, durably, then forget what it makes unnecessary."""
        self.snapshot = snapshot
        self.entries = entries
        self._synced = len(entries)

    def lose_power(self, chance: random.Random) -> int:
        """The machine crashes; returns how many entries are lost."""
        kept = chance.randint(self._synced, len(self.entries))
        lost = len(self.entries) - kept
        del self.entries[kept:]
        return lost
