"""The manifests of k8s/ as `kubectl kustomize` renders them, and what is in them."""

from __future__ import annotations

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

#: Debian's 1.20 cannot do components.
_OLDEST_KUBECTL = (1, 21)

Manifest = Mapping[str, Any]

#: libyaml's loader where it is there: ten times as fast.
_LOADER: type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

_VARIABLE = re.compile(r"\$\((\w+)\)")

#: What the downward API could say.
_FIELDS = {
    "status.podIP": "10.1.2.3",
    "metadata.name": "pod-x",
    "metadata.labels['apps.kubernetes.io/pod-index']": "0",
    "metadata.labels['batch.kubernetes.io/job-completion-index']": "0",
}


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


def render(folder: Path) -> tuple[Manifest, ...]:
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


def expanded(text: str, known: Mapping[str, str]) -> str:
    """`text` with its variables; one that is not known is an error, unlike in Kubernetes, which leaves it as it is."""
    return _VARIABLE.sub(lambda found: known[found[1]], text)


def workloads(manifests: tuple[Manifest, ...]) -> Iterator[Workload]:
    """Everything that makes pods, JobSets' Jobs included."""
    for manifest in manifests:
        kind, name = manifest["kind"], manifest["metadata"]["name"]
        if kind in {"Deployment", "StatefulSet", "Job"}:
            yield Workload(kind, name, manifest["spec"])
        elif kind == "JobSet":
            for job in manifest["spec"]["replicatedJobs"]:
                yield Workload("Job", f"{name}-{job['name']}", job["template"]["spec"])


def of_kind(manifests: tuple[Manifest, ...], kind: str) -> list[Manifest]:
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
