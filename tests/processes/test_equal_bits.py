"""Deterministic runs over real processes, all kinds of links and of transports equal the reference bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hetpipe.check import check_run
from hetpipe.checkpoint.format import CheckpointReader
from hetpipe.checkpoint.manifest import newest_checkpoint
from tests import models
from tests.processes.harness import Train, write_job
from tests.reference.executor import ReferenceRun, run_reference

pytestmark = [pytest.mark.processes, pytest.mark.exhaustive, pytest.mark.timeout(180)]

SGD = {"name": "SGD", "lr": 0.1}
MOMENTUM = {"name": "SGD", "lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}
ADAMW = {"name": "AdamW", "lr": 0.01}

#: (model, V, K, N, D, optimizer, (link, transport)): a spread over the matrix that tests/numerics runs in one process;
#: `test_policies` has five more. A parameter of `wide32` is in two slices, one on each shard.
#: `tests/cli/test_end_to_end.py` compares one more, in `make test`.
CASES = [
    ("wide32", 1, 3, 2, 1, ADAMW, ("grpc", "auto")),
    ("mlp32", 1, 1, 1, 0, SGD, ("auto", "auto")),
    ("mlp64", 2, 3, 2, 4, MOMENTUM, ("shared_memory", "grpc")),
    ("mlp64", 2, 3, 2, 1, ADAMW, ("gloo", "auto")),
    ("mlp32", 3, 2, 2, 0, ADAMW, ("auto", "auto")),
    ("mlp64", 3, 3, 4, 4, MOMENTUM, ("grpc", "grpc")),
    ("mlp64", 1, 2, 4, 0, MOMENTUM, ("auto", "auto")),
    ("mlp64", 2, 1, 2, 0, ADAMW, ("auto", "auto")),
    ("mlp64", 2, 2, 4, 1, SGD, ("grpc", "grpc")),
]


@pytest.mark.parametrize(("model", "workers", "stages", "wave", "staleness", "optimizer", "transports"), CASES)
def test_processes_equal_the_reference(
    tmp_path: Path,
    model: str,
    workers: int,
    stages: int,
    wave: int,
    staleness: int,
    optimizer: dict[str, Any],
    transports: tuple[str, str],
) -> None:
    link, transport = transports
    job = write_job(
        tmp_path,
        model=f"tests.models:{model}",
        data={"train": f"tests.models:data{model[-2:]}"},
        optimizer=optimizer,
        link=link,
        workers={"count": workers, "stages": stages},
        sync={"kind": "wsp", "D": staleness, "minibatches_per_wave": wave, "deterministic": True},
        parameter_servers={"count": 1 + stages % 2, "transport": transport},
        checkpoint={"every_waves": 3, "keep": 1},
        cluster={"devices": [{"slowdown": 5.0, "jitter": 4.0}]},
    )
    train = Train(tmp_path, job)
    outcome = train.finish(150.0)
    assert outcome.returncode == 0, outcome.stderr
    assert outcome.result["staleness"]["violations"] == 0
    assert check_run(train.run_dir, require_complete=True).ok

    stage_logs = "".join(path.read_text() for path in (train.run_dir / "logs").glob("*stage*"))
    chosen = [json.loads(line) for line in stage_logs.splitlines() if '"transport_chosen"' in line]
    assert not [each for each in chosen if each["transport"] != "shared memory"]
    assert {"call" for each in chosen if "call" in each} == ({"call"} if transport == "auto" else set())
    linked = {each["link"] for each in chosen if "link" in each}
    assert len(linked) == (workers * stages if link in {"auto", "shared_memory"} and stages > 1 else 0)
    assert "segment_refused" not in stage_logs

    reference = run_reference(
        ReferenceRun(
            model=getattr(models, model),
            loss=models.loss,
            train=models.data64() if model == "mlp64" else models.data32(),
            batch_size=4,
            seed=3,
            optimizer=optimizer["name"],
            arguments={key: value for key, value in optimizer.items() if key != "name"},
            num_virtual_workers=workers,
            minibatches_per_wave=wave,
            staleness=staleness,
            epochs=2,
            checkpoint_every_waves=3,
        )
    )
    trained = CheckpointReader(newest_checkpoint(train.run_dir).glob("shard-*.safetensors"))
    for name, expected in reference.weights.items():
        assert torch.equal(trained.tensor(f"weights/{name}"), expected), name
