"""Measurements that are found again, and files that cannot be used."""

from __future__ import annotations

from pathlib import Path

from hetpipe.profiler.cache import MeasurementCache
from hetpipe.values.measurement import Measurement
from tests.profiler.builders import layer, measurement


def test_what_is_kept_is_found(tmp_path: Path) -> None:
    kept = measurement("cpu", layer("a", flops=7, parameters=3), layer("b"))
    MeasurementCache(tmp_path / "new" / "folder", Measurement).keep("key", kept)
    cache = MeasurementCache(tmp_path / "new" / "folder", Measurement)
    assert cache.find("key") == kept
    assert cache.find("another") is None
    assert [path.name for path in (tmp_path / "new" / "folder").iterdir()] == ["key.json"]


def test_a_damaged_file_is_as_good_as_none(tmp_path: Path) -> None:
    cache = MeasurementCache(tmp_path, Measurement)
    cache.keep("key", measurement("cpu"))
    path = tmp_path / "key.json"
    path.write_text(path.read_text()[:50])
    assert cache.find("key") is None
    cache.keep("key", measurement("cpu"))
    assert cache.find("key") == measurement("cpu")


def test_a_folder_that_cannot_be_written_to_is_no_error(tmp_path: Path) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    cache = MeasurementCache(in_the_way, Measurement)
    cache.keep("key", measurement("cpu"))
    assert cache.find("key") is None
