"""A stage is ten times slower than planned: it is named, layers move away from it, and nobody is lost."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from hetpipe.decide.elastic.script import script_of
from hetpipe.job.elastic import MoveLine
from hetpipe.observe.metrics import waves_by_worker
from hetpipe.runs.cuts import read_cuts
from hetpipe.server.decisions_file import read_decisions
from hetpipe.values.decisions import MoveDecision, MoveJudgement
from hetpipe.values.plan import Plan
from hetpipe.values.wire import from_json
from tests.polling import wait_until
from tests.processes.harness import Train, write_job
from tests.processes.test_lives import stop, waves

pytestmark = [pytest.mark.processes, pytest.mark.exhaustive, pytest.mark.timeout(180)]

CLUSTER: dict[str, Any] = {
    "device_types": {"cpu": {"memory_bytes": 1 << 30}},
    "nodes": [{"name": "n0", "devices": ["cpu"] * 4}],
    "links": {
        "intra_node": {"bandwidth_bytes_per_second": 8e9},
        "inter_node": {"bandwidth_bytes_per_second": 1e9},
    },
}

#: As many as the model of `tests.models` has, each of 16 ms for a minibatch.
LAYERS = [
    {
        "name": str(index),
        "parameter_bytes": 100,
        "activation_bytes": 100,
        "output_bytes": 100,
        "forward_ms": {"cpu": 8.0},
        "backward_ms": {"cpu": 8.0},
    }
    for index in range(5)
]

#: Devices are played, one of them ten times slower than the profile says that the run is planned by.
PLAYED: dict[str, Any] = {
    "file": CLUSTER,
    "profile": {"version": 1, "model": "small", "batch_size": 4, "input_bytes": 100, "layers": LAYERS},
    "emulate": True,
    "emulate_links": False,
    "stragglers": {"n0/3": 10.0},
}


def test_layers_move_away_from_a_stage_that_is_ten_times_slower(tmp_path: Path) -> None:
    job = write_job(
        tmp_path,
        epochs=100_000,
        checkpoint={"every_waves": 20, "keep": 2},
        cluster=PLAYED,
        survive={"patience_waves": 3},
        optimizer={"name": "AdamW", "lr": 0.01},
    )
    train = Train(tmp_path, job)
    slow: list[dict[str, Any]] = []

    def is_named() -> bool:
        slow[:] = train.status().get("slow", [])
        return bool(slow) or train.process.poll() is not None

    wait_until(is_named, timeout_seconds=90.0, what="a straggler in the status")
    wait_until(
        lambda: "event=replan_judged" in train.stderr() or train.process.poll() is not None,
        timeout_seconds=90.0,
        what="what the new plan has gained",
    )
    outcome = stop(train)

    assert [(one["vw"], one["stage"]) for one in slow] == [(1, 1)]
    assert slow[0]["factor"] > 3.0, "how the others fare counts, too, and the machine may be busy"
    assert "event=worker_replanned vw=1 life=1 before=2-3 after=4-1" in outcome.stderr
    gained = re.search(r"event=replan_judged vw=1 gained_percent=([\d.]+)", outcome.stderr)
    assert gained is not None
    assert float(gained[1]) > 100.0
    assert outcome.result["deaths"] == {"0": 0, "1": 0}
    assert not waves(train, 1, 1), "no process was started"
    decided, judged = read_decisions(train.run_dir)[:2]
    assert isinstance(decided, MoveDecision)
    assert isinstance(judged, MoveJudgement)
    assert (decided.vw, decided.stages, decided.version, decided.by) == (1, (4, 1), 1, "straggler")
    assert decided.predicted_gain is not None
    assert decided.predicted_gain > 1.0
    assert (judged.vw, judged.version) == (1, 1)
    assert [(line.vw, line.stages) for line in script_of([decided, judged]) if isinstance(line, MoveLine)] == [
        (1, (4, 1))
    ]
    first: Plan = from_json(Plan, (train.run_dir / "plan.json").read_text())
    assert [stage.last_layer for stage in first.virtual_workers[1].stages] == [2, 5]
    assert not (train.run_dir / "plans").exists()


def test_a_script_moves_layers_between_devices_that_play_others(tmp_path: Path) -> None:
    """The slow stage has one layer instead of three from clock 4 on, and recomputes it from clock 9 on."""
    script = [
        {"at": {"clock": 4}, "do": "move", "vw": 1, "stages": [4, 1]},
        {"at": {"clock": 9}, "do": "memory", "vw": 1, "layers": [4], "policy": "recompute"},
    ]
    train = Train(
        tmp_path, write_job(tmp_path, minibatches=28, epochs=None, cluster=PLAYED, elastic={"script": script})
    )
    outcome = train.finish(120.0)
    assert outcome.returncode == 0, outcome.stderr
    cut, memory = read_cuts(train.run_dir)
    assert (cut.do, cut.clock, cut.vw, cut.stages, cut.by) == ("move", 4, 1, (4, 1), "script")
    assert (memory.do, memory.clock, memory.vw, memory.policies) == ("memory", 9, 1, "layers 4: recompute")
    assert cut.measured_gain is not None
    assert cut.measured_gain > 1.0, "480 ms before, 160 ms since"
    own = [one for one in waves_by_worker(train.run_dir)[1] if one.wave.wave >= 5]
    kept, recomputed = own[3].t - own[0].t, own[8].t - own[5].t
    assert recomputed > 1.2 * kept, "240 ms for 160 ms"
