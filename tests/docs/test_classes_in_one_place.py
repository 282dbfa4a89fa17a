"""A class stands in one place: none is cut over files by inheritance (decision 0009)."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

from tests.docs.pages import ROOT

#: Bases that are questions with several answers, whose one answer may lie elsewhere.
_INTERFACES = {"Protocol", "ABC"}


def name_of(node: ast.expr) -> str:
    """The last word of a base or of what is called: `Protocol` of `typing.Protocol[T]`."""
    return ast.unparse(node).split("[")[0].rpartition(".")[2]


def test_no_class_is_a_slice_of_its_only_subclass() -> None:
    """A base that is never made itself, and has one subclass, is half of a class, unless it is an interface."""
    bases: dict[str, list[str]] = {}
    subclasses: defaultdict[str, list[str]] = defaultdict(list)
    made: set[str] = set()
    for path in sorted(Path(ROOT, "hetpipe").rglob("*.py")):
        if "vendor" in path.parts or "v1" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                bases[node.name] = [name_of(base) for base in node.bases]
                for base in node.bases:
                    subclasses[name_of(base)].append(node.name)
            elif isinstance(node, ast.Call):
                made.add(name_of(node.func))
    slices = {
        base: children
        for base, children in subclasses.items()
        if base in bases
        and len(children) == 1
        and children != [base]  # of the same name, elsewhere
        and base not in made
        and not _INTERFACES.intersection(bases[base])
    }
    assert not slices, "join them in one file, or make the part an object with a narrow interface"
