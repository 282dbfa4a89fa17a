"""A stage's view of the decision log: clocks, the next barrier, the members, and which of them are behind."""

from __future__ import annotations

from collections.abc import Sequence

from hetpipe.decide.sync.records import (
    BarrierRecord,
    CommitRecord,
    EvictRecord,
    HandoverRecord,
    PlanRecord,
    PrepareRecord,
    PublishRecord,
    Record,
    SegmentRecord,
)
from hetpipe.decide.sync.segment import ends_run
from hetpipe.values.ids import Clock, Incarnation, VirtualWorkerIndex


def without_implied(records: Sequence[Record]) -> tuple[Record, ...]:
    """The records that a stage needs: without commits that a later publication among them implies.

    Every member has committed the waves of a published clock. Shards need all records.
    """
    published, needed = -1, []
    for record in reversed(records):
        if isinstance(record, PublishRecord):
            published = max(published, record.clock)
        elif isinstance(record, CommitRecord) and record.wave < published:
            continue
        needed.append(record)
    return tuple(reversed(needed))


def only_commits(records: Sequence[Record]) -> bool:
    """Whether a stage does nothing upon these records: they only tell who is behind."""
    return all(isinstance(record, CommitRecord) for record in records)


def is_counted(
    records: Sequence[Record], vw: VirtualWorkerIndex, incarnation: Incarnation, *, before: bool | None
) -> bool | None:
    """Whether an incarnation is a member of the newest segment; None if no segment is known.

    Args:
        records: the next records.
        vw: virtual worker.
        incarnation: its incarnation.
        before: the answer before these records.
    """
    for record in records:
        if isinstance(record, SegmentRecord):
            before = any((member.vw, member.incarnation) == (vw, incarnation) for member in record.members)
    return before


class LogView:
    """State derived from a prefix of the log. Not thread-safe; process the records in order, each once.

    It may start anywhere before the first relevant segment record, or at one.
    """

    def __init__(self, start: Clock) -> None:
        #: Newest published clock; start − 1 before the first one.
        self.published = Clock(start - 1)
        #: The next barrier; None without a current segment.
        self.barrier: BarrierRecord | None = None
        #: The current segment: the latest barrier passed, and the members that share what follows.
        self.segment: SegmentRecord | None = None
        #: The members, by index, except evicted ones.
        self.members: dict[VirtualWorkerIndex, Incarnation] = {}
        #: Waves committed by each of them.
        self.committed: dict[VirtualWorkerIndex, Clock] = {}
        #: Live moves of layers in the current segment, in the order of the log.
        self.moves: list[PlanRecord] = []
        #: The newest one of each virtual worker that is to be prepared.
        self.preparations: dict[VirtualWorkerIndex, PrepareRecord] = {}
        #: Drained virtual workers and the barrier at which they left: it is not waited for that they read it, so they
        #: may read it late.
        self.left: dict[tuple[VirtualWorkerIndex, Incarnation], SegmentRecord] = {}
        #: Those that have ended there, and whether all of the state that they leave behind is written.
        self.handovers: dict[tuple[VirtualWorkerIndex, Incarnation], bool] = {}

    def follow(self, records: Sequence[Record]) -> None:
        """Process the next records."""
        for record in records:
            match record:
                case CommitRecord(_, vw, _, wave, _):
                    self.committed[vw] = Clock(wave + 1)
                case EvictRecord(_, vw, _, _):
                    self.members.pop(vw, None)
                    self.committed.pop(vw, None)
                case HandoverRecord(_, vw, incarnation, _, whole):
                    self.handovers[vw, incarnation] = whole
                case BarrierRecord():
                    self.barrier = record
                case PublishRecord(_, clock, _):
                    self.published = clock
                    self.committed = {vw: max(committed, clock) for vw, committed in self.committed.items()}
                case SegmentRecord():
                    self._enter(record)
                case PrepareRecord():
                    self.preparations[record.vw] = record
                case PlanRecord():
                    self.moves.append(record)
                case _:
                    pass

    def _enter(self, record: SegmentRecord) -> None:
        self.segment = record
        self.moves.clear()
        self.preparations.clear()
        self.published = record.start
        self.members = {member.vw: member.incarnation for member in record.members}
        self.committed = dict.fromkeys(self.members, record.start)
        self.left |= {(member.vw, member.incarnation): record for member in record.left}

    def moves_of(self, vw: VirtualWorkerIndex, incarnation: Incarnation) -> list[PlanRecord]:
        """The live moves of layers of one incarnation in the current segment, in order."""
        return [record for record in self.moves if (record.vw, record.incarnation) == (vw, incarnation)]

    @property
    def is_over(self) -> bool:
        """Whether the barrier that ends the run is passed."""
        return self.segment is not None and ends_run(self.segment.reasons)

    def behind(self, clock: Clock) -> list[VirtualWorkerIndex]:
        """The members that have committed fewer than `clock` waves, for which a wait for `clock` waits."""
        return sorted(vw for vw, committed in self.committed.items() if committed < clock)
