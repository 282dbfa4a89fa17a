"""Active layers of a run, which may change at barriers (docs/semantics/dynamic-models.md).

Layers that are not active are left out of the chain: the values before them are those behind them. They are listed as
the inactive ones, so that a model all of whose layers are active lists none.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hetpipe.values.ids import Clock, VirtualWorkerIndex


@dataclass(frozen=True, slots=True)
class Activation:
    """The layers that are inactive from a barrier on, decided before the run."""

    clock: Clock
    """The barrier; 0: the start of the job."""
    inactive: tuple[int, ...]
    """Their indices in the chain, ascending."""
    fresh: tuple[int, ...] = ()
    """The active ones that are built anew there, ascending."""


@dataclass(frozen=True, slots=True)
class ActivationCut:
    """How a virtual worker is cut from the barrier on at which other layers become active."""

    clock: Clock
    vw: VirtualWorkerIndex
    bounds: tuple[int, ...]
    """Stage k has the layers [bounds[k], bounds[k + 1])."""


def inactive_at(
    activations: Iterable[Activation], inactive: tuple[int, ...], *, after: Clock, upto: Clock
) -> tuple[int, ...]:
    """The inactive layers from the barrier at `upto` on.

    Args:
        activations: in order of their clocks.
        inactive: those before it.
        after: clock of the barrier before; those of it are in force already.
        upto: its clock.

    >>> changes = [Activation(Clock(0), (1,)), Activation(Clock(4), (2,))]
    >>> [inactive_at(changes, (1,), after=Clock(0), upto=Clock(clock)) for clock in (3, 4)]
    [(1,), (2,)]
    """
    due = [activation.inactive for activation in activations if after < activation.clock <= upto]
    return due[-1] if due else inactive


def fresh_at(activations: Iterable[Activation], *, after: Clock, upto: Clock) -> tuple[int, ...]:
    """The layers that are built anew at the barrier at `upto`; arguments as of `inactive_at`.

    >>> fresh_at([Activation(Clock(4), (2,), (1,))], after=Clock(0), upto=Clock(4))
    (1,)
    """
    return next((each.fresh for each in reversed([*activations]) if after < each.clock <= upto), ())


def started_with(activations: Iterable[Activation], inactive: tuple[int, ...], start: Clock) -> tuple[int, ...]:
    """The inactive layers with which a run begins at clock `start`: of a new job what it says, else the checkpoint's.

    >>> [started_with([Activation(Clock(0), (1,))], (), Clock(start)) for start in (0, 3)]
    [(1,), ()]
    """
    return next((each.inactive for each in activations if start == each.clock == 0), inactive)


def layers_text(layers: Iterable[int]) -> str:
    """Layers for people, as ranges.

    >>> layers_text((0, 1, 2, 5)), layers_text((3,)), layers_text(())
    ('layers 0-2, 5', 'layer 3', 'none')
    """
    spans: list[list[int]] = []
    for layer in sorted(layers):
        if spans and layer == spans[-1][-1] + 1:
            spans[-1].append(layer)
        else:
            spans.append([layer])
    if not spans:
        return "none"
    text = ", ".join(str(span[0]) if len(span) == 1 else f"{span[0]}-{span[-1]}" for span in spans)
    return ("layer " if len(spans) == 1 and len(spans[0]) == 1 else "layers ") + text
