"""The Helm chart: the same as Kustomize renders; certificates of cert-manager; values that it refuses.

`test_kubernetes.py` checks what it renders by the rules for all manifests.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml
from cryptography import x509

import hetpipe
from hetpipe.certs.authority import Authority, new_key
from hetpipe.values.identity import STAGE_DOMAIN, NamedPeer, Role
from tests.deploy.chart import CHART, MANAGED, MORE, NO_HELM, SAME_AS, render_chart
from tests.deploy.conftest import rendered
from tests.deploy.rendered import (
    Manifest,
    Manifests,
    Workload,
    by_component,
    identities,
    of_kind,
    why_no_kubectl,
    workloads_in,
)

pytestmark = pytest.mark.skipif(bool(NO_HELM), reason=f"NOT TESTED: k8s/chart, because {NO_HELM}")


def by_name(manifests: Manifests) -> dict[tuple[str, str], Manifest]:
    return {(found["kind"], found["metadata"]["name"]): found for found in manifests}


def without_what_differs(manifests: Manifests) -> dict[tuple[str, str], Manifest]:
    """By kind and name.

    Without the namespace, into which a chart is installed; and without the digest that restarts Redis when its settings
    change: in a name for Kustomize, in an annotation for Helm. Kustomize labels nothing of the component monitoring.
    """
    found = deepcopy([one for one in manifests if one["kind"] != "Namespace"])
    for one in found:
        one["metadata"]["name"] = _plain(one["metadata"]["name"])
        labels = one["metadata"].setdefault("labels", {})
        labels.pop("app.kubernetes.io/name", None)
        template = one.get("spec", {}).get("template", {})
        template.get("metadata", {}).pop("annotations", None)
        for volume in template.get("spec", {}).get("volumes", ()):
            if "configMap" in volume:
                volume["configMap"]["name"] = _plain(volume["configMap"]["name"])
    return by_name(tuple(found))


def _plain(name: str) -> str:
    return re.sub(r"^redis-[0-9a-z]{10}$", "redis", name)


@pytest.mark.skipif(bool(why_no_kubectl()), reason=f"NOT TESTED: chart and Kustomize, because {why_no_kubectl()}")
@pytest.mark.parametrize("name", SAME_AS)
def test_it_is_what_kustomize_renders(name: str, tmp_path: Path) -> None:
    ours, theirs = without_what_differs(render_chart(SAME_AS[name])), without_what_differs(rendered(name, tmp_path))
    assert set(ours) == set(theirs)
    for key, manifest in ours.items():
        assert manifest == theirs[key], key


def test_helm_finds_no_fault() -> None:
    import helm_python

    for values in (*SAME_AS.values(), *MORE.values()):
        report = helm_python.lint(CHART, dict(values), strict=True)
        assert [one for one in report["messages"] if one["severity"] > 1] == []
        assert not report["errors"]


def test_versions() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == hetpipe.__version__


def test_agents_of_a_job_set_are_those_of_the_jobs() -> None:
    jobs = {
        f"agents-{one['name']}": one["template"]["spec"] for one in job_set(render_chart({"jobset": {"enabled": True}}))
    }
    assert jobs == {
        one["metadata"]["name"]: one["spec"]
        for one in of_kind(render_chart({}), "Job")
        if "agents" in str(one["metadata"]["name"])
    }


def job_set(manifests: Manifests) -> list[Manifest]:
    (found,) = of_kind(manifests, "JobSet")
    jobs: list[Manifest] = found["spec"]["replicatedJobs"]
    return jobs


class TestCertificates:
    def test_they_are_those_that_the_project_issues(self) -> None:
        """Names, key, uses: what `hetpipe certs issue` puts into a certificate is what cert-manager is asked for."""
        manifests = render_chart({"tls": {"mode": "cert-manager"}})
        leaves = {
            one["metadata"]["name"]: one["spec"]
            for one in of_kind(manifests, "Certificate")
            if not one["spec"].get("isCA")
        }
        root = Authority.new_root()
        expected = {name for workload in workloads_in(manifests) for name in identities(workload)}
        # Operators are named by their owners; the chart's own is `submit`.
        expected = {name.replace("operator-me", "operator-submit") for name in expected} - {
            "coordinator",
            "redis-redis",
        }
        expected |= {"coordinator-coordinator", "redis-redis"}
        assert {name.removeprefix("tls-") for name in leaves} == expected
        for spec in leaves.values():
            (uri,) = spec["uris"]
            _, role, name = uri.removeprefix("spiffe://").split("/")
            peer = NamedPeer(Role(role), name)
            issued = x509.load_pem_x509_certificate(root.issue(peer, new_key().public_key(), days=1))
            names = issued.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
            assert spec["uris"] == names.get_values_for_type(x509.UniformResourceIdentifier)
            assert spec["dnsNames"] == names.get_values_for_type(x509.DNSName)
            assert set(spec["usages"]) == {"digital signature", "server auth", "client auth"}
            key = issued.public_key()
            assert (spec["privateKey"]["algorithm"], spec["privateKey"]["size"]) == ("ECDSA", key.key_size)  # type: ignore[union-attr]
            assert spec["issuerRef"]["name"] == "hetpipe"

    def test_the_signer_is_limited_to_stages(self) -> None:
        authorities = [
            one
            for one in of_kind(render_chart({"tls": {"mode": "cert-manager"}}), "Certificate")
            if one["spec"].get("isCA")
        ]
        specs = {one["metadata"]["name"]: one["spec"] for one in authorities}
        assert specs["tls-stage-signer"]["nameConstraints"] == {
            "critical": True,
            "permitted": {"dnsDomains": [STAGE_DOMAIN], "uriDomains": [STAGE_DOMAIN]},
        }
        assert specs["tls-stage-signer"]["issuerRef"]["name"] == "hetpipe"
        assert specs["tls-root"]["issuerRef"]["name"] == "hetpipe-self-signed"

    def test_a_managed_redis_has_a_certificate_of_its_own(self) -> None:
        manifests = render_chart({"tls": {"mode": "cert-manager"}, "redis": MANAGED})
        assert "tls-redis-redis" not in [one["metadata"]["name"] for one in of_kind(manifests, "Certificate")]


def test_the_coordinator_of_a_managed_redis() -> None:
    manifests = render_chart({"redis": MANAGED | {"user": "me", "database": 3, "replicas": 1}})
    (coordinator,) = by_component(tuple(workloads_in(manifests)), "coordinator")
    (container,) = coordinator.containers
    assert "--store=rediss://me@redis.example.org:6380/3" in coordinator.command(container)
    assert "--store-replicas=1" in coordinator.command(container)
    assert [word for word in coordinator.command(container) if word.startswith("--store-ca")] == [
        "--store-ca=/run/hetpipe/store-ca/ca.crt"
    ]
    secrets = {
        volume["name"]: volume["secret"]["secretName"] for volume in coordinator.pod["volumes"] if "secret" in volume
    }
    assert secrets == {"store-password": "store", "store-ca": "store-ca", "tls": "tls-coordinator"}
    assert not by_component(tuple(workloads_in(manifests)), "redis")
    (policy,) = [one for one in of_kind(manifests, "NetworkPolicy") if one["metadata"]["name"] == "coordinator"]
    assert {"to": [{"ipBlock": {"cidr": "10.20.0.0/16"}}], "ports": [{"protocol": "TCP", "port": 6380}]} in policy[
        "spec"
    ]["egress"]


def test_a_plain_managed_redis_is_reached_without_tls() -> None:
    (coordinator,) = by_component(tuple(workloads_in(render_chart({"redis": MANAGED | {"tls": False}}))), "coordinator")
    words = coordinator.command(coordinator.containers[0])
    assert "--store=redis://hetpipe@redis.example.org:6380/0" in words
    assert not [word for word in words if word.startswith("--store-ca")]


def test_a_job_of_ones_own() -> None:
    (found,) = [
        one
        for one in of_kind(render_chart({"job": {"files": {"job.yaml": "name: mine\n"}}}), "ConfigMap")
        if one["metadata"]["name"] == "job"
    ]
    assert found["data"] == {"job.yaml": "name: mine\n"}


def ed_local(**changes: Any) -> dict[str, Any]:
    """Values of two nodes with a shard each."""
    agents, runs = [node("a", "A"), node("b", "B")], {"accessMode": "ReadWriteMany"}
    return {"parameterServers": {"count": 2, "edLocal": True}, "agents": agents, "runs": runs} | changes


def node(name: str, product: str) -> dict[str, Any]:
    return {"name": name, "nodes": 1, "product": product, "gpus": 1}


def test_ed_local_by_itself_is_accepted() -> None:
    assert [one.spec["ordinals"]["start"] for one in shards(render_chart(ed_local()))] == [0, 1]


def shards(manifests: Manifests) -> list[Workload]:
    return by_component(tuple(workloads_in(manifests)), "parameter-server")


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"redis": {"mode": "managed"}}, "address"),
        ({"redis": {"mode": "sentinel"}}, "mode"),
        ({"tls": {"mode": "certmanager"}}, "mode"),
        ({"image": {"tag": "latest"}}, "tag"),
        ({"agents": [{"name": "cpu", "nodes": 1}]}, "agents"),
        ({"agents": [{"name": "Not A Name", "nodes": 1, "cpuDevices": 1}]}, "name"),
        ({"parameterServer": {"count": 3}}, "parameterServer"),
        ({"parameterServers": {"edLocal": True}}, "a `product` of its own"),
        (ed_local(agents=[node("a", "A"), node("b", "A")]), "a `product` of its own"),
        (ed_local(agents=[node("a", "A") | {"nodes": 2}, node("b", "B")]), "`nodes: 1`"),
        (ed_local(agents=[node("a", "A")]), "number of groups"),
        (ed_local(runs={"accessMode": "ReadWriteOnce"}), "ReadWriteMany"),
    ],
)
def test_wrong_values_are_refused(values: Mapping[str, Any], word: str) -> None:
    import helm_python

    with pytest.raises(helm_python.HelmError, match=word):
        render_chart(values)
