"""The page of a plan: whole by itself, well-formed, every name escaped, every bar with words."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from xml.etree import ElementTree as ET

import pytest
from markupsafe import Markup

from hetpipe.report.plan_page import Picture, page_of, picture_of
from hetpipe.report.plan_reasons import reasons_of
from hetpipe.report.plan_view import PlanFacts, view_of
from hetpipe.report.text import percent
from tests.cli import plans

#: Elements without an end.
VOID = {"input", "meta", "br"}


class Page(HTMLParser):
    """Checks that elements are closed in order; collects them."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] != "style":
            self.text += data

    def of_class(self, name: str) -> list[dict[str, str | None]]:
        return [attributes for _, attributes in self.elements if name in (attributes.get("class") or "").split()]


def page(facts: PlanFacts) -> str:
    return page_of(view_of(facts), reasons_of(facts), picture_of(facts))


@pytest.fixture(scope="module")
def equal_mix() -> str:
    return page(plans.equal_mix())


def test_it_is_whole_by_itself(equal_mix: str) -> None:
    parsed = Page(equal_mix)
    assert not {"script", "link", "img", "iframe", "object", "base", "a", "use", "image"} & {
        t for t, _ in parsed.elements
    }
    attributes = {name for _, found in parsed.elements for name in found}
    assert not {"src", "href", "xlink:href", "srcset", "onload", "onclick", "action"} & attributes
    assert not re.search(r"url\(|@import|https?:|//", equal_mix)
    policy = [found["content"] for tag, found in parsed.elements if tag == "meta" and "http-equiv" in found]
    assert policy == ["default-src 'none'; style-src 'unsafe-inline'"]


def test_it_suits_the_dark_and_the_phone(equal_mix: str) -> None:
    assert "prefers-color-scheme:dark" in equal_mix
    assert "@media (max-width" in equal_mix
    assert 'content="width=device-width, initial-scale=1"' in equal_mix
    used = set(re.findall(r"var\((--[\w-]+)\)", equal_mix))
    light, dark = (
        set(re.findall(r"(--[\w-]+):", block)) for block in re.findall(r":root\{(.*?)\}", equal_mix, re.DOTALL)
    )
    assert used <= light == dark


def test_every_bar_says_what_it_shows(equal_mix: str) -> None:
    bars = Page(equal_mix).of_class("bar")
    assert len(bars) == 3 + 2 * 4
    assert all(bar["role"] == "img" and bar["aria-label"] for bar in bars)
    assert any(
        re.fullmatch(r"stage 2: 73.0 ms; .* forward; .* backward; .* transfers", b["aria-label"] or "") for b in bars
    )
    widths = [float(width) for width in re.findall(r'style="width:([\d.]+)%"', equal_mix)]
    assert min(widths) >= 0
    assert max(widths) == 100


def test_it_says_what_the_screen_says(equal_mix: str) -> None:
    facts = plans.equal_mix()
    view, reasons = view_of(facts), reasons_of(facts)
    text = Page(equal_mix).text
    for sentence in [view.title, view.subtitle, reasons.bound, *reasons.waves, *reasons.cuts]:
        assert sentence in text
    for stage in view.pipelines[0].stages:
        assert all(part in text for part in (stage.device, stage.kind, stage.layers, stage.names))
    for one in reasons.rejected:
        assert one.name in text
        assert one.reason in text
    assert "virtual worker 3: n2/3, n3/3, n1/3, n0/3" in text
    assert "~50.5 ms" in text
    assert ">VWs 0–3<" in equal_mix, "whole, above the picture of the cuts"
    assert len(Page(equal_mix).of_class("longest")) == 1


def test_stages_have_their_utilisation_where_it_is_known(equal_mix: str) -> None:
    facts = plans.with_counted_operations(plans.equal_mix())
    text = Page(page(facts)).text
    for stage in view_of(facts).pipelines[0].stages:
        assert stage.utilisation is not None
        assert percent(stage.utilisation) in text
    assert "MFU" not in Page(equal_mix).text


def test_names_are_escaped() -> None:
    text = page(plans.long_names())
    parsed = Page(text)
    assert not {"script", "img", "b"} & {tag for tag, _ in parsed.elements}
    assert "<script>alert(1)<|script>-node-with-a-long-name/0" in parsed.text
    assert "</title><script>x</script>: 1 virtual worker" in parsed.text


def test_the_picture_is_drawn_into_it(equal_mix: str) -> None:
    svg = equal_mix[equal_mix.index("<svg") : equal_mix.index("</svg>") + len("</svg>")]
    labels = [text.text or "" for text in ET.fromstring(svg).iter("text")]
    assert "virtual worker 3, stage 1: n3/3 (QUADRO_P4000)" in labels
    assert {"F1", "B1", "F8"} <= set(labels)


def test_of_many_virtual_workers_each_kind_is_drawn() -> None:
    facts = plans.many_workers()
    picture = picture_of(facts)
    drawn = set(map(int, re.findall(r">virtual worker (\d+), stage 0", picture.svg)))
    assert {pipeline.workers[0] for pipeline in view_of(facts).pipelines} <= drawn
    assert len(drawn) < len(facts.plan.virtual_workers)
    assert f"virtual workers {', '.join(map(str, sorted(drawn)))} only" in picture.caption


def test_a_plan_without_alternatives() -> None:
    facts = plans.equal_mix()
    bare = PlanFacts(facts.plan.model_copy(update={"alternatives": ()}), facts.costs, facts.options)
    assert (
        "No alternatives were considered." in Page(page_of(view_of(bare), reasons_of(bare), Picture(Markup(), ""))).text
    )
