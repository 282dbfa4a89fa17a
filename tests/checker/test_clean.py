"""Histories that obey the rules have no violation, whatever their shape, and however early they were cut short."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from hetpipe.checker import Report, check_run
from tests.checker.corruption import CLOCK_SHARD
from tests.checker.freeze_corruptions import DECIDED
from tests.checker.scenario import Resumed, Scenario, write_run
from tests.checker.simulator import Histories, as_lines, simulate

#: Policies that keep the strict 1F1B order, which needs a whole pipeline of minibatches in a wave.
STRICT = ("stash", "vertical", "double_buffer", "predict", "spectrain")
ONE_UPDATE_PER_WAVE = ("double_buffer", "flush")


def scenario_of(seed: int) -> Scenario:
    """A random small run."""
    draw = random.Random(seed)
    sync = draw.choice(["wsp", "wsp", "wsp", "none", "allreduce"])
    weights = draw.choice(["wave", "flush", *STRICT] if sync != "allreduce" else ONE_UPDATE_PER_WAVE)
    num_workers = 1 if sync == "none" else draw.choice([1, 2, 3])
    deepest = draw.choice([1, 2, 3, 4])
    num_per_wave = draw.choice([n for n in (1, 2, 4, 6) if n >= deepest or weights not in STRICT])
    staleness = draw.choice([0, 1, 4, None])
    minibatches = draw.choice([None, None, 5])
    scenario = Scenario(
        num_stages=tuple(deepest if sync == "allreduce" else draw.randint(1, deepest) for _ in range(num_workers)),
        num_shards=draw.choice([1, 2, 3]) if sync == "wsp" else 1,
        minibatches_per_wave=num_per_wave,
        staleness=staleness,
        sync=sync,
        deterministic=staleness is not None and draw.random() < 0.5,
        weights=weights,
        schedule=draw.choice({"wave": ["auto", "fifo"], "flush": ["auto", "1f1b", "gpipe"]}.get(weights, ["auto"])),
        accumulate=draw.choice([n for n in (1, 2, 3) if num_per_wave % n == 0]),
        num_samples=draw.choice([10, 29, 60]),
        batch_size=draw.choice([1, 2, 4]),
        epochs=None if minibatches else draw.choice([1, 2, 3]),
        minibatches=minibatches,
        checkpoint_every=draw.choice([None, 1, 2, 5]),
        evict_at=draw.choice([None, 1, 2, 3]) if num_workers > 1 and sync == "wsp" else None,
        drain_at=draw.choice([None, 1, 2]) if num_workers > 1 and sync == "wsp" else None,
        returns_with=draw.randint(1, deepest),
        stop_at=draw.choice([None, None, 2]),
        hosts=draw.choice([("n0",), ("n0", "n1")]),
        frozen=draw.choice([(), (), ((0, 2),), ((1, 3),), ((0, 1), (1, 4), (2, 5))]),
        seed=seed,
    )
    # Without `plan` lines nobody knows the cut of a worker that left, which may return with other stages.
    return replace(scenario, frozen=()) if scenario.drain_at else scenario


def judge(folder: Path, scenario: Scenario, histories: Histories, *, require_complete: bool = False) -> Report:
    """Write the run and check it."""
    write_run(folder, scenario, as_lines(histories))
    return check_run(folder, require_complete=require_complete)


def time_of(record: dict[str, object]) -> float:
    """The record's t."""
    return float(str(record["t"]))


@pytest.mark.parametrize("seed", range(60))
def test_a_whole_run_is_clean(seed: int, tmp_path: Path) -> None:
    scenario = scenario_of(seed)
    report = judge(tmp_path, scenario, simulate(scenario), require_complete=True)
    assert report.ok, "\n".join([str(scenario), *report.lines()])
    assert report.counts.complete
    assert report.minibatches > 0


def test_a_run_whose_layers_freeze_by_norms_is_clean_wherever_it_ends(tmp_path: Path) -> None:
    histories = simulate(DECIDED)
    report = judge(tmp_path / "whole", DECIDED, histories, require_complete=True)
    assert report.ok, "\n".join(report.lines())
    around = [time_of(one) for one in histories[CLOCK_SHARD] if one["event"] in ("norms", "freeze")]
    for number, end in enumerate(around):
        cut = {file: [record for record in records if time_of(record) < end] for file, records in histories.items()}
        report = judge(tmp_path / str(number), DECIDED, cut)
        assert report.ok, "\n".join([f"cut at {end}", *report.lines()])


@pytest.mark.parametrize("seed", range(200, 240))
def test_a_run_of_unequal_waves_is_clean(seed: int, tmp_path: Path) -> None:
    """Any policy, with evictions, leavers, short epochs: each worker is judged by the N of its own."""
    scenario, draw = scenario_of(seed), random.Random(seed)
    waves = tuple(scenario.minibatches_per_wave * draw.choice([1, 2, 3]) for _ in scenario.num_stages)
    unequal = replace(scenario, waves=waves)
    report = judge(tmp_path, unequal, simulate(unequal), require_complete=True)
    assert report.ok, "\n".join([str(unequal), *report.lines()])


