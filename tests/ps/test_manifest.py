"""Checkpoints on disk: complete or none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hetpipe.errors import CheckpointError, ProtocolViolation
from hetpipe.ps.manifest import (
    MANIFEST,
    CheckpointKeeper,
    checkpoint_dir,
    file_digest,
    newest_checkpoint,
    read_manifest,
    verify_file,
    write_durably,
)
from hetpipe.spec.ids import Clock, VirtualWorkerIndex
from hetpipe.spec.requests import CheckpointFile
from hetpipe.spec.sync import Membership, Progress

from .builders import requester

STAGES = ((0, 0), (0, 1), (1, 0))


def progress(clock: int) -> Progress:
    return Progress(Clock(clock), epoch=1, used=b"\x05\xff", minibatches=7, samples=14)


def keeper(run_dir: Path, keep: int = 2) -> CheckpointKeeper:
    membership = Membership({VirtualWorkerIndex(0): 2, VirtualWorkerIndex(1): 1})
    return CheckpointKeeper(job_id="job", run_dir=run_dir, membership=membership, keep=keep)


def write_part(run_dir: Path, clock: int, vw: int, stage: int) -> CheckpointFile:
    folder = checkpoint_dir(run_dir, Clock(clock))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"vw-{vw}-stage-{stage}.safetensors"
    path.write_bytes(bytes([clock, vw, stage]) * 100)
    return file_digest(path)


def checkpoint(run_dir: Path, clock: int, by: CheckpointKeeper | None = None) -> Path:
    """A complete checkpoint."""
    whose = by or keeper(run_dir)
    answers = [
        whose.report(requester(vw, stage), Clock(clock), [write_part(run_dir, clock, vw, stage)], progress(clock))
        for vw, stage in STAGES
    ]
    assert answers == [False, False, True]
    return checkpoint_dir(run_dir, Clock(clock))


def names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def test_a_complete_checkpoint_says_everything(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, 4)
    manifest = read_manifest(folder)

    assert manifest.job_id == "job"
    assert manifest.progress == progress(4)
    assert manifest.num_stages == {0: 2, 1: 1}
    assert [file.name for file in manifest.files] == [f"vw-{vw}-stage-{stage}.safetensors" for vw, stage in STAGES]
    for file in manifest.files:
        verify_file(folder, file)
    assert newest_checkpoint(tmp_path) == folder


def test_until_the_last_part_there_is_none(tmp_path: Path) -> None:
    one = keeper(tmp_path)
    for _ in range(2):  # a repetition changes nothing
        for vw, stage in STAGES[:2]:
            assert not one.report(requester(vw, stage), Clock(4), [write_part(tmp_path, 4, vw, stage)], progress(4))
    with pytest.raises(CheckpointError, match="has no complete checkpoint"):
        newest_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"has no manifest\.json"):
        read_manifest(checkpoint_dir(tmp_path, Clock(4)))

    assert one.report(requester(1, 0), Clock(4), [write_part(tmp_path, 4, 1, 0)], progress(4))


@pytest.mark.parametrize(
    "name",
    ["../vw-0-stage-0.safetensors", "/etc/passwd", "vw-0-stage-0.safetensors/..", "manifest.json", "", "x" * 999],
)
def test_a_file_no_stage_would_write(tmp_path: Path, name: str) -> None:
    with pytest.raises(ProtocolViolation, match="checkpoint file named") as caught:
        keeper(tmp_path).report(requester(), Clock(4), [CheckpointFile(name, "", 1)], progress(4))
    assert len(str(caught.value)) < 250


def test_a_barrier_the_run_is_not_at(tmp_path: Path) -> None:
    one = keeper(tmp_path)
    with pytest.raises(ProtocolViolation, match="at clock 9, but the segment under way began at 4"):
        one.report(requester(1, 0), Clock(9), [], progress(4))


Harm = Callable[[Path], object]


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


TORN: dict[str, Harm] = {
    "no manifest": lambda folder: (folder / MANIFEST).unlink(),
    "half a manifest": lambda folder: truncate(folder / MANIFEST),
    "an empty manifest": lambda folder: (folder / MANIFEST).write_bytes(b""),
    "bytes for a manifest": lambda folder: (folder / MANIFEST).write_bytes(b"\xff\xfe\x00"),
    "another manifest": lambda folder: (folder / MANIFEST).write_text('{"version": 1}'),
    "a file is missing": lambda folder: (folder / "vw-1-stage-0.safetensors").unlink(),
    "a file is short": lambda folder: truncate(folder / "vw-0-stage-1.safetensors"),
    "a file is a folder": lambda folder: replace_by_folder(folder / "vw-0-stage-1.safetensors"),
}


@pytest.mark.parametrize("harm", TORN.values(), ids=TORN)
def test_a_torn_one_is_refused_and_passed_over(tmp_path: Path, harm: Harm) -> None:
    older, newer = checkpoint(tmp_path, 4), checkpoint(tmp_path, 8)
    harm(newer)
    with pytest.raises(CheckpointError):
        read_manifest(newer)
    assert newest_checkpoint(tmp_path) == older

    harm(older)
    with pytest.raises(CheckpointError, match="has no complete checkpoint"):
        newest_checkpoint(tmp_path)


def test_a_flipped_bit_is_found(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, 4)
    (file, *others) = read_manifest(folder).files
    data = bytearray((folder / file.name).read_bytes())
    data[150] ^= 1
    (folder / file.name).write_bytes(bytes(data))

    with pytest.raises(CheckpointError, match="is damaged: SHA-256"):
        verify_file(folder, file)
    for other in others:
        verify_file(folder, other)


def test_a_run_without_any(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"set checkpoint\.every_waves"):
        newest_checkpoint(tmp_path)


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_newest_are_kept(tmp_path: Path, keep: int) -> None:
    one = keeper(tmp_path, keep)
    for clock in (2, 4, 6, 8):
        checkpoint(tmp_path, clock, one)

    assert names(tmp_path) == [f"clock-{clock:08d}" for clock in (2, 4, 6, 8)[-keep:]]
    for folder in (tmp_path / "checkpoints").iterdir():
        read_manifest(folder)


def test_a_checkpoint_that_is_being_written_is_not_pruned(tmp_path: Path) -> None:
    one = keeper(tmp_path, 1)
    checkpoint(tmp_path, 2, one)
    write_part(tmp_path, 6, 0, 0)
    checkpoint(tmp_path, 4, one)

    assert names(tmp_path) == ["clock-00000004", "clock-00000006"]


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for data in (b"long before", b"new"):
        write_durably(path, data)
        assert path.read_bytes() == data
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]
