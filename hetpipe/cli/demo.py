"""`hetpipe demo`: what it trains, and the words around it."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import hetpipe
from hetpipe.errors import UserError

_JOB = Path("examples") / "digits" / "job.yaml"

INTRODUCTION = (
    "Training a classifier of real handwritten digits on an emulated, unequal",
    "cluster: 2 virtual workers of 2 stages each, the second one slower, and 2",
    "parameter servers. Each row of the table is a virtual worker: which layers its",
    "stages hold on which devices, the waves it has committed (clock), how many waves",
    "it is ahead of the slowest, its speed, its loss, and how much of its time it",
    "waited for the others, as the staleness bound D demands.",
)


def find_demo(current: Path) -> tuple[Path, Path]:
    """The demo's job file and the folder its modules are imported from.

    Raises:
        UserError: the examples or scikit-learn are not there.
    """
    roots = (current, Path(hetpipe.__file__).resolve().parent.parent)
    root = next((root for root in roots if (root / _JOB).is_file()), None)
    if root is None:
        raise UserError(
            f"the demo trains {_JOB} of hetpipe's source tree, which is neither in {roots[0]} nor in {roots[1]}; run "
            "it from a copy of the source, or start a job of your own with `hetpipe init`"
        )
    if find_spec("sklearn") is None:
        raise UserError("the demo needs scikit-learn for its images; install it with: pip install 'hetpipe[examples]'")
    return root / _JOB, root
