"""The pages as HTML, with the most wanted figures first.

A page consists of parts, each a template in `report/templates/ui`; while a run trains, the server renders the parts
again, and the browser replaces those that have changed. Templates escape all texts.
"""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any
from urllib.parse import quote

from markupsafe import Markup

from hetpipe.report.charts import chart_scripts, chart_styles, figure_of
from hetpipe.report.conditions import condition_lines, condition_text
from hetpipe.report.page import render, render_page, resource
from hetpipe.report.progress import (
    cache_text,
    distance_text,
    loss_text,
    policies_of_stage,
    slow_text,
    stage_memory_text,
)
from hetpipe.report.text import LOSS, count, duration, loss_first, measure, percent, rate
from hetpipe.runs.cuts import CutChange, signed_percent
from hetpipe.runs.status import DIED, ENDING, NO_JOB, STARTING, UNKNOWN
from hetpipe.ui.curves import bound_of, charts_of, clock_chart, compared
from hetpipe.ui.snapshot import Attempt, Brief, LogFile, LoggedEvent, RunSnapshot
from hetpipe.values.decisions import FreezeDecision
from hetpipe.values.document import dotted
from hetpipe.values.events import ConditionCleared, ConditionRaised, JobState, ProgressTable
from hetpipe.values.memory import policies_text
from hetpipe.values.plan import VirtualWorkerPlan
from hetpipe.values.quantities import bytes_text
from hetpipe.values.sync import layer_counts

#: Parts of the page of a run, in order.
RUN_PARTS = ("head", "charts", "workers", "clocks", "plan", "faults", "logs", "job")

#: State → its colour: `live`, `good`, `bad`; others are plain.
_TONES = {JobState.FINISHED.value: "good", JobState.FAILED.value: "bad", DIED: "bad"}
_LIVE = {
    *(state.value for state in JobState if not state.is_terminal),
    STARTING,
    ENDING,
}

#: Levels of log lines that are marked.
_MARKED = {"warning": "warning", "error": "bad", "critical": "bad"}


def tone_of(state: str) -> str:
    """The colour of a state."""
    return "live" if state in _LIVE else _TONES.get(state, "plain")


