"""The Grafana dashboard and the alerts name only metrics and labels that are in the list."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from hetpipe.observe.metric_names import FAMILIES, Family
from hetpipe.values.members import MemberRole
from hetpipe.wire.status import STATUS_BY_ERROR
from tests.observe.promql import OF_COUNTERS, Expression, Selector, read_expression

FOLDER = Path(__file__).parents[2] / "k8s" / "components" / "monitoring"

#: Labels that Prometheus gives every series of a target.
OF_TARGETS = {"instance", "pod"}

#: What the library tells of every process.
OF_PROCESSES = {"process_cpu_seconds_total", "process_resident_memory_bytes"}


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / "hetpipe-dashboard.json").read_text(encoding="utf-8"))
    return found


def alerts() -> list[dict[str, Any]]:
    document = yaml.safe_load((FOLDER / "rules.yaml").read_text(encoding="utf-8"))
    return [rule for group in document["spec"]["groups"] for rule in group["rules"]]


def expressions() -> Iterator[tuple[str, str]]:
    """Where it stands, and an expression; Grafana's own variables for times are filled in."""
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            yield f"{panel['title']} {target['refId']}", re.sub(r"\$__\w+", "5m", target["expr"])
    for alert in alerts():
        yield alert["alert"], alert["expr"]


EXPRESSIONS = dict(expressions())


def family_of(selector: Selector) -> Family | None:
    """The metric behind the name of a series; None for one of the library's."""
    if selector.name in OF_PROCESSES:
        return None
    family = FAMILIES.get(selector.name)
    base, _, part = selector.name.rpartition("_")
    if family is None and part in {"bucket", "count", "sum"} and FAMILIES[base].kind == "histogram":
        family = FAMILIES[base]
    assert family is not None, f"{selector.name} is not in the list"
    return family


def labels_of(selector: Selector) -> set[str]:
    family = family_of(selector)
    own = set() if family is None else set(family.labels)
    return own | OF_TARGETS | ({"le"} if selector.name.endswith("_bucket") else set())


@pytest.mark.parametrize("where", EXPRESSIONS)
def test_expressions_name_what_exists(where: str) -> None:
    expression = read_expression(EXPRESSIONS[where])
    assert expression.selectors
    for selector in expression.selectors:
        assert selector.matched.keys() <= labels_of(selector), selector
        _check_values(selector)
        family = family_of(selector)
        if family is not None and selector.function in OF_COUNTERS:
            assert family.kind != "gauge", f"{selector.name} may fall"
        if family is not None and family.kind == "counter" and selector.function not in OF_COUNTERS:
            assert "followed_records" in EXPRESSIONS[where], "of a counter its growth counts; but here the difference"
    known = set[str]().union(*map(labels_of, expression.selectors))
    assert expression.grouping <= known


def _check_values(selector: Selector) -> None:
    """Values that are compared with are such that there are."""
    names = {kind.__name__ for kind in STATUS_BY_ERROR}
    roles = {role.value for role in MemberRole}
    for label, there in (("reason", names), ("role", roles)):
        if label in selector.matched:
            assert set(selector.matched[label].split("|")) <= there


def test_every_alert_says_what_to_do() -> None:
    for alert in alerts():
        assert alert["alert"].startswith("Hetpipe")
        assert alert["labels"]["severity"] in {"critical", "warning"}
        assert alert["annotations"].keys() == {"summary", "action"}
        named = set(re.findall(r"\$labels\.(\w+)", alert["annotations"]["summary"]))
        assert named <= _labels_left(read_expression(alert["expr"]), alert["expr"])


def _labels_left(expression: Expression, text: str) -> set[str]:
    """Labels of the series that an alert is about: what it is summed by, else all that its metrics have."""
    if text.startswith("sum by"):
        return expression.grouping
    return set[str]().union(*map(labels_of, expression.selectors))


def test_panels_lie_side_by_side_and_are_told_apart() -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("sum by (call (x)", r"\) is missing"),
        ("rate(x[5m]))", "closes nothing"),
        ("rates(x[5m])", "unknown function rates"),
        ("x{a=}", "no matchers"),
        ("x ? y", "means nothing"),
    ],
)
def test_mistakes_are_noticed(text: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        read_expression(text)


def test_the_reader_of_expressions() -> None:
    text = 'sum by (a, b) (rate(x_total{c=~"d|e", f!="g"}[5m])) / on (h) group_left () y > 0.5 and z == Inf'
    found = read_expression(text)
    assert found.selectors == [
        Selector("x_total", {"c": "d|e", "f": "g"}, "rate"),
        Selector("y", {}, ""),
        Selector("z", {}, ""),
    ]
    assert found.grouping == {"a", "b", "h"}


@pytest.mark.parametrize("metric", ["hetpipe_job_tokens_per_second", "hetpipe_job_model_flops_utilisation_ratio"])
def test_tokens_and_utilisation_are_drawn_beside_samples(metric: str) -> None:
    drawn = [
        panel for panel in dashboard()["panels"] for target in panel.get("targets", ()) if metric in target["expr"]
    ]
    assert len(drawn) == 1
