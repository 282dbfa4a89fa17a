"""An object store in local files, or on a file system that all nodes mount, for `file:` URLs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fsspec.implementations.local import LocalFileSystem

from hetpipe.durable import make_dir, replacing, sync_dir, write_durably


class DurableFiles(LocalFileSystem):  # type: ignore[misc] # fsspec has no types
    """Local files with the guarantee of an object store: a `put` is durable and becomes visible atomically."""

    cachable = False

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        """Write an object."""
        target = Path(self._strip_protocol(path))
        make_dir(target.parent)
        write_durably(target, value)

    def put_file(self, lpath: str, rpath: str, callback: object = None, mode: str = "overwrite", **_: Any) -> None:
        """Copy a file into an object."""
        target = Path(self._strip_protocol(rpath))
        make_dir(target.parent)
        with replacing(target) as unfinished, Path(lpath).open("rb") as source, unfinished.open("wb") as copy:
            while block := source.read(1 << 20):
                copy.write(block)

    def rm_file(self, path: str) -> None:
        """Delete an object, and its folder if it was the last one there."""
        target = Path(self._strip_protocol(path))
        target.unlink()
        sync_dir(target.parent)
        try:
            target.parent.rmdir()
        except OSError:
            return
