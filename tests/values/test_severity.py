"""An event's severity and texts are members of its class, for logs and screens alike."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any, get_args

import pytest

import hetpipe
from hetpipe.values.events import Event, JobEvent, Notice, Rewound, Waiting, WorkerLost
from hetpipe.values.ids import Clock, Incarnation, VirtualWorkerIndex

NOTICES = [kind for kind in get_args(JobEvent) if issubclass(kind, Notice)]


@pytest.mark.parametrize("kind", NOTICES)
def test_a_notice_is_worth_a_line_in_the_log_and_has_its_texts(kind: Any) -> None:
    assert kind.severity in {"info", "warning"}
    assert not getattr(kind, "__abstractmethods__", ())
    assert kind.text is not Notice.text
    assert kind.pairs is not Notice.pairs


def test_losses_are_warnings_and_waits_are_usual() -> None:
    lost = WorkerLost(VirtualWorkerIndex(0), Incarnation(0), "it was killed")
    back = Rewound(Clock(3), Clock(2), "rewind-1", "it was killed")
    assert [event.severity for event in (lost, back, Waiting("for stage 1", 6.0))] == ["warning", "warning", "usual"]


def test_every_class_of_an_event_is_an_event_of_a_job() -> None:
    kinds = {kind for base in (Event, Notice) for kind in base.__subclasses__() if kind is not Notice}
    assert {kind.__name__ for kind in kinds} == {kind.__name__ for kind in get_args(JobEvent)}


def test_a_view_needs_no_line_for_a_new_notice() -> None:
    """Those that decide on them and those that display them apart, only `values/events.py` names a kind of notice."""
    root = Path(hetpipe.__file__).parent
    displays = [root / "report", root / "comparison"]
    names = {kind.__name__ for kind in NOTICES} - {"Rewound"}  # it alone has a style of its own on the screen
    found = {
        f"{path.relative_to(root)}: {node.id}"
        for folder in displays
        for path in folder.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Name) and node.id in names
    }
    assert found == set()
