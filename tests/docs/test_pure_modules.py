"""What calls itself pure lies under the import contract of the deciders."""

from __future__ import annotations

import ast
import re
import tomllib

from tests.docs.pages import ROOT

_PURE = re.compile(r"\bPure\b|: pure\b")


def _says_pure(source: str) -> bool:
    if _PURE.search(source) is None:
        return False
    return _PURE.search(ast.get_docstring(ast.parse(source)) or "") is not None


def test_every_module_that_calls_itself_pure_is_under_the_contract() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (contract,) = (
        each for each in settings["tool"]["importlinter"]["contracts"] if each["name"].startswith("Deciders are pure")
    )
    covered = tuple(contract["source_modules"])
    paths = sorted((ROOT / "hetpipe").rglob("*.py"))
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts): path.read_text(encoding="utf-8") for path in paths}
    pure = [name for name, source in names.items() if _says_pure(source)]
    assert len(pure) > 20, "the word is still in use"
    outside = [name for name in pure if not any(name == each or name.startswith(f"{each}.") for each in covered)]
    assert outside == []
    assert set(covered) <= {*names, "hetpipe.decide", "hetpipe.values", "hetpipe.job"}, (
        "no contract of modules that are gone"
    )