def is_over(brief: Brief) -> bool:
    """Whether a run is in a final state, so that its page need not be refreshed."""
    return brief.status.state not in {*_LIVE, UNKNOWN, NO_JOB}


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a run."""

    samples: int | None
    """Committed; None if unknown."""
    total: int | None
    per_second: float | None
    eta_seconds: float | None

    @property
    def share(self) -> float | None:
        """0 to 1."""
        return None if self.samples is None or not self.total else min(1.0, self.samples / self.total)


def progress_of(brief: Brief) -> Progress:
    """The progress of a run, from its coordinator or its result."""
    table = _table(brief)
    if table is not None:
        return Progress(table.samples, table.total_samples, table.samples_per_second, table.eta_seconds)
    values = {} if brief.result is None else brief.result.values
    if "samples" not in values:
        return Progress(None, None, None, None)
    return Progress(brief.start_samples + values["samples"], _total(brief), values.get("samples_per_second"), None)


def _table(brief: Brief) -> ProgressTable | None:
    """The newest progress of a run that trains."""
    job_status = brief.job_status
    return (
        job_status.progress
        if job_status is not None and job_status.state in {JobState.RUNNING, JobState.STOPPING}
        else None
    )


def _total(brief: Brief) -> int | None:
    job = brief.job
    if brief.num_samples is not None and isinstance(job.get("epochs"), int):
        return int(job["epochs"]) * brief.num_samples
    workers = job.get("workers")
    number = workers.get("count") if isinstance(workers, Mapping) else None
    if all(isinstance(one, int) for one in (job.get("minibatches"), job.get("batch_size"), number)):
        return int(job["minibatches"]) * int(job["batch_size"]) * int(number or 0)
    return None


def loss_of(brief: Brief) -> float | None:
    """The training loss of the newest waves, a mean over the virtual workers."""
    table = _table(brief)
    if table is not None:
        known = [row.loss for row in table.rows if row.loss is not None]
        return sum(known) / len(known) if known else None
    loss = {} if brief.result is None else brief.result.values.get("loss", {})
    found = loss.get("last") if isinstance(loss, Mapping) else None
    return float(found) if isinstance(found, int | float) else None


def _reached(snapshot: RunSnapshot) -> Progress:
    """`progress_of`; of a run that ended without a result, how far its waves came."""
    progress, trained = progress_of(snapshot.brief), _last_trained(snapshot)
    if progress.samples is not None or trained is None or not is_over(snapshot.brief):
        return progress
    samples = trained.start_samples + sum(one.wave.samples for own in trained.waves for one in own)
    return replace(progress, samples=samples, total=_total(snapshot.brief))


def _last_trained(snapshot: RunSnapshot) -> Attempt | None:
    """The newest attempt with waves."""
    return next((attempt for attempt in reversed(snapshot.attempts) if any(attempt.waves)), None)


def _trained_loss(snapshot: RunSnapshot) -> float | None:
    """`loss_of`; of a run that ended without a result, the mean over the last waves of its virtual workers."""
    loss = loss_of(snapshot.brief)
    if loss is not None or not is_over(snapshot.brief):
        return loss
    trained = _last_trained(snapshot)
    last = [] if trained is None else [waves[-1].wave.loss for waves in trained.waves if waves]
    known = [value for value in last if value is not None]
    return sum(known) / len(known) if known else None


def _model(job: Mapping[str, Any]) -> str:
    model = job.get("model")
    return str(model.get("call", "")) if isinstance(model, Mapping) else str(model or "")


def _date(wall: float) -> str:
    return datetime.fromtimestamp(wall).astimezone().strftime("%Y-%m-%d %H:%M")


def _share_text(progress: Progress) -> str:
    share = progress.share
    return "" if share is None else percent(share)


# -- the list ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Row:
    """A run in the list."""

    name: str
    state: str
    tone: str
    model: str
    percent: float | None
    progress: str
    rate: str
    loss: str
    started: str


def rows_of(briefs: Iterable[Brief]) -> list[Row]:
    """The runs as rows: those that train first, then the newest."""
    ordered = sorted(briefs, key=lambda one: (is_over(one), -one.record.started_wall, one.name))
    rows = []
    for brief in ordered:
        progress, state = progress_of(brief), brief.status.state
        rows.append(
            Row(
                name=brief.name,
                state=state,
                tone=tone_of(state),
                model=_model(brief.job),
                percent=None if progress.share is None else 100 * progress.share,
                progress=_share_text(progress) or ("–" if brief.status.queue is None else brief.status.queue.short),
                rate="–" if progress.per_second is None else rate(progress.per_second),
                loss="–" if (loss := loss_of(brief)) is None else measure(loss),
                started=_date(brief.record.started_wall),
            )
        )
    return rows


def list_parts(rows: Sequence[Row], folder: str) -> dict[str, Markup]:
    """The parts of the list of runs."""
    states = ", ".join(f"{number} {state}" for state, number in Counter(row.state for row in rows).most_common())
    return {"runs": render("ui/runs.html.j2", rows=rows, summary=states, folder=folder)}


def list_page(rows: Sequence[Row], folder: str) -> str:
    """The list of runs.

    Args:
        rows: the runs.
        folder: in which they are, for people.
    """
    return _page(
        "ui/list.html.j2", title="Runs", subtitle=f"in {folder}", parts=list_parts(rows, folder), events="/events"
    )


# -- one run -----------------------------------------------------------------------------------------------------------


def run_page(snapshot: RunSnapshot, *, now: float) -> str:
    """The page of one run, at `now` in seconds since 1970."""
    brief = snapshot.brief
    events = "" if is_over(brief) else f"/runs/{quote(brief.name)}/events"
    return _page(
        "ui/run.html.j2",
        title=brief.name,
        subtitle=_model(brief.job),
        parts=run_parts(snapshot, now=now),
        events=events,
        has_charts=True,
    )


def run_parts(snapshot: RunSnapshot, *, now: float) -> dict[str, Markup]:
    """The parts of the page of a run."""
    values: dict[str, dict[str, Any]] = {
        "head": _head(snapshot, now=now),
        "charts": {"charts": [figure_of(chart) for chart in charts_of(snapshot)]},
        "workers": {
            "workers": _workers(snapshot),
            "bound": bound_of(snapshot),
            "training": _table(snapshot.brief) is not None,
        },
        "clocks": {"facts": _clocks(snapshot), "chart": figure_of(clock_chart(snapshot))},
        "plan": {"facts": _plan_facts(snapshot), "cuts": _cuts(snapshot)},
        "faults": {"faults": _faults(snapshot)},
        "logs": {"run": snapshot.brief.name, "logs": [(log.name, bytes_text(log.num_bytes)) for log in snapshot.logs]},
        "job": {"keys": sorted(_job_texts(snapshot.brief.job).items())},
    }
    return {part: render(f"ui/{part}.html.j2", **values[part]) for part in RUN_PARTS}


def _head(snapshot: RunSnapshot, *, now: float) -> dict[str, Any]:
    brief, status = snapshot.brief, snapshot.brief.status
    progress = _reached(snapshot)
    total = "" if progress.total is None else f" of {progress.total}"
    samples = "" if progress.samples is None else f"{progress.samples}{total} samples"
    is_finished = status.state == JobState.FINISHED.value
    return {
        "state": status.state,
        "tone": tone_of(status.state),
        "remark": status.remark,
        "queue": "" if status.queue is None else str(status.queue),
        "percent": None if progress.share is None else 100 * progress.share,
        "progress": " · ".join(filter(None, (_share_text(progress), samples))),
        "facts": [*_results(snapshot), *_speeds(brief), *_times(brief, now=now)],
        "resumed": brief.record.restored_from or "",
        "export": f"hetpipe export {shlex.quote(brief.record.run_dir)} model.safetensors" if is_finished else "",
    }


def _results(snapshot: RunSnapshot) -> list[tuple[str, str]]:
    loss, evaluations = _trained_loss(snapshot), snapshot.brief.status.evaluations
    facts = [] if loss is None else [("training loss", measure(loss))]
    if evaluations is not None:
        last, best = evaluations.last, evaluations.best
        facts += [(f"evaluation: {name}", measure(last.values[name])) for name in loss_first(last.values)]
        if best is not None and best != last:
            facts.append(("least evaluation loss", f"{measure(best.values.get(LOSS))} in epoch {best.epoch}"))
    return facts


def _speeds(brief: Brief) -> list[tuple[str, str]]:
    speed = brief.status.speed
    if speed is None:
        return []
    facts, model = [("samples/s", rate(speed.samples_per_second))], speed.model
    if model.tokens_per_second is not None:
        facts.append(("tokens/s", rate(model.tokens_per_second)))
    if model.model_flops_utilisation is not None:
        facts.append(("MFU", percent(model.model_flops_utilisation)))
    return facts


def _times(brief: Brief, *, now: float) -> list[tuple[str, str]]:
    facts, table = [], _table(brief)
    if table is not None:
        facts += [("epoch", str(table.epoch)), ("time left", duration(table.eta_seconds))]
    facts.append(("started", _date(brief.record.started_wall)))
    wall = None if brief.result is None else brief.result.values.get("wall_seconds")
    if isinstance(wall, int | float):
        facts.append(("trained for", duration(float(wall))))
    elif not is_over(brief):
        facts.append(("since", duration(max(0.0, now - brief.record.started_wall))))
    return facts


@dataclass(frozen=True, slots=True)
class StageBox:
    """A stage of a virtual worker."""

    device: str
    layers: str
    state: str
    tone: str
    memory: str
    policies: str = ""
    """Memory policies of its layers; empty if all are kept."""


@dataclass(frozen=True, slots=True)
class WorkerLine:
    """A virtual worker."""

    vw: int
    stages: tuple[StageBox, ...]
    version: int
    state: str
    clock: str
    ahead: str
    ahead_percent: float | None
    rate: str
    loss: str
    waiting: str
    waiting_percent: float | None
    """None if unknown."""
    memory: str
    note: str


_STAGE_TONES = {"ready": "good", "up": "good", "failed": "bad", "exited": "bad", "starting": "live"}


def _workers(snapshot: RunSnapshot) -> list[WorkerLine]:
    """The pipelines as they are now, or were at the end."""
    table = _table(snapshot.brief)
    return _planned(snapshot) if table is None else _running(snapshot, table)


def _running(snapshot: RunSnapshot, table: ProgressTable) -> list[WorkerLine]:
    job_status = snapshot.brief.job_status
    processes = () if job_status is None else job_status.processes
    states = {(one.vw, one.index): one.state for one in processes if one.role == "stage"}
    slow: dict[int, list[str]] = {}
    for one in table.slow:
        slow.setdefault(one.vw, []).append(slow_text(one))
    lines = []
    for row in table.rows:
        boxes = tuple(
            StageBox(
                stage.device,
                _layers(stage.first_layer, stage.last_layer),
                state := states.get((row.vw, index), ""),
                _STAGE_TONES.get(state, "plain"),
                stage_memory_text(stage),
                policies_of_stage(stage),
            )
            for index, stage in enumerate(row.stages)
        )
        bound = None if table.staleness is None else table.staleness + 1
        mostly = ["the others mostly wait for it"] if table.straggler == row.vw else []
        lines.append(
            WorkerLine(
                vw=row.vw,
                stages=boxes,
                version=row.version,
                state=str(row.state),
                clock=str(row.clock),
                ahead=distance_text(row, table.staleness),
                ahead_percent=None if not bound else min(100.0, 100 * row.distance / bound),
                rate=rate(row.samples_per_second),
                loss=loss_text(row),
                waiting=percent(row.waiting_share),
                waiting_percent=100 * row.waiting_share,
                memory=bytes_text(row.memory_bytes),
                note="; ".join([*mostly, *slow.get(row.vw, [])]),
            )
        )
    return lines


def _planned(snapshot: RunSnapshot) -> list[WorkerLine]:
    """From the plan, the moves since, and the result; empty before the plan."""
    if snapshot.plan is None:
        return []
    values = {} if snapshot.brief.result is None else snapshot.brief.result.values
    memory = {(one.get("vw"), one.get("stage")): one for one in values.get("stages", ())}
    waiting, clocks, wall = (values.get(key) or {} for key in ("waiting_seconds", "clocks", "wall_seconds"))
    trained = _last_trained(snapshot)
    reached = {} if trained is None else {vw: own[-1].wave.wave + 1 for vw, own in trained.by_worker.items() if own}
    moves = {cut.vw: cut for cut in snapshot.cuts if cut.do == "move"}
    versions = Counter(cut.vw for cut in snapshot.cuts if cut.do == "move")
    lines = []
    for worker in snapshot.plan.virtual_workers:
        move = moves.get(worker.index)
        counts = layer_counts(worker.bounds) if move is None else move.stages
        boxes, first, whole = [], worker.bounds[0], 0
        for index, (stage, number) in enumerate(zip(worker.stages, counts, strict=False)):
            used = memory.get((worker.index, index), {})
            num_bytes = int(used.get("weight_bytes", 0)) + int(used.get("activation_bytes", 0))
            whole += num_bytes
            shown = bytes_text(num_bytes) if num_bytes else ""
            boxes.append(StageBox(stage.device, _layers(first, first + number), "", "plain", shown))
            first += number
        waited = waiting.get(str(worker.index))
        share = min(1.0, waited / wall) if waited is not None and wall else None
        lines.append(
            WorkerLine(
                vw=worker.index,
                stages=tuple(boxes),
                version=versions[worker.index],
                state="",
                clock=str(clocks.get(str(worker.index), reached.get(worker.index, "–"))),
                ahead="–",
                ahead_percent=None,
                rate="–",
                loss="–",
                waiting="–" if share is None else percent(share),
                waiting_percent=None if share is None else 100 * share,
                memory=bytes_text(whole) if whole else "–",
                note="",
            )
        )
    return lines


def _layers(first: int, last: int) -> str:
    return f"layer {first}" if last == first + 1 else f"layers {first}–{last - 1}"


def _clocks(snapshot: RunSnapshot) -> list[tuple[str, str]]:
    status, job_status = snapshot.brief.status, snapshot.brief.job_status
    bound = bound_of(snapshot)
    clocks = None if job_status is None else job_status.clocks
    if clocks is not None:
        facts = [
            ("published clock", str(clocks.published)),
            ("slowest virtual worker", str(clocks.global_clock)),
            ("next barrier", f"{clocks.barrier} ({clocks.barrier_reason})"),
            ("largest distance so far", str(clocks.max_distance)),
        ]
    else:
        facts = [] if status.global_clock is None else [("slowest virtual worker", str(status.global_clock))]
        found = {} if snapshot.brief.result is None else snapshot.brief.result.values.get("staleness", {})
        if found:
            facts.append(("largest distance", str(found.get("max_clock_distance"))))
            violations = found.get("violations")
            facts.append(("violations in the history", "not verified" if violations is None else str(violations)))
    if not facts and not snapshot.attempts[-1].commits:
        return []
    return [*facts, ("allowed distance", "no bound" if bound is None else str(bound))]


def _plan_facts(snapshot: RunSnapshot) -> list[tuple[str, str]]:
    """The plan against what was measured."""
    forecast, facts = snapshot.forecast, list[tuple[str, str]]()
    measured = progress_of(snapshot.brief).per_second
    if forecast is not None:
        steady = forecast.predicted.samples_per_second
        whole = steady if forecast.run is None else forecast.run.samples_per_second
        expected = steady if _table(snapshot.brief) is not None else whole
        facts.append(("predicted with full pipelines", f"{rate(steady)} samples/s"))
        if forecast.run is not None:
            facts.append(("predicted for a run of this length", f"{rate(whole)} samples/s"))
        if measured is not None and expected:
            facts.append(("measured", f"{rate(measured)} samples/s ({measured / expected - 1:+.0%})"))
    elif measured is not None:
        facts.append(("measured", f"{rate(measured)} samples/s; the job states its own plan, which predicts nothing"))
    facts += [("slower than planned", slow_text(one)) for one in snapshot.brief.status.slow]
    reasons = {line.at.clock: line.reason for line in snapshot.decisions if isinstance(line, FreezeDecision)}
    for one in snapshot.brief.status.frozen:
        reason = f": {reasons[one.clock]}" if one.clock in reasons else ""
        facts.append((f"frozen from clock {one.clock} on", f"{one.layers_text}{reason}"))
    for since in snapshot.inactive:
        facts.append((f"inactive from clock {since.clock} on", since.layers_text + since.fresh_text))
    if snapshot.brief.status.cache is not None:
        facts.append(("cache behind frozen layers", cache_text(snapshot.brief.status.cache).removeprefix("cache: ")))
    return facts


@dataclass(frozen=True, slots=True)
class CutRow:
    """A row of the table of cuts."""

    clock: int
    vw: int
    layers: str
    by: str
    before: str
    since: str
    gain: str
    predicted: str
    reason: str


def _cuts(snapshot: RunSnapshot) -> list[CutRow]:
    """How the virtual workers were cut over time, and who trained; empty where nothing has changed."""
    if snapshot.plan is None or not snapshot.cuts:
        return []
    moved = {cut.vw for cut in snapshot.cuts} - {cut.vw for cut in snapshot.cuts if cut.do == "add" and cut.stages}
    plan = [
        CutChange(0, vw.index, layer_counts(vw.bounds), "plan", policies=_policies(vw))
        for vw in snapshot.plan.virtual_workers
        if vw.index in moved
    ]
    return [
        CutRow(
            cut.clock,
            cut.vw,
            ", ".join(filter(None, (cut.layers_text, cut.policies))) if cut.do == "move" else cut.change_text,
            cut.by,
            _unless_unknown(cut.before, rate),
            _unless_unknown(cut.since, rate),
            _unless_unknown(cut.measured_gain, signed_percent),
            _unless_unknown(cut.predicted_gain, signed_percent),
            "; ".join(filter(None, (_moment(cut), cut.reason, cut.judgement))),
        )
        for cut in sorted([*plan, *snapshot.cuts], key=lambda cut: (cut.clock, cut.vw))
    ]


def _moment(cut: CutChange) -> str:
    return "" if cut.p is None else f"without a barrier, from minibatch {cut.p} on"


def _policies(worker: VirtualWorkerPlan) -> str:
    """The memory policies of its layers by the plan, as text; empty where all keep what they need."""
    policies = tuple(policy for stage in worker.stages for policy in stage.memory)
    return policies_text(policies, 0) if policies else ""


def _unless_unknown(value: float | None, text: Callable[[float], str]) -> str:
    return "–" if value is None else text(value)


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault, or the reaction to one."""

    t: str
    tone: str
    text: str


