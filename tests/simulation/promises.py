"""What must hold, whatever happens: P1 to P6 and P9 of `reliability.md`, judged by somebody who sees everything.

Every wave adds a number of its own (a *witness*): a digit in base 4, so that a sum shows which waves are in it, and a
wave that counts twice as a 2.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from hetpipe.decide.sync.records import (
    BarrierRecord,
    CommitRecord,
    EvictRecord,
    InitializeRecord,
    PublishRecord,
    Record,
    SegmentRecord,
    TermRecord,
)
from tests.decide.sync.oracle import required_clock
from tests.simulation.job import Job
from tests.simulation.scheduler import Violation

Life = tuple[int, int]
"""A virtual worker and its incarnation."""


def hold(condition: object, promise: str) -> None:
    """Raise `Violation` unless `condition`."""
    if not condition:
        raise Violation(promise)


class Promises:
    """All that was ever told to anybody, and whether it fits together."""

    def __init__(self, job: Job) -> None:
        scenario = job.scenario
        self.job = job
        #: Every record anybody may have read, in order.
        self.records: list[Record] = []
        self.start = self.published = job.progress.clock - 1
        #: Member → waves committed.
        self.members: dict[Life, int] = {}
        #: Every life that is over.
        self.over: set[Life] = set()
        self.barrier = 0
        self.reasons: tuple[str, ...] = ()
        self.finished = False
        self.epoch = job.progress.epoch
        bits = job.progress.used
        self.used = {i for i in range(scenario.num_samples) if bits[i >> 3] >> (i & 7) & 1}
        self.minibatches = job.progress.minibatches
        #: Member → last minibatch that it has started.
        self.begun: dict[Life, int] = {}
        #: wave → the witness of everybody's part in it.
        self._in_wave: dict[int, int] = defaultdict(int)
        #: w^(start), w^(start + 1), …, as far as somebody has asked.
        self._sums = [0]
        self._most_committed = 0
        self._digits: dict[tuple[int, int, int], int] = {}
        #: Newest clock that each shard has ever completed.
        self.built = [-1] * scenario.num_shards
        #: Reasons of barriers that somebody asked for and that must not be forgotten.
        self.stop_is_asked = False

    # -- witnesses ---------------------------------------------------------------------------------------------------

    def witness(self, vw: int, incarnation: int, wave: int) -> int:
        """What a wave adds to each slice."""
        key = (vw, incarnation, wave)
        return 1 << 2 * self._digits.setdefault(key, len(self._digits))

    def weights(self, clock: int) -> int:
        """What each slice of w^(clock) must be."""
        start = self.job.progress.clock
        while len(self._sums) <= clock - start:
            self._sums.append(self._sums[-1] + self._in_wave.get(start + len(self._sums) - 1, 0))
        return self._sums[clock - start]

    def explain(self, weights: int) -> str:
        """The waves in a sum."""
        counts = {key: weights // 4**digit % 4 for key, digit in self._digits.items()}
        return ", ".join(f"{count} × wave {w} of {vw}.{life}" for (vw, life, w), count in counts.items() if count)

    def is_over(self, vw: int, incarnation: int) -> bool:
        """Whether the log has said that a life of a virtual worker is over, or that it never counted."""
        return (vw, incarnation) in self.over

    # -- the log -----------------------------------------------------------------------------------------------------

    def reveal(self, records: Sequence[Record], used: dict[int, tuple[int, tuple[int, ...]]]) -> None:
        """The clock shard decided `records`; `used` are the epochs and samples of commits."""
        for record in records:
            if record.index < len(self.records):
                told = self.records[record.index]
                hold(told == record, f"record {record.index} was {told} and is now {record}")
                continue
            hold(record.index == len(self.records), f"{record} follows record {len(self.records) - 1}")
            self.records.append(record)
            self._judge(record, used.get(record.index, (0, ())))

    def _judge(self, record: Record, used: tuple[int, tuple[int, ...]]) -> None:
        match record:
            case CommitRecord():
                self._commit(record, used)
            case EvictRecord(_, vw, incarnation, clock):
                hold(self.members.pop((vw, incarnation), None) == clock, f"{record} of no member, or of another clock")
                self.over.add((vw, incarnation))
            case BarrierRecord():
                self._barrier(record)
            case PublishRecord():
                self._publish(record)
            case SegmentRecord():
                self._segment(record)
            case InitializeRecord() | TermRecord():
                pass

    def _commit(self, record: CommitRecord, used: tuple[int, tuple[int, ...]]) -> None:
        life, wave, d = (record.vw, record.incarnation), record.wave, self.job.d
        epoch, samples = used
        hold(self.members.get(life) == wave, f"P1: {record}, but the members have committed {self.members}")
        hold(self.start <= wave < self.barrier, f"{record} outside of the segment {self.start} to {self.barrier}")
        hold(d is None or self.published >= wave - d, f"P4: {record} with only {self.published} published")
        hold(epoch == self.epoch and len(samples) == record.samples, f"{record} with {used} in epoch {self.epoch}")
        hold(not self.used.intersection(samples), f"P9: {record} uses samples again: {samples}")
        self.used.update(samples)
        self.minibatches += -(-len(samples) // self.job.scenario.batch_size)
        self.members[life] = wave + 1
        self._most_committed = max(self._most_committed, wave + 1)
        if samples:
            self._in_wave[wave] += self.witness(record.vw, record.incarnation, wave)
            del self._sums[wave + 1 - self.job.progress.clock :]
        distance = wave + 1 - min(self.members.values())
        hold(d is None or distance <= d + 1, f"P4: {record}: clock distance {distance} with D = {d}")

    def _barrier(self, record: BarrierRecord) -> None:
        clock = record.clock
        hold(clock >= self._most_committed, f"P3: {record} below the committed clock {self._most_committed}")
        for life in self.members:
            begun = self.begun.get(life, 0)
            hold(begun <= clock * self.job.n, f"{record}, but {life} has started minibatch {begun}")
        self.barrier = clock
        self.reasons = tuple(record.reason.split("+"))
        hold(not self.stop_is_asked or "stop" in self.reasons, f"{record} forgets that somebody asked for the end")

    def _publish(self, record: PublishRecord) -> None:
        clock = record.clock
        hold(clock == self.published + 1, f"{record} after {self.published}")
        hold(min(self.members.values(), default=clock) >= clock, f"{record} before {self.members} have committed it")
        hold(min(self.built) >= clock, f"P3: {record}, but the shards have completed {self.built}")
        hold(clock in record.retained, f"{record} frees itself")
        self.published = clock

    def _segment(self, record: SegmentRecord) -> None:
        hold(record.start == self.published, f"{record} at the published clock {self.published}")
        hold(record.start >= self._most_committed, f"P5: {record} below the committed clock {self._most_committed}")
        left: set[Life] = {(m.vw, m.incarnation) for m in record.left}
        before = set(self.members) - left
        self.over |= left
        self.members = {(m.vw, m.incarnation): record.start for m in record.members}
        for member in record.members:
            life = (member.vw, member.incarnation)
            hold(life not in self.over, f"P3: {life} is a member again")
            hold(member.joined != (life in before), f"{record}: has {life} joined?")
        hold(before <= set(self.members), f"{record} lacks some of {before}")
        self.start = record.start
        if len(self.used) == self.job.scenario.num_samples:
            self.epoch, self.used = self.epoch + 1, set()
        self.finished = bool({"end", "stop"} & set(record.reasons))

    # -- what others do ----------------------------------------------------------------------------------------------

    def begin(self, vw: int, incarnation: int, p: int, clock: int) -> None:
        """A virtual worker starts a minibatch with the weights of `clock`."""
        job, life = self.job, (vw, incarnation)
        if life in self.over:
            return  # it does not know yet, and nothing of it will count
        required = max(self.start, required_clock(p, n=job.n, d=job.d, weights=job.weights))
        hold(clock >= required, f"P4: minibatch {p} of {life} starts with clock {clock}, it needs {required}")
        hold(clock <= self.published, f"P4: minibatch {p} of {life} starts with clock {clock}, not yet published")
        hold(p <= self.barrier * job.n, f"minibatch {p} of {life} starts beyond the barrier at {self.barrier}")
        self.begun[life] = p

    def check_weights(self, clock: int, weights: set[int], who: str) -> None:
        """Whether `weights` are those of `clock`, everywhere."""
        wanted = self.weights(clock)
        if weights - {wanted}:
            found = ", or ".join(self.explain(weight) for weight in sorted(weights))
            raise Violation(f"P1: w^({clock}) of {who} holds {found}; it should hold {self.explain(wanted)}")

    def close(self, shard: int, clock: int, weights: set[int]) -> None:
        """A shard has completed a clock, perhaps for the second time."""
        self.built[shard] = max(self.built[shard], clock)
        self.check_weights(clock, weights, f"shard {shard}")

    def check_the_end(self) -> None:
        """P9 at the end of the run."""
        scenario = self.job.scenario
        hold(self.finished, "the run is not over")
        if "stop" in self.reasons:
            return
        if scenario.epochs is not None:
            ended = (self.epoch, self.used) == (scenario.epochs, set())
            hold(ended, f"P9: the run ended with {self.used} of epoch {self.epoch} used")
        else:
            total = scenario.total_minibatches
            hold(self.minibatches == total, f"P9: the run ended with {self.minibatches} minibatches of {total}")
