"""The section of a job file about plans that change while the job trains (docs/semantics/plan-versions.md)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag

from hetpipe.job.sections import LayerCounts, PositiveInt, Section
from hetpipe.values.bounds import MAX_LISTED
from hetpipe.values.memory import LayerPolicy


class ScriptMoment(Section):
    """The barrier at which a line of a script takes effect."""

    clock: PositiveInt = Field(examples=[4])
    """At the barrier at this clock, which is set if none is planned there."""


class MinibatchMoment(Section):
    """The minibatch from which on a line of a script is in effect, without a barrier."""

    p: PositiveInt = Field(examples=[9])
    """A minibatch of the line's virtual worker, the first of a wave."""


class MoveLine(Section):
    """Layers move between the stages of a virtual worker."""

    at: ScriptMoment = Field(examples=["{clock: 4}"])
    """The barrier at which it takes effect."""
    do: Literal["move"] = Field(examples=["move"])
    """`move`: layers move between the stages of a virtual worker, whose number and devices stay."""
    vw: int = Field(ge=0, examples=[0])
    """The virtual worker."""
    stages: LayerCounts = Field(examples=["[3, 1]"])
    """Layers of each of its stages from there on."""


def _moment_branch(value: object) -> str:
    return (
        "<minibatch>"
        if (isinstance(value, Mapping) and "p" in value) or isinstance(value, MinibatchMoment)
        else "<clock>"
    )


_LayerIndex = Annotated[int, Field(ge=0)]


def _layer_branch(value: object) -> str:
    return "<index>" if isinstance(value, int) else "<name>"


_LayerName = Annotated[
    Annotated[_LayerIndex, Tag("<index>")] | Annotated[str, Field(min_length=1), Tag("<name>")],
    Discriminator(_layer_branch),
]


def _some(layers: tuple[int | str, ...]) -> tuple[int | str, ...]:
    if not layers:
        raise ValueError("is empty; give the layers, for example `[0, 'h.*']`")
    return layers


class MemoryLine(Section):
    """Layers of a virtual worker get another memory policy."""

    at: Annotated[
        Annotated[ScriptMoment, Tag("<clock>")] | Annotated[MinibatchMoment, Tag("<minibatch>")],
        Discriminator(_moment_branch),
    ] = Field(examples=["{p: 9}"])
    """The barrier, or the first minibatch of a wave, from which on it is in effect."""
    do: Literal["memory"] = Field(examples=["memory"])
    """`memory`: what becomes of the tensors that a layer's backward needs, from its forward on."""
    vw: int = Field(ge=0, examples=[0])
    """The virtual worker."""
    layers: Annotated[tuple[_LayerName, ...], Field(max_length=MAX_LISTED), AfterValidator(_some)] = Field(
        examples=["[0, 'h.*']"]
    )
    """The layers: their indices, from 0 on, names, or patterns (`*`, `?`) of names."""
    policy: LayerPolicy = Field(examples=["recompute"])
    """Their policy from there on, as `memory` of the job has them."""


class FreezeLine(Section):
    """The first layers of the model are trained no more."""

    at: ScriptMoment = Field(examples=["{clock: 4}"])
    """The barrier from which on they are frozen."""
    do: Literal["freeze"] = Field(examples=["freeze"])
    """`freeze`: the first layers of the model keep their weights from there on."""
    layers: PositiveInt = Field(examples=[2])
    """Number of frozen layers, counted as `freeze.layers`."""


def _verb(value: object) -> str | None:
    verb = value.get("do") if isinstance(value, Mapping) else getattr(value, "do", None)
    return f"<{verb}>" if verb in ("move", "memory", "freeze") else None


ScriptLine = Annotated[
    Annotated[MoveLine, Tag("<move>")]
    | Annotated[MemoryLine, Tag("<memory>")]
    | Annotated[FreezeLine, Tag("<freeze>")],
    Discriminator(
        _verb,
        custom_error_type="verb",
        custom_error_message="needs a key `do` with one of the words move, memory and freeze",
    ),
]
"""One change of a run's plan, decided beforehand."""


def _in_order(script: tuple[ScriptLine, ...]) -> tuple[ScriptLine, ...]:
    clock, moved, frozen = 0, set[int](), 0
    for number, line in enumerate(script, start=1):
        if isinstance(line.at, MinibatchMoment):
            continue
        if line.at.clock < clock:
            raise ValueError(
                f"line {number} is at clock {line.at.clock}, after one at clock {clock}; give the lines in order"
            )
        if line.at.clock > clock:
            clock, moved = line.at.clock, set()
        if isinstance(line, FreezeLine):
            if line.layers <= frozen:
                raise ValueError(
                    f"line {number} freezes {line.layers} layers, after one that freezes {frozen}: frozen layers stay "
                    "frozen; give a larger number, or remove it"
                )
            frozen = line.layers
        if isinstance(line, MoveLine):
            if line.vw in moved:
                raise ValueError(
                    f"line {number} moves virtual worker {line.vw} a second time at clock {clock}; remove one"
                )
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

    @property
    def moves(self) -> tuple[MoveLine, ...]:
        """The lines that move layers."""
        return tuple(line for line in self.script if isinstance(line, MoveLine))

    @property
    def freezes(self) -> tuple[FreezeLine, ...]:
        """The lines that freeze layers."""
        return tuple(line for line in self.script if isinstance(line, FreezeLine))

    @property
    def clocks(self) -> list[int]:
        """The clocks of the barriers at which lines take effect, in order."""
        return [line.at.clock for line in self.script if isinstance(line.at, ScriptMoment)]
