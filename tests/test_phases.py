"""What a process says of itself before it is ready."""

from __future__ import annotations

import json
import os
import subprocess
import threading

import pytest

from hetpipe import phases
from hetpipe.phases import LAUNCH, PhaseReporter, begin_phases, end_phases, report_phase, write_line


@pytest.fixture
def pipe() -> tuple[int, int]:
    return os.pipe()


def test_a_phase_is_repeated_until_the_end(pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phases, "PERIOD_SECONDS", 0.01)
    reporter = PhaseReporter(pipe[1], "importing torch")
    with os.fdopen(pipe[0], "rb") as lines:
        first = [json.loads(lines.readline()) for _ in range(3)]
        assert [(line["kind"], line["phase"]) for line in first] == [("phase", "importing torch")] * 3
        reporter.report("meeting its neighbours")
        while json.loads(lines.readline())["phase"] != "meeting its neighbours":
            """What was said before."""
        reporter.end()
        reporter.report("nothing more")
        os.close(pipe[1])
        assert all(json.loads(line)["phase"] == "meeting its neighbours" for line in lines)


def test_no_line_goes_into_the_midst_of_another(pipe: tuple[int, int]) -> None:
    long = "x" * 300_000
    writers = [threading.Thread(target=write_line, args=(pipe[1], json.dumps([long]))) for _ in range(4)]
    for writer in writers:
        writer.start()
    with os.fdopen(pipe[0], "rb") as lines:
        assert all(json.loads(lines.readline()) == [long] for _ in writers)
    for writer in writers:
        writer.join()


def test_who_was_not_started_to_tell_says_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    report_phase("importing torch")
    end_phases()
    assert capfd.readouterr() == ("", "")


def test_a_program_tells_from_its_first_import_on() -> None:
    command = [*LAUNCH, "hetpipe", "serve", "coordinator", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60.0, check=False)
    first, *rest = done.stdout.splitlines()
    assert json.loads(first) == {"kind": "phase", "phase": "importing torch and hetpipe", "seconds": 0.0}
    assert (any(line.startswith("usage: ") for line in rest), done.returncode) == (True, 0), done.stderr


def test_nothing_else_is_run() -> None:
    done = subprocess.run([*LAUNCH, "this"], capture_output=True, text=True, timeout=60.0, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(
        "this is not a program of hetpipe; name one of these: hetpipe, hetpipe.server.agent.inspect_process, "
    )


def test_one_reporter_per_process(pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phases, "_reporter", None)
    begin_phases(pipe[1], "importing torch")
    report_phase("reading data")
    end_phases()
    os.close(pipe[1])
    with os.fdopen(pipe[0], "rb") as lines:
        assert [json.loads(line)["phase"] for line in lines] == ["importing torch", "reading data"]
