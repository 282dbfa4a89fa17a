"""The files in which a node keeps what enters the layers behind frozen ones."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hetpipe.decide.elastic.caching import CacheBytes, CacheFolders
from hetpipe.pipeline import frozen_cache
from hetpipe.pipeline.frozen_cache import FrozenCache, digest_of

UNIT, OTHER, THIRD = (bytes([number]) * 16 for number in (1, 2, 3))


def folders(parent: Path, *, memory: int = 1 << 20, disk: int = 0) -> CacheFolders:
    found = CacheFolders(parent / "memory", parent / "disk", CacheBytes(memory, disk))
    for folder in (found.memory, found.disk):
        folder.mkdir(exist_ok=True)
    return found


def values() -> tuple[Tensor, ...]:
    return (
        torch.randn(3, 5),
        torch.arange(6).view(2, 3),
        torch.empty(0, 4),
        torch.ones((), dtype=torch.bool),
        torch.randn(7).to(torch.bfloat16),
    )


def assert_equal(found: tuple[Tensor, ...] | None, expected: tuple[Tensor, ...]) -> None:
    assert found is not None
    assert [(value.dtype, value.shape) for value in found] == [(value.dtype, value.shape) for value in expected]
    assert all(value.equal(other) for value, other in zip(found, expected, strict=True))
    assert all(value.data_ptr() % 64 == 0 for value in found)


def test_every_process_reads_what_one_has_kept(tmp_path: Path) -> None:
    one, other, kept = FrozenCache(folders(tmp_path), 1), FrozenCache(folders(tmp_path), 1), values()
    assert one.keep(4, UNIT, kept)
    found = other.read(4, UNIT)
    assert_equal(found, kept)
    assert found is not None
    found[0].add_(1.0)  # a layer in place
    assert_equal(one.read(4, UNIT), kept)
    assert other.borders() == {4}
    assert other.read(4, OTHER) is None
    assert other.read(2, UNIT) is None
    assert FrozenCache(folders(tmp_path), 2).read(4, UNIT) is None, "another term has other weights"


def test_what_is_dropped_makes_room(tmp_path: Path) -> None:
    cache, kept = FrozenCache(folders(tmp_path), 1), (torch.zeros(1000),)
    assert cache.keep(2, UNIT, kept)
    used = cache.used
    assert 4000 <= used.memory <= 4200
    assert cache.keep(2, UNIT, kept), "it is there"
    assert cache.used == used
    assert cache.keep(5, UNIT, kept)
    cache.drop(2, UNIT)
    cache.drop(2, UNIT)
    assert cache.used == used
    assert cache.read(2, UNIT) is None
    assert_equal(cache.read(5, UNIT), kept)


def test_disk_is_behind_memory_and_both_have_an_end(tmp_path: Path) -> None:
    cache, kept = FrozenCache(folders(tmp_path, memory=5000, disk=5000), 1), (torch.zeros(1000),)
    assert [cache.keep(1, unit, kept) for unit in (UNIT, OTHER, THIRD)] == [True, True, False]
    assert cache.used.memory == cache.used.disk
    assert_equal(cache.read(1, OTHER), kept)
    assert cache.read(1, THIRD) is None
    cache.drop(1, OTHER)
    assert cache.used.disk == 0
    assert cache.keep(1, THIRD, kept)


def test_a_full_file_system_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full one in memory has the unit on disk; two of them have it nowhere, and the run goes on."""
    cache, kept, write = FrozenCache(folders(tmp_path, disk=1 << 20), 1), (torch.zeros(1000),), frozen_cache._write
    full = {"memory"}

    def write_if_not_full(path: Path, pieces: list[memoryview | bytes]) -> None:
        if path.relative_to(tmp_path).parts[0] in full:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, pieces)

    monkeypatch.setattr(frozen_cache, "_write", write_if_not_full)
    assert cache.keep(1, UNIT, kept)
    assert cache.used.memory == 0
    assert cache.used.disk
    full.add("disk")
    assert not cache.keep(1, OTHER, kept)
    assert cache.read(1, OTHER) is None
    assert_equal(cache.read(1, UNIT), kept)


def test_a_write_that_fails_leaves_no_file(tmp_path: Path) -> None:
    full = Path("/dev/full")
    folder = tmp_path / "1"
    folder.mkdir()
    (folder / f"{UNIT.hex()}.partial").symlink_to(full)
    with pytest.raises(OSError, match="No space left"):
        frozen_cache._write(folder / UNIT.hex(), [b"content"], suffix="partial")
    assert list(folder.iterdir()) == []


def test_digests_depend_on_values_shapes_types_and_order() -> None:
    value = torch.arange(6, dtype=torch.int32)
    others = [(value.view(2, 3),), (value.to(torch.int64),), (value + 1,), (value.flip(0),), (value, value), ()]
    digests = {digest_of(other) for other in others}
    assert len(digests) == len(others)
    assert digest_of((value,)) not in digests
    assert digest_of((value.clone(),)) == digest_of((value,))
