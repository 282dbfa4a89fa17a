"""A short, fixed selection of the chaos table, in one job: `make chaos` plays all of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.cells import all_cells
from tests.chaos.nemesis import FailpointScene
from tests.chaos.sequence import Runner
from tests.storage.redis_server import needs_redis

pytestmark = [pytest.mark.processes, pytest.mark.exhaustive, pytest.mark.timeout(240), needs_redis]

#: One for each kind of process.
SELECTION = (
    "any/redis/kill",
    "any/coordinator/kill",
    "push.after_stage/shard-0/kill",
    "push.mid_stream/stage-0/kill",
)

#: Half the processes of the whole table's jobs.
WORKERS = {"count": 2, "stages": 1}


def test_deaths_in_the_middle_of_a_push_lose_nothing(tmp_path: Path) -> None:
    cells = {cell.name: cell for cell in all_cells()}
    told: list[str] = []
    outcomes = Runner(FailpointScene(workers=WORKERS), tmp_path, told.append).run([cells[name] for name in SELECTION])
    assert [outcome.case.name for outcome in outcomes if not outcome.survived] == [], "\n".join(told)
