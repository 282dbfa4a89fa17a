"""Uploads of a stage's parts of checkpoints to an object store, in the background while training continues."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Protocol

from hetpipe.checkpoint.background import Background
from hetpipe.checkpoint.manifest import file_digest
from hetpipe.checkpoint.store import CheckpointStore
from hetpipe.errors import CheckpointNotWritten, HetpipeError
from hetpipe.observe.log import get_logger
from hetpipe.values.ids import Clock

_log = get_logger(__name__)

#: Maximum number of queued uploads: if another checkpoint falls due, the stage skips it, and the run loses it.
MAX_WAITING = 2

_TOO_SLOW = "older parts have not been uploaded yet: the object store is too slow; increase checkpoint.every_waves"


class ReportStagePart(Protocol):
    """Reports a stage's part to the clock shard; see `Synchroniser.report_checkpoint`."""

    def __call__(self, clock: Clock, path: Path | None, *, failure: str = "") -> bool:
        """Report; returns whether all parts are complete."""
        ...


class PartUploads:
    """The uploads of one stage, in order. Each is reported, as a part or as a failure."""

    def __init__(self, store: CheckpointStore, report: ReportStagePart) -> None:
        """Upload to `store`, and `report` from the uploading thread."""
        self._store = store
        self._report = report
        self._uploader = Background("checkpoint-upload")
        self._lock = threading.Lock()
        self._num_waiting = 0

    def begin(self, clock: Clock, path: Path, *, retry_seconds: float, is_last: bool) -> Future[None]:
        """Upload a written part.

        Args:
            clock: of the checkpoint.
            path: of the part.
            retry_seconds: how long it is retried after a failure.
            is_last: the run ends with it, so it is uploaded even if the limit on queued uploads is reached.

        The result raises `CheckpointNotWritten` if the part could not be uploaded, which has then been reported, or if
        the checkpoint was abandoned.
        """
        with self._lock:
            is_late = self._num_waiting >= MAX_WAITING and not is_last
            self._num_waiting += 1
        return self._uploader.submit(partial(self._upload, clock, path, retry_seconds=retry_seconds, is_late=is_late))

    def _upload(self, clock: Clock, path: Path, *, retry_seconds: float, is_late: bool) -> None:
        try:
            self._deliver(clock, path, retry_seconds=retry_seconds, is_late=is_late)
        except (HetpipeError, OSError) as error:
            _log.warning("checkpoint_part_not_uploaded", clock=clock, reason=str(error))
            raise
        finally:
            with self._lock:
                self._num_waiting -= 1

    def _deliver(self, clock: Clock, path: Path, *, retry_seconds: float, is_late: bool) -> None:
        failure = _TOO_SLOW
        if not is_late:
            try:
                self._store.deliver(clock, file_digest(path), retry_seconds=retry_seconds)
            except (CheckpointNotWritten, OSError) as error:
                failure = str(error)
            else:
                self._report(clock, path)
                return
        self._report(clock, None, failure=failure)
        raise CheckpointNotWritten(failure)
