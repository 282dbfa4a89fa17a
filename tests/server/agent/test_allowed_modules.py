"""The agent's list of modules reaches the processes that import, before they do."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hetpipe.errors import UserError
from hetpipe.server.agent.children import Programs
from hetpipe.server.agent.main import _programs
from tests.server.agent.test_children import Bench

_IMPORTER = """
from hetpipe.server.agent.child_main import answer_once, run_child
from hetpipe.pipeline.allowed_modules import check_module
run_child(lambda pipe, line: answer_once(pipe, lambda: check_module("user.model", "model")))
"""


@pytest.mark.processes
def test_a_child_is_given_the_list(tmp_path: Path) -> None:
    program = (sys.executable, "-c", _IMPORTER)
    bench = Bench(tmp_path, Programs(stage=program, inspection=program).allowing(["-odd", "examples.*"]))

    result = bench.inspect("anything")

    bench.children.stop_all()
    assert (result.error, result.model) == ("CallableError", None)
    assert "`user.model` is not among those that this node's agent allows (-odd, examples.*)" in result.problems[0]


def test_both_kinds_of_children_that_import_are_given_it() -> None:
    programs = Programs().allowing(["a", "b.*"])
    for command in (programs.stage, programs.inspection):
        assert list(command[-2:]) == ["--allow-modules=a", "--allow-modules=b.*"]


def test_an_agent_that_others_reach_needs_a_list() -> None:
    assert _programs("127.0.0.1", None) == Programs()
    assert _programs("127.0.0.1", ["a"]) == Programs().allowing(["a"])
    assert _programs("192.0.2.1", ["*"]) == Programs().allowing(["*"])
    with pytest.raises(UserError, match=r"^--host 192\.0\.2\.1 is reachable from other machines.*--allow-modules '\*'"):
        _programs("192.0.2.1", None)
    with pytest.raises(UserError, match="--allow-modules is empty"):
        _programs("127.0.0.1", [""])
