"""Folders of processes that were killed are removed by the next one; those of the living stay."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from hetpipe.server.agent.private_folder import PrivateFolder


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def killed(prefix: str) -> Path:
    """The folder of a process that was killed: the kernel has closed its files, and nobody has removed it."""
    folder = PrivateFolder(prefix)
    (folder.path / "stage").mkdir()
    (folder.path / "stage" / "key.pem").write_text("secret")
    os.close(folder._descriptor)
    return folder.path


def test_the_next_one_removes_what_a_killed_one_left(temporary: Path) -> None:
    left, other = killed("stages-"), killed("others-")
    living = PrivateFolder("stages-")
    assert set(temporary.iterdir()) == {living.path, other}
    assert not left.exists()
    assert stat.S_IMODE(living.path.stat().st_mode) == 0o700
    living.close()
    assert list(temporary.iterdir()) == [other]


def test_those_of_the_living_and_of_nobody_known_stay(temporary: Path) -> None:
    first = PrivateFolder("stages-")
    begun = temporary / "stages-begun"
    begun.mkdir()
    (temporary / "stages-link").symlink_to(killed("others-"))
    second = PrivateFolder("stages-")
    assert first.path.exists()
    assert begun.exists(), "its process may be about to lock it"
    assert len(list(temporary.glob("others-*/lock"))) == 1, "what a link leads to is not touched"
    for folder in (first, second):
        folder.close()
