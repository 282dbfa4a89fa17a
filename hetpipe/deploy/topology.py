"""The containers of one machine, in starting order, with their arguments, devices and folders. Pure.

The same description is carried out by `deploy.engine` and written down by `deploy.compose`. Folders of the machine keep
their paths inside the containers, so that a run's folder has one name everywhere: for whoever hands the job in, for the
processes that write into it, and for `hetpipe check` afterwards.

Jobs live in the coordinator's memory by default. With Redis they outlive the coordinator's process; on one machine that
buys little, since a run goes on from its checkpoint on disk anyway, so Redis is there for who asks for it, and keeps
nothing on disk either.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import PurePosixPath

from hetpipe.certs.files import process_folder
from hetpipe.deploy.groups import AgentGroup
from hetpipe.errors import UserError
from hetpipe.forking.environment import SERVICE_ENVIRONMENT
from hetpipe.server.agent.environment import passed_on
from hetpipe.values import identity
from hetpipe.values.identity import NamedPeer

#: The port of every service; each has a container, and so all ports, of its own.
GRPC_PORT = 7400
HEALTH_PORT = 7401
REDIS_PORT = 6379

#: Where a container finds its own certificates, Redis its users, and the coordinator the password of its own.
TLS_FOLDER = "/etc/hetpipe/tls"
STORE_FOLDER = "/etc/hetpipe/store"

#: Folders of secrets below the state folder, each mounted by those only who need it, and the files of the last two.
CERTIFICATES = "certs"
STORE_USERS, USERS_FILE = "store-users", "users.acl"
STORE_PASSWORD, PASSWORD_FILE = "store-password", "password"

#: Where Redis keeps its append-only file, below the state folder and in its container.
STORE_DATA, DATA_FOLDER = "store-data", "/data"

#: The folder of parameter servers' acknowledged state, below the folder of the runs.
_STATES = ".state"

#: The coordinator's name in Redis.
STORE_USER = "hetpipe"

#: With a digest behind the tag once `make digests` has resolved it.
REDIS_IMAGE = "redis:7.4.2-bookworm"

#: The operator who submits jobs, from this machine or from a container.
OPERATOR = NamedPeer(identity.Role.OPERATOR, "submit")

#: The engines' name of: restart with growing pauses, unless stopped explicitly.
RESTART_POLICY = "unless-stopped"

#: From SIGTERM to SIGKILL: longer than a stage or a shard takes to write its part of a checkpoint.
STOP_SECONDS = 60

#: Stages of one container exchange tensors through it, and so do data loaders of the user's code.
SHM_BYTES = 1 << 30

#: Limit of processes and threads in one container: far above the needs of stages, far below the machine's limits.
MOST_PROCESSES = 4096

_MIB = 1 << 20
_TMP_BYTES = 1024 * _MIB

#: Folders of an image. Who shows them to containers hides the image's own files.
_SYSTEM_FOLDERS = frozenset(
    f"/{name}"
    for name in ("", "bin", "dev", "etc", "lib", "lib64", "opt", "proc", "run", "sbin", "sys", "tmp", "usr", "var")
)


class Role(StrEnum):
    """The purpose of a container."""

    STORE = "store"
    COORDINATOR = "coordinator"
    PARAMETER_SERVER = "parameter-server"
    AGENT = "agent"
    SUBMIT = "submit"
    """Submits the job and exits; only in files, as `hetpipe up` submits from the machine itself."""


class StoreKind(StrEnum):
    """Where the coordinator keeps jobs."""

    MEMORY = "memory"
    REDIS = "redis"


@dataclass(frozen=True, slots=True)
class Mount:
    """A folder of the machine in a container."""

    source: str
    """Absolute path on the machine."""
    target: str
    read_only: bool = True


@dataclass(frozen=True, slots=True)
class Health:
    """How the engine looks whether a container works."""

    command: tuple[str, ...]
    interval_seconds: int = 30
    """Each check is a process of its own that takes 0.1 s of CPU time, so the interval is long."""
    timeout_seconds: int = 20
    retries: int = 5
    start_seconds: int = 60
    """Failures this long after the start do not count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """One container."""

    role: Role
    name: str
    """Also its name on the project's network."""
    image: str
    command: tuple[str, ...]
    ready: str
    """The text that its output contains once it is ready; empty for one that runs to its end."""
    user: str
    """`UID:GID`, numbers."""
    health: Health | None = None
    mounts: tuple[Mount, ...] = ()
    scratch: tuple[tuple[str, int], ...] = (("/tmp", _TMP_BYTES),)  # noqa: S108 - a memory-backed folder of its own
    """Memory-backed folders and their sizes in bytes; nothing else can be written but writable mounts."""
    gpus: tuple[str, ...] = ()
    """UUIDs of its GPUs."""
    environment: tuple[tuple[str, str], ...] = ()
    passed_environment: tuple[str, ...] = ()
    """Names of variables passed on from the environment of the caller, if set there."""
    depends_on: tuple[str, ...] = ()
    """Names of containers that must be ready before it starts."""
    published: int | None = None
    """Port of the machine's loopback interface that is mapped to `GRPC_PORT`."""
    working_dir: str = ""
    shm_bytes: int = 64 * _MIB
    peer: NamedPeer | None = None
    """Whom its certificate names; None: it needs none."""
    restarts: bool = False
    """Whether the engine restarts it after an unexpected end."""


