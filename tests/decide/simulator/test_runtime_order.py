"""Where the order of a run does not depend on timing, real stages compute in the order that is simulated.

That is so in every fixed order. And for two stages in the `1f1b` order that goes by what is there, under a D that never
binds: the first stage always has an input, so it computes forward exactly when S_0 lets it; the second one computes
what it gets.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hetpipe.decide.planner.options import ScheduleChoice
from hetpipe.decide.simulator.options import SimulationOptions
from hetpipe.decide.simulator.result import ActivityKind
from hetpipe.values.policies import WeightPolicy
from tests.decide.simulator.regular import Regular
from tests.numerics.compare import ROOT, Case
from tests.support.in_process import InProcessRun, run_in_process

MINIBATCHES = 12
NEVER_BINDS = 50

_LETTERS = {ActivityKind.FORWARD: "F", ActivityKind.BACKWARD: "B"}


@pytest.mark.matrix
@pytest.mark.parametrize("n", [1, 2, 4])
def test_the_same_order(n: int, tmp_path: Path) -> None:
    case = Case(workers=1, wave=n, staleness=NEVER_BINDS, minibatches=MINIBATCHES, schedule="1f1b", servers=1)
    assert played(case, tmp_path) == simulated(2, n, "wave", "1f1b")


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["wsp", "none"])
@pytest.mark.parametrize(
    ("weights", "schedule", "n"),
    [
        ("stash", "auto", 3),
        ("vertical", "auto", 4),
        ("double_buffer", "auto", 5),
        ("predict", "auto", 3),
        ("spectrain", "auto", 6),
        ("flush", "gpipe", 4),
        ("flush", "gpipe", 5),
    ],
)
def test_a_fixed_order_is_the_same_everywhere(
    weights: WeightPolicy, schedule: ScheduleChoice, n: int, kind: str, tmp_path: Path
) -> None:
    """Three stages; with 12 minibatches some last waves are short."""
    case = Case(workers=1, stages=3, wave=n, minibatches=MINIBATCHES, weights=weights, schedule=schedule, kind=kind)
    assert played(case, tmp_path) == simulated(3, n, weights, schedule)


def played(case: Case, run_dir: Path) -> list[list[str]]:
    """What each stage of a real run computed, in order."""
    run_in_process(InProcessRun(job=case.job(), run_dir=run_dir, import_path=ROOT))
    assert isinstance(case.stages, int)
    return [_computed(run_dir / "history" / f"vw-0-stage-{stage}.jsonl") for stage in range(case.stages)]


def simulated(num_stages: int, n: int, weights: WeightPolicy, schedule: ScheduleChoice) -> list[list[str]]:
    """The same of a simulated run."""
    options = SimulationOptions(
        staleness=NEVER_BINDS, minibatches=MINIBATCHES, weights=weights, schedule=schedule, deterministic=True
    )
    result = Regular(forward_ms=[1] * num_stages, backward_ms=[2] * num_stages, n=n).run(options)
    return [
        [f"{_LETTERS[a.kind]}{a.number}" for a in result.activities if a.stage == stage and a.kind in _LETTERS]
        for stage in range(num_stages)
    ]


def _computed(history: Path) -> list[str]:
    lines = map(json.loads, history.read_text().splitlines())
    return [f"{line['event'][0].upper()}{line['p']}" for line in lines if line["event"] in {"forward", "backward"}]
