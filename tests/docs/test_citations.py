"""What docstrings and comments cite of the pages in `docs/semantics` is there: the page, and the section."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.pages import ROOT

SEMANTICS = ROOT / "docs" / "semantics"
FOLDERS = ("hetpipe", "services", "tests", "benchmarks", "proto", "examples")

#: A page, and its sections: "`wsp.md` §2, §3 and §5", "`wsp.md` §3, Arithmetic".
_CITATION = re.compile(
    r"`(wsp|policies)\.md`((?:(?:,| and)? ?§\d+)*)(?:, (Arithmetic|Buffers|Data|Newest local weights))?"
)


def _sources() -> Iterator[Path]:
    for folder in FOLDERS:
        yield from (path for path in (ROOT / folder).rglob("*") if path.suffix in {".py", ".proto"})


def _citations() -> set[tuple[str, str]]:
    found: set[tuple[str, str]] = set()
    for path in _sources():
        for page, numbers, name in _CITATION.findall(path.read_text(encoding="utf-8")):
            found.add((page, ""))
            found |= {(page, number) for number in re.findall(r"§(\d+)", numbers)}
            found |= {(page, name)} if name else set()
    return found


@pytest.mark.parametrize(("page", "section"), sorted(_citations()))
def test_every_cited_section_is_there(page: str, section: str) -> None:
    text = (SEMANTICS / f"{page}.md").read_text(encoding="utf-8")
    if section.isdigit():
        assert re.search(rf"^## {section}\. ", text, re.MULTILINE)
    else:
        assert section in text


def test_the_pages_are_cited_at_all() -> None:
    assert {("wsp", "2"), ("wsp", "3"), ("wsp", "Arithmetic"), ("policies", "")} <= _citations()


def test_nothing_cites_the_folder_of_before() -> None:
    assert not list((ROOT / "docs" / "design").glob("*.md"))
