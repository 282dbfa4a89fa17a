"""A folder for files that must not outlive their process, such as keys.

Its process holds a lock in it, which the kernel releases at any end of the process; the next process removes unlocked
folders.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from hetpipe.observe.log import get_logger

_log = get_logger(__name__)

_LOCK = "lock"


class PrivateFolder:
    """A private folder, readable by its owner only. `close` it once."""

    def __init__(self, prefix: str, parent: Path | None = None) -> None:
        """Create the folder, and remove those of killed processes.

        Args:
            prefix: of its name, and of the folders to remove.
            parent: the folder in which they are; None: the system's temporary folder.

        Raises:
            OSError: it cannot be created.
        """
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        self._descriptor = _lock(self.path)
        for folder in self.path.parent.glob(f"{prefix}*"):
            if folder != self.path and _remove_abandoned(folder):
                _log.info("abandoned_folder_removed", folder=str(folder))

    def close(self) -> None:
        """Remove it with its contents."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._descriptor)


def _lock(folder: Path) -> int:
    """Lock a new folder; returns the lock. The folder is renamed last, so that it is never visible unlocked."""
    unnamed = folder / f"{_LOCK}.new"
    descriptor = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:  # a file system without locks: an abandoned folder cannot be recognised
        _log.warning("folder_not_locked", folder=str(folder), reason=error.strerror or str(error))
    else:
        unnamed.rename(folder / _LOCK)
    return descriptor


def _remove_abandoned(folder: Path) -> bool:
    """Remove a folder of this user whose process is gone; returns whether it was one."""
    try:
        if folder.lstat().st_uid != os.geteuid():
            return False
        descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    else:
        shutil.rmtree(folder, ignore_errors=True)
        return True
    finally:
        os.close(descriptor)
