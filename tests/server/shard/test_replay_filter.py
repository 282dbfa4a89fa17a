"""A history that is completed by the next process: the lines that lack, and none twice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hetpipe.observe.history import History, HistoryWriter, MemoryHistory, NullHistory
from hetpipe.server.shard.job_storage import ReplayFilter


def history(path: Path, term: int = 1) -> History:
    return History(path, host="host", pid=7, role="parameter_server", term=term)


def tell(to: HistoryWriter, *clocks: int) -> None:
    for clock in clocks:
        to.publish(clock=clock)
        to.used(vw=0, wave=clock, epoch=0, indices=(clock, 5))


def clocks(path: Path) -> list[int]:
    return [json.loads(line)["clock"] for line in path.read_text().splitlines() if '"publish"' in line]


def test_lines_that_are_there_are_left_out_and_the_others_come(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    with_first = history(path)
    tell(with_first, 0)
    since = with_first.position()
    tell(with_first, 1, 2)
    with_first.close()
    again = history(path)
    filtered = ReplayFilter(again, since)
    tell(filtered, 1, 2, 3)
    filtered.is_up_to_date()
    tell(filtered, 4)

    assert clocks(path) == [0, 1, 2, 3, 4]
    assert filtered.position() == path.stat().st_size
    assert len(path.read_text().splitlines()) == 10


def test_a_line_that_came_twice_is_left_out_twice_and_no_more() -> None:
    told = MemoryHistory()
    for _ in range(2):
        told.barrier(clock=4, reason="evict")
    filtered = ReplayFilter(told, 0)
    for _ in range(3):
        filtered.barrier(clock=4, reason="evict")

    assert len(told.of("barrier")) == 3


def test_a_pull_is_always_told() -> None:
    told = MemoryHistory()
    told.pull(shard=0, vw=0, stage=0, clock=1)
    ReplayFilter(told, 0).pull(shard=0, vw=0, stage=0, clock=1)

    assert len(told.of("pull")) == 2


def test_lines_of_another_term_and_torn_ones_say_nothing(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    tell(history(path, term=1), 0)
    whole = path.read_bytes()
    path.write_bytes(whole + whole.splitlines()[0][:30])
    later = history(path, term=2)
    tell(ReplayFilter(later, 0), 0)

    assert [fields for event, fields in later.since(0) if event == "publish"] == [{"clock": 0}]
    assert [event for event, _ in history(path, term=1).since(0)] == ["publish", "used"]


@pytest.mark.parametrize("told", [NullHistory(), MemoryHistory()])
def test_an_empty_history(told: HistoryWriter) -> None:
    assert told.position() == 0
    assert list(told.since(0)) == []
