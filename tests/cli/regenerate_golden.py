"""`python -m tests.cli.regenerate_golden` rewrites the help texts that `test_help` compares with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer
from typer.testing import CliRunner

from hetpipe.cli.app import app

GOLDEN = Path(__file__).with_name("golden")


def commands() -> list[str]:
    """The names of all commands, those of a group after it: `cluster`, `cluster show`."""
    group: Any = typer.main.get_command(app)
    names: list[str] = []
    for name, command in group.commands.items():
        names += [name, *(f"{name} {below}" for below in getattr(command, "commands", ()))]
    return names


def kept() -> list[str]:
    """Those whose help is kept: services have parsers of their own, which every Python lays out in its own way."""
    return [name for name in commands() if name != "health" and not name.startswith("serve ")]


def help_of(command: str | None) -> str:
    """What `hetpipe COMMAND --help` prints on a terminal of 100 columns; None: `hetpipe --help`."""
    arguments = ["--help"] if command is None else [*command.split(), "--help"]
    shown = CliRunner(env={"COLUMNS": "100"}).invoke(app, arguments, prog_name="hetpipe")
    return "\n".join(line.rstrip() for line in shown.output.splitlines()) + "\n"


def path_of(command: str | None) -> Path:
    """The golden file."""
    return GOLDEN / f"{(command or 'hetpipe').replace(' ', '-')}.txt"


def main() -> None:
    """Rewrite all files."""
    GOLDEN.mkdir(exist_ok=True)
    for command in (None, *kept()):
        path_of(command).write_text(help_of(command), encoding="utf-8")


if __name__ == "__main__":
    main()
