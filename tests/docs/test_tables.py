"""Tables of the documentation that are said to be compared with the code."""

from __future__ import annotations

import ast
import inspect
import itertools
import typing
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from hetpipe.checker.report import ReportJson
from hetpipe.cli.app import FAMILIES
from hetpipe.comparison.record import TrialRecord, TrialState
from hetpipe.comparison.statistics import MOST_POINTS
from hetpipe.comparison.view import PolicySummary, comparison_json
from hetpipe.decide.elastic import virtual_workers
from hetpipe.decide.lifecycle import leadership
from hetpipe.decide.lifecycle.lifecycle import TABLE
from hetpipe.decide.sync import segment
from hetpipe.observe.history import HistoryWriter
from hetpipe.observe.metrics import WaveMetrics
from hetpipe.pipeline import barrier
from hetpipe.runs import resume
from hetpipe.runs.outcome import ExitStatus
from hetpipe.runs.result import TrainResult
from hetpipe.runs.status import RunStatus
from hetpipe.values.conditions import ConditionKind
from hetpipe.values.counters import FENCES, MAX_REPORTED_AHEAD, TERMS
from hetpipe.values.decisions import (
    BarrierDecision,
    DecisionLine,
    FreezeDecision,
    MemberDecision,
    StayDecision,
    WavesDecision,
)
from hetpipe.values.events import ProcessStatus
from hetpipe.values.sync import PlanMove
from tests.docs import commands
from tests.docs.job_keys import PAGE, SECTIONS, marked, rewritten
from tests.docs.pages import ROOT, code_spans, table_after

STATE_MACHINES = ROOT / "docs" / "state-machines.md"
FILES = ROOT / "docs" / "files.md"
DYING = ROOT / "docs" / "when-something-dies.md"
PLAN_VERSIONS = ROOT / "docs" / "semantics" / "plan-versions.md"


def keys(rows: list[list[str]]) -> list[str]:
    """What stands between backticks in the first column."""
    return [span for row in rows for span in code_spans(row[0])]


