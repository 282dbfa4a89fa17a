"""Shell of the clock shard: a lock around the decision log, its history lines, and a condition variable.

Followers (the other shards, the stages) read the records in order from `records_from`; `condition` is notified of
every new record, `stage_condition` of those that a stage acts on. History is written before a record becomes readable.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from hetpipe import failpoints
from hetpipe.clock import SYSTEM_CLOCK
from hetpipe.clock import Clock as TimeSource
from hetpipe.decide.elastic.script import absent_after_rewind, lineup_decisions, member_decisions
from hetpipe.decide.sync.decision_log import FROM_NEWEST_SEGMENT, DecisionLog, LogConfig
from hetpipe.decide.sync.log_view import only_commits
from hetpipe.decide.sync.records import (
    BarrierRecord,
    CommitRecord,
    EvictRecord,
    HandoverRecord,
    PlanRecord,
    PublishRecord,
    Record,
    SegmentRecord,
)
from hetpipe.errors import HetpipeError, ProtocolViolation, StaleTerm, StateLost
from hetpipe.observe.history import HistoryWriter
from hetpipe.server.decisions_file import append_decision, append_decisions
from hetpipe.server.shard.buffer_exchange import Attendance
from hetpipe.server.shard.decision_events import (
    Acknowledged,
    Admitted,
    BarrierRequested,
    DecisionEvent,
    Drained,
    Evicted,
    Held,
    Initialized,
    Joined,
    Moved,
    RunKept,
    Staged,
    StagePrepared,
    StateWritten,
)
from hetpipe.server.shard.journal import Address, ClockState, Journal, RecoveredDecisions
from hetpipe.values.decisions import BarrierDecision, DecisionMoment, FreezeDecision, MoveDecision
from hetpipe.values.ids import AgentId, Clock, Incarnation, ShardIndex, StageIndex, VirtualWorkerIndex, Wave
from hetpipe.values.members import MemberInfo
from hetpipe.values.requests import Meeting, Requester
from hetpipe.values.rewinds import first_folder
from hetpipe.values.run import ClockSnapshot
from hetpipe.values.run_document import RunDescription, RunDocument
from hetpipe.values.shard_config import ShardConfig
from hetpipe.values.sync import MemberChange, PlanMove, Progress


class ClockShard:
    """One job's decision log as a service. Thread-safe."""

    def __init__(
        self,
        config: ShardConfig,
        history: HistoryWriter,
        journal: Journal | None = None,
        old: RecoveredDecisions | None = None,
        *,
        newest_checkpoint: Callable[[], Clock] | None = None,
        clock: TimeSource = SYSTEM_CLOCK,
    ) -> None:
        """Start a decision log, or restore that of an earlier process.

        Args:
            config: configuration of the job.
            history: history of this process.
            journal: persists events; None: no persistence.
            old: state of an earlier process.
            newest_checkpoint: clock of the newest complete checkpoint; None: the start of the run.
            clock: the time of decisions.

        Raises:
            StateLost: `old` is inconsistent.
        """
        self._journal = journal
        self._job_id = config.job_id
        self._term = config.term
        #: None: a job without a folder, in tests of the log alone; its decisions are in the history.
        self._run_dir = Path(config.run_dir) if config.run_dir else None
        self._is_rewind = first_folder(config.run_dir) != config.run_dir
        self._clock = clock
        self._history = history
        lock = threading.RLock()
        #: Notified at every new record. Guards the log.
        self.condition = threading.Condition(lock)
        #: The same lock; notified at every record except commits, which far outnumber the others.
        self.stage_condition = threading.Condition(lock)
        #: Shards with a failing disk.
        self._applied: frozenset[ShardIndex] = frozenset()
        self._newest_checkpoint = newest_checkpoint or (lambda: config.progress.clock)
        #: The latest events of each stage that are no-ops when repeated, as waiting stages do.
        self._known: dict[tuple[type[DecisionEvent], VirtualWorkerIndex, StageIndex], DecisionEvent] = {}
        #: Addresses on which stages listen for others.
        self._addresses: dict[tuple[VirtualWorkerIndex, StageIndex], Address] = {}
        #: The current clocks, and the newest checkpoint if they depend on it; None: they are asked of the log.
        self._clocks: ClockSnapshot | None = None
        self._clocks_at: Clock | None = None
        #: The run document for a coordinator without any state of the job.
        self._run = config.run
        if old is None or old.state is None:
            self._log = DecisionLog(log_config(config))
            self._remember(self._log.records)
        else:
            self._log = DecisionLog.restore(log_config(config), old.state.log)
            self._addresses = {(address.vw, address.stage): address for address in old.state.addresses}
            self._run = old.state.run or config.run
        for event in () if old is None else old.events:
            self._play(event)

    def check_requester(self, requester: Requester) -> None:
        """Reject a stage of another job, term, incarnation or plan.

        Raises:
            StaleTerm, StaleIncarnation, ProtocolViolation: as named.
        """
        with self.condition:
            self._check(requester)
            self._log.check_stage(requester.vw, requester.incarnation, requester.stage)

    def check_follower(self, requester: Requester) -> None:
        """Reject a follower whose incarnation is over.

        Raises:
            StaleTerm, StaleIncarnation, ProtocolViolation: as named.
        """
        with self.condition:
            self._check(requester)
            self._log.check_follower(requester.vw, requester.incarnation, requester.stage)

    # -- events ------------------------------------------------------------------------------------------------------

    def join(
        self, requester: Requester, link_address: str = "", replicas_address: str = "", *, ready: bool = True
    ) -> Meeting:
        """Join a stage; returns the addresses of its neighbours (`wire.calls.JoinRequest`)."""
        vw, life, stage = requester.vw, requester.incarnation, requester.stage
        with self.condition:
            self._check(requester)
            self._decide(Joined(vw, life, stage, link_address, replicas_address, ready))
            previous = self._addresses.get((vw, StageIndex(stage - 1)))
            first = min(self._log.members, default=VirtualWorkerIndex(0))
            replica = self._addresses.get((first, stage))
            return Meeting(
                previous.link if previous is not None and previous.incarnation == life else "",
                "" if replica is None else replica.replicas,
                self._log.present(vw),
                self._log.makes_weights(vw),
            )

    def initialized(self, requester: Requester) -> None:
        """Record that a stage has staged its part of the initial weights."""
        with self.condition:
            self._check(requester)
            self._decide(Initialized(requester.vw, requester.incarnation, requester.stage))

    def staged(
        self,
        requester: Requester,
        wave: Wave,
        blocks: tuple[tuple[int, ...], ...] | None,
        *,
        segment: Clock,
        squares: Mapping[int, float] | None = None,
    ) -> None:
        """Record that a stage has staged its part of a wave (`wire.calls.ReportStagedRequest`)."""
        with self.condition:
            self._check(requester)
            vw, life, stage = requester.vw, requester.incarnation, requester.stage
            self._decide(Staged(vw, life, wave, stage, blocks, segment, dict(squares or {})))

    def hold(self, requester: Requester, switch: int) -> tuple[Clock, Clock, int]:
        """The clock for the switch point, the next barrier, and the moves announced in this segment.

        Raises:
            ClockNotPublished: not yet.
        """
        vw, life = requester.vw, requester.incarnation
        with self.condition:
            self._check(requester)
            self._log.check_stage(vw, life, requester.stage)
            before = self._last_switch(vw)
            clock = self._log.hold(vw, life, switch)
            if self._last_switch(vw) != before:
                self._keep(Held(vw, life, switch))
            return clock, self._log.segment.end, self._log.announced.get(vw, 0)

    def prepared(self, requester: Requester, index: int, *, can: bool) -> None:
        """Record that a stage is prepared for a move of layers without a barrier, or cannot be."""
        with self.condition:
            self._check(requester)
            self._decide(StagePrepared(requester.vw, requester.incarnation, requester.stage, index, can))

    def request_barrier(self, reason: str) -> Clock:
        """Set an unplanned barrier; returns its clock."""
        with self.condition:
            self._decide(BarrierRequested(reason))
            return self._log.segment.end

    def evict(self, vw: VirtualWorkerIndex, incarnation: Incarnation) -> None:
        """Evict an incarnation of a virtual worker."""
        with self.condition:
            self._decide(Evicted(vw, incarnation))

    def state_written(self, requester: Requester, clock: Clock, *, whole: bool) -> None:
        """Record that a stage has written its part of the checkpoint at `clock`, or could not; matters as it leaves."""
        with self.condition:
            if self._log.has_left(requester.vw, requester.incarnation):
                self._decide(StateWritten(requester.vw, requester.incarnation, requester.stage, clock, whole))

    def drain(self, vw: VirtualWorkerIndex, incarnation: Incarnation) -> None:
        """Let a virtual worker leave at the next barrier."""
        with self.condition:
            self._decide(Drained(vw, incarnation))

    def move(self, vw: VirtualWorkerIndex, move: PlanMove) -> None:
        """Move layers between the stages of a virtual worker (`DecisionLog.move`)."""
        with self.condition:
            self._decide(Moved(vw, move))

    def admit(
        self,
        vw: VirtualWorkerIndex,
        incarnation: Incarnation,
        num_stages: int,
        minibatches_per_wave: int | None = None,
        bounds: tuple[int, ...] = (),
    ) -> None:
        """Admit a new incarnation of a virtual worker (`DecisionLog.admit`)."""
        with self.condition:
            self._decide(
                Admitted(vw, incarnation, num_stages, minibatches_per_wave=minibatches_per_wave, bounds=bounds)
            )

    def keep_run(self, run: RunDocument) -> None:
        """Store the run document, for a coordinator that has no state of the job."""
        with self.condition:
            if run != self._run:
                self._decide(RunKept(run))

    def acknowledge(
        self, shard: ShardIndex, num_records: int, durable: int | None = None, *, applied: bool = False
    ) -> None:
        """Record that a shard has executed records (`wire.calls.AcknowledgeRequest`)."""
        with self.condition:
            self._decide(Acknowledged(shard, num_records, durable))
            self._applied = self._applied | {shard} if applied else self._applied - {shard}

    # -- answers -----------------------------------------------------------------------------------------------------

    def records_from(self, start: int, *, jumps: bool = False) -> Sequence[Record]:
        """Available records of `DecisionLog.records_from`; no record is missed between calls while `condition` is held.

        Raises:
            ProtocolViolation: they were truncated, or are not written yet.
        """
        with self.condition:
            return tuple(self._log.records_from(start, jumps=jumps))

    @property
    def awaits_shards(self) -> bool:
        """Whether the next clock may lack nothing but acknowledgements (`DecisionLog.awaits_shards`)."""
        with self.condition:
            return self._log.awaits_shards

    @property
    def num_records(self) -> int:
        """Number of records in the log."""
        with self.condition:
            return self._log.num_records

    @property
    def num_members(self) -> int:
        """Number of virtual workers that count."""
        with self.condition:
            return len(self._log.members)

    def snapshot(self) -> ClockSnapshot:
        """Current clocks, the same object as long as none changes.

        While the disk of a shard fails, only waves in a checkpoint are durable.
        """
        with self.condition:
            checkpoint = self._newest_checkpoint() if self._applied else None
            if self._clocks is None or self._clocks_at != checkpoint:
                found = self._log.snapshot()
                durable = found.staged
                if checkpoint is not None:
                    durable = {vw: min(clock, checkpoint) for vw, clock in durable.items()}
                self._clocks = replace(found, durable=durable, applied=tuple(sorted(self._applied)))
                self._clocks_at = checkpoint
            return self._clocks

    def describe(self) -> RunDescription:
        """The run document and the current incarnations.

        Raises:
            ProtocolViolation: no coordinator has stored a run document.
        """
        with self.condition:
            if self._run is None:
                raise ProtocolViolation(f"no coordinator has stored a run document for job {self._job_id}")
            log = self._log
            return RunDescription(
                self._term, self._run, log.newest_lives(), self.snapshot(), log.asked, is_over=log.finished
            )

    @property
    def shards(self) -> tuple[MemberInfo, ...]:
        """Parameter servers of the job, by index; empty without a run document."""
        with self.condition:
            return () if self._run is None else self._run.shards

    @property
    def agents(self) -> frozenset[AgentId]:
        """The agents whose devices the job has; empty without a run document."""
        with self.condition:
            return frozenset() if self._run is None else frozenset(info.agent for info in self._run.agents)

    def attendance(self) -> Attendance:
        """Virtual workers at the newest passed barrier.

        Raises:
            ProtocolViolation: the run has not begun.
        """
        with self.condition:
            segment = self._log.newest_segment
            if segment is None:
                raise ProtocolViolation("no barrier is passed yet: the run has not begun")
            members, leavers = (
                {vw: member.incarnation for vw, member in found.items()}
                for found in (self._log.members, self._log.leavers)
            )
            return Attendance(segment, members, leavers)

    def progress(self) -> Progress:
        """Progress at the start of the current segment."""
        with self.condition:
            return self._log.progress

    def passed(self) -> tuple[SegmentRecord | None, Progress]:
        """Clock of the newest passed barrier, if any, and the progress at it."""
        with self.condition:
            newest = next(iter(self._log.records_from(FROM_NEWEST_SEGMENT)), None)
            return newest if isinstance(newest, SegmentRecord) else None, self._log.progress

    def pending_publish_reason(self) -> str:
        """Members that keep the published clock from advancing."""
        with self.condition:
            return self._log.pending_publish_reason()

    # -- inside ------------------------------------------------------------------------------------------------------

    def _check(self, requester: Requester) -> None:
        if requester.job_id != self._job_id or requester.term != self._term:
            raise StaleTerm(
                f"request for job {requester.job_id} term {requester.term}; "
                f"this shard serves job {self._job_id} term {self._term}"
            )

    def _last_switch(self, vw: VirtualWorkerIndex) -> int | None:
        return self._log.members[vw].last_switch if vw in self._log.members else None

    def _decide(self, event: DecisionEvent) -> None:
        """Apply an event under `condition`: journal it, write its history, notify followers."""
        frozen = self._log.progress.frozen
        self._clocks = None
        records = event.apply(self._log)
        moments = _moments(records) | ({"freezing"} if self._log.progress.frozen > frozen else set())
        _reach_before_record(moments)
        self._note(event)
        self._keep(event)
        self._remember(records)
        _reach_recorded(moments)
        if records:
            self.condition.notify_all()
            if not only_commits(records):
                self.stage_condition.notify_all()
        self._consider_snapshot(at_barrier=any(isinstance(record, SegmentRecord) for record in records))

    def _play(self, event: DecisionEvent) -> None:
        """Replay an event of an earlier process."""
        try:
            records = event.apply(self._log)
        except HetpipeError as error:
            raise StateLost(f"the persisted decision log of job {self._job_id} is inconsistent: {error}") from error
        self._note(event)
        self._remember(records)

    def _keep(self, event: DecisionEvent) -> None:
        if self._journal is None:
            return
        if isinstance(event, Joined | Initialized):
            key = (type(event), event.vw, event.stage)
            if self._known.get(key) == event:
                return
            self._known[key] = event
        self._journal.append(event)

    def _consider_snapshot(self, *, at_barrier: bool) -> None:
        if self._journal is not None and self._journal.wants_snapshot(at_barrier=at_barrier):
            state = ClockState(self._log.state(), tuple(self._addresses.values()), self._run)
            self._journal.snapshot(state, num_records=self._log.num_records, history=self._history.position())

    def _note(self, event: DecisionEvent) -> None:
        """Update the state beside the log by an event."""
        if isinstance(event, RunKept):
            self._run = event.run
        if isinstance(event, Joined) and (event.link_address or event.replicas_address):
            where = Address(event.vw, event.incarnation, event.stage, event.link_address, event.replicas_address)
            self._addresses[event.vw, event.stage] = where

    def _remember(self, records: Sequence[Record]) -> None:
        for record in records:
            match record:
                case CommitRecord(_, vw, incarnation, wave, samples):
                    self._history.commit(vw=vw, incarnation=incarnation, wave=wave, samples=samples)
                    epoch, indices = self._log.take_used(record)
                    if indices:
                        self._history.used(vw=vw, wave=wave, epoch=epoch, indices=indices)
                    decided = self._log.decided.get(vw)
                    if decided is not None and decided.p is not None and decided.clock == Clock(wave):
                        self._file_move(vw)
                case PublishRecord(_, clock, _):
                    self._history.publish(clock=clock)
                case BarrierRecord(_, clock, reason, _):
                    self._history.barrier(clock=clock, reason=reason)
                case SegmentRecord():
                    self._log_members(record)
                case PlanRecord(_, vw, incarnation, clock, version, bounds):
                    self._history.plan(
                        vw=vw, incarnation=incarnation, clock=clock, version=version, bounds=bounds, live=True
                    )
                case EvictRecord() | HandoverRecord():
                    self._log_end(record)
                case _:
                    pass

    def _log_end(self, record: EvictRecord | HandoverRecord) -> None:
        vw, incarnation, clock = record.vw, record.incarnation, record.clock
        if isinstance(record, EvictRecord):
            self._history.evict(vw=vw, incarnation=incarnation, clock=clock)
        else:
            self._history.handover(vw=vw, incarnation=incarnation, clock=clock, whole=record.whole)

    def _decided_by_norms(self, record: SegmentRecord) -> FreezeDecision | BarrierDecision | None:
        """What norms of gradients have decided at a barrier, or that there is one because of them; None: neither."""
        moment, wall, before = DecisionMoment(record.start), self._clock.wall(), self._log.frozen_before
        if self._log.deciding and record.frozen > before:
            reason = f"norms of gradients; {before} layers were frozen before"
            return FreezeDecision(moment, "freeze", record.frozen, "norms", reason, wall)
        if self._log.is_for_norms(record):
            reason = f"norms of gradients decide here, and {record.frozen} layers stay frozen"
            return BarrierDecision(moment, "barrier", "norms", reason, wall)
        return None

    def _file_decisions(self, record: SegmentRecord) -> None:
        """File what norms have decided at a barrier, and who leaves or comes back there; moves are filed one by one."""
        by_norms = self._decided_by_norms(record)
        if by_norms is not None:
            append_decision(self._run_dir, by_norms)
        if record.left or any(member.joined for member in record.members):
            wall, clock, replaced = self._clock.wall(), record.start, self._log.new_lineup
            decided = list(self._log.config.member_changes)
            if replaced is not None:
                left = set(replaced[0].members).difference(replaced[1].members)
                decided += [MemberChange(clock, vw, joins=False) for vw in left]
                append_decisions(self._run_dir, lambda _: lineup_decisions(record, *replaced, wall=wall))
            initial = self._log.config.membership.num_stages
            append_decisions(
                self._run_dir,
                lambda before: member_decisions(record, decided, before, initial=initial, wall=wall),
            )
        if self._is_rewind and record.start == self._log.config.progress.clock:
            absent = absent_after_rewind(record, self._log.expected_at_start, wall=self._clock.wall())
            append_decisions(self._run_dir, lambda _: absent)

    def _log_members(self, record: SegmentRecord) -> None:
        for vw, squares in self._log.deciding.items():
            self._history.norms(clock=record.start, vw=vw, layers=list(squares), squares=list(squares.values()))
        self._file_decisions(record)
        if record.frozen:
            self._history.freeze(clock=record.start, frozen=record.frozen, layers=record.frozen_layers)
        if record.inactive or record.fresh or self._log.config.activations:
            self._history.activate(clock=record.start, inactive=record.inactive, fresh=record.fresh)
        for member in record.left:
            self._history.leave(vw=member.vw, incarnation=member.incarnation, clock=record.start)
        for member in record.members:
            if member.origin is not None:
                assert member.minibatches_per_wave is not None, "it is known where minibatches are counted from"
                self._history.waves(
                    vw=member.vw,
                    clock=record.start,
                    minibatches_per_wave=member.minibatches_per_wave,
                    origin=member.origin,
                )
            if member.joined:
                self._history.join(
                    vw=member.vw,
                    incarnation=member.incarnation,
                    clock=record.start,
                    num_stages=member.num_stages,
                    minibatches_per_wave=member.minibatches_per_wave,
                )
            if member.bounds and (member.joined or member.moved):
                self._history.plan(
                    vw=member.vw,
                    incarnation=member.incarnation,
                    clock=record.start,
                    version=member.version,
                    bounds=member.bounds,
                )
            decided = self._log.decided.get(member.vw)
            if decided is not None and member.moved and (decided.clock == record.start or decided.p is not None):
                self._file_move(member.vw)

    def _file_move(self, vw: VirtualWorkerIndex) -> None:
        """File the newest move of a virtual worker that has taken effect."""
        moved = MoveDecision.of(vw, self._log.decided[vw], wall=self._clock.wall())
        append_decision(self._run_dir, moved)


