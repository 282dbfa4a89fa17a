"""A write-ahead log with snapshots: appended records are recovered after the process is killed.

A general storage engine, used here for a replicated state machine: records are opaque bytes, appended, made durable by
the fsync policy, and recovered in order. Only the owner interprets them. Import from here only; the format on disk, its
guarantees and recovery are described in `docs/semantics/storage.md`.
"""

from hetpipe.storage.wal.log import WalOptions, WriteAheadLog
from hetpipe.storage.wal.record import SYSTEM_DISK, DiskIO, Extent, LogRecord, NewLogRecord, write_record
from hetpipe.storage.wal.segments import LogContents, TornTail, read_log
from hetpipe.storage.wal.snapshot import read_snapshot, write_snapshot
from hetpipe.storage.wal.snapshotted_log import (
    RecoveredLog,
    Snapshot,
    SnapshotHeader,
    SnapshottedLog,
    StorageOptions,
    recover,
)

__all__ = [
    "SYSTEM_DISK",
    "DiskIO",
    "Extent",
    "LogContents",
    "LogRecord",
    "NewLogRecord",
    "RecoveredLog",
    "Snapshot",
    "SnapshotHeader",
    "SnapshottedLog",
    "StorageOptions",
    "TornTail",
    "WalOptions",
    "WriteAheadLog",
    "read_log",
    "read_snapshot",
    "recover",
    "write_record",
    "write_snapshot",
]
