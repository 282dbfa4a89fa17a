"""Whatever the package tells somebody to type is a command that there is, with options that it has."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import hetpipe
from hetpipe.cli.app import FAMILIES
from tests.cli.resolving import resolve

PACKAGE = Path(hetpipe.__file__).parent

#: In backticks, or at the end of a sentence that leads to it; not where hetpipe itself does something.
_HINT = re.compile(r"`hetpipe ([a-z][^`]*)`|: hetpipe (?!always |needs |sets )([a-z][^\n]+)$")

_COMMANDS = {command.name: command for family in FAMILIES for command in family.commands}


def _texts(path: Path) -> Iterator[str]:
    """All strings of a module, docstrings among them; `…` stands for what is filled in."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else " … " for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def hints() -> list[str]:
    """What is told to be typed, behind the name of the program."""
    found = {
        " ".join((match[1] or match[2]).split())
        for path in PACKAGE.rglob("*.py")
        for text in _texts(path)
        for match in _HINT.finditer(text)
    }
    return sorted(found)


def check(hint: str) -> None:
    """Fail unless there is such a command, with such options."""
    name, *rest = re.split(r"[ ,]+", hint)
    assert name in _COMMANDS, hint
    members = {member.name for member in _COMMANDS[name].members}
    if members and (not rest or rest[0] == "…"):
        return
    assert not members or rest[0] in members, hint
    _, command, _ = resolve([name, *rest])
    known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    assert {word for word in rest if re.match("--[a-z]", word)} <= known, hint


def test_every_hint_names_a_command_and_its_options() -> None:
    # One test and not one per hint: each worker would parse the package to collect them.
    found = hints()
    assert len(found) > 60
    for hint in found:
        check(hint)


@pytest.mark.parametrize("wrong", ["restart", "certs renew DIR", "status --verbose", "submit --run-folder …"])
def test_a_wrong_hint_is_noticed(wrong: str) -> None:
    with pytest.raises(AssertionError):
        check(wrong)
