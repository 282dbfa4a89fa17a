"""The generated stubs are what the proto files say, and every part of those is explained."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROTOS = sorted((ROOT / "proto/hetpipe/proto/v2").glob("*.proto"))


def test_the_stubs_are_fresh() -> None:
    check = subprocess.run(
        ["scripts/protos", "--check"],
        cwd=ROOT,
        env={"PYTHON": sys.executable, "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert check.returncode == 0, check.stdout + check.stderr


@pytest.mark.parametrize("path", PROTOS, ids=lambda path: path.name)
def test_every_field_call_and_value_has_a_comment(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    declares = re.compile(
        r"\s+(rpc |(repeated |optional |map<.*> )?[\w.<>, ]+ \w+ = \d+|[A-Z_]+ = \d+|oneof )|(message|enum|service) "
    )

    bare = [
        f"{path.name}:{number + 1}: {line.strip()}"
        for number, line in enumerate(lines)
        if declares.match(line) and not lines[number - 1].lstrip().startswith("//")
    ]

    assert bare == []