@dataclass(frozen=True, slots=True)
class Deployment:
    """The containers of one project."""

    project: str
    containers: tuple[Container, ...]
    """In starting order."""

    @property
    def coordinator(self) -> Container:
        """The coordinator's container."""
        return next(container for container in self.containers if container.role is Role.COORDINATOR)


@dataclass(frozen=True, slots=True, kw_only=True)
class Folders:
    """Folders of the machine, as absolute paths."""

    code: str
    """Where user code is imported from; stages see it and cannot change it."""
    runs: str
    """Where runs are written."""
    state: str
    """For certificates and other secrets; of this deployment alone."""
    more: tuple[str, ...] = ()
    """Other folders that user code reads: data, for example."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """The input of a description."""

    project: str
    image: str
    user: str
    """`UID:GID`, numbers."""
    agents: tuple[AgentGroup, ...]
    """In the order in which they are to register."""
    num_shards: int
    folders: Folders
    modules: tuple[str, ...] = ("*",)
    """Patterns of the modules that stages may import user code from."""
    allowed_environment: tuple[str, ...] = ()
    """Names and patterns of the environment variables that agents pass on to jobs."""
    tls: bool = True
    """Whether the processes prove themselves to each other."""
    store: StoreKind = StoreKind.MEMORY
    store_image: str = REDIS_IMAGE
    port: int = GRPC_PORT
    """Of the machine's loopback interface, for the coordinator."""


def deployment_of(wishes: Wishes) -> Deployment:
    """The containers for `wishes`.

    Raises:
        UserError: a folder cannot be shown to containers as it is.
    """
    _check_folders(wishes.folders)
    store = (_redis(wishes),) if wishes.store is StoreKind.REDIS else ()
    coordinator = _coordinator(wishes)
    shards = tuple(_parameter_server(wishes, index) for index in range(wishes.num_shards))
    agents = tuple(_agents(wishes))
    return Deployment(wishes.project, (*store, coordinator, *shards, *agents))


def submission_of(wishes: Wishes, deployment: Deployment, job: str) -> Container:
    """The container that submits the file `job`, a path below the code, and follows it."""
    command = ("hetpipe", "submit", job, "--coordinator", f"{Role.COORDINATOR}:{GRPC_PORT}")
    return Container(
        role=Role.SUBMIT,
        name=Role.SUBMIT,
        image=wishes.image,
        command=(*command, *(("--tls", TLS_FOLDER) if wishes.tls else ())),
        ready="",
        user=wishes.user,
        mounts=(*_code(wishes.folders), _runs(wishes.folders), *_certificates(wishes, OPERATOR)),
        environment=_ENVIRONMENT,
        depends_on=tuple(c.name for c in deployment.containers if c.role in (Role.PARAMETER_SERVER, Role.AGENT)),
        working_dir=wishes.folders.code,
        peer=OPERATOR if wishes.tls else None,
    )


