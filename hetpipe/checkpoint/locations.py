"""Access to checkpoints for readers, by the path of a folder or by a URL in an object store.

Objects are fetched into a folder with the layout of a checkpoint, so that all checks and readers of folders apply.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol

from hetpipe.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    Search,
    check_fetched,
    newest_complete,
    newest_listed,
    read_complete,
    read_manifest,
    search,
)
from hetpipe.checkpoint.store import StoredCheckpoints, begun
from hetpipe.errors import CheckpointError
from hetpipe.observe.log import get_logger
from hetpipe.storage.objects import ObjectStore
from hetpipe.values.ids import Clock
from hetpipe.values.requests import CheckpointFile
from hetpipe.values.storage_url import checked_url, is_url, rewind_number, split_checkpoint

_log = get_logger(__name__)

#: Opens the objects below a URL.
OpenObjects = Callable[[str], ObjectStore]


class Checkpoint(Protocol):
    """One checkpoint, for readers."""

    def manifest(self) -> Manifest:
        """Its manifest, after a check that all files are there with the right size. Raises `CheckpointError`."""
        ...

    def paths(self, files: Sequence[CheckpointFile]) -> dict[Path, CheckpointFile]:
        """Paths of these files on this machine; their content is not verified. Raises `CheckpointError`."""
        ...

    def older(self) -> list[Checkpoint]:
        """The complete ones before it in the same folder, newest first; all of them if it has been replaced since."""
        ...

    def folder(self, files: Sequence[CheckpointFile]) -> Path:
        """The folder on this machine that contains these files. Raises `CheckpointError`."""
        ...


@dataclass(frozen=True, slots=True)
class FolderCheckpoint:
    """A checkpoint in a folder."""

    where: Path

    def manifest(self) -> Manifest:
        """Implement `Checkpoint.manifest`."""
        return read_manifest(self.where)

    def folder(self, files: Sequence[CheckpointFile]) -> Path:
        """Implement `Checkpoint.folder`."""
        return self.where

    def paths(self, files: Sequence[CheckpointFile]) -> dict[Path, CheckpointFile]:
        """Implement `Checkpoint.paths`."""
        return {self.where / file.name: file for file in files}

    def older(self) -> list[Checkpoint]:
        """Implement `Checkpoint.older`."""
        complete = [path.parent for path in self.where.parent.glob(f"clock-*/{MANIFEST}")]
        kept = (path for path in complete if path < self.where or not self.where.exists())
        return [FolderCheckpoint(path) for path in sorted(kept, reverse=True)]


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """A checkpoint in an object store; files are fetched when they are read."""

    store: StoredCheckpoints
    clock: Clock
    cache: Path
    """Folder for fetched files."""

    def manifest(self) -> Manifest:
        """Implement `Checkpoint.manifest`."""
        return self.store.manifest(self.clock)

    def folder(self, files: Sequence[CheckpointFile]) -> Path:
        """Implement `Checkpoint.folder`."""
        return self.store.fetch(self.clock, files, self.cache)

    def paths(self, files: Sequence[CheckpointFile]) -> dict[Path, CheckpointFile]:
        """Implement `Checkpoint.paths`."""
        folder = self.folder(files)
        return {folder / file.name: file for file in files}

    def older(self) -> list[Checkpoint]:
        """Implement `Checkpoint.older`."""
        try:
            clocks = self.store.clocks()
        except OSError as error:
            _log.warning("older_checkpoints_not_listed", reason=str(error))
            return []
        kept = (clock for clock, done in clocks.items() if done and (clock < self.clock or self.clock not in clocks))
        return [StoredCheckpoint(self.store, clock, self.cache) for clock in sorted(kept, reverse=True)]


@contextmanager
def opened(where: str, *, cache: Path | None = None, objects: OpenObjects = ObjectStore) -> Iterator[Checkpoint]:
    """Open a checkpoint for reading; fetched files are deleted at the end of the `with` block.

    Args:
        where: the path of its folder, or its URL.
        cache: folder on a disk with room for the fetched files; None: the system's folder for temporary files.
        objects: opens an object store.

    Raises:
        CheckpointError: it is not the URL of a checkpoint.
    """
    if not is_url(where):
        yield FolderCheckpoint(Path(where))
        return
    found = split_checkpoint(_checked(where))
    if found is None:
        raise CheckpointError(f"{where} is not the URL of a checkpoint; it must end with /checkpoints/clock-CLOCK")
    run, clock = found
    if cache is not None:
        cache.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix="fetched-", dir=cache) as folder:
        yield StoredCheckpoint(StoredCheckpoints(objects(run)), clock, Path(folder))


def _checked(url: str) -> str:
    try:
        return checked_url(url)
    except ValueError as error:
        raise CheckpointError(str(error)) from error


def manifest_at(where: str) -> Manifest:
    """The manifest of the checkpoint at a path or URL, as of `Checkpoint.manifest`. Raises `CheckpointError`."""
    if not is_url(where):
        return read_manifest(Path(where))
    with opened(where) as checkpoint:
        return checkpoint.manifest()


def verified_at(where: str) -> Manifest:
    """The manifest of a checkpoint all of whose files were read and are consistent. Raises `CheckpointError`."""
    if not is_url(where):
        return read_complete(Path(where))
    with opened(where) as checkpoint:
        manifest = checkpoint.manifest()
        check_fetched(checkpoint.folder(manifest.files), manifest)
        return manifest


# -- the checkpoints of a run ------------------------------------------------------------------------------------------


def search_at(
    run: str, check: Callable[[str], Manifest] = verified_at, *, objects: OpenObjects = ObjectStore
) -> Search[str]:
    """Search for the newest checkpoint of a run that passes a check; a newer rewind takes precedence.

    Args:
        run: the run's folder or URL.
        check: raises `CheckpointError` for one that is not usable.
        objects: opens an object store.

    Raises:
        CheckpointError: the store cannot be read, or `run` is not the URL of a store.
    """
    if not is_url(run):
        found = search(Path(run), lambda folder: check(str(folder)))
        folder = None if found.folder is None else str(found.folder)
        return Search(folder, found.damaged, tuple(map(str, found.unfinished)))
    damaged: list[str] = []
    unfinished: list[str] = []
    for where, is_complete in _newest_first(_checked(run), objects):
        if not is_complete:
            unfinished.append(where)
            continue
        try:
            check(where)
        except CheckpointError as error:
            damaged.append(str(error))
        else:
            return Search(where, tuple(damaged), tuple(unfinished))
    return Search(None, tuple(damaged), tuple(unfinished))


def newest_complete_at(run: str) -> str | None:
    """The newest complete checkpoint of a run, fully verified, or None; corrupted ones are skipped with a warning.

    Raises:
        CheckpointError: the object store cannot be read.
    """
    if not is_url(run):
        folder = newest_complete(Path(run))
        return None if folder is None else str(folder)
    return _newest(run, verified_at)


def newest_listed_at(run: str) -> str | None:
    """The newest complete checkpoint, verified only by its manifest and file sizes."""
    if not is_url(run):
        folder = newest_listed(Path(run))
        return None if folder is None else str(folder)
    return _newest(run, manifest_at)


def _newest(run: str, check: Callable[[str], Manifest]) -> str | None:
    found = search_at(run, check)
    for reason in found.damaged:
        _log.warning("checkpoint_passed_over", reason=reason)
    return found.folder


def has_checkpoint_at(run: str) -> bool:
    """Whether a run has a checkpoint with all its files; also False if its object store cannot be read from here."""
    try:
        return search_at(run, manifest_at).folder is not None
    except CheckpointError as error:
        _log.warning("checkpoints_not_looked_for", reason=str(error))
        return False


def stored_rewinds(run: str, *, objects: OpenObjects = ObjectStore) -> int:
    """The highest number of a rewind of the run at this URL that has objects; 0 if none has. Raises `OSError`."""
    keys = objects(run).sizes()
    return max((rewind_number(key.partition("/")[0]) or 0 for key in keys), default=0)


def _newest_first(run: str, objects: OpenObjects) -> Iterator[tuple[str, bool]]:
    """The URLs of a run's checkpoints, and whether their manifest is there; those of the newest rewind first."""
    try:
        keys = objects(run).sizes()
    except OSError as error:
        raise CheckpointError(f"the checkpoints of {run} cannot be listed: {error}") from error
    folders: dict[int, list[str]] = {}
    for key in keys:
        top, _, rest = key.partition("/")
        number = rewind_number(top)
        folders.setdefault(number or 0, []).append(key if number is None else rest)
    for number in sorted(folders, reverse=True):
        at = StoredCheckpoints(objects(f"{run}/rewind-{number}" if number else run))
        for clock, is_complete in sorted(begun(folders[number]).items(), reverse=True):
            yield at.url(clock), is_complete
