"""`hetpipe profile`: the cost of every layer of a job's model on each type of device."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from hetpipe.cli.options import Json, Settings, TlsFolder
from hetpipe.cli.plan.link_profiling import LinkProfileOptions
from hetpipe.cli.plan.profile_links import profile_cluster_links, profile_links_of
from hetpipe.cli.plan.profile_view import view_for
from hetpipe.cli.plan.profiling import Profiled, ProfileOptions, profile_job
from hetpipe.errors import UserError
from hetpipe.job.file import load_job
from hetpipe.report.text import columns, duration, shown_path
from hetpipe.runs.outcome import ExitStatus, Output
from hetpipe.runs.shell import Shell
from hetpipe.server.agent.devices import discover_devices
from hetpipe.values.document import write_document
from hetpipe.values.profile import LayerProfile, Profile
from hetpipe.values.quantities import bytes_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Measure the cost of every layer of a job's model. Times, parameters, activations per device type."""

    job: Annotated[Path | None, typer.Argument(metavar="JOB", help="Job file; not with --links.")] = None
    settings: Settings = ()
    links: Annotated[
        bool,
        typer.Option("--links", help="Measure links instead: between processes of this machine, and to its devices."),
    ] = False
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the profile as JSON; with --links, a cluster file as YAML."),
    ] = None
    types: Annotated[
        str | None,
        typer.Option(
            metavar="TYPE,…",
            help="Additional device types, estimated from the catalogue if this machine does not have them. `cpu` also "
            "measures the CPU.",
        ),
    ] = None
    repeats: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Measurements per layer.  [default: until the medians are stable]"),
    ] = None
    fresh: Annotated[bool, typer.Option("--fresh", help="Ignore cached measurements.")] = False
    coordinator: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="With --links: measure the links between the nodes of this coordinator's agents.",
        ),
    ] = None
    tls: TlsFolder = None
    as_json: Json = False


def run(options: Options, output: Output, shell: Shell) -> ExitStatus:
    """Measure layers or links, and print the result.

    Raises:
        UserError: options contradict each other, or the job or a file cannot be used.
    """
    if options.links:
        return _links(options, output, shell)
    if options.coordinator is not None:
        raise UserError("--coordinator is for links; add --links, or leave it out")
    if options.job is None:
        raise UserError("there is nothing to measure; name a job file, or give --links")
    job = load_job(options.job, options.settings)
    wish = ProfileOptions(types=types_of(options.types), fresh=options.fresh, repeats=options.repeats)
    with view_for(output, shell) as view:
        profiled = profile_job(job, wish, shell, view.show)
    if options.out is not None:
        _write(profiled.profile, options.out)
    output.say(*lines(profiled.profile), "", *_remarks(profiled, options, shell))
    if output.machine is not None:
        output.answer(profiled.profile.model_dump(mode="json", exclude_defaults=True))
    return ExitStatus.OK


def _links(options: Options, output: Output, shell: Shell) -> ExitStatus:
    """Measure links (`--links`); options for measuring a model are rejected."""
    of_models = {
        "JOB": options.job,
        "--set": options.settings,
        "--types": options.types,
        "--repeats": options.repeats,
    }
    if others := [name for name, value in of_models.items() if value]:
        raise UserError(f"--links measures no model; leave out {', '.join(others)}, or --links")
    if options.coordinator is not None:
        return profile_cluster_links(options.coordinator, output, shell, out=options.out, fresh=options.fresh)
    node = socket.gethostname()
    wish = LinkProfileOptions(node=node, devices=discover_devices(node), fresh=options.fresh)
    return profile_links_of(wish, output, shell, out=options.out)


def types_of(text: str | None) -> tuple[str, ...]:
    """Parse the value of `--types`.

    >>> types_of("RTX_3090, T4,"), types_of(None)
    (('RTX_3090', 'T4'), ())
    """
    return tuple(name for part in (text or "").split(",") if (name := part.strip()))


def lines(profile: Profile) -> list[str]:
    """A profile for people: a row per layer, and their sum."""
    types = profile.device_types
    heading = ["layer", "parameters", "activations", "output"]
    for kind in types:
        mark = " (estimated)" if kind in profile.estimated else ""
        heading += [f"{kind}{mark} forward ms", "backward ms"]
    rows = [_row(str(index), layer, types) for index, layer in enumerate(profile.layers)]
    return columns([heading, *rows, _sum(profile)])


def _row(index: str, layer: LayerProfile, types: tuple[str, ...]) -> list[str]:
    name = index if layer.name == index else f"{index} {layer.name}"
    sizes = (layer.parameter_bytes, layer.activation_bytes, layer.output_bytes)
    times = [times[kind] for kind in types for times in (layer.forward_ms, layer.backward_ms)]
    return [name, *(bytes_text(size) for size in sizes), *(f"{time_ms:.3f}" for time_ms in times)]


def _sum(profile: Profile) -> list[str]:
    layers, types = profile.layers, profile.device_types
    sizes = (sum(layer.parameter_bytes for layer in layers), sum(layer.activation_bytes for layer in layers))
    times = [
        sum(times)
        for kind in types
        for times in ([layer.forward_ms[kind] for layer in layers], [layer.backward_ms[kind] for layer in layers])
    ]
    return ["sum", *(bytes_text(size) for size in sizes), "", *(f"{time_ms:.3f}" for time_ms in times)]


def _remarks(profiled: Profiled, options: Options, shell: Shell) -> list[str]:
    found = [f"per minibatch of {profiled.profile.batch_size} samples; the last layer's figures include the loss"]
    for kind, measured_at in profiled.cached.items():
        age = duration(shell.clock.wall() - measured_at)
        found.append(f"{kind} was measured {age} ago, and nothing has changed since; measure it again with --fresh")
    if profiled.profile.estimated:
        names = ", ".join(profiled.profile.estimated)
        found.append(f"estimated from peak figures of the catalogue, not measured: {names}")
    if options.out is not None:
        found.append(f"written to {shown_path(options.out.absolute(), shell.current)}")
    return found


def _write(profile: Profile, path: Path) -> None:
    try:
        write_document(profile, path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; give --out a file in a folder that exists") from error
