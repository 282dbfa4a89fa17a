"""No name of a weight policy or of a kind of synchronisation is compared: what is asked is an attribute of its row.

So a new policy is a row, and not a search for `if weights == …` in thirty files. The history checker and the reference
executor judge what runs, and know the policies by themselves, on purpose.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from hetpipe.values.policies import POLICIES, WEIGHT_POLICIES, WeightPolicy
from hetpipe.values.sync import SYNC_KINDS, SyncKind

_ROOT = Path(__file__).parents[1] / "hetpipe"

#: `none` is also a word for other things, where it is looked for beside an attribute `kind` only.
_NAMES = {*WEIGHT_POLICIES, *SYNC_KINDS} - {"none"}


def _texts(node: ast.expr | ast.pattern) -> Iterator[str]:
    for part in ast.walk(node):
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            yield part.value


def _compared(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            of_kind = any(isinstance(side, ast.Attribute) and side.attr == "kind" for side in sides)
            for text in (text for side in sides for text in _texts(side)):
                if text in _NAMES or (of_kind and text == "none"):
                    yield node.lineno, text
        elif isinstance(node, ast.match_case):
            for text in _texts(node.pattern):
                if text in _NAMES:
                    yield node.pattern.lineno, text
        elif isinstance(node, ast.Tuple | ast.Set | ast.List | ast.Dict):
            entries = [*node.keys, *node.values] if isinstance(node, ast.Dict) else node.elts
            named = [entry.value for entry in entries if isinstance(entry, ast.Constant) and entry.value in _NAMES]
            if len(named) > 1:
                yield node.lineno, ", ".join(map(str, named))


#: A source without any of the names as a text of its own compares none; reading its tree would only take time.
_SUSPECT = re.compile(f"""["']({"|".join(sorted({*_NAMES, "none"}))})["']""")


def _outside_of_tables(path: Path) -> Iterator[str]:
    source = path.read_text(encoding="utf-8")
    if _SUSPECT.search(source) is None:
        return
    tree = ast.parse(source)
    tables = {"policies.py": ("WeightPolicy",), "sync.py": ("SyncKind",)}.get(path.name, ())
    literals = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and {t.id for t in node.targets if isinstance(t, ast.Name)} & set(tables)
        for inner in ast.walk(node)
    }
    for line, name in _compared(tree):
        if not any(getattr(node, "lineno", None) == line for node in literals):
            yield f"{path.relative_to(_ROOT)}:{line}: {name}"


def test_no_name_of_a_policy_or_of_a_kind_of_sync_is_compared() -> None:
    paths = [path for path in _ROOT.rglob("*.py") if path.relative_to(_ROOT).parts[0] not in ("checker", "proto")]
    assert len(paths) > 100
    assert [found for path in paths for found in _outside_of_tables(path)] == []


@pytest.mark.parametrize(
    "source",
    [
        'if weights == "flush": ...',
        'x = job.weights in ("wave", "vertical")',
        'match weights:\n    case "stash" | "predict": ...',
        'ONE_UPDATE = ("double_buffer", "flush")',
        'NAMES = {"flush": 1, "stash": 2}',
        'if sync.kind == "none": ...',
        'if kind in ("bsp", "asp"): ...',
    ],
)
def test_the_search_finds(source: str) -> None:
    assert _SUSPECT.search(source)
    assert list(_compared(ast.parse(source)))


@pytest.mark.parametrize(
    "source", ['weights: str = "wave"', 'if progress == "none": ...', 'if self.kind == "grpc": ...']
)
def test_the_search_does_not_find(source: str) -> None:
    assert not list(_compared(ast.parse(source)))


def test_every_name_has_its_row() -> None:
    assert tuple(POLICIES) == get_args(WeightPolicy)
    assert tuple(SYNC_KINDS) == get_args(SyncKind)
