"""Decisions about the plan of a run while it trains: the lines of `RUN_DIR/decisions.jsonl` (plan-versions.md §6)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from hetpipe.values.bounds import Name, Sentence
from hetpipe.values.ids import Clock, Minibatch, VirtualWorkerIndex
from hetpipe.values.sync import DecidedMove, layer_counts

DECISIONS_FILE = "decisions.jsonl"


@dataclass(frozen=True, slots=True)
class DecisionMoment:
    """When a decision took effect."""

    clock: Clock
    """At the barrier at this clock, or with this wave."""
    p: Minibatch | None = None
    """The first minibatch of the wave, where layers have moved without a barrier."""


@dataclass(frozen=True, slots=True)
class MoveDecision:
    """Layers of a virtual worker have moved. The first four fields are those of a script's line."""

    at: DecisionMoment
    do: Literal["move"]
    vw: VirtualWorkerIndex
    stages: tuple[int, ...]
    """Layers of each of its stages from there on."""
    version: int
    """The plan version that it has made."""
    by: Name
    """What decided it: `straggler`, `operator`, or `freeze`."""
    reason: Sentence
    predicted_gain: float | None
    """Speed-up of the job that was expected, as a fraction; None: not predicted."""
    wall: float
    """When this was written, in seconds since 1970."""

    @property
    def key(self) -> tuple[str, int, int]:
        """The subject of the line, which is written once per key."""
        return (self.do, self.vw, self.version)

    @staticmethod
    def of(vw: VirtualWorkerIndex, decided: DecidedMove, *, wall: float) -> MoveDecision:
        """The line of a move that has taken effect."""
        move = decided.move
        return MoveDecision(
            DecisionMoment(decided.clock, decided.p),
            "move",
            vw,
            layer_counts(move.bounds),
            decided.version,
            move.by,
            move.reason,
            move.predicted_gain,
            wall,
        )


@dataclass(frozen=True, slots=True)
class MemberDecision:
    """A virtual worker has left or joined, by no script. The first three fields, and the last, are a script's line."""

    at: DecisionMoment
    do: Literal["drop", "add"]
    vw: VirtualWorkerIndex
    by: Name
    """What decided it: `drain`, by an operator, or by an agent that leaves the cluster; `operator`, who has added
    another one; `freeze`; or `rewind`, after which one is not back.
    """
    reason: Sentence
    wall: float
    """When this was written, in seconds since 1970."""
    stages: tuple[int, ...] = ()
    """Layers of each stage of one that joins on devices of others; empty: it comes back as it was."""
    devices: tuple[int, ...] = ()
    """The device of each: a number counts those of the job's virtual workers, stage by stage, then further ones."""
    minibatches_per_wave: int | None = None
    """N of one that an operator has added, where each virtual worker has its own; not in a script's line."""

    @property
    def key(self) -> tuple[str, int, int]:
        """The subject of the line, which is written once per key."""
        return (self.do, self.vw, self.at.clock)


@dataclass(frozen=True, slots=True)
class FreezeDecision:
    """Layers are frozen. The first three fields are those of a script's line."""

    at: DecisionMoment
    do: Literal["freeze"]
    layers: int
    """F."""
    by: Name
    """What decided it: `norms`."""
    reason: Sentence
    wall: float
    """When this was written, in seconds since 1970."""

    @property
    def key(self) -> tuple[str, int, int]:
        """The subject of the line, which is written once per key."""
        return (self.do, self.at.clock, self.layers)


@dataclass(frozen=True, slots=True)
class BarrierDecision:
    """A barrier was set so that something could change, and nothing did. The first two are those of a script's line."""

    at: DecisionMoment
    do: Literal["barrier"]
    by: Name
    """What decided it: `norms`; or `rewind`, to the checkpoint of that barrier."""
    reason: Sentence
    wall: float
    """When this was written, in seconds since 1970."""

    @property
    def key(self) -> tuple[str, int, int]:
        """What it is about; it is written once."""
        return (self.do, self.at.clock, 0)


@dataclass(frozen=True, slots=True)
class WavesDecision:
    """Waves get another number of minibatches. The first three fields are those of a script's line."""

    at: DecisionMoment
    do: Literal["waves"]
    minibatches_per_wave: int
    """N of all virtual workers from there on."""
    by: Name
    """What decided it: `freeze`."""
    reason: Sentence
    wall: float
    """When this was written, in seconds since 1970."""

    @property
    def key(self) -> tuple[str, int, int]:
        """The subject of the line, which is written once per key."""
        return (self.do, self.at.clock, 0)


@dataclass(frozen=True, slots=True)
class StayDecision:
    """Layers of a virtual worker stay where they are. It changes nothing.

    The virtual worker had a slow stage and was planned again; or a move was requested, and never took effect.
    """

    at: DecisionMoment
    """The newest clock at that time."""
    do: Literal["stay"]
    vw: VirtualWorkerIndex
    stages: tuple[int, ...]
    """Layers of each stage by the best cut, which may be the one in force, or by the requested one; empty: none fits
    in memory."""
    by: Name
    """What asked for a plan, or for the move: `straggler` or `operator`."""
    reason: Sentence
    predicted_gain: float | None
    """Speed-up of the job by that cut, as a fraction; None: there is none, or it was not predicted."""
    wall: float
    """When this was written, in seconds since 1970."""

    @property
    def key(self) -> tuple[str, int, int]:
        """The subject of the line, which is written once per key."""
        return (self.do, self.vw, self.at.clock)


@dataclass(frozen=True, slots=True)
class MoveJudgement:
    """The gain of a move, measured some waves after it."""

    do: Literal["judge"]
    vw: VirtualWorkerIndex
    version: int
    """The plan version that the move has made."""
    measured_gain: float | None
    """Speed-up of the slowest stage of the virtual worker, as a fraction; None: it could not be measured."""
    sentence: Sentence
    wall: float
    """When this was written, in seconds since 1970."""

    @property
    def key(self) -> tuple[str, int, int]:
        """The subject of the line, which is written once per key."""
        return (self.do, self.vw, self.version)


DecisionLine = Annotated[
    MoveDecision | StayDecision | MemberDecision | FreezeDecision | BarrierDecision | WavesDecision | MoveJudgement,
    Field(discriminator="do"),
]
