"""What `make docs` builds: every page is in the navigation, and nothing is fetched from other servers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import hetpipe
from tests.docs.pages import ROOT
from tests.docs.site import REFERENCE, page_of, pages, reference, remote_references

NAVIGATION = re.findall(r"^ +- .*?([\w./-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)


def test_every_page_is_in_the_navigation_once() -> None:
    assert sorted(NAVIGATION) == sorted(pages())


def test_fences_with_a_second_word_are_not_lost() -> None:
    assert "\n```yaml\nscrape_configs:" in pages()["docs/observability.md"]


def test_the_reference_has_every_public_name() -> None:
    assert pages()[REFERENCE] == reference()
    assert "::: hetpipe.planning.simulate\n" in reference()
    assert reference().count("::: ") == len(hetpipe.__all__)


def test_a_notebook_is_a_page() -> None:
    notebook = {
        "cells": [
            {"cell_type": "markdown", "source": ["# Title\n", "text"]},
            {"cell_type": "code", "source": ["a = 1\n", "a"]},
        ]
    }
    assert page_of(notebook) == "# Title\ntext\n\n```python\na = 1\na\n```\n"
    assert pages()["examples/notebooks/train.md"].startswith("# Train from a notebook\n")
    assert "](plan.md)" in pages()["examples/notebooks/train.md"], "links between notebooks lead to their pages"


@pytest.mark.parametrize(
    ("text", "is_found"),
    [
        ('<script src="https://cdn/x.js"></script>', True),
        ("<script src=//cdn/x.js></script>", True),
        ('<link rel="stylesheet" href="https://cdn/x.css">', True),
        ('<link href="https://cdn/x.css" rel="stylesheet">', True),
        ('<img alt="a" src="https://cdn/x.png">', True),
        ("<style>@font-face{src:url(https://cdn/x.woff)}</style>", True),
        ('<a href="https://example.org">there</a>', False),
        ('<script src="assets/x.js"></script><link rel="stylesheet" href="assets/x.css">', False),
    ],
)
def test_what_other_servers_would_be_asked_for_is_found(text: str, *, is_found: bool, tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text(text, encoding="utf-8")
    assert bool(list(remote_references(tmp_path))) is is_found
