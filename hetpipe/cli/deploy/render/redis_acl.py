"""`hetpipe render redis-acl`: the user that a coordinator needs in Redis."""

from __future__ import annotations

from pathlib import Path

from hetpipe.runs.outcome import ExitStatus, Output
from hetpipe.storage.redis_access import read_password
from hetpipe.storage.redis_acl import acl_lines


def run(user: str, password_file: Path, output: Output) -> ExitStatus:
    """Print an ACL file.

    Raises:
        UserError: the name or the password file cannot be used.
    """
    lines = acl_lines(user, read_password(password_file, "--password-file"))
    output.answer({"user": user, "lines": lines}, *lines)
    return ExitStatus.OK
