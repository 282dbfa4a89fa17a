"""What a run has decided is printed as the script of a job that repeats it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from hetpipe.cli.app import app
from hetpipe.job.model import Job
from hetpipe.runs.run_folder import RunFolder
from hetpipe.server.decisions_file import append_decision
from hetpipe.values.decisions import (
    DecisionLine,
    DecisionMoment,
    FreezeDecision,
    MemberDecision,
    MoveDecision,
    MoveJudgement,
)
from hetpipe.values.ids import Clock, VirtualWorkerIndex
from tests.numerics.compare import Case

VW = VirtualWorkerIndex(1)


def at(clock: int) -> DecisionMoment:
    return DecisionMoment(Clock(clock))


DECISIONS: tuple[DecisionLine, ...] = (
    MoveDecision(at(3), "move", VW, (4, 1), 1, "straggler", "it is slow", 1.9, 0.0),
    MemberDecision(at(5), "drop", VW, "drain", "it was drained", 0.0),
    MoveJudgement("judge", VW, 1, 2.0, "it helped", 0.0),
    FreezeDecision(at(5), "freeze", 2, "norms", "norms of gradients", 0.0),
    MemberDecision(at(9), "add", VW, "drain", "it came back after it was drained", 0.0),
)


def shown(folder: Path, what: Case, decisions: tuple[DecisionLine, ...] = DECISIONS) -> tuple[str, Any]:
    """Standard output of `hetpipe script`, and its JSON."""
    RunFolder(folder).write_job(what.job())
    for line in decisions:
        append_decision(folder, line)
    text = CliRunner().invoke(app, ["script", str(folder)])
    told = CliRunner().invoke(app, ["script", str(folder), "--json"])
    assert text.exit_code == told.exit_code == 0, text.output
    return text.stdout, json.loads(told.stdout)


def test_decisions_of_a_run_are_a_section_of_a_job(tmp_path: Path) -> None:
    what = Case(workers=2, stages=[[2, 3]] * 2, minibatches=40, deterministic=False)
    text, told = shown(tmp_path, what)
    assert text.splitlines() == [
        "# whether virtual workers died, which no script repeats, is not known: the run has no history",
        "# the bits are repeated by a job with sync.deterministic only",
        "elastic:",
        "  script:",
        "    - {at: {clock: 3}, do: move, vw: 1, stages: [4, 1]}",
        "    - {at: {clock: 5}, do: freeze, layers: 2}",
        "    - {at: {clock: 5}, do: drop, vw: 1}",
        "    - {at: {clock: 9}, do: add, vw: 1}",
    ]
    assert yaml.safe_load(text)["elastic"] == told
    again = Job.model_validate(what.job().model_dump(mode="json") | {"elastic": told})
    assert [line.do for line in again.elastic.script] == ["move", "freeze", "drop", "add"]


def test_the_layers_that_are_active_from_the_start_belong_to_it(tmp_path: Path) -> None:
    what = Case(
        model="supernet", minibatches=40, active=(0, "[12]", 4), activates=((3, (0, 4)),), elastic={"recut": True}
    )
    text, told = shown(tmp_path, what, ())
    assert text.splitlines()[1:] == [
        "elastic:",
        "  active: [0, '[12]', 4]",
        "  recut: true",
        "  script:",
        "    - {at: {clock: 3}, do: activate, active: [0, 4]}",
    ]
    assert yaml.safe_load(text)["elastic"] == told


def test_the_script_of_the_job_comes_first(tmp_path: Path) -> None:
    what = Case(workers=2, stages=[[2, 3]] * 2, minibatches=40, moves=((2, 0, (3, 2)),))
    _, told = shown(tmp_path, what, DECISIONS[1:2])
    assert [(line["do"], line["vw"]) for line in told["script"]] == [("move", 0), ("drop", 1)]


@pytest.mark.parametrize(
    ("what", "decisions", "comment"),
    [
        (Case(minibatches=8), (), "# the run has decided nothing so far, and its job has no script"),
        (
            Case(minibatches=8, freeze={"waves": 2, "alpha": "1/3"}),
            DECISIONS,
            "# without freeze.alpha, freeze.every and freeze.waves of the job: the script has what norms decided",
        ),
    ],
    ids=["nothing", "norms"],
)
def test_what_the_job_needs_besides(
    what: Case, decisions: tuple[DecisionLine, ...], comment: str, tmp_path: Path
) -> None:
    text, told = shown(tmp_path, what, decisions)
    assert comment in text.splitlines()[:3]
    assert bool(told["script"]) == bool(decisions)


def test_a_run_with_a_death_in_it_is_refused(tmp_path: Path) -> None:
    """Not one whose virtual worker ends with the run; and only up to the checkpoint from which a rewind goes on."""
    what = Case(workers=2, stages=[[2, 3]] * 2, minibatches=40)
    lines: list[dict[str, Any]] = [
        {"event": "publish", "clock": 0},
        *({"event": "join", "vw": vw, "clock": 0} for vw in (0, 1)),
        {"event": "barrier", "clock": 8, "reason": "epoch+end"},
        {"event": "publish", "clock": 8},
        {"event": "evict", "vw": 1, "clock": 8},
    ]

    def write(folder: Path, start: int, *own: dict[str, Any]) -> None:
        (folder / "history").mkdir(parents=True, exist_ok=True)
        told = (json.dumps(line, separators=(",", ":")) + "\n" for line in own)
        (folder / "history" / "shard-0.jsonl").write_text("".join(told))
        (folder / "facts.json").write_text(json.dumps({"start": {"clock": start}}))
        (folder / "plan.json").write_text(json.dumps({"virtual_workers": [{}, {}]}))

    write(tmp_path, 0, *lines)
    text, _ = shown(tmp_path, what)
    assert "is not known" not in text
    death = {"event": "evict", "vw": 1, "clock": 4}
    write(tmp_path, 0, *lines[:4], death, *lines[4:])
    refused = CliRunner().invoke(app, ["script", str(tmp_path)])
    assert refused.exit_code == 2
    assert "no script repeats this run: virtual worker 1 died, having committed 4 waves" in " ".join(
        refused.output.split()
    )
    write(tmp_path, 0, *lines[:4], {"event": "publish", "clock": 2}, death)
    write(tmp_path / "rewind-1", 2, *lines[1:])
    assert CliRunner().invoke(app, ["script", str(tmp_path)]).exit_code == 0
