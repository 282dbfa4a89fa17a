"""`hetpipe render schedule`: the timeline of a policy, as the papers draw them, from the runtime's own rules."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from hetpipe.cli.options import Json
from hetpipe.decide.schedule.policy import Kind
from hetpipe.decide.schedule.timeline import Box, Pipeline, StageTimeline, Timeline, play
from hetpipe.errors import UserError
from hetpipe.report.schedule_picture import picture_lines
from hetpipe.report.text import shown_path
from hetpipe.runs.outcome import ExitStatus, Output
from hetpipe.runs.shell import Shell
from hetpipe.values.policies import (
    POLICIES,
    SCHEDULES,
    WEIGHT_POLICIES,
    Schedule,
    WeightPolicy,
)
from hetpipe.values.suggest import did_you_mean

#: Limits of the picture: larger ones are unreadable and slow to draw.
_MOST_STAGES = 64
_MOST_MINIBATCHES = 1000
_MOST_UNITS = 100

#: N as in a job without it, if the policy allows it.
_MINIBATCHES_PER_WAVE = 4

_WEIGHTS: Mapping[str, WeightPolicy] = {name: name for name in WEIGHT_POLICIES}

_AUTO = "auto"

_DIRECTIONS = {Kind.FORWARD: "forward", Kind.BACKWARD: "backward"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Draw the timeline of a weight policy. Shows the stage, time and weight version of every pass."""

    stages: Annotated[int, typer.Option(metavar="K", help="Stages of the pipeline.")] = 4
    minibatches: Annotated[int, typer.Option(metavar="N", help="Minibatches until it drains.")] = 8
    weights: Annotated[str, typer.Option(metavar="POLICY", help="Weight policy.")] = "wave"
    schedule: Annotated[str, typer.Option(metavar="NAME", help="auto, 1f1b, fifo or gpipe.")] = "auto"
    minibatches_per_wave: Annotated[
        int | None, typer.Option(metavar="N", help="Minibatches per wave.  [default: 4, more if the policy needs them]")
    ] = None
    accumulate: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Minibatches per update.  [default: 1; a whole wave under flush, double_buffer]"
        ),
    ] = None
    backward_time: Annotated[int, typer.Option(metavar="UNITS", help="Duration of a backward; a forward takes 1.")] = 2
    svg: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write the picture as SVG.")] = None
    as_json: Json = False


def run(options: Options, output: Output, shell: Shell) -> ExitStatus:
    """Simulate the pipeline, and draw it.

    Raises:
        UserError: an option is invalid, or the file cannot be written.
    """
    timeline = play(pipeline_of(options))
    if options.svg is not None:
        _write_svg(timeline, options.svg)
        output.say(f"the picture is in {shown_path(options.svg.absolute(), shell.current)}")
    if output.machine is None:
        output.say(*picture_lines(timeline, shutil.get_terminal_size().columns))
    else:
        output.answer(to_json(timeline))
    return ExitStatus.OK


def pipeline_of(options: Options) -> Pipeline:
    """The pipeline described by the options, with defaults filled in.

    Raises:
        UserError: an option is invalid, or too large for a picture.

    >>> options = Options(stages=6, minibatches=9, weights="stash", schedule="auto", accumulate=4)
    >>> pipeline_of(options).minibatches_per_wave
    8
    """
    if options.weights not in _WEIGHTS:
        raise UserError(f"--weights {options.weights!r} is unknown; {did_you_mean(options.weights, WEIGHT_POLICIES)}")
    weights = _WEIGHTS[options.weights]
    schedule = _schedule(weights, options.schedule)
    _check_sizes(options)
    if options.accumulate is not None and POLICIES[weights].one_update_per_wave:
        raise UserError(
            f"--accumulate is {options.accumulate}, but {weights} makes one update per wave; leave it out, and give "
            "--minibatches-per-wave instead"
        )
    accumulate = 1 if options.accumulate is None else options.accumulate
    return Pipeline(
        num_stages=options.stages,
        num_minibatches=options.minibatches,
        weights=weights,
        schedule=schedule,
        minibatches_per_wave=options.minibatches_per_wave or _least_whole(weights, options.stages, accumulate),
        accumulate=accumulate,
        backward_units=options.backward_time,
    )


def to_json(timeline: Timeline) -> dict[str, Any]:
    """The object of `--json`. Times are in units, the first forward begins at 0."""
    return {
        "pipeline": asdict(timeline.pipeline),
        "minibatches_per_update": timeline.pipeline.minibatches_per_update,
        "end": timeline.end,
        "bubble": timeline.bubble,
        "steady_utilisation": timeline.pipeline.steady_utilisation,
        "stages": [_stage_json(timeline, stage) for stage in timeline.stages],
    }


def _stage_json(timeline: Timeline, stage: StageTimeline) -> dict[str, Any]:
    return {
        "stage": stage.stage,
        "utilisation": stage.busy_units / timeline.end,
        "most_in_flight": stage.most_in_flight,
        "weight_buffers": stage.weight_buffers,
        "boxes": [_box_json(box) for box in stage.boxes],
        "updates": [asdict(update) for update in stage.updates],
    }


def _box_json(box: Box) -> dict[str, Any]:
    return {
        "kind": _DIRECTIONS[box.action.kind],
        "p": box.action.p,
        "start": box.start,
        "end": box.end,
        "through": box.through,
        "steps_ahead": box.steps_ahead,
    }


def _schedule(weights: WeightPolicy, text: str) -> Schedule:
    if text not in (_AUTO, *SCHEDULES):
        raise UserError(f"--schedule {text!r} is unknown; {did_you_mean(text, (_AUTO, *SCHEDULES))}")
    try:
        return POLICIES[weights].schedule_of(text)
    except ValueError as error:
        raise UserError(f"--schedule {error}") from error


def _check_sizes(options: Options) -> None:
    for option, number, most in (
        ("--stages", options.stages, _MOST_STAGES),
        ("--minibatches", options.minibatches, _MOST_MINIBATCHES),
        ("--minibatches-per-wave", options.minibatches_per_wave, _MOST_MINIBATCHES),
        ("--accumulate", options.accumulate, _MOST_MINIBATCHES),
        ("--backward-time", options.backward_time, _MOST_UNITS),
    ):
        if number is not None and number < 1:
            raise UserError(f"{option} is {number}; give at least 1")
        if number is not None and number > most:
            raise UserError(f"{option} is {number}, too large for a readable picture; give at most {most}")


def _least_whole(weights: WeightPolicy, num_stages: int, accumulate: int) -> int:
    """The smallest N that the policy allows, at least a job's default, a multiple of the minibatches per update."""
    least = max(_MINIBATCHES_PER_WAVE, POLICIES[weights].least_minibatches_per_wave(num_stages))
    return -(-least // accumulate) * accumulate


def _write_svg(timeline: Timeline, path: Path) -> None:
    from hetpipe.report.schedule_svg import draw_schedule  # jinja2 is slow to import

    try:
        path.write_text(draw_schedule(timeline), encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; give --svg a file in a folder that exists") from error
