"""Redis of k8s/: what every overlay says about it, and who gets in when it runs as it is said there."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hetpipe.certs.folders import init_authority, issue_certificate
from hetpipe.cli.app import app
from hetpipe.deploy.kubernetes_secrets import REDIS_USER, kept_password, secrets_of
from hetpipe.errors import StoreUnavailable
from hetpipe.storage.redis_access import RedisAccess
from hetpipe.storage.redis_acl import acl_lines
from hetpipe.storage.redis_store import RedisStore
from hetpipe.storage.store import Store
from hetpipe.storage.stores import open_store
from hetpipe.values.identity import NamedPeer, Role
from hetpipe.values.ids import Term
from tests.deploy.rendered import (
    K8S,
    Manifests,
    Workload,
    by_component,
    config_files,
    files_from,
    redis_settings,
    render,
    why_no_kubectl,
    workloads_in,
)
from tests.storage.redis_server import end, needs_redis, started
from tests.storage.store_contract import DurableStoreContract, acquire

NO_KUBECTL = why_no_kubectl()
pytestmark = pytest.mark.skipif(bool(NO_KUBECTL), reason=f"NOT TESTED: Redis of k8s/, because {NO_KUBECTL}")

HOST, PORT = "127.0.0.1", "6379"
TLS = "/run/hetpipe/tls"


def settings(manifests: Manifests, redis: Workload) -> dict[str, str]:
    """What its command makes it read."""
    (program, path) = redis.command(redis.containers[0])
    assert program == "redis-server"
    return redis_settings(dict(files_from(config_files(manifests), redis, {})), path)


@pytest.fixture
def _of_our_own(workloads: tuple[Workload, ...]) -> None:
    if not by_component(workloads, "redis"):
        pytest.skip("its Redis is somebody else's")


@pytest.mark.usefixtures("_of_our_own")
class TestWhatIsSaid:
    def test_one_port_and_with_tls_only_for_who_has_a_certificate(
        self, overlay: str, manifests: Manifests, workloads: tuple[Workload, ...]
    ) -> None:
        (redis,) = by_component(workloads, "redis")
        assert redis.ports == {"redis": int(PORT)}
        tls = {
            "port": "0",
            "tls-port": PORT,
            "tls-auth-clients": "yes",
            "tls-ca-cert-file": f"{TLS}/ca.pem",
            "tls-cert-file": f"{TLS}/cert.pem",
            "tls-key-file": f"{TLS}/key.pem",
        }
        served = {
            name: value
            for name, value in settings(manifests, redis).items()
            if name.startswith(("port", "tls", "unix"))
        }
        assert served == ({"port": PORT} if overlay.endswith("-insecure") else tls)

    def test_nobody_without_a_name(self, manifests: Manifests, workloads: tuple[Workload, ...]) -> None:
        (redis,) = by_component(workloads, "redis")
        found = settings(manifests, redis)
        users = dict(files_from(secrets_of(Path(), "password"), redis, {}))
        assert users[found["aclfile"]].decode().splitlines() == list(acl_lines(REDIS_USER, "password"))
        assert found["protected-mode"] == "yes"

    def test_every_write_is_on_a_volume(self, manifests: Manifests, workloads: tuple[Workload, ...]) -> None:
        (redis,) = by_component(workloads, "redis")
        found = settings(manifests, redis)
        assert {name: found[name] for name in ("appendonly", "appendfsync", "maxmemory-policy")} == {
            "appendonly": "yes",
            "appendfsync": "always",
            "maxmemory-policy": "noeviction",
        }
        (mount,) = (mount for mount in redis.containers[-1]["volumeMounts"] if mount["mountPath"] == found["dir"])
        assert [claim["metadata"]["name"] for claim in redis.spec["volumeClaimTemplates"]] == [mount["name"]]

    def test_probes_need_no_other_way_in(self, overlay: str, workloads: tuple[Workload, ...]) -> None:
        (redis,) = by_component(workloads, "redis")
        shown = f"--cacert {TLS}/ca.pem --cert {TLS}/cert.pem --key {TLS}/key.pem"
        asked = {"exec": {"command": ["sh", "-c", f"redis-cli --tls {shown} ping | grep -q NOAUTH"]}}
        wanted = {"tcpSocket": {"port": "redis"}} if overlay.endswith("-insecure") else asked
        for name in ("readinessProbe", "livenessProbe"):
            probe = redis.containers[0][name]
            assert {how: probe[how] for how in ("exec", "grpc", "httpGet", "tcpSocket") if how in probe} == wanted

    def test_the_coordinator_asks_for_its_certificate(self, overlay: str, workloads: tuple[Workload, ...]) -> None:
        (coordinator,) = by_component(workloads, "coordinator")
        (box,) = coordinator.containers
        options = [word for word in coordinator.command(box) if word.startswith(("--store", "--tls", "--insecure"))]
        insecure = overlay.endswith("-insecure")
        assert coordinator.environment(box).get("HETPIPE_TLS") == (None if insecure else TLS)
        assert options == [
            f"--store={'redis' if insecure else 'rediss'}://{REDIS_USER}@redis:{PORT}/0",
            "--store-password-file=/run/hetpipe/store/password",
            "--insecure" if insecure else f"--store-ca={TLS}/ca.pem",
        ]


@dataclass(frozen=True, slots=True)
class Running:
    """A Redis that serves as in the cluster, and what others are given to reach it."""

    port: int
    store: str
    access: RedisAccess
    """The coordinator's."""
    restart: Callable[[bool], None]
    """By SIGKILL or not."""
    probe: list[str]
    certs: Path


