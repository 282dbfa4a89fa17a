"""The program itself on a small job, with every process real."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from hetpipe.cli.app import app
from hetpipe.values.identity import Peer
from tests.certs.cluster import AGENT, COORDINATOR, OPERATOR, SHARD, cluster
from tests.cli.fakes import RESULT
from tests.models import data32, loss, mlp32
from tests.polling import wait_until
from tests.processes.harness import HETPIPE, ROOT, Train, is_alive, write_job
from tests.reference.executor import ReferenceRun, run_reference

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]


def hetpipe(*arguments: str | Path, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = [str(HETPIPE), *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=90.0, check=False)


def in_this_process(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """The same of a command that only reads: a program of its own would take a second to start, and do no more."""
    done = CliRunner().invoke(app, [*map(str, arguments)])
    return subprocess.CompletedProcess(arguments, done.exit_code, done.stdout, done.stderr)


def last_line(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return value


def test_a_run_and_everything_one_does_with_it(tmp_path: Path) -> None:
    peak = 5e10
    sync = {"kind": "wsp", "D": 1, "minibatches_per_wave": 2, "deterministic": True}
    job, run_dir = write_job(tmp_path, cluster={"file": cpus_with_peak(peak)}, sync=sync), tmp_path / "run"
    trained = hetpipe("train", job, "--json", "--run-dir", run_dir)
    assert trained.returncode == 0, trained.stderr
    stage_logs = "".join(path.read_text() for path in (run_dir / "logs").glob("*stage*"))
    chosen = [json.loads(line) for line in stage_logs.splitlines() if '"transport_chosen"' in line]
    assert {each["transport"] for each in chosen} == {"shared memory"}
    assert sum("link" in each for each in chosen) == 4, "one for each stage's link"
    result = last_line(trained)
    assert list(result) == list(RESULT)
    assert result["staleness"]["violations"] == 0
    assert result["samples"] == 2 * 46
    assert (result["proof"]["scope"], result["proof"]["equality"]) == ("whole model", "bits")
    devices = sum(
        len(worker["stages"]) for worker in json.loads((run_dir / "plan.json").read_text())["virtual_workers"]
    )
    used = result["samples_per_second"] * result["proof"]["work"]["flops_per_sample"]
    assert result["model_flops_utilisation"] == pytest.approx(used / (devices * peak), abs=1e-5)
    assert result["model_flops_utilisation_reason"] is None
    assert "state=inspecting" in trained.stderr
    assert "the layers compute what the model computes, to the bit (proof: whole model, " in trained.stderr

    trace = json.loads((run_dir / "trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in trace} == {0, 1}
    assert {"F1", "B1"} <= {event["name"] for event in trace}
    assert all((run_dir / "logs" / f"{name}.log").stat().st_size for name in ("coordinator", "agent", "hetpipe"))
    assert json.loads((run_dir / "result.json").read_text()) == {"state": "finished", **result}

    status = last_line(in_this_process("status", run_dir, "--json"))
    assert (status["state"], status["clocks"], status["processes"]) == ("finished", result["clocks"], [])
    assert status["proof"] == result["proof"]
    assert status["speed"].items() <= result.items()
    assert "inspection-" not in (run_dir / "logs" / "agent.log").read_text(), "the model is inspected once"
    assert "model_proven" in (run_dir / "logs" / "coordinator.log").read_text()
    assert last_line(in_this_process("check", run_dir, "--json"))["minibatches"] == result["minibatches"]
    exported = in_this_process("export", run_dir, tmp_path / "out.safetensors")
    assert exported.returncode == 0, exported.stderr
    weights = load_file(tmp_path / "out.safetensors")
    mlp32().load_state_dict(weights)
    for name, expected in run_reference(SMALL).weights.items():
        assert torch.equal(weights[name], expected), name

    finished = in_this_process("train", "--resume", run_dir, "--json")
    assert finished.returncode == 2
    assert "is finished: it trained 2 of 2 epochs" in last_line(finished)["errors"][0]


#: The job of `write_job`, where it is deterministic.
SMALL = ReferenceRun(
    model=mlp32,
    loss=loss,
    train=data32(),
    batch_size=4,
    seed=3,
    optimizer="SGD",
    arguments={"lr": 0.05, "momentum": 0.9},
    num_virtual_workers=2,
    minibatches_per_wave=2,
    staleness=1,
    epochs=2,
)


def cpus_with_peak(flops: float) -> dict[str, Any]:
    """A cluster that knows of CPU devices what the catalogue does not."""
    link = {"bandwidth_bytes_per_second": 1e9}
    return {
        "device_types": {"cpu": {"memory_bytes": 1 << 30, "peak_flops": flops}},
        "nodes": [{"name": "here", "devices": ["cpu"]}],
        "links": {"intra_node": link, "inter_node": link},
    }


@pytest.mark.exhaustive
def test_a_run_that_is_measured_and_planned_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    job = write_job(tmp_path, workers={})
    runs = [hetpipe("train", job, "--run-dir", tmp_path / name) for name in ("first", "second")]
    for trained in runs:
        assert trained.returncode == 0, trained.stderr
        assert "the run is planned first: the model is measured, unmeasured links are assumed" in trained.stdout
        assert re.search(
            r"predicted [\d.]+ samples/s for a run of this length \([\d.]+ with full pipelines\), measured [\d.]+ over",
            trained.stdout,
        )
    (measurement,) = (tmp_path / "cache" / "hetpipe" / "profiles").iterdir()
    profiles = [(tmp_path / name / "profile.json").read_text() for name in ("first", "second")]
    assert profiles[0] == profiles[1], "the second run measured nothing"
    assert json.loads(profiles[0])["layers"][0]["forward_ms"].keys() == {"cpu"}

    # `hetpipe profile` finds the same measurement, and the files of the run are those that simulate takes.
    assert "cpu was measured" in hetpipe("profile", job).stdout
    assert list(measurement.parent.iterdir()) == [measurement]
    files = [tmp_path / "first" / name for name in ("forecast.json", "profile.json", "cluster.yaml")]
    simulated = hetpipe("simulate", "--plan", files[0], "--profile", files[1], "--cluster", files[2], "--json")
    assert simulated.returncode == 0, simulated.stderr
    predicted = json.loads(files[0].read_text())["predicted"]
    assert last_line(simulated)["samples_per_second"] == pytest.approx(predicted["samples_per_second"])
    assert predicted["model_flops_utilisation_reason"].startswith("no peak is known for cpu")
    assert any(layer["forward_flops"] for layer in json.loads(profiles[0])["layers"])


@pytest.mark.exhaustive
def test_user_code_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a package of the user's called `services`, though first on the path, is in nobody's way."""
    (tmp_path / "services").mkdir()
    for name in ("__init__.py", "model.py"):
        (tmp_path / "services" / name).write_text("from tests.models import data32\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    job = write_job(tmp_path, model="services.model:undefined", data={"train": "services.model:data32"})
    outcome = hetpipe("train", job, "--json", "--run-dir", tmp_path / "run", cwd=tmp_path)
    assert outcome.returncode == 2, outcome.stderr
    assert last_line(outcome) == {"errors": ["model: `services.model` has no `undefined`; define it there"]}
    assert "Traceback" not in outcome.stdout + outcome.stderr
    # Services start while the model is inspected; nobody told them of the job, and they ended with the command.
    assert not (tmp_path / "run" / "plan.json").exists()
    assert not [path for path in Path("/proc").glob("[0-9]*/cmdline") if str(tmp_path) in command_line(path)]
    assert last_line(in_this_process("status", tmp_path / "run", "--json"))["state"] == "failed"


def command_line(path: Path) -> str:
    """Of a process, by its file in /proc; empty once it is gone."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


@pytest.mark.exhaustive
def test_a_model_that_would_train_to_something_else_never_trains(tmp_path: Path) -> None:
    job = write_job(tmp_path, model="tests.models:tied_in_secret", data={"train": "tests.models:tokens"})
    outcome = hetpipe("train", job, "--json", "--run-dir", tmp_path / "run")
    assert outcome.returncode == 2
    (sentence,) = last_line(outcome)["errors"]
    assert "first difference at layer 2 (output 0, " in sentence
    assert "Parameter 2.tied[0].weight is used there but not registered." in sentence
    assert not (tmp_path / "run" / "plan.json").exists()


@pytest.mark.exhaustive
def test_killing_the_program_leaves_no_process_and_an_honest_status(tmp_path: Path) -> None:
    train = Train(tmp_path, write_job(tmp_path, epochs=100_000, workers={"count": 2}))
    train.wait_for_checkpoint()
    # Here and not in a short run, which may be over before a shard has told of its clocks.
    wait_until(lambda: "vw1.ahead=" in train.stderr(), timeout_seconds=15.0, what="line about progress")
    everyone = [process["pid"] for process in train.status()["processes"]]
    assert len(everyone) == 5
    os.kill(train.process.pid, signal.SIGKILL)
    assert train.finish().returncode == -signal.SIGKILL
    wait_until(lambda: not any(map(is_alive, everyone)), timeout_seconds=15.0, what=f"end of {everyone}")
    status = train.status()
    assert status["state"] == "died"
    assert {process["state"] for process in status["processes"]} == {"gone"}


@contextmanager
def service(name: str, *arguments: str) -> Iterator[str]:
    """A service started by hand; its address."""
    command = [sys.executable, "-m", "hetpipe", "serve", name, *arguments, "--exit-with-parent"]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())["address"]
        finally:
            process.terminate()
            process.communicate(timeout=20.0)


@pytest.mark.exhaustive
def test_a_job_on_services_with_tls_that_were_started_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # What the environment names is for the commands; services are told their own.
    monkeypatch.setenv("HETPIPE_TLS", str(cluster().tls(OPERATOR).folder))

    def options(peer: Peer) -> tuple[str, ...]:
        return ("--tls", str(cluster().tls(peer).folder), "--log", str(tmp_path / "services.log"))

    with (
        service("coordinator", *options(COORDINATOR)) as address,
        service("parameter-server", "--coordinator", address, "--index", "0", *options(SHARD)),
        service("agent", "--coordinator", address, "--cpu-devices", "4", *options(AGENT)),
    ):
        at = ("--coordinator", address)
        job = write_job(tmp_path)
        submitted = hetpipe("submit", job, *at, "--json", "--run-dir", tmp_path / "first")
        assert submitted.returncode == 0, submitted.stderr
        assert last_line(submitted)["staleness"]["violations"] == 0

        endless = hetpipe("submit", job, *at, "--detach", "--set", "epochs=100000", "--run-dir", tmp_path / "second")
        assert endless.returncode == 0, endless.stderr
        watch = [str(HETPIPE), "clocks", str(tmp_path / "second"), "--watch", "--json"]
        wait_until(lambda: hetpipe("clocks", *at).returncode == 0, timeout_seconds=60.0, what="clocks")
        with subprocess.Popen(watch, cwd=ROOT, stdout=subprocess.PIPE, text=True) as watching:
            assert watching.stdout is not None
            assert set(json.loads(watching.stdout.readline())["clocks"]) == {"0", "1"}
            watching.send_signal(signal.SIGINT)
            watching.communicate(timeout=20.0)
        roles = [process["role"] for process in last_line(hetpipe("status", *at, "--json"))["processes"]]
        assert roles == ["coordinator", "parameter_server", "agent", *["stage"] * 4]
