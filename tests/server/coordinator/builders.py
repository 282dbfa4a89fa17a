"""Small jobs, clusters and reports for the tests of the control plane."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from hetpipe.job.file import Job, load_job
from hetpipe.server.coordinator.adoption import job_id_of
from hetpipe.values.events import Submission
from hetpipe.values.ids import AgentId, Clock, Incarnation, LayerIndex, ShardIndex, StageIndex, Term
from hetpipe.values.ids import VirtualWorkerIndex as Vw
from hetpipe.values.measurement import Measurement
from hetpipe.values.members import MemberId, MemberInfo, MemberRole
from hetpipe.values.plan import LayerReport, ModelReport, TensorSpec
from hetpipe.values.run import AgentDevice, AgentInfo, ClockSnapshot, StageProgress
from tests.profiler.builders import layer as measured_layer
from tests.profiler.builders import measurement

BASE: dict[str, Any] = {
    "name": "digits",
    "model": "model:build",
    "loss": "model:loss",
    "data": {"train": "model:train"},
    "batch_size": 4,
    "epochs": 2,
    "optimizer": {"name": "SGD", "lr": 0.1},
    "workers": {"count": 2, "stages": 2},
    "parameter_servers": {"count": 2},
}


def job(*overrides: str) -> Job:
    """A job of 2 virtual workers with 2 stages each, on 2 shards."""
    return load_job(BASE, overrides)


def submission(of: Job, run_dir: str = "/nowhere/run", *, request_id: str = "0123456789abcdef") -> Submission:
    """`of` as it is handed in."""
    return Submission(
        request_id=request_id, job_json=json.dumps(of.model_dump(mode="json")), run_dir=run_dir, import_path="/code"
    )


def layer(index: int, *, parameters: int = 10, activation: int = 5) -> LayerReport:
    """A layer with one parameter of `parameters` float32 elements."""
    return LayerReport(
        index=LayerIndex(index),
        name=f"layer{index}",
        parameters=(TensorSpec(f"{index}.weight", (parameters,), "float32"),),
        buffers=(),
        activation_elements=activation,
    )


def model(num_layers: int = 4, *, samples: int = 40) -> ModelReport:
    """A model of equal layers."""
    return ModelReport(tuple(layer(index) for index in range(num_layers)), samples, 10)


def measured(device_type: str = "cpu", num_layers: int = 4) -> Measurement:
    """What measuring `model(num_layers)` found."""
    layers = [replace(measured_layer(report.name), parameters=report.parameters) for report in model(num_layers).layers]
    return measurement(device_type, *layers)


def agent_info(name: str = "n0", *, devices: int = 4, pid: int = 100) -> AgentInfo:
    """An agent with CPU devices."""
    return AgentInfo(
        AgentId(name),
        f"{name}.host",
        pid,
        tuple(AgentDevice(f"{name}/{i}", "cpu", 1 << 30, "cpu") for i in range(devices)),
    )


def agent_member(name: str = "n0", *, devices: int = 4, pid: int = 100) -> MemberInfo:
    """The same as a member."""
    info = agent_info(name, devices=devices, pid=pid)
    return MemberInfo(MemberRole.AGENT, MemberId(name), info.host, pid, devices=info.devices)


def shard_member(index: int, *, term: int = 0, port: int = 7000) -> MemberInfo:
    """A shard that wants to be number `index`."""
    return MemberInfo(
        MemberRole.PARAMETER_SERVER,
        MemberId(f"ps{index}"),
        "shards.host",
        200 + index,
        address=f"shards.host:{port + index}",
        shard_index=ShardIndex(index),
        highest_term=Term(term),
    )


def clocks(*local: int, samples: int = 0, minibatches: int = 0, max_distance: int = 0) -> ClockSnapshot:
    """A snapshot with these local clocks."""
    return ClockSnapshot(
        term=Term(1),
        published=Clock(min(local)),
        global_clock=Clock(min(local)),
        local={Vw(vw): Clock(clock) for vw, clock in enumerate(local)},
        max_distance=max_distance,
        epoch=0,
        minibatches=minibatches,
        samples=samples,
        barrier=Clock(10),
        barrier_reason="epoch",
        waves=sum(local),
    )


def progress(*, samples: int = 0, clock: int = 0, **values: Any) -> StageProgress:
    """A stage's progress report."""
    defaults: dict[str, Any] = {
        "minibatches": 0,
        "published": Clock(clock),
        "loss": None,
        "first_loss": None,
        "waiting_seconds": 0.0,
        "idle_seconds": 0.0,
        "compute_seconds": 0.0,
        "pushed_bytes": 0,
        "pulled_bytes": 0,
    }
    return StageProgress(samples=samples, clock=Clock(clock), **{**defaults, **values})


JOB_ID = job_id_of("digits", "0123456789abcdef")
FIRST_LIFE = Incarnation(0)
STAGES = [(Vw(vw), StageIndex(stage)) for vw in range(2) for stage in range(2)]
