"""Typed events of a history (`wsp.md` §7).

A history is written by many processes, one file each. Within a file the order of lines is the order of events;
between files only the monotonic time of one host orders them. So every event keeps its `Origin`.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Origin:
    """StagePosition and time of one line: file, line number, host, monotonic time."""

    t: float
    """Monotonic seconds; comparable between processes of one host only."""
    host: str
    pid: int
    role: str
    term: int
    file: str
    """Path relative to the run's folder; of the first segment, for the lines of all segments."""
    line: int
    """1-based line number in its segment."""
    segment: str = ""
    """Path of the segment where that is not `file`."""

    @property
    def where(self) -> str:
        """`FILE:LINE`."""
        return f"{self.segment or self.file}:{self.line}"

    def may_precede(self, other: Origin) -> bool:
        """False only if this line was certainly written after `other`. Equal times and other hosts may precede."""
        return self.host != other.host or self.t <= other.t


@dataclass(frozen=True, slots=True)
class Event:
    """Base class of all events."""

    origin: Origin


@dataclass(frozen=True, slots=True)
class StageEvent(Event):
    """Event of one stage for minibatch `p`."""

    vw: int
    incarnation: int
    stage: int
    p: int

    @property
    def name(self) -> str:
        """`forward of p = 3 on stage 0 of virtual worker 1`."""
        what = type(self).__name__.lower()
        return f"{what} of p = {self.p} on stage {self.stage} of virtual worker {self.vw}"


@dataclass(frozen=True, slots=True)
class Step(StageEvent):
    """The optimizer applied the update that ends with `p`."""

    frozen: int = field(default=0, kw_only=True)
    """F."""
    inactive: tuple[int, ...] = field(default=(), kw_only=True)
    """Layers of the stage that it leaves out."""


@dataclass(frozen=True, slots=True)
class Skip(Step):
    """The stage skipped the update of `p`: a gradient overflowed at the loss scale `scale`. Otherwise like `Step`."""

    scale: int


@dataclass(frozen=True, slots=True)
class Pass(StageEvent):
    """A forward or backward of `p` started on the weights w^(clock) plus own updates up to `local_through`."""

    clock: int
    local_through: int
    version: int = 0
    """Of its virtual worker's plan."""
    frozen: int = 0
    """F."""
    inactive: tuple[int, ...] = ()
    """Layers of the stage that it leaves out."""


@dataclass(frozen=True, slots=True)
class Forward(Pass):
    """A forward started."""


@dataclass(frozen=True, slots=True)
class Backward(Pass):
    """A backward started."""


@dataclass(frozen=True, slots=True)
class Crossed(StageEvent):
    """Minibatch `p` is behind the frozen layers of a stage that uses a cache."""

    cache: str
    read: int
    """The layer whose input was read; 0: none."""
    first: int
    """The layers [first, last) were computed."""
    last: int
    kept: bool
    """Whether the input of layer `last` is in the cache now."""
    since: float
    """Monotonic seconds before the cache was looked up."""
    units: tuple[str, ...]
    """Digests of what enters the model, as a whole or of each sample; none: no cache is asked."""


@dataclass(frozen=True, slots=True)
class Wave(Event):
    """One stage completed a wave; replaces forwards, backwards and steps in a summary history."""

    vw: int
    incarnation: int
    stage: int
    wave: int
    first: int
    """Its first minibatch."""
    last: int
    first_clock: int
    """W* of its first minibatch."""
    last_clock: int
    version: int = 0
    """Of its virtual worker's plan."""
    frozen: int = 0
    """F."""
    inactive: tuple[int, ...] = ()
    """Layers of the stage that it leaves out."""

    @property
    def name(self) -> str:
        """`wave 3 on stage 0 of virtual worker 1`."""
        return f"wave {self.wave} on stage {self.stage} of virtual worker {self.vw}"


@dataclass(frozen=True, slots=True)
class Memory(StageEvent):
    """From minibatch `p` on, the layers of a stage have these memory policies."""

    policies: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Staged(Event):
    """A shard staged `slices` slices of one stage's part of a wave; commit pending."""

    vw: int
    incarnation: int
    stage: int
    wave: int
    shard: int
    slices: int
    indices: tuple[int, ...] = ()
    """Which of the shard's slices; empty in histories that only count them."""


@dataclass(frozen=True, slots=True)
class Commit(Event):
    """The clock shard committed a wave, which used `samples` samples."""

    vw: int
    incarnation: int
    wave: int
    samples: int


@dataclass(frozen=True, slots=True)
class Apply(Event):
    """A shard applied a committed wave."""

    shard: int
    vw: int
    incarnation: int
    wave: int


