"""An object store behind a URL: whole objects by key, through fsspec (`docs/semantics/object-storage.md`).

The thin shell around a store that is slow, refuses or fails: every operation has a deadline, is retried with growing
pauses until then, and ends with a sentence that names the place and the fix. Nothing needs a rename, and nothing relies
on a listing being complete: what is read is found by its key, and verified by its reader.

Credentials are those of the process (environment and configuration of the store's own client), never those of a job.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from hetpipe.clock import SYSTEM_CLOCK, Clock
from hetpipe.durable import replacing
from hetpipe.observe.log import get_logger
from hetpipe.values.quantities import bytes_text
from hetpipe.values.storage_url import SCHEMES, checked_url, file_path

if TYPE_CHECKING:
    import fsspec

_log = get_logger(__name__)

#: How long an operation on a small object may take in all, and one on a part of a checkpoint.
SMALL_SECONDS = 20.0
LARGE_SECONDS = 600.0

#: For how long after its first failure an operation is tried again.
RETRY_SECONDS = 60.0

#: Pauses between tries grow from the first to the longest.
_FIRST_PAUSE_SECONDS = 0.5
_LONGEST_PAUSE_SECONDS = 8.0

#: Errors of clients that no retry mends, beside `PermissionError`; by name, as the clients are optional packages.
_HOPELESS = frozenset({"NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "ParamValidationError"})

_RIGHTS = (
    "give the processes of the nodes credentials that may use it (in their environment, or in the configuration of the "
    "store's client), or name another storage"
)

T = TypeVar("T")


class StorageError(OSError):
    """An object store failed or refused; `str` is a sentence with the place and the fix."""


class _TimedOut(OSError):
    """One try exceeded the deadline."""


def open_filesystem(url: str) -> fsspec.AbstractFileSystem:
    """The client of a checked URL.

    Raises:
        StorageError: its package is not installed.
    """
    # fsspec takes a while to import, and most processes use no object store.
    import fsspec

    from hetpipe.storage.durable_files import DurableFiles

    scheme = url.partition("://")[0]
    if scheme == "file":
        return DurableFiles()
    try:
        # Listings are never cached: others write.
        return fsspec.filesystem(scheme, use_listings_cache=False, skip_instance_cache=True)
    except ImportError as error:
        package = SCHEMES.get(scheme, "")
        extra = "hetpipe[s3]" if scheme == "s3" else package
        raise StorageError(
            f"{url} needs the package {package}, which is not installed here; install it on every node with "
            f"pip install '{extra}'"
        ) from error


class _Try(Generic[T]):
    """One try of an operation in a thread of its own, because a call into a client may never return."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._done = threading.Event()
        self._result: list[T] = []
        self._error: Exception | None = None

    def run(self, seconds: float) -> T:
        threading.Thread(target=self._run, name="storage", daemon=True).start()
        if not self._done.wait(max(0.0, seconds)):
            raise _TimedOut(f"no answer within {seconds:.0f} s")
        if self._error is not None:
            raise self._error
        return self._result[0]

    def _run(self) -> None:
        try:
            self._result.append(self._work())
        except Exception as error:  # noqa: BLE001 - raised by the caller's thread
            self._error = error
        finally:
            self._done.set()


