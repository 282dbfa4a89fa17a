"""Which layers of a run are inactive, and from when on (dynamic-models.md), from its plan and `facts.json`.

So that is the same while the run trains and after its end.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetpipe.runs.run_folder import plan_in
from hetpipe.values.activation import Activation, layers_text
from hetpipe.values.rewinds import run_folders

#: Layers named in a sentence.
_MOST_NAMED = 8


@dataclass(frozen=True, slots=True)
class InactiveSince:
    """The inactive layers from a barrier on."""

    clock: int
    layers: tuple[int, ...]
    """Their indices; empty: all are active again."""
    names: tuple[str, ...]
    """Of the model, in the same order; empty if unknown."""

    def __str__(self) -> str:
        """`layers 1-2 (a1, a2) from clock 4 on`."""
        return f"{self.layers_text} from clock {self.clock} on"

    @property
    def layers_text(self) -> str:
        """`layers 1-2 (a1, a2)`, or `none`."""
        named = ", ".join(self.names[:_MOST_NAMED])
        more = f", and {len(self.names) - _MOST_NAMED} more" if len(self.names) > _MOST_NAMED else ""
        return layers_text(self.layers) + (f" ({named}{more})" if named else "")


def read_inactive(run_dir: Path, reached: int | None) -> tuple[InactiveSince, ...]:
    """`inactive_of` the run in a folder, since its last rewind; nothing if it cannot be read."""
    folder = run_folders(run_dir)[-1]
    plan = plan_in(folder)
    try:
        facts = json.loads((folder / "facts.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return ()
    return () if plan is None else inactive_of(plan.activations, facts, reached)


def inactive_of(
    activations: Sequence[Activation], facts: Mapping[str, Any], reached: int | None
) -> tuple[InactiveSince, ...]:
    """The inactive layers, one entry per barrier at which they have changed, in order; none where all have been active.

    Args:
        activations: of the plan.
        facts: `facts.json`; anything.
        reached: the global clock; None: the run has not begun.
    """
    start = facts.get("start") if isinstance(facts, Mapping) else None
    begin, before = (start.get("clock"), start.get("inactive")) if isinstance(start, Mapping) else (0, ())
    begin, before = int(begin or 0), tuple(map(int, before or ()))
    if not begin:
        before = next((one.inactive for one in activations if one.clock == 0), before)
    changes = [(begin, before)]
    changes += [(one.clock, one.inactive) for one in activations if begin < one.clock <= (reached or 0)]
    if not any(layers for _, layers in changes):
        return ()
    names = facts.get("layers") if isinstance(facts, Mapping) else None
    known = [str(name) for name in names] if isinstance(names, list) else []
    return tuple(
        InactiveSince(clock, layers, tuple(known[layer] for layer in layers if layer < len(known)))
        for clock, layers in changes
    )
