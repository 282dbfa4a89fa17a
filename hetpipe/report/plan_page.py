"""A plan as a self-contained HTML page: bars, a picture of the simulated pipeline, the reasons. Pure.

This module computes the values of `templates/plan.html.j2`, which escapes names of models, layers, nodes and types.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from hetpipe.decide.simulator.documents import schedule_in, weight_policy
from hetpipe.decide.simulator.options import SimulationOptions
from hetpipe.decide.simulator.result import ActivityKind, SimulatedActivity
from hetpipe.decide.simulator.simulate import simulate
from hetpipe.decide.sync.division import mean_minibatches
from hetpipe.report import model_picture
from hetpipe.report.page import render_page, resource
from hetpipe.report.pipeline_picture import LEGEND, PictureRow, draw_pipeline
from hetpipe.report.plan_reasons import Reasons
from hetpipe.report.plan_view import PlanFacts, PlanView, SpeedView, StageView, view_of
from hetpipe.report.text import count, rate
from hetpipe.values.quantities import bytes_text, of_bytes_text, time_text

#: Limits of the picture: minibatches of each virtual worker, in whole waves, and rows.
_SHOWN_MINIBATCHES = 32
_FEWEST_WAVES = 2
_MOST_WAVES = 4
_MOST_ROWS = 24

#: Waves simulated beyond the picture's end, so that no pipeline drains in it.
_MORE_WAVES = 2

#: Classes of the style sheet, and their meanings.
_BAR_LEGEND = (
    ("forward", "forward"),
    ("backward", "backward"),
    ("transfers", "transfers"),
    ("weights", "weights and optimizer"),
    ("activations", "activations"),
    ("lane", "free"),
)


@dataclass(frozen=True, slots=True)
class Picture:
    """The simulated pipeline, and the model that it computes."""

    svg: Markup
    caption: str
    model: Markup = Markup()
    """The layers with their cuts."""


@dataclass(frozen=True, slots=True)
class BarPart:
    """A coloured part of a bar."""

    kind: str
    """A class of the style sheet."""
    percent: float


@dataclass(frozen=True, slots=True)
class Bar:
    """A stacked bar."""

    parts: tuple[BarPart, ...]
    aloud: str
    """The same as text."""


@dataclass(frozen=True, slots=True)
class _Speed:
    """A row of the speeds."""

    view: SpeedView
    figure: str
    bar: Bar


@dataclass(frozen=True, slots=True)
class _Stage:
    """A row of a pipeline."""

    index: int
    view: StageView
    time: str
    time_bar: Bar
    memory: str
    memory_bar: Bar


def page_of(view: PlanView, reasons: Reasons, picture: Picture) -> str:
    """The whole document.

    Args:
        view: the plan to show.
        reasons: of the plan, in full.
        picture: the simulated pipeline, and the model.
    """
    pipelines = [
        {
            "view": pipeline,
            "stages": [_stage(index, stage, view.longest_ms) for index, stage in enumerate(pipeline.stages)],
            "has_utilisation": any(stage.utilisation is not None for stage in pipeline.stages),
            "others": list(zip(pipeline.workers[1:], pipeline.devices[1:], strict=True)),
        }
        for pipeline in view.pipelines
    ]
    return render_page(
        "plan.html.j2",
        title=view.title,
        subtitle=view.subtitle,
        styles=(resource("page.css"), resource("pipeline.css"), resource("model.css")),
        view=view,
        reasons=reasons,
        picture=picture,
        speeds=_speeds(view.speeds),
        pipelines=pipelines,
        bar_legend=_BAR_LEGEND,
        picture_legend=LEGEND,
        model=picture.model,
        model_legend=model_picture.LEGEND,
    )


def _model_of(facts: PlanFacts) -> Markup:
    """The model of a plan, with the stages of each kind of virtual worker."""
    columns = [
        model_picture.StageColumn(
            pipeline.heading.replace("virtual worker", "VW").removesuffix(", equal"),
            tuple(stage.layers[1] for stage in facts.plan.virtual_workers[pipeline.workers[0]].stages[:-1]),
        )
        for pipeline in view_of(facts).pipelines
    ]
    return model_picture.draw_model(facts.costs.profile.layers, columns, title="the model with its cuts")


def picture_of(facts: PlanFacts) -> Picture:
    """Simulate the first waves of a plan and draw them; of many virtual workers, one of each kind first.

    Raises:
        PlanError: the plan cannot be simulated.
    """
    plan = facts.plan
    waves = plan.waves
    num_waves = max(_FEWEST_WAVES, min(_SHOWN_MINIBATCHES // max(waves), _MOST_WAVES))
    options = SimulationOptions(
        staleness=plan.staleness,
        pull=plan.pull,
        minibatches=mean_minibatches(num_waves + _MORE_WAVES, waves),
        weights=weight_policy(plan.weights),
        schedule=schedule_in(plan),
    )
    result = simulate(facts.simulated, facts.costs, options, with_activities=True)
    shown = _shown_workers(facts)
    rows = [
        PictureRow(vw, index, f"virtual worker {vw}, stage {index}: {stage.device} ({stage.type})")
        for vw in shown
        for index, stage in enumerate(plan.virtual_workers[vw].stages)
    ]
    ends = [
        (
            _wave_end(result.activities, vw, num_waves * waves[vw]),
            _wave_end(result.activities, vw, (num_waves + _MORE_WAVES) * waves[vw]),
        )
        for vw in shown
    ]
    end_ticks = min(max(wanted for wanted, _ in ends), *(last for _, last in ends))
    which = "all virtual workers" if len(shown) == len(plan.virtual_workers) else _some(shown)
    length = count(waves[0], "minibatch", "minibatches")
    if len(set(waves)) > 1:
        length = f"{min(waves)} to {max(waves)} minibatches"
    caption = (
        f"Simulated: the first {num_waves} waves of {length}, {which}. Numbers are "
        "minibatches; every box has its times as a tooltip."
    )
    drawn = draw_pipeline(result.activities, rows, end_ticks=end_ticks, title="simulated pipeline")
    return Picture(drawn, caption, _model_of(facts))


def _some(workers: Sequence[int]) -> str:
    return f"virtual {'worker' if len(workers) == 1 else 'workers'} {', '.join(map(str, workers))} only"


def _shown_workers(facts: PlanFacts) -> list[int]:
    """The virtual workers drawn, within the limit; different ones before equal ones."""
    groups = [pipeline.workers for pipeline in view_of(facts).pipelines]
    order = [workers[0] for workers in groups] + [vw for workers in groups for vw in workers[1:]]
    shown: list[int] = []
    num_rows = 0
    for vw in order:
        num_rows += len(facts.plan.virtual_workers[vw].stages)
        if shown and num_rows > _MOST_ROWS:
            break
        shown.append(vw)
    return sorted(shown)


def _wave_end(activities: Iterable[SimulatedActivity], vw: int, minibatch: int) -> int:
    """End of the last backward of a minibatch."""
    return max(
        one.end_ticks
        for one in activities
        if one.kind is ActivityKind.BACKWARD and (one.vw, one.stage, one.number) == (vw, 0, minibatch)
    )


def _speeds(speeds: Sequence[SpeedView]) -> list[_Speed]:
    fastest = max(speed.samples_per_second or 0.0 for speed in speeds)
    rows = []
    for index, speed in enumerate(speeds):
        amount = speed.samples_per_second or 0.0
        figure = "–" if speed.samples_per_second is None else f"{rate(amount)} samples/s"
        kind = "backward" if index == 0 else "reserve"
        rows.append(_Speed(speed, figure, _bar(fastest, [(kind, amount, "")], f"{speed.name}: {figure}")))
    return rows


def _stage(index: int, stage: StageView, longest_ms: float) -> _Stage:
    time_parts = [
        ("forward", stage.forward_ms, f"{time_text(stage.forward_ms)} forward"),
        ("backward", stage.backward_ms, f"{time_text(stage.backward_ms)} backward"),
        ("transfers", stage.receive_ms, f"{time_text(stage.receive_ms)} transfers"),
    ]
    memory_parts = [
        ("weights", stage.parameter_bytes, f"{bytes_text(stage.parameter_bytes)} weights and optimizer"),
        ("activations", stage.activation_bytes, f"{bytes_text(stage.activation_bytes)} activations"),
        ("reserve", stage.reserve_bytes, f"{bytes_text(stage.reserve_bytes)} reserve"),
    ]
    time = f"{'~' if stage.is_estimated else ''}{time_text(stage.time_ms)}"
    memory = of_bytes_text(stage.memory_bytes, stage.device_bytes)
    return _Stage(
        index=index,
        view=stage,
        time=time,
        time_bar=_bar(longest_ms, time_parts, f"stage {index}: {time}"),
        memory=memory,
        memory_bar=_bar(stage.device_bytes, memory_parts, f"stage {index}: {memory}"),
    )


def _bar(whole: float, parts: Sequence[tuple[str, float, str]], what: str) -> Bar:
    """A bar from kind, amount and label of each part."""
    shown = [BarPart(kind, 100 * amount / whole) for kind, amount, _ in parts if amount and whole]
    return Bar(tuple(shown), "; ".join([what, *(text for _, amount, text in parts if text and amount)]))
