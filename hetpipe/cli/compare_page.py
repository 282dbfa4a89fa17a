"""A comparison as one page of HTML: findings, tables, curves over minibatches and over time. Pure.

Names of jobs and metrics are escaped wherever they stand.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import Literal

from hetpipe.cli.compare_record import TrialRecord, TrialState
from hetpipe.cli.compare_statistics import CLOCK_DISTANCE, Axis, common_curve
from hetpipe.cli.compare_view import ComparisonView, Table
from hetpipe.cli.curve_charts import Chart, Line, chart_figure, chart_scripts, chart_style, measured
from hetpipe.report.page import page
from hetpipe.report.plan_page_style import STYLE
from hetpipe.report.text import LOSS, count, duration, loss_first
from hetpipe.values.policies import WEIGHT_POLICIES, WeightPolicy

_COMPARE_CSS = """
:root{--series-0:#0072b2;--series-1:#d55e00;--series-2:#3f8fc4;--series-3:#b3589a;--series-4:#a67c00;
  --series-5:#009e73;--series-6:#6b6b6b}
@media (prefers-color-scheme:dark){:root{--series-0:#5aa9e6;--series-1:#ff8c4b;--series-2:#9bd3f5;--series-3:#e39ccb;
  --series-4:#e0b83a;--series-5:#3fcf9f;--series-6:#b5b5b5}}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(420px,100%),1fr));gap:14px;margin:14px 0}
.charts figure{margin:0}
.charts figcaption{font-weight:600;color:var(--ink)}
.compare td,.compare th{white-space:nowrap}
.compare td:not(:first-child),.compare th:not(:first-child){text-align:right}
.compare .best{font-weight:700;color:var(--backward)}
.swatch{display:inline-block;width:12px;height:12px;border-radius:3px;margin-right:6px;vertical-align:-1px}
"""

_AXES: tuple[tuple[Axis, str], ...] = (("minibatches", "by minibatches"), ("seconds", "by time"))

_HANDLING = (
    "Point at a chart for its figures. Drag to look closer, double-click to see all again. A click on a name hides its "
    "line."
)

_NOTE = (
    "± is the standard deviation over the seeds. Of a curve, the line is the mean over the seeds and the band reaches "
    "from the least to the most; runs that diverged or failed are left out of both. Time counts from the moment all "
    "stages were ready, with evaluations and checkpoints. Bytes are the most at once on any seed, stage by stage."
)


def page_of(view: ComparisonView, records: Sequence[TrialRecord]) -> str:
    """The whole document.

    Args:
        view: what is said.
        records: every run in it, for the curves.
    """
    charts = _charts(records)
    content = [
        *(f'<div class="card remark"><p>{escape(remark)}</p></div>' for remark in view.remarks),
        *(part for table in view.tables for part in _table(table)),
        "<h2>Curves</h2>",
        *_figures(charts),
        "<h2>Runs</h2>",
        *_runs(records),
        f'<p class="faint">{_NOTE}</p>',
    ]
    return page(
        view.title,
        view.subtitle,
        style=chart_style() + STYLE + _COMPARE_CSS,
        content=content,
        made_by="hetpipe compare",
        scripts=chart_scripts() if charts else (),
    )


def _table(table: Table) -> Iterator[str]:
    yield f"<h2>{escape(table.title)}</h2>"
    yield f'<div class="card scroll" tabindex="0" role="group" aria-label="{escape(table.title)}, scrolls sideways">'
    yield '<table class="compare"><thead><tr>'
    yield "".join(f'<th scope="col">{escape(heading)}</th>' for heading in table.headings)
    yield "</tr></thead><tbody>"
    for row in table.rows:
        cells = [
            f'<td class="best">{escape(cell)}</td>' if index in row.best else f"<td>{escape(cell)}</td>"
            for index, cell in enumerate(row.cells)
        ]
        yield f"<tr>{_swatched(cells[0], row.cells[0])}{''.join(cells[1:])}</tr>"
    yield "</tbody></table></div>"


def _swatched(cell: str, weights: str) -> str:
    colour = next((_colour(policy) for policy in WEIGHT_POLICIES if policy == weights), "--faint")
    return cell.replace("<td>", f'<td><i class="swatch" style="background:var({colour})"></i>', 1)


def _charts(records: Sequence[TrialRecord]) -> list[tuple[Chart, ...]]:
    """Of each thing that was measured, one chart for each axis; none where runs have nothing to compare."""
    finished = [one for one in records if one.state is TrialState.FINISHED]
    names = dict.fromkeys(name for one in finished for point in one.evaluations for name in point.values)
    pairs = [_pair(f"Evaluation: {name}", name, finished, "evaluations") for name in loss_first(names)]
    pairs.append(_pair("Training loss", LOSS, finished, "losses"))
    pairs.append(_pair("Largest clock distance", CLOCK_DISTANCE, finished, "distances"))
    return [pair for pair in pairs if any(chart.lines for chart in pair)]


def _pair(
    title: str, name: str, finished: Sequence[TrialRecord], which: Literal["evaluations", "losses", "distances"]
) -> tuple[Chart, ...]:
    charts = []
    for axis, words in _AXES:
        lines = []
        for policy in dict.fromkeys(one.weights for one in finished):
            runs = [getattr(one, which) for one in finished if one.weights == policy]
            if points := measured(common_curve(runs, name, axis)):
                lines.append(Line(policy, _colour(policy), points))
        charts.append(Chart(f"{title} {words}", axis, name, tuple(lines)))
    return tuple(charts)


def _figures(charts: Sequence[tuple[Chart, ...]]) -> Iterator[str]:
    if not charts:
        yield '<p class="faint">No run has measured anything that could be drawn.</p>'
        return
    yield "<noscript><p>The curves need JavaScript; the tables above do not.</p></noscript>"
    yield f'<p class="faint">{_HANDLING}</p>'
    for pair in charts:
        yield f'<div class="charts">{"".join(map(chart_figure, pair))}</div>'


def _colour(policy: WeightPolicy) -> str:
    """The same in every comparison."""
    return f"--series-{WEIGHT_POLICIES.index(policy)}"


def _runs(records: Sequence[TrialRecord]) -> Iterator[str]:
    yield f"<details><summary>{count(len(records), 'run')}</summary>"
    yield '<div class="card scroll"><table class="compare"><thead><tr>'
    headings = ("weights", "seed", "state", "loss", "seconds", "folder")
    yield "".join(f'<th scope="col">{heading}</th>' for heading in headings)
    yield "</tr></thead><tbody>"
    for one in records:
        loss = one.evaluations[-1].values.get(LOSS) if one.evaluations else None
        wall = None if one.result is None else one.result.wall_seconds
        cells = (
            one.weights,
            str(one.seed),
            one.state,
            "–" if loss is None else f"{loss:.4f}",
            duration(wall),
            one.run_dir,
        )
        yield f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"
    yield "</tbody></table></div></details>"