def certificates(folder: Path, *peers: NamedPeer) -> Path:
    init_authority(folder)
    for peer in peers:
        issue_certificate(folder, peer, days=1)
    return folder


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with _running(tmp_path_factory.mktemp("pods")) as running:
        yield running


@contextmanager
def _running(folder: Path) -> Iterator[Running]:
    """The files of both pods in folders of their own instead of at the root, and another port."""
    peers = NamedPeer(Role.COORDINATOR, "coordinator"), NamedPeer(Role.AGENT, "cpu-0"), NamedPeer(Role.REDIS, "redis")
    certs = certificates(folder / "certs", *peers)
    manifests = render(K8S / "overlays" / "cpu-demo")
    sources = secrets_of(certs, kept_password(certs)) | config_files(manifests)
    pods = {workload.component: workload for workload in workloads_in(manifests)}
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
    for component in ("redis", "coordinator"):
        for path, content in files_from(sources, pods[component], {}):
            file = folder / component / path.lstrip("/")
            file.parent.mkdir(parents=True, exist_ok=True)
            adapted = path.endswith(".conf")
            file.write_bytes(_adapted(content.decode(), folder / "redis", port).encode() if adapted else content)
            file.chmod(0o400)
    (folder / "redis" / "data").mkdir()
    (box,) = pods["redis"].containers
    asked = [_adapted(word, folder / "redis", port) for word in box["readinessProbe"]["exec"]["command"]]
    store, access = _access(pods["coordinator"].command(pods["coordinator"].containers[0]), folder / "coordinator")
    command = [_adapted(word, folder / "redis", port) for word in pods["redis"].command(box)]
    processes = [started(*command, folder=folder)]

    def restart(kill: bool) -> None:  # noqa: FBT001 - as of the contract
        assert end(processes.pop(), kill=kill) == (-signal.SIGKILL if kill else 0)
        processes.append(started(*command, folder=folder))

    yield Running(port, store, access, restart, asked, certs)
    end(processes.pop(), kill=True)


def _adapted(text: str, root: Path, port: int) -> str:
    text = text.replace("bind * -::*", f"bind {HOST}").replace(PORT, str(port)).replace("--tls", f"--tls -p {port}")
    return re.sub(r"(^| )(/(?:etc|run|data)\b)", rf"\1{root}\2", text)


