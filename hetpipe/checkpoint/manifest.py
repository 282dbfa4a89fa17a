"""Checkpoints on disk: one folder per barrier, complete when its manifest exists (docs/semantics/wsp.md, section 5).

Every shard and every stage writes its own files and reports them; when all have, the clock shard writes `manifest.json`
(`keeper`). A folder without a manifest, or whose files do not match it, is not a checkpoint: searches skip it and use
the previous one.

Files can be intact, of the right job and clock, and still belong to two models, dtypes or cuts, if they were copied
into one folder or written under two plans. Such a set is rejected as a whole, based on the tensors described in the
files' headers.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from math import prod
from pathlib import Path
from typing import Generic, TypeVar

from safetensors import SafetensorError, safe_open

from hetpipe.checkpoint.layout import (
    FACTS,
    FILE_NAME,
    LABEL,
    NUM_KEEPERS,
    SLICES,
    PartLabel,
    StoredSlice,
    shard_file,
    stage_files,
)
from hetpipe.errors import CheckpointError, ProtocolViolation
from hetpipe.observe.log import get_logger
from hetpipe.values import wire
from hetpipe.values.bounds import MAX_COUNT, MAX_SHARDS, MAX_STAGES
from hetpipe.values.ids import Clock, JobId, ShardIndex, VirtualWorkerIndex
from hetpipe.values.requests import CheckpointFile
from hetpipe.values.rewinds import run_folders
from hetpipe.values.sync import Progress

_log = get_logger(__name__)

#: Location of a checkpoint: a folder, or a URL.
W = TypeVar("W", Path, str)

MANIFEST = "manifest.json"

#: Version of the format written. Version 1, which can be read, too, has no shards' files, no labels, no checksum.
VERSION = 2

_FOLDER = re.compile(r"clock-(\d{8,18})", re.ASCII)

_SHA256 = re.compile(r"[0-9a-f]{64}")

#: Largest manifest that is read: of the most files a checkpoint may have, with room to spare.
MAX_MANIFEST_BYTES = 64 << 20

#: The fix for an unusable checkpoint.
FIX = "restore the folder from a copy, or delete it to continue from the previous checkpoint"


@dataclass(frozen=True, slots=True)
class Manifest:
    """Contents of a complete checkpoint."""

    version: int
    job_id: str
    progress: Progress
    num_stages: dict[VirtualWorkerIndex, int]
    """Stages of each virtual worker with optimizer state in the checkpoint."""
    files: tuple[CheckpointFile, ...]
    num_shards: int = 0
    """Shards, each with a file of its own: the weights, if parameter servers hold them."""
    sha256: str = field(default="", kw_only=True)
    """Checksum of this manifest with this field empty."""

    @property
    def members(self) -> tuple[VirtualWorkerIndex, ...]:
        """The virtual workers in index order."""
        return tuple(sorted(self.num_stages))

    @property
    def shared_files(self) -> tuple[CheckpointFile, ...]:
        """Files that may contain weights and buffers: those of the shards, and of the lowest virtual workers."""
        keepers = tuple(f"vw-{vw}-" for vw in self.members[:NUM_KEEPERS])
        return tuple(file for file in self.files if file.name.startswith(("shard-", *keepers)))

    def files_of(self, vw: VirtualWorkerIndex) -> tuple[CheckpointFile, ...]:
        """Files of one virtual worker, which contain its optimizer state."""
        return tuple(file for file in self.files if file.name.startswith(f"vw-{vw}-"))


@dataclass(frozen=True, slots=True)
class Search(Generic[W]):
    """Result of searching a run, in its folder or at its URL."""

    folder: W | None
    """The newest complete checkpoint; None if there is none."""
    damaged: tuple[str, ...] = ()
    """Problems of newer checkpoints that were complete once, newest first."""
    unfinished: tuple[W, ...] = ()
    """Newer ones without a manifest: abandoned, or still being written."""

    @property
    def passed_over(self) -> tuple[str, ...]:
        """A sentence about each newer folder that was skipped."""
        return (*(f"{folder} was never completed" for folder in self.unfinished), *self.damaged)


def checkpoint_dir(run_dir: Path, clock: Clock) -> Path:
    """The folder of the checkpoint at `clock`."""
    return run_dir / "checkpoints" / f"clock-{clock:08d}"


def clock_of(name: str) -> Clock | None:
    """The clock of the checkpoint whose folder has this name; None for other names."""
    match = _FOLDER.fullmatch(name)
    return Clock(int(match[1])) if match else None


def file_digest(path: Path) -> CheckpointFile:
    """Name, SHA-256 and size of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return CheckpointFile(path.name, digest.hexdigest(), path.stat().st_size)


