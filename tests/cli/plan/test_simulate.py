"""`hetpipe simulate` as a user calls it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from hetpipe.cli.app import app
from hetpipe.decide.planner.choose import choose_plan
from hetpipe.decide.planner.options import PlanOptions
from hetpipe.decide.simulator.prediction import predicted
from hetpipe.values.cluster import Node
from hetpipe.values.document import write_document
from tests.cli.fakes import FakeCoordinator, shell_with
from tests.decide.simulator.test_documents import JOB, plan_file

#: The keys of the format that no default stands for, and those a person would rather write.
ESSENTIAL = {
    "virtual_workers",
    "minibatches_per_wave",
    "max_minibatches_per_wave",
    "placement",
    "idle_devices",
    "predicted",
    "alternatives",
}

FILES = ("--plan", "plan.json", "--profile", "profile.json", "--cluster", "cluster.yaml")


@pytest.fixture(autouse=True)
def _inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_document(JOB.costs.profile, Path("profile.json"))
    write_document(JOB.costs.cluster, Path("cluster.yaml"))
    write_document(plan_file(), Path("plan.json"))


def simulated(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["simulate", *FILES, *arguments], obj=shell_with(FakeCoordinator(), Path.cwd()))


def as_json(*arguments: str) -> dict[str, Any]:
    result = simulated("--json", *arguments)
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found


def test_a_run_whose_layers_freeze_is_foretold_phase_by_phase() -> None:
    whole = as_json("--minibatches", "80")
    found = as_json("--minibatches", "80", "--freeze", "20=1", "--freeze", "30=2")
    assert {**found, "phases": None} == {**whole, "phases": None}
    phases = found["phases"]
    assert [(phase["clock"], phase["frozen"], phase["layers"]) for phase in phases] == [
        (0, 0, 0),
        (20, 1, 1),
        (30, 2, 2),
    ]
    assert phases[2]["seconds"] < phases[1]["seconds"], "of as many waves"
    (from_start,) = as_json("--minibatches", "80", "--freeze", "0=2")["phases"]
    assert (from_start["clock"], from_start["layers"]) == (0, 2)
    result = simulated("--minibatches", "80", "--freeze", "20=1")
    assert "from clock  F  frozen layers  virtual workers  samples/s" in result.stdout
    assert "together" in result.stdout
    assert "pipelines and cuts are those of the plan all the time" in result.stdout, "a plan file has no lineups"


def test_pipelines_change_where_layers_freeze() -> None:
    """The slowest stage has 10 ms of minibatches of 2, 4 and 6; with two layers frozen 8, or 6 behind a move."""
    freezes = ("--minibatches", "80", "--freeze", "20=2")
    stays, moved, compressed = (as_json(*freezes, *how)["phases"] for how in ((), ("--recut",), ("--compress",)))
    assert stays[0] == moved[0] == compressed[0]
    assert stays[1]["seconds"] / moved[1]["seconds"] == pytest.approx(8 / 6, rel=0.05)
    assert [(phase["clock"], phase["stages"]) for phase in compressed] == [(0, [2]), (20, [2]), (21, [1, 1])]
    assert compressed[2]["samples_per_second"] == pytest.approx(8 * 2 / 0.009, rel=0.1), "3 ms forward, 6 ms as before"
    result = simulated(*freezes, "--compress")
    assert "2 × 1 stage" in result.stdout
    assert "all the time" not in result.stdout
    (*_, cached) = as_json(*freezes, "--compress", "--cache")["phases"]
    assert cached["samples_per_second"] == pytest.approx(8 * 2 / 0.006, rel=0.1), "the frozen ones take no time"
    alone = simulated("--recut")
    assert alone.exit_code == 2
    assert "--recut, --compress and --cache say what happens where layers freeze; give --freeze CLOCK=F" in " ".join(
        alone.output.split()
    )


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (["9"], "--freeze is '9'; give a clock and a number of layers"),
        (["9=0"], "--freeze is '9=0'"),
        (["9=2", "12=1"], "give clocks in order, below the end of the run at 40"),
        (["40=1"], "below the end of the run at 40"),
        (["9=3"], "freezes 3 layers, but the model has 3 with trainable parameters"),
    ],
)
def test_layers_that_cannot_freeze_are_refused(values: list[str], said: str) -> None:
    result = simulated("--minibatches", "80", *(word for value in values for word in ("--freeze", value)))
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())


def test_a_run_whose_active_layers_change_is_foretold_with_and_without() -> None:
    """Minibatches of 2 | 4, 6 ms: without layer1 the slower stage has 6 ms, without layer2 4, without layer0 10."""
    whole = as_json()
    found = as_json("--active", "0=0,layer2", "--active", "20=layer0,layer1", "--active", "30=1,2")
    phases = found.pop("active_phases")
    assert found == whole
    assert [(phase["clock"], phase["inactive"], phase["cuts"]) for phase in phases] == [
        (0, [1], [[1, 2]]),
        (20, [2], [[1, 2]]),
        (30, [0], [[1, 2]]),
    ]
    assert [phase["samples_per_second"] for phase in phases] == pytest.approx(
        [8 / 0.006, 8 / 0.004, 8 / 0.010], rel=0.01
    )
    moved = as_json("--active", "30=1,2", "--recut")["active_phases"]
    assert moved[0]["cuts"] == [[2, 1]]
    assert moved[0]["samples_per_second"] == pytest.approx(8 / 0.006, rel=0.01)
    shown = simulated("--active", "0=0,2").stdout
    assert "from clock  inactive  virtual workers  samples/s" in shown
    assert "with all layers active 800 samples/s" in shown


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (["--active", "9"], "--active is '9'; give a clock and the layers"),
        (["--active", "9=stem"], "--active: `stem` matches no layer; the model's are layer0, layer1 and layer2"),
        (["--active", "9=7"], "--active: there is no layer 7; the model has the layers 0 to 2"),
        (["--active", "9=0", "--active", "9=1"], "--active has clocks 9, 9; give them in order"),
        (["--active", "9=0", "--freeze", "9=1"], "frozen layers and inactive ones are not combined"),
        (["--active", "9=0", "--compress"], "frozen layers and inactive ones are not combined"),
    ],
)
def test_layers_that_cannot_be_active_are_refused(values: list[str], said: str) -> None:
    result = simulated(*values)
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())


def test_json() -> None:
    found = as_json()
    assert set(found) == {
        "samples_per_second",
        "waiting_seconds",
        "idle_seconds",
        "max_clock_distance",
        "cross_node_bytes_per_minibatch",
        "utilisation",
    }
    # Both minibatches of a wave are in flight; the second stage, 10 ms a minibatch, is the bottleneck.
    assert found["samples_per_second"] == pytest.approx(8 / 0.010, rel=0.01)
    assert set(found["waiting_seconds"]) == set(found["idle_seconds"]) == {"0"}
    assert set(found["utilisation"]) == {"n0/0", "n0/2"}
    assert found["cross_node_bytes_per_minibatch"] == 0.0


def test_the_keys_of_a_plan_that_a_person_writes_suffice() -> None:
    """No model, batch size, allocation, policy, D, shards, S_i: they have defaults, or follow from the other files."""
    full = as_json()
    plan = plan_file().model_dump(mode="json", include=ESSENTIAL)
    for stage in plan["virtual_workers"][0]["stages"]:
        del stage["in_flight"]
    Path("plan.json").write_text(json.dumps(plan))
    assert as_json("--D", "1") == full
    assert "D = 0" in simulated().stdout


def test_a_plan_for_minibatches_of_another_size() -> None:
    """`parallel` chooses the size and scales the profile, so the simulation scales it alike; others keep to it."""
    devices = JOB.costs.cluster.model_copy(update={"nodes": (Node(name="n0", devices=("t0", "t0")),)})
    write_document(devices, Path("cluster.yaml"))
    options = PlanOptions(allocation="parallel", weights="double_buffer", max_batch=12)
    document = choose_plan(JOB.costs.profile, devices, options, predict=predicted)
    assert document.batch_size not in (None, JOB.costs.profile.batch_size)
    write_document(document, Path("plan.json"))
    assert as_json()["samples_per_second"] == document.predicted.samples_per_second
    assert f"the plan's minibatches have {document.batch_size} samples, the profile's 8" in simulated().stdout
    write_document(document.model_copy(update={"allocation": "ED"}), Path("plan.json"))
    refused = simulated()
    assert refused.exit_code == 2
    assert "use the profile that the plan was made with, or plan again with this one" in refused.stderr


def test_people_read_one_screen() -> None:
    result = simulated()
    assert result.exit_code == 0, result.output
    assert "samples/s in the steady state, D = 1" in result.stdout
    assert "n0/2" in result.stdout
    assert len(result.stdout.splitlines()) < 25


def test_options_reach_the_simulation() -> None:
    base = as_json("--minibatches", "80")
    slow = as_json("--minibatches", "80", "--straggler", "n0/2=2")
    assert slow["samples_per_second"] == pytest.approx(base["samples_per_second"] / 2, rel=0.01)
    jitter = [as_json("--minibatches", "80", "--jitter", "0.2", "--seed", seed) for seed in ("1", "1", "2")]
    assert jitter[0] == jitter[1] != jitter[2]
    assert "no bound" in simulated("--D", "inf").stdout
    assert "D = 3" in simulated("--D", "3").stdout


def test_the_schedule_is_the_plans() -> None:
    """Two minibatches fill the pipeline either way, so a wave lasts Σ t + max t; GPipe has two slowest stages of it."""
    rates = {}
    for schedule in ("auto", "1f1b", "gpipe"):
        write_document(plan_file(weights="flush", schedule=schedule), Path("plan.json"))
        rates[schedule] = as_json("--D", "inf")["samples_per_second"]
    assert rates["auto"] == rates["1f1b"]
    assert rates["gpipe"] == pytest.approx(8 * 2 / 0.022, rel=0.01)
    write_document(plan_file(weights="stash", schedule="gpipe"), Path("plan.json"))
    refused = simulated()
    assert refused.exit_code == 2
    assert "the schedule is gpipe, but the weight versions of `stash` are defined by the strict 1F1B" in refused.stderr


def test_a_plan_without_parameter_servers() -> None:
    write_document(plan_file(has_shards=False, shards=[], placement={}), Path("plan.json"))
    result = simulated()
    assert result.exit_code == 0, result.output
    assert "samples/s in the steady state, without parameter servers" in result.stdout


def test_a_trace_has_one_process_per_virtual_worker() -> None:
    result = simulated("--minibatches", "4", "--trace", "trace.json", "--no-contention")
    assert result.exit_code == 0, result.output
    events = json.loads(Path("trace.json").read_text())["traceEvents"]
    names = {(event["tid"], event["args"]["name"]) for event in events if event["name"] == "thread_name"}
    assert {(0, "stage 0"), (100, "stage 1")} <= names
    computed = [event["name"] for event in events if event.get("tid") == 100 and event["ph"] == "X"]
    assert computed == ["F1", "B1", "F2", "B2", "F3", "B3", "F4", "B4"]
    moved = [event["name"] for event in events if event.get("cat") == "transfer"]
    assert moved.count("send") == 8
    assert moved.count("push") == 2 * 3  # each stage has two shards for its layers, the first stage one


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--D", "many"], "give a whole number of waves, or inf"),
        (["--straggler", "n0/2"], "give a device and its slowdown factor"),
        (["--straggler", "n7/2=3"], "the plan uses no device 'n7/2'"),
        (["--minibatches", "0"], "minibatches must be at least 1"),
        (["--trace", "nowhere/trace.json"], "give --trace a file in a folder that exists"),
    ],
)
def test_what_cannot_be_done_is_said(arguments: list[str], said: str) -> None:
    result = simulated(*arguments)
    assert result.exit_code == 2
    assert said in result.stderr
