"""A small cluster of real processes under mutual TLS: Redis, one coordinator, parameter servers, agents.

Every process has an address for life, so it is found again when it was started again.
"""

from __future__ import annotations

import os
import random
import secrets
import shutil
import socket
import sys
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import redis

from hetpipe.certs.authority import PROCESS_DAYS
from hetpipe.certs.files import CA_FILE, process_folder
from hetpipe.certs.folders import init_authority, issue_certificate
from hetpipe.errors import HetpipeError
from hetpipe.storage.redis_acl import acl_lines
from hetpipe.values.identity import NamedPeer, Role
from hetpipe.wire.coordinator_client import CoordinatorClient, all_members
from hetpipe.wire.tls import TLS_VARIABLE, Tls
from tests.chaos.disks import Disk
from tests.chaos.keeper import Keeper, Kept, Spec, dying_with_parent
from tests.polling import wait_until

ROOT = Path(__file__).parents[2]

COORDINATOR, REDIS = "coordinator", "redis"

#: Names the disk with the folders of runs.
RUNS = "runs"

#: The coordinator's name in Redis.
_STORE_USER = "hetpipe"

#: The name of an administrator there, who makes it forget everything.
_STORE_ADMINISTRATOR = "chaos"

#: Whoever hands jobs in and looks at them.
_OPERATOR = NamedPeer(Role.OPERATOR, "chaos")

#: Ports are looked for below those that the kernel hands out to clients, one of which could take the port of a server
#: that is down for a moment.
_PORTS = range(20_000, 30_000)

_READY_SECONDS = 60.0

#: Shorter than by default, so that going beyond it takes less time.
LEASE_SECONDS = 3.0

#: Starts that fail in a row; a coordinator that finds no Redis may fail some.
_CRASH_LOOP = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a process runs."""

    host: str = "127.0.0.1"
    prefix: tuple[str, ...] = ()
    """Goes before its command: into a network namespace."""
    name: str = "localhost"
    """Host name behind `host`; Redis clients know servers by that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What a cluster is made of."""

    num_shards: int = 2
    devices: tuple[int, ...] = (2, 2)
    """CPU devices of each agent."""
    lease_seconds: float = LEASE_SECONDS
    """Of members, and of the coordinator's lead."""
    places: Mapping[str, Place] = field(default_factory=dict)
    """By key of the process; the others run on loopback."""
    options: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Further options, by role: `coordinator`, `shard`, `agent`."""
    programs: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """By role: a module to run in place of the service, and what its options begin with."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Added to that of every process."""
    disk_bytes: Mapping[str, int] = field(default_factory=dict)
    """Sizes of the disks that are small file systems of their own (`disks`): by key of a process with data, `redis` or
    a parameter server, and `RUNS`."""

    @property
    def shards(self) -> tuple[str, ...]:
        """Keys of the parameter servers; the first one is the clock shard."""
        return tuple(f"shard-{index}" for index in range(self.num_shards))

    @property
    def agents(self) -> tuple[str, ...]:
        """Keys of the agents, which are also the names of their nodes."""
        return tuple(f"agent-{index}" for index in range(len(self.devices)))

    def place(self, key: str) -> Place:
        """Where a process runs."""
        return self.places.get(key, Place())


#: Ports that clusters of this process have, which not everybody has begun to listen on.
_taken: set[int] = set()
_lock = threading.Lock()