# -- the manifest as text ----------------------------------------------------------------------------------------------


def manifest_bytes(manifest: Manifest) -> bytes:
    """Serialize a manifest, including its own checksum."""
    return _text(replace(manifest, sha256=_own_sha256(manifest)))


def _own_sha256(manifest: Manifest) -> str:
    return hashlib.sha256(_text(replace(manifest, sha256=""))).hexdigest()


def _text(manifest: Manifest) -> bytes:
    """The text as written. Earlier versions lack fields of the progress, and the checksum is that of their text."""
    text = wire.to_json(Manifest, manifest)
    for absent in (
        ', "plans": {}',
        ', "frozen": 0',
        ', "waves": {}',
        ', "lineup": 0',
        ', "inactive": []',
        ', "fresh": []',
    ):
        text = text.replace(absent, "")
    return text.encode()


def parse_manifest(text: bytes) -> Manifest:
    """Parse a manifest.

    Raises:
        ProtocolViolation: it is not a manifest, is corrupted or of an unknown version, or does not list the required
            files.
    """
    manifest: Manifest = wire.from_json(Manifest, text)
    if not 1 <= manifest.version <= VERSION:
        raise ProtocolViolation(
            f"the manifest has version {manifest.version}, but this hetpipe reads only versions up to "
            f"{VERSION}; use a newer hetpipe"
        )
    if manifest.version > 1 and manifest.sha256 != _own_sha256(manifest):
        raise ProtocolViolation("the checksum of the manifest does not match its text")
    progress = manifest.progress
    counts = (progress.clock, progress.epoch, progress.minibatches, progress.samples)
    if not all(0 <= count < MAX_COUNT for count in counts):
        raise ProtocolViolation(f"the manifest's progress has invalid counts {counts}")
    check_files(manifest.files, "the manifest has")
    _check_names(manifest)
    return manifest


def check_files(files: Sequence[CheckpointFile], who: str) -> None:
    """Check the plausibility of file descriptions.

    Raises:
        ProtocolViolation: one of them is invalid; `who` is the prefix of the message.
    """
    if len(files) > MAX_STAGES + MAX_SHARDS:
        most = MAX_STAGES + MAX_SHARDS
        raise ProtocolViolation(f"{who} {len(files)} checkpoint files; a checkpoint has at most {most}")
    for file in files:
        if not FILE_NAME.fullmatch(file.name):
            raise ProtocolViolation(f"{who} a checkpoint file named {file.name!r:.80}")
        if not _SHA256.fullmatch(file.sha256) or not 0 <= file.num_bytes < MAX_COUNT:
            raise ProtocolViolation(f"{who} {file.name} of {file.num_bytes} bytes with SHA-256 {file.sha256!r:.80}")


def _check_names(manifest: Manifest) -> None:
    """Check for exactly one file of every shard and of every stage of every virtual worker."""
    counts = (manifest.num_shards, *manifest.num_stages.values())
    if min(counts) < 0 or sum(counts) != len(manifest.files) or not manifest.num_stages or min(counts[1:]) < 1:
        raise ProtocolViolation(
            f"the manifest lists {len(manifest.files)} files of {manifest.num_shards} shards and of virtual "
            f"workers with {list(manifest.num_stages.values())!s:.80} stages"
        )
    wanted = {shard_file(ShardIndex(shard)) for shard in range(manifest.num_shards)}
    wanted.update(stage_files(manifest.num_stages))
    if missing := sorted(wanted - {file.name for file in manifest.files}):
        raise ProtocolViolation(f"the manifest does not list {missing[0]}")


