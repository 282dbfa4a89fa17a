"""The containers of one machine, in starting order, with their arguments, devices and folders. Pure.

The same description is executed by `deploy.engine` and written to a file by `deploy.compose`. Folders of the machine
have the same paths inside the containers, so that a run's folder has one path for the submitter, for the processes that
write to it, and for `hetpipe check`.

By default jobs are in the coordinator's memory. With Redis they survive the coordinator's process; on one machine the
benefit is small, as a run can be resumed from its checkpoint, so Redis is optional, and not persistent.
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

#: The port of every service, each in a container of its own.
GRPC_PORT = 7400
HEALTH_PORT = 7401
REDIS_PORT = 6379

#: Mount points of a container's certificates, of Redis' users, and of the coordinator's password.
TLS_FOLDER = "/etc/hetpipe/tls"
STORE_FOLDER = "/etc/hetpipe/store"

#: Folders of secrets below the state folder, each mounted only where needed, and the files of the last two.
CERTIFICATES = "certs"
STORE_USERS, USERS_FILE = "store-users", "users.acl"
STORE_PASSWORD, PASSWORD_FILE = "store-password", "password"

#: Folder of Redis' append-only file, below the state folder and in its container.
STORE_DATA, DATA_FOLDER = "store-data", "/data"

#: Folder of parameter servers' persistent state, below the folder of the runs.
_STATES = ".state"

#: The coordinator's name in Redis.
STORE_USER = "hetpipe"

#: Image of Redis; `make digests` appends the digest to the tag.
REDIS_IMAGE = "redis:7.4.2-bookworm"

#: The operator who submits jobs, from this machine or from a container.
OPERATOR = NamedPeer(identity.Role.OPERATOR, "submit")

#: The engines' restart policy: with growing pauses, unless stopped explicitly.
RESTART_POLICY = "unless-stopped"

#: Grace period from SIGTERM to SIGKILL: longer than writing a part of a checkpoint takes.
STOP_SECONDS = 60

#: Shared memory of a container, used between its stages and by data loaders.
SHM_BYTES = 1 << 30

#: Limit of processes and threads in one container: far above the needs of stages, far below the machine's limits.
MOST_PROCESSES = 4096

_MIB = 1 << 20
_TMP_BYTES = 1024 * _MIB

#: Folders of an image. Mounting them would hide the image's own files.
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
    """The kind of the coordinator's store."""

    MEMORY = "memory"
    REDIS = "redis"


@dataclass(frozen=True, slots=True)
class Mount:
    """A folder of the machine mounted in a container."""

    source: str
    """Absolute path on the machine."""
    target: str
    read_only: bool = True


@dataclass(frozen=True, slots=True)
class Health:
    """The health check of a container."""

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
    """Name of the container, also on the project's network."""
    image: str
    command: tuple[str, ...]
    ready: str
    """Text in its output once it is ready; empty for a container that runs to completion."""
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
    """Identity of its certificate; None: no certificate."""
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
    """Folder of user code, mounted read-only for stages."""
    runs: str
    """Folder of runs."""
    state: str
    """Folder of certificates and other secrets of this deployment."""
    more: tuple[str, ...] = ()
    """Further folders read by user code, for example data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentSpec:
    """The input of a description."""

    project: str
    image: str
    user: str
    """`UID:GID`, numbers."""
    agents: tuple[AgentGroup, ...]
    """In the order of their registration."""
    num_shards: int
    folders: Folders
    modules: tuple[str, ...] = ("*",)
    """Patterns of the modules that stages may import user code from."""
    allowed_environment: tuple[str, ...] = ()
    """Names and patterns of the environment variables that agents pass on to jobs."""
    tls: bool = True
    """Whether the processes authenticate each other."""
    store: StoreKind = StoreKind.MEMORY
    store_image: str = REDIS_IMAGE
    port: int = GRPC_PORT
    """Port of the coordinator on the machine's loopback interface."""


def deployment_of(spec: DeploymentSpec) -> Deployment:
    """The containers for `spec`.

    Raises:
        UserError: a folder cannot be mounted.
    """
    _check_folders(spec.folders)
    store = (_redis(spec),) if spec.store is StoreKind.REDIS else ()
    coordinator = _coordinator(spec)
    shards = tuple(_parameter_server(spec, index) for index in range(spec.num_shards))
    agents = tuple(_agents(spec))
    return Deployment(spec.project, (*store, coordinator, *shards, *agents))


def submission_of(spec: DeploymentSpec, deployment: Deployment, job: str) -> Container:
    """The container that submits the file `job`, a path below the code, and follows it."""
    command = ("hetpipe", "submit", job, "--coordinator", f"{Role.COORDINATOR}:{GRPC_PORT}")
    return Container(
        role=Role.SUBMIT,
        name=Role.SUBMIT,
        image=spec.image,
        command=(*command, *(("--tls", TLS_FOLDER) if spec.tls else ())),
        ready="",
        user=spec.user,
        mounts=(*_code(spec.folders), _runs(spec.folders), *_certificates(spec, OPERATOR)),
        environment=_ENVIRONMENT,
        depends_on=tuple(c.name for c in deployment.containers if c.role in (Role.PARAMETER_SERVER, Role.AGENT)),
        working_dir=spec.folders.code,
        peer=OPERATOR if spec.tls else None,
    )


#: Further environment of containers: no bytecode beside the read-only code, and no home folder.
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