@dataclass(frozen=True, slots=True)
class Publish(Event):
    """The clock shard published w^(clock); written before it takes effect."""

    clock: int


@dataclass(frozen=True, slots=True)
class Pull(Event):
    """A stage was served its part of w^(clock) by a shard."""

    shard: int
    vw: int
    stage: int
    clock: int


@dataclass(frozen=True, slots=True)
class Evict(Event):
    """A virtual worker stopped being a member."""

    vw: int
    incarnation: int
    clock: int


@dataclass(frozen=True, slots=True)
class Join(Event):
    """A virtual worker becomes a member at the barrier at `clock`."""

    vw: int
    incarnation: int
    clock: int
    num_stages: int | None = None
    """Its stages; None in older histories: as many as in the plan."""
    minibatches_per_wave: int | None = None
    """Its N_v; None where all virtual workers have that of the job."""


@dataclass(frozen=True, slots=True)
class Plan(Event):
    """From the barrier at `clock` on, stage k of a virtual worker has the layers [bounds[k], bounds[k + 1]).

    One that is `live` announces that layers move without a barrier in front of wave `clock`; a barrier at or below
    that makes it void.
    """

    vw: int
    incarnation: int
    clock: int
    version: int
    bounds: tuple[int, ...]
    live: bool = False

    @property
    def name(self) -> str:
        """`version 2 of the plan of virtual worker 1 at clock 4`."""
        return f"version {self.version} of the plan of virtual worker {self.vw} at clock {self.clock}"


@dataclass(frozen=True, slots=True)
class Waves(Event):
    """From the barrier at `clock` on a virtual worker has this N, and its next minibatch is `before` + 1."""

    vw: int
    clock: int
    minibatches_per_wave: int
    before: int


@dataclass(frozen=True, slots=True)
class Freeze(Event):
    """From the barrier at `clock` on, the first `layers` layers are frozen, F of them with trainable parameters."""

    clock: int
    frozen: int
    """F."""
    layers: int


@dataclass(frozen=True, slots=True)
class Activate(Event):
    """From the barrier at `clock` on, these layers are inactive."""

    clock: int
    inactive: tuple[int, ...]
    fresh: tuple[int, ...] = ()
    """Those that are built anew there."""


@dataclass(frozen=True, slots=True)
class Fresh(Event):
    """A stage has built layers anew at the barrier at `clock`."""

    vw: int
    incarnation: int
    stage: int
    clock: int
    layers: tuple[int, ...]
    digests: tuple[str, ...]
    """Of what it has built, per layer."""


@dataclass(frozen=True, slots=True)
class Norms(Event):
    """The squared norms of a virtual worker's gradients, per layer, that have decided F at the barrier at `clock`."""

    clock: int
    vw: int
    layers: tuple[int, ...]
    squares: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Leave(Event):
    """A virtual worker that was drained stops being a member at the barrier at `clock`; its waves below it count."""

    vw: int
    incarnation: int
    clock: int


@dataclass(frozen=True, slots=True)
class Handover(Event):
    """All of the state with which a virtual worker left at the barrier at `clock` is written, or never will be."""

    vw: int
    incarnation: int
    clock: int
    whole: bool


@dataclass(frozen=True, slots=True)
class Takeover(Event):
    """A stage that joins at the barrier at `clock` has the state of `source`, which left there, or else a new one."""

    vw: int
    incarnation: int
    stage: int
    clock: int
    source: int
    whole: bool

    @property
    def name(self) -> str:
        """`stage 0 of virtual worker 2 begins with the state of virtual worker 1 at clock 4`."""
        what = f"the state of virtual worker {self.source}" if self.whole else "a new state"
        return f"stage {self.stage} of virtual worker {self.vw} begins with {what} at clock {self.clock}"


@dataclass(frozen=True, slots=True)
class Barrier(Event):
    """A barrier was set at `clock`; `words` are its reasons."""

    clock: int
    words: frozenset[str]


@dataclass(frozen=True, slots=True)
class Used(Event):
    """The samples of a committed wave, as indices into the data of `epoch`."""

    vw: int
    wave: int
    epoch: int
    indices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Damage:
    """A line that is not a valid event."""

    file: str
    line: int
    problem: str
    torn: bool
    """True for a last line without its newline, as left by a killed process."""
    life: tuple[int, int] | None
    """(vw, incarnation) of the process that wrote the file, if earlier lines have it."""


Decision = Commit | Publish | Evict | Join | Leave | Handover | Plan | Waves | Norms | Freeze | Activate | Barrier
"""The decisions of the clock shard; the order of these lines is the decision log."""