# -- checkpoints in folders --------------------------------------------------------------------------------------------


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest and check that all files exist with the right size; their contents are not read.

    Raises:
        CheckpointError: the manifest is missing, unreadable or of another clock than its folder, or a file is missing
            or has the wrong size.
    """
    path = folder / MANIFEST
    try:
        manifest = parse_manifest(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{folder} is not a complete checkpoint: it has no {MANIFEST}; {FIX}") from None
    except (ProtocolViolation, OSError) as error:
        reason = " ".join(str(error).partition(" [type=")[0].split())
        raise CheckpointError(f"{path} cannot be read: {reason}; {FIX}") from error
    if manifest.version > 1 and folder.name != checkpoint_dir(folder, manifest.progress.clock).name:
        raise CheckpointError(f"{path} is of clock {manifest.progress.clock}, not of {folder.name}; {FIX}")
    for file in manifest.files:
        size = (folder / file.name).stat().st_size if (folder / file.name).is_file() else None
        if size != file.num_bytes:
            what = "is missing" if size is None else f"has {size} bytes"
            raise CheckpointError(f"{folder / file.name} {what}, but the manifest lists {file.num_bytes} bytes; {FIX}")
    return manifest


def verify_file(folder: Path, file: CheckpointFile, manifest: Manifest) -> None:
    """Verify a file against its manifest.

    Raises:
        CheckpointError: its contents are corrupted, or it belongs to another checkpoint.
    """
    path = folder / file.name
    try:
        found = file_digest(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}; {FIX}") from error
    if found != file:
        raise CheckpointError(
            f"{path} is corrupted: its SHA-256 is {found.sha256}, but the manifest lists {file.sha256}; {FIX}"
        )
    if manifest.version > 1:
        _check_label(path, PartLabel(JobId(manifest.job_id), manifest.progress.clock, file.name))


def read_label(path: Path) -> PartLabel | None:
    """Read the label of a file; None if it has none.

    Raises:
        CheckpointError: it is not a safetensors file, or its label is invalid.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            text = (file.metadata() or {}).get(FACTS)
        return None if text is None else wire.revive(PartLabel, json.loads(text)[LABEL])
    except (SafetensorError, ProtocolViolation, OSError, ValueError, LookupError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; {FIX}") from error


def _check_label(path: Path, expected: PartLabel) -> None:
    label = read_label(path)
    if label != expected:
        found = "of no checkpoint" if label is None else f"{label.name} of job {label.job_id} at clock {label.clock}"
        raise CheckpointError(
            f"{path} is {found}, but its manifest is of job {expected.job_id} at clock {expected.clock}; {FIX}"
        )


def read_complete(folder: Path) -> Manifest:
    """Read the manifest of a checkpoint after verifying all of its files and their consistency.

    Raises:
        CheckpointError: a file is corrupted, or the files are inconsistent.
    """
    manifest = read_manifest(folder)
    check_fetched(folder, manifest)
    return manifest


def check_fetched(folder: Path, manifest: Manifest) -> None:
    """Verify all files of a checkpoint that are in `folder`, and their consistency.

    Raises:
        CheckpointError: a file is corrupted, or the files are inconsistent.
    """
    for file in manifest.files:
        verify_file(folder, file, manifest)
    try:
        check_content([folder / file.name for file in manifest.files])
    except CheckpointError as error:
        raise CheckpointError(f"{folder} contains inconsistent files: {error}; {FIX}") from error


def search(run_dir: Path, check: Callable[[Path], Manifest] = read_complete) -> Search[Path]:
    """Search for the newest checkpoint of a run that passes a check; a newer rewind takes precedence.

    `read_complete` reads the whole checkpoint.
    """
    damaged: list[str] = []
    unfinished: list[Path] = []
    for folder in _newest_first(run_dir):
        if not (folder / MANIFEST).exists():
            unfinished.append(folder)
            continue
        try:
            check(folder)
        except CheckpointError as error:
            damaged.append(str(error))
        else:
            return Search(folder, tuple(damaged), tuple(unfinished))
    return Search(None, tuple(damaged), tuple(unfinished))


def newest_complete(run_dir: Path) -> Path | None:
    """The newest complete checkpoint of a run, or None. Corrupted ones are skipped with a warning.

    The run may be active: checkpoints that it deletes during the search have been replaced by newer ones.
    """
    return _newest(run_dir, read_complete)


def newest_listed(run_dir: Path) -> Path | None:
    """The newest checkpoint whose files exist with the sizes in its manifest, or None; else like `newest_complete`.

    File contents are not read, whatever their size: for callers that verify each file they use and have a fallback.
    """
    return _newest(run_dir, read_manifest)


def _newest(run_dir: Path, check: Callable[[Path], Manifest]) -> Path | None:
    found = search(run_dir, check)
    if found.folder is None and found.damaged:
        found = search(run_dir, check)
    for reason in found.damaged:
        _log.warning("checkpoint_passed_over", reason=reason)
    return found.folder


def newest_checkpoint(run_dir: Path) -> Path:
    """The newest complete checkpoint of a run.

    Raises:
        CheckpointError: there is none.
    """
    found = search(run_dir)
    if found.folder is None:
        raise no_checkpoint(run_dir, found)
    return found.folder


def no_checkpoint(run_dir: Path | str, found: Search[W]) -> CheckpointError:
    """The message for a run without a complete checkpoint."""
    reason = f": {found.damaged[0]}" if found.damaged else ""
    return CheckpointError(
        f"{run_dir} has no complete checkpoint{reason}; set checkpoint.every_waves to have checkpoints before the end"
    )


def _newest_first(run_dir: Path) -> Iterator[Path]:
    """Checkpoint folders of a run, complete or not; those of the newest rewind first, regardless of their clocks."""
    for where in reversed(run_folders(run_dir)):
        yield from sorted((where / "checkpoints").glob("clock-*"), reverse=True)


# -- consistency of the files ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor in a file."""

    key: str
    """Shape of the whole tensor."""
    file: str
    shape: tuple[int, ...]
    """Dtype of the whole tensor."""
    dtype: str
    start: int
    stop: int
    """The elements [start, stop) of the flattened tensor stored here."""


def check_content(paths: Sequence[Path]) -> None:
    """Check that files form one checkpoint.

    Raises:
        CheckpointError: a tensor has two shapes or dtypes, its slices are incomplete, or two stages of a virtual worker
            have state for one parameter.
    """
    stored = sorted((entry for path in paths for entry in _entries(path)), key=lambda entry: (entry.key, entry.start))
    for _, group in groupby(stored, key=lambda entry: entry.key):
        _check_copies(list(group))
    _check_owners(stored)


def _entries(path: Path) -> Iterator[_Stored]:
    try:
        with safe_open(path, framework="numpy") as file:
            facts = json.loads((file.metadata() or {}).get(FACTS, "{}"))
            slices: dict[str, StoredSlice] = {
                key: wire.revive(StoredSlice, value) for key, value in facts.get(SLICES, {}).items()
            }
            for key in file.keys():  # noqa: SIM118 - not a mapping
                header = file.get_slice(key)
                yield _entry(key, path.name, tuple(header.get_shape()), header.get_dtype(), slices.get(key))
    except (SafetensorError, ProtocolViolation, OSError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _entry(key: str, file: str, shape: tuple[int, ...], dtype: str, part: StoredSlice | None) -> _Stored:
    owner = f"{file.partition('-stage-')[0]}/" if key.startswith("optimizer/") else ""
    if part is None:
        return _Stored(f"{owner}{key}", file, shape, dtype, 0, prod(shape))
    if shape != (part.stop - part.start,):
        raise CheckpointError(f"{file} has {key} with {prod(shape)} elements")
    return _Stored(part.whole, file, part.shape, dtype, part.start, part.stop)


def _check_copies(copies: Sequence[_Stored]) -> None:
    """Check that whole copies are equal in shape and dtype, and that slices are contiguous."""
    first = copies[0]
    for other in copies[1:]:
        if (other.shape, other.dtype) != (first.shape, first.dtype):
            raise CheckpointError(
                f"{other.file} has {first.key} as {list(other.shape)} {other.dtype}, but {first.file} as "
                f"{list(first.shape)} {first.dtype}: they belong to two models"
            )
    size = prod(first.shape)
    if all((entry.start, entry.stop) == (0, size) for entry in copies):
        return
    end = 0
    for entry in copies:
        if entry.start != end:
            break
        end = entry.stop
    if end != size:
        raise CheckpointError(f"{first.file} and others have {first.key} only up to element {end} of {size}")


def _check_owners(stored: Sequence[_Stored]) -> None:
    """Check that a parameter's optimizer state is in only one file of each virtual worker."""
    owner: dict[str, str] = {}
    for entry in stored:
        if "/optimizer/" in entry.key:
            parameter = entry.key.rpartition("/")[0]
            if owner.setdefault(parameter, entry.file) != entry.file:
                raise CheckpointError(
                    f"{entry.file} and {owner[parameter]} both have {parameter}: they belong to two cuts"
                )
