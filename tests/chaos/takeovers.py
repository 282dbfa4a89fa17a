"""`python -m tests.chaos.takeovers`: one virtual worker leaves, two others take over, and somebody dies meanwhile.

A script drops a virtual worker of two stages and adds two of one stage on its devices, once in a job, so each cell has
a job of its own. The moments are those of `failpoints.POINTS` that begin with `takeover`: before the taker is ready,
between that and the record, between the record and the state, and after. Options are those of `python -m tests.chaos`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.chaos.cells import AT_POINTS, Cell
from tests.chaos.cluster import Cluster
from tests.chaos.command import Command
from tests.chaos.nemesis import LAST_WORKER, REACH_SECONDS, Nemesis, layout_for
from tests.chaos.sequence import SURVIVE, Play
from tests.chaos.trial import Trial
from tests.chaos.witness_job import NUM_LAYERS

#: The clock of the barrier: late enough for a failpoint to be armed before, on a busy machine as well.
AT_CLOCK = 100

#: Those that take over, on the devices of the last virtual worker of the plan.
TAKERS = (2, 3)

#: The stage of the first of them.
TAKER = "stage-taker"

#: Who is hit at which point.
VICTIMS = {
    "takeover.before_ready": (TAKER,),
    "takeover.record_read": (TAKER,),
    "takeover.state_written": ("stage-0", "stage-1"),
    "takeover.before_record": ("shard-0",),
    "takeover.recorded": ("shard-0",),
    "takeover.loaded": (TAKER,),
}


def all_takeovers() -> tuple[Cell, ...]:
    """The table."""
    return tuple(
        Cell(point=point, victim=victim, deed=deed)
        for point, victims in VICTIMS.items()
        for victim in victims
        for deed in AT_POINTS
    )


def script(clock: int = AT_CLOCK) -> list[dict[str, object]]:
    """The lines of the job: the take-over at this clock."""
    at = {"clock": clock}
    adds = ({"at": at, "do": "add", "vw": vw, "stages": [NUM_LAYERS], "devices": [vw]} for vw in TAKERS)
    return [{"at": at, "do": "drop", "vw": LAST_WORKER}, *adds]


class TakeoverScene:
    """Clusters with a job in which others take over from one."""

    def __init__(self, lines: list[dict[str, object]], clock: int) -> None:
        """Prepare.

        Args:
            lines: the script of the job.
            clock: that of the take-over.
        """
        self._lines, self._clock = lines, clock

    @contextmanager
    def open(self, folder: Path) -> Iterator[tuple[Trial, Play[Cell]]]:
        """A cluster with a job, and what does a cell to it."""
        arming = folder / "arming"
        arming.mkdir(parents=True)
        with Cluster(folder, layout_for(arming)) as cluster:
            trial = Trial(cluster, folder / "run", survive=SURVIVE, elastic={"script": self._lines})
            trial.wait_moving()
            yield trial, TakeoverNemesis(cluster, trial, arming, self._clock).play


class TakeoverNemesis(Nemesis):
    """Hits one of those that take part."""

    def __init__(self, cluster: Cluster, trial: Trial, arming: Path, clock: int) -> None:
        """Prepare, as the base class.

        Args:
            cluster: the victims.
            trial: the job.
            arming: a folder.
            clock: of the take-over.
        """
        super().__init__(cluster, trial, arming)
        self._clock = clock

    def _hit_workers(self, cell: Cell) -> set[int]:
        """The one that leaves does so in any case; the first one never does."""
        del cell
        return {LAST_WORKER, *TAKERS}

    def _hit(self, cell: Cell) -> None:
        assert self._trial.published() < AT_CLOCK, "others have taken over before anybody was hit"
        super()._hit(cell)
        self._trial.wait(
            lambda: self._trial.published() >= self._clock, timeout_seconds=REACH_SECONDS, what=f"clock {self._clock}"
        )

    def _pid(self, victim: str) -> int:
        return self._stage_pid(TAKERS[0], 0) if victim == TAKER else super()._pid(victim)


if __name__ == "__main__":
    command = Command("tests.chaos.takeovers", "Whether take-overs are survived.", all_takeovers(), {}, per_job=1)
    sys.exit(command.run(TakeoverScene(script(), AT_CLOCK)))
