"""Kills, evictions and strange lines: what a checker must excuse, and what it must not."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetpipe.checker import Report, check_run
from hetpipe.checker.events import Barrier, Origin
from hetpipe.checker.rules import RunRule
from hetpipe.checker.timeline import Life, Timeline
from tests.checker.scenario import Record, Scenario, write_run
from tests.checker.simulator import Histories, as_lines, simulate

CLOCK_SHARD = "parameter_server-0.jsonl"
OTHER_SHARD = "parameter_server-1.jsonl"


def judge_lines(folder: Path, scenario: Scenario, lines: dict[str, list[str]]) -> Report:
    write_run(folder, scenario, lines)
    return check_run(folder)


def cut_at(histories: Histories, t: float) -> Histories:
    return {file: [record for record in records if float(str(record["t"])) <= t] for file, records in histories.items()}


def evicting_run() -> tuple[Scenario, Histories, Record]:
    """A run with an eviction and a rejoin; the evict record last."""
    scenario = Scenario(num_samples=120, evict_at=2, checkpoint_every=None, deterministic=False)
    histories = simulate(scenario)
    evict = next(record for record in histories[CLOCK_SHARD] if record["event"] == "evict")
    return scenario, histories, evict


def test_a_run_without_end_is_a_violation_only_where_asked_for(tmp_path: Path) -> None:
    scenario = Scenario()
    write_run(tmp_path, scenario, as_lines(cut_at(simulate(scenario), 0.1)))
    assert check_run(tmp_path).ok
    report = check_run(tmp_path, require_complete=True)
    assert report.kinds() == {"incomplete": 1}
    assert "cut short" in report.lines()[0]


def test_a_torn_last_line_is_what_a_kill_leaves(tmp_path: Path) -> None:
    scenario = Scenario()
    histories = simulate(scenario)
    lines = as_lines(cut_at(histories, 0.1))
    lines[OTHER_SHARD][-1] = lines[OTHER_SHARD][-1][:30]
    assert judge_lines(tmp_path / "killed", scenario, lines).ok
    lines[OTHER_SHARD][0] = lines[OTHER_SHARD][0][:30] + "\n"
    assert judge_lines(tmp_path / "middle", scenario, lines).kinds()["malformed_line"] == 1
    whole = as_lines(histories)
    whole[OTHER_SHARD].append('{"t": 0.5, "ho')
    assert judge_lines(tmp_path / "ended", scenario, whole).kinds() == {"malformed_line": 1}


def test_a_history_whose_disk_failed_is_called_incomplete_and_blames_nobody(tmp_path: Path) -> None:
    scenario = Scenario()
    lines = as_lines(simulate(scenario))
    del lines[OTHER_SHARD][len(lines[OTHER_SHARD]) // 2 :]
    assert not judge_lines(tmp_path, scenario, lines).ok
    (tmp_path / "history" / f"{OTHER_SHARD}.incomplete").touch()
    report = check_run(tmp_path)

    assert (report.violations, report.lacking, report.ok) == ((), (f"history/{OTHER_SHARD}",), False)
    assert "history incomplete" in report.lines()[-1]
    assert report.to_json()["lacking"] == [f"history/{OTHER_SHARD}"]


def test_a_killed_worker_may_leave_a_torn_line_in_a_run_that_survived(tmp_path: Path) -> None:
    scenario, histories, _ = evicting_run()
    lines = as_lines(histories)
    lines["stage-1-0-0.jsonl"].append('{"t": 0.5, "ho')
    assert judge_lines(tmp_path / "evicted", scenario, lines).ok
    lines["stage-0-0-0.jsonl"].append('{"t": 0.5, "ho')
    assert judge_lines(tmp_path / "member", scenario, lines).kinds() == {"malformed_line": 1}


def test_what_was_committed_needs_its_passes_even_in_a_run_cut_short(tmp_path: Path) -> None:
    scenario = Scenario()
    histories = cut_at(simulate(scenario), 0.1)
    steps = [record for record in histories["stage-0-0-0.jsonl"] if record["event"] == "step"]
    histories["stage-0-0-0.jsonl"].remove(steps[1])
    assert judge_lines(tmp_path, scenario, as_lines(histories)).kinds() == {"step_missing": 1}


def test_a_torn_wave_below_a_published_clock_is_one_even_in_a_run_cut_short(tmp_path: Path) -> None:
    scenario = Scenario()
    histories = cut_at(simulate(scenario), 0.1)
    applies = [record for record in histories[OTHER_SHARD] if record["event"] == "apply"]
    histories[OTHER_SHARD].remove(applies[0])
    report = judge_lines(tmp_path / "below", scenario, as_lines(histories))
    assert (report.torn_waves, report.kinds()) == (1, {"torn_wave": 1})


def test_an_evicted_life_may_not_use_what_is_published_later(tmp_path: Path) -> None:
    scenario, histories, evict = evicting_run()
    zombie = histories["stage-1-0-0.jsonl"]
    last = max(int(str(record["p"])) for record in zombie if record["event"] == "forward")
    publishes = [record for record in histories[CLOCK_SHARD] if record["event"] == "publish"]
    later = next(record for record in publishes if float(str(record["t"])) > float(str(evict["t"])))
    forward = next(record for record in reversed(zombie) if record["event"] == "forward")
    zombie.append({**forward, "t": 9.0, "p": last + 1, "clock": later["clock"], "local_through": last - 1})
    report = judge_lines(tmp_path, scenario, as_lines(histories))
    assert "old_incarnation" in report.kinds(), "\n".join(report.lines())


@pytest.mark.parametrize("file", [CLOCK_SHARD, OTHER_SHARD])
def test_a_shard_that_knows_of_an_eviction_stages_nothing_of_that_life(file: str, tmp_path: Path) -> None:
    scenario, histories, _ = evicting_run()
    staged = next(record for record in histories[file] if record["event"] == "staged" and record["vw"] == 1)
    histories[file].append({**staged, "wave": 3, "t": 9.0})
    assert judge_lines(tmp_path, scenario, as_lines(histories)).kinds() == {"old_incarnation": 1}


def test_a_stage_of_an_older_term_is_served_no_newer_clock(tmp_path: Path) -> None:
    scenario = Scenario()
    histories = simulate(scenario)
    publish = next(r for r in histories[CLOCK_SHARD] if r["event"] == "publish" and r["clock"] == 3)
    for record in histories[CLOCK_SHARD][histories[CLOCK_SHARD].index(publish) :]:
        record["term"] = 2
    report = judge_lines(tmp_path, scenario, as_lines(histories))
    # Three minibatches behind the barrier at clock 3, two stages each.
    assert report.kinds() == {"old_term": 6}


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"incarnation": 0}, "old_incarnation"),
        ({"clock": 999}, "membership"),
        ({"vw": 9}, "membership"),
    ],
)
def test_a_join_must_fit(fields: Record, kind: str, tmp_path: Path) -> None:
    scenario, histories, _ = evicting_run()
    join = next(record for record in histories[CLOCK_SHARD] if record["event"] == "join")
    join.update(fields)
    assert kind in judge_lines(tmp_path, scenario, as_lines(histories)).kinds()


def test_only_members_are_evicted_and_nobody_joins_twice(tmp_path: Path) -> None:
    scenario, histories, evict = evicting_run()
    log = histories[CLOCK_SHARD]
    log.insert(log.index(evict) + 1, dict(evict))
    assert judge_lines(tmp_path / "evict", scenario, as_lines(histories)).kinds() == {"old_incarnation": 1}
    log.remove(evict)
    join = next(record for record in log if record["event"] == "join")
    log.insert(log.index(join) + 1, dict(join))
    assert judge_lines(tmp_path / "join", scenario, as_lines(histories)).kinds() == {"membership": 1}


@pytest.mark.parametrize(
    "line",
    [
        "not json\n",
        "[1, 2]\n",
        '{"t":"soon","host":"n0","pid":1,"role":"stage","term":1,"event":"publish","clock":1}\n',
        '{"t":1.0,"host":"n0","pid":1,"role":"stage","term":1,"event":"publish"}\n',
        '{"t":1.0,"host":"n0","pid":1,"role":"stage","term":1,"event":"publish","clock":true}\n',
        '{"t":1.0,"host":"n0","pid":1,"role":"stage","term":1,"event":"publish","clock":-1}\n',
        '{"t":1.0,"host":7,"pid":1,"role":"stage","term":1,"event":"publish","clock":1}\n',
        '{"t":1.0,"host":"n0","pid":1,"role":"s","term":1,"event":"used","vw":0,"wave":9,"epoch":0,"indices":["a"]}\n',
        "\n",
    ],
)
def test_a_line_that_is_no_event_is_reported_where_it_stands(line: str, tmp_path: Path) -> None:
    scenario = Scenario()
    lines = as_lines(simulate(scenario))
    lines[OTHER_SHARD].insert(4, line)
    report = judge_lines(tmp_path, scenario, lines)
    assert report.kinds() == {"malformed_line": 1}
    assert report.violations[0].where == f"history/{OTHER_SHARD}:5"


def test_unknown_events_and_keys_are_counted_not_judged(tmp_path: Path) -> None:
    scenario = Scenario()
    histories = simulate(scenario)
    log = histories[CLOCK_SHARD]
    log[0]["colour"] = "blue"
    log.append({**log[0], "event": "sunrise"})
    report = judge_lines(tmp_path, scenario, as_lines(histories))
    assert report.ok
    assert report.counts.unknown_events == 1
    assert any("1 line of events" in line for line in report.lines())


def leaving_run() -> tuple[Scenario, Histories, Record]:
    """A run in which a virtual worker leaves, and comes back with more stages than the plan knows; the leave last."""
    scenario = Scenario(num_samples=120, drain_at=2, returns_with=3, checkpoint_every=4, deterministic=False)
    histories = simulate(scenario)
    leave = next(record for record in histories[CLOCK_SHARD] if record["event"] == "leave")
    return scenario, histories, leave


def test_a_later_life_has_the_stages_that_its_join_says(tmp_path: Path) -> None:
    scenario, histories, _ = leaving_run()
    assert "stage-1-1-2.jsonl" in histories
    assert judge_lines(tmp_path / "whole", scenario, as_lines(histories)).ok
    join = next(record for record in histories[CLOCK_SHARD] if record["event"] == "join")
    staged = [r for r in histories[OTHER_SHARD] if r["event"] == "staged" and r["incarnation"] == 1]
    histories[OTHER_SHARD].remove(staged[0])
    assert judge_lines(tmp_path / "part", scenario, as_lines(histories)).kinds() == {"committed_unstaged": 1}
    del join["num_stages"]
    assert "membership" in judge_lines(tmp_path / "plan", scenario, as_lines(histories)).kinds()


def test_what_a_life_did_before_it_left_counts(tmp_path: Path) -> None:
    """All of it, also where the run was cut short: nothing excuses what is missing."""
    scenario, histories, leave = leaving_run()
    histories = cut_at(histories, float(str(leave["t"])) + 0.01)
    assert judge_lines(tmp_path / "whole", scenario, as_lines(histories)).ok
    steps = [record for record in histories["stage-1-0-1.jsonl"] if record["event"] == "step"]
    histories["stage-1-0-1.jsonl"].remove(steps[-1])
    assert judge_lines(tmp_path / "step", scenario, as_lines(histories)).kinds() == {"step_missing": 1}


def test_nothing_counts_after_a_life_has_left(tmp_path: Path) -> None:
    scenario, histories, leave = leaving_run()
    log, stage = histories[CLOCK_SHARD], histories["stage-1-0-0.jsonl"]
    clock = int(str(leave["clock"]))
    forward = next(record for record in reversed(stage) if record["event"] == "forward")
    late = {**forward, "p": clock * 2 + 1, "clock": clock, "local_through": clock * 2, "t": float(str(leave["t"]))}
    lines = as_lines({**histories, "stage-1-0-0.jsonl": [*stage, late]})
    assert "membership" in judge_lines(tmp_path / "forward", scenario, lines).kinds()
    commit = {**leave, "event": "commit", "wave": clock, "samples": 0}
    after = [*log[: log.index(leave) + 1], commit, *log[log.index(leave) + 1 :]]
    assert (
        "old_incarnation" in judge_lines(tmp_path / "c", scenario, as_lines({**histories, CLOCK_SHARD: after})).kinds()
    )


@pytest.mark.parametrize(
    ("fields", "kind"),
    [({"clock": 1}, "membership"), ({"incarnation": 4}, "old_incarnation"), ({"vw": 9}, "membership")],
)
def test_a_leave_must_fit(fields: Record, kind: str, tmp_path: Path) -> None:
    scenario, histories, leave = leaving_run()
    leave.update(fields)
    assert kind in judge_lines(tmp_path, scenario, as_lines(histories)).kinds()


def test_who_leaves_without_its_last_wave_is_seen(tmp_path: Path) -> None:
    scenario, histories, leave = leaving_run()
    log = histories[CLOCK_SHARD]
    before = [r for r in log[: log.index(leave)] if r["event"] in {"commit", "used"} and r["vw"] == 1]
    for record in before[-2:]:
        log.remove(record)
    assert {"membership", "publish_early"} <= judge_lines(tmp_path, scenario, as_lines(histories)).kinds().keys()


def test_the_end_of_a_run_binds_those_that_were_there_when_its_barrier_was_set() -> None:
    """Without other members it may lie before what one had begun that was evicted before."""
    origin = Origin(0.0, "n0", 1, "parameter_server", 1, CLOCK_SHARD, 1)
    line = Timeline(0, RunRule(2, 1))
    line.lives = {(0, number): Life(0, number, 0, 1, (0, 4)) for number in range(3)}
    assert line.end_for(0, 0) is None, "it has not ended"
    line.end, line.barrier_positions = Barrier(origin, 14, frozenset({"stop"})), {14: 5}
    for number, position in enumerate((4, 6, None)):
        line.lives[0, number].eviction_position = position
    assert [line.end_for(0, number) for number in range(3)] == [None, 14, 14]
