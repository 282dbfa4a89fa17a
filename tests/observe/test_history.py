"""History lines are those of `wsp.md` §7, whole, in order and cheap."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
from structlog.testing import capture_logs

from hetpipe.errors import HistoryIncomplete
from hetpipe.observe.history import History, HistoryWriter, MemoryHistory, NullHistory
from tests.support.fake_clock import FakeClock

#: The fields of every event, copied from the design by hand.
FIELDS = {
    "forward": {"vw", "incarnation", "stage", "p", "clock", "local_through", "version", "frozen"},
    "backward": {"vw", "incarnation", "stage", "p", "clock", "local_through", "version", "frozen"},
    "step": {"vw", "incarnation", "stage", "p", "version", "frozen"},
    "staged": {"vw", "incarnation", "stage", "wave", "shard", "slices"},
    "commit": {"vw", "incarnation", "wave", "samples"},
    "apply": {"shard", "vw", "incarnation", "wave"},
    "publish": {"clock"},
    "pull": {"shard", "vw", "stage", "clock"},
    "evict": {"vw", "incarnation", "clock"},
    "join": {"vw", "incarnation", "clock", "num_stages"},
    "plan": {"vw", "incarnation", "clock", "version", "bounds"},
    "norms": {"clock", "vw", "layers", "squares"},
    "freeze": {"clock", "frozen", "layers"},
    "leave": {"vw", "incarnation", "clock"},
    "handover": {"vw", "incarnation", "clock", "whole"},
    "takeover": {"vw", "incarnation", "stage", "clock", "source", "whole"},
    "barrier": {"clock", "reason"},
    "used": {"vw", "wave", "epoch", "indices"},
}


def write_all(history: HistoryWriter) -> None:
    """Every event once, with distinct values."""
    history.forward(vw=1, incarnation=2, stage=3, p=4, clock=5, local_through=6, version=7)
    history.backward(vw=1, incarnation=2, stage=3, p=4, clock=5, local_through=6, version=7)
    history.step(vw=1, incarnation=2, stage=3, p=4)
    history.staged(vw=1, incarnation=2, stage=3, wave=4, shard=5, slices=(6, 7))
    history.commit(vw=1, incarnation=2, wave=3, samples=4)
    history.apply(shard=1, vw=2, incarnation=3, wave=4)
    history.publish(clock=1)
    history.pull(shard=1, vw=2, stage=3, clock=4)
    history.evict(vw=1, incarnation=2, clock=3)
    history.join(vw=1, incarnation=2, clock=3, num_stages=2)
    history.plan(vw=1, incarnation=2, clock=3, version=4, bounds=(0, 5))
    history.norms(clock=1, vw=2, layers=(3,), squares=(0.5,))
    history.freeze(clock=1, frozen=2, layers=3)
    history.leave(vw=1, incarnation=2, clock=5)
    history.handover(vw=1, incarnation=2, clock=5, whole=True)
    history.takeover(vw=1, incarnation=2, stage=3, clock=5, source=6, whole=False)
    history.barrier(clock=1, reason="epoch")
    history.used(vw=1, wave=2, epoch=3, indices=range(4, 7))


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def open_history(tmp_path: Path) -> Callable[..., History]:
    def open_it(clock: FakeClock | None = None, role: str = "stage") -> History:
        return History(
            tmp_path / "history" / "stage.jsonl", host="n0", pid=77, role=role, term=1, clock=clock or FakeClock()
        )

    return open_it


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "history" / "stage.jsonl"


def test_every_event_has_its_fields(open_history: Callable[..., History], path: Path) -> None:
    memory = MemoryHistory()
    write_all(memory)
    write_all(open_history(FakeClock(monotonic=12.5)))
    write_all(NullHistory())
    assert {e["event"]: set(e) - {"event"} for e in memory.events} == FIELDS
    for line, event in zip(read(path), memory.events, strict=True):
        assert line == {"t": 12.5, "host": "n0", "pid": 77, "role": "stage", "term": 1, **event}


def test_arguments_land_in_the_fields_of_their_name() -> None:
    memory = MemoryHistory()
    write_all(memory)
    assert memory.of("forward") == [
        {
            "event": "forward",
            "vw": 1,
            "incarnation": 2,
            "stage": 3,
            "p": 4,
            "clock": 5,
            "local_through": 6,
            "version": 7,
            "frozen": 0,
        }
    ]
    assert memory.of("staged") == [
        {"event": "staged", "vw": 1, "incarnation": 2, "stage": 3, "wave": 4, "shard": 5, "slices": [6, 7]}
    ]
    assert memory.of("used") == [{"event": "used", "vw": 1, "wave": 2, "epoch": 3, "indices": [4, 5, 6]}]


def test_the_term_can_change(open_history: Callable[..., History], path: Path) -> None:
    history = open_history()
    history.publish(clock=1)
    history.term = 2
    history.publish(clock=2)
    assert history.term == 2
    assert [line["term"] for line in read(path)] == [1, 2]


def test_each_event_is_one_write(open_history: Callable[..., History], monkeypatch: pytest.MonkeyPatch) -> None:
    history = open_history()
    writes: list[bytes] = []

    def write(_descriptor: int, data: bytes) -> int:
        writes.append(data)
        return len(data)

    monkeypatch.setattr(os, "write", write)
    write_all(history)
    monkeypatch.undo()
    assert len(writes) == len(FIELDS)
    assert all(data.endswith(b"\n") and data.count(b"\n") == 1 for data in writes)


class TestDiskThatFails:
    """It ends the history, never the process."""

    @staticmethod
    def break_disk(patch: pytest.MonkeyPatch, code: int, *, of: str = "write") -> None:
        def fail(*_: object, **__: object) -> NoReturn:
            raise OSError(code, os.strerror(code))

        patch.setattr(os, of, fail)

    def test_it_is_told_once_and_also_to_who_asks_late(
        self, open_history: Callable[..., History], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        history = open_history()
        heard: list[str] = []
        history.on_alarm(lambda alarm: heard.append(str(alarm)))
        with monkeypatch.context() as patch:
            self.break_disk(patch, errno.ENOSPC)
            history.publish(clock=1)
            history.publish(clock=2)
        assert len(heard) == 1
        assert "No space left on device" in heard[0]
        late: list[str] = []
        history.on_alarm(lambda alarm: late.append(str(alarm)))
        assert late == heard

    @pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
    def test_what_is_written_then_is_left_out_and_said_once(
        self, open_history: Callable[..., History], path: Path, monkeypatch: pytest.MonkeyPatch, code: int
    ) -> None:
        history = open_history()
        history.publish(clock=1)
        with capture_logs() as logs, monkeypatch.context() as broken:
            self.break_disk(broken, code)
            history.publish(clock=2)
            history.publish(clock=3)
        history.publish(clock=4)  # after a gap nothing follows, though the disk is well again

        assert [line["clock"] for line in read(path)] == [1]
        assert isinstance(history.alarm, HistoryIncomplete)
        assert [entry["event"] for entry in logs] == ["history_incomplete"]
        assert os.strerror(code) in logs[0]["sentence"]
        assert path.with_name(path.name + ".incomplete").exists()

    def test_a_short_write(self, open_history: Callable[..., History], monkeypatch: pytest.MonkeyPatch) -> None:
        history = open_history()
        assert history.alarm is None
        with monkeypatch.context() as broken:
            broken.setattr(os, "write", lambda _descriptor, _data: 3)
            history.publish(clock=1)
        assert "No space left on device" in str(history.alarm)

    def test_a_disk_that_was_full_before(
        self, open_history: Callable[..., History], path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with monkeypatch.context() as broken:
            self.break_disk(broken, errno.ENOSPC, of="open")
            history = open_history()
        history.publish(clock=1)

        assert (history.position(), list(history.since(0))) == (0, [])
        assert not path.exists()
        assert history.alarm is not None

    def test_a_file_that_cannot_be_had_is_a_mistake(
        self, open_history: Callable[..., History], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.break_disk(monkeypatch, errno.EACCES, of="open")
        with pytest.raises(PermissionError):
            open_history()


def test_text_is_escaped(open_history: Callable[..., History], path: Path) -> None:
    open_history(role='a"b').barrier(clock=1, reason='x"}\n{')
    (line,) = read(path)
    assert (line["role"], line["reason"]) == ('a"b', 'x"}\n{')


def test_threads_write_whole_lines_in_the_order_of_time(open_history: Callable[..., History], path: Path) -> None:
    clock = FakeClock(auto_advance=True)
    history = open_history(clock)

    def run(vw: int) -> None:
        for p in range(200):
            clock.advance(0.001)
            history.step(vw=vw, incarnation=0, stage=0, p=p)

    threads = [threading.Thread(target=run, args=(vw,)) for vw in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    entries = read(path)
    times = [entry["t"] for entry in entries]
    assert times == sorted(times)
    for vw in range(4):
        assert [entry["p"] for entry in entries if entry["vw"] == vw] == list(range(200))


def test_a_restarted_process_appends_after_a_torn_line(open_history: Callable[..., History], path: Path) -> None:
    first = open_history()
    first.publish(clock=1)
    first.close()
    with path.open("ab") as file:
        file.write(b'{"t":1.0,"ev')
    open_history().publish(clock=2)
    whole, torn, after = path.read_text().splitlines()
    assert json.loads(whole)["clock"] == 1
    assert torn == '{"t":1.0,"ev'
    assert json.loads(after)["clock"] == 2


def test_a_closed_history_refuses(open_history: Callable[..., History]) -> None:
    history = open_history()
    history.close()
    history.close()
    with pytest.raises(ValueError, match="is closed"):
        history.publish(clock=1)


def test_nothing_unfit_for_json_is_written(open_history: Callable[..., History], path: Path) -> None:
    history = open_history()
    with pytest.raises(ValueError, match="JSON"):
        history.write("odd", value=float("nan"))
    assert path.read_text() == ""


_KILLED = """
import os, pathlib, sys
from hetpipe.observe.history import History
history = History(pathlib.Path(sys.argv[1]), host="n0", pid=os.getpid(), role="shard", term=1)
history.publish(clock=1)
os.kill(os.getpid(), 9)
"""


def test_lines_survive_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "h.jsonl"
    killed = subprocess.run([sys.executable, "-c", _KILLED, path], check=False, timeout=30)
    assert killed.returncode == -9
    assert [line["clock"] for line in read(path)] == [1]
