"""`python -m tests.chaos.compressions`: pipelines are compressed as layers freeze, and somebody dies meanwhile.

A job with `freeze.compress`: behind the first pass over the data three of four layers freeze, and one barrier later
four virtual workers of one stage, which have waited since the start, take over from two of two. That happens once in a
job, so each cell has one of its own. Frozen layers count the samples of the first pass alone, which the verdict knows.
Options are those of `python -m tests.chaos`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.chaos import witness_job
from tests.chaos.cells import AT_POINTS, Cell, Provocation
from tests.chaos.cluster import COORDINATOR, Cluster
from tests.chaos.command import Command
from tests.chaos.nemesis import LAST_WORKER, REACH_SECONDS, Nemesis, layout_for
from tests.chaos.sequence import SURVIVE, Play
from tests.chaos.trial import Trial

#: Samples of a pass.
NUM_SAMPLES = 240

#: Seconds between two samples of a virtual worker: until somebody can be hit, until that has happened, and then, so
#: that passes are left when everybody is there again.
EARLY_SECONDS, FREEZING_SECONDS, LATE_SECONDS = 0.2, 0.02, 0.5

#: Virtual workers of the first lineup, and of the one behind three frozen layers.
LEAVERS, TAKERS = (0, LAST_WORKER), (2, 3, 4, 5)

#: The stage of the first one that waits.
TAKER = "stage-taker"

#: The change of the job.
FREEZE: dict[str, Any] = {"schedule": [{"epoch": 1, "layers": 3}], "compress": True, "compress_by": "parameters"}

#: Who is hit at which point: the clock shard decides, one that leaves, one that waits and joins.
VICTIMS = {
    "freezing.before_record": ("shard-0",),
    "freezing.recorded": ("shard-0",),
    "takeover.state_written": ("stage-0", "stage-1"),
    "takeover.before_record": ("shard-0",),
    "takeover.recorded": ("shard-0",),
    "takeover.record_read": (TAKER,),
    "takeover.loaded": (TAKER,),
}

#: Who is hit as soon as the barrier is passed at which layers freeze, one wave before the pipelines change.
BETWEEN = (COORDINATOR, "agent-1", "shard-1", "stage-0", TAKER)


def all_compressions() -> tuple[Cell, ...]:
    """The table."""
    at_points = (
        Cell(point=point, victim=victim, deed=deed)
        for point, victims in VICTIMS.items()
        for victim in victims
        for deed in AT_POINTS
    )
    return (*at_points, *(Cell(point="any", victim=victim, deed=deed) for victim in BETWEEN for deed in AT_POINTS))


def set_pace(pace: Path, seconds: float) -> None:
    """Have virtual workers rest so long between two samples."""
    unfinished = pace.with_suffix(".new")
    unfinished.write_text(str(seconds))
    unfinished.replace(pace)


class CompressionScene:
    """Clusters with a job whose pipelines are compressed."""

    @contextmanager
    def open(self, folder: Path) -> Iterator[tuple[Trial, Play[Cell]]]:
        """A cluster with a job, and what does a cell to it."""
        arming = folder / "arming"
        arming.mkdir(parents=True)
        pace = arming / "pace"
        set_pace(pace, EARLY_SECONDS)
        layout = layout_for(arming)
        layout = replace(layout, environment={**layout.environment, witness_job.PACE_FILE_VARIABLE: str(pace)})
        with Cluster(folder, layout) as cluster:
            trial = Trial(cluster, folder / "run", survive=SURVIVE, freeze=FREEZE)
            trial.wait_moving()
            yield trial, CompressionNemesis(cluster, trial, arming, pace).play


class CompressionNemesis(Nemesis):
    """Hits one of those that take part."""

    def __init__(self, cluster: Cluster, trial: Trial, arming: Path, pace: Path) -> None:
        """Prepare, as the base class.

        Args:
            cluster: the victims.
            trial: the job.
            arming: a folder.
            pace: the file with that of the job.
        """
        super().__init__(cluster, trial, arming)
        self._pace = pace

    def _hit_workers(self, cell: Cell) -> set[int]:
        """The first lineup leaves in any case; who joins may do so in a later life."""
        del cell
        return {*LEAVERS, *TAKERS}

    def _hit(self, cell: Cell) -> None:
        assert not self._trial.tail.frozen, "layers have frozen before anybody was hit"
        if cell.point == "any":
            set_pace(self._pace, FREEZING_SECONDS)
            self._trial.wait(
                lambda: self._trial.published() >= 0 and bool(self._trial.tail.frozen),
                timeout_seconds=REACH_SECONDS,
                what="frozen layers",
            )
            set_pace(self._pace, LATE_SECONDS)
        super()._hit(cell)
        self._trial.wait(
            lambda: self._trial.published() >= 0 and set(TAKERS) == self._trial.tail.members.keys(),
            timeout_seconds=REACH_SECONDS,
            what=f"virtual workers {', '.join(map(str, TAKERS))} in place of the others",
        )

    def _hit_at_point(self, cell: Cell) -> int:
        pid = super()._hit_at_point(cell)
        set_pace(self._pace, LATE_SECONDS)
        return pid

    def _provoke(self, provocation: Provocation) -> None:
        """The victim is armed, so layers may freeze."""
        super()._provoke(provocation)
        set_pace(self._pace, FREEZING_SECONDS)

    def _pid(self, victim: str) -> int:
        return self._stage_pid(TAKERS[0], 0) if victim == TAKER else super()._pid(victim)


if __name__ == "__main__":
    os.environ[witness_job.SAMPLES_VARIABLE] = str(NUM_SAMPLES)
    command = Command(
        "tests.chaos.compressions", "Whether compressed pipelines survive.", all_compressions(), {}, per_job=1
    )
    sys.exit(command.run(CompressionScene()))
