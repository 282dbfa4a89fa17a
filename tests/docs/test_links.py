"""Every link of the documentation leads somewhere, and every file it names is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.pages import PAGES, ROOT, anchors, code_spans, links, prose

#: A path of the repository between backticks; without a folder in it, it may be a file of a run.
_PATH = re.compile(r"[\w.-]+/[\w./-]*\.(?:md|proto|py|toml|yaml)")

#: Where paths start.
_BASES = (ROOT, ROOT / "hetpipe")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_resolve(page: Path) -> None:
    broken = []
    for link in links(page):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert not broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_conflict_of_a_merge_is_left(page: Path) -> None:
    assert not re.search(r"^(<{7}|>{7})", page.read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_named_files_are_there(page: Path) -> None:
    named = [span for span in code_spans(prose(page)) if _PATH.fullmatch(span)]
    missing = [path for path in named if not any((base / path).is_file() for base in (*_BASES, page.parent))]
    # A file of the user's own, which need not be there.
    assert [path for path in missing if path != "examples/text/input.txt"] == []