def log_config(config: ShardConfig) -> LogConfig:
    """Configuration of a job's decision log."""
    return LogConfig(
        term=config.term,
        num_shards=config.num_shards,
        membership=config.membership,
        sync=config.sync,
        data=config.data,
        checkpoint_every_waves=config.checkpoint_every_waves,
        progress=config.progress,
        plan_changes=config.plan_changes,
        wave_changes=config.wave_changes,
        member_changes=config.member_changes,
        freezing=config.freezing,
        activations=config.activations,
    )


def _moments(records: Sequence[Record]) -> set[str]:
    """The groups of failpoints that these records are about, apart from freezing."""
    found = set()
    if any(isinstance(record, PublishRecord) for record in records):
        found.add("commit")
    if any(isinstance(one, PlanRecord) or (isinstance(one, SegmentRecord) and one.has_moves) for one in records):
        found.add("repartition")
    if any(isinstance(record, HandoverRecord) for record in records):
        found.add("takeover")
    return found


def _reach_before_record(moments: Collection[str]) -> None:
    if "commit" in moments:
        failpoints.reach("commit.before_publish")
    if "repartition" in moments:
        failpoints.reach("repartition.before_record")
    if "freezing" in moments:
        failpoints.reach("freezing.before_record")
    if "takeover" in moments:
        failpoints.reach("takeover.before_record")


def _reach_recorded(moments: Collection[str]) -> None:
    if "commit" in moments:
        failpoints.reach("commit.after_publish")
    if "repartition" in moments:
        failpoints.reach("repartition.recorded")
    if "freezing" in moments:
        failpoints.reach("freezing.recorded")
    if "takeover" in moments:
        failpoints.reach("takeover.recorded")
