"""The commands about containers on this machine, as typer sees them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hetpipe.cli.deploy.deployment import DeploymentOptions
from hetpipe.cli.execution import Json, Set, execute
from hetpipe.deploy.labels import DEFAULT_PROJECT
from hetpipe.deploy.topology import GRPC_PORT, REDIS_IMAGE, Store
from hetpipe.runs.outcome import ExitStatus, Output
from hetpipe.runs.shell import Shell

Project = Annotated[str, typer.Option("--project", metavar="NAME", help="Name of the whole; begins container names.")]
Image = Annotated[
    str | None,
    typer.Option("--image", metavar="IMAGE", help="Image of hetpipe.  [default: hetpipe:VERSION-cpu, or -cuda]"),
]
CpuDevices = Annotated[
    int | None,
    typer.Option("--cpu-devices", min=1, metavar="N", help="Use N CPU devices.  [default: the GPUs, else as needed]"),
]
Shards = Annotated[
    int | None, typer.Option("--shards", min=1, metavar="N", help="Parameter servers.  [default: the job's, else 1]")
]
Plan = Annotated[
    Path | None,
    typer.Option(
        "--plan", metavar="P.json", help="Follow this plan of `hetpipe plan`, for a job that leaves its cut open."
    ),
]
StoreChoice = Annotated[Store, typer.Option("--store", help="Where the coordinator keeps jobs.")]
StoreImage = Annotated[
    str,
    typer.Option(
        "--store-image",
        metavar="IMAGE",
        help="Image of Redis, for --store redis.",
        show_default=REDIS_IMAGE.partition("@")[0],
    ),
]
Port = Annotated[
    int, typer.Option("--port", min=1, max=65_535, metavar="N", help="Port of 127.0.0.1 for the coordinator.")
]
Insecure = Annotated[bool, typer.Option("--insecure", help="Without TLS between the containers.")]
Data = Annotated[
    list[Path] | None,
    typer.Option("--data", metavar="DIR", help="Let user code read this folder, too. Repeatable."),
]
Modules = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-modules",
        metavar="PATTERN",
        help="Modules that stages may import user code from. Repeatable.  [default: those that the job names]",
    ),
]
AllowedEnvironment = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-environment",
        metavar="NAME",
        help="Environment variables, or patterns of them, that agents pass on to jobs. Repeatable.  [default: none]",
    ),
]
Detach = Annotated[bool, typer.Option("--detach", help="Leave the containers; do not follow the job.")]
NewRunDir = Annotated[
    Path | None,
    typer.Option("--run-dir", metavar="DIR", help="Folder for the run, new or empty.  [default: runs/NAME-TIME]"),
]
Resume = Annotated[
    Path | None, typer.Option("--resume", metavar="RUN_DIR", help="Go on from the newest checkpoint of that run.")
]
JobFile = Annotated[Path | None, typer.Argument(metavar="JOB", help="Job file; without one only services start.")]


def up(  # noqa: PLR0913 - one for each option
    ctx: typer.Context,
    job: JobFile = None,
    *,
    settings: Set = None,
    project: Project = DEFAULT_PROJECT,
    image: Image = None,
    cpu_devices: CpuDevices = None,
    shards: Shards = None,
    plan: Plan = None,
    store: StoreChoice = Store.MEMORY,
    store_image: StoreImage = REDIS_IMAGE,
    port: Port = GRPC_PORT,
    insecure: Insecure = False,
    data: Data = None,
    allow_modules: Modules = None,
    allow_environment: AllowedEnvironment = None,
    run_dir: NewRunDir = None,
    resume: Resume = None,
    detach: Detach = False,
    as_json: Json = False,
) -> None:
    """Train a job in containers on this machine. Each virtual worker gets one that sees its own GPUs and no others."""
    # The docker SDK takes a while to import, here and below.
    from hetpipe.cli.deploy.up import UpOptions
    from hetpipe.cli.deploy.up import up as command

    options = DeploymentOptions(
        job=job,
        settings=tuple(settings or ()),
        project=project,
        image=image,
        cpu_devices=cpu_devices,
        shards=shards,
        plan=plan,
        store=store,
        store_image=store_image,
        port=port,
        insecure=insecure,
        data=tuple(data or ()),
        modules=tuple(allow_modules or ()),
        allowed_environment=tuple(allow_environment or ()),
        run_dir=run_dir,
        resume=resume,
    )
    wanted = UpOptions(deployment=options, detach=detach)
    execute(ctx, lambda output, shell: command(wanted, output, shell), as_json=as_json)


def down(ctx: typer.Context, *, project: Project = DEFAULT_PROJECT, as_json: Json = False) -> None:
    """End what `hetpipe up` has left running. Containers, network and certificates go; runs stay."""

    def command(output: Output, shell: Shell) -> ExitStatus:
        from hetpipe.cli.deploy import containers as containers_command

        return containers_command.down(project, output, shell)

    execute(ctx, command, as_json=as_json)


def ps(ctx: typer.Context, *, project: Project = DEFAULT_PROJECT, as_json: Json = False) -> None:
    """Show the containers of `hetpipe up`. Their state, their health, their GPUs."""

    def command(output: Output, shell: Shell) -> ExitStatus:
        from hetpipe.cli.deploy import containers as containers_command

        return containers_command.ps(project, output, shell)

    execute(ctx, command, as_json=as_json)


def logs(
    ctx: typer.Context,
    wanted: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME]...", help="Containers or roles, for example agent.  [default: all]"),
    ] = None,
    *,
    project: Project = DEFAULT_PROJECT,
    follow: Annotated[bool, typer.Option("--follow", help="Go on as more is written.")] = False,
    tail: Annotated[int | None, typer.Option("--tail", min=0, metavar="N", help="The last N lines of each.")] = None,
    as_json: Json = False,
) -> None:
    """Show what the containers of `hetpipe up` have written."""

    def command(output: Output, shell: Shell) -> ExitStatus:
        from hetpipe.cli.deploy import containers as containers_command

        options = containers_command.LogOptions(project=project, wanted=tuple(wanted or ()), follow=follow, tail=tail)
        return containers_command.logs(options, output, shell)

    execute(ctx, command, as_json=as_json)
