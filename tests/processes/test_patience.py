"""A child that is alive and says what it is doing is waited for, however long that takes; a silent one is given up."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from tests.polling import wait_until
from tests.processes.harness import Train, write_job

pytestmark = [pytest.mark.processes, pytest.mark.exhaustive, pytest.mark.timeout(300)]

#: Less than the child takes; and still more than a busy machine lets a thread wait.
PATIENCE_SECONDS = 5


def inspections(folder: Path) -> list[int]:
    """The processes that import the held model for runs in a folder, by their command lines and their parents'."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            pid = int(path.parent.name)
            if b"hetpipe.server.agent.inspect_process" in path.read_bytes() and str(folder) in ancestors(pid):
                found.append(pid)
        except OSError:
            continue
    return found


def test_a_slow_child_is_waited_for_and_a_silent_one_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = tmp_path / "held-until"
    monkeypatch.setenv("HELD_UNTIL", str(held))
    patience = {"inspection": f"{PATIENCE_SECONDS}s"}
    job = write_job(tmp_path, model="tests.processes.held_model:mlp32", workers={"count": 1}, patience=patience)

    (tmp_path / "other").mkdir()
    slow, silent = Train(tmp_path, job), Train(tmp_path / "other", job)
    wait_until(lambda: len(inspections(tmp_path)) == 2, timeout_seconds=60.0, what="two inspections")
    told = re.compile(r"importing the user's code and building model and data \((\d+) s\)")

    def waited() -> list[int]:
        return [int(seconds) for seconds in told.findall(slow.stderr())]

    wait_until(lambda: bool(waited()) and waited()[-1] > 2 * PATIENCE_SECONDS, timeout_seconds=60.0, what="a long wait")
    assert slow.process.poll() is None, slow.stderr()
    (mute,) = [pid for pid in inspections(tmp_path) if str(silent.run_dir) in ancestors(pid)]
    os.kill(mute, signal.SIGSTOP)
    given_up = silent.finish()
    assert given_up.returncode == 1, "2 is for bad input"
    assert re.search(r"the inspection of the model has reported nothing for \d+ s", given_up.stderr)

    held.touch()
    outcome = slow.finish()
    assert outcome.returncode == 0, outcome.stderr
    assert outcome.result["samples"] == 2 * 46


def ancestors(pid: int) -> str:
    """The command lines of a process and of those it descends from."""
    lines = []
    while pid > 1:
        lines.append(Path(f"/proc/{pid}/cmdline").read_text())
        pid = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    return " ".join(lines)
