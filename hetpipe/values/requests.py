"""Requests of a stage to a shard: the sender's identity and the tensors concerned."""

from __future__ import annotations

from dataclasses import dataclass

from hetpipe.values.identity import StagePeer
from hetpipe.values.ids import Clock, Incarnation, JobId, StageIndex, Term, VirtualWorkerIndex, Wave

#: The sample indices of the minibatches of one wave, in order.
Blocks = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Requester:
    """The stage that makes a request, and its incarnation."""

    job_id: JobId
    term: Term
    vw: VirtualWorkerIndex
    incarnation: Incarnation
    stage: StageIndex

    @property
    def peer(self) -> StagePeer:
        """The identity that its certificate must have."""
        return StagePeer(self.job_id, self.vw, self.stage, self.incarnation, self.term)

    def __str__(self) -> str:
        """The requester for messages."""
        return f"stage {self.stage} of virtual worker {self.vw} (incarnation {self.incarnation})"


@dataclass(frozen=True, slots=True)
class Meeting:
    """Reply to a join: the addresses at which other stages accept this one. Empty: not reported yet."""

    link: str
    """`HOST:PORT` of the previous stage of its virtual worker."""
    replicas: str
    """`HOST:PORT` of the same stage of the first member, or of virtual worker 0 before there are any."""
    joined: tuple[StageIndex, ...]
    """Stages of its virtual worker that have joined."""
    makes_weights: bool = False
    """Its virtual worker must create the initial weights: there are none, and no member with a lower index is expected.
    """


@dataclass(frozen=True, slots=True)
class Watermarks:
    """Progress of a shard with one virtual worker's waves. Each clock covers all waves below it."""

    staged: Clock
    """Waves completely staged on the shard, or committed."""
    committed: Clock
    """Waves that are committed."""
    durable: Clock
    """Waves that would survive a restart of the shard; with a failed disk, none of the run would."""


@dataclass(frozen=True, slots=True)
class PushReply:
    """Reply to a push: the wave is staged."""

    duplicate: bool
    """Whether it had been staged before."""
    marks: Watermarks
    """Watermarks of the virtual worker that pushed."""


@dataclass(frozen=True, slots=True)
class MemoryOffer:
    """The socket at which a process of the same host and user fetches a segment; or the reason why there is none."""

    socket: str
    """The name of an abstract Unix socket; empty: there is none."""
    token: str
    """Is shown there, once, to be passed the segment."""
    segment: str
    """Names the segment in later calls."""
    reason: str
    """Why there is none; else empty."""


@dataclass(frozen=True, slots=True)
class LinkHello:
    """Introduction of a stage to its neighbour."""

    requester: Requester
    room: int
    """Frames it can buffer: the number that may be sent before it grants more credit. At least 1."""
    memory: tuple[MemoryOffer, ...] = ()
    """From the stage that serves: a segment for what it sends, and one for what it receives; empty: frames go through
    gRPC.
    """


@dataclass(frozen=True, slots=True)
class LinkTransport:
    """Answer of the stage that connects to an offer of memory."""

    refusal: str
    """Why frames go through gRPC; empty: they go through the offered memory."""


@dataclass(frozen=True, slots=True)
class SliceHeader:
    """A slice of one tensor: its elements [start, stop), flattened."""

    parameter: str
    start: int
    stop: int
    dtype: str


@dataclass(frozen=True, slots=True)
class PushHeader:
    """Header of a push, before its bytes. `wave` is None for the initial weights of a run."""

    requester: Requester
    wave: Wave | None
    slices: tuple[SliceHeader, ...]
    fresh: bool = False
    """Whether these are weights of layers that are built anew, for the segment that begins with this wave."""


@dataclass(frozen=True, slots=True)
class PullHeader:
    """Requests slices of w^(clock); the reply contains them in this order."""

    requester: Requester
    clock: Clock
    slices: tuple[SliceHeader, ...]


@dataclass(frozen=True, slots=True)
class BuffersHeader:
    """A stage's model buffers at the barrier at `clock`: announces them, or requests their averages."""

    requester: Requester
    clock: Clock
    buffers: tuple[SliceHeader, ...]


@dataclass(frozen=True, slots=True)
class CheckpointFile:
    """One file a stage wrote into a checkpoint's folder."""

    name: str
    sha256: str
    num_bytes: int
