"""A store in memory that fails in every way a store can: torn uploads, refusals, slowness, and silence."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fsspec.implementations.memory import MemoryFileSystem


class FaultyFiles(MemoryFileSystem):  # type: ignore[misc] # fsspec has no types
    """An object store of one test. `fault` is called with the name and the number of each operation before it runs.

    What it returns, if a number, is how many bytes of a written object are stored before the operation fails.
    """

    cachable = False
    protocol = "faulty"

    def __init__(self) -> None:
        super().__init__()
        self.store: dict[str, Any] = {}
        self.pseudo_dirs = [""]
        self.fault: Callable[[str, int], int | None] = lambda _, __: None
        self.calls: list[str] = []
        self._calling = threading.Lock()

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return MemoryFileSystem._strip_protocol(str(path).replace("faulty://", "memory://"))

    def _begin(self, name: str) -> int | None:
        with self._calling:
            self.calls.append(name)
            number = len(self.calls) - 1
        return self.fault(name, number)

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        torn = self._begin("put")
        super().pipe_file(path, value if torn is None else value[:torn], mode=mode)
        if torn is not None:
            raise ConnectionResetError("the connection was reset in the middle of it")

    def put_file(self, lpath: str, rpath: str, callback: object = None, mode: str = "overwrite", **_: Any) -> None:
        self.pipe_file(rpath, Path(lpath).read_bytes())

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> Any:
        self._begin("get")
        return super().cat_file(path, start=start, end=end)

    def get_file(self, rpath: str, lpath: str, callback: object = None, outfile: object = None, **_: Any) -> None:
        self._begin("get")
        Path(lpath).write_bytes(super().cat_file(rpath))

    def find(self, path: str, **kwargs: Any) -> Any:
        self._begin("list")
        return super().find(path, **kwargs)

    def rm_file(self, path: str) -> None:
        self._begin("delete")
        if self.store.pop(self._strip_protocol(path), None) is None:
            raise FileNotFoundError(path)
