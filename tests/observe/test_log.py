"""Logs are JSON lines that nobody can forge."""

from __future__ import annotations

import errno
import json
import logging
import os
import threading
from pathlib import Path
from typing import Any, NoReturn

import pytest

from hetpipe.observe.log import MAX_TEXT_LENGTH, bind_context, configure_logging, get_logger
from tests.support.fake_clock import FakeClock


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "logs" / "stage-0.log"


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_says_who_when_and_what(path: Path) -> None:
    configure_logging(path, role="stage", clock=FakeClock(wall=1_700_000_000.25), vw=0, stage=1)
    get_logger("hetpipe.pipeline").info("stage_started", layers=[0, 4])
    (line,) = lines(path)
    assert line == {
        "t": "2023-11-14T22:13:20.250000Z",
        "level": "info",
        "event": "stage_started",
        "logger": "hetpipe.pipeline",
        "role": "stage",
        "pid": os.getpid(),
        "vw": 0,
        "stage": 1,
        "layers": [0, 4],
    }


def test_a_full_disk_takes_nobody_down(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    configure_logging(path, role="stage")

    def fail(*_: object) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(os, "write", fail)
        get_logger("x").error("durability_lost")
    get_logger("x").info("durable_again")

    assert "durability_lost" in capsys.readouterr().err
    assert [line["event"] for line in lines(path)] == ["durable_again"]


def test_levels_below_are_left_out(path: Path) -> None:
    configure_logging(path, role="agent", level="warning")
    log = get_logger("x")
    log.debug("a")
    log.info("b")
    log.warning("c")
    log.error("d")
    assert [(line["event"], line["level"]) for line in lines(path)] == [("c", "warning"), ("d", "error")]


def test_an_unknown_level_is_refused(path: Path) -> None:
    with pytest.raises(ValueError, match="loud"):
        configure_logging(path, role="agent", level="loud")


def test_exceptions_are_rendered(path: Path) -> None:
    configure_logging(path, role="stage")
    try:
        raise RuntimeError("the pipe broke")  # noqa: TRY301
    except RuntimeError:
        get_logger("x").exception("stage_failed")
    (line,) = lines(path)
    assert line["level"] == "error"
    assert line["exception"].startswith("Traceback")
    assert line["exception"].endswith("RuntimeError: the pipe broke")


def test_text_cannot_forge_a_line_or_move_the_cursor(path: Path) -> None:
    configure_logging(path, role="stage")
    get_logger("x").info("got", text='a"}\n{"event":"forged"}\r\x1b[2J\u202e\x9b')
    raw = path.read_bytes()
    assert raw.count(b"\n") == 1
    assert all(byte == 0x0A or 0x20 <= byte < 0x7F for byte in raw)
    assert lines(path)[0]["event"] == "got"


def test_long_text_is_cut_in_the_middle(path: Path) -> None:
    configure_logging(path, role="stage")
    get_logger("x").info("got", text="a" * 50_000 + "the end", deep=[{"k": "b" * 50_000}], many=list(range(10_000)))
    (line,) = lines(path)
    for text in (line["text"], line["deep"][0]["k"], line["many"]):
        assert len(text) < MAX_TEXT_LENGTH + 100
        assert "characters omitted" in text
    assert line["text"].endswith("the end")


def test_any_value_can_be_logged(path: Path) -> None:
    configure_logging(path, role="stage")
    loop: list[object] = []
    loop.append(loop)
    get_logger("x").info("got", path=Path("a/b"), none=None, loop=loop, error=ValueError("v"))
    (line,) = lines(path)
    assert (line["path"], line["none"], line["error"]) == ("a/b", None, "v")


def test_the_standard_library_comes_along_from_warning_on(path: Path) -> None:
    configure_logging(path, role="stage", vw=1)
    other = logging.getLogger("grpc._channel")
    other.info("too quiet")
    other.warning("channel %s is down", 7)
    try:
        raise KeyError("k")  # noqa: TRY301
    except KeyError:
        other.exception("failed")
    first, second = lines(path)
    assert (first["event"], first["logger"], first["level"], first["vw"]) == (
        "channel 7 is down",
        "grpc._channel",
        "warning",
        1,
    )
    assert "KeyError" in second["exception"]


def test_a_second_call_replaces_the_first(path: Path, tmp_path: Path) -> None:
    log = get_logger("early")
    configure_logging(path, role="a")
    log.info("one")
    configure_logging(tmp_path / "other.log", role="b")
    log.info("two")
    logging.getLogger("lib").error("three")
    assert [line["event"] for line in lines(path)] == ["one"]
    assert [line["event"] for line in lines(tmp_path / "other.log")] == ["two", "three"]


def test_bound_loggers_keep_their_values(path: Path) -> None:
    configure_logging(path, role="stage")
    get_logger("x").bind(wave=3).info("pushed", num_bytes=10)
    (line,) = lines(path)
    assert (line["wave"], line["num_bytes"]) == (3, 10)


def test_without_a_file_lines_go_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(None, role="agent")
    get_logger("x").info("hello")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert json.loads(captured.err)["event"] == "hello"


def test_what_a_thread_has_bound_stands_in_its_lines(path: Path) -> None:
    configure_logging(path, role="parameter_server", vw=0)
    bind_context(job="digits-1", wave=3)
    bind_context(wave=4)
    get_logger("x").info("a")
    logging.getLogger("grpc").warning("b")
    other = threading.Thread(target=get_logger("x").info, args=("c",))
    other.start()
    other.join()
    a, b, c = lines(path)
    assert (a["vw"], a["job"], a["wave"]) == (0, "digits-1", 4)
    assert (b["job"], b["wave"]) == ("digits-1", 4)
    assert {"job", "wave"} & c.keys() == set()
