"""What containers have written."""

from __future__ import annotations

from pathlib import Path

from hetpipe.deploy.container_logs import follow_lines, read_lines, save_logs
from tests.deploy.fake_docker import FakeContainer, FakeDocker


def two() -> list[FakeContainer]:
    docker = FakeDocker()
    made = [
        docker.containers.create("x", [], name=name, labels={"org.hetpipe.name": name[2:]}) for name in ("p-a", "p-b")
    ]
    made[1].stderr = b"without an end"
    return made


def test_all_that_is_written() -> None:
    assert list(read_lines(two(), tail=None)) == [("a", "line 1"), ("a", "line 2"), ("b", "without an end")]


def test_lines_are_whole_although_they_come_in_pieces() -> None:
    assert sorted(follow_lines(two(), tail=3)) == [("a", "line 1"), ("a", "line 2"), ("b", "without an end")]


def test_logs_outlive_containers(tmp_path: Path) -> None:
    save_logs(two(), tmp_path)
    assert (tmp_path / "a.log").read_text() == "line 1\nline 2\n"
    save_logs(two(), tmp_path / "missing")
