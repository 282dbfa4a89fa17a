"""The clock shard's shell: a lock around the decision log, the history lines it is the only one to write, and a bell.

Followers (the other shards, the stages) read the records in order from `records_from`; the bell rings when there are
more, and `news` when there are such as a stage acts on. History is written before anyone can read a record.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from hetpipe.errors import StaleTerm
from hetpipe.observe.history import HistoryWriter
from hetpipe.spec.ids import Clock, Incarnation, ShardIndex, StageIndex, VirtualWorkerIndex, Wave
from hetpipe.spec.requests import Meeting, Requester
from hetpipe.spec.run import ClockSnapshot, ShardConfig
from hetpipe.spec.sync import Progress
from hetpipe.sync.decision_log import DecisionLog, LogConfig
from hetpipe.sync.records import BarrierRecord, CommitRecord, EvictRecord, JoinRecord, PublishRecord, Record


class ClockShard:
    """One job's decision log as a service. Thread-safe."""

    def __init__(self, config: ShardConfig, history: HistoryWriter) -> None:
        self._job_id = config.job_id
        self._term = config.term
        self._history = history
        self._log = DecisionLog(
            LogConfig(
                term=config.term,
                num_shards=config.num_shards,
                membership=config.membership,
                sync=config.sync,
                data=config.data,
                checkpoint_every_waves=config.checkpoint_every_waves,
                progress=config.progress,
            )
        )
        lock = threading.RLock()
        #: Notified at every new record. Guards the log.
        self.bell = threading.Condition(lock)
        #: The same lock; notified at every record but commits, of which there are far more than of all others.
        self.news = threading.Condition(lock)
        #: Where stages await the next one of their virtual worker, and those of virtual worker 0 their replicas.
        self._link_addresses: dict[tuple[VirtualWorkerIndex, StageIndex], str] = {}
        self._replicas_addresses: dict[StageIndex, str] = {}
        self._remember(self._log.records)

    def check_requester(self, requester: Requester) -> None:
        """Refuse a stage of another job, term, life or plan.

        Raises:
            StaleTerm, StaleIncarnation, ProtocolViolation: as named.
        """
        with self.bell:
            self._check(requester)
            self._log.check_stage(requester.vw, requester.incarnation, requester.stage)

    # -- events ------------------------------------------------------------------------------------------------------

    def join(self, requester: Requester, link_address: str = "", replicas_address: str = "") -> Meeting:
        """See `ClockTransport.join`."""
        with self.bell:
            self._check(requester)
            self._decide(lambda: self._log.join(requester.vw, requester.incarnation, requester.stage))
            vw, stage = requester.vw, requester.stage
            if link_address:
                self._link_addresses[vw, stage] = link_address
            if replicas_address and vw == 0:
                self._replicas_addresses[stage] = replicas_address
            return Meeting(
                self._link_addresses.get((vw, StageIndex(stage - 1)), ""),
                self._replicas_addresses.get(stage, ""),
                tuple(sorted(self._log.members[vw].joined)),
            )

    def initialized(self, requester: Requester) -> None:
        """A stage has staged its part of the first weights."""
        with self.bell:
            self._check(requester)
            self._decide(lambda: self._log.initialized(requester.vw, requester.incarnation, requester.stage))

    def staged(self, requester: Requester, wave: Wave, blocks: tuple[tuple[int, ...], ...] | None) -> None:
        """A stage has staged its part of a wave."""
        with self.bell:
            self._check(requester)
            self._decide(lambda: self._log.staged(requester.vw, requester.incarnation, wave, requester.stage, blocks))

    def hold(self, requester: Requester, switch: int) -> tuple[Clock, Clock]:
        """The clock for the switch point, and the next barrier.

        Raises:
            ClockNotPublished: not yet.
        """
        with self.bell:
            self._check(requester)
            self._log.check_stage(requester.vw, requester.incarnation, requester.stage)
            clock = self._log.hold(requester.vw, requester.incarnation, switch)
            return clock, self._log.segment.end

    def request_barrier(self, reason: str) -> Clock:
        """Set an unplanned barrier; returns its clock."""
        with self.bell:
            self._decide(lambda: self._log.request_barrier(reason))
            return self._log.segment.end

    def evict(self, vw: VirtualWorkerIndex, incarnation: Incarnation) -> None:
        """A virtual worker is gone."""
        with self.bell:
            self._decide(lambda: self._log.evict(vw, incarnation))

    def acknowledge(self, shard: ShardIndex, num_records: int) -> None:
        """A shard has carried out records."""
        with self.bell:
            self._decide(lambda: self._log.acknowledge(shard, num_records))

    # -- answers -----------------------------------------------------------------------------------------------------

    def records_from(self, start: int) -> Sequence[Record]:
        """The records from `start` on that are there now. With the bell held, nothing is missed between two calls."""
        with self.bell:
            return tuple(self._log.records[start:])

    @property
    def num_records(self) -> int:
        """Records of the log."""
        with self.bell:
            return len(self._log.records)

    def snapshot(self) -> ClockSnapshot:
        """The clocks."""
        with self.bell:
            return self._log.snapshot()

    def progress(self) -> Progress:
        """The progress at the start of the segment under way."""
        with self.bell:
            return self._log.progress

    def whom_a_publish_waits_for(self) -> str:
        """Who keeps the published clock from advancing."""
        with self.bell:
            return self._log.whom_a_publish_waits_for()

    # -- inside ------------------------------------------------------------------------------------------------------

    def _check(self, requester: Requester) -> None:
        if requester.job_id != self._job_id or requester.term != self._term:
            raise StaleTerm(
                f"request for job {requester.job_id} term {requester.term}; "
                f"this shard serves job {self._job_id} term {self._term}"
            )

    def _decide(self, event: Callable[[], Sequence[Record]]) -> None:
        """Run an event under the bell, write its history, and ring."""
        records = event()
        if records:
            self._remember(records)
            self.bell.notify_all()
            if not all(isinstance(record, CommitRecord) for record in records):
                self.news.notify_all()

    def _remember(self, records: Sequence[Record]) -> None:
        for record in records:
            match record:
                case CommitRecord(_, vw, incarnation, wave, samples):
                    self._history.commit(vw=vw, incarnation=incarnation, wave=wave, samples=samples)
                    epoch, indices = self._log.take_used(record)
                    if indices:
                        self._history.used(vw=vw, wave=wave, epoch=epoch, indices=indices)
                case PublishRecord(_, clock, _):
                    self._history.publish(clock=clock)
                case BarrierRecord(_, clock, reason, _):
                    self._history.barrier(clock=clock, reason=reason)
                case JoinRecord(_, vw, incarnation, clock):
                    self._history.join(vw=vw, incarnation=incarnation, clock=clock)
                case EvictRecord(_, vw, incarnation, clock):
                    self._history.evict(vw=vw, incarnation=incarnation, clock=clock)
                case _:
                    pass
