"""How virtual workers were cut over time, from what a run leaves."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hetpipe.runs.cuts import CutChange, read_cuts
from hetpipe.server.decisions_file import append_decision
from hetpipe.values.activation import ActivationCut
from hetpipe.values.decisions import DecisionMoment, MemberDecision, MoveDecision, MoveJudgement, StayDecision
from hetpipe.values.ids import Clock, VirtualWorkerIndex
from hetpipe.values.plan import Plan
from hetpipe.values.wire import to_json
from tests.ui import folders


def decision(clock: int, vw: int, *stages: int, version: int = 1, gain: float | None = 0.5) -> MoveDecision:
    at, of = DecisionMoment(Clock(clock)), VirtualWorkerIndex(vw)
    return MoveDecision(at, "move", of, stages, version, "straggler", "stage 0 is slow", gain, 1.0)


def slower_by(path: Path, vw: int, factor: float, upto: int) -> None:
    """The first waves of a virtual worker take longer; otherwise they take 0.1 s of four minibatches each."""
    lines, t = [], 100.0
    for wave in range(40):
        t += 0.1 * (factor if wave < upto else 1.0)
        lines.append(json.dumps({**json.loads(folders.wave_line(vw, wave)), "t": t}))
    (path / "metrics" / f"vw-{vw}.jsonl").write_text("\n".join(lines) + "\n")


def run_of(tmp_path: Path, *script: dict[str, Any]) -> Path:
    path = folders.run_in(tmp_path, "moved")
    folders.planned(path)
    folders.trained(path)
    job = json.loads((path / "job.json").read_text())
    (path / "job.json").write_text(json.dumps({**job, "elastic": {"script": list(script)}}))
    return path


def test_a_move_has_the_rates_on_both_sides(tmp_path: Path) -> None:
    path = run_of(tmp_path)
    slower_by(path, 1, 2.0, upto=20)
    append_decision(path, decision(20, 1, 3, 1))
    append_decision(path, MoveJudgement("judge", VirtualWorkerIndex(1), 1, 0.9, "it takes 5 ms", 2.0))
    (cut,) = read_cuts(path)
    assert [cut.before, cut.since] == pytest.approx([20.0, 40.0])
    assert cut.measured_gain == pytest.approx(1.0)
    assert str(cut) == (
        "clock 20: virtual worker 1 is cut 3-1, by straggler; 20.0 minibatches/s before, 40.0 since (+100 %), "
        "predicted +50 %"
    )
    assert (cut.reason, cut.judgement) == ("stage 0 is slow", "it takes 5 ms")


def test_lines_of_the_script_count_once_they_are_reached(tmp_path: Path) -> None:
    path = run_of(
        tmp_path,
        {"at": {"clock": 4}, "do": "move", "vw": 0, "stages": [3, 1]},
        {"at": {"clock": 6}, "do": "memory", "vw": 0, "layers": [0], "policy": "recompute"},
        {"at": {"clock": 9}, "do": "add", "vw": 1, "stages": [1, 3]},
        {"at": {"clock": 9}, "do": "drop", "vw": 0},
        {"at": {"clock": 9}, "do": "add", "vw": 2, "stages": [4], "devices": [0]},
        {"at": {"clock": 40}, "do": "move", "vw": 0, "stages": [2, 2]},
        {"at": 3},
    )
    whole = read_cuts(path)
    assert [(cut.clock, cut.vw, cut.do, cut.stages, cut.by) for cut in whole] == [
        (4, 0, "move", (3, 1), "script"),
        (6, 0, "memory", (), "script"),
        (9, 0, "drop", (), "script"),
        (9, 1, "add", (), "script"),
        (9, 1, "move", (1, 3), "script"),
        (9, 2, "add", (4,), "script"),
    ]
    said = [str(cut).split(";")[0] for cut in whole[1:]]
    assert said == [
        "clock 6: virtual worker 0 has layers 0: recompute, by script",
        "clock 9: virtual worker 0 leaves, by script",
        "clock 9: virtual worker 1 joins, by script",
        "clock 9: virtual worker 1 is cut 1-3, by script",
        "clock 9: virtual worker 2 joins, cut 4, by script",
    ]
    found = [cut for cut in whole if cut.do == "move"]
    assert all(cut.before == pytest.approx(40.0) and cut.since == pytest.approx(40.0) for cut in found)


def test_a_cut_that_was_not_made_is_told_and_separates_no_rates(tmp_path: Path) -> None:
    path = run_of(tmp_path)
    slower_by(path, 1, 2.0, upto=20)
    at, vw, why = DecisionMoment(Clock(15)), VirtualWorkerIndex(1), "the best cut speeds the job up by 2.0 %"
    append_decision(path, StayDecision(at, "stay", vw, (3, 1), "straggler", why, 0.02, 1.0))
    at = DecisionMoment(Clock(25))
    append_decision(path, StayDecision(at, "stay", vw, (2, 2), "straggler", "it is cut best", 0.0, 1.0))
    at = DecisionMoment(Clock(30))
    append_decision(path, StayDecision(at, "stay", vw, (1, 3), "operator", "it ended before", None, 1.0))
    append_decision(path, decision(20, 1, 3, 1))
    first, made, second, third = read_cuts(path)
    assert [str(first), str(second), str(third)] == [
        "clock 15: virtual worker 1 stays as it is cut, not 3-1, by straggler; predicted +2 %",
        "clock 25: virtual worker 1 stays as it is cut, by straggler; predicted +0 %",
        "clock 30: virtual worker 1 stays as it is cut, not 1-3, by operator",
    ]
    assert (first.reason, first.before, first.since, first.measured_gain) == (why, None, None, None)
    assert [made.before, made.since] == pytest.approx([20.0, 40.0])
    assert (first.to_json()["do"], first.to_json()["stages"]) == ("stay", (3, 1))


def test_cuts_for_active_layers_count_once_they_are_reached(tmp_path: Path) -> None:
    path = run_of(tmp_path)
    cuts = tuple(ActivationCut(Clock(clock), VirtualWorkerIndex(0), (0, 3, 4)) for clock in (20, 40))
    (path / "plan.json").write_text(to_json(Plan, replace(folders.plan_of(2), activation_cuts=cuts)))
    (cut,) = read_cuts(path)
    assert (cut.clock, cut.vw, cut.stages, cut.by, cut.do) == (20, 0, (3, 1), "activate", "move")
    assert cut.measured_gain == pytest.approx(0.0)


def test_rates_end_at_the_next_cut_and_one_wave_is_no_rate(tmp_path: Path) -> None:
    path = run_of(tmp_path)
    slower_by(path, 0, 4.0, upto=12)
    for clock, stages, version in ((10, (3, 1), 1), (12, (2, 2), 2), (39, (1, 3), 3)):
        append_decision(path, decision(clock, 0, *stages, version=version, gain=None))
    first, second, last = read_cuts(path)
    assert [first.before, first.since, second.before, second.since] == pytest.approx([10.0, 10.0, 10.0, 40.0])
    assert (last.since, last.measured_gain, last.gain_text) == (None, None, "")


def test_cuts_beyond_the_checkpoint_of_a_rewind_did_not_happen(tmp_path: Path) -> None:
    path = run_of(tmp_path)
    folders.planned(path / "rewind-1")
    (path / "rewind-1" / "facts.json").write_text(json.dumps({"start": {"clock": 12}}))
    for clock, stages, version in ((10, (3, 1), 1), (14, (2, 2), 2)):
        append_decision(path, decision(clock, 0, *stages, version=version))
    append_decision(path / "rewind-1", decision(20, 0, 1, 3, version=2))
    (path / "rewind-2").mkdir()  # it was abandoned before it began
    assert [(cut.clock, cut.stages) for cut in read_cuts(path)] == [(10, (3, 1)), (20, (1, 3))]
    (path / "rewind-1" / "facts.json").write_text("{}")
    assert read_cuts(path) == ()


def test_what_cannot_be_read_is_not_there(tmp_path: Path) -> None:
    assert read_cuts(tmp_path) == ()
    path = run_of(tmp_path)
    (path / "job.json").write_text("[")
    (path / "decisions.jsonl").write_text("{}\n")
    assert read_cuts(path) == ()


def test_the_object_has_the_gain() -> None:
    cut = CutChange(3, 0, (1, 3), "script", before=10.0, since=15.0)
    assert cut.to_json()["measured_gain"] == 0.5
    assert cut.to_json()["stages"] == (1, 3)
    live = replace(cut, p=13, by="straggler")
    assert str(live).startswith("minibatch 13, without a barrier: virtual worker 0 is cut 1-3, by straggler; ")


def test_who_leaves_and_joins_as_layers_freeze(tmp_path: Path) -> None:
    path = run_of(tmp_path)
    at, reason = DecisionMoment(Clock(20)), "pipelines are compressed, as 4 layers with parameters are frozen"
    append_decision(path, MemberDecision(at, "drop", VirtualWorkerIndex(0), "freeze", reason, 1.0))
    append_decision(path, MemberDecision(at, "add", VirtualWorkerIndex(2), "freeze", reason, 1.0, (4,), (0,)))
    texts = [cut.change_text for cut in read_cuts(path)]
    assert texts == ["leaves", "joins, cut 4"]
    assert {(cut.by, cut.reason) for cut in read_cuts(path)} == {("freeze", reason)}
