"""The files in which a node keeps what enters the layers behind frozen ones."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hetpipe.decide.elastic.caching import CacheBytes, CacheFolders
from hetpipe.pipeline import frozen_cache
from hetpipe.pipeline.frozen_cache import FrozenCache, digest_of, digests_of_samples

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
    cache.drop(2, [UNIT])
    cache.drop(2, [UNIT])
    assert cache.used == used
    assert cache.read(2, UNIT) is None
    assert_equal(cache.read(5, UNIT), kept)


def test_disk_is_behind_memory_and_both_have_an_end(tmp_path: Path) -> None:
    cache, kept = FrozenCache(folders(tmp_path, memory=5000, disk=5000), 1), (torch.zeros(1000),)
    assert [cache.keep(1, unit, kept) for unit in (UNIT, OTHER)] == [True, True]
    assert cache.refused == ""
    assert not cache.keep(1, THIRD, kept)
    assert cache.refused == "there is no room in 4.88 KiB of memory and 4.88 KiB of disk"
    assert cache.used.memory == cache.used.disk
    assert_equal(cache.read(1, OTHER), kept)
    assert cache.read(1, THIRD) is None
    cache.drop(1, [OTHER])
    assert cache.used.disk == 0
    assert cache.keep(1, THIRD, kept)
    assert cache.refused == ""


def test_a_full_file_system_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full one in memory has the unit on disk; two of them have it nowhere, and the run goes on."""
    cache, kept, write = FrozenCache(folders(tmp_path, disk=1 << 20), 1), (torch.zeros(1000),), frozen_cache._write
    full = {"memory"}

    def write_if_not_full(path: Path, pieces: list[memoryview | bytes]) -> Path:
        if path.relative_to(tmp_path).parts[0] in full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, pieces)

    monkeypatch.setattr(frozen_cache, "_write", write_if_not_full)
    assert cache.keep(1, UNIT, kept)
    assert cache.used.memory == 0
    assert cache.used.disk
    full.add("disk")
    assert not cache.keep(1, OTHER, kept)
    assert cache.refused == f"{tmp_path}: No space left on device"
    assert cache.read(1, OTHER) is None
    assert_equal(cache.read(1, UNIT), kept)


def test_what_cannot_be_counted_or_read_is_not_cached(tmp_path: Path) -> None:
    cache, kept = FrozenCache(folders(tmp_path), 1), (torch.zeros(1000),)
    assert cache.keep(1, UNIT, kept)
    used = tmp_path / "memory" / "used"
    used.unlink()
    used.mkdir()
    assert not cache.keep(1, OTHER, kept)
    assert "Is a directory" in cache.refused
    assert cache.used == CacheBytes(0, 0)
    cache.drop(1, [UNIT])
    (tmp_path / "memory" / "1" / "1" / UNIT.hex()).mkdir()
    assert cache.read(1, UNIT) is None
    assert cache.read_samples(1, [UNIT]) is None


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


def of_two_minibatches() -> tuple[list[tuple[Tensor, ...]], list[tuple[bytes, ...]]]:
    """What enters a layer, by minibatch: rows, rows of nothing, numbers, and what belongs to all; and their units."""
    shared = torch.randn(1, 7)
    minibatches: list[tuple[Tensor, ...]] = [
        (torch.randn(3, 2, 5), torch.empty(3, 0), torch.arange(3.0) + 10 * number, shared) for number in range(2)
    ]
    units = [tuple(bytes([10 * number + place]) * 16 for place in range(3)) for number in range(2)]
    return minibatches, units


BY_SAMPLE = (True, True, True, False)


def test_samples_are_read_in_other_minibatches(tmp_path: Path) -> None:
    (one, other), units = of_two_minibatches()
    cache = FrozenCache(folders(tmp_path), 1)
    assert cache.keep_samples(4, units[0], one, BY_SAMPLE)
    assert cache.read_samples(4, (units[0][0], units[1][0])) is None, "one of them is missing"
    assert cache.keep_samples(4, units[1], other, BY_SAMPLE)
    found = FrozenCache(folders(tmp_path), 1).read_samples(4, (units[1][2], units[0][0], units[1][0]))
    expected = (*(torch.stack([b[2], a[0], b[0]]) for a, b in zip(one[:3], other[:3], strict=True)), one[3])
    assert_equal(found, expected)
    assert found is not None
    found[0].add_(1.0)
    assert_equal(cache.read_samples(4, units[0]), one)


def test_samples_whose_minibatches_had_something_else_in_common_are_not_combined(tmp_path: Path) -> None:
    (one, other), units = of_two_minibatches()
    cache = FrozenCache(folders(tmp_path), 1)
    cache.keep_samples(4, units[0], one, BY_SAMPLE)
    cache.keep_samples(4, units[1], (*other[:3], other[3] + 1), BY_SAMPLE)
    assert cache.read_samples(4, (units[0][0], units[1][0])) is None
    assert_equal(cache.read_samples(4, units[0]), one)


def test_samples_of_other_shapes_are_not_combined(tmp_path: Path) -> None:
    (one, other), units = of_two_minibatches()
    cache = FrozenCache(folders(tmp_path), 1)
    cache.keep_samples(4, units[0], one, BY_SAMPLE)
    cache.keep_samples(4, units[1], (other[0].view(3, 5, 2), *other[1:]), BY_SAMPLE)
    assert cache.read_samples(4, (units[0][0], units[1][0])) is None


def test_the_samples_of_a_minibatch_are_kept_together_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without room for all of them by the limit, or by the file system after the second, none remains."""
    units = [bytes([number]) * 16 for number in range(4)]
    kept = (torch.zeros(4, 1000),)
    small = FrozenCache(folders(tmp_path, memory=13_000), 1)
    assert not small.keep_samples(1, units, kept, (True,))
    assert small.keep_samples(1, units[:2], (kept[0][:2],), (True,))
    used = small.used.memory
    assert small.keep_samples(1, units[:2], (kept[0][:2],), (True,)), "they are there"
    assert small.used.memory == used
    small.drop(1, units)
    assert small.used.memory == 0

    write, written = frozen_cache._write, list[Path]()

    def write_two(path: Path, pieces: list[memoryview | bytes]) -> Path:
        if len(written) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        written.append(path)
        return write(path, pieces)

    monkeypatch.setattr(frozen_cache, "_write", write_two)
    assert not FrozenCache(folders(tmp_path), 1).keep_samples(1, units, kept, (True,))
    assert FrozenCache(folders(tmp_path), 1).used == CacheBytes(0, 0)
    assert not any(path.exists() for path in written)


def test_digests_of_samples_depend_on_their_rows_and_on_how_many_there_are() -> None:
    rows, mask = torch.randn(4, 3), torch.ones(4, 2, dtype=torch.bool)
    found = digests_of_samples((rows, mask))
    assert found is not None
    assert len(set(found)) == 4
    assert digests_of_samples((rows.flip(0), mask)) == found[::-1]
    assert digests_of_samples((rows.t().contiguous().t(), mask)) == found, "whatever the layout in memory"
    of_three = digests_of_samples((rows[:3], mask[:3]))
    assert of_three is not None
    assert not set(of_three) & set(found)
    assert digests_of_samples((rows, mask[:3])) is None
    assert digests_of_samples((rows, torch.ones(()))) is None
    assert digests_of_samples(()) is None
