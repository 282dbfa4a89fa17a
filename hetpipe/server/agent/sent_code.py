"""The code that was sent along with jobs, unpacked: a folder per digest, private to the agent, removed at its end."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from hetpipe.code_archive import unpack
from hetpipe.errors import UserError
from hetpipe.observe.log import get_logger
from hetpipe.server.agent.private_folder import PrivateFolder
from hetpipe.values.events import CodeArchive

_log = get_logger(__name__)

#: Of an agent; see `docs/security-user-code.md`.
OPTION = "--accept-code"


class SentCode:
    """The folders. For one thread."""

    def __init__(self, fetch: Callable[[str], CodeArchive]) -> None:
        """Make a private folder for all of them.

        Args:
            fetch: asks the coordinator for the archive of a digest.
        """
        self._fetch = fetch
        self._root = PrivateFolder("hetpipe-code-")
        self._folders: dict[str, Path] = {}

    def folder(self, digest: str) -> Path:
        """The folder of the code with a digest, fetched on first use.

        Raises:
            UserError: it is refused, or cannot be unpacked.
            HetpipeError: the coordinator does not have it, or cannot be reached.
        """
        found = self._folders.get(digest)
        if found is None:
            found = self._folders[digest] = self._unpacked(digest)
        return found

    def close(self) -> None:
        """Remove them all."""
        self._root.close()

    def _unpacked(self, digest: str) -> Path:
        code = self._fetch(digest)
        # The digest was sent by the coordinator, and becomes a name only as that of the content.
        folder = self._root.path / str(len(self._folders))
        try:
            folder.mkdir(mode=0o700)
            unpack(code, digest, folder)
        except UserError:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        except OSError as error:
            shutil.rmtree(folder, ignore_errors=True)
            raise UserError(
                f"the code that was sent along with the job cannot be unpacked in {folder}: {error}; make room there, "
                "or start the agent with another TMPDIR"
            ) from error
        _log.info("code_unpacked", digest=digest, folder=str(folder), num_bytes=len(code.archive))
        return folder