def _service(spec: DeploymentSpec, service: _Service) -> Container:
    security = ("--tls", TLS_FOLDER) if spec.tls else ("--insecure",)
    command = ("hetpipe", "serve", service.peer.role, *service.options, *security)
    return Container(
        role=Role(service.peer.role),
        name=service.name,
        image=spec.image,
        command=(*command, "--health-port", str(HEALTH_PORT)),
        ready=_SERVICE_READY,
        user=spec.user,
        health=Health(("hetpipe", "health", f"127.0.0.1:{HEALTH_PORT}")),
        mounts=(*service.mounts, *_certificates(spec, service.peer)),
        gpus=service.gpus,
        environment=(*_ENVIRONMENT, *service.environment),
        passed_environment=service.passed_environment,
        depends_on=service.depends_on,
        published=service.published,
        shm_bytes=service.shm_bytes,
        peer=service.peer if spec.tls else None,
        restarts=True,
    )


def _redis(spec: DeploymentSpec) -> Container:
    users = Mount(f"{spec.folders.state}/{STORE_USERS}", STORE_FOLDER)
    data = Mount(f"{spec.folders.state}/{STORE_DATA}", DATA_FOLDER, read_only=False)
    kept = ("--save", "", "--appendonly", "yes", "--appendfsync", "always", "--dir", DATA_FOLDER)
    return Container(
        role=Role.STORE,
        name=Role.STORE,
        image=spec.store_image,
        command=("redis-server", "--bind", "*", "--aclfile", f"{STORE_FOLDER}/{USERS_FILE}", *kept),
        ready="Ready to accept connections",
        user=spec.user,
        # Anonymous callers are rejected, so a rejection shows that the server works.
        health=Health(("sh", "-c", "redis-cli ping | grep -qE 'PONG|NOAUTH'")),
        mounts=(users, data),
        restarts=True,
    )


def _coordinator(spec: DeploymentSpec) -> Container:
    store: tuple[str, ...] = ("--store", StoreKind.MEMORY)
    mounts: tuple[Mount, ...] = (_runs(spec.folders),)
    if spec.store is StoreKind.REDIS:
        url = f"redis://{STORE_USER}@{Role.STORE}:{REDIS_PORT}/0"
        store = ("--store", url, "--store-password-file", f"{STORE_FOLDER}/{PASSWORD_FILE}")
        mounts = (*mounts, Mount(f"{spec.folders.state}/{STORE_PASSWORD}", STORE_FOLDER))
    return _service(
        spec,
        _Service(
            peer=NamedPeer(identity.Role.COORDINATOR, identity.Role.COORDINATOR),
            name=Role.COORDINATOR,
            options=(*_listening(Role.COORDINATOR), *store, *_run_root(spec.folders)),
            mounts=mounts,
            depends_on=(Role.STORE,) if spec.store is StoreKind.REDIS else (),
            published=spec.port,
        ),
    )


def _parameter_server(spec: DeploymentSpec, index: int) -> Container:
    name = f"{Role.PARAMETER_SERVER}-{index}"
    # Beside the runs, because these files survive the container.
    state = f"{spec.folders.runs}/{_STATES}/{spec.project}/shard-{index}"
    return _service(
        spec,
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
                *_run_root(spec.folders),
            ),
            mounts=(_runs(spec.folders),),
            depends_on=(Role.COORDINATOR,),
        ),
    )


def _agents(spec: DeploymentSpec) -> Iterator[Container]:
    """The agents, started in sequence: the coordinator assigns devices in the order in which agents register."""
    before: str = Role.COORDINATOR
    for index, group in enumerate(spec.agents):
        name = f"{Role.AGENT}-{index}"
        gpus = tuple(device.gpu for device in group.devices if device.gpu)
        offered = () if gpus else ("--cpu-devices", str(len(group.devices)))
        allowed = tuple(part for pattern in spec.modules for part in ("--allow-modules", pattern))
        allowed += tuple(part for name in spec.allowed_environment for part in ("--allow-environment", name))
        roots = ("--code-root", spec.folders.code, *_run_root(spec.folders))
        yield _service(
            spec,
            _Service(
                peer=NamedPeer(identity.Role.AGENT, group.node),
                name=name,
                options=(*_TO_COORDINATOR, "--node", group.node, "--host", name, *offered, *allowed, *roots),
                mounts=(*_code(spec.folders), _runs(spec.folders)),
                depends_on=(before,),
                gpus=gpus,
                shm_bytes=SHM_BYTES,
                # The order of the stages, independent of the engine's and CUDA's numbering of GPUs.
                environment=(("CUDA_VISIBLE_DEVICES", ",".join(gpus)),) if gpus else (),
                passed_environment=passed_on(spec.allowed_environment),
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


def _certificates(spec: DeploymentSpec, peer: NamedPeer) -> tuple[Mount, ...]:
    own = process_folder(PurePosixPath(spec.folders.state) / CERTIFICATES, peer)
    return (Mount(str(own), TLS_FOLDER),) if spec.tls else ()


def _check_folders(folders: Folders) -> None:
    shown = (folders.code, folders.runs, *folders.more)
    for path in shown:
        if path in _SYSTEM_FOLDERS:
            raise UserError(
                f"{path} would be mounted at the same path in containers and hide their own files; run this in a "
                "folder of your own, and keep runs and data in separate folders"
            )
        if PurePosixPath(folders.state).is_relative_to(path):
            raise UserError(
                f"containers mount {path}, and all private keys are below it, in {folders.state}; run "
                "this in a folder of the job's own, or set XDG_STATE_HOME to a folder elsewhere"
            )
