"""On-disk cache of measurements, one file each, in the user's cache folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Generic, TypeVar

from hetpipe.errors import ProtocolViolation
from hetpipe.observe.log import get_logger
from hetpipe.values import wire

T = TypeVar("T")

_log = get_logger(__name__)


def cache_folder(environment: Mapping[str, str], name: str = "profiles") -> Path:
    """The folder of cached measurements, by the XDG Base Directory Specification: `$XDG_CACHE_HOME/hetpipe/NAME`.

    >>> str(cache_folder({"XDG_CACHE_HOME": "/cache"})), str(cache_folder({"HOME": "/home/me", "XDG_CACHE_HOME": "x"}))
    ('/cache/hetpipe/profiles', '/home/me/.cache/hetpipe/profiles')
    """
    named = Path(environment.get("XDG_CACHE_HOME", ""))
    home = Path(environment["HOME"]) if "HOME" in environment else Path.home()
    # The specification requires that a relative path is ignored.
    return (named if named.is_absolute() else home / ".cache") / "hetpipe" / name


class MeasurementCache(Generic[T]):
    """Cache of measurements by key. Safe for concurrent processes: files are replaced atomically."""

    def __init__(self, folder: Path, kind: type[T]) -> None:
        """Cache values of type `kind` in `folder`."""
        self._folder = folder
        self._kind = kind

    def find(self, key: str) -> T | None:
        """Return the measurement under `key`; None if missing or unreadable."""
        try:
            found: T = wire.from_json(self._kind, self._path(key).read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ProtocolViolation) as error:
            _log.warning("cached_profile_unusable", path=str(self._path(key)), reason=str(error))
            return None
        return found

    def keep(self, key: str, measurement: T) -> None:
        """Store `measurement`; write errors are ignored."""
        path = self._path(key)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with NamedTemporaryFile("w", dir=path.parent, prefix=f".{key}.", encoding="utf-8", delete=False) as file:
                file.write(wire.to_json(self._kind, measurement))
            Path(file.name).replace(path)
        except OSError as error:
            _log.warning("profile_not_cached", path=str(path), reason=str(error))

    def _path(self, key: str) -> Path:
        return self._folder / f"{key}.json"
