"""The live table's model and the piped lines."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetpipe.report.progress import (
    STATE_TEXTS,
    cells,
    cut_text,
    evaluation_line,
    evaluation_text,
    headings,
    memory_text,
    speeds_text,
    table_line,
    totals_text,
)
from hetpipe.values.events import JobState, Straggling
from hetpipe.values.ids import StageIndex, VirtualWorkerIndex
from hetpipe.values.life_state import LifeState
from tests.cli.fakes import evaluated, table


def test_the_table_has_everything_a_user_asks_of_a_virtual_worker() -> None:
    assert headings(table(3, 4))[3] == "ahead (D = 1)"
    assert cells(table(3, 4)) == [
        ["0", "0 on n0/0, 1-4 on n0/1", "3", "0 of 2", "150", "1.2500", "12.5 %", "6.0 s"],
        ["1", "0 on n0/2, 1-4 on n0/3", "4", "1 of 2", "150", "1.2500", "12.5 %", "6.0 s"],
    ]
    assert all(len(row) == len(headings(table(3, 4))) for row in cells(table(3, 4)))


def test_a_cut_that_has_changed_has_its_version() -> None:
    two = table(3, 4)
    moved = replace(two, rows=(two.rows[0], replace(two.rows[1], version=2)))
    assert [row[1] for row in cells(moved)] == ["0 on n0/0, 1-4 on n0/1", "0 on n0/2, 1-4 on n0/3 (plan version 2)"]


def test_each_stage_has_the_policies_of_its_layers_and_its_memory() -> None:
    row = table(3).rows[0]
    first, second = row.stages
    stages = (
        replace(first, memory=("swap",), memory_bytes=3 << 20, device_bytes=6 << 30),
        replace(second, memory=("keep", "recompute", "recompute", "keep"), memory_bytes=1 << 30),
    )
    row = replace(row, stages=stages)
    assert cut_text(row) == "0 on n0/0 (swap), 1-4 on n0/1 (layers 1 keep, 2–3 recompute, 4 keep)"
    assert memory_text(row) == "3 MiB of 6 GiB, 1 GiB"
    assert memory_text(replace(table(3).rows[0], memory_bytes=1 << 20)) == "1 MiB", "of an earlier coordinator"


def test_several_losses_stand_beside_their_sum() -> None:
    two = table(3, 4)
    several = replace(two, rows=tuple(replace(row, losses={"main": 1.0, "aux": 0.5}) for row in two.rows))
    assert [row[5] for row in cells(several)] == ["1.2500 (aux 0.5000, main 1.0000)"] * 2
    assert "vw0.loss=1.25 vw0.loss.aux=0.5 vw0.loss.main=1 " in table_line(several)


def test_without_a_bound_the_distance_stands_alone() -> None:
    unbounded = table(0, 9, staleness=None, eta_seconds=None)
    assert headings(unbounded)[3] == "ahead (no bound)"
    assert [row[3] for row in cells(unbounded)] == ["0", "9"]
    assert [row[5] for row in cells(unbounded)] == ["-", "1.2500"]
    assert [row[7] for row in cells(unbounded)] == ["?", "?"]


def test_totals() -> None:
    assert totals_text(table(3, 4)) == "epoch 2, 60 of 240 samples (25.0 %), 300 samples/s, ETA 6.0 s"


def test_a_line_holds_the_whole_table() -> None:
    assert table_line(table(0, 1)) == (
        "state=running epoch=2 samples=60/240 samples_per_second=300.5 eta_seconds=6 global_clock=0 D=1 "
        "vw0.clock=0 vw0.ahead=0 vw0.samples_per_second=150.2 vw0.waiting_percent=12.5 "
        "vw1.clock=1 vw1.ahead=1 vw1.samples_per_second=150.2 vw1.loss=1.25 vw1.waiting_percent=12.5"
    )


def test_who_does_not_compute_is_not_ahead_of_anybody() -> None:
    there = table(9, 4, 4)
    away = (LifeState.OUT, LifeState.LEAVING)
    lost, leaving = (replace(row, state=state) for row, state in zip(there.rows[1:], away, strict=True))
    slow = (Straggling(VirtualWorkerIndex(0), StageIndex(1), 2.04),)
    there = replace(there, rows=(there.rows[0], lost, leaving), slow=slow)
    assert [row[3] for row in cells(there)] == ["5 of 2", "out", "0 of 2, leaving"]
    line = table_line(there)
    assert " vw0.clock=9 vw0.ahead=5 " in line
    assert " vw1.state=out vw1.clock=4 vw1.samples_per_second=" in line
    assert " vw2.state=leaving vw2.clock=4 vw2.ahead=0 " in line
    assert line.endswith(" vw0.stage1.slower_than_planned=2")


def test_evaluations_begin_with_the_loss() -> None:
    assert (
        evaluation_text(evaluated()) == "evaluation after epoch 2, clock 6: loss 0.1312, accuracy 0.9634 (46 samples)"
    )
    assert evaluation_line(evaluated()) == "event=evaluation epoch=2 clock=6 samples=46 loss=0.1312 accuracy=0.9634"


@pytest.mark.parametrize("state", JobState)
def test_every_state_has_words(state: JobState) -> None:
    assert STATE_TEXTS[state]


def test_other_speeds_stand_beside_samples_where_they_are_known() -> None:
    assert (speeds_text(None, None), speeds_text(1280.0, 0.2)) == ("", "1280 tokens/s, 20.0 % MFU, ")


def test_an_evaluation_within_an_epoch_says_so() -> None:
    within = replace(evaluated(), within_epoch=True, whole=False)
    assert evaluation_text(within).startswith(f"evaluation in epoch {within.epoch}, clock {within.clock}: ")
    assert f"clock={within.clock} whole=false samples=" in evaluation_line(within)
