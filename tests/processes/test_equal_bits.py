"""Deterministic runs over real processes, all kinds of links and of transports equal the reference bit for bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from hetpipe.checker import check_run
from hetpipe.checkpoint.format import CheckpointReader
from hetpipe.checkpoint.manifest import newest_checkpoint
from tests import models
from tests.chaos.cluster import COORDINATOR, Cluster, Layout
from tests.polling import wait_until
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

    equals_the_reference(
        train.run_dir,
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
        ),
    )


def equals_the_reference(run_dir: Path, run: ReferenceRun) -> None:
    trained = CheckpointReader(newest_checkpoint(run_dir).glob("shard-*.safetensors"))
    for name, expected in run_reference(run).weights.items():
        assert torch.equal(trained.tensor(f"weights/{name}"), expected), name


@pytest.mark.skipif(shutil.which("redis-server") is None, reason="redis-server is missing")
def test_a_pipeline_over_shared_memory_and_grpc_equals_the_reference(tmp_path: Path) -> None:
    """On a cluster with TLS, stages 0 and 1 are on one node and share memory; stage 2 is on another one."""
    job = write_job(
        tmp_path,
        workers={"count": 1, "stages": 3},
        sync={"kind": "wsp", "D": 1, "minibatches_per_wave": 2, "deterministic": True},
        checkpoint={"every_waves": 3, "keep": 1},
    )
    with Cluster(tmp_path / "cluster", Layout(num_shards=1, devices=(2, 1))) as cluster:
        run_dir = cluster.runs / "run"
        command = ["submit", str(job), "--coordinator", cluster.address(COORDINATOR), "--run-dir", str(run_dir)]
        submitted = cluster.run_command("run", command, ready="nothing it prints")
        wait_until(lambda: submitted.exit_status is not None, timeout_seconds=120.0, what="end of the run")
        assert submitted.exit_status == 0, submitted.story()
        logs = "".join(path.read_text() for path in (run_dir / "logs").glob("*stage*"))
        kinds = [json.loads(line)["kind"] for line in logs.splitlines() if '"link_chosen"' in line]
        assert sorted(kinds) == ["grpc", "shared_memory"]
        equals_the_reference(
            run_dir,
            ReferenceRun(
                model=models.mlp32,
                loss=models.loss,
                train=models.data32(),
                batch_size=4,
                seed=3,
                optimizer="SGD",
                arguments={"lr": 0.05, "momentum": 0.9},
                num_virtual_workers=1,
                minibatches_per_wave=2,
                staleness=1,
                epochs=2,
                checkpoint_every_waves=3,
            ),
        )
