"""Pipelines are compressed as layers freeze: every bit is that of the reference with the same virtual workers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hetpipe.checker import check_run
from hetpipe.checkpoint.layout import optimizer_source
from hetpipe.checkpoint.manifest import checkpoint_dir, read_manifest
from hetpipe.decide.elastic.script import script_of
from hetpipe.job.elastic import FreezeLine, ScriptLine, ScriptMoment
from hetpipe.server.decisions_file import read_decisions
from hetpipe.values import wire
from hetpipe.values.freezing import lineup_for
from hetpipe.values.ids import Clock, VirtualWorkerIndex
from hetpipe.values.plan import Plan
from tests.models import NUM_WITNESSES
from tests.numerics.compare import ADAMW, MOMENTUM, Case, assert_same_bits, run, trained
from tests.numerics.test_freezing import SCHEDULE, cuts_in_force
from tests.numerics.test_leavers import decisions
from tests.numerics.test_resumed_elsewhere import taken_from
from tests.numerics.test_witnesses import case as witness_case
from tests.numerics.test_witnesses import counts
from tests.pairwise import every_nth
from tests.reference.executor import run_reference
from tests.support.lives import Death

pytestmark = pytest.mark.matrix

#: Five layers, three of them with parameters, in four stages: two pipelines of two stages once one of them is frozen.
REPLICAS = Case(
    workers=1,
    stages=[[1, 1, 1, 2]],
    wave=4,
    batch_size=8,
    epochs=3,
    kind="allreduce",
    weights="flush",
    optimizer=dict(MOMENTUM),
    freeze={**SCHEDULE, "compress": True, "compress_by": "parameters"},
)


def plan_of_run(folder: Path) -> Plan:
    found: Plan = wire.from_json(Plan, (folder / "plan.json").read_bytes())
    return found


def reference_values(folder: Path, begin: int = 0, lineup: int = 0) -> dict[str, Any]:
    """What the history of a run says about who trains, with which cuts, N and frozen layers, for the reference.

    Args:
        folder: of the run.
        begin: the clock it begins at.
        lineup: F of those who train there.
    """
    plan = plan_of_run(folder)
    first_lineup = lineup_for(plan.freeze_lineups, lineup)
    assert first_lineup is not None
    membership: dict[int, tuple[int, ...]] = {0: first_lineup.members}
    taken: dict[int, dict[int, int]] = {}
    present = set(membership[0])
    for line in decisions(folder, "leave", "join"):
        if line["clock"] > begin:
            (present.discard if line["event"] == "leave" else present.add)(line["vw"])
            membership[line["clock"]] = tuple(sorted(present))
    for clock, members in membership.items():
        for vw in members if clock > begin else ():
            before = membership[max(at for at in membership if at < clock)]
            first = plan.virtual_workers[vw].stages[0].device
            if vw not in before:
                (source,) = (v for v in before if first in [s.device for s in plan.virtual_workers[v].stages])
                taken.setdefault(clock, {})[vw] = source
    waves: dict[int, int] = {line["clock"]: line["minibatches_per_wave"] for line in decisions(folder, "waves")}
    return {
        "num_virtual_workers": len(plan.virtual_workers),
        "stages": tuple(
            tuple(stage.last_layer - stage.first_layer for stage in worker.stages) for worker in plan.virtual_workers
        ),
        "membership": membership,
        "taken_over": taken,
        "waves": waves,
        "plans": cuts_in_force(folder),
        "frozen": {0: 0, **{line["clock"]: line["layers"] for line in decisions(folder, "freeze")}},
    }


def scripted(what: Case, folder: Path) -> Case:
    """The case by the script of the decisions of a run of it, and of the frozen layers that the job states."""
    script: list[ScriptLine] = list(script_of(read_decisions(folder)))
    if "schedule" in what.freeze:
        clocks = [line["clock"] for line in decisions(folder, "barrier") if "epoch" in line["reason"]]
        for point in what.freeze["schedule"][: len(clocks) - 1]:
            at = ScriptMoment(clock=clocks[point["epoch"] - 1])
            script.append(FreezeLine(at=at, do="freeze", layers=point["layers"]))

    def place(line: ScriptLine) -> tuple[int, bool]:
        assert isinstance(line.at, ScriptMoment)
        return line.at.clock, not isinstance(line, FreezeLine)

    in_order = sorted(script, key=place)
    return replace(what, freeze={}, elastic={"script": [line.model_dump(mode="json") for line in in_order]})


NORMS: dict[str, Any] = {"every": "epoch", "alpha": "1/2"}

#: Two pipelines of two stages, which become four of one.
WORKERS = Case(
    workers=2,
    stages=[[1, 4], [2, 3]],
    wave=4,
    batch_size=2,
    epochs=3,
    weights="stash",
    optimizer=dict(ADAMW),
    freeze={**SCHEDULE, "compress": True},
)

#: The pipelines change behind the first of two epochs.
SHORT = replace(WORKERS, batch_size=8, epochs=2)


@pytest.mark.parametrize(
    "what",
    [
        REPLICAS,
        SHORT,
        pytest.param(
            replace(WORKERS, weights="wave", epochs=2, optimizer=dict(MOMENTUM), freeze={**NORMS, "compress": True}),
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(WORKERS, marks=pytest.mark.exhaustive),
        pytest.param(
            replace(
                WORKERS, wave=3, epochs=2, weights="vertical", freeze={**WORKERS.freeze, "keep_global_batch": False}
            ),
            marks=pytest.mark.exhaustive,
        ),
    ],
    ids=["replicas", "short", "norms", "workers", "another-batch"],
)
def test_the_bits_of_the_reference(what: Case, tmp_path: Path) -> None:
    """Of the run, of its decisions as a script, and of the run resumed before and after the pipelines change."""
    run(what, tmp_path / "run")
    lineups = plan_of_run(tmp_path / "run").freeze_lineups
    assert len(lineups) > 1, "with frozen layers fewer stages are enough"
    values = reference_values(tmp_path / "run")
    assert len(values["membership"]) > 1
    expected = run_reference(what.reference(**values))
    assert_same_bits(trained(tmp_path / "run"), expected)
    changed = max(values["membership"])
    for clock in (changed - 1, changed):
        folder = tmp_path / f"from-{clock}"
        run(what, folder, restore=checkpoint_dir(tmp_path / "run", Clock(clock)))
        assert_same_bits(trained(folder), expected)
    again = scripted(what, tmp_path / "run")
    run(again, tmp_path / "again")
    assert_same_bits(trained(tmp_path / "again"), expected)


@pytest.mark.parametrize(
    ("what", "changes", "is_changed"),
    [
        pytest.param(SHORT, {"workers": 1, "stages": [[1, 1, 1, 2]]}, False, id="one-that-halves-twice"),
        pytest.param(REPLICAS, {"workers": 2, "stages": [[2, 3]] * 2}, True, id="replicas"),
        pytest.param(SHORT, {"workers": 3, "stages": [[1, 4]] * 3}, True, id="more", marks=pytest.mark.exhaustive),
        pytest.param(SHORT, {"workers": 1, "stages": [[5]]}, True, id="one-device", marks=pytest.mark.exhaustive),
    ],
)
def test_a_run_that_is_resumed_on_other_devices_has_their_lineups(
    what: Case, changes: dict[str, Any], *, is_changed: bool, tmp_path: Path
) -> None:
    """With the F of its checkpoint, at the barrier at which pipelines are compressed, or at the one before it."""
    run(what, tmp_path / "before")
    values = reference_values(tmp_path / "before")
    clock = Clock(max(values["membership"]) - (not is_changed))
    folder, after = checkpoint_dir(tmp_path / "before", clock), replace(what, **changes)
    run(after, tmp_path / "after", restore=folder)
    manifest = read_manifest(folder)
    own = reference_values(tmp_path / "after", clock, manifest.progress.lineup)
    sources = [
        optimizer_source(manifest.members, VirtualWorkerIndex(vw), is_shared=what.kind == "allreduce")
        for vw in range(own["num_virtual_workers"])
    ]
    state = run_reference(what.reference(**values)).barriers[clock]
    expected = run_reference(after.reference(**own), taken_from(state, sources))
    assert_same_bits(trained(tmp_path / "after"), expected)


#: Three of four layers freeze behind the first of two passes; layers move there, or the pipelines change behind it.
RECUT: dict[str, Any] = {"schedule": [{"epoch": 1, "layers": 3}], "recut": True}
COMPRESS = {**RECUT, "compress": True, "compress_by": "parameters"}


@pytest.mark.parametrize(
    ("freeze", "at", "vw", "clock"),
    every_nth(
        12,
        [
            (freeze, at, vw, clock)
            for freeze, places in ((RECUT, ((0, -1), (0, 0), (1, 1))), (COMPRESS, ((0, -1), (0, 0))))
            for at in ("before forward", "before staged", "after staged", "before pull", "before hold")
            for vw, clock in places
            if (at, clock) != ("before pull", 1)  # there it has them
        ]
        + [(COMPRESS, at, 2, 0) for at in ("before join", "after join", "before forward", "before staged")],
    ),
)
def test_every_sample_counts_once_if_a_life_ends_around_a_change(
    freeze: dict[str, Any], at: str, vw: int, clock: int, tmp_path: Path
) -> None:
    """In the wave before the barrier at which layers freeze, at its work, and behind it; one that joins, too.

    Frozen layers count the samples of the first pass alone.
    """
    what = witness_case(workers=2, stages=2, wave=2, every_waves=3, freeze=freeze)
    waves = -(-NUM_WITNESSES // (what.batch_size * what.wave * what.workers))
    number = None if vw == 2 or at == "before hold" else waves + clock
    if at == "before forward" and number is not None:
        number = number * what.wave + 1
    result = run(what, tmp_path, deaths=(Death(vw=vw, at=at, number=number),), stall_seconds=20.0)
    assert result.ended, "it dies"
    assert counts(tmp_path) == [*[[1] * NUM_WITNESSES] * 3, [2] * NUM_WITNESSES]
    assert {line["vw"] for line in decisions(tmp_path, "join")} == set(range(6 if "compress" in freeze else 2))


def test_who_trains_with_other_frozen_layers_is_reported(tmp_path: Path) -> None:
    """Those that join one barrier too late, by a plan that has them replace the others before."""
    run(REPLICAS, tmp_path)
    plan = json.loads((tmp_path / "plan.json").read_text())
    plan["freeze_lineups"][1]["frozen"] = 1
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    assert {"membership", "wave_size"} <= set(check_run(tmp_path).kinds())
