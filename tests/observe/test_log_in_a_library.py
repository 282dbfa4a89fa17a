"""What hetpipe says in a program that is the user's own: nothing, on neither stream."""

from __future__ import annotations

import subprocess
import sys

import pytest

_PROGRAM = """
import hetpipe, os
from hetpipe.observe.log import get_logger
get_logger("hetpipe.some.module").warning("member_replaced", member="mine", reason="100 % gone")
{more}
"""

_HEARING = """
import logging
heard = []
class Hearing(logging.Handler):
    def emit(self, record):
        heard.append((record.name, record.levelname))
logging.getLogger("hetpipe").addHandler(Hearing())
get_logger("hetpipe.some.module").warning("member_replaced")
assert heard == [("hetpipe.some.module", "WARNING")], heard
"""

_GRPC = """
import sys
class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "grpc":
            assert os.environ.get("GRPC_VERBOSITY") == "ERROR", "grpc is imported before it is told to be quiet"
            print("seen")
sys.meta_path.insert(0, Watch())
hetpipe.{name}
"""


def _run(more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", _PROGRAM.format(more=more)], capture_output=True, text=True, timeout=60, check=False
    )


def test_nothing_is_written_to_the_streams_of_a_program_that_configured_no_log() -> None:
    done = _run(_HEARING)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("name", ["Client", pytest.param("train", marks=pytest.mark.exhaustive)])
def test_grpc_is_told_to_be_quiet_before_it_is_imported(name: str) -> None:
    done = _run(_GRPC.format(name=name))
    assert (done.returncode, done.stdout, done.stderr) == (0, "seen\n", ""), done.stderr
