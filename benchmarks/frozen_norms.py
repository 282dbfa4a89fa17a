"""(v) What norms of gradients that decide cost by themselves: two runs in turns, as in `frozen_cache`.

The job of `frozen_cache`, with norms that decide after each pass and so small an α that no layer ever freezes, and
without `freeze`; they may cost 2 %.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.frozen_cache import TRUNKS, Contest, compare

_FREEZE: Mapping[str, Any] = {"every": "epoch", "alpha": "1/100", "cache": "off"}


def measure(rounds: int) -> dict[str, Any]:
    """Figures of each trunk."""
    contest = Contest(_FREEZE, {})
    return {f"norms / without, {kind}": compare(trunk, contest, rounds) for kind, trunk in TRUNKS.items()}
