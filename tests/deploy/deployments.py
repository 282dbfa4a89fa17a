"""Boxes, plans and spec that tests are about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hetpipe.deploy.box import BoxDevice
from hetpipe.deploy.groups import AgentGroup, groups_of
from hetpipe.deploy.topology import Container, Deployment, DeploymentSpec, Folders, deployment_of
from hetpipe.job.file import Job, load_job
from hetpipe.values.ids import DeviceId
from hetpipe.values.plan_document import PlanDocument, PlannedStage, PlannedWorker, Predicted

MINIMAL: dict[str, Any] = {
    "model": "model:build",
    "loss": "torch.nn.functional:cross_entropy",
    "data": {"train": "model:data"},
    "optimizer": {"name": "SGD"},
    "epochs": 1,
    "batch_size": 4,
}


def job(**changes: Any) -> Job:
    return load_job({**MINIMAL, **changes})


def cpus(count: int) -> tuple[BoxDevice, ...]:
    return tuple(BoxDevice(DeviceId(f"here/{index}"), "cpu") for index in range(count))


def gpus(*kinds: str) -> tuple[BoxDevice, ...]:
    return tuple(BoxDevice(DeviceId(f"here/{i}"), kind, f"GPU-{i}") for i, kind in enumerate(kinds))


def stage(device: str, kind: str, first: int, last: int, *, recompute: bool = False) -> PlannedStage:
    return PlannedStage(
        device=DeviceId(device),
        type=kind,
        layers=(first, last),
        time_ms=1.0,
        memory_bytes=1,
        receive_ms=0.0,
        recompute=recompute,
    )


def plan(*workers: Sequence[PlannedStage], **changes: Any) -> PlanDocument:
    values: dict[str, Any] = {
        "version": 1,
        "batch_size": 4,
        "virtual_workers": tuple(
            PlannedWorker(stages=tuple(stages), bottleneck_ms=1.0, samples_per_second=1.0) for stages in workers
        ),
        "minibatches_per_wave": 3,
        "max_minibatches_per_wave": tuple(8 for _ in workers),
        "shards": ("here",),
        "placement": {"w": 0},
        "predicted": Predicted(samples_per_second=1.0, cross_node_bytes_per_minibatch=0.0),
    }
    return PlanDocument(**{**values, **changes})


TWO_BY_TWO = groups_of(job(workers={"count": 2, "stages": 2}), cpus(4))
ON_GPUS = (AgentGroup("vw-0", (gpus("A", "B")[1], gpus("A", "B")[0])), AgentGroup("vw-1", gpus("A", "B", "C")[2:]))

SPEC = DeploymentSpec(
    project="mine",
    image="hetpipe:test",
    user="1000:1001",
    agents=TWO_BY_TWO,
    num_shards=2,
    folders=Folders(code="/home/me/job", runs="/home/me/job/runs", state="/home/me/.local/state/hetpipe/mine"),
    modules=("model", "torch.*"),
)


def deployment(**changes: Any) -> Deployment:
    return deployment_of(replace(SPEC, **changes))


def by_name(described: Deployment) -> dict[str, Container]:
    return {container.name: container for container in described.containers}
