"""Forecasts while some layers are inactive, for `hetpipe plan` and `hetpipe simulate`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from hetpipe.decide.elastic.activation import inactive_layers
from hetpipe.errors import UserError
from hetpipe.report.text import columns, rate
from hetpipe.values.activation import Activation, layers_text
from hetpipe.values.ids import Clock
from hetpipe.values.plan_document import ActivePhase
from hetpipe.values.profile import Profile


def activation_of(text: str, profile: Profile) -> Activation:
    """Parse the value of an `--active`.

    Raises:
        UserError: it is not `CLOCK=LAYERS`.
        PlanError: an entry means no layer of the profile.
    """
    clock, _, given = text.partition("=")
    entries = [entry.strip() for entry in given.split(",")]
    if not clock.isdecimal() or not all(entries):
        raise UserError(f"--active is {text!r}; give a clock and the layers, for example 40=stem,b*,head or 40=0,2,3")
    active = [int(entry) if entry.isdecimal() else entry for entry in entries]
    return activation_at(int(clock), active, profile, key="--active")


def activation_at(clock: int, active: Sequence[int | str], profile: Profile, *, key: str) -> Activation:
    """From this clock on only the layers that `active` means are active; `key`: what gives them, for messages.

    Raises:
        PlanError: an entry means no layer of the profile.
    """
    return Activation(Clock(clock), inactive_layers(active, [layer.name for layer in profile.layers], key))


def in_order(activations: Sequence[Activation]) -> Sequence[Activation]:
    """The values of all `--active`.

    Raises:
        UserError: their clocks are not in order.
    """
    if any(first.clock >= second.clock for first, second in pairwise(activations)):
        raise UserError(f"--active has clocks {', '.join(str(one.clock) for one in activations)}; give them in order")
    return activations


def active_phase_lines(phases: Sequence[ActivePhase], everything: float) -> Iterator[str]:
    """The phases as text for people; `everything`: samples per second with all layers."""
    if not phases:
        return
    head = ["from clock", "inactive", "virtual workers", "samples/s"]
    rows = [
        [str(phase.clock), layers_text(phase.inactive), _cuts_text(phase.cuts), rate(phase.samples_per_second)]
        for phase in phases
    ]
    yield ""
    yield from columns([head, *rows])
    yield f"with all layers active {rate(everything)} samples/s"


def _cuts_text(cuts: Sequence[Sequence[int]]) -> str:
    """Layers of each stage; of virtual workers that are cut alike once.

    >>> _cuts_text([(3, 1), (3, 1)]), _cuts_text([(3, 1), (2, 2)])
    ('3-1', '3-1, 2-2')
    """
    return ", ".join(dict.fromkeys("-".join(map(str, cut)) for cut in cuts))
