"""The section of a job file about plans that change while the job trains (docs/semantics/plan-versions.md)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag

from hetpipe.job.sections import LayerCounts, PositiveInt, Section
from hetpipe.values.bounds import MAX_LISTED, MAX_STAGES
from hetpipe.values.ids import Clock, VirtualWorkerIndex
from hetpipe.values.memory import LayerPolicy
from hetpipe.values.suggest import join_names
from hetpipe.values.sync import MemberChange, is_absent

_VERBS = ("move", "memory", "waves", "drop", "add", "freeze", "activate", "barrier")


class ScriptMoment(Section):
    """The barrier at which a line of a script takes effect."""

    clock: PositiveInt = Field(examples=[4])
    """At the barrier at this clock, which is set if none is planned there."""


class MinibatchMoment(Section):
    """The minibatch from which on a line of a script is in effect, without a barrier."""

    p: PositiveInt = Field(examples=[9])
    """A minibatch of the line's virtual worker, the first of a wave."""


def _moment_branch(value: object) -> str:
    is_minibatch = "p" in value if isinstance(value, Mapping) else isinstance(value, MinibatchMoment)
    return "<minibatch>" if is_minibatch else "<clock>"


class MoveLine(Section):
    """Layers move between the stages of a virtual worker."""

    at: Annotated[
        Annotated[ScriptMoment, Tag("<clock>")] | Annotated[MinibatchMoment, Tag("<minibatch>")],
        Discriminator(_moment_branch),
    ] = Field(examples=["{clock: 4}"])
    """The barrier at which it takes effect; or the first minibatch of a wave, from which on the layers are where they
    go, without a barrier: then each goes to a stage next to its own.
    """
    do: Literal["move"] = Field(examples=["move"])
    """`move`: layers move between the stages of a virtual worker, whose number and devices stay."""
    vw: int = Field(ge=0, examples=[0])
    """The virtual worker."""
    stages: LayerCounts = Field(examples=["[3, 1]"])
    """Layers of each of its stages from there on."""

    @property
    def is_live(self) -> bool:
        """Whether it sets no barrier."""
        return isinstance(self.at, MinibatchMoment)


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


def _count_branch(value: object) -> str:
    return "<number>" if isinstance(value, int) else "<list>"


class WavesLine(Section):
    """Waves get another number of minibatches."""

    at: ScriptMoment = Field(examples=["{clock: 4}"])
    """The barrier at which it takes effect."""
    do: Literal["waves"] = Field(examples=["waves"])
    """`waves`: the number of minibatches of a wave changes."""
    minibatches_per_wave: Annotated[
        Annotated[PositiveInt, Tag("<number>")]
        | Annotated[Annotated[tuple[PositiveInt, ...], Field(max_length=MAX_LISTED)], Tag("<list>")],
        Discriminator(_count_branch),
    ] = Field(examples=[8])
    """N from there on, of all virtual workers, or a list with the N of each."""

    @property
    def counts(self) -> tuple[int, ...]:
        """One number for all virtual workers, or one for each."""
        given = self.minibatches_per_wave
        return (given,) if isinstance(given, int) else given


class DropLine(Section):
    """A virtual worker leaves."""

    at: ScriptMoment = Field(examples=["{clock: 4}"])
    """The barrier at which it takes effect."""
    do: Literal["drop"] = Field(examples=["drop"])
    """`drop`: a virtual worker leaves, and its processes end."""
    vw: int = Field(ge=0, examples=[1])
    """The virtual worker."""


def _different(devices: tuple[int, ...] | None) -> tuple[int, ...] | None:
    if devices is not None and len(set(devices)) < len(devices):
        raise ValueError("has a device twice; give each stage a device of its own")
    return devices


class AddLine(Section):
    """A virtual worker joins, or comes back."""

    at: ScriptMoment = Field(examples=["{clock: 9}"])
    """The barrier at which it takes effect; the others wait there until it is ready."""
    do: Literal["add"] = Field(examples=["add"])
    """`add`: a virtual worker that an earlier line dropped comes back; one that none has dropped joins only there."""
    vw: int = Field(ge=0, examples=[1])
    """The virtual worker: one of the job's or, with `devices`, another one with the next index."""
    stages: LayerCounts | None = Field(default=None, examples=["[3, 1]"])
    """Layers of each of its stages from there on, whose number stays; as before, if omitted."""
    devices: Annotated[
        tuple[Annotated[int, Field(ge=0)], ...] | None, Field(max_length=MAX_STAGES), AfterValidator(_different)
    ] = Field(default=None, examples=["[0, 1]"])
    """The device of each stage of a virtual worker that the job does not have otherwise: a number counts the devices of
    the job's virtual workers, stage by stage, from 0 on, and then further ones, which the run has for this line. No
    virtual worker that trains meanwhile may have them.
    """


