"""A job as a Kustomize overlay over the manifests in `k8s/base`: its files, its shards, its agents per product. Pure.

An overlay is a folder: `kustomization.yaml`, one folder for each group of equal nodes, and `job/` with the content of
the ConfigMap `job`. Pods have the job's code at /job, with its paths relative to the job file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hetpipe.deploy.yaml_text import to_yaml
from hetpipe.errors import UserError
from hetpipe.job.file import Job
from hetpipe.job.model import normalised
from hetpipe.values.quantities import bytes_text

#: The file read by Kustomize.
KUSTOMIZATION = "kustomization.yaml"

#: The pseudo-product for CPU devices.
CPU = "cpu"

#: Size limit of a ConfigMap.
MOST_JOB_BYTES = 1 << 20

_API = "kustomize.config.k8s.io/v1beta1"
_NAMESPACE = "hetpipe"
_JOB_FILE = "job.yaml"
_GROUP = re.compile(r"(?P<product>[A-Za-z0-9][A-Za-z0-9._-]{0,62})=(?P<nodes>[1-9]\d{0,3})x(?P<devices>[1-9]\d?)")

#: Paths in the manifests of `k8s/base`.
_POD = "/spec/template/spec"
_ARGS = f"{_POD}/containers/0/args/-"
_REQUESTED = tuple(f"{_POD}/containers/0/resources/{kind}/nvidia.com~1gpu" for kind in ("requests", "limits"))
_JOB_VOLUME = f"{_POD}/volumes/0/configMap"
_AGENTS = {"kind": "Job", "labelSelector": "app.kubernetes.io/component=agent"}


@dataclass(frozen=True, slots=True)
class AgentNodes:
    """Equal nodes, each with one agent."""

    product: str
    """The nodes' label `nvidia.com/gpu.product`; `cpu` for CPU devices."""
    num_nodes: int
    devices_each: int

    @property
    def name(self) -> str:
        """The group's name: its agents are NAME-0, NAME-1 and so on.

        >>> AgentNodes("NVIDIA-GeForce-RTX-2060", 1, 4).name, AgentNodes("NVIDIA-A100-SXM4-80GB", 1, 8).name
        ('rtx-2060', 'a100-sxm4-80gb')
        """
        words = [word for word in re.split(r"[^a-z0-9]+", self.product.lower()) if word]
        return "-".join(word for word in words if word not in ("nvidia", "geforce")) or words[0]

    @property
    def agents(self) -> tuple[str, ...]:
        """The names of its agents, which are prefixes of the names of their devices."""
        return tuple(f"{self.name}-{index}" for index in range(self.num_nodes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlay:
    """The contents of an overlay."""

    job: Job
    code: Mapping[str, str]
    """Path relative to the job file → content, of the job's code."""
    groups: tuple[AgentNodes, ...]
    image: str
    k8s: str
    """The folder `k8s`, relative to the overlay."""
    tls: bool = True
    modules: tuple[str, ...] = field(default=())
    """Patterns of modules that agents allow in addition to those in the manifests."""
    allowed_environment: tuple[str, ...] = field(default=())
    """Names and patterns of the environment variables that agents pass on to jobs."""


def groups_of_options(texts: Sequence[str]) -> tuple[AgentNodes, ...]:
    """Parse the values of `--agents`.

    Raises:
        UserError: one is malformed, or two give agents of the same name.

    >>> groups_of_options(["NVIDIA-TITAN-V=1x4"])
    (AgentNodes(product='NVIDIA-TITAN-V', num_nodes=1, devices_each=4),)
    """
    groups = []
    for text in texts:
        match = _GROUP.fullmatch(text)
        if match is None:
            raise UserError(
                f"--agents {text!r} is not PRODUCT=NODESxDEVICES; write for example NVIDIA-TITAN-V=1x4, with the "
                "product of the nodes' label nvidia.com/gpu.product, or cpu=2x2"
            )
        groups.append(AgentNodes(match["product"], int(match["nodes"]), int(match["devices"])))
    names = [group.name for group in groups]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"--agents gives several groups the name {name}; give each product once")
    return tuple(groups)


def yaml_of(job: Job) -> str:
    """The file of a job."""
    return to_yaml(normalised(job.model_dump(mode="json")))


def overlay_files(overlay: Overlay) -> dict[str, str]:
    """Path in the overlay's folder → content.

    Raises:
        UserError: the job does not fit the agents, or its files a ConfigMap.
    """
    _check(overlay)
    carried = {_JOB_FILE: yaml_of(overlay.job), **overlay.code}
    size = sum(len(content.encode()) for content in carried.values())
    if size > MOST_JOB_BYTES:
        raise UserError(
            f"the job's files have {bytes_text(size, round_up=True)}, the limit of a ConfigMap is "
            f"{bytes_text(MOST_JOB_BYTES)}; put the code into an image of your own and name it with --image"
        )
    files = {f"job/{path}": content for path, content in carried.items()}
    files[KUSTOMIZATION] = _yaml(_kustomization(overlay, carried))
    for group in overlay.groups:
        files[f"{group.name}/{KUSTOMIZATION}"] = _yaml(_group(group, overlay.k8s))
    return files


def _check(overlay: Overlay) -> None:
    job = overlay.job
    offered = sum(group.num_nodes * group.devices_each for group in overlay.groups)
    if job.is_planned and job.num_devices > offered:
        raise UserError(f"the job needs {job.num_devices} devices, one per stage, and --agents have {offered}")
    if job.parameter_servers.placement == "ed_local":
        raise UserError(
            "parameter_servers.placement: ed_local needs a shard on each node, in the order of cluster.file; begin "
            "with k8s/overlays/multi-node-heterogeneous, which shows how, or use balanced"
        )
    file = job.cluster.file
    if file is None or job.is_planned or job.cluster.emulate:
        return
    agents = {agent for group in overlay.groups for agent in group.agents}
    absent = [node.name for node in file.nodes if node.devices and node.name not in agents]
    if absent:
        raise UserError(
            f"cluster.file has the node {absent[0]}, but --agents gives {', '.join(sorted(agents))}; name the nodes of "
            "the file like the agents"
        )


def _kustomization(overlay: Overlay, carried: Mapping[str, str]) -> dict[str, Any]:
    name, _, tag = overlay.image.rpartition(":")
    keys = {path: path.replace("/", ".") for path in carried}
    component = "mtls" if overlay.tls else "insecure"
    return {
        "apiVersion": _API,
        "kind": "Kustomization",
        "namespace": _NAMESPACE,
        "resources": [f"{overlay.k8s}/base", *(group.name for group in overlay.groups)],
        "configMapGenerator": [
            {
                "name": "job",
                "behavior": "replace",
                "files": [f"{key}=job/{path}" for path, key in keys.items()],
                "options": {"disableNameSuffixHash": True},
            }
        ],
        "patches": [_shards(overlay), *_job_volumes(keys), *_allowed(overlay)],
        "components": [f"{overlay.k8s}/components/{component}"],
        "images": [{"name": "hetpipe", "newName": name, "newTag": tag}],
    }


def _shards(overlay: Overlay) -> dict[str, Any]:
    operation = {"op": "replace", "path": "/spec/replicas", "value": overlay.job.parameter_servers.count}
    return _patch({"kind": "StatefulSet", "name": "parameter-server"}, [operation])


def _job_volumes(keys: Mapping[str, str]) -> list[dict[str, Any]]:
    """The volumes of the job's ConfigMap, which restore its folders."""
    items = [{"key": key, "path": path} for path, key in keys.items()]
    operation = {"op": "replace", "path": _JOB_VOLUME, "value": {"name": "job", "items": items}}
    return [_patch(target, [operation]) for target in (_AGENTS, {"kind": "Job", "name": "submit"})]


def _allowed(overlay: Overlay) -> list[dict[str, Any]]:
    """The options of agents for permitted modules and variables."""
    options = [f"--allow-modules={module}" for module in overlay.modules]
    options += [f"--allow-environment={name}" for name in overlay.allowed_environment]
    operations = [{"op": "add", "path": _ARGS, "value": option} for option in options]
    return [_patch(_AGENTS, operations)] if operations else []


def _group(group: AgentNodes, k8s: str) -> dict[str, Any]:
    operations: list[dict[str, Any]] = [
        {"op": "replace", "path": f"/spec/{key}", "value": group.num_nodes} for key in ("completions", "parallelism")
    ]
    if group.product == CPU:
        operations.append({"op": "add", "path": _ARGS, "value": f"--cpu-devices={group.devices_each}"})
    else:
        selector = {"nvidia.com/gpu.product": group.product}
        operations.append({"op": "add", "path": f"{_POD}/nodeSelector", "value": selector})
        operations += [{"op": "add", "path": path, "value": group.devices_each} for path in _REQUESTED]
    return {
        "apiVersion": _API,
        "kind": "Kustomization",
        "resources": [f"../{k8s}/base/agents"],
        "nameSuffix": f"-{group.name}",
        "labels": [{"pairs": {"hetpipe/agents": group.name}, "includeTemplates": True}],
        "patches": [_patch({"kind": "Job"}, operations)],
    }


def _patch(target: Mapping[str, str], operations: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {"target": target, "patch": to_yaml(operations)}


def _yaml(value: Mapping[str, Any]) -> str:
    return "# Generated by `hetpipe render k8s`.\n" + to_yaml(value)
