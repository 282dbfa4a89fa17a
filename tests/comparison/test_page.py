"""The page of a comparison: whole by itself, escaped, the same colour for a policy everywhere."""

from __future__ import annotations

import json
import re
from base64 import b64encode
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from hetpipe.comparison.page import page_of
from hetpipe.comparison.record import Point, TrialRecord
from hetpipe.comparison.statistics import Axis, common_curve
from hetpipe.comparison.view import summaries_of, view_of
from tests.comparison.comparisons import curve, diverged, record, result, trials
from tests.report.test_plan_page import Page

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


def scripts_in(text: str) -> list[str]:
    """Those that run."""
    return re.findall(r"<script>(.*?)</script", text, re.DOTALL)


def charts_in(text: str) -> list[dict[str, Any]]:
    found = re.findall(r'<script type="application/json">(.*?)</script', text, re.DOTALL)
    return [json.loads(one) for one in found]


def test_it_is_whole_by_itself(text: str) -> None:
    parsed = Page(text)
    assert not {"link", "img", "iframe", "object", "base", "a", "use", "image"} & {tag for tag, _ in parsed.elements}
    scripts = [attributes for tag, attributes in parsed.elements if tag == "script"]
    assert [one for one in scripts if one != {"type": "application/json"}] == [{}, {}]
    for script in scripts_in(text):
        text = text.replace(script, "")
    assert not re.search(r"url\(|@import|https?:|//", text)


def test_exactly_its_own_scripts_may_run(text: str) -> None:
    policy = [found["content"] for tag, found in Page(text).elements if tag == "meta" and "http-equiv" in found]
    hashes = [f"'sha256-{b64encode(sha256(script.encode()).digest()).decode()}'" for script in scripts_in(text)]
    assert len(hashes) == 2
    assert policy == [f"default-src 'none'; style-src 'unsafe-inline'; script-src {' '.join(hashes)}"]


def test_every_colour_is_there_in_the_light_and_in_the_dark(text: str) -> None:
    used = set(re.findall(r"""var\((--[\w-]+)\)|["'](--[\w-]+)["']""", text))
    used = {name for pair in used for name in pair if name}
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
    figures = [found for tag, found in Page(text).elements if tag == "figure"]
    sentences = [found["aria-label"] or "" for found in figures]
    assert [sentence.rsplit(": ", 1)[0] for sentence in sentences] == [
        "Evaluation: loss by minibatches",
        "Evaluation: loss by time",
        "Evaluation: accuracy by minibatches",
        "Evaluation: accuracy by time",
        "Training loss by minibatches",
        "Training loss by time",
    ]
    assert sentences[0] == "Evaluation: loss by minibatches: wave ends at 0.750, stash ends at 0.200"
    assert [one["x"] for one in charts_in(text)] == ["minibatches", "seconds"] * 3


@pytest.mark.parametrize("axis", ["minibatches", "seconds"])
def test_the_curves_are_those_of_the_runs(text: str, axis: Axis) -> None:
    loss, _, training = [one for one in charts_in(text) if one["x"] == axis]
    for chart, which in ((loss, "evaluations"), (training, "losses")):
        assert [line["name"] for line in chart["lines"]] == ["wave", "stash"]
        for line, runs in zip(chart["lines"], (RECORDS[:2], RECORDS[2:3]), strict=True):
            points = common_curve([getattr(one, which) for one in runs], "loss", axis)
            columns = ("x", "mean", "least", "most") if len(runs) > 1 else ("x", "mean")
            assert set(line) == {"name", "colour", *columns}
            for column in columns:
                assert line[column] == pytest.approx([getattr(one, column) for one in points], rel=1e-5)


def test_the_scale_is_decided_for_each_chart(tmp_path: Path) -> None:
    charts = charts_in(page([record("wave", 3, [2.0, 0.2])], tmp_path))
    assert [(one["y"], one["log"]) for one in charts[::2]] == [
        ("loss, logarithmic", True),
        ("accuracy", False),
        ("loss, logarithmic", True),
    ]


def test_without_metrics_there_is_no_curve_of_the_training_loss(tmp_path: Path) -> None:
    assert "Training loss by" not in page([record("wave", 3, losses=())], tmp_path)


def test_how_far_virtual_workers_were_apart_is_drawn_where_there_is_a_history(tmp_path: Path) -> None:
    distances = tuple(Point(4.0 * number, number, {"clock distance": number % 3}) for number in range(1, 5))
    *_, by_minibatches, by_time = charts_in(page([record("wave", 3, distances=distances)], tmp_path))
    assert (by_minibatches["x"], by_time["x"], by_time["y"]) == ("minibatches", "seconds", "clock distance")
    assert by_time["lines"][0]["mean"] == [1, 2, 0, 1]
    assert "Largest clock distance" not in page([record("wave", 3)], tmp_path)


def test_a_policy_keeps_its_colour(tmp_path: Path) -> None:
    charts = charts_in(page([record("stash", 3)], tmp_path))
    assert {line["colour"] for one in charts for line in one["lines"]} == {"--series-1"}


def test_values_that_vary_are_rows_with_colours_of_their_own(tmp_path: Path) -> None:
    records = [record("wave", 3, values=values) for values in ("sync.D=0", "sync.D=4")]
    summaries = summaries_of([one.label for one in records], records)
    view = view_of(trials(tmp_path)[0].job, 1, summaries, records)
    assert view.title == "small: 2 variants, 1 seed"
    assert [(table.headings[0], table.rows[1].cells[0]) for table in view.tables] == [("variant", "wave, sync.D=4")] * 4
    lines = charts_in(page_of(view, records))[0]["lines"]
    assert [(line["name"], line["colour"]) for line in lines] == [
        ("wave, sync.D=0", "--series-0"),
        ("wave, sync.D=4", "--series-1"),
    ]


def test_without_javascript_it_says_what_is_missing(text: str) -> None:
    assert "<noscript><p>The curves need JavaScript; the tables above do not.</p></noscript>" in text


def test_an_infinite_metric_is_not_drawn(tmp_path: Path) -> None:
    first, second = curve([1.0, 0.5], perplexity=7.0)
    broken = replace(second, values={**second.values, "perplexity": float("inf")})
    charts = charts_in(page([record("wave", 3, evaluations=(first, broken))], tmp_path))
    (perplexity,) = [one for one in charts if (one["x"], one["y"]) == ("minibatches", "perplexity")]
    assert (perplexity["lines"][0]["x"], perplexity["lines"][0]["mean"]) == ([12], [7])


def test_nothing_finished(tmp_path: Path) -> None:
    text = page([diverged("wave", 3)], tmp_path)
    parsed = Page(text)
    assert "wave, seed 3 diverged at minibatch 37" in parsed.text
    assert "No run has measurements to draw." in parsed.text
    assert not {"script", "noscript", "figure"} & {tag for tag, _ in parsed.elements}
    assert "default-src 'none'; style-src 'unsafe-inline'\"" in text


def test_names_are_escaped(tmp_path: Path) -> None:
    nasty = '</script><script>alert(1)</script><img src=x onerror="alert(1)"><!--'
    failed = record("wave", 3, evaluations=curve([1.0], **{nasty: 0.5}), run_dir=nasty, sentence=nasty)
    text = page([failed, record("stash", 3)], tmp_path)
    assert "<img" not in text
    assert "<!--" not in text
    assert len(scripts_in(text)) == 2
    assert nasty in Page(text).text
    assert nasty in [one["y"] for one in charts_in(text)]
