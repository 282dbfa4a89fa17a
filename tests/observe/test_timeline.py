"""The merged trace is one valid Chrome trace, whatever became of the processes that wrote the fragments."""

from __future__ import annotations

import errno
import json
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from hetpipe.observe import timeline as timeline_module
from hetpipe.observe.timeline import Activity, NullTimeline, Timeline, merge_timelines
from tests.support.fake_clock import FakeClock


def open_timeline(path: Path, clock: FakeClock, *, vw: int = 0, stage: int = 0, host: str = "n0") -> Timeline:
    return Timeline(
        path,
        process_index=vw,
        process_name=f"virtual worker {vw}",
        thread_index=stage,
        thread_name=f"stage {stage}",
        clock=clock,
        host=host,
    )


def merged(folder: Path) -> dict[str, Any]:
    out = folder / "trace.json"
    merge_timelines(folder.glob("*.jsonl"), out)
    trace: dict[str, Any] = json.loads(out.read_text())
    return trace


def spans(trace: dict[str, Any]) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == "X"]


def names(trace: dict[str, Any], kind: str) -> dict[tuple[int, int], str]:
    return {
        (e["pid"], e["tid"]): e["args"].get("name", e["args"].get("sort_index"))
        for e in trace["traceEvents"]
        if e["ph"] == "M" and e["name"] == kind
    }


def test_activities_become_complete_events(tmp_path: Path) -> None:
    clock = FakeClock(monotonic=100.0)
    timeline = open_timeline(tmp_path / "a.jsonl", clock)
    with timeline.span(Activity.FORWARD, p=12, clock=3):
        clock.advance(0.25)
    with timeline.span(Activity.WAIT, wanted_clock=4):
        clock.advance(0.5)
    timeline.close()
    first, second = spans(merged(tmp_path))
    assert first == {
        "ph": "X",
        "pid": 0,
        "tid": 0,
        "name": "F12",
        "cat": "compute",
        "ts": 0.0,
        "dur": 250_000.0,
        "args": {"p": 12, "clock": 3},
    }
    assert (second["name"], second["ts"], second["dur"], second["args"]) == (
        "wait",
        250_000.0,
        500_000.0,
        {"wanted_clock": 4},
    )


@pytest.mark.parametrize(
    ("activity", "label"),
    [(Activity.FORWARD, "F7"), (Activity.BACKWARD, "B7"), (Activity.STEP, "step"), (Activity.PUSH, "push")],
)
def test_labels(activity: Activity, label: str) -> None:
    assert activity.label(7) == label
    assert activity.label(None) == label.removesuffix("7")


def test_a_span_is_recorded_when_its_block_fails(tmp_path: Path) -> None:
    timeline = open_timeline(tmp_path / "a.jsonl", FakeClock())
    with pytest.raises(KeyError), timeline.span(Activity.STEP):
        raise KeyError
    timeline.close()
    assert [e["name"] for e in spans(merged(tmp_path))] == ["step"]


def test_virtual_workers_are_processes_and_stages_threads(tmp_path: Path) -> None:
    clock = FakeClock()
    for vw in (1, 0):
        for stage in (1, 0):
            timeline = open_timeline(tmp_path / f"{vw}-{stage}.jsonl", clock, vw=vw, stage=stage)
            timeline.record(Activity.FORWARD, p=1, start_seconds=1, end_seconds=2)
            timeline.record(Activity.PULL, start_seconds=1, end_seconds=2)
            timeline.close()
    trace = merged(tmp_path)
    assert set(names(trace, "process_name").values()) == {"virtual worker 0", "virtual worker 1"}
    threads = names(trace, "thread_name")
    order = names(trace, "thread_sort_index")
    in_order = [threads[key] for key in sorted(order, key=lambda key: (key[0], order[key]))]
    assert in_order == ["stage 0", "stage 0 transfers", "stage 1", "stage 1 transfers"] * 2


def test_overlapping_transfers_get_threads_of_their_own(tmp_path: Path) -> None:
    timeline = open_timeline(tmp_path / "a.jsonl", FakeClock())
    for start, end in [(0, 4), (1, 3), (2, 6), (3, 5), (4, 7)]:
        timeline.record(Activity.PUSH, start_seconds=start, end_seconds=end)
    timeline.record(Activity.FORWARD, p=1, start_seconds=0, end_seconds=9)
    timeline.close()
    trace = merged(tmp_path)
    by_thread: dict[int, list[dict[str, Any]]] = {}
    for event in spans(trace):
        by_thread.setdefault(event["tid"], []).append(event)
    assert len(by_thread) == 4
    for events in by_thread.values():
        for before, after in pairwise(events):
            assert before["ts"] + before["dur"] <= after["ts"]
    assert set(names(trace, "thread_name").values()) == {
        "stage 0",
        "stage 0 transfers",
        "stage 0 transfers 2",
        "stage 0 transfers 3",
    }


