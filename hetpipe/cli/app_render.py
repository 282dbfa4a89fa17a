"""The commands that draw, as typer sees them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hetpipe.cli import render_schedule
from hetpipe.cli.execution import Json, execute

renders = typer.Typer(
    help="Draw what hetpipe does, without doing it.",
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
