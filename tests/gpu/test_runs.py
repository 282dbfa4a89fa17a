"""`hetpipe train` on one GPU, which the stages share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hetpipe.checker import check_run
from tests.numerics.compare import trained
from tests.polling import wait_until
from tests.processes.harness import ROOT, Outcome, Train, kill, pids_of, write_job

SECONDS = 240.0


def train(folder: Path, *arguments: str | Path, **job: Any) -> tuple[Train, Outcome]:
    """A run to its end, which its checker accepts."""
    started = Train(folder, *arguments) if arguments else Train(folder, write_job(folder, **job))
    return started, accepted(started)


def accepted(started: Train) -> Outcome:
    outcome = started.finish(SECONDS)
    logs = "".join(path.read_text()[-2000:] for path in started.run_dir.glob("logs/vw-*.log"))
    assert outcome.returncode == 0, outcome.stderr + logs
    report = check_run(started.run_dir, require_complete=True)
    assert report.ok, "\n".join(report.lines())
    return outcome


def torch_devices(started: Train) -> set[str]:
    plan = json.loads((started.run_dir / "plan.json").read_text())
    text = json.dumps(plan)
    return {name for name in ("cpu", "cuda:0") if f'"{name}"' in text}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"weights": "flush"},
        {"weights": "double_buffer"},
        {
            "sync": {"kind": "none", "minibatches_per_wave": 2},
            "workers": {"count": 1, "stages": 2},
            "parameter_servers": {},
        },
        {"precision": "bf16"},
        {"precision": "fp16"},
        {"workers": {"count": 2, "stages": 1}},
        {"data": {"train": "tests.models:data32", "eval": "tests.models:data32", "num_workers": 2, "pin_memory": True}},
    ],
    ids=["wave", "flush", "double_buffer", "none", "bf16", "fp16", "one stage", "pinned"],
)
def test_a_small_run(changes: dict[str, Any], tmp_path: Path) -> None:
    _, outcome = train(tmp_path, **changes)
    assert "CUDA device" in outcome.stderr


def test_gradients_are_added_up_over_gloo_where_replicas_share_a_gpu(tmp_path: Path) -> None:
    _, outcome = train(
        tmp_path, sync={"kind": "allreduce", "minibatches_per_wave": 2}, weights="flush", parameter_servers={}
    )
    assert "CUDA device" in outcome.stderr


def test_the_same_seed_gives_the_same_bits(tmp_path: Path) -> None:
    found = []
    for name, stages in (("a", 2), ("b", 2), ("c", 1)):
        folder = tmp_path / name
        folder.mkdir()
        sync = {"kind": "wsp", "D": 1, "minibatches_per_wave": 2, "deterministic": True}
        started, _ = train(folder, sync=sync, workers={"count": 2, "stages": stages})
        found.append(trained(started.run_dir))
    for other in found[1:]:
        assert all(torch.equal(other[name], value) for name, value in found[0].items())


def test_a_killed_stage_comes_back(tmp_path: Path) -> None:
    job = write_job(tmp_path, epochs=None, minibatches=400, checkpoint={"every_waves": 5})
    started = Train(tmp_path, job)
    started.wait_for_checkpoint(SECONDS)
    kill(pids_of(started.status(), "stage")[0])
    outcome = accepted(started)
    assert "CUDA device" in outcome.stderr


@pytest.mark.parametrize("name", ["gpt2", "bert", "resnet", "t5", "lora", "text"])
def test_an_example(name: str, tmp_path: Path) -> None:
    started, outcome = train(tmp_path, ROOT / "examples" / name / "job.yaml")
    assert "CUDA device" in outcome.stderr
    assert wait_until is not None
    assert started.run_dir.exists()
