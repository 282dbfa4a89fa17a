"""A simulated timeline in words, for the terminal and the picture. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from hetpipe.decide.schedule.timeline import Box, Pipeline, StageTimeline, Timeline
from hetpipe.report.text import count, percent


def title_of(pipeline: Pipeline) -> str:
    """`PipeDream-2BW: weights double_buffer, schedule 1f1b`."""
    name = "GPipe" if pipeline.schedule == "gpipe" else pipeline.policy.source
    return f"{name}: weights {pipeline.weights}, schedule {pipeline.schedule}"


def setting_of(pipeline: Pipeline) -> str:
    """The simulated schedule, in one line."""
    per_update = pipeline.minibatches_per_update
    updates = "one update per minibatch"
    if pipeline.policy.one_update_per_wave:
        updates = "one update per wave"
    elif per_update > 1:
        updates = f"one update per {per_update} minibatches"
    return (
        f"{count(pipeline.num_stages, 'stage')}, {count(pipeline.num_minibatches, 'minibatch', 'minibatches')}, "
        f"N = {pipeline.minibatches_per_wave} per wave, {updates}; forward {pipeline.forward_units}, backward "
        f"{count(pipeline.backward_units, 'unit')} of time"
    )


def figures_of(timeline: Timeline) -> str:
    """The share of lost time."""
    return (
        f"idle {percent(timeline.bubble)} of these {timeline.end} units of time, "
        f"{percent(1 - timeline.pipeline.steady_utilisation)} of a run without end"
    )


def stage_facts(timeline: Timeline, stage: StageTimeline) -> tuple[str, str, str]:
    """`72.7 % busy`, `4 in flight` and `2 weight buffers`."""
    return (
        f"{percent(stage.busy_units / timeline.end)} busy",
        f"{stage.most_in_flight} in flight",
        count(stage.weight_buffers, "weight buffer"),
    )


def version_of(box: Box, *, predicted: str = "W") -> str:
    """The weights of a box: `W4`, or `W4+3` where they are predicted from W4, three updates ahead (PipeOptim's Ŵ).

    Args:
        box: the computation that uses them.
        predicted: the letter of predicted weights, where the hat can be written.
    """
    return f"{predicted}{box.through}+{box.steps_ahead}" if box.steps_ahead else f"W{box.through}"


def legend_of(timeline: Timeline, *, predicted: str = "W") -> Iterator[str]:
    """The notation of versions, with examples from the picture."""
    made = timeline.stages[0].updates[0].through
    minibatches = "minibatch 1" if made == 1 else f"minibatches 1 to {made}"
    yield f"W0: the initial weights; W{made}: updated with {minibatches}"
    furthest = max((box for stage in timeline.stages for box in stage.boxes), key=lambda box: box.steps_ahead)
    if furthest.steps_ahead:
        ahead = count(furthest.steps_ahead, "update")
        yield f"{version_of(furthest, predicted=predicted)}: predicted from W{furthest.through}, {ahead} ahead"


def axis_step(least: int) -> int:
    """Units of time from one mark of the axis to the next: the smallest of 1, 2, 5, 10, … that is at least `least`.

    >>> [axis_step(least) for least in (1, 3, 8, 11)]
    [1, 5, 10, 20]
    """
    power = 1
    while 5 * power < least:
        power *= 10
    return next(step * power for step in (1, 2, 5) if step * power >= least)
