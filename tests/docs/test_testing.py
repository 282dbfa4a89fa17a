"""docs/testing.md against the marks in the code: what only `make exhaustive` runs is listed, its guards are there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.docs.pages import ROOT, code_spans, table_after

PAGE = ROOT / "docs" / "testing.md"
MARK = "pytest.mark.exhaustive"


@cache
def left_out_in(file: Path) -> dict[str, bool]:
    """The tests of a file, and whether `make test` leaves all of their cases out."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    of_all = any(
        isinstance(statement, ast.Assign)
        and ast.unparse(statement.targets[0]) == "pytestmark"
        and MARK in ast.unparse(statement.value)
        for statement in tree.body
    )
    return {
        node.name: of_all or any(left_out(decorator) for decorator in node.decorator_list)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def left_out(decorator: ast.expr) -> bool:
    """Whether it marks the test itself, or each of the values that are written out."""
    if ast.unparse(decorator) == MARK:
        return True
    if not isinstance(decorator, ast.Call) or len(decorator.args) < 2 or not isinstance(decorator.args[1], ast.List):
        return False
    values = decorator.args[1].elts
    return bool(values) and all(isinstance(one, ast.Call) and f"marks={MARK}" in ast.unparse(one) for one in values)


@cache
def only_exhaustive() -> set[tuple[str, str]]:
    return {
        (str(file.relative_to(ROOT)), name)
        for file in (ROOT / "tests").rglob("test_*.py")
        if MARK in file.read_text(encoding="utf-8")  # the tree of a file without it need not be read
        for name, is_left_out in left_out_in(file).items()
        if is_left_out
    }


def named(span: str) -> Iterator[tuple[str, str]]:
    """The tests that `FILE` or `FILE::NAME` names."""
    path, _, name = span.partition("::")
    found = left_out_in(ROOT / path)
    assert not name or name in found, f"{path} has no {name}"
    yield from ((path, each) for each in found if name in ("", each))


ROWS = table_after(PAGE, "## What only `make exhaustive` runs")


def test_whatever_make_test_leaves_out_is_listed() -> None:
    listed = {test for row in ROWS for span in code_spans(row[0]) for test in named(span)}
    assert listed == only_exhaustive()


def test_make_test_runs_what_guards_it() -> None:
    left_out_too = only_exhaustive()
    for left_out_test, guarded_by, *_ in ROWS:
        guards = {span: [test for test in named(span) if test not in left_out_too] for span in code_spans(guarded_by)}
        assert guards, left_out_test
        assert all(guards.values()), f"{left_out_test}: a guard that make test leaves out itself: {guards}"


def test_of_a_product_the_page_says_how_much_is_left() -> None:
    """Every test that takes `all_pairs` has a row."""
    listed = {span.partition("::")[0] for row in table_after(PAGE, "## Products") for span in code_spans(row[0])}
    used = {
        str(file.relative_to(ROOT))
        for file in (ROOT / "tests").rglob("test_*.py")
        if re.search(r"import all_pairs(, every_nth)?\n", file.read_text(encoding="utf-8"))
    }
    assert listed == used
