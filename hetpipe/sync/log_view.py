"""What a stage knows of the decision log: clocks, the next barrier, and who is behind."""

from __future__ import annotations

from collections.abc import Sequence

from hetpipe.spec.ids import Clock, Incarnation, VirtualWorkerIndex
from hetpipe.sync.records import BarrierRecord, CommitRecord, EvictRecord, JoinRecord, PublishRecord, Record


class LogView:
    """A reader's state after some prefix of the log. Not thread-safe; feed it the records in order, each once."""

    def __init__(self, start: Clock) -> None:
        #: Newest published clock; start − 1 before the first one.
        self.published = Clock(start - 1)
        #: The next barrier.
        self.barrier: BarrierRecord | None = None
        #: Clock and reason of the latest barrier that is published; the start of the segment under way.
        self.passed: BarrierRecord | None = None
        #: Waves committed by each member.
        self.committed: dict[VirtualWorkerIndex, Clock] = {}
        self._incarnations: dict[VirtualWorkerIndex, Incarnation] = {}

    def follow(self, records: Sequence[Record]) -> None:
        """Take the next records."""
        for record in records:
            match record:
                case JoinRecord(_, vw, incarnation, clock):
                    self.committed[vw] = clock
                    self._incarnations[vw] = incarnation
                case CommitRecord(_, vw, _, wave, _):
                    self.committed[vw] = Clock(wave + 1)
                case EvictRecord(_, vw, incarnation, _):
                    if self._incarnations.get(vw) == incarnation:
                        del self.committed[vw]
                case BarrierRecord():
                    self.barrier = record
                case PublishRecord(_, clock, _):
                    self.published = clock
                    if self.barrier is not None and clock == self.barrier.clock:
                        self.passed = self.barrier
                case _:
                    pass

    def behind(self, clock: Clock) -> list[VirtualWorkerIndex]:
        """The members that have committed fewer than `clock` waves: whoever waits for `clock` waits for them."""
        return sorted(vw for vw, committed in self.committed.items() if committed < clock)
