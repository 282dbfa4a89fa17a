"""Descriptions of deployments, from the options of `hetpipe up` and `hetpipe render compose`."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from hetpipe import __version__
from hetpipe.cli.options import Settings
from hetpipe.cli.plan.profile_view import view_for
from hetpipe.cli.plan.profiling import ProfileOptions, profile_job
from hetpipe.decide.lifecycle.known_cluster import cluster_of
from hetpipe.decide.lifecycle.planning import num_devices_wanted, options_of
from hetpipe.deploy.box import box_devices
from hetpipe.deploy.groups import AgentGroup, groups_of, job_of_plan, needs_a_plan
from hetpipe.deploy.labels import DEFAULT_PROJECT, check_project
from hetpipe.deploy.topology import (
    GRPC_PORT,
    REDIS_IMAGE,
    Deployment,
    DeploymentSpec,
    Folders,
    StoreKind,
    deployment_of,
)
from hetpipe.errors import UserError
from hetpipe.job.file import Job
from hetpipe.report.text import count
from hetpipe.runs.outcome import Output
from hetpipe.runs.requests import new_run
from hetpipe.runs.run_folder import RUNS
from hetpipe.runs.shell import Shell
from hetpipe.runs.training import RunRequest, choose_devices
from hetpipe.server.agent.devices import discover_devices
from hetpipe.server.agent.environment import check_allowed, checked_allowed
from hetpipe.values.document import read_document
from hetpipe.values.ids import AgentId
from hetpipe.values.plan_document import PlanDocument
from hetpipe.values.run import AgentDevice, AgentInfo
from hetpipe.values.storage_url import is_url

#: The user of the containers if root starts them: the image's own user.
IMAGE_USER = "10001:10001"

_REFERENCE = re.compile(r"([A-Za-z_][\w.]*):[A-Za-z_][\w.]*", re.ASCII)


JobOrNothing = Annotated[
    Path | None, typer.Argument(metavar="JOB", help="Job file; without one, only services are started.")
]
Project = Annotated[str, typer.Option(metavar="NAME", help="Project name, the prefix of container names.")]
Image = Annotated[
    str | None, typer.Option(metavar="IMAGE", help="Image of hetpipe.  [default: hetpipe:VERSION-cpu, or -cuda]")
]
Insecure = Annotated[bool, typer.Option("--insecure", help="Disable TLS between the containers.")]
AllowedEnvironment = Annotated[
    tuple[str, ...],
    typer.Option(
        "--allow-environment",
        metavar="NAME",
        help="Environment variables, or patterns of them, that agents pass on to jobs. Repeatable.  [default: none]",
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentOptions:
    """The options that describe a deployment, of `hetpipe up` and of `hetpipe render compose`."""

    job: JobOrNothing = None
    settings: Settings = ()
    project: Project = DEFAULT_PROJECT
    image: Image = None
    cpu_devices: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Use N CPU devices.  [default: the GPUs, else as needed]"),
    ] = None
    shards: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Parameter servers.  [default: the job's, else 1]")
    ] = None
    plan: Annotated[
        Path | None,
        typer.Option(metavar="P.json", help="Plan of `hetpipe plan`, for a job with `stages: auto`."),
    ] = None
    store: Annotated[StoreKind, typer.Option(help="Store of the coordinator's state.")] = StoreKind.MEMORY
    store_image: Annotated[
        str,
        typer.Option(
            metavar="IMAGE", help="Image of Redis, for --store redis.", show_default=REDIS_IMAGE.partition("@")[0]
        ),
    ] = REDIS_IMAGE
    port: Annotated[int, typer.Option(min=1, max=65_535, metavar="N", help="Port of the coordinator on 127.0.0.1.")] = (
        GRPC_PORT
    )
    insecure: Insecure = False
    data: Annotated[
        tuple[Path, ...], typer.Option(metavar="DIR", help="Folder mounted read-only for user code. Repeatable.")
    ] = ()
    modules: Annotated[
        tuple[str, ...],
        typer.Option(
            "--allow-modules",
            metavar="PATTERN",
            help="Modules that stages may import user code from. Repeatable.  [default: those that the job names]",
        ),
    ] = ()
    allowed_environment: AllowedEnvironment = ()


@dataclass(frozen=True, slots=True)
class Described:
    """A deployment and its job."""

    spec: DeploymentSpec
    deployment: Deployment
    request: RunRequest | None
    """The job to train, as planned; None: services only."""

    @property
    def summary(self) -> str:
        """The containers to be started, as a sentence for people."""
        shards = count(self.spec.num_shards, "parameter server")
        agents = ", ".join(f"{group.node} with {_devices_text(group)}" for group in self.spec.agents)
        return f"1 coordinator, {shards}, {count(len(self.spec.agents), 'agent')}: {agents}"


def describe(
    options: DeploymentOptions, output: Output, shell: Shell, *, run_dir: Path | None = None, resume: str | None = None
) -> Described:
    """The deployment for these options; a job without a cut is planned for the devices of this machine.

    Args:
        options: as parsed.
        output: shows the progress of planning.
        shell: the command's environment.
        run_dir: folder for the run; None: a new one in `runs`.
        resume: the run to resume, if any.

    Raises:
        UserError: options, the job or the plan cannot be used, or devices are missing.
    """
    check_project(options.project)
    allowed_environment = checked_allowed(options.allowed_environment)
    request = _request(options, shell, run_dir, resume)
    job = None if request is None else request.job
    if job is not None:
        check_allowed(job.environment, allowed_environment)
    num_cpu_devices = options.cpu_devices
    if num_cpu_devices is None and job is not None:
        offer, _ = choose_devices(job)
        # A container owns its GPUs: stages do not share them here.
        num_cpu_devices = num_devices_wanted(job) if offer.devices_per_gpu > 1 else offer.num_cpu_devices
    found = discover_devices(socket.gethostname(), num_cpu_devices=num_cpu_devices)
    plan = None if job is None else _plan(options, job, found, output, shell)
    if job is not None and request is not None and plan is not None:
        job = job_of_plan(job, plan)
        request = replace(request, job=job)
    spec = DeploymentSpec(
        project=options.project,
        image=options.image or default_image(found),
        user=container_user(),
        agents=groups_of(job, box_devices(found), plan),
        num_shards=_num_shards(options, job),
        folders=_folders(options, request, run_dir, shell),
        modules=options.modules or (("*",) if job is None else tuple(modules_of(job))),
        allowed_environment=allowed_environment,
        tls=not options.insecure,
        store=options.store,
        store_image=options.store_image,
        port=options.port,
    )
    return Described(spec, deployment_of(spec), request)


def default_image(devices: Sequence[AgentDevice]) -> str:
    """The documented name of the image for these devices."""
    on_gpus = any(device.torch_device.startswith("cuda") for device in devices)
    return f"hetpipe:{__version__}-{'cuda' if on_gpus else 'cpu'}"


def container_user() -> str:
    """The user of the containers: the calling user, so that they own their runs, but never root."""
    return f"{os.getuid()}:{os.getgid()}" if os.getuid() else IMAGE_USER


def modules_of(job: Job) -> Iterator[str]:
    """The modules of the callables that the job names."""

    def references(value: object) -> Iterator[str]:
        if isinstance(value, Mapping):
            for entry in value.values():
                yield from references(entry)
        elif isinstance(value, list | tuple):
            for entry in value:
                yield from references(entry)
        elif isinstance(value, str) and (found := _REFERENCE.fullmatch(value)):
            yield found[1]

    yield from dict.fromkeys(references(job.model_dump(exclude={"cluster", "name"})))


def state_folder(environment: Mapping[str, str], project: str) -> Path:
    """The folder of a project's secrets."""
    base = environment.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "hetpipe" / project


