"""Checkpoints on disk: one folder per barrier, complete when its manifest is there (`wsp.md` §5).

Every shard and every stage writes its own files and reports them; when all have, the clock shard writes `manifest.json`
(`keeper`). A folder without a manifest, or whose files differ from it, is no checkpoint: whoever looks for
one passes it over and takes the one before.

Files can be whole, of the right job and clock, and still be of two models, dtypes or cuts: if somebody has put them
into one folder, or two plans have written there. Such a set is refused as a whole; that is judged by what the files'
headers say of the tensors, not by these.
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

MANIFEST = "manifest.json"

#: Version of the format that is written. Version 1, which is read too, has no shards' files, no labels, no checksum.
VERSION = 2

_SHA256 = re.compile(r"[0-9a-f]{64}")

#: What helps against a checkpoint that cannot be used.
_FIX = "put the folder back from a copy, or delete it to go on from the checkpoint before it"


@dataclass(frozen=True, slots=True)
class Manifest:
    """A complete checkpoint."""

    version: int
    job_id: str
    progress: Progress
    num_stages: dict[VirtualWorkerIndex, int]
    """Of the virtual workers whose optimizer state is in the checkpoint."""
    files: tuple[CheckpointFile, ...]
    num_shards: int = 0
    """Shards, each with a file of its own: the weights, if parameter servers hold them."""
    sha256: str = field(default="", kw_only=True)
    """Of this manifest with nothing here."""

    @property
    def members(self) -> tuple[VirtualWorkerIndex, ...]:
        """The virtual workers in index order."""
        return tuple(sorted(self.num_stages))

    @property
    def shared_files(self) -> tuple[CheckpointFile, ...]:
        """Those that may hold weights and buffers: of the shards, and of the lowest virtual workers."""
        keepers = tuple(f"vw-{vw}-" for vw in self.members[:NUM_KEEPERS])
        return tuple(file for file in self.files if file.name.startswith(("shard-", *keepers)))

    def files_of(self, vw: VirtualWorkerIndex) -> tuple[CheckpointFile, ...]:
        """Those of one virtual worker, which hold its optimizer state."""
        return tuple(file for file in self.files if file.name.startswith(f"vw-{vw}-"))


@dataclass(frozen=True, slots=True)
class Search:
    """What was found in a run's folder."""

    folder: Path | None
    """The newest complete checkpoint; None: there is none."""
    damaged: tuple[str, ...] = ()
    """What is wrong with newer ones that were complete once, newest first."""
    unfinished: tuple[Path, ...] = ()
    """Newer folders without a manifest: nobody finished them, or somebody still writes."""

    @property
    def passed_over(self) -> tuple[str, ...]:
        """A sentence on everything newer."""
        return (*(f"{folder} was never finished" for folder in self.unfinished), *self.damaged)


def checkpoint_dir(run_dir: Path, clock: Clock) -> Path:
    """The folder of the checkpoint at `clock`."""
    return run_dir / "checkpoints" / f"clock-{clock:08d}"


def file_digest(path: Path) -> CheckpointFile:
    """Name, SHA-256 and size of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return CheckpointFile(path.name, digest.hexdigest(), path.stat().st_size)


# -- the manifest as text ----------------------------------------------------------------------------------------------


def manifest_bytes(manifest: Manifest) -> bytes:
    """The text of a manifest, with its own checksum filled in."""
    return wire.to_json(Manifest, replace(manifest, sha256=_own_sha256(manifest))).encode()


def _own_sha256(manifest: Manifest) -> str:
    return hashlib.sha256(wire.to_json(Manifest, replace(manifest, sha256="")).encode()).hexdigest()


def parse_manifest(text: bytes) -> Manifest:
    """The manifest in `text`.

    Raises:
        ProtocolViolation: it is none, is damaged or of an unknown version, or does not name the files that it must.
    """
    manifest: Manifest = wire.from_json(Manifest, text)
    if not 1 <= manifest.version <= VERSION:
        raise ProtocolViolation(
            f"the manifest has version {manifest.version}, and this hetpipe reads up to {VERSION}; use a newer hetpipe"
        )
    if manifest.version > 1 and manifest.sha256 != _own_sha256(manifest):
        raise ProtocolViolation("the manifest's text does not have the checksum that it gives")
    progress = manifest.progress
    counts = (progress.clock, progress.epoch, progress.minibatches, progress.samples)
    if not all(0 <= count < MAX_COUNT for count in counts):
        raise ProtocolViolation(f"the manifest's progress has counts {counts}")
    check_files(manifest.files, "the manifest has")
    _check_names(manifest)
    return manifest


def check_files(files: Sequence[CheckpointFile], who: str) -> None:
    """Refuse descriptions of files that no part of a checkpoint can have.

    Raises:
        ProtocolViolation: as said; `who` begins the sentence.
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
    """One file of every shard and of every stage of every virtual worker, and no other."""
    counts = (manifest.num_shards, *manifest.num_stages.values())
    if min(counts) < 0 or sum(counts) != len(manifest.files) or not manifest.num_stages or min(counts[1:]) < 1:
        raise ProtocolViolation(
            f"the manifest names {len(manifest.files)} files of {manifest.num_shards} shards and of virtual workers "
            f"with {list(manifest.num_stages.values())!s:.80} stages"
        )
    wanted = {shard_file(ShardIndex(shard)) for shard in range(manifest.num_shards)}
    wanted.update(stage_files(manifest.num_stages))
    if missing := sorted(wanted - {file.name for file in manifest.files}):
        raise ProtocolViolation(f"the manifest does not name {missing[0]}")