class FreezeLine(Section):
    """The first layers of the model are trained no more."""

    at: ScriptMoment = Field(examples=["{clock: 4}"])
    """The barrier from which on they are frozen."""
    do: Literal["freeze"] = Field(examples=["freeze"])
    """`freeze`: the first layers of the model keep their weights from there on."""
    layers: PositiveInt = Field(examples=[2])
    """Number of frozen layers, counted as `freeze.layers`."""


class ActivateLine(Section):
    """Other layers of the model are active."""

    at: ScriptMoment = Field(examples=["{clock: 4}"])
    """The barrier from which on they are."""
    do: Literal["activate"] = Field(examples=["activate"])
    """`activate`: these layers alone compute and are trained from there on, in the order of the model; a minibatch
    passes the others as if they were not there.
    """
    active: Annotated[tuple[_LayerName, ...], Field(max_length=MAX_LISTED), AfterValidator(_some)] = Field(
        examples=["[0, 'h.*']"]
    )
    """The layers: their indices, from 0 on, names, or patterns (`*`, `?`) of names."""
    fresh: Annotated[
        tuple[_LayerName, ...] | None,
        Field(max_length=MAX_LISTED),
        AfterValidator(lambda given: given and _some(given)),
    ] = Field(default=None, examples=["['b*']"])
    """Those of them that are built anew there, as the model's constructor makes them under another seed, with a new
    state of the optimizer; the others continue as they were left.
    """


class BarrierLine(Section):
    """A barrier, at which nothing else changes than that data are divided again."""

    at: ScriptMoment = Field(examples=["{clock: 4}"])
    """The barrier, which is set if none is planned there."""
    do: Literal["barrier"] = Field(examples=["barrier"])
    """`barrier`: data are divided again. It repeats barriers of runs that have decided by themselves."""


def _verb(value: object) -> str | None:
    verb = value.get("do") if isinstance(value, Mapping) else getattr(value, "do", None)
    return f"<{verb}>" if verb in _VERBS else None


ScriptLine = Annotated[
    Annotated[MoveLine, Tag("<move>")]
    | Annotated[MemoryLine, Tag("<memory>")]
    | Annotated[WavesLine, Tag("<waves>")]
    | Annotated[DropLine, Tag("<drop>")]
    | Annotated[AddLine, Tag("<add>")]
    | Annotated[FreezeLine, Tag("<freeze>")]
    | Annotated[ActivateLine, Tag("<activate>")]
    | Annotated[BarrierLine, Tag("<barrier>")],
    Discriminator(
        _verb,
        custom_error_type="verb",
        custom_error_message=f"needs a key `do` with one of the words {join_names(_VERBS, 'and')}",
    ),
]
"""One change of a run's plan, decided beforehand."""


def _in_order(script: tuple[ScriptLine, ...]) -> tuple[ScriptLine, ...]:
    clock, moved, once = 0, set[int](), set[str]()
    for number, line in enumerate(script, start=1):
        if isinstance(line.at, MinibatchMoment):
            continue
        if line.at.clock < clock:
            raise ValueError(
                f"line {number} is at clock {line.at.clock}, after one at clock {clock}; give the lines in order"
            )
        if line.at.clock > clock:
            clock, moved, once = line.at.clock, set(), set()
        if isinstance(line, MoveLine) or (isinstance(line, AddLine) and line.stages and line.devices is None):
            if line.vw in moved:
                raise ValueError(
                    f"line {number} moves virtual worker {line.vw} a second time at clock {clock}; remove one"
                )
            moved.add(line.vw)
        if isinstance(line, WavesLine | ActivateLine):
            what = "waves" if isinstance(line, WavesLine) else "active layers"
            if what in once:
                raise ValueError(f"line {number} changes the {what} a second time at clock {clock}; remove one")
            once.add(what)
    return script


def _ever_more_frozen(script: tuple[ScriptLine, ...]) -> tuple[ScriptLine, ...]:
    frozen = 0
    for number, line in enumerate(script, start=1):
        if isinstance(line, FreezeLine):
            if line.layers <= frozen:
                raise ValueError(
                    f"line {number} freezes {line.layers} layers, after one that freezes {frozen}: frozen layers stay "
                    "frozen; give a larger number, or remove it"
                )
            frozen = line.layers
    return script


def _dropped_before_added(script: tuple[ScriptLine, ...]) -> tuple[ScriptLine, ...]:
    dropped, named = set[int](), set[int]()
    for number, line in enumerate(script, start=1):
        if isinstance(line, DropLine | AddLine):
            is_added, word = isinstance(line, AddLine), line.do
            if line.vw in named and (line.vw in dropped) != is_added:
                why = "trains already" if is_added else "is dropped already"
                raise ValueError(f"line {number} is `{word}` of virtual worker {line.vw}, which {why}; remove it")
            named.add(line.vw)
            (dropped.discard if is_added else dropped.add)(line.vw)
    return script