def _request(options: DeploymentOptions, shell: Shell, run_dir: Path | None, resume: str | None) -> RunRequest | None:
    if options.job is None and resume is None:
        for option, value in (("--plan", options.plan), ("--set", options.settings), ("--run-dir", run_dir)):
            if value:
                raise UserError(f"{option} requires a job; name its file, or leave {option} out")
        return None
    coordinator = f"127.0.0.1:{options.port}"
    return new_run(options.job, options.settings, resume=resume, coordinator=coordinator, shell=shell)


def _plan(
    options: DeploymentOptions, job: Job, devices: Sequence[AgentDevice], output: Output, shell: Shell
) -> PlanDocument | None:
    if options.plan is not None:
        return read_document(PlanDocument, options.plan)
    if not needs_a_plan(job):
        return None
    output.say("the job has no plan: planning it for this machine first, as `hetpipe plan` does")
    # slow to import
    from hetpipe.decide.planner.choose import choose_plan
    from hetpipe.decide.simulator.prediction import predicted

    node = AgentId(socket.gethostname())
    cluster = cluster_of([AgentInfo(node, host="", pid=0, devices=tuple(devices))])
    profile, reserve_bytes = job.cluster.profile, 0
    if profile is None:
        with view_for(output, shell) as view:
            types = tuple(dict.fromkeys(cluster.devices.values()))
            profiled = profile_job(job, ProfileOptions(types=types), shell, view.show)
        profile, reserve_bytes = profiled.profile, profiled.reserve_bytes
    return choose_plan(profile, cluster, options_of(job, reserve_bytes=reserve_bytes), predict=predicted)


def _num_shards(options: DeploymentOptions, job: Job | None) -> int:
    if job is None:
        return options.shards or 1
    if options.shards is not None:
        raise UserError(
            "the job sets the number of shards by parameter_servers.count; leave --shards out, or give "
            f"--set parameter_servers.count={options.shards}"
        )
    return job.parameter_servers.count


def _folders(options: DeploymentOptions, request: RunRequest | None, run_dir: Path | None, shell: Shell) -> Folders:
    """Mount only the run's own folder, if given; else that of all runs, so that other jobs can be submitted later."""
    runs = shell.current / RUNS if run_dir is None else run_dir.absolute()
    for path in options.data:
        if not path.is_dir():
            raise UserError(f"--data {path}: no such folder")
    more = [path.resolve() for path in options.data]
    restore = None if request is None else request.restore
    if restore is not None and not is_url(restore):
        path = Path(restore)
        more += [] if any(path.is_relative_to(shown) for shown in (shell.current, runs)) else [path]
    return Folders(
        code=str(shell.current),
        runs=str(runs),
        state=str(state_folder(shell.environment, options.project)),
        more=tuple(map(str, more)),
    )


def _devices_text(group: AgentGroup) -> str:
    gpus = sum(bool(device.gpu) for device in group.devices)
    return count(gpus, "GPU") if gpus else count(len(group.devices), "CPU device")
