"""Every evaluation of a run stays, one line each."""

from __future__ import annotations

import json
import math
from pathlib import Path

from hetpipe.server.coordinator.job_hosts import EVALUATIONS, append_evaluations
from hetpipe.values.events import Evaluated, JobState, StateChanged
from hetpipe.values.ids import Clock
from tests.support.fake_clock import FakeClock


def test_every_evaluation_stays_and_nothing_else(tmp_path: Path) -> None:
    clock = FakeClock(wall=1_700_000_000.0)
    first = Evaluated(Clock(6), 1, 46, {"accuracy": 0.5, "loss": math.nan}, minibatches=24)
    append_evaluations(tmp_path, [StateChanged(JobState.RUNNING), first], clock)
    append_evaluations(tmp_path, [StateChanged(JobState.STOPPING)], clock)
    append_evaluations(tmp_path, [Evaluated(Clock(12), 2, 46, {"loss": 0.25}, minibatches=48, rewinds=1)], clock)
    part = Evaluated(Clock(14), 3, 8, {"loss": 0.5}, minibatches=56, rewinds=1, within_epoch=True, whole=False)
    append_evaluations(tmp_path, [part], clock)
    lines = [json.loads(line) for line in (tmp_path / EVALUATIONS).read_text().splitlines()]
    assert lines == [
        {
            "t": "2023-11-14T22:13:20Z",
            "epoch": 1,
            "clock": 6,
            "minibatches": 24,
            "samples": 46,
            "rewinds": 0,
            "within_epoch": False,
            "whole": True,
            "values": {"accuracy": 0.5, "loss": None},
        },
        {
            "t": "2023-11-14T22:13:20Z",
            "epoch": 2,
            "clock": 12,
            "minibatches": 48,
            "samples": 46,
            "rewinds": 1,
            "within_epoch": False,
            "whole": True,
            "values": {"loss": 0.25},
        },
        {
            "t": "2023-11-14T22:13:20Z",
            "epoch": 3,
            "clock": 14,
            "minibatches": 56,
            "samples": 8,
            "rewinds": 1,
            "within_epoch": True,
            "whole": False,
            "values": {"loss": 0.5},
        },
    ]


def test_a_folder_that_cannot_be_written_to_does_not_end_the_run(tmp_path: Path) -> None:
    append_evaluations(tmp_path / "gone", [Evaluated(Clock(6), 1, 46, {"loss": 0.5})], FakeClock())
    assert not (tmp_path / "gone").exists()
