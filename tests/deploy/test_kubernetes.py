"""k8s/ without a cluster: it renders, the API server's schemas take it, and it keeps the rules that are promised."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from kubernetes_validate import utils as schemas

from hetpipe import server
from hetpipe.deploy import kubernetes_secrets, network_check
from hetpipe.job.file import Job, load_job
from hetpipe.runs.outcome import ExitStatus
from hetpipe.values.catalogue import type_of_device_name
from tests.cli.resolving import resolve
from tests.deploy.chart import MORE
from tests.deploy.rendered import (
    K8S,
    NAMESPACE,
    Manifest,
    Manifests,
    Workload,
    by_component,
    config_files,
    files_from,
    identities,
    matches,
    numbered,
    of_kind,
    secrets_in,
    why_no_kubectl,
)

NO_KUBECTL = why_no_kubectl()
pytestmark = pytest.mark.skipif(
    bool(NO_KUBECTL), reason=f"NOT TESTED: k8s/, because {NO_KUBECTL}; install 1.21 or newer"
)

SERVICES = {"coordinator", "parameter-server", "agent"}

#: Oldest cluster that the manifests are for (labels with the index of a pod), and the newest that is known here.
VERSIONS = ("1.29", schemas.latest_version())

#: Kinds of the cluster itself, and those whose schemas come with an operator.
CLUSTER_WIDE = {"Namespace"}
CUSTOM = {"Certificate", "Issuer", "JobSet", "PodMonitor", "PrometheusRule"}

#: Who may connect to whom. docs/kubernetes.md has the same table.
EDGES = {
    ("agent", "agent", "7500-7531"),
    ("agent", "coordinator", "7400"),
    ("agent", "parameter-server", "7410"),
    ("coordinator", "parameter-server", "7410"),
    ("coordinator", "redis", "6379"),
    ("redis", "redis", "6379"),  # replicas
    ("operator", "coordinator", "7400"),
    ("parameter-server", "coordinator", "7400"),
    ("parameter-server", "parameter-server", "7410"),
}


@functools.cache
def schema(filename: str, version: str) -> Any:
    return _SCHEMA_CONTENTS(filename, version)


_SCHEMA_CONTENTS = schemas.schema_contents


def boxes(workloads: tuple[Workload, ...]) -> Iterator[tuple[str, Workload, Manifest]]:
    for workload in workloads:
        for container in workload.containers:
            yield f"{workload.name}/{container['name']}", workload, container


class TestWhatTheServerTakes:
    @pytest.mark.parametrize("version", VERSIONS)
    def test_schemas(self, manifests: Manifests, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(schemas, "schema_contents", schema)
        for manifest in manifests:
            if manifest["kind"] not in CUSTOM:
                schemas.validate(dict(manifest), version, strict=True)

    def test_the_jobs_of_a_job_set(self, manifests: Manifests, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(schemas, "schema_contents", schema)
        for job_set in of_kind(manifests, "JobSet"):
            assert job_set["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
            assert set(job_set["spec"]) <= {
                "failurePolicy",
                "network",
                "replicatedJobs",
                "startupPolicy",
                "successPolicy",
                "suspend",
            }
            for job in job_set["spec"]["replicatedJobs"]:
                assert set(job) == {"name", "replicas", "template"}
                assert set(job["template"]) <= {"metadata", "spec"}
                alone = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": job["name"]}, **job["template"]}
                schemas.validate(alone, VERSIONS[0], strict=True)

    def test_agents_alone_wait_in_a_queue_of_kueue(self, overlay: str, manifests: Manifests) -> None:
        """Which admits what begins suspended; coordinator and shards wait for agents, and would block their queue."""
        queued = [one for one in manifests if "kueue.x-k8s.io/queue-name" in one["metadata"].get("labels", {})]
        suspended = [one for one in manifests if one.get("spec", {}).get("suspend")]
        assert queued == suspended
        assert {one["metadata"]["labels"]["app.kubernetes.io/component"] for one in queued} <= {"agent"}
        set_of_jobs = ["JobSet"] if "jobset" in overlay else ["Job"]
        assert [one["kind"] for one in queued] == (set_of_jobs if "kueue" in overlay else [])

    def test_names_are_unique_and_in_one_namespace(self, manifests: Manifests) -> None:
        names = [(manifest["kind"], manifest["metadata"]["name"]) for manifest in manifests]
        assert len(set(names)) == len(names)
        for manifest in manifests:
            wanted = None if manifest["kind"] in CLUSTER_WIDE else NAMESPACE
            assert manifest["metadata"].get("namespace") == wanted, manifest["metadata"]["name"]

    def test_the_namespace_takes_only_restricted_pods(self, overlay: str, manifests: Manifests) -> None:
        if overlay in MORE:
            assert not of_kind(manifests, "Namespace"), "a chart is installed into one"
            return
        (namespace,) = of_kind(manifests, "Namespace")
        assert namespace["metadata"]["name"] == NAMESPACE
        assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"


class TestPods:
    def test_no_rights(self, workloads: tuple[Workload, ...]) -> None:
        for workload in workloads:
            pod = workload.pod
            assert pod["automountServiceAccountToken"] is False, workload.name
            assert pod["enableServiceLinks"] is False, workload.name
            assert not {"hostNetwork", "hostPID", "hostIPC", "serviceAccountName"} & set(pod), workload.name
            context = pod["securityContext"]
            assert context["runAsNonRoot"] is True, workload.name
            assert context["runAsUser"] > 0, workload.name
            assert context["seccompProfile"] == {"type": "RuntimeDefault"}, workload.name
            kinds = {kind for volume in pod["volumes"] for kind in volume if kind != "name"}
            assert kinds <= {"configMap", "emptyDir", "persistentVolumeClaim", "projected", "secret"}, workload.name
            for volume in pod["volumes"]:
                sources = volume.get("projected", {}).get("sources", ())
                assert all(set(source) == {"secret"} for source in sources), f"{workload.name}: no tokens"

    def test_containers_keep_no_rights_either(self, workloads: tuple[Workload, ...]) -> None:
        for name, _, container in boxes(workloads):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }, name

    def test_what_they_ask_for_is_what_they_get(self, workloads: tuple[Workload, ...]) -> None:
        for name, _, container in boxes(workloads):
            resources = container["resources"]
            assert resources["requests"] == resources["limits"], name
            assert {"cpu", "memory"} <= set(resources["limits"]), name

    def test_images_have_a_fixed_version(self, workloads: tuple[Workload, ...]) -> None:
        for name, _, container in boxes(workloads):
            image, _, tag = container["image"].partition("@")[0].rpartition(":")
            assert image, f"{name} has no tag"
            assert tag != "latest", name
            assert re.match(r"\d", tag), name

    def test_secrets_are_files_of_their_owner(self, manifests: Manifests, workloads: tuple[Workload, ...]) -> None:
        assert not of_kind(manifests, "Secret")
        for name, workload, container in boxes(workloads):
            assert "envFrom" not in container, name
            for entry in container.get("env", ()):
                assert not {"secretKeyRef", "configMapKeyRef"} & set(entry.get("valueFrom", {})), name
                assert not re.search("PASSWORD|TOKEN|SECRET|KEY", entry["name"]), name
            found = {one["name"]: one.get("secret") or one.get("projected") for one in workload.pod["volumes"]}
            volumes = {volume: source for volume, source in found.items() if source}
            assert all(source["defaultMode"] == 0o400 for source in volumes.values()), name
            mounts = [mount for mount in container["volumeMounts"] if mount["name"] in volumes]
            assert all(mount["readOnly"] for mount in mounts), name

    def test_what_is_mounted_exists(self, manifests: Manifests, workloads: tuple[Workload, ...]) -> None:
        claims = {claim["metadata"]["name"] for claim in of_kind(manifests, "PersistentVolumeClaim")}
        configs = {found["metadata"]["name"] for found in of_kind(manifests, "ConfigMap")}
        for name, workload, container in boxes(workloads):
            volumes = {volume["name"]: volume for volume in workload.pod["volumes"]}
            templates = {claim["metadata"]["name"] for claim in workload.spec.get("volumeClaimTemplates", ())}
            assert {mount["name"] for mount in container["volumeMounts"]} <= set(volumes) | templates, name
            for volume in volumes.values():
                assert volume.get("persistentVolumeClaim", {}).get("claimName", "runs") in claims, name
                assert volume.get("configMap", {}).get("name", "job") in configs, name

    def test_a_volume_of_one_node_keeps_its_pods_together(
        self, manifests: Manifests, workloads: tuple[Workload, ...]
    ) -> None:
        (claim,) = of_kind(manifests, "PersistentVolumeClaim")
        for workload in workloads:
            uses = any("persistentVolumeClaim" in volume for volume in workload.pod["volumes"])
            if uses and claim["spec"]["accessModes"] == ["ReadWriteOnce"]:
                (term,) = workload.pod["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
                assert term["topologyKey"] == "kubernetes.io/hostname"
                assert term["labelSelector"]["matchLabels"] == {"app.kubernetes.io/component": "agent"}
            elif uses:
                assert claim["spec"]["accessModes"] == ["ReadWriteMany"]

    def test_scratch_is_bounded_and_shared_memory_is_memory(self, workloads: tuple[Workload, ...]) -> None:
        for workload in workloads:
            for volume in workload.pod["volumes"]:
                assert "sizeLimit" in volume.get("emptyDir", {"sizeLimit": ""}), workload.name
        for workload in by_component(workloads, "agent"):
            (shm,) = [volume for volume in workload.pod["volumes"] if volume["name"] == "shm"]
            assert shm["emptyDir"]["medium"] == "Memory"
            assert {"name": "shm", "mountPath": "/dev/shm"} in workload.containers[0]["volumeMounts"]

    def test_the_state_of_a_shard_outlives_its_container_its_pod_and_its_node(
        self, workloads: tuple[Workload, ...]
    ) -> None:
        for workload in by_component(workloads, "parameter-server"):
            (container,) = workload.containers
            assert {"name": "state", "mountPath": "/state"} in container["volumeMounts"]
            assert "--state=/state" in workload.command(container)
            assert "state" not in [volume["name"] for volume in workload.pod["volumes"]]
            (claim,) = workload.spec["volumeClaimTemplates"]
            assert (claim["metadata"]["name"], claim["spec"]["accessModes"]) == ("state", ["ReadWriteOnce"])

    def test_a_node_does_not_take_the_coordinator_and_the_clock_shard_with_it(
        self, overlay: str, workloads: tuple[Workload, ...]
    ) -> None:
        (coordinator,) = by_component(workloads, "coordinator")
        if "nodeAffinity" not in coordinator.pod["affinity"] and "podAffinity" in coordinator.pod["affinity"]:
            assert not overlay.startswith("multi-node"), "all on one node"
            return
        told = coordinator.pod["affinity"]["podAntiAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
        clock_shard = {"app.kubernetes.io/component": "parameter-server", "apps.kubernetes.io/pod-index": "0"}
        rules = {term["weight"]: term["podAffinityTerm"] for term in told}
        assert max(rules) == 100
        assert rules[100]["labelSelector"]["matchLabels"] == clock_shard
        assert {term["topologyKey"] for term in rules.values()} == {"kubernetes.io/hostname"}
        if not overlay.startswith("multi-node"):
            return
        # Here shard 0 has a node of its own, which the coordinator must not be on.
        (first,) = [s for s in by_component(workloads, "parameter-server") if s.spec["ordinals"]["start"] == 0]
        required = coordinator.pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        ((rule,),) = [term["matchExpressions"] for term in required["nodeSelectorTerms"]]
        assert rule["operator"] == "NotIn"
        assert {rule["key"]: rule["values"]} == {key: [value] for key, value in first.pod["nodeSelector"].items()}

    def test_parameter_servers_keep_apart(self, overlay: str, workloads: tuple[Workload, ...]) -> None:
        for shard in by_component(workloads, "parameter-server"):
            if overlay.startswith("multi-node"):
                anti = shard.pod["affinity"]["podAntiAffinity"]
                (term,) = anti["requiredDuringSchedulingIgnoredDuringExecution"]
                assert term["labelSelector"]["matchLabels"] == {"app.kubernetes.io/component": "parameter-server"}
            else:
                (spread,) = shard.pod["topologySpreadConstraints"]
                assert spread["whenUnsatisfiable"] == "ScheduleAnyway"

    def test_shards_are_found_by_names_that_stay(self, manifests: Manifests, workloads: tuple[Workload, ...]) -> None:
        (service,) = [s for s in of_kind(manifests, "Service") if s["metadata"]["name"] == "parameter-server"]
        assert (service["spec"]["clusterIP"], service["spec"]["publishNotReadyAddresses"]) == ("None", True)
        for workload in by_component(workloads, "parameter-server"):
            assert workload.spec["serviceName"] == "parameter-server"
            assert "--advertise=pod-x.parameter-server" in workload.command(workload.containers[0])

    def test_ends_have_time_for_a_checkpoint(self, workloads: tuple[Workload, ...]) -> None:
        for component in ("parameter-server", "agent"):
            assert all(
                found.pod["terminationGracePeriodSeconds"] >= 120 for found in by_component(workloads, component)
            )

    def test_servers_are_probed(self, workloads: tuple[Workload, ...]) -> None:
        for component in ("coordinator", "parameter-server", "redis"):
            for workload in by_component(workloads, component):
                assert {"readinessProbe", "livenessProbe"} <= set(workload.containers[0])
        for workload in (w for component in SERVICES for w in by_component(workloads, component)):
            alive = workload.containers[0]["livenessProbe"]["grpc"]
            assert alive["service"] == "live", "who is busy, or waits for others, is not killed for it"
        for _, workload, container in boxes(workloads):
            for probe in (container.get("readinessProbe", {}), container.get("livenessProbe", {})):
                if "grpc" in probe:
                    assert probe["grpc"]["port"] == workload.ports["health"]
                if "tcpSocket" in probe:
                    assert probe["tcpSocket"]["port"] in workload.ports


class TestCommands:
    def test_options_are_those_of_the_programs(
        self, workloads: tuple[Workload, ...], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        parsed: list[Any] = []

        def keep(_role: str, options: Any, _serve: object) -> int:
            parsed.append(options)
            return 0

        monkeypatch.setattr(network_check, "check", lambda *_, **__: True)
        for name, workload, container in boxes(workloads):
            if workload.component == "redis":
                continue
            program, *arguments = workload.command(container)
            if program == "hetpipe" and arguments[0] != "serve":
                word, command, rest = resolve(arguments)
                command.make_context(word, rest)
                continue
            assert (program, arguments[0]) in {("python", "-m"), ("hetpipe", "serve")}, name
            module = import_module(server.SERVICES.get(arguments[1], arguments[1]))
            monkeypatch.setattr(module, "run_service", keep, raising=False)
            assert module.main(arguments[2:]) == (
                parsed[-1].sigterm_exit_status if workload.component == "agent" else 0
            ), name
            if workload.component in SERVICES:
                ports = {
                    name: getattr(parsed[-1], option)
                    for name, option in _PORT_OPTIONS.items()
                    if hasattr(parsed[-1], option)
                }
                assert {port: number for port, number in workload.ports.items() if port in ports} == ports, name

    def test_an_agent_that_was_told_to_end_is_started_again(self, workloads: tuple[Workload, ...]) -> None:
        """An Indexed Job takes status 0 for the end of an index, and counts every other one that it does not ignore."""
        for workload in by_component(workloads, "agent"):
            (container,) = workload.containers
            (option,) = [word for word in workload.command(container) if word.startswith("--sigterm-exit-status=")]
            ignored = [
                rule["onExitCodes"]
                for rule in workload.spec["podFailurePolicy"]["rules"]
                if rule["action"] == "Ignore" and "onExitCodes" in rule
            ]
            status = int(option.partition("=")[2])
            assert ignored == [{"containerName": container["name"], "operator": "In", "values": [status]}]
            assert status != 0
            (drain,) = [word for word in workload.command(container) if word.startswith("--drain-seconds=")]
            # Time for a barrier with its checkpoint; and then to kill what is left, and to tell that.
            assert 60 <= int(drain.partition("=")[2]) <= workload.pod["terminationGracePeriodSeconds"] - 10
            assert "lifecycle" not in container

    def test_submit_does_not_own_the_run(self, workloads: tuple[Workload, ...]) -> None:
        """Whoever takes its pod takes nothing else: the next one follows the same run, and nobody counts."""
        for workload in workloads:
            if workload.name != "submit":
                continue
            (container,) = workload.pod["containers"]
            ignore, told, fail = workload.spec["podFailurePolicy"]["rules"]
            assert ignore == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
            assert (told["action"], told["onExitCodes"]["values"]) == ("Ignore", [ExitStatus.DETACHED])
            assert fail["action"] == "FailJob"
            final = {ExitStatus.FAILED, ExitStatus.USAGE, ExitStatus.INTERRUPTED}
            assert set(fail["onExitCodes"]["values"]) == final, "not when it lost contact"
            assert told["onExitCodes"]["containerName"] == fail["onExitCodes"]["containerName"] == container["name"]
            assert "--run-dir=/runs/submit-$(JOB_UID)" in container["command"]
            (uid,) = [entry for entry in container["env"] if entry["name"] == "JOB_UID"]
            path = uid["valueFrom"]["fieldRef"]["fieldPath"]
            assert path == "metadata.labels['batch.kubernetes.io/controller-uid']"

    def test_addresses_are_of_services_and_may_be_reached(
        self, manifests: Manifests, workloads: tuple[Workload, ...]
    ) -> None:
        ports = {
            (service["metadata"]["name"], port["port"])
            for service in of_kind(manifests, "Service")
            for port in service["spec"]["ports"]
        }
        for name, workload, container in boxes(workloads):
            for word in workload.command(container):
                found = re.fullmatch(
                    r"(?:--(?:coordinator|allowed)=|--store=rediss?://\w+@)([\w-]+):(\d+)(?:/0)?", word
                )
                if found:
                    assert (found[1], int(found[2])) in ports, f"{name}: {word}"
                    assert (workload.component, found[1], found[2]) in EDGES, f"{name}: {word}"

    def test_the_network_check_tries_what_is_forbidden(self, workloads: tuple[Workload, ...]) -> None:
        (check,) = [workload for workload in workloads if workload.name == "network-check"]
        words = check.command(check.containers[0])
        forbidden = [word.removeprefix("--forbidden=") for word in words if word.startswith("--forbidden=")]
        assert {address.split(":")[0] for address in forbidden} == {
            "parameter-server",
            "kubernetes.default.svc",
            *(workload.component for workload in by_component(workloads, "redis")),
        }
        assert not {("operator", *address.split(":")) for address in forbidden} & EDGES


_PORT_OPTIONS = {
    "grpc": "port",
    "health": "health_port",
    "metrics": "metrics_port",
    "stage-0": "stage_port",
}


class TestTls:
    def test_it_is_on_unless_the_name_says_otherwise(self, overlay: str, workloads: tuple[Workload, ...]) -> None:
        for workload in workloads:
            container = workload.containers[-1]
            speaks = workload.component in SERVICES or workload.name == "submit"
            insecure = overlay.endswith("-insecure")
            assert ("HETPIPE_TLS" in workload.environment(container)) == (speaks and not insecure), workload.name
            refuses = workload.component in SERVICES and insecure
            assert ("--insecure" in workload.command(container)) == refuses, workload.name

    def test_every_process_finds_its_own_files_in_the_secrets(
        self, overlay: str, manifests: Manifests, workloads: tuple[Workload, ...], tmp_path: Path
    ) -> None:
        for folder in sorted({name for workload in workloads for name in identities(workload)}):
            (tmp_path / folder).mkdir()
            for file in ("ca.pem", "cert.pem", "key.pem"):
                (tmp_path / folder / file).write_text(folder)
        made = {
            **kubernetes_secrets.secrets_of(tmp_path, "password", "another"),
            **secrets_of_cert_manager(manifests),
            "store": {},  # of a managed Redis, as the next one
            "store-ca": {},
        }
        for workload in workloads:
            assert {secret for volume in workload.pod["volumes"] for secret in secrets_in(volume)} <= set(made)
            speaks = workload.name != "network-check" and not overlay.endswith("-insecure")
            for number, identity in enumerate(identities(workload)):
                known = workload.environment(workload.containers[-1]) | numbered(workload, number)
                files = dict(files_from(made, workload, known))
                tls = {path.removeprefix("/run/hetpipe/tls/"): text for path, text in files.items() if "tls" in path}
                # The signer, which the coordinator has from cert-manager here.
                tls = {file: text for file, text in tls.items() if not file.startswith("signer-")}
                assert set(tls) == ({"ca.pem", "cert.pem", "key.pem"} if speaks else set()), workload.name
                assert {tls[file] for file in tls if file != "ca.pem"} <= {identity.encode()}, workload.name


def selects(service: Manifest, workload: Workload) -> bool:
    """Whether a Service is of pods of a workload, or of one of them."""
    own = [f"{workload.name}-{i}" for i in range(workload.spec.get("replicas", 0))] or [workload.name]
    found = [{**workload.labels, "statefulset.kubernetes.io/pod-name": name} for name in own]
    return any(matches({"matchLabels": service["spec"]["selector"]}, labels) for labels in found)


def secrets_of_cert_manager(manifests: Manifests) -> dict[str, dict[str, bytes]]:
    """Secret → key → content that it makes of Certificates: what is of one process is the name of its folder."""
    made = {}
    for certificate in of_kind(manifests, "Certificate"):
        (uri,) = certificate["spec"].get("uris", ["spiffe://hetpipe/signer/only"])
        _, role, name = uri.removeprefix("spiffe://").split("/")
        folder = {"coordinator": "coordinator", "operator": "operator-me"}.get(role, f"{role}-{name}").encode()
        made[certificate["spec"]["secretName"]] = {"ca.crt": b"", "tls.crt": folder, "tls.key": folder}
    return made


class TestNetwork:
    def test_services_and_budgets_find_their_pods(self, manifests: Manifests, workloads: tuple[Workload, ...]) -> None:
        for service in of_kind(manifests, "Service"):
            pods = [found for found in workloads if selects(service, found)]
            assert pods, service["metadata"]["name"]
            for port, pod in product(service["spec"]["ports"], pods):
                assert pod.ports[port["targetPort"]] == port["port"]
        for budget in of_kind(manifests, "PodDisruptionBudget"):
            assert any(matches(budget["spec"]["selector"], workload.labels) for workload in workloads)
        names = {service["metadata"]["name"] for service in of_kind(manifests, "Service")}
        for workload in workloads:
            assert matches(workload.spec.get("selector", {}), workload.labels), workload.name
            assert workload.spec.get("serviceName", "coordinator") in names, workload.name

    def test_the_service_of_redis_is_its_primary(self, manifests: Manifests, workloads: tuple[Workload, ...]) -> None:
        for redis in by_component(workloads, "redis"):
            (service,) = [found for found in of_kind(manifests, "Service") if selects(found, redis)]
            primary = redis.environment(redis.containers[0]).get("PRIMARY")
            selected = service["spec"]["selector"].get("statefulset.kubernetes.io/pod-name")
            assert (primary, selected) in {(None, None), ("redis-0", "redis-0")}
            assert (primary is None) == (redis.spec["replicas"] == 1)

    def test_nothing_may_connect_unless_it_is_said(self, manifests: Manifests) -> None:
        wanted = {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
        assert [policy["spec"] for policy in of_kind(manifests, "NetworkPolicy")].count(wanted) == 1

    def test_edges_out_and_in_are_the_same_and_as_promised(
        self, overlay: str, manifests: Manifests, workloads: tuple[Workload, ...]
    ) -> None:
        promised = {edge if edge[:2] != ("agent", "agent") else (*edge[:2], "any") for edge in EDGES}
        promised = promised if overlay.endswith("-insecure") else EDGES
        components = {workload.component for workload in workloads}
        (replicas,) = {redis.spec["replicas"] for redis in by_component(workloads, "redis")} or {0}
        promised = {edge for edge in promised if set(edge[:2]) <= components and (edge[0] != "redis" or replicas > 1)}
        assert set(_edges(manifests, workloads, "egress")) == promised
        assert set(_edges(manifests, workloads, "ingress")) == promised

    def test_the_documentation_has_the_same_edges(self) -> None:
        rows = re.findall(
            r"^\| `([a-z-]+)` \| `([a-z-]+)` \| ([\d-]+) \|$",
            (K8S.parent / "docs/kubernetes.md").read_text(),
            re.MULTILINE,
        )
        assert rows == sorted(EDGES)

    def test_edges_end_at_ports_that_are_there(self, workloads: tuple[Workload, ...]) -> None:
        for _, to, ports in EDGES:
            first = int(ports.split("-")[0])
            assert all(first in workload.ports.values() for workload in by_component(workloads, to)), (to, ports)

    def test_names_can_be_resolved(self, manifests: Manifests) -> None:
        (dns,) = [policy for policy in of_kind(manifests, "NetworkPolicy") if policy["metadata"]["name"] == "dns"]
        assert dns["spec"]["podSelector"] == {}
        assert dns["spec"]["egress"][0]["ports"] == [{"port": 53, "protocol": "UDP"}, {"port": 53, "protocol": "TCP"}]


def _edges(manifests: Manifests, workloads: tuple[Workload, ...], way: str) -> Iterator[tuple[str, str, str]]:
    """(from, to, ports) as one side of the policies says; what lies outside of the namespace is left out."""
    labels = {json.dumps(workload.labels, sort_keys=True): workload for workload in workloads}.values()
    for policy in of_kind(manifests, "NetworkPolicy"):
        own = {pod.component for pod in labels if matches(policy["spec"]["podSelector"], pod.labels)}
        assert own, policy["metadata"]["name"]
        for rule in policy["spec"].get(way, ()):
            peers = rule["to" if way == "egress" else "from"]
            selectors = [peer["podSelector"] for peer in peers if set(peer) == {"podSelector"}]
            others = {pod.component for pod in labels for selector in selectors if matches(selector, pod.labels)}
            assert others or not selectors, policy["metadata"]["name"]
            for one, other, port in product(own, others, rule.get("ports", [{"port": "any"}])):
                last = f"-{port['endPort']}" if "endPort" in port else ""
                yield (*((one, other) if way == "egress" else (other, one)), f"{port['port']}{last}")


class TestJob:
    def test_there_is_enough_for_it(
        self, manifests: Manifests, workloads: tuple[Workload, ...], tmp_path: Path
    ) -> None:
        job = _job(manifests, tmp_path)
        shards = by_component(workloads, "parameter-server")
        indices = [identity.rpartition("-")[2] for shard in shards for identity in identities(shard)]
        assert sorted(map(int, indices)) == list(range(job.parameter_servers.count))
        devices = sum(
            agents.spec["completions"] * _devices(agents.command(agents.containers[0]), agents.containers[0])
            for agents in by_component(workloads, "agent")
        )
        assert devices == (job.num_devices if job.cluster.file is None else len(job.cluster.file.devices))

    def test_its_code_may_be_imported(self, manifests: Manifests, workloads: tuple[Workload, ...]) -> None:
        assert config_files(manifests)["job"]["model.py"] == (K8S.parent / "examples/digits/model.py").read_bytes()
        for agents in by_component(workloads, "agent"):
            assert "--allow-modules=model" in agents.command(agents.containers[0])

    def test_nodes_are_where_the_cluster_file_has_them(
        self, manifests: Manifests, workloads: tuple[Workload, ...], tmp_path: Path
    ) -> None:
        cluster = _job(manifests, tmp_path).cluster.file
        if cluster is None:
            return
        agents = {agents.labels["hetpipe/agents"]: agents for agents in by_component(workloads, "agent")}
        shards = {shard.spec["ordinals"]["start"]: shard for shard in by_component(workloads, "parameter-server")}
        for index, node in enumerate(cluster.nodes):
            group = agents[node.name.removesuffix("-0")]
            product_name = group.pod["nodeSelector"]["nvidia.com/gpu.product"]
            assert {type_of_device_name(product_name)} == set(node.devices)
            assert group.containers[0]["resources"]["limits"]["nvidia.com/gpu"] == len(node.devices)
            assert shards[index].pod["nodeSelector"] == group.pod["nodeSelector"]
            assert "podAntiAffinity" in shards[index].pod["affinity"]

    def test_gpus_are_asked_for_by_product(self, overlay: str, workloads: tuple[Workload, ...]) -> None:
        for agents in by_component(workloads, "agent"):
            product_name = agents.pod.get("nodeSelector", {}).get("nvidia.com/gpu.product")
            assert (product_name is None) == overlay.startswith("cpu-demo")
            assert product_name is None or type_of_device_name(product_name) is not None


def _job(manifests: Manifests, folder: Path) -> Job:
    for name, content in config_files(manifests)["job"].items():
        (folder / name).write_bytes(content)
    return load_job(folder / "job.yaml")


def _devices(command: list[str], container: Manifest) -> int:
    asked = [int(word.removeprefix("--cpu-devices=")) for word in command if word.startswith("--cpu-devices=")]
    return asked[0] if asked else int(container["resources"]["limits"]["nvidia.com/gpu"])
