"""How a child that has one answer gives it, and what becomes of what it raises."""

from __future__ import annotations

import json
import os
from collections.abc import Callable

import pytest

from hetpipe.errors import CallableError, JobError
from hetpipe.server.agent.child_main import ReportPipe, answer_once


class Derived(CallableError):
    """An error that is told apart inside of the process only."""


def raising(error: Exception) -> Callable[[], object]:
    def work() -> object:
        raise error

    return work


@pytest.mark.parametrize(
    ("work", "status", "answer"),
    [
        (lambda: [1, "two"], 0, {"ok": [1, "two"]}),
        (raising(JobError(["one", "two"])), 1, {"error": "JobError", "problems": ["one", "two"]}),
        (raising(CallableError("no `build`")), 1, {"error": "CallableError", "problems": ["no `build`"]}),
        (raising(Derived("no shape")), 1, {"error": "CallableError", "problems": ["no shape"]}),
        (raising(ValueError("odd")), 1, {"error": "ValueError", "problems": ["ValueError: odd"]}),
    ],
)
def test_one_line_and_the_status(
    work: Callable[[], object], status: int, answer: object, capsys: pytest.CaptureFixture[str]
) -> None:
    reading, writing = os.pipe()
    assert answer_once(ReportPipe(writing), work) == status
    os.close(writing)
    with os.fdopen(reading) as lines:
        assert [json.loads(line) for line in lines] == [answer]
    assert ("Traceback" in capsys.readouterr().err) == (
        answer == {"error": "ValueError", "problems": ["ValueError: odd"]}
    )
