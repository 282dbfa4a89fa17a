"""Checkpoints on disk: one folder per barrier, complete when its manifest is there (`wsp.md` §5).

Every stage writes its own files and reports them; when all have, the clock shard writes `manifest.json` by an atomic
rename and deletes what is older than `keep`. A folder without a manifest, or whose files differ from it, is no
checkpoint.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hetpipe.errors import CheckpointError, ProtocolViolation
from hetpipe.spec import wire
from hetpipe.spec.bounds import MAX_COUNT, MAX_STAGES
from hetpipe.spec.ids import Clock, StageIndex, VirtualWorkerIndex
from hetpipe.spec.requests import CheckpointFile, Requester
from hetpipe.spec.sync import Membership, Progress

MANIFEST = "manifest.json"

#: What a file of a checkpoint may be called: no folder, no dots but the extension's.
_FILE_NAME = re.compile(r"vw-\d{1,9}-stage-\d{1,9}\.safetensors", re.ASCII)
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Manifest:
    """A complete checkpoint."""

    version: int
    job_id: str
    progress: Progress
    num_stages: dict[VirtualWorkerIndex, int]
    files: tuple[CheckpointFile, ...]


def checkpoint_dir(run_dir: Path, clock: Clock) -> Path:
    """The folder of the checkpoint at `clock`."""
    return run_dir / "checkpoints" / f"clock-{clock:08d}"


def write_durably(path: Path, data: bytes) -> None:
    """Replace `path` by `data`, whole or not at all, also across a power cut."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_dir(path.parent)


def sync_dir(folder: Path) -> None:
    """Make renames within `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_digest(path: Path) -> CheckpointFile:
    """Name, SHA-256 and size of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return CheckpointFile(path.name, digest.hexdigest(), path.stat().st_size)


def parse_manifest(text: bytes) -> Manifest:
    """The manifest in `text`.

    Raises:
        ProtocolViolation: it is none, or names a file that no stage would write.
    """
    manifest: Manifest = wire.from_json(Manifest, text)
    _check_files(manifest.files, "the manifest has")
    return manifest


def _check_files(files: Sequence[CheckpointFile], who: str) -> None:
    if len(files) > MAX_STAGES:
        raise ProtocolViolation(f"{who} {len(files)} checkpoint files; a checkpoint has at most {MAX_STAGES}")
    for file in files:
        if not _FILE_NAME.fullmatch(file.name):
            raise ProtocolViolation(f"{who} a checkpoint file named {file.name!r:.80}")
        if not _SHA256.fullmatch(file.sha256) or not 0 <= file.num_bytes < MAX_COUNT:
            raise ProtocolViolation(f"{who} {file.name} of {file.num_bytes} bytes with SHA-256 {file.sha256!r:.80}")


def _stem(file: CheckpointFile) -> str:
    return file.name.partition(".")[0]


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint whose files are all there with the right size.

    Raises:
        CheckpointError: it is missing, unreadable, or a file is.
    """
    path = folder / MANIFEST
    try:
        manifest = parse_manifest(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{folder} is no complete checkpoint: it has no {MANIFEST}") from None
    except (ProtocolViolation, OSError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    for file in manifest.files:
        size = (folder / file.name).stat().st_size if (folder / file.name).is_file() else None
        if size != file.num_bytes:
            raise CheckpointError(f"{folder / file.name} has {size} bytes, its manifest says {file.num_bytes}")
    return manifest


def verify_file(folder: Path, file: CheckpointFile) -> None:
    """Check a file against its manifest.

    Raises:
        CheckpointError: its bytes are not the ones that were written.
    """
    found = file_digest(folder / file.name)
    if found != file:
        raise CheckpointError(
            f"{folder / file.name} is damaged: SHA-256 {found.sha256}, its manifest says {file.sha256}"
        )


def newest_checkpoint(run_dir: Path) -> Path:
    """The newest complete checkpoint of a run; torn ones are passed over.

    Raises:
        CheckpointError: there is none.
    """
    folders = sorted((run_dir / "checkpoints").glob("clock-*"), reverse=True)
    torn: list[str] = []
    for folder in folders:
        try:
            read_manifest(folder)
        except CheckpointError as error:
            torn.append(str(error))
        else:
            return folder
    reason = f" ({torn[0]})" if torn else "; set checkpoint.every_waves to have one before the end"
    raise CheckpointError(f"{run_dir} has no complete checkpoint{reason}")


class CheckpointKeeper:
    """Gathers the stages' reports of one barrier after the other and completes their checkpoints. Thread-safe."""

    def __init__(self, *, job_id: str, run_dir: Path, membership: Membership, keep: int) -> None:
        self._job_id = job_id
        self._run_dir = run_dir
        self._membership = membership
        self._keep = keep
        self._lock = threading.Lock()
        self._parts: dict[Clock, dict[tuple[VirtualWorkerIndex, StageIndex], tuple[CheckpointFile, ...]]] = {}

    def report(self, requester: Requester, clock: Clock, files: Sequence[CheckpointFile], progress: Progress) -> bool:
        """A stage's part is on disk; returns whether the checkpoint is complete now.

        Raises:
            ProtocolViolation: another barrier, or files that no stage would write.
        """
        _check_files(files, f"{requester} reports")
        if progress.clock != clock:
            raise ProtocolViolation(f"checkpoint at clock {clock}, but the segment under way began at {progress.clock}")
        if not files or any(name != f"vw-{requester.vw}-stage-{requester.stage}" for name in map(_stem, files)):
            raise ProtocolViolation(f"{requester} reports {len(files)} checkpoint files that are not its own, or none")
        with self._lock:
            parts = self._parts.setdefault(clock, {})
            parts[requester.vw, requester.stage] = tuple(files)
            if len(parts) < sum(self._membership.num_stages.values()):
                return False
            every = tuple(file for key in sorted(parts) for file in parts[key])
            manifest = Manifest(1, self._job_id, progress, self._membership.num_stages, every)
            folder = checkpoint_dir(self._run_dir, clock)
            write_durably(folder / MANIFEST, wire.to_json(Manifest, manifest).encode())
            self._parts = {c: p for c, p in self._parts.items() if c > clock}
            self._prune(folder)
            return True

    def _prune(self, newest: Path) -> None:
        """Keep the newest complete checkpoints; what never became one goes too, once something newer is complete."""
        older = sorted(path for path in newest.parent.glob("clock-*") if path.name <= newest.name)
        complete = [path for path in older if (path / MANIFEST).is_file()]
        for folder in set(older) - set(complete[-self._keep :]):
            (folder / MANIFEST).unlink(missing_ok=True)
            shutil.rmtree(folder, ignore_errors=True)
