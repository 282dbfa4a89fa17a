"""Pages come from templates: what they are given is text, and what they are not given is an error."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path

import pytest
from jinja2 import UndefinedError
from markupsafe import Markup

import hetpipe
from hetpipe.report.page import render, render_page, resource
from hetpipe.report.pipeline_picture import PictureRow, draw_pipeline
from hetpipe.report.plan_page import Picture, page_of, picture_of
from hetpipe.report.plan_reasons import reasons_of
from hetpipe.report.plan_view import view_of
from tests.cli import plans

_ELEMENTS = "html|head|div|table|td|tr|th|p|h[1-6]|span|svg|path|g"

HOSTILE = '</title></style></script><script>alert(1)</script><img src=x onerror="alert(2)">\'"&<!--{{ 1 + 1 }}'


def test_no_text_of_a_user_becomes_markup() -> None:
    facts = plans.equal_mix()
    reasons = reasons_of(facts)
    page = page_of(view_of(facts), reasons, Picture(Markup(), HOSTILE))
    assert HOSTILE not in page
    assert "<script" not in page
    assert "<img" not in page
    assert "<!--" not in page
    assert "{{ 1 + 1 }}" in page, "a template is not read out of a value"
    assert str(Markup.escape(HOSTILE)) in page


def test_a_picture_that_no_template_has_drawn_is_text() -> None:
    facts = plans.equal_mix()
    drawn = picture_of(facts)
    assert "<svg" in page_of(view_of(facts), reasons_of(facts), drawn)
    assert "<svg" not in page_of(view_of(facts), reasons_of(facts), Picture(str(drawn.svg), ""))  # type: ignore[arg-type]


def test_labels_and_titles_of_pictures_are_text() -> None:
    svg = draw_pipeline([], [PictureRow(0, 0, HOSTILE)], end_ticks=1000, title=HOSTILE)
    assert "<script" not in svg
    assert "<img" not in svg


def test_a_name_that_nobody_gives_is_an_error() -> None:
    with pytest.raises(UndefinedError, match="is undefined"):
        render("page.html.j2")
    with pytest.raises(UndefinedError, match="'chart' is undefined"):
        render("curves.html.j2")


def test_no_script_or_style_can_end_its_element() -> None:
    for styles, scripts in (([], ["</SCRIPT>"]), ([], ["<!--"]), (["</style>"], [])):
        with pytest.raises(AssertionError):
            render_page(
                "page.html.j2",
                title="",
                subtitle="",
                styles=list(map(Markup, styles)),
                scripts=list(map(Markup, scripts)),
            )


def test_markup_and_style_sheets_are_in_templates_and_nowhere_else() -> None:
    package = Path(hetpipe.__file__).parent
    found = [
        f"{path.relative_to(package)}: {line.strip()}"
        for path in package.rglob("*.py")
        for line in path.read_text(encoding="utf-8").splitlines()
        if re.search(
            r"</?(html|head|div|table|td|tr|th|p|h[1-6]|span|svg|path|g)( [^>]*)?>|[;{] *(fill|margin|color):", line
        )
        and "`<svg>`" not in line
    ]
    assert found == []


def test_every_template_and_style_sheet_is_used() -> None:
    folder = files("hetpipe.report") / "templates"
    names = {one.name for one in folder.iterdir()}
    package = Path(hetpipe.__file__).parent
    sources = [*package.rglob("*.py"), *package.rglob("*.j2")]
    texts = "".join(path.read_text(encoding="utf-8") for path in sources)
    assert {name for name in names if f'"{name}"' not in texts} == set()
    assert resource("page.css") == (folder / "page.css").read_text(encoding="utf-8")
