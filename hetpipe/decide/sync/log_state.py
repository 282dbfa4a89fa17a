"""What a decision log has in mind: all of it, as data.

The log is a deterministic machine, so this and the events since are all that a restarted clock shard needs.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hetpipe.decide.sync.records import Record
from hetpipe.decide.sync.segment import Segment
from hetpipe.values.ids import Clock, Incarnation, StageIndex, VirtualWorkerIndex, Wave
from hetpipe.values.sync import Progress


@dataclass(slots=True)
class Member:
    """A virtual worker that counts."""

    num_stages: int
    incarnation: Incarnation
    #: The clock at which it joined.
    start: Clock
    #: Local clock: waves committed.
    committed: Clock
    #: The clock its latest switch point chose; it may still be pulled.
    held: Clock
    #: The number of the latest switch point that asked for a clock.
    last_switch: int
    #: wave → stages that reported it staged. Holds uncommitted waves only.
    reports: dict[Wave, set[StageIndex]] = field(default_factory=dict)
    #: wave → the minibatches (blocks of sample indices) it used, from the first stage's report. Uncommitted waves only.
    samples: dict[Wave, tuple[tuple[int, ...], ...]] = field(default_factory=dict)


@dataclass(slots=True)
class Newcomer:
    """A virtual worker that will count from the next barrier on, once all its stages are there."""

    num_stages: int
    incarnation: Incarnation
    #: Stages that are there, and those of them that could begin at once.
    present: set[StageIndex] = field(default_factory=set)
    joined: set[StageIndex] = field(default_factory=set)
    #: Stages whose part of the first weights is on the shards.
    initialized: set[StageIndex] = field(default_factory=set)

    @property
    def is_complete(self) -> bool:
        """Whether all its stages could begin at once."""
        return len(self.joined) == self.num_stages


@dataclass(slots=True)
class LogState:
    """Everything a `DecisionLog` knows; the names are those of its attributes."""

    records: list[Record]
    """Those that somebody may still read, in order; the first one has index `first`."""
    first: int
    members: dict[VirtualWorkerIndex, Member]
    newcomers: dict[VirtualWorkerIndex, Newcomer]
    leaving: tuple[VirtualWorkerIndex, ...]
    """Members that are drained: they count up to the next barrier."""
    leavers: dict[VirtualWorkerIndex, Member]
    """Who left at a barrier and may still be doing its work there: until it is evicted or a later life is admitted."""
    lives: dict[VirtualWorkerIndex, Incarnation]
    """The newest incarnation of every virtual worker that was ever admitted."""
    progress: Progress
    """At the start of the segment under way: what its data division is made from."""
    published: Clock
    """Newest published clock; `start − 1` before the first weights are there."""
    acknowledged: list[int]
    """Number of records each shard has carried out."""
    durable: list[int]
    """Number of records each shard will not ask for again, should it be restarted."""
    segment_samples: list[int]
    """Sample indices committed in the segment under way, in the order of commits."""
    segment_minibatches: int
    num_waves: int
    """Waves committed so far."""
    claimed: set[int]
    """Samples used in this segment, staged ones included: nothing counts twice."""
    most_committed: Clock
    """Largest local clock ever: what a worker committed stands, though it is evicted."""
    most_switched: int
    """Largest number of a switch point that asked for a clock: where a minibatch may have begun, it has."""
    slowest: Clock
    """The global clock when it was last defined: it stays where it is while there are no members."""
    max_distance: int
    """Largest clock distance seen."""
    retained: tuple[Clock, ...]
    """Published clocks that may still be pulled."""
    has_weights: bool
    """Whether the first weights are decided; should their maker be evicted later, nobody makes others."""
    complete_at: dict[Clock, int]
    """clock → index of the record after which its weights are complete."""
    dealt_to: tuple[VirtualWorkerIndex, ...]
    """The members that share out the segment under way."""
    segments: tuple[int, int]
    """Indices of the two newest segment records; 0 where there is none."""
    asked: tuple[str, ...]
    """Reasons, of the barrier that is set or (before the start) will be, that nothing planned gives."""
    segment: Segment
