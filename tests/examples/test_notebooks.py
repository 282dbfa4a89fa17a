"""The notebooks of `examples/notebooks` are as they should be read; `make notebooks` runs them."""

from __future__ import annotations

import ast
import inspect
import json
from pathlib import Path

import pytest

import hetpipe
from tests.examples.notebooks import NOTEBOOKS, Cell, cells

CELLS = [cell for notebook in NOTEBOOKS for cell in cells(notebook)]


def test_there_are_some() -> None:
    assert {notebook.stem for notebook in NOTEBOOKS} == {"train", "plan", "compare"}


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda notebook: notebook.stem)
def test_nothing_that_a_run_leaves_is_kept(notebook: Path) -> None:
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_calls_fit_the_signatures(cell: Cell) -> None:
    for node in ast.walk(ast.parse(cell.text)):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="hetpipe"), attr=name)):
                assert name in hetpipe.__all__
                words = {word.arg: None for word in node.keywords if word.arg}
                inspect.signature(getattr(hetpipe, name)).bind(*[None] * len(node.args), **words)
