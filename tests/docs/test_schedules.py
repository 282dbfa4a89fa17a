"""The pictures of docs/schedules.md are fresh, and what the page says of them is so."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetpipe.cli.deploy.render.schedule import to_json
from hetpipe.decide.schedule.timeline import play
from hetpipe.values.policies import WEIGHT_POLICIES
from tests.docs.pages import code_spans, links, prose, table_after
from tests.docs.schedules import FOLDER, PAGE, PICTURES, path_of, picture


@pytest.mark.parametrize("name", PICTURES)
def test_the_picture_is_fresh(name: str) -> None:
    assert path_of(name).read_text(encoding="utf-8") == picture(name), "say: python -m tests.docs.schedules"


def test_every_picture_is_on_the_page_and_none_is_left_over() -> None:
    assert [link for link in links(PAGE) if link.endswith(".svg")] == [f"schedules/{name}.svg" for name in PICTURES]
    assert {path.stem for path in FOLDER.iterdir()} == set(PICTURES)


def test_every_policy_has_a_section() -> None:
    headings = [line for line in prose(PAGE).splitlines() if line.startswith("## `")]
    assert [code_spans(heading) for heading in headings] == [[weights] for weights in WEIGHT_POLICIES]
    assert {pipeline.weights for pipeline in PICTURES.values()} == set(WEIGHT_POLICIES)


def test_of_two_orders_that_draw_the_same_picture_one_is_left_out() -> None:
    flush = PICTURES["flush"]
    assert play(replace(flush, schedule="fifo")).stages == play(flush).stages
    fifo = PICTURES["wave-fifo"]
    in_order = play(replace(fifo, schedule="1f1b"))
    assert [played.stages[0].most_in_flight for played in (in_order, play(fifo))] == [8, 6]


def test_the_keys_of_the_json_are_described() -> None:
    rows = table_after(PAGE, "## As JSON")
    described = {code_spans(row[0])[0]: set(code_spans(row[1])) for row in rows}
    answer = to_json(play(PICTURES["wave"]))
    stage = answer["stages"][0]
    assert [key for key in described if "." not in key] == list(answer)
    assert described["pipeline"] == set(answer["pipeline"])
    assert described["stages"] == set(stage)
    assert described["stages.boxes"] == {*stage["boxes"][0], "forward", "backward"}
    assert described["stages.updates"] == set(stage["updates"][0])
