"""The section of a job file about plans that change while the job trains (docs/semantics/plan-versions.md)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from hetpipe.job.sections import LayerCounts, PositiveInt, Section
from hetpipe.values.bounds import MAX_LISTED


class ScriptMoment(Section):
    """The time at which a line of a script takes effect."""

    clock: PositiveInt = Field(examples=[4])
    """At the barrier at this clock, which is set if none is planned there."""


class ScriptLine(Section):
    """One change of a run's plan, decided beforehand."""

    at: ScriptMoment = Field(examples=["{clock: 4}"])
    """The time at which it takes effect."""
    do: Literal["move"] = Field(examples=["move"])
    """`move`: layers move between the stages of a virtual worker, whose number and devices stay."""
    vw: int = Field(ge=0, examples=[0])
    """The virtual worker."""
    stages: LayerCounts = Field(examples=["[3, 1]"])
    """Layers of each of its stages from there on."""


def _in_order(script: tuple[ScriptLine, ...]) -> tuple[ScriptLine, ...]:
    clock, moved = 0, set[int]()
    for number, line in enumerate(script, start=1):
        if line.at.clock < clock:
            raise ValueError(
                f"line {number} is at clock {line.at.clock}, after one at clock {clock}; give the lines in order"
            )
        if line.at.clock > clock:
            clock, moved = line.at.clock, set()
        if line.vw in moved:
            raise ValueError(f"line {number} moves virtual worker {line.vw} a second time at clock {clock}; remove one")
        moved.add(line.vw)
    return script


class ElasticSection(Section):
    """Changes of plans while the job trains."""

    script: Annotated[tuple[ScriptLine, ...], Field(max_length=MAX_LISTED), AfterValidator(_in_order)] = Field(
        default=(), examples=["[{at: {clock: 4}, do: move, vw: 0, stages: [3, 1]}]"]
    )
    """The changes, in order of time. A job with a script makes no automatic changes: no straggler's layers are moved,
    no virtual worker continues without its missing agents, and none is added.
    """
