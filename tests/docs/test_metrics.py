"""The table of metrics in docs/observability.md is fresh, and the page's other tables say what is so."""

from __future__ import annotations

from dataclasses import fields

from hetpipe.observe.metric_names import FAMILIES
from hetpipe.values.events import JobStatus
from tests.docs.metrics import PAGE, rewritten
from tests.docs.pages import code_spans, table_after
from tests.observe.test_monitoring import alerts


def test_the_table_is_fresh() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert "<!-- metrics -->\n" in text
    assert text == rewritten(text), "say: python -m tests.docs.metrics"


def test_every_metric_has_a_row() -> None:
    assert [code_spans(row[0]) for row in table_after(PAGE, "| metric |")] == [[name] for name in FAMILIES]


def test_every_alert_has_a_row() -> None:
    assert [code_spans(row[0]) for row in table_after(PAGE, "| alert |")] == [[alert["alert"]] for alert in alerts()]


def test_the_keys_of_top_as_json() -> None:
    documented = [span for row in table_after(PAGE, "| key of `top --json` |") for span in code_spans(row[0])]
    assert documented == [*(field.name for field in fields(JobStatus)), "members", "cuts"]
