"""The commands before training, as typer sees them: profile, plan, simulate, and what clusters are made of."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Annotated

import typer

from hetpipe.cli.execution import Json, Set, TlsFolder, execute
from hetpipe.cli.plan import plan as plan_command
from hetpipe.cli.plan import profile as profile_command
from hetpipe.cli.plan import profile_links as profile_links_command
from hetpipe.cli.plan import simulate as simulate_command
from hetpipe.cli.plan.cluster import from_k8s as cluster_from_k8s
from hetpipe.cli.plan.cluster import show as cluster_command
from hetpipe.cli.plan.link_profiling import LinkWish
from hetpipe.cli.plan.profiling import ProfileWish
from hetpipe.cli.plan.request import PlanRequest
from hetpipe.errors import UserError
from hetpipe.runs.outcome import ExitStatus, Output
from hetpipe.runs.shell import Shell
from hetpipe.server.agent.devices import discover_devices

clusters = typer.Typer(
    help="Show a cluster, the devices of this machine, and what is known of device types.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)


@clusters.command("show")
def cluster_show(
    ctx: typer.Context,
    file: Annotated[
        Path | None,
        typer.Argument(metavar="FILE", help="Cluster file.  [default: this machine, as a file to save and edit]"),
    ] = None,
    *,
    as_json: Json = False,
) -> None:
    """Show the nodes, devices and links of a cluster file. Without one, the devices of this machine as such a file."""

    def command(output: Output, _: Shell) -> ExitStatus:
        devices = () if file else discover_devices(socket.gethostname())
        return cluster_command.show(file, devices, output)

    execute(ctx, command, as_json=as_json)


@clusters.command("catalogue")
def cluster_catalogue(
    ctx: typer.Context,
    wanted: Annotated[str, typer.Argument(metavar="FILTER", help="Part of a name, for example 3090.")] = "",
    *,
    as_json: Json = False,
) -> None:
    """Show what is known of device types. Memory, peaks, bandwidth, links, and where each figure is from."""
    execute(ctx, lambda output, _: cluster_command.catalogue(wanted, output), as_json=as_json)


@clusters.command("from-k8s")
def cluster_from_kubernetes(
    ctx: typer.Context,
    source: Annotated[
        str, typer.Argument(metavar="[FILE|-]", help="What `kubectl get nodes -o json` printed; -: standard input.")
    ] = "-",
    *,
    as_agents: Annotated[
        bool, typer.Option("--as-agents", help="Name nodes like the agents of k8s/: by product and number.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Make a cluster file of the GPU nodes of a Kubernetes cluster. Reads the labels of GPU feature discovery."""
    execute(
        ctx,
        lambda output, _: cluster_from_k8s.from_k8s(source, output, as_agents=as_agents),
        as_json=as_json,
    )


def profile(  # noqa: PLR0913 - one for each option
    ctx: typer.Context,
    job: Annotated[Path | None, typer.Argument(metavar="JOB", help="Job file; not with --links.")] = None,
    *,
    settings: Set = None,
    links: Annotated[
        bool,
        typer.Option("--links", help="Measure links instead: between processes of this machine, and to its devices."),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the profile as JSON; with --links, a cluster file as YAML."),
    ] = None,
    types: Annotated[
        str | None,
        typer.Option(
            metavar="TYPE,…",
            help="Device types to have in the profile beside those of this machine: estimated from the catalogue if "
            "they are not here. `cpu` measures the CPU, too.",
        ),
    ] = None,
    repeats: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Measure each layer so often.  [default: until the medians are stable]"),
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure again, even if nothing has changed.")] = False,
    coordinator: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="With --links: have the agents of this coordinator measure the links between their nodes.",
        ),
    ] = None,
    tls: TlsFolder = None,
    as_json: Json = False,
) -> None:
    """Measure what every layer of a job's model costs. Times, parameters, activations, on each type of device here."""
    settings_ = tuple(settings or ())

    def command(output: Output, shell: Shell) -> ExitStatus:
        if links:
            not_with_links = {"JOB": job, "--set": settings_, "--types": types, "--repeats": repeats}
            profile_links_command.check_alone([name for name, value in not_with_links.items() if value])
            if coordinator is not None:
                of = profile_links_command.ClusterLinksOptions(coordinator=coordinator, out=out, fresh=fresh)
                return profile_links_command.profile_cluster_links(of, output, shell)
            node = socket.gethostname()
            wish = LinkWish(node=node, devices=discover_devices(node), fresh=fresh)
            asked = profile_links_command.ProfileLinksOptions(out=out, wish=wish)
            return profile_links_command.profile_links_of(asked, output, shell)
        if coordinator is not None:
            raise UserError("--coordinator is for links; give --links, too, or leave it out")
        if job is None:
            raise UserError("there is nothing to measure; name a job file, or give --links")
        layers = ProfileWish(types=profile_command.types_of(types), fresh=fresh, repeats=repeats)
        options = profile_command.ProfileOptions(job=job, settings=settings_, out=out, wish=layers)
        return profile_command.profile(options, output, shell)

    execute(ctx, command, as_json=as_json, tls=tls)


