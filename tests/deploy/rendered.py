"""The manifests of k8s/ as `kubectl kustomize` renders them, and what is in them."""

from __future__ import annotations

import functools
import json
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

K8S = Path(__file__).parents[2] / "k8s"
OVERLAYS = tuple(sorted(path.name for path in (K8S / "overlays").iterdir()))

#: Of everything in k8s/ but the cluster's own.
NAMESPACE = "hetpipe"

#: Debian's 1.20 cannot do components.
_OLDEST_KUBECTL = (1, 21)

Manifest = Mapping[str, Any]
Manifests = tuple[Manifest, ...]

#: libyaml's loader where it is there: ten times as fast.
_LOADER: type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

_VARIABLE = re.compile(r"\$\((\w+)\)")

#: What the downward API could say.
_FIELDS = {
    "status.podIP": "10.1.2.3",
    "metadata.name": "pod-x",
    "metadata.labels['batch.kubernetes.io/controller-uid']": "uid-x",
    "metadata.labels['apps.kubernetes.io/pod-index']": "0",
    "metadata.labels['batch.kubernetes.io/job-completion-index']": "0",
}


@functools.cache
def why_no_kubectl() -> str:
    """Why nothing can be rendered here; empty if it can."""
    if shutil.which("kubectl") is None:
        return "kubectl is not installed"
    asked = subprocess.run(
        ["kubectl", "version", "--client", "--output=json"], capture_output=True, text=True, check=False
    )
    found = json.loads(asked.stdout)["clientVersion"] if asked.returncode == 0 else {"major": "0", "minor": "0"}
    version = int(found["major"]), int(re.sub(r"\D", "", found["minor"]))
    return "" if version >= _OLDEST_KUBECTL else f"kubectl is {version[0]}.{version[1]}, too old for components"


@functools.cache
def render(folder: Path) -> Manifests:
    """What `kubectl apply -k` would send."""
    done = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{folder}: {done.stderr}"
    return tuple(yaml.load_all(done.stdout, Loader=_LOADER))


@dataclass(frozen=True, slots=True)
class Workload:
    """Something that makes pods."""

    kind: str
    name: str
    spec: Manifest
    """Of the Deployment, StatefulSet or Job."""

    @property
    def labels(self) -> Mapping[str, str]:
        """Of its pods."""
        labels: Mapping[str, str] = self.spec["template"]["metadata"]["labels"]
        return labels

    @property
    def pod(self) -> Manifest:
        """The specification of its pods."""
        pod: Manifest = self.spec["template"]["spec"]
        return pod

    @property
    def component(self) -> str:
        """What its pods are."""
        return self.labels["app.kubernetes.io/component"]

    @property
    def containers(self) -> tuple[Manifest, ...]:
        """All of them, those that begin included."""
        return (*self.pod.get("initContainers", ()), *self.pod["containers"])

    @property
    def ports(self) -> Mapping[str, int]:
        """Name → number, of all containers."""
        return {port["name"]: port["containerPort"] for box in self.containers for port in box.get("ports", ())}

    def environment(self, container: Manifest) -> dict[str, str]:
        """The variables of a container, as the kubelet fills them in."""
        known: dict[str, str] = {}
        for entry in container.get("env", ()):
            path = entry.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
            label = re.fullmatch(r"metadata\.labels\['(.*)'\]", path or "")
            own = self.labels.get(label[1], "") if label else ""
            known[entry["name"]] = own or _FIELDS[path] if path else expanded(entry["value"], known)
        return known

    def command(self, container: Manifest) -> list[str]:
        """What a container runs."""
        known = self.environment(container)
        return [expanded(word, known) for word in (*container["command"], *container.get("args", ()))]


def by_component(workloads: tuple[Workload, ...], component: str) -> list[Workload]:
    """Those whose pods are of one component."""
    return [workload for workload in workloads if workload.component == component]


def expanded(text: str, known: Mapping[str, str]) -> str:
    """`text` with its variables; one that is not known is an error, unlike in Kubernetes, which leaves it as it is."""
    return _VARIABLE.sub(lambda found: known[found[1]], text)


