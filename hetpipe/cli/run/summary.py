"""The final summary of a run on the terminal. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from hetpipe.report.conditions import condition_lines
from hetpipe.report.text import count, duration, measure, rate, shown_path
from hetpipe.runs.result import CacheTotals, StageResult, Staleness, TrainResult
from hetpipe.runs.training import RunEnd
from hetpipe.values.conditions import Condition
from hetpipe.values.events import JobState
from hetpipe.values.plan_document import PlanDocument
from hetpipe.values.quantities import bytes_text

#: Share of the predicted speed below which emulated devices are faster than this machine computes.
_LEAST_EMULATED = 0.5


def summary_lines(end: RunEnd, *, current: Path) -> list[str]:
    """The result of a run, the location of its files, and the next commands; paths relative to `current`."""
    assert end.result is not None
    where = shown_path(end.run_dir, current)
    lines = [_speed(end.state, end.result), *_quality(end.result), *_memory(end.result.stages)]
    lines += _deaths(end.result.deaths)
    lines += _skipped(end.result.skipped_updates)
    lines += _cached(end.result.cache)
    lines.append(_promises(end.result.staleness, where))
    if end.forecast is not None:
        lines.append(_compared(end.forecast, end.result.samples_per_second, emulated=end.emulated))
    kept = "logs, history" if end.checkpoints else "logs, history, checkpoints"
    lines.append(f"results: {where} (result.json; trace.json opens in Perfetto; {kept})")
    if end.checkpoints:
        lines.append(f"stored:  {end.checkpoints} (checkpoints; resume from there with --resume)")
    if end.resumable:
        lines.append(f"export:  hetpipe export {where} model.safetensors")
    if end.best is not None and end.best.clock != max(end.result.clocks.values(), default=0):
        found = f"{end.best.metric} {measure(end.best.value)} at clock {end.best.clock}"
        lines.append(f"best:    hetpipe export {where} model.safetensors --best, with {found}")
    return [*lines, *safety_lines(end.conditions)]


def _compared(forecast: PlanDocument, measured: float, *, emulated: bool) -> str:
    """Predicted and measured samples/s, from the first minibatch to the end of the last, including fills and drains.

    Plans of earlier versions predict the steady state only.
    """
    steady = forecast.predicted.samples_per_second
    predicted, of_what = steady, "for full pipelines"
    if forecast.run is not None:
        predicted = forecast.run.samples_per_second
        of_what = f"for a run of this length ({rate(steady)} with full pipelines)"
    said = f"speed:   predicted {rate(predicted)} samples/s {of_what}, measured {rate(measured)} over the whole run"
    if emulated and measured < predicted * _LEAST_EMULATED:
        return f"{said}; this machine computes slower than the devices that it emulates, so this says nothing of them"
    return f"{said}, which also steps the optimizer, reads data and evaluates ({measured / predicted - 1:+.0%})"


def safety_lines(conditions: Sequence[Condition]) -> list[str]:
    """The conditions of the run; the earliest one that held to its end comes last."""
    return [f"safety:  {line}" for line in condition_lines(conditions)]


def _speed(state: JobState, result: TrainResult) -> str:
    local = ", ".join(f"{vw}: {clock}" for vw, clock in result.clocks.items())
    speed = f"{rate(result.samples_per_second)} samples/s{_other_speeds(result)}"
    return (
        f"{state} after {duration(result.wall_seconds)} of training: {count(result.samples, 'sample')} in "
        f"{count(result.waves, 'wave')} at {speed}; clock of worker {local}"
    )


def _other_speeds(result: TrainResult) -> str:
    """Tokens and operations, where they are known."""
    tokens, share = result.tokens_per_second, result.model_flops_utilisation
    text = "" if tokens is None else f", {rate(tokens)} tokens/s"
    return text if share is None else f"{text}, {share:.1%} of the devices' peak (MFU)"


def _quality(result: TrainResult) -> list[str]:
    lines = [f"loss: {measure(result.loss.first)} in the first wave, {measure(result.loss.last)} in the last"]
    lines += [
        f"loss {name}: {measure(one.first)} in the first wave, {measure(one.last)} in the last"
        for name, one in result.losses.items()
    ]
    if result.measures:
        shown = ", ".join(f"{name} {measure(value)}" for name, value in result.measures.items())
        lines.append(f"evaluation: {shown} ({count(int(result.eval['samples'] or 0), 'sample')})")
    return lines


def _memory(stages: Sequence[StageResult]) -> list[str]:
    """The stage with the highest peak memory."""
    dearest = max(stages, key=lambda stage: stage.weight_bytes + stage.activation_bytes, default=None)
    if dearest is None:
        return []
    weights, activations = bytes_text(dearest.weight_bytes), bytes_text(dearest.activation_bytes)
    which = f"stage {dearest.stage} of worker {dearest.vw}"
    return [f"memory: at most {weights} of weight copies and {activations} of activations, on {which}"]


def _skipped(skipped: Mapping[int, int]) -> list[str]:
    found = [f"{count(number, 'update')} of virtual worker {vw}" for vw, number in skipped.items() if number]
    if not found:
        return []
    return [
        f"skipped: {', '.join(found)}, in which a gradient overflowed at the scale of the loss; their samples count"
    ]


def _cached(cache: CacheTotals) -> list[str]:
    if not cache.computed:
        return []
    read = f"{count(cache.reads, 'minibatch', 'minibatches')} read ({bytes_text(cache.read_bytes)})"
    stopped = f"; nothing more was kept: {cache.stopped}" if cache.stopped else ""
    return [f"cached:  {read}, {cache.computed} computed by stages with frozen layers{stopped}"]


def _deaths(deaths: Mapping[int, int]) -> list[str]:
    found = [f"virtual worker {vw} died {count(number, 'time')}" for vw, number in deaths.items() if number]
    return [f"survived: {', '.join(found)}, and the run continued"] if found else []


def _promises(staleness: Staleness, where: str) -> str:
    bound = "unbounded" if staleness.bound_clock_distance is None else f"at most {staleness.bound_clock_distance}"
    seen = f"clock distance: largest seen {staleness.max_clock_distance}, allowed {bound}"
    if staleness.violations is None:
        return f"{seen}; the history was not checked"
    if staleness.violations:
        return f"{seen}; the history shows {count(staleness.violations, 'violation')}: hetpipe check {where}"
    return f"{seen}; the history shows no violation"