def plan(  # noqa: PLR0913 - one for each option
    ctx: typer.Context,
    job: Annotated[Path | None, typer.Argument(metavar="JOB", help="Job file; not needed with two files.")] = None,
    *,
    profile: Annotated[Path | None, typer.Option(metavar="P.json", help="Profile.  [default: measure the job]")] = None,
    cluster: Annotated[Path | None, typer.Option(metavar="C.yaml", help="Cluster.  [default: this machine]")] = None,
    allocation: Annotated[
        str | None, typer.Option(metavar="NAME", help="NP, ED, HD, auto, explicit or parallel.  [default: auto]")
    ] = None,
    workers: Annotated[
        str | None, typer.Option(metavar="JSON", help='Devices by virtual worker: [["n0/0", "n1/0"], …]; for explicit.')
    ] = None,
    minibatches_per_wave: Annotated[
        str | None, typer.Option(metavar="N|auto", help="Minibatches per wave.  [default: the job's, else auto]")
    ] = None,
    placement: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="balanced, round_robin, ed_local, or auto: the fastest.  [default: auto]"),
    ] = None,
    staleness: Annotated[
        str | None, typer.Option("--D", metavar="N|auto", help="Staleness bound, inf, or auto.  [default: 0]")
    ] = None,
    max_staleness: Annotated[
        int | None, typer.Option("--max-D", min=0, metavar="N", help="The largest D that --D auto may choose.")
    ] = None,
    weights: Annotated[str | None, typer.Option(metavar="POLICY", help="Weight policy.  [default: wave]")] = None,
    schedule: Annotated[
        str | None, typer.Option(metavar="NAME", help="1f1b, fifo or gpipe.  [default: the weight policy's own]")
    ] = None,
    optimizer_slots: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="Tensors that the optimizer keeps per parameter.")
    ] = None,
    recompute: Annotated[
        str | None, typer.Option(metavar="auto|on|off", help="Recompute activations.  [default: auto; off for a job]")
    ] = None,
    max_batch: Annotated[
        int | None, typer.Option(min=1, metavar="B", help="Largest global batch; for parallel.")
    ] = None,
    shards: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Parameter-server shards.  [default: one per node in use]")
    ] = None,
    reserve_bytes: Annotated[
        int | None,
        typer.Option(
            min=0, metavar="N", help="What the framework takes on every device.  [default: measured; 0 for files]"
        ),
    ] = None,
    why: Annotated[bool, typer.Option("--why", help="Say why: the alternatives, N, the cuts.")] = False,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write it all as a page, with a picture.")] = None,
    out: Annotated[Path | None, typer.Option(metavar="PLAN.json", help="Write the plan.")] = None,
    as_json: Json = False,
) -> None:
    """Plan before training. Which device computes which layers, how fast that will be, and why."""
    request = PlanRequest(
        job=job,
        profile=profile,
        cluster=cluster,
        allocation=allocation,
        workers=workers,
        minibatches_per_wave=minibatches_per_wave,
        placement=placement,
        staleness=staleness,
        max_staleness=max_staleness,
        weights=weights,
        schedule=schedule,
        optimizer_slots=optimizer_slots,
        recompute=recompute,
        max_batch=max_batch,
        shards=shards,
        reserve_bytes=reserve_bytes,
        why=why,
        html=html,
        out=out,
    )
    execute(ctx, lambda output, shell: plan_command.plan(request, output, shell), as_json=as_json)


def simulate(  # noqa: PLR0913 - one for each option
    ctx: typer.Context,
    *,
    plan: Annotated[Path, typer.Option(metavar="PLAN.json", help="Plan file.")],
    profile: Annotated[Path, typer.Option(metavar="P.json", help="Profile of the model.")],
    cluster: Annotated[Path, typer.Option(metavar="C.yaml", help="Cluster file.")],
    staleness: Annotated[
        str | None, typer.Option("--D", metavar="N", help="Staleness bound, or inf.  [default: the plan's]")
    ] = None,
    minibatches: Annotated[
        int | None, typer.Option(metavar="N", help="Minibatches of each virtual worker.  [default: 64 waves or more]")
    ] = None,
    jitter: Annotated[
        float, typer.Option(metavar="CV", help="Vary computing times: standard deviation over mean.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(metavar="N", help="Of the variation.")] = 0,
    straggler: Annotated[
        list[str] | None,
        typer.Option(metavar="DEVICE=FACTOR", help="Let a device take so many times longer. Repeatable."),
    ] = None,
    no_contention: Annotated[
        bool, typer.Option("--no-contention", help="Let every transfer take the time it takes alone.")
    ] = False,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a trace for Perfetto or chrome://tracing.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Run a plan in simulated time. Tells how fast it will be and who waits for whom; nothing is trained."""
    options = simulate_command.SimulateOptions(
        plan=plan,
        profile=profile,
        cluster=cluster,
        staleness=staleness,
        minibatches=minibatches,
        jitter_cv=jitter,
        seed=seed,
        stragglers=tuple(straggler or ()),
        contention=not no_contention,
        trace=trace,
    )
    execute(ctx, lambda output, shell: simulate_command.run(options, output, shell), as_json=as_json)