def _access(command: list[str], root: Path) -> tuple[str, RedisAccess]:
    """The coordinator's options about Redis, with its own certificate."""
    options = dict(word.split("=", 1) for word in command if word.startswith("--store"))
    password, ca = (root / options[f"--store-{name}"].lstrip("/") for name in ("password-file", "ca"))
    return options["--store"], RedisAccess(password_file=password, ca=ca, **shown(root / TLS.lstrip("/")))


def shown(folder: Path) -> dict[str, Path]:
    """The certificate in a folder of `hetpipe certs`."""
    return {"client_cert": folder / "cert.pem", "client_key": folder / "key.pem"}


def first_term(store: str, access: RedisAccess) -> int:
    opened = open_store(store, access=access)
    try:
        return opened.next_term(above=Term(0))
    finally:
        opened.close()


@pytest.fixture
def _names(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the cluster's DNS: `redis` is the pod."""

    def found(host: str, port: int, *_: Any, **__: Any) -> list[Any]:
        assert (host, str(port)) == ("redis", PORT)
        return [(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (HOST, running.port))]

    monkeypatch.setattr(socket, "getaddrinfo", found)


@needs_redis
@pytest.mark.processes
@pytest.mark.usefixtures("_names")
class TestWhoGetsIn:
    def test_the_coordinator(self, running: Running) -> None:
        assert first_term(running.store, running.access) == 1

    def test_not_the_password_without_a_certificate(self, running: Running, tmp_path: Path) -> None:
        others = certificates(tmp_path / "others", NamedPeer(Role.COORDINATOR, "coordinator"))
        nothing: Mapping[str, None] = {"client_cert": None, "client_key": None}
        for own in (nothing, shown(others / "coordinator")):
            with pytest.raises(StoreUnavailable):
                first_term(running.store, replace(running.access, **own))
        plain = RedisAccess(password_file=running.access.password_file)
        with pytest.raises(StoreUnavailable):
            first_term(running.store.replace("rediss:", "redis:"), plain)

    def test_not_a_certificate_without_the_password(self, running: Running) -> None:
        agent = running.certs / "agent-cpu-0"
        with pytest.raises(StoreUnavailable, match="Authentication required"):
            first_term(running.store.replace(f"{REDIS_USER}@", ""), RedisAccess(ca=agent / "ca.pem", **shown(agent)))

    def test_the_coordinator_takes_nobody_else_for_redis(self, running: Running, tmp_path: Path) -> None:
        others = certificates(tmp_path / "others")
        with pytest.raises(StoreUnavailable, match="could not be verified"):
            first_term(running.store, replace(running.access, ca=others / "ca.pem"))

    def test_probes_are_answered(self, running: Running) -> None:
        assert subprocess.run(running.probe, check=False, timeout=10).returncode == 0


@needs_redis
@pytest.mark.processes
@pytest.mark.usefixtures("_names")
class TestRestarts(DurableStoreContract):
    """Of the pod's process: the users, the settings and the files are those of the manifests."""

    @pytest.fixture
    def running(self, tmp_path: Path) -> Iterator[Running]:
        with _running(tmp_path) as running:
            yield running

    @pytest.fixture
    def store(self, running: Running) -> Iterator[Store]:
        store = open_store(running.store, access=running.access)
        yield store
        store.close()

    def test_the_command_that_repairs_it_takes_the_coordinators_options(self, running: Running, store: Store) -> None:
        """Its user, its password, its authority and its certificate; no others get in."""
        assert isinstance(store, RedisStore)
        store.set_counters(fence=1 << 53)
        own, given = running.access, ["--store", running.store]
        assert own.ca is not None
        assert own.client_cert is not None
        given += ["--store-password-file", str(own.password_file), "--store-ca", str(own.ca)]

        refused = CliRunner().invoke(app, ["repair", "store", *given])
        result = CliRunner().invoke(app, ["repair", "store", *given, "--tls", str(own.client_cert.parent), "--json"])

        assert (refused.exit_code, "rejected a command" in refused.stderr) == (1, True)
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout)["fence"] == {"name": "fence", "before": 1 << 53, "after": 0}
        assert acquire(store, "a").fence == 2

    @pytest.fixture
    def restart(self, running: Running) -> Callable[[bool], None]:
        return running.restart
