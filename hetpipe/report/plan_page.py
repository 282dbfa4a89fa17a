"""A plan as one page of HTML that needs nothing else: bars, a picture of the simulated pipeline, the reasons. Pure.

Names of models, layers, nodes and types are escaped wherever they stand.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

from hetpipe.decide.simulator.documents import schedule_in, weight_policy
from hetpipe.decide.simulator.options import SimulationOptions
from hetpipe.decide.simulator.result import ActivityKind, SimulatedActivity
from hetpipe.decide.simulator.simulate import simulate
from hetpipe.report.page import page
from hetpipe.report.pipeline_picture import LEGEND, PictureRow, draw_pipeline
from hetpipe.report.plan_page_style import STYLE
from hetpipe.report.plan_reasons import Reasons
from hetpipe.report.plan_view import PipelineView, PlanFacts, PlanView, SpeedView, StageView, view_of
from hetpipe.report.quantities import bytes_text, of_bytes_text, time_text
from hetpipe.report.text import count, percent, rate

#: The picture: so many minibatches of each virtual worker, in whole waves, and so many rows.
_SHOWN_MINIBATCHES = 32
_FEWEST_WAVES = 2
_MOST_WAVES = 4
_MOST_ROWS = 24

#: Simulated beyond the picture's end, so that nothing in it drains.
_MORE_WAVES = 2

#: Kind, amount, and what it is called aloud.
_Parts = Sequence[tuple[str, float, str]]

_TIME_LEGEND = (("forward", "forward"), ("backward", "backward"), ("transfers", "transfers"))
_MEMORY_LEGEND = (("weights", "weights and optimizer"), ("activations", "activations"), ("lane", "free"))


@dataclass(frozen=True, slots=True)
class Picture:
    """The simulated pipeline."""

    svg: str
    caption: str


def page_of(view: PlanView, reasons: Reasons, picture: Picture) -> str:
    """The whole document.

    Args:
        view: what is shown.
        reasons: why it is so, in full.
        picture: the pipeline at work.
    """
    content = [
        *_speeds(view.speeds),
        f'<div class="card bound"><p>{escape(reasons.bound)}</p></div>',
        *(f'<div class="card remark"><p>{escape(remark)}</p></div>' for remark in view.remarks),
        "<h2>Who computes what</h2>",
        *(line for pipeline in view.pipelines for line in _pipeline(pipeline, view)),
        _legend((*_TIME_LEGEND, *_MEMORY_LEGEND)),
        *_estimated(view),
        "<h2>The whole job</h2>",
        '<dl class="card">',
        *(f"<dt>{escape(label)}</dt><dd>{escape(text)}</dd>" for label, text in view.facts),
        "</dl>",
        "<h2>The pipeline at work</h2>",
        f'<figure class="card"><figcaption>{escape(picture.caption)}</figcaption>',
        f'<div class="scroll" tabindex="0" role="group" aria-label="picture, scrolls sideways">{picture.svg}</div>',
        f"{_legend(LEGEND)}</figure>",
        *_why(reasons),
    ]
    return page(view.title, view.subtitle, style=STYLE, content=content, made_by="hetpipe plan")


def picture_of(facts: PlanFacts) -> Picture:
    """Simulate the first waves of a plan and draw them; where there are many virtual workers, one of each kind first.

    Raises:
        PlanError: the plan cannot be simulated.
    """
    plan = facts.plan
    n = plan.minibatches_per_wave
    num_waves = max(_FEWEST_WAVES, min(_SHOWN_MINIBATCHES // n, _MOST_WAVES))
    options = SimulationOptions(
        staleness=plan.staleness,
        pull=plan.pull,
        minibatches=n * (num_waves + _MORE_WAVES),
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
        (_wave_end(result.activities, vw, num_waves * n), _wave_end(result.activities, vw, options.minibatches))
        for vw in shown
    ]
    end_ticks = min(max(wanted for wanted, _ in ends), *(last for _, last in ends))
    which = "all virtual workers" if len(shown) == len(plan.virtual_workers) else _some(shown)
    caption = (
        f"Simulated: the first {num_waves} waves of {count(n, 'minibatch', 'minibatches')}, {which}. Numbers are "
        "minibatches; every box tells its times."
    )
    return Picture(draw_pipeline(result.activities, rows, end_ticks=end_ticks, title="simulated pipeline"), caption)


def _some(workers: Sequence[int]) -> str:
    return f"virtual {'worker' if len(workers) == 1 else 'workers'} {', '.join(map(str, workers))} only"


def _shown_workers(facts: PlanFacts) -> list[int]:
    """As many as there is room for; different ones before more of the same."""
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
    """When the backward of a minibatch is through."""
    return max(
        one.end_ticks
        for one in activities
        if one.kind is ActivityKind.BACKWARD and (one.vw, one.stage, one.number) == (vw, 0, minibatch)
    )


def _speeds(speeds: Sequence[SpeedView]) -> Iterator[str]:
    fastest = max(speed.samples_per_second or 0.0 for speed in speeds)
    yield '<section class="card speeds" aria-label="speed">'
    for index, speed in enumerate(speeds):
        amount = speed.samples_per_second or 0.0
        figure = "–" if speed.samples_per_second is None else f"{rate(amount)} samples/s"
        first = " first" if index == 0 else ""
        yield f'<span class="name">{escape(speed.name)}</span><span class="figure{first}">{figure}</span>'
        yield _bar(fastest, [("backward" if index == 0 else "reserve", amount, "")], f"{speed.name}: {figure}")
        yield f'<span class="note">{escape(speed.remark)}</span>'
    yield "</section>"


_UTILISATION_HEADING = '<th scope="col" class="number">MFU</th>'


def _pipeline(pipeline: PipelineView, view: PlanView) -> Iterator[str]:
    each = " each" if len(pipeline.workers) > 1 else ""
    slowest = ' <span class="tag">the slowest</span>' if pipeline.is_slowest and len(view.pipelines) > 1 else ""
    yield f"<h3>{escape(pipeline.heading)}: {rate(pipeline.samples_per_second)} samples/s{each}{slowest}</h3>"
    yield f'<div class="card stages"><table aria-label="{escape(pipeline.heading)}"><thead><tr>'
    headings = ("#", "device", "layers", "time per minibatch", "memory")
    yield "".join(f'<th scope="col">{heading}</th>' for heading in headings)
    yield '<th scope="col" class="number">in flight</th><th scope="col" class="number">receives</th>'
    has_utilisation = any(stage.utilisation is not None for stage in pipeline.stages)
    yield f"{_UTILISATION_HEADING if has_utilisation else ''}</tr></thead><tbody>"
    for index, stage in enumerate(pipeline.stages):
        yield from _stage(index, stage, view.longest_ms, has_utilisation=has_utilisation)
    yield "</tbody></table></div>"
    if len(pipeline.workers) > 1:
        yield '<details><summary class="faint">devices of the others</summary>'
        for worker, devices in zip(pipeline.workers[1:], pipeline.devices[1:], strict=True):
            yield f"<p>virtual worker {worker}: {escape(', '.join(devices))}</p>"
        yield "</details>"


def _stage(index: int, stage: StageView, longest_ms: float, *, has_utilisation: bool) -> Iterator[str]:
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
    marks = '<span class="tag longest">longest stage</span>' if stage.is_bottleneck else ""
    if stage.is_recomputed:
        marks += ' <span class="tag">recomputes</span>'
    yield f"<tr><td>{index}</td>"
    yield f"<td>{escape(stage.device)}<small>{escape(stage.kind)}</small></td>"
    yield f"<td>{escape(stage.layers)}<small>{escape(stage.names)}</small></td>"
    yield f'<td class="wide">{_bar(longest_ms, time_parts, f"stage {index}: {time}")}{time} {marks}</td>'
    yield f'<td class="wide">{_bar(stage.device_bytes, memory_parts, f"stage {index}: {memory}")}{memory}</td>'
    yield f'<td class="number" data-label="in flight">{stage.in_flight}</td>'
    yield f'<td class="number" data-label="receives">{time_text(stage.receive_ms)}</td>'
    if has_utilisation:
        share = "–" if stage.utilisation is None else percent(stage.utilisation)
        yield f'<td class="number" data-label="MFU">{share}</td>'
    yield "</tr>"


def _bar(whole: float, parts: _Parts, what: str) -> str:
    """Parts of a whole; read aloud, and shown on hovering, as text."""
    aloud = "; ".join([what, *(text for _, amount, text in parts if text and amount)])
    pieces = "".join(
        f'<i class="{kind}" style="width:{100 * amount / whole:.2f}%"></i>'
        for kind, amount, _ in parts
        if amount and whole
    )
    return f'<div class="bar" role="img" aria-label="{escape(aloud)}" title="{escape(aloud)}">{pieces}</div>'


def _legend(entries: Iterable[tuple[str, str]]) -> str:
    items = "".join(f'<li><i class="{kind}"></i>{escape(meaning)}</li>' for kind, meaning in entries)
    return f'<ul class="legend">{items}</ul>'


def _estimated(view: PlanView) -> Iterator[str]:
    if view.estimated:
        types = escape(", ".join(view.estimated))
        yield f'<p class="faint">~ estimated from the catalogue, not measured: {types}</p>'


def _why(reasons: Reasons) -> Iterator[str]:
    yield "<h2>Alternatives</h2>"
    if reasons.rejected:
        yield '<div class="card why"><table><thead><tr>'
        yield '<th scope="col">way</th><th scope="col" class="number">samples/s</th>'
        yield '<th scope="col">against the plan</th></tr></thead><tbody>'
        for one in reasons.rejected:
            figure = "–" if one.samples_per_second is None else rate(one.samples_per_second)
            yield f'<tr><td>{escape(one.name)}</td><td class="number">{figure}</td>'
            yield f"<td>{escape(one.reason)}</td></tr>"
        yield "</tbody></table></div>"
    else:
        yield "<p>Nothing else was looked at.</p>"
    for heading, sentences in (("Why this N", reasons.waves), ("Why these cuts", reasons.cuts)):
        yield f"<h2>{heading}</h2>"
        yield from (f"<p>{escape(sentence)}</p>" for sentence in sentences)
