"""Every overlay of k8s/, rendered once."""

from __future__ import annotations

import json
import os

import pytest

from tests.deploy.rendered import K8S, NAMESPACE, OVERLAYS, Manifests, Workload, render, workloads_in

#: Overlays with more components, as users would add them.
WITH_MORE = ("multi-node-heterogeneous, monitoring", "multi-node-jobset, kueue", "cpu-demo, kueue")


@pytest.fixture(scope="session", params=[*OVERLAYS, *WITH_MORE])
def overlay(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="session")
def manifests(overlay: str, tmp_path_factory: pytest.TempPathFactory) -> Manifests:
    if overlay not in WITH_MORE:
        return render(K8S / "overlays" / overlay)
    folder = tmp_path_factory.mktemp("more")
    base, *components = overlay.split(", ")
    paths = [f"overlays/{base}", *(f"components/{component}" for component in components)]
    resource, *added = (os.path.relpath(K8S / path, folder) for path in paths)
    kustomization = {"namespace": NAMESPACE, "resources": [resource], "components": added}
    (folder / "kustomization.yaml").write_text(json.dumps(kustomization))
    return render(folder)


@pytest.fixture(scope="session")
def workloads(manifests: Manifests) -> tuple[Workload, ...]:
    return tuple(workloads_in(manifests))
