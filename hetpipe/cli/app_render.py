"""The commands that draw, or write what others carry out, as typer sees them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hetpipe.cli import app_deploy as deploy
from hetpipe.cli.deploy.deployment import DeploymentOptions
from hetpipe.cli.deploy.render import k8s as render_deploy
from hetpipe.cli.deploy.render import redis_acl as render_redis_acl
from hetpipe.cli.deploy.render import schedule as render_schedule
from hetpipe.cli.execution import Json, Set, execute
from hetpipe.deploy.labels import DEFAULT_PROJECT
from hetpipe.deploy.topology import GRPC_PORT, REDIS_IMAGE, Store

renders = typer.Typer(
    help="Draw or write down what hetpipe does, without doing it.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)


@renders.command("schedule")
def timeline(  # noqa: PLR0913 - one for each option
    ctx: typer.Context,
    *,
    stages: Annotated[int, typer.Option(metavar="K", help="Stages of the pipeline.")] = 4,
    minibatches: Annotated[int, typer.Option(metavar="N", help="Minibatches until it drains.")] = 8,
    weights: Annotated[str, typer.Option(metavar="POLICY", help="Weight policy.")] = "wave",
    schedule: Annotated[str, typer.Option(metavar="NAME", help="auto, 1f1b, fifo or gpipe.")] = "auto",
    minibatches_per_wave: Annotated[
        int | None, typer.Option(metavar="N", help="Minibatches per wave.  [default: 4, more if the policy needs them]")
    ] = None,
    accumulate: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Minibatches per update.  [default: 1; a whole wave under flush, double_buffer]"
        ),
    ] = None,
    backward_time: Annotated[
        int, typer.Option(metavar="UNITS", help="How long a backward takes; a forward takes 1.")
    ] = 2,
    svg: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the picture as SVG, too.")] = None,
    as_json: Json = False,
) -> None:
    """Draw the timeline of a weight policy. Which stage computes which minibatch when, and on which weights."""
    options = render_schedule.RenderOptions(
        stages=stages,
        minibatches=minibatches,
        weights=weights,
        schedule=schedule,
        minibatches_per_wave=minibatches_per_wave,
        accumulate=accumulate,
        backward_time=backward_time,
        svg=svg,
    )
    execute(ctx, lambda output, shell: render_schedule.run(options, output, shell), as_json=as_json)


@renders.command("redis-acl")
def redis_acl(
    ctx: typer.Context,
    *,
    user: Annotated[str, typer.Option(metavar="NAME", help="The coordinator's name in Redis.")] = "hetpipe",
    password_file: Annotated[Path, typer.Option(metavar="FILE", help="Its password is the text in FILE.")],
    as_json: Json = False,
) -> None:
    """Write an ACL file for Redis: the coordinator's user with what it needs, and nobody else. Without the password."""
    execute(ctx, lambda output, _: render_redis_acl.run(user, password_file, output), as_json=as_json)


@renders.command("compose")
def compose(  # noqa: PLR0913 - one for each option
    ctx: typer.Context,
    job: deploy.JobFile = None,
    *,
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The file to write.")] = Path("compose.yaml"),
    settings: Set = None,
    project: deploy.Project = DEFAULT_PROJECT,
    image: deploy.Image = None,
    cpu_devices: deploy.CpuDevices = None,
    shards: deploy.Shards = None,
    plan: deploy.Plan = None,
    store: deploy.StoreChoice = Store.MEMORY,
    store_image: deploy.StoreImage = REDIS_IMAGE,
    port: deploy.Port = GRPC_PORT,
    insecure: deploy.Insecure = False,
    data: deploy.Data = None,
    allow_modules: deploy.Modules = None,
    allow_environment: deploy.AllowedEnvironment = None,
    as_json: Json = False,
) -> None:
    """Write what `hetpipe up` does as a Compose file. With the certificates it needs, in a folder of your own."""
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
    )
    execute(ctx, lambda output, shell: render_deploy.compose(options, out, output, shell), as_json=as_json)


@renders.command("manifests")
def manifests(
    ctx: typer.Context,
    out: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to write, new or empty.")],
    *,
    as_json: Json = False,
) -> None:
    """Write the Compose file and the Kubernetes manifests that come with hetpipe. As they are; for you to change."""
    execute(ctx, lambda output, shell: render_deploy.manifests(out, output, shell), as_json=as_json)


@renders.command("k8s")
def kubernetes(  # noqa: PLR0913 - one for each option
    ctx: typer.Context,
    job: Annotated[Path, typer.Argument(metavar="JOB", help="Job file.")],
    *,
    agents: Annotated[
        list[str],
        typer.Option(
            "--agents",
            metavar="PRODUCT=NODESxDEVICES",
            help="Nodes of one GPU product, as their label nvidia.com/gpu.product says it, for example "
            "NVIDIA-TITAN-V=2x4; or cpu=2x2. Repeatable.",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder to write, new or empty.")],
    settings: Set = None,
    image: deploy.Image = None,
    k8s: Annotated[
        Path | None,
        typer.Option(
            "--k8s",
            metavar="DIR",
            help="Refer to the manifests in DIR, a changed copy of hetpipe's k8s.  [default: write them along]",
        ),
    ] = None,
    code: Annotated[
        list[Path] | None,
        typer.Option("--code", metavar="FILE", help="Take this file along, too; of the job's own folder. Repeatable."),
    ] = None,
    allow_environment: deploy.AllowedEnvironment = None,
    insecure: deploy.Insecure = False,
    as_json: Json = False,
) -> None:
    """Write a job as a Kustomize overlay. Its files, its shards, its agents for each GPU product, over k8s/base."""
    options = render_deploy.KubernetesOptions(
        job=job,
        agents=tuple(agents),
        out=out,
        settings=tuple(settings or ()),
        image=image,
        k8s=k8s,
        files=tuple(code or ()),
        allowed_environment=tuple(allow_environment or ()),
        insecure=insecure,
    )
    execute(ctx, lambda output, shell: render_deploy.kubernetes(options, output, shell), as_json=as_json)