# -- checkpoints in folders --------------------------------------------------------------------------------------------


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint whose files are all there with the right size; their bytes are not looked at.

    Raises:
        CheckpointError: it is missing, unreadable or of another clock than its folder, or a file is missing or short.
    """
    path = folder / MANIFEST
    try:
        manifest = parse_manifest(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{folder} is no complete checkpoint: it has no {MANIFEST}; {_FIX}") from None
    except (ProtocolViolation, OSError) as error:
        reason = " ".join(str(error).partition(" [type=")[0].split())
        raise CheckpointError(f"{path} cannot be read: {reason}; {_FIX}") from error
    if manifest.version > 1 and folder.name != checkpoint_dir(folder, manifest.progress.clock).name:
        raise CheckpointError(f"{path} is of clock {manifest.progress.clock}, not of {folder.name}; {_FIX}")
    for file in manifest.files:
        size = (folder / file.name).stat().st_size if (folder / file.name).is_file() else None
        if size != file.num_bytes:
            what = "is missing" if size is None else f"has {size} bytes"
            raise CheckpointError(f"{folder / file.name} {what}, its manifest says {file.num_bytes} bytes; {_FIX}")
    return manifest


def verify_file(folder: Path, file: CheckpointFile, manifest: Manifest) -> None:
    """Check a file against its manifest.

    Raises:
        CheckpointError: its bytes are not the ones that were written, or it belongs to another checkpoint.
    """
    path = folder / file.name
    try:
        found = file_digest(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}; {_FIX}") from error
    if found != file:
        raise CheckpointError(f"{path} is damaged: SHA-256 {found.sha256}, its manifest says {file.sha256}; {_FIX}")
    if manifest.version > 1:
        _check_label(path, PartLabel(JobId(manifest.job_id), manifest.progress.clock, file.name))


def read_label(path: Path) -> PartLabel | None:
    """What a file says about itself; None: nothing.

    Raises:
        CheckpointError: it is no safetensors file, or says nonsense.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            text = (file.metadata() or {}).get(FACTS)
        return None if text is None else wire.revive(PartLabel, json.loads(text)[LABEL])
    except (SafetensorError, ProtocolViolation, OSError, ValueError, LookupError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; {_FIX}") from error


def _check_label(path: Path, expected: PartLabel) -> None:
    label = read_label(path)
    if label != expected:
        found = "of no checkpoint" if label is None else f"{label.name} of job {label.job_id} at clock {label.clock}"
        raise CheckpointError(
            f"{path} is {found}, but its manifest is of job {expected.job_id} at clock {expected.clock}; {_FIX}"
        )


def read_complete(folder: Path) -> Manifest:
    """The manifest of a checkpoint all of whose files are those that were written, and go together.

    Raises:
        CheckpointError: they are not, or do not.
    """
    manifest = read_manifest(folder)
    for file in manifest.files:
        verify_file(folder, file, manifest)
    try:
        check_content([folder / file.name for file in manifest.files])
    except CheckpointError as error:
        raise CheckpointError(f"{folder} is a mixture: {error}; {_FIX}") from error
    return manifest


def search(run_dir: Path, check: Callable[[Path], Manifest] = read_complete) -> Search:
    """Look for the newest checkpoint of a run that passes a check: of its newest rewind, if there is any.

    `read_complete` reads all of it.
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
    """The newest complete checkpoint of a run, or None. One that is damaged is passed over with a warning.

    The run may be going on: what it deletes meanwhile it has replaced by something newer.
    """
    return _newest(run_dir, read_complete)


def newest_listed(run_dir: Path) -> Path | None:
    """The newest checkpoint of a run whose files are there as its manifest lists them, or None; else `newest_complete`.

    Their bytes are not looked at, however many they are: for those who check every file that they use, and have
    something to fall back on.
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


def no_checkpoint(run_dir: Path, found: Search) -> CheckpointError:
    """What to say of a run without a complete checkpoint."""
    reason = f": {found.damaged[0]}" if found.damaged else ""
    return CheckpointError(
        f"{run_dir} has no complete checkpoint{reason}; set checkpoint.every_waves to have more of them before the end"
    )


def has_checkpoint(run_dir: Path) -> bool:
    """Whether a run has a checkpoint with all its files, whose bytes are not looked at."""
    return search(run_dir, read_manifest).folder is not None


def _newest_first(run_dir: Path) -> Iterator[Path]:
    """The folders of a run's checkpoints, whole or not; those of the newest rewind first, however far others are."""
    for where in reversed(run_folders(run_dir)):
        yield from sorted((where / "checkpoints").glob("clock-*"), reverse=True)


# -- do the files go together? -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor in a file."""

    key: str
    """Of the whole tensor."""
    file: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    dtype: str
    start: int
    stop: int
    """The elements [start, stop) of the flattened tensor are here."""


def check_content(paths: Sequence[Path]) -> None:
    """Refuse files that are not one checkpoint.

    Raises:
        CheckpointError: a tensor has two shapes or dtypes, its slices do not make a whole, or two stages of a virtual
            worker have state for one parameter.
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
    """Whole copies are alike; slices follow each other."""
    first = copies[0]
    for other in copies[1:]:
        if (other.shape, other.dtype) != (first.shape, first.dtype):
            raise CheckpointError(
                f"{other.file} has {first.key} as {list(other.shape)} {other.dtype}, and {first.file} as "
                f"{list(first.shape)} {first.dtype}: they are of two models"
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
    """A parameter's optimizer state is in one file of each virtual worker."""
    owner: dict[str, str] = {}
    for entry in stored:
        if "/optimizer/" in entry.key:
            parameter = entry.key.rpartition("/")[0]
            if owner.setdefault(parameter, entry.file) != entry.file:
                raise CheckpointError(
                    f"{entry.file} and {owner[parameter]} both have {parameter}: they are of two cuts"
                )
