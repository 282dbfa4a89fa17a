"""Examples in docstrings hold. Only modules that have some are searched: searching all of them takes seconds."""

from __future__ import annotations

import doctest
import importlib
import re
from pathlib import Path

import pytest

from tests.docs.pages import ROOT

EXAMPLE = re.compile(r"^ *>>> ", re.MULTILINE)


def modules() -> list[str]:
    """Modules in which an example stands."""
    files = (file for folder in ("hetpipe", "tests", "benchmarks") for file in sorted((ROOT / folder).rglob("*.py")))
    return [name_of(file) for file in files if EXAMPLE.search(file.read_text(encoding="utf-8"))]


def name_of(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = modules()


@pytest.mark.parametrize("name", MODULES)
def test_examples_hold(name: str) -> None:
    tried = doctest.testmod(importlib.import_module(name))
    assert (tried.failed, tried.attempted > 0) == (0, True)


def test_modules_with_examples_are_found() -> None:
    assert {"hetpipe.job.survive", "hetpipe.decide.sync.gate", "tests.reference.policies"} <= set(MODULES)
