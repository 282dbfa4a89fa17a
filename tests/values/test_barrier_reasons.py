"""Reasons of a barrier: text and value are each other's inverse."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetpipe.decide.sync.segment import Segment
from hetpipe.values.barrier_reasons import BarrierReasons
from hetpipe.values.ids import Clock
from tests.docs.pages import ROOT

WORDS = ("checkpoint", "epoch", "end", "stop", "evict", "join", "drain")


@given(st.lists(st.sampled_from(WORDS), unique=True))
def test_text_and_value_are_each_others_inverse(words: list[str]) -> None:
    reasons = BarrierReasons(words)
    assert BarrierReasons.parse(str(reasons)) == reasons
    assert str(reasons) == Segment(Clock(0), Clock(3), tuple(words), 0).reason


@pytest.mark.parametrize(("text", "reasons"), [("", ()), ("end", ("end",)), ("stop+drain", ("stop", "drain"))])
def test_of_a_text(text: str, reasons: tuple[str, ...]) -> None:
    assert BarrierReasons.parse(text) == reasons


def test_nobody_else_takes_the_text_apart() -> None:
    """The checker, which shares no code with what it judges, alone has its own."""
    joined = re.compile(r"""\.split\(["']\+["']\)|["']\+["']\.join\(""")
    found = {
        str(path.relative_to(ROOT))
        for path in Path(ROOT, "hetpipe").rglob("*.py")
        if joined.search(path.read_text(encoding="utf-8"))
    }
    allowed = {"hetpipe/values/barrier_reasons.py", "hetpipe/checker/reading.py", "hetpipe/cli/start/doctor.py"}
    assert found <= allowed
