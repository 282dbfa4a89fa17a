"""The check of the hosts of `hetpipe launch`, with stand-ins for ssh."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

import hetpipe
from hetpipe.errors import UserError
from hetpipe.runs.host_check import Answer, check_hosts, problem_of
from hetpipe.runs.remote import RemoteShell
from hetpipe.runs.run_folder import RunFolder
from tests.support.fake_clock import FakeClock

#: Host → what its ssh does.
SCRIPTS: Mapping[str, str] = {
    "well": 'exec sh -c "$1"',
    "refused": 'echo "ssh: connect to host refused port 22: Connection refused" >&2; exit 255',
    "old": "echo hetpipe 0.0.1 True",
    "chatty": "echo Welcome; echo to this machine",
    "slow": "exec sleep 60",
}


def shells(folder: Path, *hosts: str) -> list[RemoteShell]:
    ssh = folder / "ssh"
    cases = "\n".join(f"{host}) {script};;" for host, script in SCRIPTS.items())
    ssh.write_text(f'#!/bin/sh\nhost=$1; shift\ncase "$host" in\n{cases}\nesac\n')
    ssh.chmod(0o755)
    return [RemoteShell((str(ssh),), host, str(folder)) for host in hosts]


def test_a_host_like_this_one_passes(tmp_path: Path) -> None:
    check_hosts(shells(tmp_path, "well"), sys.executable, tmp_path)


def test_every_host_with_a_problem_is_named_with_the_fix(tmp_path: Path) -> None:
    hosts = shells(tmp_path, "well", "refused", "old", "chatty")
    with pytest.raises(UserError) as raised:
        check_hosts(hosts, sys.executable, tmp_path)
    said = str(raised.value)
    assert "host refused cannot be reached: ssh: connect to host refused port 22: Connection refused; try: " in said
    assert (
        f"host old has hetpipe 0.0.1, this machine {hetpipe.__version__}: install {hetpipe.__version__} there" in said
    )
    assert "host chatty has answered 'to this machine' instead of its version" in said
    assert "host well" not in said


def test_what_a_host_can_lack(tmp_path: Path) -> None:
    (shell,) = shells(tmp_path, "well")
    bare = tmp_path / "python"
    bare.write_text("#!/bin/sh\necho \"ModuleNotFoundError: No module named 'hetpipe'\" >&2; exit 1\n")
    bare.chmod(0o755)
    elsewhere = RemoteShell(shell.program, "well", str(tmp_path / "missing"))
    for one, python, folder, words in (
        (
            shell,
            str(bare),
            tmp_path,
            f"host well has no hetpipe for {bare}: install hetpipe {hetpipe.__version__} there",
        ),
        (shell, "/missing/python", tmp_path, "host well has no /missing/python: install hetpipe"),
        (shell, sys.executable, tmp_path / "run", f"host well does not see the run's folder {tmp_path / 'run'}"),
        (elsewhere, sys.executable, tmp_path, f"host well has no folder {tmp_path / 'missing'}: call the command in"),
    ):
        with pytest.raises(UserError) as raised:
            check_hosts([one], python, folder)
        assert str(raised.value).startswith(words)


def test_a_program_that_is_none_and_a_host_that_is_silent(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="host b cannot be reached: missing-ssh: No such file or directory"):
        check_hosts([RemoteShell(("missing-ssh",), "b", "/")], "python3", tmp_path)
    with pytest.raises(UserError, match="host slow has not answered in time; try: "):
        check_hosts(shells(tmp_path, "slow"), "python3", tmp_path, patience_seconds=0.2)


def test_another_end_has_its_last_words() -> None:
    answer = Answer(-9, errors="one\ntwo\n")
    assert (
        problem_of(RemoteShell(("ssh",), "b", "/"), "py", Path("/run"), answer)
        == "py on host b was killed by SIGKILL: two"
    )


def test_the_folder_of_a_run_that_was_not_begun_is_removed(tmp_path: Path) -> None:
    folder = RunFolder.create(None, name="a", clock=FakeClock(), runs_dir=tmp_path)
    folder.discard()
    assert list(tmp_path.iterdir()) == []
    folder = RunFolder.create(None, name="a", clock=FakeClock(), runs_dir=tmp_path)
    (folder.path / "mine").touch()
    folder.discard()
    assert (folder.path / "mine").exists()
