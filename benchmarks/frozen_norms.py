"""(v) What norms of gradients that decide cost by themselves: pairs of runs, in turn.

The job of `frozen_cache`, with norms that decide after each pass and so small an α that no layer ever freezes, and
without `freeze`; they may cost 2 %. Speeds are those of the median pass, with the barrier before it: norms cost the
same in each.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.frozen_cache import WIDTHS, Contest, pairs_of, summary
from benchmarks.sizes import sized

_FREEZE: Mapping[str, Any] = {"every": "epoch", "alpha": "1/100", "cache": "off"}
#: Runs of some ten seconds.
EPOCHS: Mapping[str, int] = {"heavy": sized(12, 3), "light": sized(60, 3)}


def measure(rounds: int) -> dict[str, Any]:
    """Ratios of the speeds of median passes for each trunk, and their mean's 95 % interval."""
    found = {}
    for trunk, width in WIDTHS.items():
        pairs = pairs_of(width, Contest(_FREEZE, {}, epochs=EPOCHS[trunk]), rounds)
        found[f"norms / without, {trunk}"] = summary([one.median_speed / other.median_speed for one, other in pairs])
        processor = [other.processor / one.processor for one, other in pairs]
        found[f"the same by processor, {trunk}"] = summary(processor) | {"seconds": [one.processor for one, _ in pairs]}
    return found
