"""The page of a comparison: whole by itself, escaped, the same colour for a policy everywhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hetpipe.cli.compare_page import page_of
from hetpipe.cli.compare_record import TrialRecord
from hetpipe.cli.compare_view import summaries_of, view_of
from tests.cli.comparisons import curve, diverged, record, result, trials
from tests.cli.test_plan_page import Page

RECORDS = [
    record("wave", 3, [1.0, 0.6, 0.7]),
    record("wave", 4, [1.2, 0.9, 0.8], result=result(samples_per_second=340.0)),
    record("stash", 3, [1.0, 0.2]),
    diverged("stash", 4),
]


def page(records: list[TrialRecord], folder: Path) -> str:
    summaries = summaries_of(["wave", "stash"], records)
    return page_of(view_of(trials(folder)[0].job, 2, summaries, records), records)


@pytest.fixture
def text(tmp_path: Path) -> str:
    return page(RECORDS, tmp_path)


def test_it_is_whole_by_itself(text: str) -> None:
    parsed = Page(text)
    assert not {"script", "link", "img", "iframe", "object", "base", "a", "use", "image"} & {
        tag for tag, _ in parsed.elements
    }
    assert not re.search(r"url\(|@import|https?:|//", text)
    policy = [found["content"] for tag, found in parsed.elements if tag == "meta" and "http-equiv" in found]
    assert policy == ["default-src 'none'; style-src 'unsafe-inline'"]


def test_every_colour_is_there_in_the_light_and_in_the_dark(text: str) -> None:
    used = set(re.findall(r"var\((--[\w-]+)\)", text))
    blocks = re.findall(r":root\{(.*?)\}", text, re.DOTALL)
    light, dark = (
        {name for block in blocks[start::2] for name in re.findall(r"(--[\w-]+):", block)} for start in (0, 1)
    )
    assert used <= light == dark
    assert {f"--series-{index}" for index in range(7)} <= light


def test_it_says_what_the_screen_says(text: str, tmp_path: Path) -> None:
    shown = Page(text).text
    view = view_of(trials(tmp_path)[0].job, 2, summaries_of(["wave", "stash"], RECORDS), RECORDS)
    for sentence in (view.title, view.subtitle, *view.remarks):
        assert sentence in shown
    for table in view.tables:
        assert all(cell in shown for row in table.rows for cell in row.cells)


def test_curves_against_both_axes(text: str) -> None:
    charts = re.findall(r'<svg class="chart" role="img"[^>]*aria-label="([^"]*)"', text)
    assert [chart.split(":")[0] for chart in charts] == ["Evaluation", "Evaluation"] * 2 + [
        "Training loss by minibatches",
        "Training loss by time",
    ]
    assert charts[0] == "Evaluation: loss by minibatches: wave ends at 0.750, stash ends at 0.200"
    assert "Evaluation: accuracy by time" in charts[3]


def test_without_metrics_there_is_no_curve_of_the_training_loss(tmp_path: Path) -> None:
    assert "Training loss by" not in page([record("wave", 3, losses=())], tmp_path)


def test_a_policy_keeps_its_colour(tmp_path: Path) -> None:
    alone = page([record("stash", 3)], tmp_path)
    assert "stroke:var(--series-1)" in alone
    assert "stroke:var(--series-0)" not in alone


def test_nothing_finished(tmp_path: Path) -> None:
    shown = Page(page([diverged("wave", 3)], tmp_path)).text
    assert "wave, seed 3 diverged at minibatch 37" in shown


def test_names_are_escaped(tmp_path: Path) -> None:
    nasty = '<img src=x onerror="alert(1)">'
    failed = record("wave", 3, evaluations=curve([1.0], **{nasty: 0.5}), run_dir=nasty, sentence=nasty)
    text = page([failed, record("stash", 3)], tmp_path)
    assert "<img" not in text
    assert nasty in Page(text).text