def _faults(snapshot: RunSnapshot) -> list[Fault]:
    status = snapshot.brief.status
    faults = [_fault(one) for one in snapshot.events]
    known = any(isinstance(one.event, ConditionRaised) for one in snapshot.events)
    if not known:
        faults += [Fault("", "warning", line) for line in condition_lines(status.conditions)]
    if not snapshot.events:
        # Stages that are slow are beside their virtual worker.
        status = replace(status, slow=(), straggler=None)
        faults += [Fault("", "warning", line) for line in status.troubles() if line not in {one.text for one in faults}]
    if status.state in {JobState.FAILED.value, DIED} and status.remark:
        faults.append(Fault("", "bad", status.remark))
    return faults


def _fault(logged: LoggedEvent) -> Fault:
    event = logged.event
    match event:
        case ConditionRaised() | ConditionCleared():
            text = condition_text(event)
        case notice:
            text = notice.text
    tone = "warning" if type(event).severity == "warning" else "plain"
    return Fault(logged.t.replace("T", " ")[:19], tone, text)


# -- several runs ------------------------------------------------------------------------------------------------------


def compare_page(runs: Sequence[RunSnapshot]) -> str:
    """Runs side by side: their curves over the same axes, how they ended, and the keys of the job that differ."""
    rows = [
        (
            snapshot.brief.name,
            snapshot.brief.status.state,
            tone_of(snapshot.brief.status.state),
            "–" if (loss := _trained_loss(snapshot)) is None else measure(loss),
            "–" if (found := progress_of(snapshot.brief).per_second) is None else rate(found),
            _evaluation_text(snapshot),
        )
        for snapshot in runs
    ]
    return _page(
        "ui/compare.html.j2",
        title=count(len(runs), "run"),
        subtitle="side by side",
        parts={},
        events="",
        has_charts=True,
        runs=rows,
        charts=[figure_of(chart) for chart in compared(runs)],
        keys=differing([snapshot.brief.job for snapshot in runs]),
    )


