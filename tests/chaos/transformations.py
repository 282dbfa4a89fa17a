"""`python -m tests.chaos.transformations`: layers freeze, pipelines change, and somebody dies meanwhile.

A script freezes the first layer, and a clock later has two virtual workers of one stage take over from one of two, as
`freeze.compress` does, once in a job; so each cell has a job of its own. Frozen layers count no samples any more, which
the verdict knows. What happens to those that take over is `tests.chaos.takeovers`. Options are those of
`python -m tests.chaos`.
"""

from __future__ import annotations

import sys

from tests.chaos import takeovers
from tests.chaos.cells import AT_POINTS, Cell
from tests.chaos.command import Command
from tests.chaos.takeovers import AT_CLOCK, TakeoverScene

#: Who is hit at which point: the clock shard decides, the stage with the first layer is built anew.
VICTIMS = {
    "freezing.before_record": "shard-0",
    "freezing.recorded": "shard-0",
    "repartition.record_read": "stage-0",
    "repartition.layers_half_moved": "stage-0",
    "repartition.stage_built": "stage-0",
}


def all_transformations() -> tuple[Cell, ...]:
    """The table."""
    return tuple(Cell(point=point, victim=victim, deed=deed) for point, victim in VICTIMS.items() for deed in AT_POINTS)


def script() -> list[dict[str, object]]:
    """The lines of the job."""
    return [{"at": {"clock": AT_CLOCK}, "do": "freeze", "layers": 1}, *takeovers.script(AT_CLOCK + 1)]


if __name__ == "__main__":
    command = Command(
        "tests.chaos.transformations", "Whether transformations are survived.", all_transformations(), {}, per_job=1
    )
    sys.exit(command.run(TakeoverScene(script(), AT_CLOCK + 1)))