#: In containers, besides: nothing is written beside code, which is read-only, or into a home that is not there.
_ENVIRONMENT = (
    *SERVICE_ENVIRONMENT.items(),
    ("PYTHONDONTWRITEBYTECODE", "1"),
    ("HOME", "/tmp"),  # noqa: S108
    ("XDG_CACHE_HOME", "/tmp/cache"),  # noqa: S108
)

#: A service's line on standard output when it is ready.
_SERVICE_READY = '"role": "'


@dataclass(frozen=True, slots=True, kw_only=True)
class _Service:
    """The properties of a service."""

    peer: NamedPeer
    name: str
    options: tuple[str, ...]
    mounts: tuple[Mount, ...]
    depends_on: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()
    published: int | None = None
    shm_bytes: int = 64 * _MIB
    environment: tuple[tuple[str, str], ...] = field(default=())
    passed_environment: tuple[str, ...] = ()


def _service(wishes: Wishes, service: _Service) -> Container:
    security = ("--tls", TLS_FOLDER) if wishes.tls else ("--insecure",)
    command = ("hetpipe", "serve", service.peer.role, *service.options, *security)
    return Container(
        role=Role(service.peer.role),
        name=service.name,
        image=wishes.image,
        command=(*command, "--health-port", str(HEALTH_PORT)),
        ready=_SERVICE_READY,
        user=wishes.user,
        health=Health(("hetpipe", "health", f"127.0.0.1:{HEALTH_PORT}")),
        mounts=(*service.mounts, *_certificates(wishes, service.peer)),
        gpus=service.gpus,
        environment=(*_ENVIRONMENT, *service.environment),
        passed_environment=service.passed_environment,
        depends_on=service.depends_on,
        published=service.published,
        shm_bytes=service.shm_bytes,
        peer=service.peer if wishes.tls else None,
        restarts=True,
    )


def _redis(wishes: Wishes) -> Container:
    users = Mount(f"{wishes.folders.state}/{STORE_USERS}", STORE_FOLDER)
    data = Mount(f"{wishes.folders.state}/{STORE_DATA}", DATA_FOLDER, read_only=False)
    kept = ("--save", "", "--appendonly", "yes", "--appendfsync", "always", "--dir", DATA_FOLDER)
    return Container(
        role=Role.STORE,
        name=Role.STORE,
        image=wishes.store_image,
        command=("redis-server", "--bind", "*", "--aclfile", f"{STORE_FOLDER}/{USERS_FILE}", *kept),
        ready="Ready to accept connections",
        user=wishes.user,
        # Anonymous callers are refused, so a refusal shows that the server works.
        health=Health(("sh", "-c", "redis-cli ping | grep -qE 'PONG|NOAUTH'")),
        mounts=(users, data),
        restarts=True,
    )


def _coordinator(wishes: Wishes) -> Container:
    store: tuple[str, ...] = ("--store", StoreKind.MEMORY)
    mounts: tuple[Mount, ...] = (_runs(wishes.folders),)
    if wishes.store is StoreKind.REDIS:
        url = f"redis://{STORE_USER}@{Role.STORE}:{REDIS_PORT}/0"
        store = ("--store", url, "--store-password-file", f"{STORE_FOLDER}/{PASSWORD_FILE}")
        mounts = (*mounts, Mount(f"{wishes.folders.state}/{STORE_PASSWORD}", STORE_FOLDER))
    return _service(
        wishes,
        _Service(
            peer=NamedPeer(identity.Role.COORDINATOR, identity.Role.COORDINATOR),
            name=Role.COORDINATOR,
            options=(*_listening(Role.COORDINATOR), *store, *_run_root(wishes.folders)),
            mounts=mounts,
            depends_on=(Role.STORE,) if wishes.store is StoreKind.REDIS else (),
            published=wishes.port,
        ),
    )


