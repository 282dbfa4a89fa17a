"""The command that a line names, as the program finds it, for tests that take lines of others apart."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import typer

from hetpipe.cli.app import app


@cache
def _program() -> Any:
    """To make it takes longer than to parse with it."""
    return typer.main.get_command(app)


def resolve(words: Sequence[str]) -> tuple[str, Any, list[str]]:
    """The name of the command, the command, and what stands behind it."""
    command = _program()
    name, rest = "hetpipe", list(words)
    while hasattr(command, "commands"):
        name, command, rest = command.resolve_command(typer.Context(command), rest)
    return name, command, rest
