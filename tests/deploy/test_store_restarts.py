"""Redis of `docker-compose.yml` and of `hetpipe up`: a restart of its container loses nothing, with a real server."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import yaml

from hetpipe.deploy.secrets import write_secrets
from hetpipe.deploy.topology import PASSWORD_FILE, STORE_PASSWORD, STORE_USER, StoreKind, deployment_of
from hetpipe.storage.redis_access import RedisAccess
from hetpipe.storage.redis_acl import acl_lines
from hetpipe.storage.redis_store import RedisStore
from hetpipe.storage.store import Store
from tests.deploy.deployments import SPEC
from tests.storage.redis_server import end, needs_redis, started
from tests.storage.store_contract import DurableStoreContract

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Box:
    """A container of Redis, as far as it is its command and its files."""

    command: tuple[str, ...]
    """On this machine: the files are below a folder of the test."""
    socket: Path
    users: Path
    password: Path


def of_compose(folder: Path) -> Box:
    """What `docker-compose.yml` starts, after `hetpipe-credentials` has made the files."""
    volumes = {"/credentials": folder / "credentials", "/redis": folder / "redis", "/store": folder / "store"}
    for path in (*volumes.values(), folder / "credentials" / "coordinator"):
        path.mkdir(parents=True)
    (folder / "credentials" / "redis").symlink_to(folder / "redis")
    script = (ROOT / "deploy" / "image" / "hetpipe-credentials").read_text(encoding="utf-8")
    subprocess.run(
        ["sh", "-c", script.replace("cd /credentials", f"cd {volumes['/credentials']}")],
        env={"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        check=True,
    )
    service = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))["services"]["redis"]
    assert {entry.split(":")[1] for entry in service["volumes"]} == {"/redis", "/store"}
    return Box(
        tuple(_moved(word, volumes) for word in shlex.split(service["command"])),
        folder / "store" / "redis.sock",
        folder / "redis" / "users.acl",
        volumes["/credentials"] / "coordinator" / "store-password",
    )


def of_up(folder: Path) -> Box:
    """What `hetpipe up --store redis` and `hetpipe render compose` start, on a socket instead of a network."""
    folders = replace(SPEC.folders, state=str(folder / "state"))
    spec = replace(SPEC, folders=folders, user=f"{os.getuid()}:{os.getgid()}", store=StoreKind.REDIS, tls=False)
    write_secrets(spec, [])
    redis = deployment_of(spec).containers[0]
    volumes = {mount.target: Path(mount.source) for mount in redis.mounts}
    socket = folder / "redis.sock"
    command = (*(_moved(word, volumes) for word in redis.command), "--port", "0", "--unixsocket", str(socket))
    users = Path(_moved(redis.command[redis.command.index("--aclfile") + 1], volumes))
    return Box(command, socket, users, folder / "state" / STORE_PASSWORD / PASSWORD_FILE)


def _moved(word: str, volumes: dict[str, Path]) -> str:
    """A path in a container as one on this machine."""
    for where, folder in volumes.items():
        if word == where or word.startswith(f"{where}/"):
            return f"{folder}{word.removeprefix(where)}"
    return word


@needs_redis
@pytest.mark.processes
class TestRestarts(DurableStoreContract):
    @pytest.fixture(params=[of_compose, of_up], ids=["compose", "up"])
    def box(self, request: pytest.FixtureRequest, tmp_path: Path) -> Box:
        make: Callable[[Path], Box] = request.param
        return make(tmp_path)

    @pytest.fixture
    def processes(self, box: Box) -> Iterator[list[subprocess.Popen[str]]]:
        processes = [started(*box.command, folder=box.socket.parent)]
        yield processes
        end(processes.pop(), kill=True)

    @pytest.fixture
    def restart(self, box: Box, processes: list[subprocess.Popen[str]]) -> Callable[[bool], None]:
        def restart(kill: bool) -> None:  # noqa: FBT001 - as of the contract
            assert end(processes.pop(), kill=kill) == (-signal.SIGKILL if kill else 0)
            processes.append(started(*box.command, folder=box.socket.parent))

        return restart

    @pytest.fixture
    def store(self, box: Box, processes: list[subprocess.Popen[str]]) -> Iterator[Store]:
        assert processes
        store = RedisStore(f"unix://{STORE_USER}@{box.socket}", access=RedisAccess(password_file=box.password))
        yield store
        store.close()

    def test_its_users_are_the_rendered_ones(self, box: Box) -> None:
        password = box.password.read_text(encoding="utf-8").strip()
        assert box.users.read_text(encoding="utf-8").splitlines() == list(acl_lines(STORE_USER, password))
        assert box.command[box.command.index("--appendonly") + 1] == "yes"
        assert box.command[box.command.index("--appendfsync") + 1] == "always"
