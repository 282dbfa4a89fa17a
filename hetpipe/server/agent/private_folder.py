"""A folder for what must not outlive its process, such as keys. Of one that was killed, the next one removes it.

Whoever has such a folder holds a lock in it, which the kernel lets go of when the process ends, however it ends.
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
    """One such folder, readable by its owner only. `close` it once."""

    def __init__(self, prefix: str) -> None:
        """Make it among the system's temporary files, and remove those that killed processes have left there.

        Args:
            prefix: begins its name, and those of the folders that are looked at.
        """
        self.path = Path(tempfile.mkdtemp(prefix=prefix))
        self._descriptor = _lock(self.path)
        for folder in self.path.parent.glob(f"{prefix}*"):
            if folder != self.path and _remove_abandoned(folder):
                _log.info("abandoned_folder_removed", folder=str(folder))

    def close(self) -> None:
        """Remove it and all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._descriptor)


def _lock(folder: Path) -> int:
    """Lock a new folder; what holds the lock. The lock gets its name last, so that nobody finds it without a holder."""
    unnamed = folder / f"{_LOCK}.new"
    descriptor = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:  # a file system without locks: nobody can tell that this one is abandoned
        _log.warning("folder_not_locked", folder=str(folder), reason=error.strerror or str(error))
    else:
        unnamed.rename(folder / _LOCK)
    return descriptor


def _remove_abandoned(folder: Path) -> bool:
    """Remove a folder of this user's whose process is gone; whether it was one."""
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
