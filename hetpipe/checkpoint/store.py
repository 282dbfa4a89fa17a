"""Storage of the checkpoints of one run: its folder, or a URL in an object store.

Every writer writes its part into the folder of the run on its own machine first, and makes it available by `deliver`,
a no-op in a shared folder. The clock shard completes a checkpoint by its manifest, which is written last.

In an object store the name of a part's object contains its digest, so no attempt replaces the object of another one,
and no manifest lists a torn upload (`docs/semantics/object-storage.md`).
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol

from hetpipe.checkpoint.best import read_best
from hetpipe.checkpoint.layout import PartLabel
from hetpipe.checkpoint.manifest import (
    FIX,
    MANIFEST,
    MAX_MANIFEST_BYTES,
    Manifest,
    checkpoint_dir,
    clock_of,
    file_digest,
    manifest_bytes,
    parse_manifest,
    read_label,
    read_manifest,
)
from hetpipe.durable import sync_dir, write_durably
from hetpipe.errors import CheckpointError, CheckpointNotWritten, HetpipeError, ProtocolViolation
from hetpipe.observe.log import get_logger
from hetpipe.storage.objects import RETRY_SECONDS, ObjectStore, StorageError
from hetpipe.values.ids import Clock
from hetpipe.values.requests import CheckpointFile
from hetpipe.values.storage_url import checkpoint_key, part_key, run_url, split_part

_log = get_logger(__name__)


class CheckpointStore(Protocol):
    """The checkpoints of one run, for their writers. Thread-safe."""

    @property
    def is_remote(self) -> bool:
        """Whether it is an object store, which may be slow: training must not wait for it."""
        ...

    def folder(self, clock: Clock) -> Path:
        """The folder on this machine into which parts are written."""
        ...

    def deliver(self, clock: Clock, file: CheckpointFile, *, retry_seconds: float = RETRY_SECONDS) -> None:
        """Make a written part available to others. Idempotent.

        Raises:
            CheckpointNotWritten: uploads have failed for `retry_seconds` since the first failure.
        """
        ...

    def delivered(self, label: PartLabel) -> CheckpointFile | None:
        """Read a part that was delivered, possibly by an earlier process; None if there is none.

        Raises:
            CheckpointError, OSError: the part cannot be read.
        """
        ...

    def complete(self, manifest: Manifest) -> None:
        """Write the manifest, durably and atomically.

        Raises:
            OSError, HetpipeError: the manifest could not be written, and does not exist.
        """
        ...

    def best(self) -> Clock | None:
        """The clock of the best checkpoint, which is kept beyond the newest; None if no evaluation is noted."""
        ...

    def is_complete(self, clock: Clock) -> bool:
        """Whether the manifest of a checkpoint exists; False if the store cannot be read."""
        ...

    def manifest(self, clock: Clock) -> Manifest:
        """The manifest, after a check that all files exist with the right size.

        Raises:
            CheckpointError: as of `read_manifest`.
        """
        ...

    def clocks(self) -> dict[Clock, bool]:
        """The checkpoints that have begun, and whether their manifest exists.

        Raises:
            OSError: the store cannot be read.
        """
        ...

    def remove(self, clock: Clock) -> None:
        """Delete a checkpoint, its manifest first, so that a partial deletion leaves no checkpoint."""
        ...


class FolderStore:
    """Checkpoints in the folder of the run, shared by all its processes."""

    is_remote = False

    def __init__(self, run_dir: Path) -> None:
        """Create the store, without access to the disk."""
        self._run_dir = run_dir

    def folder(self, clock: Clock) -> Path:
        """Implement `CheckpointStore.folder`."""
        return checkpoint_dir(self._run_dir, clock)

    def deliver(self, clock: Clock, file: CheckpointFile, *, retry_seconds: float = RETRY_SECONDS) -> None:
        """No-op: the folder is shared."""

    def delivered(self, label: PartLabel) -> CheckpointFile | None:
        """Implement `CheckpointStore.delivered`."""
        path = self.folder(label.clock) / label.name
        return file_digest(path) if path.is_file() and read_label(path) == label else None

    def complete(self, manifest: Manifest) -> None:
        """Implement `CheckpointStore.complete`. Failpoints are reached on the way."""
        folder = self.folder(manifest.progress.clock)
        try:
            write_durably(folder / MANIFEST, manifest_bytes(manifest), points="snapshot")
            for parent in folder.parents[:2]:  # the folder itself, and on first use its parent, is new
                sync_dir(parent)
        except (OSError, HetpipeError):  # the latter only in tests
            with suppress(OSError):
                (folder / MANIFEST).unlink(missing_ok=True)
            raise

    def is_complete(self, clock: Clock) -> bool:
        """Implement `CheckpointStore.is_complete`."""
        return (self.folder(clock) / MANIFEST).exists()

    def manifest(self, clock: Clock) -> Manifest:
        """Implement `CheckpointStore.manifest`."""
        return read_manifest(self.folder(clock))

    def best(self) -> Clock | None:
        """Implement `CheckpointStore.best`."""
        found = read_best(self._run_dir)
        return None if found is None else found.clock

    def clocks(self) -> dict[Clock, bool]:
        """Implement `CheckpointStore.clocks`."""
        folders = (self._run_dir / "checkpoints").glob("clock-*")
        found = ((clock_of(path.name), path) for path in folders)
        return {clock: (path / MANIFEST).is_file() for clock, path in found if clock is not None}

    def remove(self, clock: Clock) -> None:
        """Implement `CheckpointStore.remove`."""
        with suppress(OSError):
            (self.folder(clock) / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(self.folder(clock), ignore_errors=True)


class StoredCheckpoints:
    """Checkpoints of one run, or of one of its rewinds, in an object store.

    On this machine only the newest part of each writer is kept, so that a restarted one need not write it again.
    """

    is_remote = True

    def __init__(self, objects: ObjectStore, run_dir: Path | None = None) -> None:
        """Create the store, without access to the network.

        Args:
            objects: object store below the run's URL.
            run_dir: the run's folder on this machine; None for readers.
        """
        self._objects = objects
        self._run_dir = run_dir

    def best(self) -> Clock | None:
        """Implement `CheckpointStore.best`: jobs with an object store keep the newest only."""
        return None

    def url(self, clock: Clock) -> str:
        """The URL of a checkpoint."""
        return f"{self._objects.url}/{checkpoint_key(clock)}"

    def folder(self, clock: Clock) -> Path:
        """Implement `CheckpointStore.folder`."""
        assert self._run_dir is not None, "a reader writes nothing"
        return checkpoint_dir(self._run_dir, clock)

    def deliver(self, clock: Clock, file: CheckpointFile, *, retry_seconds: float = RETRY_SECONDS) -> None:
        """Upload a part, and delete this writer's parts of earlier checkpoints from this machine."""
        key = f"{checkpoint_key(clock)}/{part_key(file.name, file.sha256)}"
        try:
            self._objects.put_file(key, self.folder(clock) / file.name, retry_seconds=retry_seconds)
        except OSError as error:
            raise CheckpointNotWritten(f"storage: {error}") from error
        for folder in self.folder(clock).parent.glob("clock-*"):
            if folder.name < self.folder(clock).name:
                with suppress(OSError):
                    (folder / file.name).unlink(missing_ok=True)
                    folder.rmdir()

    def delivered(self, label: PartLabel) -> CheckpointFile | None:
        """Implement `CheckpointStore.delivered`. Objects that their names do not describe are torn, and passed over."""
        base = checkpoint_key(label.clock)
        for key, size in self._objects.sizes(f"{base}/").items():
            name, sha256 = split_part(key.removeprefix(f"{base}/")) or ("", "")
            if name != label.name:
                continue
            with TemporaryDirectory(prefix="hetpipe-part-") as folder:
                path = Path(folder) / name
                self._objects.get_file(key, path)
                found = file_digest(path)
                if found == CheckpointFile(name, sha256, size) and read_label(path) == label:
                    return found
        return None

    def complete(self, manifest: Manifest) -> None:
        """Implement `CheckpointStore.complete`: one object, which is there as a whole or not at all."""
        key = f"{checkpoint_key(manifest.progress.clock)}/{MANIFEST}"
        try:
            self._objects.put(key, manifest_bytes(manifest))
        except StorageError:
            with suppress(OSError):
                self._objects.delete(key)
            raise

    def is_complete(self, clock: Clock) -> bool:
        """Implement `CheckpointStore.is_complete`."""
        try:
            return self._objects.exists(f"{checkpoint_key(clock)}/{MANIFEST}")
        except OSError as error:
            _log.warning("checkpoint_not_looked_for", clock=clock, reason=str(error))
            return False

    def manifest(self, clock: Clock) -> Manifest:
        """Implement `CheckpointStore.manifest`."""
        url, base = self.url(clock), checkpoint_key(clock)
        try:
            text = self._objects.get(f"{base}/{MANIFEST}", max_bytes=MAX_MANIFEST_BYTES)
            manifest = parse_manifest(text)
            sizes = self._objects.sizes(f"{base}/")
        except FileNotFoundError:
            raise CheckpointError(f"{url} is not a complete checkpoint: it has no {MANIFEST}; {FIX}") from None
        except (ProtocolViolation, OSError) as error:
            reason = " ".join(str(error).partition(" [type=")[0].split())
            raise CheckpointError(f"{url}/{MANIFEST} cannot be read: {reason}; {FIX}") from error
        if manifest.progress.clock != clock:
            raise CheckpointError(f"{url}/{MANIFEST} is of clock {manifest.progress.clock}, not of {clock}; {FIX}")
        for file in manifest.files:
            key = part_key(file.name, file.sha256)
            size = sizes.get(f"{base}/{key}")
            if size != file.num_bytes:
                what = "is missing" if size is None else f"has {size} bytes"
                raise CheckpointError(f"{url}/{key} {what}, but the manifest lists {file.num_bytes} bytes; {FIX}")
        return manifest

    def fetch(self, clock: Clock, files: Sequence[CheckpointFile], into: Path) -> Path:
        """Download parts into the folder of the checkpoint below `into`, named as in a folder; returns it.

        Raises:
            CheckpointError: one of them cannot be read. Their content is not verified.
        """
        folder = into / Path(checkpoint_key(clock)).name
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for file in files:
                path = folder / file.name
                if not path.exists():
                    self._objects.get_file(f"{checkpoint_key(clock)}/{part_key(file.name, file.sha256)}", path)
        except OSError as error:
            what = f"{error} does not exist" if isinstance(error, FileNotFoundError) else str(error)
            raise CheckpointError(f"{self.url(clock)} cannot be fetched: {what}; {FIX}") from error
        return folder

    def clocks(self) -> dict[Clock, bool]:
        """Implement `CheckpointStore.clocks`."""
        return begun(self._objects.sizes(f"{Path(checkpoint_key(Clock(0))).parent}/"))

    def remove(self, clock: Clock) -> None:
        """Implement `CheckpointStore.remove`."""
        base = f"{checkpoint_key(clock)}/"
        try:
            self._objects.delete(base + MANIFEST)
            for key in self._objects.sizes(base):
                self._objects.delete(key)
        except OSError as error:
            _log.warning("checkpoint_not_deleted", clock=clock, reason=str(error))


def begun(keys: Iterable[str]) -> dict[Clock, bool]:
    """The checkpoints whose objects have these keys below a run's, and whether their manifest is among them. Pure.

    >>> begun(["checkpoints/clock-00000012/manifest.json", "checkpoints/clock-00000015/shard-0.x", "job.json"])
    {12: True, 15: False}
    """
    found: dict[Clock, bool] = {}
    for key in sorted(keys):
        top, _, rest = key.partition("/")
        name, _, file = rest.partition("/")
        clock = clock_of(name) if top == "checkpoints" else None
        if clock is not None:
            found[clock] = found.get(clock, False) or file == MANIFEST
    return found


def store_of(run_dir: str, storage: str | None) -> CheckpointStore:
    """The checkpoints of the run in `run_dir`, for a process of that run.

    Args:
        run_dir: the folder of the run, or of one of its rewinds.
        storage: the job's.
    """
    if storage is None:
        return FolderStore(Path(run_dir))
    return StoredCheckpoints(ObjectStore(run_url(storage, run_dir)), Path(run_dir))
