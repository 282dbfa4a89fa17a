"""Every overlay of k8s/, rendered once, and the chart with each of its options."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.deploy.chart import MORE, NO_HELM, render_chart
from tests.deploy.rendered import K8S, NAMESPACE, OVERLAYS, Manifests, Workload, render, workloads_in

#: Overlays with more components, as users would add them.
WITH_MORE = (
    "multi-node-heterogeneous, monitoring",
    "multi-node-jobset, kueue",
    "cpu-demo, kueue",
    "cpu-demo, monitoring",
    "cpu-demo, redis-replicas",
)


def rendered(name: str, folder: Path) -> Manifests:
    """What Kustomize makes of an overlay with components, for which `folder` gets a file; or Helm of the chart."""
    if name in MORE:
        return render_chart(MORE[name])
    if name not in WITH_MORE:
        return render(K8S / "overlays" / name)
    base, *components = name.split(", ")
    paths = [f"overlays/{base}", *(f"components/{component}" for component in components)]
    resource, *added = (os.path.relpath(K8S / path, folder) for path in paths)
    kustomization = {"namespace": NAMESPACE, "resources": [resource], "components": added}
    (folder / "kustomization.yaml").write_text(json.dumps(kustomization))
    return render(folder)


@pytest.fixture(scope="session", params=[*OVERLAYS, *WITH_MORE, *MORE])
def overlay(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if name in MORE and NO_HELM:
        pytest.skip(f"NOT TESTED: k8s/chart, because {NO_HELM}")
    return name


@pytest.fixture(scope="session")
def manifests(overlay: str, tmp_path_factory: pytest.TempPathFactory) -> Manifests:
    return rendered(overlay, tmp_path_factory.mktemp("overlay"))


@pytest.fixture(scope="session")
def workloads(manifests: Manifests) -> tuple[Workload, ...]:
    return tuple(workloads_in(manifests))
