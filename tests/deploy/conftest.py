"""Every overlay of k8s/, rendered once."""

from __future__ import annotations

import json
import os

import pytest

from tests.deploy.rendered import K8S, NAMESPACE, OVERLAYS, Manifests, Workload, render, workloads_in

WITH_MONITORING = "multi-node-heterogeneous, monitoring"


@pytest.fixture(scope="session", params=[*OVERLAYS, WITH_MONITORING])
def overlay(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="session")
def manifests(overlay: str, tmp_path_factory: pytest.TempPathFactory) -> Manifests:
    if overlay != WITH_MONITORING:
        return render(K8S / "overlays" / overlay)
    folder = tmp_path_factory.mktemp("monitoring")
    base, component = (
        os.path.relpath(K8S / path, folder) for path in ("overlays/multi-node-heterogeneous", "components/monitoring")
    )
    kustomization = {"namespace": NAMESPACE, "resources": [base], "components": [component]}
    (folder / "kustomization.yaml").write_text(json.dumps(kustomization))
    return render(folder)


@pytest.fixture(scope="session")
def workloads(manifests: Manifests) -> tuple[Workload, ...]:
    return tuple(workloads_in(manifests))
