"""Append-only line files of a run; a failing disk ends the file, but not the run."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from hetpipe.errors import HistoryIncomplete
from hetpipe.observe.down_sampled import Reduction, update_index
from hetpipe.observe.log import get_logger
from hetpipe.observe.segments import compress_before, open_for_writing, open_last, position_of

_log = get_logger(__name__)

#: Suffix of the empty marker file beside one that lacks lines.
INCOMPLETE = ".incomplete"

#: Errors of a full or broken disk; others are mistakes of the caller.
_FAILURES = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO})


#: Timeout of closing for a running compression; a segment that is not done then stays plain.
_CLOSE_SECONDS = 5.0


class LineFile:
    """Appends to a file, one unbuffered write each, so that a killed process leaves whole lines only.

    After a disk failure nothing more is written: the file ends there, like that of a killed process. This is logged
    once, and marked by an empty file beside it. Not thread-safe.

    With `segment_bytes` a longer file is succeeded by another one, and compressed in the background
    (`observe.segments`). Insufficient disk space for the compression is not a failure: the segment stays plain.
    """

    def __init__(self, path: Path, *, segment_bytes: int | None = None, reduction: Reduction | None = None) -> None:
        """Open or create `path` and its folder, and terminate a torn line of an earlier process.

        Args:
            path: of its first segment.
            segment_bytes: size above which a segment is closed and compressed; None: a single segment.
            reduction: of compressed segments, for an index beside them; None: no index.

        Raises:
            OSError: the file cannot be opened, for another reason than a failing disk.
        """
        self.path = path
        #: The reason for missing lines; None while complete.
        self.alarm: HistoryIncomplete | None = None
        self._on_alarm: Callable[[HistoryIncomplete], None] | None = None
        self._descriptor: int | None = None
        self._segment_bytes = segment_bytes
        self._reduction = reduction
        self._number = 0
        #: Size of the current segment by this process's writes, and its limit.
        self._num_bytes = 0
        self._enough_bytes = segment_bytes
        self._compressing: threading.Thread | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._number, self._descriptor = open_last(path)
            self._num_bytes = size = os.fstat(self._descriptor).st_size
            is_torn = size > 0 and os.pread(self._descriptor, 1, size - 1) != b"\n"
        except OSError as error:
            if error.errno not in _FAILURES:
                raise
            self._fail(error)
        else:
            if is_torn:
                self.write(b"\n")
            if self._number:
                self._compress()  # segments of an earlier process

    def write(self, lines: bytes) -> None:
        """Append whole lines, unless the disk has failed.

        Raises:
            ValueError: the file is closed.
        """
        if self.alarm is not None:
            return
        if self._descriptor is None:
            raise ValueError(f"{self.path} is closed; {lines[:200]!r} cannot be written")
        try:
            written = os.write(self._descriptor, lines)
        except OSError as error:
            self._fail(error)
        else:
            self._num_bytes += written
            if written != len(lines):
                self._fail(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
            elif self._enough_bytes is not None and self._num_bytes >= self._enough_bytes:
                self._rotate()

    def on_alarm(self, listener: Callable[[HistoryIncomplete], None]) -> None:
        """Call `listener` once, when the first line is lost: from the writing thread, or now."""
        self._on_alarm = listener
        if self.alarm is not None:
            listener(self.alarm)

    @property
    def position(self) -> int:
        """The position of the next line, by this process's writes (`segments.read_lines`); 0 once it is closed."""
        return 0 if self._descriptor is None else position_of(self._number, os.fstat(self._descriptor).st_size)

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._descriptor is not None:
            with suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = None
        if self._compressing is not None:
            self._compressing.join(_CLOSE_SECONDS)

    def _rotate(self) -> None:
        """Start a new segment."""
        assert self._descriptor is not None, "something was just written"
        assert self._segment_bytes is not None, "this file is cut into segments"
        try:
            descriptor = open_for_writing(self.path, self._number + 1)
        except OSError as error:
            _log.info("segment_not_begun", path=str(self.path), reason=error.strerror or str(error))
            self._enough_bytes = self._num_bytes + self._segment_bytes
            return
        os.close(self._descriptor)
        self._descriptor, self._number = descriptor, self._number + 1
        self._num_bytes, self._enough_bytes = os.fstat(descriptor).st_size, self._segment_bytes
        self._compress()

    def _compress(self) -> None:
        """Compress closed segments, unless a compression is running."""
        if self._compressing is None or not self._compressing.is_alive():
            self._compressing = threading.Thread(
                target=self._pack, args=(self._number,), name=f"compress-{self.path.stem}", daemon=True
            )
            self._compressing.start()

    def _pack(self, last: int) -> None:
        compress_before(self.path, last)
        if self._reduction is not None:
            update_index(self.path, self._reduction)

    def _fail(self, error: OSError) -> None:
        self.alarm = HistoryIncomplete(
            f"{self.path} cannot be written ({error.strerror or error}) and ends here; the run continues, "
            "but its records are incomplete: free disk space, or replace the disk, before the next run"
        )
        with suppress(OSError):
            self.path.with_name(self.path.name + INCOMPLETE).touch()
        _log.error("history_incomplete", sentence=str(self.alarm))
        if self._on_alarm is not None:
            self._on_alarm(self.alarm)
