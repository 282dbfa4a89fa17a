"""Hosts of `hetpipe launch`, and commands for their shells."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from hetpipe.errors import UserError
from hetpipe.runs.remote import RemoteShell, hosts_of


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "names no host"),
        (" , ", "names no host"),
        ("a,a:2", "names a twice"),
        ("a:0", "has 'a:0'; write HOST, or HOST:N"),
        ("a:x", "has 'a:x'"),
        (":2", "has ':2'"),
        ("-oProxyCommand=x", "has '-oProxyCommand=x'"),
    ],
)
def test_hosts_that_are_none(text: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        hosts_of(text)


def test_arguments_arrive_as_they_are(tmp_path: Path) -> None:
    """A stand-in for ssh: it gives the words of the command to a shell, as sshd does."""
    folder = tmp_path / "my code; $(false)"
    folder.mkdir()
    ssh = tmp_path / "ssh"
    ssh.write_text('#!/bin/sh\nhost=$1; shift\necho "$host"\nexec sh -c "$*"\n')
    ssh.chmod(0o755)
    arguments = ["printf", "%s\\n", "two words", "$HOME", "'", "*"]
    command = RemoteShell((str(ssh),), "b", str(folder)).command([*arguments])
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["b", "two words", "$HOME", "'", "*"]
    command = RemoteShell((str(ssh),), "b", str(folder)).command(["pwd"])
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[1] == str(folder)
