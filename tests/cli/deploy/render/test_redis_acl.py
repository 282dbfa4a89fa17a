"""`hetpipe render redis-acl`: an ACL file that Redis can be given as it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from hetpipe.cli.app import app
from hetpipe.storage.redis_acl import acl_lines


def rendered(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["render", "redis-acl", *arguments])


@pytest.fixture
def password_file(tmp_path: Path) -> str:
    path = tmp_path / "password"
    path.write_text("secret\n")
    return str(path)


def test_the_lines_are_all_there_is(password_file: str) -> None:
    result = rendered("--password-file", password_file)
    assert result.exit_code == 0, result.output
    assert result.stdout == "\n".join([*acl_lines("hetpipe", "secret"), ""])


def test_json(password_file: str) -> None:
    result = rendered("--user", "other", "--password-file", password_file, "--json")
    assert json.loads(result.stdout) == {"user": "other", "lines": list(acl_lines("other", "secret"))}


def test_mistakes_name_their_options(tmp_path: Path, password_file: str) -> None:
    result = rendered("--password-file", str(tmp_path / "missing"))
    assert result.exit_code == 2
    assert f"--password-file {tmp_path / 'missing'}: cannot be read" in result.stderr
    result = rendered("--user", "default", "--password-file", password_file)
    assert (result.exit_code, "--user 'default'" in result.stderr) == (2, True)
