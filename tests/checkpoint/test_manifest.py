"""Checkpoints on disk: whole, or refused and passed over."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from hetpipe.checkpoint.format import save_slices
from hetpipe.checkpoint.layout import PartLabel
from hetpipe.checkpoint.locations import has_checkpoint_at
from hetpipe.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    checkpoint_dir,
    file_digest,
    manifest_bytes,
    newest_checkpoint,
    newest_complete,
    newest_listed,
    parse_manifest,
    read_complete,
    read_manifest,
    search,
)
from hetpipe.errors import CheckpointError, ProtocolViolation
from hetpipe.values import wire
from hetpipe.values.ids import Clock, JobId, VirtualWorkerIndex
from hetpipe.values.requests import CheckpointFile
from hetpipe.values.sync import PlanVersion
from tests.checkpoints import JOB, progress_at, shard_part, stage_part, write_checkpoint

SECTOR = 512


@pytest.fixture(autouse=True)
def _quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody cuts the power here."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


def test_a_complete_checkpoint_says_everything(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, 4)
    manifest = read_complete(folder)

    assert manifest.job_id == JOB
    assert manifest.progress == progress_at(4)
    assert (manifest.num_stages, manifest.members, manifest.num_shards) == ({0: 2, 1: 1}, (0, 1), 2)
    shards = [f"shard-{shard}.safetensors" for shard in (0, 1)]
    stages = [f"vw-{vw}-stage-{stage}.safetensors" for vw, stage in ((0, 0), (0, 1), (1, 0))]
    assert [file.name for file in manifest.files] == [*shards, *stages]
    assert [file.name for file in manifest.shared_files] == [*shards, *stages]
    assert [file.name for file in manifest.files_of(manifest.members[0])] == stages[:2]
    assert newest_checkpoint(tmp_path) == newest_complete(tmp_path) == folder


def test_one_of_the_newest_rewind_counts_however_far_the_others_are(tmp_path: Path) -> None:
    far = write_checkpoint(tmp_path, 8)
    (tmp_path / "rewind-2" / "checkpoints" / "clock-00000012").mkdir(parents=True)
    assert newest_checkpoint(tmp_path) == far
    near = write_checkpoint(tmp_path / "rewind-1", 6)

    assert newest_checkpoint(tmp_path) == near
    assert search(tmp_path).unfinished == (tmp_path / "rewind-2" / "checkpoints" / "clock-00000012",)
    assert has_checkpoint_at(str(tmp_path))
    assert newest_checkpoint(tmp_path / "rewind-1") == near


def test_only_the_two_lowest_keep_what_is_the_same_for_all(tmp_path: Path) -> None:
    manifest = read_complete(write_checkpoint(tmp_path, 4, stages=(1, 1, 1), num_shards=0))
    assert [file.name[:4] for file in manifest.shared_files] == ["vw-0", "vw-1"]


def test_version_1_is_read(tmp_path: Path) -> None:
    """Without labels, without a checksum of its own, and with the weights in the files of virtual worker 0."""
    folder = write_checkpoint(tmp_path, 4, num_shards=0)
    old = replace(read_manifest(folder), version=1)
    text = wire.plain(Manifest, old)
    for key in ("sha256", "num_shards"):
        del text[key]
    (folder / MANIFEST).write_text(wire.to_json(dict[str, Any], text))
    assert read_complete(folder) == replace(old, sha256="")


def test_a_run_without_any(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"set checkpoint\.every_waves"):
        newest_checkpoint(tmp_path)
    assert newest_complete(tmp_path) is None
    assert not has_checkpoint_at(str(tmp_path))


# -- damage ------------------------------------------------------------------------------------------------------------


def _damages(folder: Path) -> Iterator[tuple[Path, bytes]]:
    """Every file of a checkpoint cut at every length, and with every sector zeroed."""
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        for length in range(len(content)):
            yield path, content[:length]
        for start in range(0, len(content), SECTOR):
            end = min(start + SECTOR, len(content))
            assert any(content[start:end]), "a sector of zeros would be as before"
            yield path, content[:start] + bytes(end - start) + content[end:]


@pytest.mark.matrix
def test_whatever_is_torn_is_refused_and_the_one_before_is_used(tmp_path: Path) -> None:
    """Each truncation length, each zeroed sector, of each file; the manifest is one of them."""
    older = write_checkpoint(tmp_path, 4, stages=(1,), num_shards=1)
    newer = write_checkpoint(tmp_path, 8, stages=(1,), num_shards=1, num_elements=64)
    damages = list(_damages(newer))
    for number, (path, content) in enumerate(damages):
        intact = path.read_bytes()
        path.write_bytes(content)
        with pytest.raises(CheckpointError) as caught:
            read_complete(newer)
        assert str(path) in str(caught.value)
        assert "restore the folder from a copy, or delete it" in str(caught.value)
        if number % 20 == 0:
            found = search(tmp_path)
            assert (found.folder, found.damaged) == (older, (str(caught.value),))
        path.write_bytes(intact)
    assert search(tmp_path).folder == newer
    assert len(damages) > 2000


def test_no_flipped_bit_of_a_manifest_changes_what_it_says(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, 4, stages=(1,), num_shards=1)
    text = (folder / MANIFEST).read_bytes()
    whole = parse_manifest(text)
    num_refused = 0
    for position in range(len(text)):
        for bit in range(8):
            flipped = bytearray(text)
            flipped[position] ^= 1 << bit
            try:
                assert parse_manifest(bytes(flipped)) == whole  # an upper-case hexadecimal digit
            except ProtocolViolation:
                num_refused += 1
    assert num_refused > 7 * len(text)


Harm = Callable[[Path], object]


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\x00")


TORN: dict[str, Harm] = {
    "bytes for a manifest": lambda folder: (folder / MANIFEST).write_bytes(b"\xff\xfe\x00"),
    "another manifest": lambda folder: (folder / MANIFEST).write_text('{"version": 1}'),
    "a file is missing": lambda folder: (folder / "vw-1-stage-0.safetensors").unlink(),
    "a file is a folder": lambda folder: replace_by_folder(folder / "vw-0-stage-1.safetensors"),
    "a file is longer": lambda folder: lengthen(folder / "shard-1.safetensors"),
    "the folder has another clock": lambda folder: folder.rename(folder.with_name("clock-00000009")),
}


@pytest.mark.parametrize("harm", TORN.values(), ids=TORN)
def test_what_is_harmed_otherwise_is_passed_over_too(tmp_path: Path, harm: Harm) -> None:
    older, newer = write_checkpoint(tmp_path, 4), write_checkpoint(tmp_path, 8)
    assert has_checkpoint_at(str(tmp_path))
    harm(newer)
    assert newest_checkpoint(tmp_path) == older
    assert len(search(tmp_path).passed_over) == 1

    shutil.rmtree(older)
    with pytest.raises(CheckpointError, match=r"has no complete checkpoint: .* restore the folder"):
        newest_checkpoint(tmp_path)
    assert newest_complete(tmp_path) is None
    assert not has_checkpoint_at(str(tmp_path))


def test_one_without_a_manifest_is_unfinished_and_not_damaged(tmp_path: Path) -> None:
    older, newer = write_checkpoint(tmp_path, 4), write_checkpoint(tmp_path, 8)
    (newer / MANIFEST).unlink()
    found = search(tmp_path)
    assert (found.folder, found.damaged, found.unfinished) == (older, (), (newer,))
    assert found.passed_over == (f"{newer} was never completed",)
    with pytest.raises(CheckpointError, match=r"has no manifest\.json"):
        read_manifest(newer)


# -- sets that do not belong together ----------------------------------------------------------------------------------


def crafted(run_dir: Path, *, drop: str = "", **changes: Any) -> Path:
    """A checkpoint at clock 8 whose manifest says something else, with a right checksum."""
    folder = write_checkpoint(run_dir, 8)
    manifest = replace(read_manifest(folder), **changes)
    files = tuple(file for file in manifest.files if file.name != drop)
    (folder / MANIFEST).write_bytes(manifest_bytes(replace(manifest, files=files)))
    return folder


def with_file_of(run_dir: Path, other: CheckpointFile, folder: Path) -> Path:
    """The checkpoint in `folder` with one file, in name, size and checksum, of another one."""
    manifest = read_manifest(folder)
    files = tuple(other if file.name == other.name else file for file in manifest.files)
    (folder / MANIFEST).write_bytes(manifest_bytes(replace(manifest, files=files)))
    (path,) = (run_dir / "other").glob(f"checkpoints/*/{other.name}")
    shutil.copy(path, folder / other.name)
    return folder


def empty_shard(run_dir: Path, clock: int, shard: int) -> CheckpointFile:
    """What a shard without slices writes."""
    name = f"shard-{shard}.safetensors"
    return file_digest(save_slices(checkpoint_dir(run_dir, Clock(clock)), PartLabel(JOB, Clock(clock), name), []))


def with_buffers(run_dir: Path, *buffers: torch.Tensor) -> Path:
    """One where every virtual worker has these for its buffers."""
    folder = write_checkpoint(run_dir, 8, stages=(1, 1))
    for vw, buffer in enumerate(buffers):
        with_file_of(run_dir, stage_part(run_dir / "other", 8, vw, 0, buffers={"mean": buffer}), folder)
    return folder


def renamed(run_dir: Path) -> Path:
    """A shard's file under the name of another shard's."""
    folder = write_checkpoint(run_dir, 8)
    (run_dir / "other" / "checkpoints" / "x").mkdir(parents=True)
    copy = run_dir / "other" / "checkpoints" / "x" / "shard-1.safetensors"
    shutil.copy(folder / "shard-0.safetensors", copy)
    content = copy.read_bytes()
    taken = CheckpointFile(copy.name, hashlib.sha256(content).hexdigest(), len(content))
    return with_file_of(run_dir, taken, folder)


MIXED: dict[str, tuple[Callable[[Path], Path], str]] = {
    "a shard's file of another clock": (
        lambda run: with_file_of(run, shard_part(run / "other", 6, 1), write_checkpoint(run, 8)),
        "shard-1.safetensors is .* at clock 6, but its manifest is of job job at clock 8",
    ),
    "a stage's file of another clock": (
        lambda run: with_file_of(run, stage_part(run / "other", 6, 0, 1), write_checkpoint(run, 8)),
        "vw-0-stage-1.safetensors is .* at clock 6",
    ),
    "a file of another job": (
        lambda run: with_file_of(
            run, shard_part(run / "other", 8, 0, job_id=JobId("theirs")), write_checkpoint(run, 8)
        ),
        "shard-0.safetensors is .* of job theirs",
    ),
    "a file under another name": (renamed, "shard-1.safetensors is shard-0.safetensors of job job"),
    "a shard's file of another model": (
        lambda run: with_file_of(run, shard_part(run / "other", 8, 1, num_elements=4), write_checkpoint(run, 8)),
        r"inconsistent files: shard-1.safetensors has weights/cut as \[2, 8\] F32, but shard-0.safetensors as \[2, 6\]",
    ),
    "a shard's file of another dtype": (
        lambda run: with_file_of(run, shard_part(run / "other", 8, 0, dtype=torch.float16), write_checkpoint(run, 8)),
        r"has weights/cut as \[2, 6\] F32, but shard-0.safetensors as \[2, 6\] F16: they belong to two models",
    ),
    "a slice is missing": (
        lambda run: with_file_of(run, empty_shard(run / "other", 8, 1), write_checkpoint(run, 8)),
        "and others have weights/cut only up to element 6 of 12",
    ),
    "two stages of two cuts": (
        lambda run: with_file_of(
            run,
            stage_part(run / "other", 8, 0, 1, optimizer={"0.weight": {"momentum_buffer": torch.zeros(3)}}),
            write_checkpoint(run, 8),
        ),
        "vw-0-stage-1.safetensors and vw-0-stage-0.safetensors both have vw-0/optimizer/0.weight",
    ),
    "buffers of two models": (
        lambda run: with_buffers(run, torch.zeros(3), torch.zeros(4)),
        r"vw-1-stage-0.safetensors has buffers/mean as \[4\] F32, but vw-0-stage-0.safetensors as \[3\] F32",
    ),
    "a manifest of another job": (lambda run: crafted(run, job_id="theirs"), "but its manifest is of job theirs"),
    "a manifest of another clock": (lambda run: crafted(run, progress=progress_at(6)), "is of clock 6, not of clock-0"),
    "fewer stages than files": (lambda run: crafted(run, num_stages={0: 1, 1: 1}), "lists 5 files of 2 shards"),
    "more shards than files": (lambda run: crafted(run, num_shards=3), "lists 5 files of 3 shards"),
    "other stages than files": (lambda run: crafted(run, num_stages={0: 1, 1: 2}), "does not list vw-1-stage-1"),
    "another virtual worker": (lambda run: crafted(run, num_stages={0: 2, 2: 1}), "does not list vw-2-stage-0"),
    "no virtual workers": (lambda run: crafted(run, num_stages={}, num_shards=5), "lists 5 files of 5 shards"),
    "a negative count": (lambda run: crafted(run, num_stages={0: 6, 1: -3}), "lists 5 files"),
    "a file too few": (lambda run: crafted(run, drop="shard-1.safetensors"), "lists 4 files"),
    "a version of the future": (
        lambda run: crafted(run, version=3),
        r"version 3, .* only versions up to 2; use",
    ),
    "a negative clock": (lambda run: crafted(run, progress=progress_at(-1)), r"has invalid counts \(-1, "),
}


@pytest.mark.parametrize(("craft", "reason"), MIXED.values(), ids=MIXED)
def test_a_mixed_set_is_refused_as_a_set(tmp_path: Path, craft: Callable[[Path], Path], reason: str) -> None:
    older = write_checkpoint(tmp_path, 4)
    folder = craft(tmp_path)
    assert folder == checkpoint_dir(tmp_path, Clock(8))
    with pytest.raises(CheckpointError, match=reason):
        read_complete(folder)
    assert newest_complete(tmp_path) == older


def test_what_is_listed_is_found_without_a_look_at_its_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    older, newer = (write_checkpoint(tmp_path, clock) for clock in (4, 8))
    path = newer / "shard-0.safetensors"
    raw = path.read_bytes()
    path.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    assert newest_complete(tmp_path) == older

    def read(_: Path) -> NoReturn:
        raise AssertionError("no file is read")

    monkeypatch.setattr("hetpipe.checkpoint.manifest.file_digest", read)
    monkeypatch.setattr("hetpipe.checkpoint.manifest.read_label", read)
    assert newest_listed(tmp_path) == newer
    path.write_bytes(raw[:-1])
    assert newest_listed(tmp_path) == older, "shorter than listed"
    (older / MANIFEST).unlink()
    assert newest_listed(tmp_path) is None


@pytest.mark.parametrize(
    "name",
    ["../vw-0-stage-0.safetensors", "/etc/passwd", "vw-0-stage-0.safetensors/..", "manifest.json", "", "x" * 999],
)
def test_a_file_that_nobody_would_write(tmp_path: Path, name: str) -> None:
    manifest = read_manifest(write_checkpoint(tmp_path, 4, stages=(1,), num_shards=0))
    with pytest.raises(ProtocolViolation, match="checkpoint file named") as caught:
        parse_manifest(manifest_bytes(replace(manifest, files=(replace(manifest.files[0], name=name),))))
    assert len(str(caught.value)) < 250


def test_plan_versions_are_part_of_it_and_its_text_without_them_is_that_of_earlier_versions() -> None:
    files = tuple(CheckpointFile(f"vw-0-stage-{stage}.safetensors", "0" * 64, 1) for stage in range(2))
    without = Manifest(2, "job", progress_at(4), {VirtualWorkerIndex(0): 2}, files)
    assert b"plans" not in manifest_bytes(without)
    assert parse_manifest(manifest_bytes(without)).progress == without.progress
    plans = {VirtualWorkerIndex(0): PlanVersion(3, (0, 1, 4), (0, 2, 4))}
    moved = replace(without, progress=replace(without.progress, plans=plans))
    assert parse_manifest(manifest_bytes(moved)).progress.plans == plans
    with pytest.raises(ProtocolViolation, match="checksum"):
        parse_manifest(manifest_bytes(moved).replace(b"[0, 1, 4]", b"[0, 2, 4]"))
