"""Free-space monitor of a parameter server's disks, polled every second, to warn before a disk is full.

A disk is nearly full when its free space is below the size of the next two checkpoints and snapshots plus a reserve for
other growing files: histories, traces, logs, and pushes between two snapshots. The reserve is 5 % of the disk, but at
most 1 GiB: 5 % of a large disk may last for months.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from hetpipe.clock import SYSTEM_CLOCK, Clock
from hetpipe.conditions import Conditions
from hetpipe.observe.log import get_logger
from hetpipe.values.conditions import ConditionKind
from hetpipe.values.quantities import bytes_text

_log = get_logger(__name__)

#: Polling interval.
CHECK_SECONDS = 1.0

_RESERVE_SHARE = 0.05
_MAX_RESERVE_BYTES = 1 << 30

#: Hysteresis: a disk has room again at this multiple of its need, so that the next write does not raise it again.
_ROOM_AGAIN = 1.25


@dataclass(frozen=True, slots=True)
class Disk:
    """State of one disk at one moment."""

    mount: Path
    """Its mount point, unique on one machine."""
    free_bytes: int
    total_bytes: int

    def wanted_bytes(self, needed_bytes: int) -> int:
        """Free space required before `needed_bytes` are written."""
        return needed_bytes + min(int(_RESERVE_SHARE * self.total_bytes), _MAX_RESERVE_BYTES)


def is_short(disk: Disk, needed_bytes: int, *, was_short: bool) -> bool:
    """Whether `disk` is nearly full.

    >>> there = Path("/")
    >>> is_short(Disk(there, 90, 1_000), 100, was_short=False), is_short(Disk(there, 160, 1_000), 100, was_short=False)
    (True, False)
    >>> is_short(Disk(there, 160, 1_000), 100, was_short=True)
    True
    """
    wanted = disk.wanted_bytes(needed_bytes)
    return disk.free_bytes < (_ROOM_AGAIN * wanted if was_short else wanted)


@dataclass(slots=True)
class DiskUse:
    """Use of one disk."""

    disk: Disk
    folders: list[Path] = field(default_factory=list)
    needed_bytes: int = 0


def by_disk(needs: Mapping[Path, int], look: Callable[[Path], Disk]) -> list[DiskUse]:
    """Folders grouped by disk, in order; a folder that does not exist yet is on the disk of its parent.

    Raises:
        OSError: a disk cannot be read.
    """
    found: dict[Path, DiskUse] = {}
    for folder, needed_bytes in needs.items():
        disk = look(folder)
        use = found.setdefault(disk.mount, DiskUse(disk))
        use.folders.append(folder)
        use.needed_bytes += needed_bytes
    return list(found.values())


def disk_of(folder: Path) -> Disk:
    """The disk that `folder` is on, or will be created on.

    Raises:
        OSError: it cannot be read.
    """
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists()).resolve()
    stat = os.statvfs(there)
    mount = next(path for path in (there, *there.parents) if path.is_mount())
    return Disk(mount, stat.f_bavail * stat.f_frsize, stat.f_blocks * stat.f_frsize)


class KeepsOnDisk(Protocol):
    """A job on a parameter server."""

    @property
    def conditions(self) -> Conditions:
        """Conditions to raise when a disk is nearly full."""
        ...

    def disk_needs(self) -> Mapping[Path, int]:
        """Folders, and the bytes to be written there next."""
        ...


class ServesJobs(Protocol):
    """A parameter server."""

    def job_shards(self) -> Iterable[KeepsOnDisk]:
        """Its jobs' shards."""
        ...


class DiskWatch:
    """Monitors the disks of one process, in its own thread, so that a hanging disk blocks nothing else."""

    def __init__(
        self, shards: ServesJobs, *, look: Callable[[Path], Disk] = disk_of, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        """Do not poll yet."""
        self._shards = shards
        self._disk_of = look
        self._clock = clock
        self._host = socket.gethostname()
        #: The nearly full disks, by conditions and name.
        self._short: set[tuple[int, str]] = set()

    def start(self) -> None:
        """Poll every second until the process ends."""
        threading.Thread(target=self._run, name="disk-watch", daemon=True).start()

    def check(self) -> None:
        """Check the disks of every job once."""
        seen: set[tuple[int, str]] = set()
        for job in self._shards.job_shards():
            try:
                uses = by_disk(job.disk_needs(), self._disk_of)
            except OSError as error:
                _log.info("disk_not_seen", reason=str(error))
                continue
            for use in uses:
                seen.add(self._update(job.conditions, use))
        self._short &= seen

    def _update(self, conditions: Conditions, use: DiskUse) -> tuple[int, str]:
        disk = use.disk
        who = f"the disk at {disk.mount} on {self._host}"
        key = id(conditions), who
        free = f"{bytes_text(disk.free_bytes)} of {bytes_text(disk.total_bytes)} are free"
        if not is_short(disk, use.needed_bytes, was_short=key in self._short):
            self._short.discard(key)
            conditions.clear(ConditionKind.DISK_NEARLY_FULL, who, f"{who} has enough space again: {free}")
        elif key not in self._short:
            self._short.add(key)
            folders = " and ".join(map(str, use.folders))
            wanted = disk.wanted_bytes(use.needed_bytes)
            sentence = (
                f"{who} is nearly full: {free}, and {bytes_text(wanted)} are needed: "
                f"{bytes_text(use.needed_bytes)} for the next two checkpoints and snapshots in {folders}, "
                "the rest for histories and logs; free disk space, or keep fewer checkpoints (checkpoint.keep)"
            )
            conditions.raise_(ConditionKind.DISK_NEARLY_FULL, who, sentence)
        return key

    def _run(self) -> None:
        while True:
            try:
                self.check()
            except Exception:  # noqa: BLE001 - monitoring must not end; the error is logged
                _log.exception("disk_watch_failed")
            self._clock.sleep(CHECK_SECONDS)