def free_port() -> int:
    """A port nobody listens on now, and nobody else here was given."""
    while True:
        port = random.choice(_PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
        with _lock:
            if port not in _taken:
                _taken.add(port)
                return port


class Cluster:
    """A cluster under way. Use it in a `with` block, which ends all of its processes however it is left."""

    def __init__(self, folder: Path, layout: Layout | None = None) -> None:
        """Prepare; nothing is started.

        Args:
            folder: for certificates, logs, states and runs; made where it is missing.
            layout: what to start.
        """
        self.folder = folder
        self.layout = layout or Layout()
        self.owner = f"{os.getpid()}-{uuid.uuid4().hex}"
        #: By key.
        self.kept: dict[str, Kept] = {}
        self._ports = {key: free_port() for key in (REDIS, COORDINATOR, *self.layout.shards)}
        self._keeper = Keeper(folder / "processes", self.owner)
        self._stack = ExitStack()
        #: By key; those of `Layout.disk_bytes`.
        self.disks: dict[str, Disk] = {}
        self._client: CoordinatorClient | None = None

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._make_certificates()
        self._make_password()
        try:
            for key, size in self.layout.disk_bytes.items():
                self.disks[key] = self._stack.enter_context(Disk(self._disk(key), size))
            self._stack.enter_context(self._keeper)
            self.start(REDIS)
            self.kept[REDIS].wait_up(timeout_seconds=_READY_SECONDS)
            for key in (COORDINATOR, *self.layout.shards):
                self.start(key)
            for key in self.layout.agents:
                self._start_agent(key)
            self.wait_whole()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()

    @property
    def keys(self) -> tuple[str, ...]:
        """Of all processes."""
        return tuple(self.kept)

    @property
    def client(self) -> CoordinatorClient:
        """Calls to the coordinator, as an operator."""
        if self._client is None:
            tls = Tls(self._certificates(_OPERATOR))
            self._client = CoordinatorClient(self.address(COORDINATOR), tls=tls)
            self._stack.callback(self._client.close)
        return self._client

    @property
    def is_up(self) -> bool:
        """Every process is ready."""
        return all(kept.is_up for kept in self.kept.values())

    def address(self, key: str) -> str:
        """`HOST:PORT` of a server."""
        return f"{self.layout.place(key).host}:{self._ports[key]}"

    @property
    def runs(self) -> Path:
        """For the folders of runs, on a disk of their own if the layout says so."""
        return self._data(RUNS)

    def run_command(self, key: str, arguments: Sequence[str], *, ready: str) -> Kept:
        """Run `hetpipe ARGUMENTS` as the operator; started again when somebody here ends it, until it ends by itself.

        Args:
            key: names its files; unlike that of any process.
            arguments: of the command.
            ready: it is ready when its standard output holds this.
        """
        hetpipe = str(Path(sys.executable).with_name("hetpipe"))
        environment = self._environment(_OPERATOR)
        command = dying_with_parent([hetpipe, *arguments])
        return self._keeper.keep(
            Spec(key=key, command=command, environment=environment, ready=ready, current=self.folder, restarts=False)
        )

    def start(self, key: str) -> Kept:
        """Keep one more process."""
        self.kept[key] = self._keeper.keep(self._spec(key))
        return self.kept[key]

    def _start_agent(self, key: str) -> None:
        """The first virtual worker is planned on the agent that came first, so it is told who that is."""
        self.start(key)

        def is_member() -> bool:
            self.check_starts()
            return key in (self.members() or ())

        wait_until(is_member, timeout_seconds=_READY_SECONDS, what=f"member {key}")

    def members(self) -> set[str] | None:
        """The names of whoever has a lease; None while the coordinator is away."""
        try:
            return {str(member.info.id) for member in all_members(self.client)}
        except HetpipeError:
            return None

    def are_gone(self, keys: Sequence[str]) -> bool:
        """The coordinator says that none of these has a lease."""
        members = self.members()
        return members is not None and not members & {_member(key) for key in keys}

    @property
    def is_whole(self) -> bool:
        """Every process is up and a member."""
        return self.is_up and not self._missing_members()

    def wait_whole(self, *, timeout_seconds: float = _READY_SECONDS) -> None:
        """Until every process is up and a member.

        Raises:
            AssertionError: it took too long; the message says who is missing.
        """

        def is_whole() -> bool:
            self.check_starts()
            return self.is_whole

        try:
            wait_until(is_whole, timeout_seconds=timeout_seconds, what="whole cluster")
        except AssertionError as error:
            raise AssertionError(f"{error}; {self.story()}") from None

    def story(self) -> str:
        """Who is missing, in a few words."""
        down = [f"{key}: {kept.story()}" for key, kept in self.kept.items() if not kept.is_up]
        return f"no members: {sorted(self._missing_members())}; down: {down}"

    def _missing_members(self) -> set[str]:
        wanted = {_member(key) for key in (*self.layout.agents, *self.layout.shards)}
        return wanted - (self.members() or set())

    def wipe_redis(self, victims: Sequence[str]) -> None:
        """Kill `victims`, of which Redis is one, and start them again with a Redis that knows nothing."""
        with self.killed_without_data(REDIS, victims):
            """All of them are dead."""

    def lose_disk(self, victims: Sequence[str]) -> None:
        """Kill `victims`, of whom the first is a parameter server, and start them again, that one without its disk."""
        with self.killed_without_data(victims[0], victims):
            """All of them are dead."""

    @contextmanager
    def killed_without_data(self, key: str, victims: Sequence[str]) -> Iterator[None]:
        """Kill `victims`, which stay dead in the block, and start them again when the data of `key` is gone."""
        kept = [self.kept[victim] for victim in victims]
        for each in kept:
            each.wanted = False
            each.kill()
        yield
        wait_until(
            lambda: all(each.process is None for each in kept),
            timeout_seconds=_READY_SECONDS,
            what=f"end of {victims}",
        )
        folder = self._data(key)
        shutil.rmtree(folder)
        folder.mkdir()
        for each in kept:
            each.wanted = True

    def flush_redis(self) -> None:
        """Have Redis forget everything while it lives."""
        own = self._certificates(NamedPeer(Role.COORDINATOR, COORDINATOR))
        place = self.layout.place(REDIS)
        client = redis.Redis(
            host=place.name,
            port=self._ports[REDIS],
            username=_STORE_ADMINISTRATOR,
            password=(self.folder / "store" / "password").read_text(),
            ssl=True,
            ssl_ca_certs=str(own / CA_FILE),
            ssl_certfile=str(own / "cert.pem"),
            ssl_keyfile=str(own / "key.pem"),
        )
        with client:
            client.flushall()

    def check_starts(self) -> None:
        """Nobody is in a crash loop.

        Raises:
            AssertionError: somebody cannot start; the message holds its last words.
        """
        for kept in self.kept.values():
            assert kept.failures < _CRASH_LOOP, f"{kept.spec.key} cannot start: {kept.story()}"

    def _spec(self, key: str) -> Spec:
        place = self.layout.place(key)
        if key == REDIS:
            command = dying_with_parent([*place.prefix, *self._redis()])
            return Spec(key=key, command=command, environment=self._environment(None), ready="eady to accept")
        role = key.partition("-")[0]
        peer, program, options = self._program(key)
        module = self.layout.programs.get(role, ("hetpipe", "serve", program))
        command = [*place.prefix, sys.executable, "-m", *module, *options]
        command += ["--host", place.host, "--log", str(self.folder / "processes" / f"{key}.log")]
        # Trials have their folders anywhere, also where the processes have networks of their own.
        command += ["--run-root", "/", *(("--code-root", "/") if program == "agent" else ())]
        command += ["--exit-with-parent", *self.layout.options.get(role, ())]
        return Spec(key=key, command=command, environment=self._environment(peer), ready='"address"')

    def _program(self, key: str) -> tuple[NamedPeer, str, list[str]]:
        role, _, index = key.partition("-")
        if role == COORDINATOR:
            store = f"rediss://{_STORE_USER}@{self.layout.place(REDIS).name}:{self._ports[REDIS]}/0"
            ca = self._certificates(NamedPeer(Role.COORDINATOR, COORDINATOR)) / CA_FILE
            options = ["--store", store, "--store-ca", str(ca), "--port", str(self._ports[key])]
            options += ["--store-password-file", str(self.folder / "store" / "password")]
            options += ["--leader-lease", str(self.layout.lease_seconds), "--lease", str(self.layout.lease_seconds)]
            return NamedPeer(Role.COORDINATOR, COORDINATOR), "coordinator", options
        to_coordinator = ["--coordinator", self.address(COORDINATOR)]
        if role == "shard":
            options = [*to_coordinator, "--index", index, "--port", str(self._ports[key]), "--threads", "1"]
            options += ["--state", str(self._data(key))]
            return NamedPeer(Role.PARAMETER_SERVER, index), "parameter-server", options
        options = [*to_coordinator, "--node", key, "--cpu-devices", str(self.layout.devices[int(index)])]
        return NamedPeer(Role.AGENT, key), "agent", [*options, "--allow-modules", "tests.*"]

    def _redis(self) -> list[str]:
        own = self._certificates(NamedPeer(Role.REDIS, self.layout.place(REDIS).name))
        tls = ["--tls-port", str(self._ports[REDIS]), "--port", "0", "--tls-auth-clients", "yes"]
        tls += ["--tls-ca-cert-file", str(own / "ca.pem"), "--tls-cert-file", str(own / "cert.pem")]
        tls += ["--tls-key-file", str(own / "key.pem"), "--bind", self.layout.place(REDIS).host]
        users = ["--aclfile", str(self.folder / "store" / "users.acl")]
        kept = ["--save", "", "--appendonly", "yes", "--appendfsync", "always", "--dir", str(self._data(REDIS))]
        return ["redis-server", *tls, *users, *kept]

    def _disk(self, key: str) -> Path:
        return self.folder / "disks" / key

    def _data(self, key: str) -> Path:
        """Below the disk, so that it can be taken away where the disk is mounted; made where it is missing."""
        folder = self._disk(key) / "data"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _environment(self, peer: NamedPeer | None) -> dict[str, str]:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), **self.layout.environment}
        if peer is not None:
            environment[TLS_VARIABLE] = str(self._certificates(peer))
        return environment

    def _certificates(self, peer: NamedPeer) -> Path:
        return process_folder(self.folder / "certs", peer)

    def _make_password(self) -> None:
        """The coordinator's; the users of Redis as `hetpipe render redis-acl` writes them, and an administrator."""
        folder, password = self.folder / "store", secrets.token_urlsafe(32)
        folder.mkdir(exist_ok=True)
        (folder / "password").touch(mode=0o600)
        (folder / "password").write_text(password, encoding="utf-8")
        administrator = f"user {_STORE_ADMINISTRATOR} on >{password} ~* &* +@all"
        lines = [*acl_lines(_STORE_USER, password), administrator, ""]
        (folder / "users.acl").write_text("\n".join(lines), encoding="utf-8")

    def _make_certificates(self) -> None:
        authority = self.folder / "certs"
        init_authority(authority)
        peers = [NamedPeer(Role.COORDINATOR, COORDINATOR), _OPERATOR]
        peers += [NamedPeer(Role.REDIS, self.layout.place(REDIS).name)]
        peers += [NamedPeer(Role.PARAMETER_SERVER, str(index)) for index in range(self.layout.num_shards)]
        peers += [NamedPeer(Role.AGENT, key) for key in self.layout.agents]
        for peer in peers:
            issue_certificate(authority, peer, days=PROCESS_DAYS)


def _member(key: str) -> str:
    """What a process is called as a member."""
    return key.replace("shard-", "parameter-server-")
