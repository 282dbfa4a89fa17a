"""Redis of k8s/: what every overlay says about it, and who gets in when it runs as it is said there."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import redis
from typer.testing import CliRunner

from hetpipe.certs.folders import init_authority, issue_certificate
from hetpipe.cli.app import app
from hetpipe.deploy.kubernetes_secrets import (
    PASSWORD_FILE,
    REDIS_USER,
    REPLICATION_PASSWORD_FILE,
    REPLICATION_USER,
    kept_password,
    secrets_of,
)
from hetpipe.errors import StoreUnavailable
from hetpipe.storage.redis_access import RedisAccess
from hetpipe.storage.redis_acl import acl_lines, replication_line
from hetpipe.storage.redis_store import RedisStore
from hetpipe.storage.store import CandidateId, Fence, Store
from hetpipe.storage.stores import open_store
from hetpipe.values.identity import NamedPeer, Role
from hetpipe.values.ids import Term
from tests.deploy.conftest import rendered
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
from tests.polling import wait_until
from tests.storage.redis_server import end, needs_redis, started
from tests.storage.store_contract import DurableStoreContract, acquire, record

NO_KUBECTL = why_no_kubectl()
pytestmark = pytest.mark.skipif(bool(NO_KUBECTL), reason=f"NOT TESTED: Redis of k8s/, because {NO_KUBECTL}")

HOST, PORT = "127.0.0.1", "6379"
TLS = "/run/hetpipe/tls"


def settings(manifests: Manifests, redis: Workload) -> dict[str, str]:
    """What its command makes it read; what replicas add is what the script adds when it runs."""
    (*program, path) = redis.command(redis.containers[0])
    assert program == (["sh", "/etc/redis/redis-replicated.sh"] if has_replicas(redis) else ["redis-server"])
    return redis_settings(dict(files_from(config_files(manifests), redis, {})), path)


def has_replicas(redis: Workload) -> bool:
    return bool(redis.spec["replicas"] > 1)


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
            "tls-replication": "yes",
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
        files = dict(files_from(secrets_of(Path(), "password", "another"), redis, {}))
        replicas = [replication_line(REPLICATION_USER, "another")] if has_replicas(redis) else []
        assert files[found["aclfile"]].decode().splitlines() == [*acl_lines(REDIS_USER, "password"), *replicas]
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
        (redis,) = by_component(workloads, "redis")
        replicas = [f"--store-replicas={redis.spec['replicas'] - 1}"] if has_replicas(redis) else []
        insecure = overlay.endswith("-insecure")
        assert coordinator.environment(box).get("HETPIPE_TLS") == (None if insecure else TLS)
        assert options == [
            f"--store={'redis' if insecure else 'rediss'}://{REDIS_USER}@redis:{PORT}/0",
            "--store-password-file=/run/hetpipe/store/password",
            "--insecure" if insecure else f"--store-ca={TLS}/ca.pem",
            *replicas,
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
    passwords = [kept_password(certs, name) for name in (PASSWORD_FILE, REPLICATION_PASSWORD_FILE)]
    sources = secrets_of(certs, *passwords) | config_files(manifests)
    pods = {workload.component: workload for workload in workloads_in(manifests)}
    port = _free_port()
    for component in ("redis", "coordinator"):
        _write(sources, pods[component], folder / component, lambda text: _adapted(text, folder / "redis", port))
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


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def _write(sources: Mapping[str, Mapping[str, bytes]], pod: Workload, root: Path, adapt: Callable[[str], str]) -> None:
    """The files that a pod mounts, below `root`; its settings and scripts adapted to that."""
    for path, content in files_from(sources, pod, {}):
        file = root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.unlink(missing_ok=True)
        file.write_bytes(adapt(content.decode()).encode() if path.endswith((".conf", ".sh")) else content)
        file.chmod(0o400)


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


class Replicated:
    """Both pods of the component `redis-replicas`, started by its script, and the store of the coordinator."""

    def __init__(self, folder: Path) -> None:
        """Nothing runs yet."""
        peers = (NamedPeer(Role.COORDINATOR, "coordinator"), NamedPeer(Role.REDIS, "redis"))
        certs = certificates(folder / "certs", *peers)
        (folder / "overlay").mkdir()
        manifests = rendered("cpu-demo, redis-replicas", folder / "overlay")
        passwords = [kept_password(certs, name) for name in (PASSWORD_FILE, REPLICATION_PASSWORD_FILE)]
        self._sources = secrets_of(certs, *passwords) | config_files(manifests)
        self._pods = {workload.component: workload for workload in workloads_in(manifests)}
        self._folder = folder
        self._running: dict[str, subprocess.Popen[str]] = {}
        self._ports = {f"redis-{index}": _free_port() for index in range(self._pods["redis"].spec["replicas"])}
        _write(self._sources, self._pods["coordinator"], folder / "coordinator", str)
        command = self._pods["coordinator"].command(self._pods["coordinator"].containers[0])
        self.url, self.access = _access(command, folder / "coordinator")
        self.replication_password = passwords[1]
        (number,) = [word.partition("=")[2] for word in command if word.startswith("--store-replicas")]
        self._num_replicas = int(number)
        self.primary = "redis-0"

    @property
    def port(self) -> int:
        """Of the Service `redis`, which is the primary."""
        return self._ports[self.primary]

    def start(self, name: str) -> None:
        """Start a pod, with the volume that it had."""
        root, port = self._folder / name, self._ports[name]
        (root / "data").mkdir(parents=True, exist_ok=True)

        def adapt(text: str) -> str:
            return _adapted(text, root, port).replace(f"redis {port}", f"{HOST} {self.port}")

        _write(self._sources, self._pods["redis"], root, adapt)
        words = (adapt(word) for word in self._pods["redis"].command(self._pods["redis"].containers[0]))
        role = (f"POD_NAME={name}", f"PRIMARY={self.primary}")
        self._running[name] = started("env", *role, *words, folder=self._folder)

    def kill(self, name: str) -> None:
        end(self._running.pop(name), kill=True)

    def terminate(self, name: str) -> None:
        """By SIGTERM, which Redis refuses while it writes its first append-only file after a full copy."""
        process = self._running.pop(name)

        def ended() -> bool:
            process.terminate()
            return process.poll() is not None

        wait_until(ended, timeout_seconds=20, what=f"end of {name}")
        process.communicate()

    def stop(self) -> None:
        for name in tuple(self._running):
            self.kill(name)

    def opened(self) -> Store:
        return open_store(self.url, access=self.access, replicas=self._num_replicas)


@pytest.fixture
def replicated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Replicated]:
    replicated = Replicated(tmp_path)

    def found(host: str, port: int, *_: Any, **__: Any) -> list[Any]:
        assert (host, str(port)) == ("redis", PORT)
        return [(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (HOST, replicated.port))]

    monkeypatch.setattr(socket, "getaddrinfo", found)
    yield replicated
    replicated.stop()


def counts(store: Store, name: str) -> bool:
    """Whether a job is written, now or before."""
    try:
        store.create_job(record(name))
    except StoreUnavailable:
        return False
    return True


@needs_redis
@pytest.mark.processes
class TestReplicas:
    def test_a_promotion_loses_nothing(self, replicated: Replicated) -> None:
        """As docs/kubernetes.md has it: the other pod is named and restarted, the first comes back as its replica."""
        for name in ("redis-0", "redis-1"):
            replicated.start(name)
        store = replicated.opened()
        wait_until(lambda: counts(store, "a"), timeout_seconds=20, what="the replica follows")
        lead = store.acquire_lead(CandidateId("a"), "A", above=Fence(0), lease_seconds=60.0)

        replicated.kill("redis-0")
        replicated.terminate("redis-1")
        replicated.primary = "redis-1"
        replicated.start("redis-1")
        assert [job.name for job in store.jobs()] == ["a"]
        with pytest.raises(StoreUnavailable, match="Not enough good replicas"):
            store.create_job(record("b"))

        replicated.start("redis-0")
        wait_until(lambda: counts(store, "b"), timeout_seconds=20, what="the former primary follows")
        store.renew_lead(lead, lease_seconds=60.0)
        store.close()
        replicated.kill("redis-1")
        replicated.primary = "redis-0"
        with closing(replicated.opened()) as former:
            assert [job.name for job in former.jobs()] == ["a", "b"]

    def test_the_user_of_replicas_reads_no_key(self, replicated: Replicated) -> None:
        replicated.start("redis-0")
        access = replicated.access
        client = redis.Redis(
            "redis",
            int(PORT),
            username=REPLICATION_USER,
            password=replicated.replication_password,
            ssl=True,
            ssl_ca_certs=str(access.ca),
            ssl_certfile=str(access.client_cert),
            ssl_keyfile=str(access.client_key),
        )
        assert client.ping()
        for command in (("GET", "{hetpipe}:fence"), ("ACL", "LIST"), ("REPLICAOF", "NO", "ONE"), ("SET", "a", "b")):
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.execute_command(*command)  # type: ignore[no-untyped-call]  # redis ships it untyped
        client.close()
