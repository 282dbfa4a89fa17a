"""The world around a decision log, in plain Python: shards with lists for tensors, workers that keep to the gate.

A shard's weights are the list of what was added to them, in order: (vw, wave). A virtual worker knows a prefix of the
log, starts and finishes minibatches, and pushes and reports its waves stage by stage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hetpipe.decide.sync.decision_log import DecisionLog
from hetpipe.decide.sync.instructions import Apply, Close, Drop, Free, Initialize, Instruction, StageKey, stage_key
from hetpipe.decide.sync.records import (
    BarrierRecord,
    PlanRecord,
    PrepareRecord,
    PublishRecord,
    Record,
    SegmentRecord,
)
from hetpipe.decide.sync.shard_state import Admission, ShardState
from hetpipe.errors import ClockNotPublished, StaleIncarnation, WaveOutOfOrder
from hetpipe.values.ids import Clock, Incarnation, StageIndex, VirtualWorkerIndex, Wave
from hetpipe.values.requests import PushHeader
from tests.decide.sync.oracle import Blocks, Oracle, required_clock, seen_through
from tests.decide.sync.scenario import JOB, LIFE, TERM, Scenario, push_header


class ModelShard:
    """`ShardState` with lists for tensors."""

    def __init__(self, index: int, scenario: Scenario) -> None:
        self.index = index
        self.slices = scenario.slices_of_shard(index)
        self.state = ShardState(
            job_id=JOB,
            term=TERM,
            slices=self.slices,
            founders=scenario.members,
            start=Clock(scenario.start),
            staleness=scenario.d,
        )
        #: key → slice → how often its bytes were taken.
        self.staging: dict[StageKey, Counter[int]] = {}
        self.versions: dict[int, list[tuple[int, int]]] = {}
        self.building: list[tuple[int, int]] = []
        self.applied: Counter[tuple[int, int]] = Counter()
        self.counts_of_members: dict[int, set[int]] = {}
        self.freed: set[int] = set()
        #: The members of which it has read.
        self.lives: set[tuple[int, int]] = set()

    def knows(self, worker: Worker) -> bool:
        """Whether it has read that a worker joined."""
        return (worker.vw, worker.incarnation) in self.lives

    def push(self, header: PushHeader, *, arrives: bool = True) -> Admission:
        """Judge a push and, if its bytes all arrive, stage it."""
        verdict, indices = self.state.admit(header)
        if verdict is Admission.ACCEPT and arrives:
            self.state.staged_by(header, indices)
            self.staging.setdefault(stage_key(header), Counter()).update(indices)
        return verdict

    def follow(self, record: Record) -> None:
        """Carry out one record."""
        if isinstance(record, SegmentRecord):
            self.lives |= {(member.vw, member.incarnation) for member in record.members}
        for instruction in self.state.follow(record):
            self._carry_out(instruction)

    def _carry_out(self, instruction: Instruction) -> None:
        match instruction:
            case Initialize(clock, key):
                self._take(key)
                self.versions[clock] = []
            case Apply(clock, (vw, _, wave) as key, is_empty, num_members):
                assert wave is not None
                assert clock == max(self.versions) + 1
                self.applied[vw, wave] += 1
                self.counts_of_members.setdefault(wave, set()).add(num_members)
                if is_empty:
                    assert key not in self.staging, f"{key} is called empty, but bytes came for it"
                else:
                    self._take(key)
                    self.building.append((vw, wave))
            case Close(clock):
                assert clock not in self.versions
                self.versions[clock] = self.versions[clock - 1] + self.building
                self.building = []
            case Drop(key):
                del self.staging[key]
            case Free(clock):
                del self.versions[clock]
                self.freed.add(clock)

    def _take(self, key: StageKey) -> None:
        found = self.staging.pop(key, Counter())
        assert found == Counter(range(len(self.slices))), f"{key} has the bytes of slices {found} on shard {self.index}"


class Worker:
    """A virtual worker that keeps to `wsp.md`, as far as it has read the log."""

    def __init__(self, vw: int, scenario: Scenario, incarnation: Incarnation = LIFE, known: int = 0) -> None:
        self.vw = vw
        self.incarnation = incarnation
        self.scenario = scenario
        self.num_stages = scenario.num_stages[vw]
        self.known = known
        #: The clock at which it became a member; None before.
        self.joined_at: int | None = None
        self.published = scenario.start - 1
        self.barrier = scenario.start
        #: Where the segment it works in starts; None while it waits for one.
        self.segment: int | None = None
        self._passed: int | None = None
        self.blocks: Blocks = ()
        #: Last minibatch started, and completed on every stage.
        self.started = self.completed = 0
        #: The clock in use, and switch point → the clock chosen there, while some stage may still have to pull it.
        self.clock = scenario.start
        self.chosen: dict[int, int] = {}
        #: Per stage: the wave it pushes next, and the shards that have it.
        self.next_wave = [scenario.start] * self.num_stages
        self.pushed: list[set[int]] = [set() for _ in range(self.num_stages)]
        #: Waves with samples that some stage has reported.
        self.reported: list[set[int]] = [set() for _ in range(self.num_stages)]
        self.evicted = False
        #: The cut with which its segment begins, what is announced in it, and what it is asked to prepare, as far as
        #: it has read; and p → the plan version by which its first stage has computed p.
        self.bounds: tuple[int, ...] = ()
        self.version = 0
        self.announced: list[PlanRecord] = []
        self.to_prepare: PrepareRecord | None = None
        self.versions: dict[int, int] = {}

    # -- reading the log ---------------------------------------------------------------------------------------------

    def read(self, records: Sequence[Record], divisions: dict[int, dict[int, Blocks]]) -> None:
        """Take in the next records."""
        for record in records:
            match record:
                case BarrierRecord(_, clock, _, _):
                    self.barrier = clock
                    self._passed_into(divisions)
                case PublishRecord(_, clock, _):
                    self.published = clock
                case PlanRecord() if (record.vw, record.incarnation) == (self.vw, self.incarnation):
                    self.announced.append(record)
                case PrepareRecord() if (record.vw, record.incarnation) == (self.vw, self.incarnation):
                    self.to_prepare = record
                case SegmentRecord() if self._is_in(record):
                    own = next(member for member in record.members if member.vw == self.vw)
                    self.bounds, self.version = own.bounds, own.version
                    self.announced, self.to_prepare = [], None
                    self._passed = self.published = record.start
                    self.segment = None
                    if self.joined_at is None:
                        self.joined_at = record.start
                    self._passed_into(divisions)
                case _:
                    pass
        self.known += len(records)

    def _is_in(self, record: SegmentRecord) -> bool:
        return any((member.vw, member.incarnation) == (self.vw, self.incarnation) for member in record.members)

    def _passed_into(self, divisions: dict[int, dict[int, Blocks]]) -> None:
        """Begin the next segment, once it is known where it ends."""
        if self._passed is None or self.barrier <= self._passed or self._passed not in divisions:
            return
        self.segment, self._passed = self._passed, None
        self.blocks = divisions[self.segment].get(self.vw, ())
        self.started = self.completed = self.segment * self.scenario.n
        self.clock = self.segment
        self.chosen = {}
        self.next_wave = [self.segment] * self.num_stages
        self.pushed = [set() for _ in range(self.num_stages)]

    # -- computing ---------------------------------------------------------------------------------------------------

    def start(self, log: DecisionLog) -> bool:
        """Start the next minibatch, if the gate allows it."""
        n = self.scenario.n
        p = self.started + 1
        if self.segment is None or p > min(self.segment * n + len(self.blocks), self.barrier * n):
            return False
        seen = max(self._seen_through(p), self.segment * n)
        if max(p - n, seen) > self.completed:
            return False
        required = self._required(p)
        clock = self.clock
        switches = self._switches(p) and seen >= (self.segment + 1) * n
        if switches:
            if self.scenario.deterministic:
                clock = self._determined(p)
                if self.published < clock:
                    return False
            else:
                held = self._hold(log, p, required)
                if held is None:
                    return False
                clock = held
        assert clock >= required, f"minibatch {p} may start with clock {clock}, it needs {required}"
        assert clock * n <= seen, f"clock {clock} holds updates that {p} must not see"
        if switches and clock != self.clock:  # of the clock in use every stage has the weights
            self.chosen[p] = clock
        self.started, self.clock = p, clock
        begun = [record.version for record in self.announced if record.clock * n < p]
        self.versions[p] = max([self.version, *begun])
        return True

    def _seen_through(self, p: int) -> int:
        return seen_through(p, n=self.scenario.n, weights=self.scenario.weights)

    def _required(self, p: int) -> int:
        assert self.segment is not None
        scenario = self.scenario
        return max(self.segment, required_clock(p, n=scenario.n, d=scenario.d, weights=scenario.weights))

    def _determined(self, p: int) -> int:
        """The clock of a deterministic run at switch point p: with `pull: required` the old one, or the newest."""
        assert self.segment is not None
        required = self._required(p)
        if self.scenario.pull == "every_wave":
            return required
        return self.clock if self.clock >= required else max(self.segment, self._seen_through(p) // self.scenario.n)

    def _switches(self, p: int) -> bool:
        """Whether another clock may come into use at p: where it sees a wave more than its predecessor."""
        n = self.scenario.n
        return self._seen_through(p) // n > self._seen_through(p - 1) // n

    def _hold(self, log: DecisionLog, p: int, required: int) -> int | None:
        """The clock that the log chooses for p."""
        vw = VirtualWorkerIndex(self.vw)
        # Switch points have the number of waves that are ended with p, or before it.
        switch = (p if self.scenario.weights == "wave" else p - 1) // self.scenario.n
        try:
            clock = log.hold(vw, self.incarnation, switch)
        except ClockNotPublished:
            knows_the_barrier = self.segment == log.segment.start
            assert log.published < required or not knows_the_barrier, "who knows the barrier was refused"
            return None
        except StaleIncarnation:
            assert self.evicted, "a member's question was refused"
            return None
        assert log.published >= required
        if self.scenario.pull == "required":
            assert clock == self.clock or self.clock < required, "a clock that would do was replaced"
        assert clock == log.hold(vw, self.incarnation, switch), "the answer to a repeated question changed"
        if log.announced.get(vw, 0) > len(self.announced):
            return None
        self.barrier = min(self.barrier, log.segment.end)  # the answer tells of barriers the log view does not know
        return clock if p <= self.barrier * self.scenario.n else None

    def finish(self) -> bool:
        """Complete the oldest minibatch under way."""
        if self.completed == self.started:
            return False
        self.completed += 1
        self.chosen.pop(self.completed, None)
        return True

    # -- waves -------------------------------------------------------------------------------------------------------

    def closed(self, wave: int) -> bool:
        """Whether everything of `wave` is computed."""
        if self.segment is None or wave >= self.barrier:
            return False
        last = min(self.segment * self.scenario.n + len(self.blocks), self.barrier * self.scenario.n)
        return self.completed >= min((wave + 1) * self.scenario.n, last)

    def blocks_of(self, wave: int) -> Blocks:
        """The minibatches of a wave."""
        assert self.segment is not None
        first = (wave - self.segment) * self.scenario.n
        return self.blocks[first : first + self.scenario.n]

    def push_next(self, stage: int, shards: Sequence[ModelShard]) -> bool:
        """Push the next wave of a stage to one more shard."""
        wave = self.next_wave[stage]
        if not self.closed(wave) or not self.blocks_of(wave):
            return False
        for shard in shards:
            if shard.index not in self.pushed[stage] and self.scenario.slices_of_stage(self.vw, stage, shard.index):
                try:
                    verdict = shard.push(
                        push_header(self.scenario, self.vw, stage, shard.index, wave, self.incarnation)
                    )
                except StaleIncarnation:
                    assert self.evicted, "a member's push was refused"
                    return False
                except ClockNotPublished:
                    waits = self.scenario.d is None or not shard.knows(self)
                    assert waits, "with a bound, the gate keeps a member near enough"
                    return False
                assert verdict is Admission.ACCEPT
                self.pushed[stage].add(shard.index)
                return True
        return False

    def is_pushed(self, stage: int, shards: Sequence[ModelShard]) -> bool:
        """Whether the next wave of a stage is everywhere and may be reported."""
        wave = self.next_wave[stage]
        if not self.closed(wave):
            return False
        wanted = {s.index for s in shards if self.scenario.slices_of_stage(self.vw, stage, s.index)}
        return not self.blocks_of(wave) or self.pushed[stage] == wanted

    def report(self, stage: int, log: DecisionLog, oracle: Oracle) -> bool:
        """Report the next wave of a stage, which is staged on every shard."""
        wave = self.next_wave[stage]
        blocks = self.blocks_of(wave) if stage == 0 else None
        assert self.segment is not None
        vw = VirtualWorkerIndex(self.vw)
        try:
            log.staged(vw, self.incarnation, Wave(wave), StageIndex(stage), blocks, segment=Clock(self.segment))
        except StaleIncarnation:
            assert self.evicted, "a member's report was refused"
            return False
        except WaveOutOfOrder:
            assert not self.blocks_of(wave), f"wave {wave} of {self.vw} was refused with samples in it"
            # A barrier that it has yet to read of drops the wave, and may be passed by now.
            assert wave >= (log.segment.end if self.segment == log.segment.start else log.segment.start)
            return False
        oracle.report(self.vw, wave, stage, blocks)
        if self.blocks_of(wave):
            self.reported[stage].add(wave)
        self.next_wave[stage] += 1
        self.pushed[stage] = set()
        return True

    def may_pull(self, unread: Sequence[Record]) -> set[int]:
        """Clocks that a stage may still ask for: of switch points not complete everywhere, and of the next one.

        `unread`: records that it has yet to read. It reads them in order, so a barrier that was set before a clock was
        published keeps it from asking for that.
        """
        if self.segment is None:
            return {self._passed} if self._passed is not None else set()
        wanted = set(self.chosen.values())
        if min(self.next_wave) == self.segment:
            wanted.add(self.segment)
        if self.scenario.deterministic:
            n = self.scenario.n
            last = min(self.segment * n + len(self.blocks), self.barrier * n)
            following = next((p for p in range(self.started + 1, last + 1) if self._switches(p)), None)
            if following is not None and following <= n * self._barrier_at(self._determined(following), unread):
                wanted.add(self._determined(following))
        return wanted

    def _barrier_at(self, clock: int, unread: Sequence[Record]) -> int:
        """The barrier that it knows when it reads, or read, that `clock` is published."""
        barrier = self.barrier
        for record in unread if clock > self.published else ():
            match record:
                case PublishRecord(clock=published) if published >= clock:
                    break
                case BarrierRecord():
                    barrier = min(barrier, record.clock)
        return barrier
