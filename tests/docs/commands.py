"""The page docs/commands.md, made from the commands themselves: `python -m tests.docs.commands` rewrites it.

Options come from typer, and for services and `hetpipe health` from their own parsers, so that they are said once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from importlib import import_module
from unittest.mock import patch

import typer

from hetpipe.cli.app import FAMILIES, Command
from tests.cli.resolving import resolve
from tests.docs.pages import ROOT

PAGE = ROOT / "docs" / "commands.md"

_HEAD = """\
# Commands

Every command with its arguments and options, as `hetpipe COMMAND --help` shows them; every command also has `--help`.
Commands with `--json` write what else they print to standard error. (`python -m tests.docs.commands` writes this page.)
"""


def page() -> str:
    """The text of the page."""
    parts = [_HEAD]
    for family in FAMILIES:
        parts.append(f"## {family.title}\n")
        for row in family.commands:
            parts += _sections(row, ())
    return "\n".join(parts)


def _sections(row: Command, above: tuple[str, ...]) -> Iterator[str]:
    words = (*above, row.name)
    if row.members:
        for member in row.members:
            yield from _sections(member, words)
        return
    yield f"### `hetpipe {' '.join(words)}`\n"
    help_text, rows = _of_parser(row.program) if row.program else _of_typer(words)
    yield f"{help_text}\n"
    if rows:
        yield "\n".join(["| option | meaning |", "|---|---|", *(_cells(*row) for row in rows), ""])


def _of_typer(words: Sequence[str]) -> tuple[str, list[tuple[str, str]]]:
    name, command, _ = resolve(words)
    context = typer.Context(command, info_name=name)
    records = [parameter.get_help_record(context) for parameter in command.params]
    return " ".join(command.help.split()), [record for record in records if record is not None]


def _of_parser(module: str) -> tuple[str, list[tuple[str, str]]]:
    parser = _parser(import_module(module).main)
    assert parser.description is not None
    formatter = parser.formatter_class(prog=parser.prog)
    shown = [action for action in parser._actions if not isinstance(action, argparse._HelpAction)]
    rows = [(formatter._format_action_invocation(action), formatter._expand_help(action)) for action in shown]
    return parser.description, rows


def _parser(main: Callable[[list[str]], int]) -> argparse.ArgumentParser:
    """The parser with which `main` reads its options."""
    found: list[argparse.ArgumentParser] = []
    with (
        patch.object(argparse.ArgumentParser, "print_help", lambda parser, _file=None: found.append(parser)),
        suppress(SystemExit),
    ):
        main(["--help"])
    (parser,) = found
    return parser


def _cells(option: str, meaning: str) -> str:
    """A row of a table; what stands between brackets is neither HTML nor a reference."""
    parts = " ".join(meaning.split()).split("`")
    parts[::2] = [part.replace("<", "&lt;").replace("[", "\\[") for part in parts[::2]]
    return "| " + " | ".join(text.replace("|", "\\|") for text in (f"`{option}`", "`".join(parts))) + " |"


def main() -> int:
    """Rewrite the page; the exit status."""
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
