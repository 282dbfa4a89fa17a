"""What the documentation tells people to type: commands parse, job files load, Python names what exists."""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

import hetpipe
from hetpipe.errors import JobError
from hetpipe.job.file import load_job, parse_set
from hetpipe.report.progress import headings
from hetpipe.runs.result import TrainResult
from hetpipe.server import SERVICES
from hetpipe.values.events import ProgressTable
from hetpipe.values.ids import Clock
from hetpipe.values.run import ClockSnapshot
from tests.cli.resolving import resolve
from tests.docs.job_keys import SMALLEST
from tests.docs.pages import ROOT, Block, blocks

#: Names that Python snippets use → what they are.
KINDS: Mapping[str, type] = {"client": hetpipe.Client, "result": TrainResult, "clocks": ClockSnapshot}


def commands() -> list[tuple[str, tuple[str, ...]]]:
    """Every command line of the documentation, with where it stands; those of unnamed blocks only where it is ours."""
    found = []
    for block in (*blocks("sh"), *blocks("")):
        for offset, line in enumerate(block.text.splitlines()):
            words = tuple(shlex.split(line, comments=True))
            if words and (block.language or words[0] == "hetpipe"):
                where = f"{block.page.relative_to(ROOT)}:{block.line + offset}"
                found.append((where, words))
    return found


COMMANDS = commands()


@pytest.mark.parametrize("words", [words for _, words in COMMANDS], ids=[where for where, _ in COMMANDS])
def test_commands_parse(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    match words:
        case ("hetpipe", "serve", service, *arguments):
            _parse_service(service, arguments, monkeypatch)
        case ("hetpipe", name, *arguments):
            # What a shell does with the output is not the program's affair.
            _parse_hetpipe(name, arguments[: arguments.index(">")] if ">" in arguments else arguments)
        case ("make", *targets):
            defined = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
            assert set(targets) <= set(defined)
        case ("python", "-m", module):
            assert (ROOT / module.replace(".", "/")).with_suffix(".py").is_file()
        case ("source", ".venv/bin/activate") | ("cd", _) | ("git", "clone", _):
            """Words of the shell and of git."""
        case ("pip", "install", name):
            assert name == "hetpipe"
        case (script, *_) if script.startswith("scripts/"):
            assert (ROOT / script).is_file()
        case _:
            pytest.fail(f"nobody checks the command {words}")


def _parse_hetpipe(name: str, arguments: Sequence[str]) -> None:
    """Take options and arguments apart with the real program, which then does nothing; and check what `--set` says."""
    name, command, rest = resolve([name, *arguments])
    with command.make_context(name, rest) as context:
        given = context.params
    settings = given.get("settings") or []
    job = given.get("job")
    if isinstance(job, Path) and (ROOT / job).is_file():
        load_job(ROOT / job, settings)
    for setting in settings:
        parse_set(setting)


def test_a_wrong_option_is_noticed() -> None:
    with pytest.raises(Exception, match="No such option"):
        _parse_hetpipe("train", ["job.yaml", "--resumed", "runs/latest"])
    with pytest.raises(JobError):
        _parse_hetpipe("train", ["examples/digits/job.yaml", "--set", "sync.E=4"])


def _parse_service(name: str, arguments: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module(SERVICES[name])
    parsed: list[argparse.Namespace] = []

    def run_nothing(role: str, options: argparse.Namespace, serve: Callable[..., None]) -> int:
        parsed.append(options)
        return 0

    monkeypatch.setattr(module, "run_service", run_nothing)
    assert module.main(list(arguments)) == 0
    assert parsed


@pytest.mark.parametrize("block", blocks("yaml"), ids=str)
def test_job_files_load(block: Block) -> None:
    """Parts of a job file are laid over the smallest job."""
    values = yaml.safe_load(block.text)
    load_job(values if "model" in values else SMALLEST, () if "model" in values else values)


def test_the_job_file_of_the_readme_is_the_demo() -> None:
    block = next(block for block in blocks("yaml") if block.page.name == "README.md")
    assert load_job(yaml.safe_load(block.text)) == load_job(ROOT / "examples" / "digits" / "job.yaml")


@pytest.mark.parametrize("block", blocks("python"), ids=str)
def test_python_compiles_and_names_what_exists(block: Block) -> None:
    tree = ast.parse(block.text, filename=str(block))
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id=name), attr=attribute):
                _check_attribute(name, attribute)
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=attribute)):
                _check_call(name, attribute, node)


def _check_attribute(name: str, attribute: str) -> None:
    if name == "hetpipe":
        assert attribute in hetpipe.__all__
    elif name in KINDS:
        fields = getattr(KINDS[name], "__dataclass_fields__", {})
        assert attribute in fields or hasattr(KINDS[name], attribute)


def _check_call(name: str, attribute: str, call: ast.Call) -> None:
    """Whether the call fits the signature; methods lack their `self`."""
    owner: Any = hetpipe if name == "hetpipe" else KINDS.get(name)
    if owner is None:
        return
    own = [None] * (len(call.args) + (owner is not hetpipe))
    inspect.signature(getattr(owner, attribute)).bind(*own, **{word.arg: None for word in call.keywords if word.arg})


def test_the_table_of_the_readme_has_the_columns_of_the_screen() -> None:
    table = ProgressTable(
        rows=(),
        running_seconds=0.0,
        epoch=0,
        samples=0,
        total_samples=0,
        samples_per_second=0.0,
        eta_seconds=None,
        staleness=1,
        global_clock=Clock(0),
    )
    screens = [block.text for block in blocks("text") if block.page.name == "README.md"]
    assert any("  ".join(headings(table)).split() == line.split() for text in screens for line in text.splitlines())
