"""Every link of the documentation leads somewhere, and every file it names is there."""

from __future__ import annotations

import re
from pathlib import Path

from tests.docs.pages import PAGES, ROOT, anchors, code_spans, links, prose

#: A path of the repository between backticks; without a folder in it, it may be a file of a run.
_PATH = re.compile(r"[\w.-]+/[\w./-]*\.(?:md|proto|py|toml|yaml)")

#: Where paths start.
_BASES = (ROOT, ROOT / "hetpipe")


#: A file of the user's own, which need not be there.
_THEIRS = "examples/text/input.txt"


def leads_somewhere(page: Path, link: str) -> bool:
    if "://" in link:
        return True
    path, _, anchor = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    return target.exists() and (not anchor or anchor in anchors(target))


def test_links_resolve() -> None:
    assert [(page, link) for page in PAGES for link in links(page) if not leads_somewhere(page, link)] == []


def test_no_conflict_of_a_merge_is_left() -> None:
    mark = re.compile(r"^(<{7}|>{7})", re.MULTILINE)
    assert [page for page in PAGES if mark.search(page.read_text(encoding="utf-8"))] == []


def is_there(page: Path, path: str) -> bool:
    return path == _THEIRS or any((base / path).is_file() for base in (*_BASES, page.parent))


def test_named_files_are_there() -> None:
    named = ((page, span) for page in PAGES for span in code_spans(prose(page)) if _PATH.fullmatch(span))
    assert [(page, path) for page, path in named if not is_there(page, path)] == []
