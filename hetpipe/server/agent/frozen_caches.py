"""The folders of an agent's node in which the stages of each job cache what enters the layers behind frozen ones.

One in shared memory and one on disk per job (caching.md §3). Their names are new each time, so that nothing of an
earlier use is taken for another's; those of a killed agent are removed by the next one.
"""

from __future__ import annotations

import json
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hetpipe.decide.elastic.caching import CacheBytes, CacheFolders, allowed_bytes
from hetpipe.job.file import Job
from hetpipe.observe.log import get_logger
from hetpipe.server.agent.private_folder import PrivateFolder
from hetpipe.values.ids import JobId

_log = get_logger(__name__)

#: Variable of a stage process with its folders, as JSON.
CACHE_VARIABLE = "HETPIPE_FROZEN_CACHE"

#: A file system in memory.
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - the folders in it are private

_PREFIX = "hetpipe-frozen-"


class FrozenCaches:
    """The folders of all jobs on this node. Thread-safe."""

    def __init__(self, memory: Path = _SHARED_MEMORY, disk: Path | None = None) -> None:
        """Make folders below these; disk: None: the system's temporary folder."""
        self._roots = (memory, disk or Path(tempfile.gettempdir()))
        self._lock = threading.Lock()
        self._folders: dict[JobId, tuple[PrivateFolder | None, ...]] = {}

    def environment(self, job_id: JobId, job: Mapping[str, Any]) -> dict[str, str]:
        """The variable for a stage of a job; none if it caches nothing. A folder that cannot be made is left out."""
        if not _may_cache(job):
            return {}
        with self._lock:
            if job_id not in self._folders:
                self._folders[job_id] = tuple(_made_below(root, job_id) for root in self._roots)
            paths = [None if folder is None else str(folder.path) for folder in self._folders[job_id]]
            return {CACHE_VARIABLE: json.dumps(paths)} if any(paths) else {}

    def remove(self, job_id: JobId) -> None:
        """Remove the folders of a job, if there are any; what stages have mapped stays readable to them."""
        with self._lock:
            folders = self._folders.pop(job_id, ())
        for folder in folders:
            if folder is not None:
                folder.close()

    def close(self) -> None:
        """Remove all folders."""
        for job_id in list(self._folders):
            self.remove(job_id)


def _made_below(root: Path, job_id: JobId) -> PrivateFolder | None:
    try:
        return PrivateFolder(_PREFIX, root)
    except OSError as error:
        _log.warning(
            "no_frozen_cache", job=job_id, reason=str(error), consequence=f"frozen layers are not cached in {root}"
        )
        return None


def _may_cache(job: Mapping[str, Any]) -> bool:
    """Whether a job freezes layers and does not rule a cache out; its stages decide (`wants_cache`)."""
    freeze, elastic = job.get("freeze") or {}, job.get("elastic") or {}
    freezes = any(freeze.get(key) for key in ("layers", "schedule", "alpha"))
    freezes |= any(line.get("do") == "freeze" for line in elastic.get("script") or ())
    return freezes and freeze.get("cache") != "off"


def cache_folders(environment: Mapping[str, str], job: Job) -> CacheFolders | None:
    """What the agent gave to this stage process; None if that is nothing. If it made one folder, only that counts."""
    given = environment.get(CACHE_VARIABLE)
    if not given:
        return None
    memory, disk = json.loads(given)
    allowed = allowed_bytes(job)
    counted = CacheBytes(allowed.memory if memory else 0, allowed.disk if disk else 0)
    return CacheFolders(Path(memory or disk), Path(disk or memory), counted)
