"""`hetpipe render redis-acl`: the user that a coordinator needs in Redis."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from hetpipe.cli.options import Json
from hetpipe.runs.outcome import ExitStatus, Output
from hetpipe.runs.shell import Shell
from hetpipe.storage.redis_access import read_password
from hetpipe.storage.redis_acl import acl_lines


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Write an ACL file for Redis with the coordinator's user only, with the least privileges. Without the password."""

    user: Annotated[str, typer.Option(metavar="NAME", help="The coordinator's name in Redis.")] = "hetpipe"
    password_file: Annotated[Path, typer.Option(metavar="FILE", help="Its password is the text in FILE.")]
    as_json: Json = False


def run(options: Options, output: Output, _shell: Shell) -> ExitStatus:
    """Print an ACL file.

    Raises:
        UserError: the name or the password file cannot be used.
    """
    lines = acl_lines(options.user, read_password(options.password_file, "--password-file"))
    output.answer({"user": options.user, "lines": lines}, *lines)
    return ExitStatus.OK