def _parameter_server(wishes: Wishes, index: int) -> Container:
    name = f"{Role.PARAMETER_SERVER}-{index}"
    # Beside the runs, because files there outlive the container.
    state = f"{wishes.folders.runs}/{_STATES}/{wishes.project}/shard-{index}"
    return _service(
        wishes,
        _Service(
            peer=NamedPeer(identity.Role.PARAMETER_SERVER, str(index)),
            name=name,
            options=(
                *_listening(name),
                *_TO_COORDINATOR,
                "--index",
                str(index),
                "--state",
                state,
                *_run_root(wishes.folders),
            ),
            mounts=(_runs(wishes.folders),),
            depends_on=(Role.COORDINATOR,),
        ),
    )


def _agents(wishes: Wishes) -> Iterator[Container]:
    """The agents, each after the one before: the coordinator deals devices in the order in which agents register."""
    before: str = Role.COORDINATOR
    for index, group in enumerate(wishes.agents):
        name = f"{Role.AGENT}-{index}"
        gpus = tuple(device.gpu for device in group.devices if device.gpu)
        offered = () if gpus else ("--cpu-devices", str(len(group.devices)))
        allowed = tuple(part for pattern in wishes.modules for part in ("--allow-modules", pattern))
        allowed += tuple(part for name in wishes.allowed_environment for part in ("--allow-environment", name))
        roots = ("--code-root", wishes.folders.code, *_run_root(wishes.folders))
        yield _service(
            wishes,
            _Service(
                peer=NamedPeer(identity.Role.AGENT, group.node),
                name=name,
                options=(*_TO_COORDINATOR, "--node", group.node, "--host", name, *offered, *allowed, *roots),
                mounts=(*_code(wishes.folders), _runs(wishes.folders)),
                depends_on=(before,),
                gpus=gpus,
                shm_bytes=SHM_BYTES,
                # The order of the stages, whatever order the engine and CUDA count the GPUs in.
                environment=(("CUDA_VISIBLE_DEVICES", ",".join(gpus)),) if gpus else (),
                passed_environment=passed_on(wishes.allowed_environment),
            ),
        )
        before = name


_TO_COORDINATOR = ("--coordinator", f"{Role.COORDINATOR}:{GRPC_PORT}")


def _listening(name: str) -> tuple[str, ...]:
    return ("--host", "0.0.0.0", "--port", str(GRPC_PORT), "--advertise", name)  # noqa: S104 - of a private network


def _run_root(folders: Folders) -> tuple[str, ...]:
    # A checkpoint to resume from may be among the other mounted folders.
    return tuple(part for folder in (folders.runs, *folders.more) for part in ("--run-root", folder))


def _code(folders: Folders) -> tuple[Mount, ...]:
    return tuple(Mount(path, path) for path in dict.fromkeys((folders.code, *folders.more)))


def _runs(folders: Folders) -> Mount:
    return Mount(folders.runs, folders.runs, read_only=False)


def _certificates(wishes: Wishes, peer: NamedPeer) -> tuple[Mount, ...]:
    own = process_folder(PurePosixPath(wishes.folders.state) / CERTIFICATES, peer)
    return (Mount(str(own), TLS_FOLDER),) if wishes.tls else ()


def _check_folders(folders: Folders) -> None:
    shown = (folders.code, folders.runs, *folders.more)
    for path in shown:
        if path in _SYSTEM_FOLDERS:
            raise UserError(
                f"containers are shown {path} under this very name, which would hide their own files; call this in a "
                "folder of your own, and keep runs and data in folders of their own"
            )
        if PurePosixPath(folders.state).is_relative_to(path):
            raise UserError(
                f"containers mount {path}, and all private keys are below it, in {folders.state}; run "
                "this in a folder of the job's own, or set XDG_STATE_HOME to a folder elsewhere"
            )