def test_processes_of_a_host_share_its_monotonic_time(tmp_path: Path) -> None:
    clock = FakeClock(monotonic=50.0)
    first = open_timeline(tmp_path / "a.jsonl", clock)
    clock.jump_wall(-3600)
    second = open_timeline(tmp_path / "b.jsonl", clock, stage=1)
    first.record(Activity.FORWARD, p=1, start_seconds=51, end_seconds=52)
    second.record(Activity.FORWARD, p=1, start_seconds=52.5, end_seconds=53)
    first.close()
    second.close()
    assert [(e["tid"] > 0, e["ts"]) for e in spans(merged(tmp_path))] == [(False, 0.0), (True, 1_500_000.0)]


def test_hosts_are_lined_up_by_their_wall_clocks(tmp_path: Path) -> None:
    here, there = FakeClock(monotonic=10.0, wall=1010.0), FakeClock(monotonic=500.0, wall=1010.0)
    first, second = open_timeline(tmp_path / "a.jsonl", here), open_timeline(tmp_path / "b.jsonl", there, host="n1")
    first.record(Activity.FORWARD, p=1, start_seconds=10, end_seconds=11)
    second.record(Activity.FORWARD, p=1, start_seconds=501, end_seconds=502)
    first.close()
    second.close()
    assert [e["ts"] for e in spans(merged(tmp_path))] == [0.0, 1_000_000.0]


def test_a_killed_process_costs_its_torn_line_only(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    clock = FakeClock()
    timeline = open_timeline(path, clock)
    for p in range(1, 4):
        timeline.record(Activity.FORWARD, p=p, start_seconds=p, end_seconds=p + 1)
    timeline.close()
    path.write_bytes(path.read_bytes()[:-20])
    again = open_timeline(path, clock)
    again.record(Activity.FORWARD, p=9, start_seconds=9, end_seconds=10)
    again.close()
    assert [e["name"] for e in spans(merged(tmp_path))] == ["F1", "F2", "F9"]


def test_rubbish_lines_and_missing_files_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(
        b'{"name":"early","cat":"c","ts":1,"dur":1,"args":{}}\n7\n[]\n{}\nnull\n\xff\xfe\n{"origin":{"x":1}}\n{"origin":3}\n'
    )
    timeline = open_timeline(tmp_path / "a.jsonl", FakeClock())
    timeline.record(Activity.STEP, start_seconds=1, end_seconds=2)
    timeline.close()
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write('{"name":"odd","cat":"c","ts":NaN,"dur":1,"args":{}}\n')
    out = tmp_path / "trace.json"
    merge_timelines([tmp_path / "none.jsonl", tmp_path / "a.jsonl"], out)
    assert [e["name"] for e in spans(json.loads(out.read_text()))] == ["step"]


def test_a_trace_for_which_there_is_no_room_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What there was of it would take the room that the result of the run needs."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        merge_timelines([], tmp_path / "trace.json")
    assert list(tmp_path.iterdir()) == []


def test_no_fragments_make_an_empty_trace(tmp_path: Path) -> None:
    assert merged(tmp_path)["traceEvents"] == []


def test_memory_is_bounded_by_writing_now_and_then(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    timeline = open_timeline(path, FakeClock())
    for _ in range(1000):
        timeline.record(Activity.STEP, start_seconds=0, end_seconds=0.5)
    assert path.read_text().count("step") == 768
    timeline.record(Activity.STEP, start_seconds=2, end_seconds=3)
    assert path.read_text().count("step") == 1001
    timeline.close()


def test_a_very_long_run_says_how_much_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline_module, "MAX_EVENTS", 10)
    timeline = open_timeline(tmp_path / "a.jsonl", FakeClock())
    for _ in range(25):
        timeline.record(Activity.STEP, start_seconds=0, end_seconds=1)
    timeline.close()
    trace = merged(tmp_path)
    assert len(spans(trace)) == 10
    assert trace["otherData"] == {"dropped_activities": "15"}


def test_a_diverged_loss_does_not_spoil_the_trace(tmp_path: Path) -> None:
    timeline = open_timeline(tmp_path / "a.jsonl", FakeClock())
    timeline.record(Activity.EVALUATE, start_seconds=0, end_seconds=1, loss=float("nan"))
    timeline.close()
    (event,) = spans(merged(tmp_path))
    assert event["args"] == {"loss": "nan"}


def test_after_close_nothing_is_written(tmp_path: Path) -> None:
    timeline = open_timeline(tmp_path / "a.jsonl", FakeClock())
    timeline.close()
    timeline.close()
    timeline.record(Activity.STEP, start_seconds=0, end_seconds=1)
    assert spans(merged(tmp_path)) == []


def test_the_null_timeline_does_nothing() -> None:
    timeline = NullTimeline()
    with timeline.span(Activity.FORWARD, p=1):
        pass
    timeline.record(Activity.PUSH, start_seconds=0, end_seconds=1)
    timeline.close()
