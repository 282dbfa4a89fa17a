"""Code that was sent along with jobs: fetched once per digest, unpacked privately, and only where it is accepted."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hetpipe.code_archive import pack
from hetpipe.errors import PermissionDenied, UserError
from hetpipe.server.agent.sent_code import SentCode
from hetpipe.values.commands import InspectCommand, InspectionResult
from hetpipe.values.events import CodeArchive
from tests.server.agent.programs import fake_programs
from tests.server.agent.test_children import Bench
from tests.server.coordinator.builders import JOB_ID


class Coordinator:
    """Has one archive."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        (folder / "model.py").write_text("a = 1\n")
        self.code = pack(folder)
        self.asked: list[str] = []

    def fetch(self, digest: str) -> CodeArchive:
        self.asked.append(digest)
        if digest == "f" * 64:
            raise PermissionDenied("no job that is led here was sent with it")
        return self.code


@pytest.fixture
def coordinator(tmp_path: Path) -> Coordinator:
    return Coordinator(tmp_path / "source")


@pytest.fixture
def sent(coordinator: Coordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SentCode]:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    sent = SentCode(coordinator.fetch)
    yield sent
    sent.close()
    assert not list(tmp_path.glob("hetpipe-code-*"))


def test_it_is_fetched_once_into_a_private_folder(sent: SentCode, coordinator: Coordinator) -> None:
    folder = sent.folder(coordinator.code.digest)
    assert (folder / "model.py").read_text() == "a = 1\n"
    assert stat.S_IMODE(folder.stat().st_mode) == stat.S_IMODE(folder.parent.stat().st_mode) == 0o700
    assert sent.folder(coordinator.code.digest) == folder
    assert coordinator.asked == [coordinator.code.digest]


def test_what_is_not_what_was_asked_for_is_asked_for_again(sent: SentCode, coordinator: Coordinator) -> None:
    for _ in range(2):
        with pytest.raises(UserError, match="has another digest than 0000"):
            sent.folder("0" * 64)
    assert len(coordinator.asked) == 2
    with pytest.raises(PermissionDenied):
        sent.folder("f" * 64)


def inspected(bench: Bench, import_path: str, code: str) -> InspectionResult:
    bench.children.inspect(InspectCommand(JOB_ID, "{}", import_path, str(bench.run_dir), code=code))
    result = bench.next()
    assert isinstance(result, InspectionResult)
    return result


def test_an_agent_that_accepts_none_needs_the_folder(coordinator: Coordinator, tmp_path: Path) -> None:
    result = inspected(Bench(tmp_path), "/nowhere/code", coordinator.code.digest)
    assert result.error == "UserError"
    (problem,) = result.problems
    assert problem == (
        "the folder of code /nowhere/code is not on this node, and the code that was sent along with the job is not "
        "accepted here; put it there, or start this agent with --accept-code"
    )
    assert not coordinator.asked


def test_what_an_agent_cannot_get_or_refuses_ends_the_inspection(sent: SentCode, tmp_path: Path) -> None:
    bench = Bench(tmp_path, replace(fake_programs(tmp_path), sent_code=sent))
    assert inspected(bench, "/nowhere/code", "f" * 64).error == "PermissionDenied"
    assert "has another digest" in inspected(bench, "/nowhere/code", "0" * 64).problems[0]
