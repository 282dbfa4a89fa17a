"""The command that compares weight policies, as typer sees it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hetpipe.cli.execution import Json, Set, execute
from hetpipe.cli.study import compare as compare_command
from hetpipe.compare.trials import TrialSettings


def compare(  # noqa: PLR0913 - one for each option
    ctx: typer.Context,
    job: Annotated[Path, typer.Argument(metavar="JOB", help="Job file.")],
    *,
    weights: Annotated[
        str, typer.Option(metavar="POLICY,…", help="Weight policies to train it under.")
    ] = "wave,stash,double_buffer,flush,predict",
    seeds: Annotated[int, typer.Option(metavar="N", help="Seeds to train each with, from the job's own on.")] = 3,
    settings: Set = None,
    own_settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set-for", metavar="POLICY:PATH=VALUE", help="Change a key of the job under one policy only. Repeatable."
        ),
    ] = None,
    run_dir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder of the comparison; runs in it are used again.  [default: a new one]"),
    ] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write it as a page, with curves.")] = None,
    as_json: Json = False,
) -> None:
    """Train a job under several weight policies. Tells how well each trains, how fast, and in how much memory."""
    asked = TrialSettings(weights, seeds, tuple(settings or ()), tuple(own_settings or ()))
    options = compare_command.CompareOptions(job=job, settings=asked, run_dir=run_dir, html=html)
    execute(ctx, lambda output, shell: compare_command.compare(options, output, shell), as_json=as_json)
