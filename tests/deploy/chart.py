"""The Helm chart of k8s/chart as Helm's own code renders it, from the package helm-python-sdk (`make chart`)."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from tests.deploy.rendered import _LOADER, K8S, NAMESPACE, Manifests

CHART = K8S / "chart"

#: Why nothing can be rendered here; empty if it can.
NO_HELM = "" if find_spec("helm_python") else "helm-python-sdk is not installed; say make chart"

#: What the base asks for, which the component `cpu` makes smaller.
_OF_THE_BASE: Mapping[str, Any] = {
    "coordinator": {"resources": {"cpu": "500m", "memory": "512Mi"}},
    "parameterServers": {"storage": "16Gi", "resources": {"cpu": "1", "memory": "2Gi"}},
    "redis": {"resources": {"cpu": "250m", "memory": "256Mi"}},
    "networkCheck": {"resources": {"cpu": "250m", "memory": "256Mi"}},
}

_RTX_3090 = {"name": "rtx-3090", "nodes": 1, "product": "NVIDIA-GeForce-RTX-3090", "gpus": 4}

_OVERLAY = K8S / "overlays" / "multi-node-heterogeneous"


def _file(path: Path) -> str:
    return path.read_text(encoding="utf-8")


#: Shard I is on the I-th node of the job's cluster file.
_ED_LOCAL: Mapping[str, Any] = {
    **_OF_THE_BASE,
    "image": {"tag": "0.1.0-cuda"},
    "agents": [
        {"name": "titan-v", "nodes": 1, "product": "NVIDIA-TITAN-V", "gpus": 4},
        {"name": "titan-rtx", "nodes": 1, "product": "NVIDIA-TITAN-RTX", "gpus": 4},
        {"name": "rtx-2060", "nodes": 1, "product": "NVIDIA-GeForce-RTX-2060", "gpus": 4},
        {"name": "quadro-p4000", "nodes": 1, "product": "Quadro-P4000", "gpus": 4},
    ],
    "parameterServers": {**_OF_THE_BASE["parameterServers"], "count": 4, "edLocal": True},
    "runs": {"accessMode": "ReadWriteMany"},
    "job": {
        "files": {
            "model.py": _file(K8S / "base" / "job" / "model.py"),
            **{name: _file(_OVERLAY / "job" / name) for name in ("job.yaml", "cluster.yaml")},
        }
    },
}

#: Values of the chart that say the same as what Kustomize renders, by the name of that.
SAME_AS: Mapping[str, Mapping[str, Any]] = {
    "cpu-demo": {},
    "cpu-demo-insecure": {"tls": {"mode": "off"}},
    "single-node-gpu": {"image": {"tag": "0.1.0-cuda"}, "agents": [_RTX_3090], **_OF_THE_BASE},
    "multi-node-heterogeneous": _ED_LOCAL,
    "multi-node-jobset": {**_ED_LOCAL, "jobset": {"enabled": True}},
    "cpu-demo, kueue": {"kueue": {"queue": "hetpipe"}},
    "cpu-demo, monitoring": {"monitoring": {"enabled": True}},
}

MANAGED: dict[str, Any] = {
    "mode": "managed",
    "address": "redis.example.org:6380",
    "cidr": "10.20.0.0/16",
    "passwordSecret": "store",
    "caSecret": "store-ca",
}

#: Values that only the chart has, by the name of a case; one that begins with `cpu-demo` has no GPUs.
MORE: Mapping[str, Mapping[str, Any]] = {
    "cpu-demo by chart, cert-manager": {"tls": {"mode": "cert-manager"}},
    "cpu-demo by chart, managed": {"redis": MANAGED},
    "cpu-demo by chart, jobset, kueue": {
        "jobset": {"enabled": True},
        "kueue": {"queue": "hetpipe"},
        "monitoring": {"enabled": True},
    },
    "multi-node by chart, cert-manager": {**_ED_LOCAL, "tls": {"mode": "cert-manager"}},
    "two nodes by chart": {
        "image": {"digest": f"sha256:{'1' * 64}"},
        "runs": {"accessMode": "ReadWriteMany", "storageClass": "shared"},
        "parameterServers": {"storageClass": "fast"},
        "redis": {"storageClass": "fast"},
        "agents": [_RTX_3090 | {"gpus": 2}, {"name": "titan-v", "nodes": 2, "product": "NVIDIA-TITAN-V", "gpus": 1}],
    },
}


def render_chart(values: Mapping[str, Any]) -> Manifests:
    """What `helm install --values` would send."""
    return _rendered(json.dumps(values))


@functools.cache
def _rendered(values: str) -> Manifests:
    import helm_python

    with helm_python.Chart.load(CHART) as chart:
        files = chart.render(json.loads(values), name="hetpipe", namespace=NAMESPACE)
    documents = [document for text in files.values() for document in yaml.load_all(text, Loader=_LOADER)]
    return tuple(document for document in documents if document is not None)
