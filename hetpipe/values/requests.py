"""What a stage says to a shard before any bytes flow: who it is, and which tensors it means."""

from __future__ import annotations

from dataclasses import dataclass

from hetpipe.values.identity import StagePeer
from hetpipe.values.ids import Clock, Incarnation, JobId, StageIndex, Term, VirtualWorkerIndex, Wave

#: The sample indices of the minibatches of one wave, in order.
Blocks = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Requester:
    """Who asks, and in which life of the run."""

    job_id: JobId
    term: Term
    vw: VirtualWorkerIndex
    incarnation: Incarnation
    stage: StageIndex

    @property
    def peer(self) -> StagePeer:
        """Whom its certificate must name."""
        return StagePeer(self.job_id, self.vw, self.stage, self.incarnation, self.term)

    def __str__(self) -> str:
        """As people say it."""
        return f"stage {self.stage} of virtual worker {self.vw} (incarnation {self.incarnation})"


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where others await a stage: what it hears when it joins. Empty: nobody has said so yet."""

    link: str
    """`HOST:PORT` of the previous stage of its virtual worker."""
    replicas: str
    """`HOST:PORT` of the same stage of virtual worker 0."""
    joined: tuple[StageIndex, ...]
    """Stages of its virtual worker that are there."""
    makes_weights: bool = False
    """Its virtual worker shall make the first weights: there are none, and none with a lower index is to come."""


@dataclass(frozen=True, slots=True)
class Watermarks:
    """How far a shard is with one virtual worker's waves. What is said of each clock is said of the waves below it."""

    staged: Clock
    """They are on the shard whole, or count."""
    committed: Clock
    """They count."""
    durable: Clock
    """They would be on the shard after a restart, too; with a disk that fails, none of the run is."""


@dataclass(frozen=True, slots=True)
class PushReply:
    """What a shard says to a push: it is staged."""

    duplicate: bool
    """It had been staged before."""
    marks: Watermarks
    """Of the virtual worker that pushed."""


@dataclass(frozen=True, slots=True)
class LinkHello:
    """How a stage introduces itself to a neighbour."""

    requester: Requester
    room: int
    """Frames it can hold: so many may be sent to it before it grants more. At least 1."""


@dataclass(frozen=True, slots=True)
class SliceHeader:
    """A piece of one tensor: the elements [start, stop) of it, flattened."""

    parameter: str
    start: int
    stop: int
    dtype: str


@dataclass(frozen=True, slots=True)
class PushHeader:
    """What a push announces before its bytes. `wave` is None for the first weights of a run."""

    requester: Requester
    wave: Wave | None
    slices: tuple[SliceHeader, ...]


@dataclass(frozen=True, slots=True)
class PullHeader:
    """Asks for slices of w^(clock); the answer holds them in this order."""

    requester: Requester
    clock: Clock
    slices: tuple[SliceHeader, ...]


@dataclass(frozen=True, slots=True)
class BuffersHeader:
    """A stage's model buffers at the barrier at `clock`: announces them, or asks for what they became."""

    requester: Requester
    clock: Clock
    buffers: tuple[SliceHeader, ...]


@dataclass(frozen=True, slots=True)
class CheckpointFile:
    """One file a stage wrote into a checkpoint's folder."""

    name: str
    sha256: str
    num_bytes: int
