"""Where the order of a run does not depend on timing, real stages compute in the order that is simulated.

Two stages in `1f1b` order and a D that never binds: the first stage always has an input, so it computes forward exactly
when S_0 lets it; the second one computes what it gets.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hetpipe.simulator.options import SimulationOptions
from hetpipe.simulator.result import ActivityKind
from hetpipe.testing.in_process import InProcessRun, run_in_process
from tests.numerics.compare import ROOT, Case
from tests.simulator.regular import Regular

MINIBATCHES = 12
NEVER_BINDS = 50


@pytest.mark.matrix
@pytest.mark.parametrize("n", [1, 2, 4])
def test_the_same_order(n: int, tmp_path: Path) -> None:
    case = Case(workers=1, wave=n, staleness=NEVER_BINDS, minibatches=MINIBATCHES, schedule="1f1b", servers=1)
    run_in_process(InProcessRun(job=case.job(), run_dir=tmp_path, import_path=ROOT))
    real = [_computed(tmp_path / "history" / f"vw-0-stage-{stage}.jsonl") for stage in (0, 1)]

    options = SimulationOptions(staleness=NEVER_BINDS, minibatches=MINIBATCHES, schedule="1f1b", deterministic=True)
    result = Regular(forward_ms=[1, 1], backward_ms=[2, 2], n=n).run(options)
    names = {ActivityKind.FORWARD: "F", ActivityKind.BACKWARD: "B"}
    simulated = [
        [f"{names[a.kind]}{a.number}" for a in result.activities if a.stage == stage and a.kind in names]
        for stage in (0, 1)
    ]
    assert real == simulated


def _computed(history: Path) -> list[str]:
    lines = map(json.loads, history.read_text().splitlines())
    return [f"{line['event'][0].upper()}{line['p']}" for line in lines if line["event"] in {"forward", "backward"}]