@pytest.mark.parametrize("seed", range(60, 100))
def test_a_run_cut_short_is_clean(seed: int, tmp_path: Path) -> None:
    scenario = scenario_of(seed)
    histories = simulate(scenario)
    draw = random.Random(seed)
    for number in range(3):
        # Host by host: nothing says how the clocks of two hosts relate, but files of one host are cut at one time.
        end = draw.choice([time_of(record) for records in histories.values() for record in records])
        cut = {file: [record for record in records if time_of(record) < end] for file, records in histories.items()}
        if len(scenario.hosts) > 1 or not any(cut.values()):
            continue
        report = judge(tmp_path / str(number), scenario, cut)
        assert report.ok, "\n".join([str(scenario), f"cut at {end}", *report.lines()])


def test_some_random_runs_evict_drain_and_stop() -> None:
    decided = {
        record["event"] if record["event"] != "barrier" else record["reason"]
        for seed in range(60)
        for record in simulate(scenario_of(seed))["parameter_server-0.jsonl"]
    }
    assert {"evict", "join", "leave", "checkpoint+stop", "checkpoint+epoch+end"} <= decided


def test_random_runs_know_every_policy_alone_and_with_shards() -> None:
    scenarios = [scenario_of(seed) for seed in range(100)]
    alone, shared = ({s.weights for s in scenarios if s.sync == sync} for sync in ("none", "wsp"))
    assert alone == shared == {"wave", "flush", *STRICT}
    assert {s.weights for s in scenarios if s.sync == "allreduce" and len(s.num_stages) > 1} == {*ONE_UPDATE_PER_WAVE}
    assert {s.weights for s in scenarios if s.accumulate > 1 and max(s.num_stages) > 1} == {"wave", "flush", *STRICT}
    assert {s.schedule for s in scenarios} == {"auto", "1f1b", "fifo", "gpipe"}


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_resumed_run_starts_from_its_barrier(tmp_path: Path, *, deterministic: bool) -> None:
    start = Resumed(clock=5, epoch=1, used=tuple(range(0, 29, 3)), minibatches=20)
    scenario = Scenario(epochs=3, start=start, deterministic=deterministic)
    report = judge(tmp_path, scenario, simulate(scenario), require_complete=True)
    assert report.ok, "\n".join(report.lines())
    assert report.counts.samples == 29 - 10 + 29


def test_a_resumed_run_may_not_use_old_samples_again(tmp_path: Path) -> None:
    scenario = Scenario(start=Resumed(clock=5, used=tuple(range(9)), minibatches=5))
    lied = Scenario(start=Resumed(clock=5, used=tuple(range(10)), minibatches=5))
    report = judge(tmp_path, lied, simulate(scenario))
    assert report.kinds() == {"sample_twice": 1}


def test_founders_may_join_on_record_and_under_any_incarnation(tmp_path: Path) -> None:
    scenario = Scenario()
    histories = simulate(scenario)
    for records in histories.values():
        for record in records:
            if record.get("vw") == 1 and "incarnation" in record:
                record["incarnation"] = 3
    log = histories["parameter_server-0.jsonl"]
    for vw, incarnation in ((1, 3), (0, 0)):
        log.insert(1, {**log[0], "event": "join", "vw": vw, "incarnation": incarnation, "clock": 0})
    report = judge(tmp_path, scenario, histories, require_complete=True)
    assert report.ok, "\n".join(report.lines())


def test_worker_0_may_start_with_clock_0_that_it_makes_itself(tmp_path: Path) -> None:
    scenario = Scenario()
    histories = simulate(scenario)
    forward = next(r for r in histories["stage-0-0-0.jsonl"] if r["event"] == "forward")
    forward["t"] = -1.0
    assert judge(tmp_path / "own", scenario, histories).ok
    other = next(r for r in histories["stage-1-0-0.jsonl"] if r["event"] == "forward")
    other["t"] = -1.0
    assert judge(tmp_path / "other", scenario, histories).kinds() == {"unpublished_clock": 1}


@pytest.mark.parametrize(("kind", "staleness", "bound"), [("bsp", 0, 1), ("asp", None, None)])
def test_bsp_and_asp_name_a_staleness(kind: str, staleness: int | None, bound: int | None, tmp_path: Path) -> None:
    scenario = Scenario(staleness=staleness, deterministic=False)
    write_run(tmp_path, scenario, as_lines(simulate(scenario)))
    job = json.loads((tmp_path / "job.json").read_text())
    job["sync"].update(kind=kind, D=None)
    (tmp_path / "job.json").write_text(json.dumps(job))
    report = check_run(tmp_path)
    assert report.ok, "\n".join(report.lines())
    assert report.counts.bound_clock_distance == bound


def test_a_looser_run_breaks_a_tighter_promise(tmp_path: Path) -> None:
    """The same history judged under D = 0 must fail: the checker is not just agreeable."""
    scenario = Scenario(num_stages=(2, 2, 2), num_samples=120, staleness=4, deterministic=False, checkpoint_every=None)
    write_run(tmp_path, scenario, as_lines(simulate(scenario)))
    assert check_run(tmp_path).ok
    job = (tmp_path / "job.json").read_text()
    (tmp_path / "job.json").write_text(job.replace('"D":4', '"D":0'))
    kinds = check_run(tmp_path).kinds()
    assert kinds.get("stale_clock", 0) > 0
    assert kinds.get("clock_distance", 0) + kinds.get("commit_early", 0) > 0