class ObjectStore:
    """The objects below one URL. Keys are relative, with `/` between their parts. Thread-safe.

    A read of an object that is not there raises `FileNotFoundError`; whatever else goes wrong is a `StorageError`.
    """

    def __init__(
        self, url: str, *, filesystem: fsspec.AbstractFileSystem | None = None, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        """Nothing is contacted yet.

        Args:
            url: of a place in a store; `checked_url` unless `filesystem` is given.
            filesystem: its client; None: the installed one of the URL's scheme.
            clock: paces tries.
        """
        self.url = url.rstrip("/") if filesystem is not None else checked_url(url)
        self._filesystem = filesystem
        self._clock = clock
        self._lock = threading.Lock()

    def below(self, key: str) -> ObjectStore:
        """The objects below a key, over the same client."""
        return ObjectStore(f"{self.url}/{key}", filesystem=self._client(), clock=self._clock)

    def put(self, key: str, data: bytes, *, seconds: float = SMALL_SECONDS) -> None:
        """Write or replace an object at once.

        Raises:
            StorageError: it was not written within `seconds`, or may not be.
        """

        def work() -> None:
            client = self._client()
            client.pipe_file(self._path(key), data)
            self._check_size(key, len(data))

        self._write(key, work, seconds)

    def put_file(
        self, key: str, path: Path, *, seconds: float = LARGE_SECONDS, retry_seconds: float = RETRY_SECONDS
    ) -> None:
        """Write or replace an object by the content of a file; errors as of `put`, and `OSError` of the file.

        `retry_seconds`: how long it is tried again after its first failure.
        """
        num_bytes = path.stat().st_size

        def work() -> None:
            self._client().put_file(str(path), self._path(key))
            self._check_size(key, num_bytes)

        self._write(key, work, seconds, retry_seconds)

    def get(self, key: str, *, max_bytes: int, seconds: float = SMALL_SECONDS) -> bytes:
        """Read an object.

        Raises:
            FileNotFoundError: there is none.
            StorageError: it could not be read within `seconds`, or is larger than `max_bytes`.
        """

        def work() -> bytes:
            data = self._client().cat_file(self._path(key), start=0, end=max_bytes + 1)
            return bytes(data)

        data = self._tried("read", key, work, seconds)
        if len(data) > max_bytes:
            raise StorageError(
                f"{self.url}/{key} has more than {bytes_text(max_bytes)}, so it is not what belongs there"
            )
        return data

    def get_file(self, key: str, path: Path, *, seconds: float = LARGE_SECONDS) -> None:
        """Read an object into a file, which is there only if all of it was read; errors as of `get`."""

        def work() -> None:
            with replacing(path) as unfinished:
                self._client().get_file(self._path(key), str(unfinished))

        self._tried("read", key, work, seconds)

    def sizes(self, prefix: str = "", *, seconds: float = SMALL_SECONDS) -> dict[str, int]:
        """The objects below a prefix, by key, with their bytes; empty if there is nothing.

        Raises:
            StorageError: it could not be listed within `seconds`, or may not be.
        """
        base = self._path(prefix) if prefix else self._path("").rstrip("/")

        def work() -> dict[str, int]:
            client = self._client()
            client.invalidate_cache()
            found: dict[str, dict[str, Any]] = client.find(base, detail=True)
            root = client._strip_protocol(self.url).rstrip("/") + "/"  # noqa: SLF001 - fsspec has no public name for it
            return {
                str(path).removeprefix(root): int(info["size"] or 0)
                for path, info in found.items()
                if info["type"] == "file" and str(path).startswith(root)
            }

        try:
            return self._tried("listed", prefix, work, seconds)
        except FileNotFoundError:
            return {}

    def exists(self, key: str, *, seconds: float = SMALL_SECONDS) -> bool:
        """Whether there is an object; errors as of `sizes`."""

        def work() -> bool:
            client = self._client()
            client.invalidate_cache()
            client.info(self._path(key))
            return True

        try:
            return self._tried("looked for", key, work, seconds)
        except FileNotFoundError:
            return False

    def delete(self, key: str, *, seconds: float = SMALL_SECONDS) -> None:
        """Delete an object, if it is there.

        Raises:
            StorageError: it could not be deleted within `seconds`, or may not be.
        """
        try:
            self._tried("deleted", key, lambda: self._client().rm_file(self._path(key)), seconds)
        except FileNotFoundError:
            return

    # -- inside --------------------------------------------------------------------------------------------------------

    def _client(self) -> fsspec.AbstractFileSystem:
        with self._lock:
            if self._filesystem is None:
                self._filesystem = open_filesystem(self.url)
            return self._filesystem

    def _path(self, key: str) -> str:
        return f"{file_path(self.url) or self.url}/{key}"

    def _check_size(self, key: str, num_bytes: int) -> None:
        client = self._client()
        client.invalidate_cache()
        found = client.info(self._path(key))["size"]
        if found != num_bytes:
            raise OSError(f"the store has {found} of its {num_bytes} bytes")

    def _write(self, key: str, work: Callable[[], None], seconds: float, retry_seconds: float = RETRY_SECONDS) -> None:
        try:
            self._tried("written", key, work, seconds, retry_seconds)
        except FileNotFoundError as error:
            raise StorageError(f"{self.url}/{key} cannot be written: {_error_text(error)}; {_RIGHTS}") from error

    def _tried(
        self, what: str, key: str, work: Callable[[], T], seconds: float, retry_seconds: float = RETRY_SECONDS
    ) -> T:
        """Do `work` until it succeeds, is refused, or `seconds` are over."""
        self._client()  # raises at once what no retry mends
        where = f"{self.url}/{key}".rstrip("/")
        started = self._clock.monotonic()
        until = retries_until = started + seconds
        pause, text = _FIRST_PAUSE_SECONDS, ""
        while True:
            try:
                return _Try(work).run(until - self._clock.monotonic())
            except FileNotFoundError:
                raise
            except Exception as error:
                if isinstance(error, PermissionError) or type(error).__name__ in _HOPELESS:
                    raise StorageError(f"{where} cannot be {what}: {_error_text(error)}; {_RIGHTS}") from error
                text = text if text and isinstance(error, _TimedOut) else _error_text(error)
                now = self._clock.monotonic()
                retries_until = min(retries_until, now + retry_seconds)
                if now + pause >= retries_until:
                    raise StorageError(
                        f"{where} cannot be {what}, tried for {now - started:.1f} s: {text}; see that the "
                        "store can be reached from here, and has room"
                    ) from error
                _log.warning("storage_tried_again", place=where, reason=text)
            self._clock.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)


def _error_text(error: Exception) -> str:
    """A client's description of a failure, on one line."""
    return " ".join(str(error).split())[:300] or type(error).__name__
