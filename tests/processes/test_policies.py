"""Weight policies over real processes: gloo links, gloo sums over replicas, gRPC shards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hetpipe.checkpoint.manifest import newest_checkpoint
from tests.numerics.compare import ADAMW, MOMENTUM, Case
from tests.numerics.evaluations import reference_of, value_of
from tests.processes.harness import Train, write_job

pytestmark = [pytest.mark.processes, pytest.mark.exhaustive, pytest.mark.timeout(180)]

CASES: dict[str, dict[str, Any]] = {
    "replicas": {"weights": "flush", "kind": "allreduce", "workers": 2, "max_norm": 0.5, "optimizer": ADAMW},
    "alone": {"weights": "predict", "kind": "none", "workers": 1, "stages": 3, "wave": 3, "optimizer": ADAMW},
    "norms": {"weights": "double_buffer", "workers": 2, "max_norm": 0.5, "wave": 3},
    "gpipe": {"weights": "flush", "schedule": "gpipe", "kind": "none", "workers": 1, "wave": 4},
    "stashed": {"weights": "stash", "workers": 2, "accumulate": 2, "wave": 4, "staleness": 0},
}


@pytest.mark.parametrize("name", CASES)
def test_processes_equal_the_reference(name: str, tmp_path: Path) -> None:
    case = Case(
        **{"optimizer": MOMENTUM, "model": "mlp64", "data": "data64", "batch_size": 4, "epochs": 2, **CASES[name]},
        evaluate={"every_waves": 2, "max_batches": 2},
    )
    job = case.job().model_dump(mode="json", exclude_defaults=True)
    train = Train(tmp_path, write_job(tmp_path, **{**job, "cluster": {"devices": [{"slowdown": 3.0, "jitter": 2.0}]}}))
    outcome = train.finish(150.0)
    assert outcome.returncode == 0, outcome.stderr
    assert outcome.result["staleness"]["violations"] == 0

    found: dict[str, torch.Tensor] = {}
    for file in newest_checkpoint(train.run_dir).glob("*.safetensors"):
        found.update(load_file(file))
    reference, expected, evaluations = reference_of(case)
    for weight, value in expected.weights.items():
        assert torch.equal(found[f"weights/{weight}"], value), weight
    lines = [json.loads(line) for line in (train.run_dir / "evaluations.jsonl").read_text().splitlines()]
    within = {line["clock"]: line for line in lines if line["within_epoch"]}
    assert [line["clock"] for line in lines] == [one["clock"] for one in outcome.result["evaluations"]["listed"]]
    assert sorted(within) == sorted(evaluations)
    for clock, line in within.items():
        assert (line["whole"], line["samples"], line["minibatches"]) == (False, 8, evaluations[clock].minibatches)
        assert line["values"]["loss"] == value_of(reference, evaluations[clock], 8)
    assert outcome.result["evaluations"]["best"]["whole"]
    assert outcome.result["eval"]["samples"] == 46
