"""The clock shard as far as its promises go: the real `DecisionLog`, and the rule that makes it outlive its process.

An event is applied, then written down, then its records are told to anybody. A restarted one repeats what was written
down since the latest snapshot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hetpipe.decide.sync.decision_log import DecisionLog, LogState
from hetpipe.decide.sync.records import CommitRecord, Record, SegmentRecord
from hetpipe.errors import HetpipeError
from hetpipe.values.ids import Clock
from hetpipe.values.requests import Requester
from tests.simulation.disk import Disk
from tests.simulation.job import Job
from tests.simulation.network import PARKED
from tests.simulation.promises import Promises, hold
from tests.simulation.scheduler import Scheduler, Violation

Event = tuple[str, tuple[Any, ...], dict[str, Any]]


class ClockPart:
    """The decision log in one process, with its disk."""

    def __init__(self, job: Job, scheduler: Scheduler, promises: Promises, ring: Callable[[], None]) -> None:
        self._job = job
        self._scheduler = scheduler
        self._promises = promises
        self._ring = ring
        self._config = job.log_config
        self.disk: Disk[LogState, Event] = Disk(fsync=job.fsync)
        self.log = DecisionLog(self._config)
        self._tell(0)

    # -- events ------------------------------------------------------------------------------------------------------

    def decide(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Let an event happen to the log; what it answers."""
        before = self.log.num_records
        answer = getattr(self.log, name)(*args, **kwargs)
        self._write_down((name, args, kwargs))
        if self.log.num_records > before:
            records = self._tell(before)
            if any(isinstance(record, SegmentRecord) for record in records) and self._scheduler.random.random() < 0.4:
                self.disk.replace(self.log.state(), [])
            self._ring()
        return answer

    def hold(self, who: Requester, switch: int) -> tuple[Clock, Clock]:
        """The clock of a switch point, and the next barrier."""
        return self.decide("hold", who.vw, who.incarnation, switch), self.log.segment.end

    def follow(self, position: int, *, jumps: bool = False) -> object:
        """The records from `position` on, as (index of the first, records); or wait for some.

        `jumps`: a newcomer, which may have been too slow for those that are forgotten.
        """
        records = self.log.records_from(position, jumps=jumps)
        return (records[0].index, tuple(records)) if records else PARKED

    # -- crash and restart -------------------------------------------------------------------------------------------

    def restart(self) -> None:
        """Remember: the snapshot, and what happened since."""
        snapshot = self.disk.snapshot
        self.log = DecisionLog(self._config) if snapshot is None else DecisionLog.restore(self._config, snapshot)
        used = {}
        for name, args, kwargs in self.disk.entries:
            before = self.log.num_records
            try:
                getattr(self.log, name)(*args, **kwargs)
            except HetpipeError as error:
                raise Violation(
                    f"P2: {name}{args} was taken before the restart, is refused after it: {error}"
                ) from error
            used.update(self._used_since(before))
        hold(
            self.log.num_records >= len(self._promises.records),
            f"P2: the restarted log has {self.log.num_records} records, {len(self._promises.records)} were told",
        )
        self._promises.reveal(self.log.records, used)
        self.log.validate_state()

    # -- inside ------------------------------------------------------------------------------------------------------

    def _write_down(self, event: Event) -> None:
        self.disk.append(event)

    def _tell(self, before: int) -> Sequence[Record]:
        records = self.log.records_from(before)
        if self._scheduler.traces:
            for record in records:
                self._scheduler.trace(f"log {self._job.id}", record)
        self._promises.reveal(records, self._used_since(before))
        return records

    def _used_since(self, before: int) -> dict[int, tuple[int, tuple[int, ...]]]:
        records = self.log.records_from(before)
        return {r.index: self.log.take_used(r) for r in records if isinstance(r, CommitRecord)}
