"""The fields of a command's dataclass are its options, each stated once; the name of a command leads to its file."""

from __future__ import annotations

import inspect
import json
import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, get_type_hints

import pytest
import typer
from typer.testing import CliRunner, Result

import hetpipe.cli
from hetpipe.cli.app import FAMILIES, Command, app
from hetpipe.cli.command import callback_of
from hetpipe.cli.options import Json
from hetpipe.errors import UserError
from hetpipe.runs.outcome import ExitStatus, Output
from hetpipe.runs.shell import Shell


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Do it. In this or that way."""

    where: Annotated[Path | None, typer.Argument(metavar="DIR", help="Where.")] = None
    must: Annotated[int, typer.Option(metavar="N", min=1, help="How often.")]
    also: Annotated[tuple[str, ...], typer.Option("--and", help="What else.")] = ()
    flag: Annotated[bool, typer.Option("--flag/--no-flag", help="Whether.")] = True
    as_json: Json = False


def run(options: Options, output: Output, _shell: Shell) -> ExitStatus:
    if options.must == 13:
        raise UserError("13 brings bad luck")
    output.answer({name: str(getattr(options, name)) for name in ("where", "must", "also", "flag")}, repr(options))
    return ExitStatus.FAILED if options.must == 2 else ExitStatus.OK


def invoke(*arguments: str) -> Result:
    single = typer.Typer(rich_markup_mode=None)
    single.command("do", help=inspect.getdoc(Options))(callback_of(sys.modules[__name__]))
    return CliRunner().invoke(single, arguments)


def test_the_instance_has_what_was_typed() -> None:
    typed = invoke("here", "--must", "4", "--and", "a", "--and", "b", "--no-flag")
    assert typed.stdout.strip() == repr(Options(where=Path("here"), must=4, also=("a", "b"), flag=False))


def test_the_defaults_are_those_of_the_fields() -> None:
    assert invoke("--must", "1").stdout.strip() == repr(Options(must=1))


def test_the_status_and_the_errors_are_those_of_the_function() -> None:
    assert invoke("--must", "2").exit_code == ExitStatus.FAILED
    refused = invoke("--must", "13", "--json")
    assert refused.exit_code == ExitStatus.USAGE
    assert json.loads(refused.stdout) == {"errors": ["13 brings bad luck"]}
    assert invoke("--must", "0").exit_code == invoke().exit_code == 2, "typer judges what it can"


def test_the_help_is_made_of_the_class() -> None:
    shown = " ".join(invoke("--help").output.split())
    for words in ("Do it. In this or that way.", "DIR", "Where.", "--must N", "[x>=1; required]", "--and", "--no-flag"):
        assert words in shown


# -- all commands ------------------------------------------------------------------------------------------------------


def modules() -> dict[str, tuple[Command, str]]:
    """Of every command with options of its own its row, and the module that its name leads to."""
    found: dict[str, tuple[Command, str]] = {}
    for family in FAMILIES:
        for row in family.commands:
            for words in [(row,), *((row, member) for member in row.members)]:
                if not words[-1].members and not words[-1].program:
                    path = [f"hetpipe.cli.{family.folder}", *(word.name.replace("-", "_") for word in words)]
                    found[" ".join(word.name for word in words)] = (words[-1], ".".join(path))
    return found


def module_of(command: str) -> ModuleType:
    return import_module(modules()[command][1])


@pytest.mark.parametrize("command", modules())
def test_a_command_is_a_frozen_dataclass_and_a_function_in_the_file_that_its_name_says(command: str) -> None:
    module = module_of(command)
    options: Any = module.Options
    assert vars(options)["__dataclass_params__"].frozen
    first, *_ = inspect.signature(module.run).parameters
    assert get_type_hints(module.run)[first] is options
    assert get_type_hints(module.run)["return"] is ExitStatus


@pytest.mark.parametrize("command", modules())
def test_the_list_says_of_a_command_what_the_command_says_first(command: str) -> None:
    row, _ = modules()[command]
    doc = inspect.getdoc(module_of(command).Options)
    assert doc is not None
    assert row.summary.endswith(".")
    assert f"{doc} ".startswith(f"{row.summary} ")


def test_every_file_with_options_is_a_command() -> None:
    folder = Path(hetpipe.cli.__file__).parent
    files = {path for path in folder.rglob("*.py") if "\nclass Options" in path.read_text(encoding="utf-8")}
    named = {folder.joinpath(*path.split(".")[2:]).with_suffix(".py") for _, path in modules().values()}
    assert files == named


def test_help_shows_the_families() -> None:
    shown = CliRunner().invoke(app, ["--help"]).output
    headings = [line[:-1] for line in shown.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert headings == ["Options", *(family.title for family in FAMILIES)]