def _evaluation_text(snapshot: RunSnapshot) -> str:
    found = snapshot.brief.status.evaluations
    return "–" if found is None else f"{measure(found.last.values.get(LOSS))} in epoch {found.last.epoch}"


def _job_texts(job: Mapping[str, Any]) -> dict[str, str]:
    """The keys of a job, dotted, with their values as text."""
    return {
        key: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for key, value in dotted(job).items()
    }


def differing(jobs: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    """The keys whose values differ, with the value of each job; a dash where a job has none.

    >>> differing([{"a": 1, "b": 2}, {"a": 1, "b": 3, "c": 4}])
    [('b', ['2', '3']), ('c', ['–', '4'])]
    """
    found = list(map(_job_texts, jobs))
    keys = sorted({key for one in found for key in one})
    rows = [(key, [one.get(key, "–") for one in found]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


# -- a log, and what cannot be shown -----------------------------------------------------------------------------------


def log_page(run: str, log: LogFile, lines: Sequence[str]) -> str:
    """The end of a log."""
    return _page(
        "ui/log.html.j2",
        title=log.name,
        subtitle=f"the last {count(len(lines), 'line')} of {bytes_text(log.num_bytes)}",
        parts={},
        events="",
        run=run,
        lines=[_log_line(line) for line in lines],
    )


def _log_line(line: str) -> tuple[str, str, str, str]:
    """Time, class, event, and the rest of a line; an unstructured one is all rest."""
    try:
        values = json.loads(line)
        rest = {key: value for key, value in values.items() if key not in {"t", "level", "event", "logger", "role"}}
        text = " ".join(f"{key}={value}" for key, value in rest.items())
        level = str(values.get("level", ""))
        return str(values["t"])[11:23], _MARKED.get(level, "plain"), str(values["event"]), text
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return "", "plain", "", line


def message_page(title: str, sentence: str) -> str:
    """A page with one sentence."""
    return _page("ui/message.html.j2", title=title, subtitle="", parts={}, events="", sentence=sentence)


def _page(
    template: str,
    *,
    title: str,
    subtitle: str,
    parts: Mapping[str, Markup],
    events: str,
    has_charts: bool = False,
    **values: object,
) -> str:
    scripts = (*chart_scripts(), resource("ui/ui.js")) if has_charts else (resource("ui/ui.js"),)
    return render_page(
        template,
        title=title,
        subtitle=subtitle,
        styles=(*chart_styles(), resource("page.css"), resource("compare.css"), resource("ui/ui.css")),
        scripts=scripts,
        connects=True,
        parts=parts,
        events=events,
        **values,
    )