def _with_devices_once(script: tuple[ScriptLine, ...]) -> tuple[ScriptLine, ...]:
    """Check the lines that add other virtual workers than the job's."""
    named, newest = set[int](), None
    for number, line in enumerate(script, start=1):
        if isinstance(line, AddLine) and line.devices is not None:
            if line.stages is None or len(line.stages) != len(line.devices):
                raise ValueError(
                    f"line {number} has `devices`, so it needs as many `stages`: the layers of each; give both, for "
                    "example `stages: [2, 2], devices: [0, 1]`"
                )
            if line.vw in named:
                raise ValueError(
                    f"line {number} gives virtual worker {line.vw} devices, but an earlier line has it already; give "
                    "it another index, or remove `devices`"
                )
            if newest is not None and line.vw != newest + 1:
                raise ValueError(
                    f"line {number} adds virtual worker {line.vw} with `devices`, but the next index is {newest + 1}; "
                    "use that"
                )
            newest = line.vw
        if not isinstance(line, WavesLine | FreezeLine | ActivateLine | BarrierLine):
            named.add(line.vw)
    return script


class ElasticSection(Section):
    """Changes of plans while the job trains."""

    script: Annotated[
        tuple[ScriptLine, ...],
        Field(max_length=MAX_LISTED),
        AfterValidator(_in_order),
        AfterValidator(_ever_more_frozen),
        AfterValidator(_dropped_before_added),
        AfterValidator(_with_devices_once),
    ] = Field(default=(), examples=["[{at: {clock: 4}, do: move, vw: 0, stages: [3, 1]}]"])
    """The changes, in order of time. A job with a script makes no automatic changes: no straggler's layers are moved,
    no virtual worker continues without its missing agents, and none is added.
    """

    keep_global_batch: bool = False
    """Where a virtual worker leaves or joins by the script, the others take over its minibatches: a wave of all virtual
    workers has as many as before, dealt in proportion to what each has of them.
    """

    active: Annotated[
        tuple[_LayerName, ...] | None,
        Field(max_length=MAX_LISTED),
        AfterValidator(lambda given: given and _some(given)),
    ] = Field(default=None, examples=["[0, 'h.*']"])
    """The layers that are active from the start of the job on, as in a line `activate`; all of them, if omitted."""

    recut: bool = False
    """Where a line `activate` changes the active layers, layers move between the stages of each virtual worker, so that
    the slowest one has least to do.
    """

    @property
    def activates(self) -> bool:
        """Whether layers are ever inactive, as far as the job says."""
        return self.active is not None or any(isinstance(line, ActivateLine) for line in self.script)

    @property
    def moves(self) -> tuple[MoveLine, ...]:
        """The lines that move layers."""
        return tuple(line for line in self.script if isinstance(line, MoveLine))

    @property
    def live_moves(self) -> tuple[tuple[int, MoveLine], ...]:
        """The lines, with their numbers, that move layers without a barrier."""
        return tuple((n, line) for n, line in enumerate(self.script) if isinstance(line, MoveLine) and line.is_live)

    @property
    def members(self) -> tuple[DropLine | AddLine, ...]:
        """The lines that change who trains."""
        return tuple(line for line in self.script if isinstance(line, DropLine | AddLine))

    @property
    def added(self) -> tuple[tuple[int, AddLine], ...]:
        """The lines, and their numbers, that add other virtual workers than the job's, by their indices."""
        return tuple(
            (number, line)
            for number, line in enumerate(self.script)
            if isinstance(line, AddLine) and line.devices is not None
        )

    @property
    def member_changes(self) -> tuple[MemberChange, ...]:
        """What these lines decide, in order."""
        return tuple(
            MemberChange(Clock(line.at.clock), VirtualWorkerIndex(line.vw), isinstance(line, AddLine))
            for line in self.members
        )

    def is_absent(self, vw: int, clock: int) -> bool:
        """Whether a virtual worker takes no part in the segment that a barrier at `clock` begins."""
        return is_absent(self.member_changes, vw, clock)

    def stays_dropped(self, vw: int) -> bool:
        """Whether a virtual worker is dropped for good."""
        lines = [line for line in self.members if line.vw == vw]
        return bool(lines) and isinstance(lines[-1], DropLine)

    @property
    def waves(self) -> tuple[WavesLine, ...]:
        """The lines that change the number of minibatches per wave."""
        return tuple(line for line in self.script if isinstance(line, WavesLine))

    @property
    def freezes(self) -> tuple[FreezeLine, ...]:
        """The lines that freeze layers."""
        return tuple(line for line in self.script if isinstance(line, FreezeLine))

    @property
    def clocks(self) -> list[int]:
        """The clocks of the barriers at which lines take effect, in order."""
        return [line.at.clock for line in self.script if isinstance(line.at, ScriptMoment)]
