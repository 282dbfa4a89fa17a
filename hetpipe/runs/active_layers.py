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
from hetpipe.values.ids import Clock
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
    fresh: tuple[int, ...] = ()
    """The active ones that are built anew there."""
    fresh_names: tuple[str, ...] = ()
    """Likewise."""

    def __str__(self) -> str:
        """`layers 1-2 (a1, a2) from clock 4 on, with layer 3 (b1) built anew`."""
        return f"{self.layers_text} from clock {self.clock} on" + self.fresh_text

    @property
    def layers_text(self) -> str:
        """`layers 1-2 (a1, a2)`, or `none`."""
        return _named(self.layers, self.names)

    @property
    def fresh_text(self) -> str:
        """`, with layer 3 (b1) built anew`; empty where none is."""
        return f", with {_named(self.fresh, self.fresh_names)} built anew" if self.fresh else ""


def _named(layers: tuple[int, ...], names: tuple[str, ...]) -> str:
    named = ", ".join(names[:_MOST_NAMED])
    more = f", and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return layers_text(layers) + (f" ({named}{more})" if named else "")


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
    """The inactive layers, one entry per barrier at which they have changed, in order.

    None where all have been active, as they were left.

    Args:
        activations: of the plan.
        facts: `facts.json`; anything.
        reached: the global clock; None: the run has not begun.
    """
    start = facts.get("start") if isinstance(facts, Mapping) else None
    given = start if isinstance(start, Mapping) else {}
    begin = Clock(int(given.get("clock") or 0))
    before, renewed = (tuple(map(int, given.get(key) or ())) for key in ("inactive", "fresh"))
    if not begin:
        before = next((one.inactive for one in activations if one.clock == 0), before)
    changes = [Activation(begin, before, renewed)]
    changes += [one for one in activations if begin < one.clock <= (reached or 0)]
    if not any(one.inactive or one.fresh for one in changes):
        return ()
    names = facts.get("layers") if isinstance(facts, Mapping) else None
    known = [str(name) for name in names] if isinstance(names, list) else []

    def names_of(layers: tuple[int, ...]) -> tuple[str, ...]:
        return tuple(known[layer] for layer in layers if layer < len(known))

    return tuple(
        InactiveSince(one.clock, one.inactive, names_of(one.inactive), one.fresh, names_of(one.fresh))
        for one in changes
    )
