"""Layers move between real stage processes, over both kinds of links: the bits of the reference, no new process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hetpipe.check import check_run
from tests.numerics.compare import ADAMW, Case, assert_same_bits, trained
from tests.numerics.test_deaths import BATCH_NORM
from tests.processes.harness import Train, write_job
from tests.reference.executor import run_reference

pytestmark = [pytest.mark.processes, pytest.mark.exhaustive, pytest.mark.timeout(180)]


@pytest.mark.parametrize("link", ["gloo", "grpc"])
def test_layers_move_between_running_processes(link: str, tmp_path: Path) -> None:
    what = Case(
        stages=[[2, 2], [2, 2]],
        epochs=3,
        optimizer=dict(ADAMW),
        moves=((2, 0, (3, 1)), (3, 1, (1, 3)), (5, 0, (1, 3))),
        **BATCH_NORM,
    )
    script = [{"at": {"clock": at}, "do": "move", "vw": vw, "stages": list(counts)} for at, vw, counts in what.moves]
    job = write_job(
        tmp_path,
        model=f"tests.models:{what.model}",
        data={"train": f"tests.models:{what.data}"},
        batch_size=what.batch_size,
        epochs=3,
        optimizer=ADAMW,
        link=link,
        workers={"count": 2, "stages": what.stages},
        sync={"kind": "wsp", "D": what.staleness, "minibatches_per_wave": what.wave, "deterministic": True},
        parameter_servers={"count": 2},
        elastic={"script": script},
    )
    train = Train(tmp_path, job)
    outcome = train.finish(150.0)
    assert outcome.returncode == 0, outcome.stderr
    assert check_run(train.run_dir, require_complete=True).ok
    for path in (train.run_dir / "history").glob("vw-*.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        assert len({line["pid"] for line in lines}) == 1, "one process all the time"
        assert {line["version"] for line in lines if line["event"] == "forward"} == (
            {0, 1, 2} if "vw-0" in path.name else {0, 1}
        )
    assert_same_bits(trained(train.run_dir), run_reference(what.reference()))