def workloads_in(manifests: Manifests) -> Iterator[Workload]:
    """Everything that makes pods, JobSets' Jobs included."""
    for manifest in manifests:
        kind, name = manifest["kind"], manifest["metadata"]["name"]
        if kind in {"Deployment", "StatefulSet", "Job"}:
            yield Workload(kind, name, manifest["spec"])
        elif kind == "JobSet":
            for job in manifest["spec"]["replicatedJobs"]:
                yield Workload("Job", f"{name}-{job['name']}", job["template"]["spec"])


def identities(workload: Workload) -> list[str]:
    """The folders of `hetpipe certs` for the pods of a workload, one each."""
    match workload.component:
        case "parameter-server":
            first = workload.spec.get("ordinals", {}).get("start", 0)
            return [f"parameter-server-{first + index}" for index in range(workload.spec["replicas"])]
        case "agent":
            return [f"agent-{workload.labels['hetpipe/agents']}-{i}" for i in range(workload.spec["completions"])]
        case "coordinator":
            return ["coordinator"]
        case "operator":
            return ["operator-me"]
        case "redis":
            return ["redis-redis"]
    return []


def numbered(workload: Workload, number: int) -> dict[str, str]:
    """The variables that differ from pod to pod."""
    if workload.component == "agent":
        return {"AGENT_NAME": f"{workload.labels['hetpipe/agents']}-{number}"}
    first = workload.spec.get("ordinals", {}).get("start", 0)
    return {"SHARD_INDEX": str(first + number)}


def files_from(
    sources: Mapping[str, Mapping[str, bytes]], workload: Workload, known: Mapping[str, str]
) -> Iterator[tuple[str, bytes]]:
    """Path → content of the files that the last container of a pod gets.

    Args:
        sources: name of a Secret or ConfigMap → key → content; others are left out.
        workload: makes the pod.
        known: the container's variables.
    """
    volumes = {volume["name"]: _content(sources, volume) for volume in workload.pod["volumes"]}
    for mount in workload.containers[-1]["volumeMounts"]:
        keys = volumes.get(mount["name"], {})
        only = mount.get("subPath") or expanded(mount.get("subPathExpr", ""), known)
        if only and keys:
            yield mount["mountPath"], keys[only]
        else:
            yield from ((f"{mount['mountPath']}/{key}", content) for key, content in keys.items())


def config_files(manifests: Manifests) -> dict[str, dict[str, bytes]]:
    """Name of a ConfigMap → key → content."""
    return {
        found["metadata"]["name"]: {key: text.encode() for key, text in found["data"].items()}
        for found in of_kind(manifests, "ConfigMap")
    }


def redis_settings(files: Mapping[str, bytes], path: str) -> dict[str, str]:
    """Name → value of the settings in a file for Redis, those of files that it includes among them; the last counts."""
    settings: dict[str, str] = {}
    for line in files[path].decode().splitlines():
        name, _, value = line.partition(" ")
        if name == "include":
            settings |= redis_settings(files, value)
        elif name and not name.startswith("#"):
            settings[name] = value
    return settings


def _content(sources: Mapping[str, Mapping[str, bytes]], volume: Manifest) -> Mapping[str, bytes]:
    if "projected" in volume:
        found = [source["secret"] for source in volume["projected"]["sources"] if source["secret"]["name"] in sources]
        return {item["path"]: sources[one["name"]][item["key"]] for one in found for item in one["items"]}
    return sources.get(next(iter(secrets_in(volume)), volume.get("configMap", {}).get("name", "")), {})


def secrets_in(volume: Manifest) -> list[str]:
    """The names of the Secrets of which a volume has files."""
    if "projected" in volume:
        return [source["secret"]["name"] for source in volume["projected"]["sources"]]
    return [volume["secret"]["secretName"]] if "secret" in volume else []


def of_kind(manifests: Manifests, kind: str) -> list[Manifest]:
    """Those of one kind."""
    return [manifest for manifest in manifests if manifest["kind"] == kind]


def matches(selector: Manifest, labels: Mapping[str, str]) -> bool:
    """Whether a label selector selects pods with `labels`."""
    wanted = selector.get("matchLabels", {})
    return all(labels.get(key) == value for key, value in wanted.items()) and all(
        _fits(expression, labels) for expression in selector.get("matchExpressions", ())
    )


def _fits(expression: Manifest, labels: Mapping[str, str]) -> bool:
    assert expression["operator"] == "In", "no other operator is used"
    return labels.get(expression["key"]) in expression["values"]
