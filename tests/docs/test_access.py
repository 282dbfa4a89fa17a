"""The table of who may call what is that of the code."""

from __future__ import annotations

from hetpipe.wire.calls import ACCESS
from tests.docs.access import CALLERS, PAGE, rewritten
from tests.docs.pages import code_spans, table_after


def test_the_table_is_fresh() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text.count("<!-- access -->\n| service |") == 1
    assert text == rewritten(text), "say: python -m tests.docs.access"


def test_every_call_has_its_cells() -> None:
    rows = table_after(PAGE, "<!-- access -->")
    shown = {
        (call, role)
        for row in rows
        for call in code_spans(row[1])
        for role, cell in zip(CALLERS, row[2:], strict=True)
        if cell
    }
    assert shown == {(name.rsplit("/", 1)[1], role) for name, rule in ACCESS.items() for role in rule}
