"""What `hetpipe clocks` shows of clocks that are not like the usual ones."""

from __future__ import annotations

from dataclasses import replace

from hetpipe.cli.look.clocks import Clocks, snapshot_text
from tests.cli.fakes import snapshot


def test_who_left_before_the_end_is_ahead_of_nobody() -> None:
    shown = Clocks({0: 12, 1: 7}, 12).lines()
    assert [row.split() for row in shown[1:3]] == [["0", "12", "0"], ["1", "7", "-"]]
    assert shown[-1] == "global clock 12"


def test_a_barrier_without_a_reason_has_no_brackets() -> None:
    told = replace(snapshot(4, 3), barrier_reason="")
    assert snapshot_text(told).startswith("published clock 3, next barrier at 9, epoch 2,")
