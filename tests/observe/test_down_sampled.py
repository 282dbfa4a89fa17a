"""Curves of long runs are drawn from a bounded index: nothing is lost in the sums, and old segments are not read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetpipe.observe.clock_curve import ClockReduction, read_clock_curve
from hetpipe.observe.down_sampled import MOST_POINTS, DownSampling, index_path, points_of, update_index
from hetpipe.observe.history import History
from hetpipe.observe.line_file import LineFile
from hetpipe.observe.metrics import Metrics, WaveMetrics, WaveReduction, metrics_path, read_metrics
from hetpipe.observe.segments import packed_path, segment_path, segments_of
from tests.support.fake_clock import FakeClock

WAVE = WaveMetrics(
    wave=0, p=4, minibatches=4, samples=60, weight=60, loss=0.5, learning_rate=0.1, gradient_norm=None, max_norm=None
)
SEGMENT_BYTES = 16_000


def write(path: Path, number: int, *, first: int = 0) -> None:
    """Waves from `first` on, with losses that fall."""
    metrics = Metrics(path, clock=FakeClock(monotonic=float(first)), segment_bytes=SEGMENT_BYTES)
    for wave in range(first, first + number):
        metrics.write(replace(WAVE, wave=wave, p=4 * wave + 4, loss=1 / (wave + 1), gradient_norm=float(wave % 7)))
    metrics.close()
    # What is written while a segment is compressed is compressed with the next one: a later process sees to the rest.
    Metrics(path, clock=FakeClock(), segment_bytes=SEGMENT_BYTES).close()


def damage(path: Path) -> int:
    """Make compressed segments unreadable; returns how many."""
    packed = [packed_path(path, number) for number in segments_of(path) if packed_path(path, number).exists()]
    for each in packed:
        each.write_bytes(b"no gzip")
    return len(packed)


def test_a_page_reads_the_index_and_the_newest_segment_and_no_other(tmp_path: Path) -> None:
    """What it gets is all of the run, in at most so many points."""
    path = metrics_path(tmp_path, 0)
    write(path, 3000)
    assert len(segments_of(path)) > 20
    assert damage(path) == len(segments_of(path)) - 1
    found = read_metrics(tmp_path)
    assert MOST_POINTS // 2 <= len(found) <= MOST_POINTS
    assert sum(one.wave.minibatches for one in found) == 4 * 3000
    assert sum(one.wave.samples for one in found) == 60 * 3000
    assert (found[-1].wave.wave, found[-1].wave.p) == (2999, 12_000)
    mean = sum((one.wave.loss or 0.0) * one.wave.samples for one in found) / (60 * 3000)
    assert mean == pytest.approx(sum(1 / (wave + 1) for wave in range(3000)) / 3000)
    assert {one.wave.gradient_norm for one in found[:-1]} == {6.0}, "of norms the largest"
    assert index_path(path).stat().st_size < 200 * MOST_POINTS


def test_metrics_are_compressed_as_they_get_long(tmp_path: Path) -> None:
    path = metrics_path(tmp_path, 0)
    write(path, 3000)
    assert not path.exists()
    plain = [each for each in path.parent.glob("*.jsonl") if each.stat().st_size]
    assert sum(each.stat().st_size for each in plain) <= SEGMENT_BYTES
    packed = list(path.parent.glob("*.jsonl.gz"))
    assert sum(each.stat().st_size for each in packed) < len(packed) * SEGMENT_BYTES / 4


def test_an_index_that_is_lost_or_damaged_is_made_again(tmp_path: Path) -> None:
    path = metrics_path(tmp_path, 0)
    write(path, 1000)
    kept, points = index_path(path).read_bytes(), points_of(path, WaveReduction())
    segments = json.loads(kept)["segments"]
    others: list[bytes | None] = [None, b"", kept[:-40], b"[]", kept.replace(b'"loss"', b'"lost"'), b'{"version":2}']
    for other in others:
        if other is None:
            index_path(path).unlink()
        else:
            index_path(path).write_bytes(other)
        assert points_of(path, WaveReduction()) == points
        update_index(path, WaveReduction())
        assert index_path(path).read_bytes() == kept
    assert segments == len(segments_of(path)) - 1


def test_no_line_counts_twice_whenever_the_process_is_killed(tmp_path: Path) -> None:
    """The index is behind the segments, never before them; a plain file that was to be deleted is not looked at."""
    path = metrics_path(tmp_path, 0)
    write(path, 700)
    old = index_path(path).read_bytes()
    write(path, 700, first=700)
    expected = points_of(path, WaveReduction())
    index_path(path).write_bytes(old)
    assert points_of(path, WaveReduction()) == expected
    segment_path(path, 0).write_bytes(b"")
    update_index(path, WaveReduction())
    assert points_of(path, WaveReduction()) == expected
    assert sum(point["minibatches"] for point in expected) == 4 * 1400


def test_a_segment_that_cannot_be_read_leaves_the_index_as_it_was(tmp_path: Path) -> None:
    path = metrics_path(tmp_path, 0)
    write(path, 1000)
    index_path(path).unlink()
    packed = packed_path(path, 1)
    packed.write_bytes(packed.read_bytes()[:-30])
    update_index(path, WaveReduction())
    assert not index_path(path).exists()
    with pytest.raises(OSError, match=r"segment 1 of .* is damaged"):
        read_metrics(tmp_path)


def test_without_a_reduction_there_is_no_index(tmp_path: Path) -> None:
    path = tmp_path / "vw-0-stage-0.jsonl"
    lines = LineFile(path, segment_bytes=100)
    for _ in range(50):
        lines.write(b'{"event":"forward"}\n')
    lines.close()
    assert not index_path(path).exists()


def line(samples: int, loss: float | None) -> bytes:
    values = {"t": 1.0, "wave": 0, "p": 1, "minibatches": 1, "samples": samples, "loss": loss}
    return json.dumps({**values, "learning_rate": None, "gradient_norm": None, "max_norm": None}).encode()


@given(
    st.lists(st.tuples(st.integers(1, 9), st.none() | st.floats(-9, 9)), max_size=40),
    st.integers(0, 60),
    st.integers(0, 2000),
)
@settings(max_examples=40)
def test_where_a_file_is_cut_changes_nothing(waves: list[tuple[int, float | None]], times: int, cut: int) -> None:
    lines = [line(samples, loss) for samples, loss in waves * times]
    whole, parts = DownSampling(WaveReduction()), DownSampling(WaveReduction())
    whole.add(lines)
    parts.add(lines[:cut])
    parts = DownSampling(WaveReduction(), json.loads(json.dumps(parts.points)), parts.width, parts.count)
    parts.add([b"torn", b'{"t":1}', *lines[cut:]])
    assert (whole.points, whole.width, whole.count) == (parts.points, parts.width, parts.count)
    assert len(whole.points) <= MOST_POINTS
    assert sum(point["samples"] for point in whole.points) == times * sum(samples for samples, _ in waves)


@pytest.mark.parametrize("name", ["t", "wave", "samples", "loss", "max_norm"])
@pytest.mark.parametrize("value", ['"1"', "true", "[]", "1e999", "NaN", "9" * 400])
def test_lines_of_another_kind_are_passed_over(name: str, value: str) -> None:
    text = line(3, 0.5).decode()
    odd = json.loads(text)
    odd[name] = "HERE"
    reduction = DownSampling(WaveReduction())
    reduction.add([json.dumps(odd).replace('"HERE"', value).encode(), text.encode(), text.encode()])
    while reduction.count == 1 and len(reduction.points) > 1:
        reduction.points = [reduction.reduction.merged(*reduction.points[:2]), *reduction.points[2:]]
    json.dumps(reduction.points, allow_nan=False)


def test_the_clocks_of_a_run_come_from_the_history_of_the_clock_shard(tmp_path: Path) -> None:
    clock = FakeClock(monotonic=1.0)
    path = tmp_path / "history" / "shard-0.jsonl"
    history = History(
        path,
        host="n0",
        pid=1,
        role="parameter_server",
        term=1,
        clock=clock,
        segment_bytes=50_000,
        reduction=ClockReduction(),
    )
    history.join(vw=1, incarnation=1, clock=0, num_stages=2)
    for wave in range(2000):
        clock.advance(0.5)
        history.commit(vw=0, incarnation=0, wave=wave, samples=32)
        history.used(vw=0, wave=wave, epoch=0, indices=range(32))
        if wave % 4 == 3:
            history.commit(vw=1, incarnation=1, wave=wave // 4, samples=32)
        if wave == 99:
            history.evict(vw=1, incarnation=1, clock=25)
            history.join(vw=1, incarnation=2, clock=100, num_stages=2)
    history.close()
    whole = read_clock_curve(tmp_path)
    assert len(whole) <= MOST_POINTS
    assert whole[-1].samples == 32 * 2500
    assert whole[-1].t == 1.0 + 1000
    assert max(one.distance for one in whole if one.t <= 1.0 + 50) == 76
    assert max(one.distance for one in whole) == 2000 - 499
    assert [one.samples for one in whole] == sorted(one.samples for one in whole)
    damage(path)
    assert read_clock_curve(tmp_path)[-1].samples == 32 * 2500, "from the index, and the newest segment"


def test_a_run_without_history_has_no_clocks(tmp_path: Path) -> None:
    assert read_clock_curve(tmp_path) == []
