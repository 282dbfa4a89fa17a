"""What real processes need to come by their stage: never the whole model, except one of them at a time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hetpipe.decide.planner.partition import plan_job
from hetpipe.errors import DeadlineExceeded
from hetpipe.job.file import Job
from hetpipe.pipeline.model_file import one_at_a_time
from hetpipe.values import wire
from hetpipe.values.ids import AgentId, Incarnation, JobId, StageIndex, Term, VirtualWorkerIndex
from hetpipe.values.run import AgentDevice, AgentInfo, DeviceConfig, StageConfig
from tests.numerics.compare import ROOT
from tests.support.fake_clock import FakeClock
from tests.support.inspection import inspect_job

MIB = 2**20
STAGES = 4
WHOLE_BYTES = 16 * 1024 * 1024 * 4

#: Allocator, modules, what Python adds.
SLACK_BYTES = 10 * MIB

CHILD = """
import sys
from pathlib import Path
import torch
from hetpipe.job.file import Job
from hetpipe.server.agent import stage_assembly
from hetpipe.values import wire
from hetpipe.values.run import StageConfig
from hetpipe.weights.allocator import settle_memory
import tests.model.zoo, torch.nn.functional
import numpy.random, torch.utils._device  # what a stage's code imports on the way; without bytecode that takes memory

def kib(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key))

torch.set_num_threads(1)
settle_memory(one_heap=True)
config = wire.from_json(StageConfig, sys.stdin.buffer.read())
job = Job.model_validate(config.job)
Path("/proc/self/clear_refs").write_text("5")  # forget the peak of the imports
before = kib("VmRSS:")
code = stage_assembly.load_user_code(job, config)
print(kib("VmHWM:") - before, kib("RssAnon:"), len(code.layers), flush=True)
"""


def configs(name: str, folder: Path) -> list[StageConfig]:
    """Of each stage, with the file of the inspection in `folder`."""
    job = Job(
        name="memory",
        model=f"tests.model.zoo:{name}",
        loss="torch.nn.functional:cross_entropy",
        data={"train": "tests.model.zoo:vectors"},
        batch_size=4,
        minibatches=4,
        optimizer={"name": "SGD", "lr": 0.1},
        workers={"count": 1, "stages": STAGES},
        sync={"kind": "wsp", "D": 0, "minibatches_per_wave": 2},
    )
    devices = tuple(AgentDevice(f"n0/{index}", "cpu", 0, "cpu") for index in range(STAGES))
    agent = AgentInfo(AgentId("n0"), "127.0.0.1", 0, devices)
    plan = plan_job(job, inspect_job(job, ROOT, run_folder=folder), [agent], Term(1), JobId("memory"))
    assert plan.model_digest
    values: dict[str, Any] = {"shard_addresses": (), "run_dir": str(folder), "import_path": str(ROOT)}
    return [
        StageConfig(
            job=job.model_dump(mode="json"),
            plan=plan,
            vw=VirtualWorkerIndex(0),
            stage=StageIndex(stage),
            incarnation=Incarnation(0),
            device=DeviceConfig("cpu"),
            host="127.0.0.1",
            **values,
        )
        for stage in range(STAGES)
    ]


def peak_bytes(config: StageConfig) -> int:
    """What a process of its own takes at most while it comes by its stage."""
    command = [sys.executable, "-c", CHILD]
    given = wire.to_json(StageConfig, config).encode()
    ended = subprocess.run(command, input=given, capture_output=True, check=True, timeout=100, cwd=ROOT)
    return int(ended.stdout.split()[0]) * 1024


@pytest.mark.processes
def test_a_stage_process_never_has_the_whole_model_in_memory(tmp_path: Path) -> None:
    """Trainable weights stay in the file; of the frozen 4 MiB only the stage that reads them has a copy."""
    peaks = [peak_bytes(config) for config in configs("wide", tmp_path)[1:3]]
    frozen = WHOLE_BYTES // 16
    assert min(peaks) < SLACK_BYTES, [peak / MIB for peak in peaks]
    assert max(peaks) < SLACK_BYTES + 2 * frozen, "the copy, and the file's own pages"


@pytest.mark.exhaustive
@pytest.mark.processes
def test_what_needs_its_weights_to_be_built_is_a_whole_model_in_one_process(tmp_path: Path) -> None:
    (config,) = configs("wide_and_computed", tmp_path)[:1]
    assert WHOLE_BYTES <= peak_bytes(config) < WHOLE_BYTES + 2 * SLACK_BYTES


def test_one_process_of_a_node_at_a_time_builds_a_whole_model(tmp_path: Path) -> None:
    clock = FakeClock(auto_advance=True)
    path = tmp_path / "building-n0.lock"
    deadline = pytest.raises(DeadlineExceeded, match="which build the whole model one at a time")
    with one_at_a_time(path, clock, deadline_seconds=1.0), deadline, one_at_a_time(path, clock, deadline_seconds=1.0):
        raise AssertionError("two at once")
    before = clock.monotonic()
    with one_at_a_time(path, clock, deadline_seconds=1.0):
        assert clock.monotonic() == before, "the next one does not wait"
