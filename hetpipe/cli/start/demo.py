"""`hetpipe demo`: what it trains, and the words around it."""

from __future__ import annotations

from pathlib import Path

from hetpipe.bundled import bundled_root

_JOB = Path("examples") / "digits" / "job.yaml"

INTRODUCTION = (
    "Training a classifier of real handwritten digits on an emulated, unequal",
    "cluster: 2 virtual workers of 2 stages each, the second one slower, and 2",
    "parameter servers. Each row of the table is a virtual worker: which layers its",
    "stages hold on which devices, the waves it has committed (clock), how many waves",
    "it is ahead of the slowest, its speed, its loss, and how much of its time it",
    "waited for the others, as the staleness bound D demands.",
)


def find_demo() -> tuple[Path, Path]:
    """The demo's job file and the folder its modules are imported from.

    Raises:
        UserError: see `bundled_root`.
    """
    root = bundled_root()
    return root / _JOB, root