def leaves(kind: Any, prefix: str = "") -> Iterator[str]:
    """The fields of a dataclass, dotted where they are dataclasses themselves."""
    hints = typing.get_type_hints(kind)
    for field in fields(kind):
        inner = hints[field.name]
        if is_dataclass(inner):
            yield from leaves(inner, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name


def test_the_job_file_page_is_fresh() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert marked(text) == list(SECTIONS)
    assert "<!-- policies -->" in text
    assert text == rewritten(text), "say: python -m tests.docs.job_keys"


def test_the_page_of_commands_is_what_they_say() -> None:
    assert commands.PAGE.read_text(encoding="utf-8") == commands.page(), "say: python -m tests.docs.commands"


def test_what_must_stay_at_a_resume() -> None:
    rows = table_after(PAGE, "## What must stay")
    assert [(*code_spans(row[0]), row[1]) for row in rows] == [(key.path, key.reason) for key in resume._FIXED]


def test_the_life_of_a_job() -> None:
    rows = table_after(STATE_MACHINES, "## Job")
    assert rows == [
        [state.value, step.value, following.value] for state, row in TABLE.items() for step, following in row.items()
    ]


def test_the_life_of_a_virtual_worker() -> None:
    rows = table_after(STATE_MACHINES, "## Virtual worker")
    assert rows == [
        [state.value, step.value, following.value]
        for state, row in virtual_workers.TABLE.items()
        for step, following in row.items()
    ]


def test_the_range_of_reported_counters() -> None:
    rows = table_after(STATE_MACHINES, "### Reported counters")
    assert [[row[0], *(int(cell.replace(",", "")) for cell in row[1:])] for row in rows] == [
        [counter.name, counter.limit, counter.largest_reported, MAX_REPORTED_AHEAD] for counter in (FENCES, TERMS)
    ]


def test_who_leads() -> None:
    rows = table_after(STATE_MACHINES, "## Leadership")
    assert rows == [
        [standing.value, step.value, following.value]
        for standing, row in leadership.TABLE.items()
        for step, following in row.items()
    ]


def test_the_kinds_of_lost_safety() -> None:
    rows = table_after(DYING, "| condition *(compared)* |")
    assert [code_spans(row[0]) for row in rows] == [[kind.value] for kind in ConditionKind]


def test_the_events_of_the_history() -> None:
    rows = table_after(FILES, "| event |")
    documented = {code_spans(row[0])[0]: code_spans(row[1]) for row in rows}
    methods = {
        name: [parameter for parameter in inspect.signature(method).parameters if parameter != "self"]
        for name, method in inspect.getmembers(HistoryWriter, inspect.isfunction)
        if not name.startswith("_") and name not in {"write", "position", "since", "on_alarm", "wave_computed"}
    }
    assert documented == methods


def test_what_the_reasons_of_a_barrier_lead_to() -> None:
    reasons = (
        segment.CHECKPOINT,
        segment.EPOCH,
        segment.END,
        segment.STOP,
        segment.EVICT,
        segment.DRAIN,
        segment.JOIN,
        segment.PLAN,
    )
    answer = {True: "yes", False: "no"}
    assert table_after(FILES, "| reason |") == [
        [f"`{reason}`", answer[reason in barrier._EVALUATIONS], answer[reason in segment.CHECKPOINTS]]
        for reason in reasons
    ]


def test_the_json_of_train() -> None:
    assert sorted(keys(table_after(FILES, "`train`"))) == sorted(leaves(TrainResult))


def test_the_lines_of_the_metrics() -> None:
    written = {"t", *(field.name for field in fields(WaveMetrics))}
    assert set(keys(table_after(FILES, "## Metrics"))) == written


def test_the_runs_of_a_comparison() -> None:
    rows = table_after(FILES, "`compare.json` holds")
    assert keys(rows) == [field.name for field in fields(TrialRecord)]
    (states,) = (row[1] for row in rows if row[0] == "`state`")
    assert code_spans(states) == [state.value for state in TrialState]
    assert f"at most {MOST_POINTS} points" in str(rows)


def test_the_json_of_compare() -> None:
    told = {field.name for field in fields(PolicySummary)}
    assert set(keys(table_after(FILES, "Of each policy"))) == told
    assert keys(table_after(FILES, "`compare` *")) == list(comparison_json(Path(), (), [], []))


def test_the_json_of_check() -> None:
    assert sorted(keys(table_after(FILES, "`check`"))) == sorted(ReportJson.__annotations__)


def test_the_exit_statuses() -> None:
    rows = table_after(FILES, "| exit status")
    assert [int(row[0]) for row in rows] == sorted(ExitStatus)


def test_the_json_of_status() -> None:
    rows = table_after(FILES, "`status`")
    assert sorted(keys(rows)) == sorted(RunStatus(run_dir="", name="", state="").to_json())
    (processes,) = (row[1] for row in rows if row[0] == "`processes`")
    assert {field.name for field in fields(ProcessStatus)} <= set(code_spans(processes))


def decided_in_code() -> set[tuple[str, str]]:
    """(`by`, `do`) of every decision that hetpipe makes anywhere, by the calls that make its line."""
    made = {
        kind.__name__: kind
        for kind in (MemberDecision, FreezeDecision, BarrierDecision, WavesDecision, PlanMove, StayDecision)
    }
    found: set[tuple[str, str]] = set()
    for path in (ROOT / "hetpipe").rglob("*.py"):
        text = path.read_text()
        for call in ast.walk(ast.parse(text)) if any(name in text for name in made) else ():
            kind = made.get(call.func.id) if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) else None
            if kind is None or not isinstance(call, ast.Call):
                continue
            given = dict(zip((field.name for field in fields(kind)), call.args, strict=False))
            by, do = strings_in(given["by"]), strings_in(given["do"]) if "do" in given else ["move"]
            assert by, f"{path}:{call.lineno} does not say plainly what has decided"
            found.update(itertools.product(by, do))
    return found


def strings_in(expression: ast.expr) -> list[str]:
    """The text that an expression may be."""
    return [
        node.value for node in ast.walk(expression) if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]


def test_the_triggers_of_decisions() -> None:
    """Every kind of line, and what makes it, is in the table, and nothing else; so are the requests of operators."""
    rows = table_after(PLAN_VERSIONS, "What decides, and the lines")
    told = {(by, do) for _, bys, dos in rows for by in code_spans(bys) for do in code_spans(dos)}
    assert told == decided_in_code()
    lines = typing.get_args(typing.get_args(DecisionLine)[0])
    verbs = {do for line in lines for do in typing.get_args(typing.get_type_hints(line)["do"])} - {"judge"}
    assert {do for _, do in told} == verbs
    asked = {word.split()[2] for row in rows for word in code_spans(row[0]) if word.startswith("hetpipe workers")}
    (workers,) = (command for family in FAMILIES for command in family.commands if command.name == "workers")
    assert asked == {command.name for command in workers.members} - {"list"}
