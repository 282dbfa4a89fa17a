"""The command `hetpipe profile`: what every layer of a job's model costs on each type of device."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hetpipe.cli.plan.profile_view import ProfileBar, ProfileLines, ProfileView
from hetpipe.cli.plan.profiling import Profiled, ProfileWish, profile_job
from hetpipe.errors import UserError
from hetpipe.job.file import load_job
from hetpipe.report.quantities import bytes_text
from hetpipe.report.text import columns, duration, shown_path
from hetpipe.runs.outcome import ExitStatus, Output
from hetpipe.runs.shell import Shell
from hetpipe.values.document import write_document
from hetpipe.values.profile import LayerProfile, Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOptions:
    """The options of the command."""

    job: Path
    settings: tuple[str, ...] = ()
    """`path=value` texts."""
    out: Path | None = None
    wish: ProfileWish


def types_of(text: str | None) -> tuple[str, ...]:
    """The names in the value of `--types`.

    >>> types_of("RTX_3090, T4,"), types_of(None)
    (('RTX_3090', 'T4'), ())
    """
    return tuple(name for part in (text or "").split(",") if (name := part.strip()))


def profile(options: ProfileOptions, output: Output, shell: Shell) -> ExitStatus:
    """Measure, and tell what was found."""
    job = load_job(options.job, options.settings)
    with view_for(output, shell) as view:
        profiled = profile_job(job, options.wish, shell, view.show)
    if options.out is not None:
        _write(profiled.profile, options.out)
    output.say(*lines(profiled.profile), "", *_remarks(profiled, options, shell))
    if output.machine is not None:
        output.answer(profiled.profile.model_dump(mode="json", exclude_defaults=True))
    return ExitStatus.OK


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


def _remarks(profiled: Profiled, options: ProfileOptions, shell: Shell) -> list[str]:
    found = [f"per minibatch of {profiled.profile.batch_size} samples; the last layer's figures include the loss"]
    for kind, measured_at in profiled.cached.items():
        age = duration(shell.clock.wall() - measured_at)
        found.append(f"{kind} was measured {age} ago and is unchanged since; measure it again with --fresh")
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


def view_for(
    output: Output, shell: Shell, *, unit: str = "layers", beginning: str = "importing the model"
) -> ProfileView:
    """Shows a measurement: a bar on a terminal, else lines.

    Args:
        output: where.
        shell: the world around.
        unit: what is measured one after the other.
        beginning: what is done before the first of them.
    """
    if shell.is_screen(output.people):
        return ProfileBar(output.people, beginning)
    return ProfileLines(output.people, shell.clock, unit)
