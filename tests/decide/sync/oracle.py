"""A second opinion on the decision log, written from `wsp.md` with plain dicts and sets.

It does not predict in which order the log decides (that is the log's to choose); it is shown every record and says
whether the record was allowed at that point, and after every event whether one is missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from hetpipe.decide.sync.division import empty_bitmap, with_used
from hetpipe.decide.sync.records import (
    BarrierRecord,
    CommitRecord,
    EvictRecord,
    HandoverRecord,
    InitializeRecord,
    PublishRecord,
    Record,
    SegmentMember,
    SegmentRecord,
    TermRecord,
)
from hetpipe.decide.sync.segment import divide
from hetpipe.values.ids import Clock, Incarnation, VirtualWorkerIndex
from hetpipe.values.sync import Progress
from tests.decide.sync.scenario import LIFE, TERM, Scenario

Blocks = tuple[tuple[int, ...], ...]


def required_clock(p: int, *, n: int, d: int | None, weights: str = "wave") -> int:
    """`wsp.md` §2, from its text, not its closed form: whole waves that hold all updates up to p − (s_global + 1).

    Where a wave makes one update: the waves that its own weights hold, but for the last D of them.
    """
    if d is None:
        return 0
    if weights in ("flush", "double_buffer"):
        return max(0, seen_through(p, n=n, weights=weights) // n - d)
    s_local = n - 1
    s_global = (d + 1) * (s_local + 1) + s_local - 1
    waves = 0
    while waves * n < p - (s_global + 1):
        waves += 1
    return waves


def seen_through(p: int, *, n: int, weights: str) -> int:
    """v(p) of `policies.md`: the last own update that a minibatch sees, from its place in its wave."""
    if weights == "wave":
        return max(0, p - n)
    ended = p - 1
    while ended % n:
        ended -= 1
    return ended if weights == "flush" else max(0, ended - n)


@dataclass(slots=True)
class Member:
    """A virtual worker as the specification sees it."""

    num_stages: int
    committed: int
    joined: set[int] = field(default_factory=set)

    @property
    def is_complete(self) -> bool:
        """Whether all stages are there."""
        return self.joined == set(range(self.num_stages))


class Oracle:
    """Follows the log of one job. Every method raises AssertionError where the log broke a rule."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.members = {vw: Member(count, scenario.start) for vw, count in enumerate(scenario.num_stages)}
        #: Who will be a member from the next barrier on, once all stages are there; and everybody's newest life.
        self.newcomers: dict[int, Member] = {}
        self.lives = dict.fromkeys(self.members, LIFE)
        self.published = scenario.start - 1
        self.initialized: set[int] = set()
        self.has_weights = False
        #: (vw, wave) → stages that reported it; (vw, wave) → its minibatches. Uncommitted waves only.
        self.reports: dict[tuple[int, int], set[int]] = {}
        self.blocks: dict[tuple[int, int], Blocks] = {}
        #: wave → vw → samples in it. Committed waves, for good.
        self.waves: dict[int, dict[int, int]] = {}
        #: The segment under way: where it starts, and what of its epoch is used.
        self.start = scenario.start
        self.used: set[int] = set(scenario.used)
        self.epoch = 0
        self.minibatches = self.samples = len(scenario.used)
        self.barrier = scenario.start
        self.reasons: set[str] = set()
        self.seen = 0
        self.finished = False
        #: What was asked for and has no record yet.
        self.wants_segment: tuple[set[str], int] | None = None
        self.wants_plan = False
        self.asked: list[str] = []
        self.wants_barrier: str | None = None
        self.broken_promises: set[str] = set()
        self.evicting: int | None = None
        #: Start of a segment → who was dealt which minibatches in it.
        self.dealt: dict[int, dict[int, Blocks]] = {}
        #: Samples by epoch, for the final account.
        self.account: dict[int, list[int]] = {}

    # -- events that were accepted -----------------------------------------------------------------------------------

    def report(self, vw: int, wave: int, stage: int, blocks: Blocks | None) -> None:
        """A stage's report was taken."""
        if wave >= self.members[vw].committed:
            self.reports.setdefault((vw, wave), set()).add(stage)
            if blocks is not None:
                self.blocks[vw, wave] = blocks

    def ask_for_barrier(self, reason: str) -> None:
        """Somebody asked for a barrier; that the same was asked before changes nothing."""
        if self.published < self.scenario.start:
            self.asked = [reason]
        elif not self.finished and (
            reason not in self.reasons
            or self.broken_promises & self.reasons
            or not self.members.keys() - {self.evicting}
        ):
            self.wants_barrier = reason
        else:
            self.broken_promises = set()

    def ask_for_eviction(self, vw: int) -> None:
        """A worker is to go. Neither epoch nor run end at this barrier if some of its minibatches are left."""
        if self.published < self.scenario.start:
            if vw == min(self.members):
                self.initialized = set()
            del self.members[vw]
            return
        n, committed = self.scenario.n, self.members[vw].committed
        own = self.dealt.get(self.start, {}).get(vw, ())
        rest = own[(committed - self.start) * n : (self.barrier - self.start) * n]
        self.broken_promises = {"epoch", "end"} if rest else set()
        self.evicting = vw
        self.ask_for_barrier("evict")

    def admit(self, vw: int, incarnation: Incarnation) -> None:
        """A new life of an evicted worker will come."""
        self.newcomers[vw] = Member(self.scenario.num_stages[vw], -1)
        self.lives[vw] = incarnation

    def join(self, vw: int, stage: int) -> None:
        """A stage of a newcomer is there; with the last one it wants a barrier."""
        newcomer = self.newcomers.get(vw)
        if newcomer is None or stage in newcomer.joined:
            return
        newcomer.joined.add(stage)
        if newcomer.is_complete and "join" not in self.reasons and not self.finished:
            self.wants_barrier = "join"

    @property
    def pending(self) -> list[int]:
        """The newcomers that only wait for the next barrier."""
        return [vw for vw, newcomer in self.newcomers.items() if newcomer.is_complete]

    # -- records -----------------------------------------------------------------------------------------------------

    def see(self, record: Record, used: tuple[int, tuple[int, ...]] | None) -> None:
        """Judge the next record. `used` are the epoch and samples that go with a commit."""
        assert record.index == self.seen
        self.seen += 1
        assert not self.finished or isinstance(record, EvictRecord | HandoverRecord | SegmentRecord), (
            f"{record} after the end"
        )
        assert self.wants_segment is None or isinstance(record, SegmentRecord), f"{record} where a segment begins"
        match record:
            case TermRecord():
                assert (record.index, record.term) == (0, TERM)
            case SegmentRecord():
                self._segment(record)
            case InitializeRecord():
                assert not self.has_weights
                assert self.initialized == set(range(self.members[min(self.members)].num_stages))
                assert (record.clock, record.vw) == (self.scenario.start, min(self.members))
                self.has_weights = True
            case CommitRecord():
                assert used is not None
                self._commit(record, used)
            case EvictRecord():
                assert (record.vw, record.incarnation) == (self.evicting, self.lives[record.vw])
                assert record.clock == self.members.pop(record.vw).committed
                self.evicting = None
                for key in [key for key in self.reports if key[0] == record.vw]:
                    del self.reports[key]
                    self.blocks.pop(key, None)
            case BarrierRecord():
                self._barrier(record)
            case PublishRecord():
                self._publish(record)

    def _commit(self, record: CommitRecord, used: tuple[int, tuple[int, ...]]) -> None:
        vw, wave, d = record.vw, record.wave, self.scenario.d
        member = self.members[vw]
        assert record.incarnation == self.lives[vw]
        assert wave == member.committed, f"{record} does not follow wave {member.committed - 1}"
        assert wave < self.barrier, f"{record} beyond the barrier at {self.barrier}"
        assert self.reports.pop((vw, wave)) == set(range(member.num_stages)), f"{record} before all stages reported"
        assert self.published >= self.start, f"{record} before the segment's weights are published"
        assert d is None or self.published >= wave - d, f"{record} with only {self.published} published"
        blocks = self.blocks.pop((vw, wave), ())
        samples = [sample for block in blocks for sample in block]
        assert used == (self.epoch, tuple(samples))
        assert record.samples == len(samples)
        assert not self.used & set(samples), f"{record} uses samples a second time"
        assert len(set(samples)) == len(samples)
        self.used |= set(samples)
        self.account.setdefault(self.epoch, []).extend(samples)
        self.minibatches += len(blocks)
        self.samples += len(samples)
        self.waves.setdefault(wave, {})[vw] = len(samples)
        member.committed = wave + 1
        slowest = min(m.committed for m in self.members.values())
        assert d is None or member.committed - slowest <= d + 1, f"{record}: clock distance above D + 1"

    def _publish(self, record: PublishRecord) -> None:
        clock = record.clock
        assert clock == self.published + 1, f"{record} after {self.published}"
        assert self.has_weights
        joined = all(member.joined == set(range(member.num_stages)) for member in self.members.values())
        assert joined, f"{record} before all have joined"
        assert self.members or self.pending
        assert all(member.committed >= clock for member in self.members.values()), f"{record} before all committed"
        assert clock in record.retained
        assert max(record.retained) == clock
        self.published = clock
        if clock == self.scenario.start:
            self.wants_segment = (set(), 0)
            self.wants_plan = True
        elif clock == self.barrier:
            self.wants_segment = (self.reasons, self.epoch)
            if len(self.used) == self.scenario.num_samples:
                self.epoch += 1
                self.used = set()
            self.start = clock
            self.finished = bool({"end", "stop"} & self.reasons)
            self.wants_plan = not self.finished

    def _segment(self, record: SegmentRecord) -> None:
        assert self.wants_segment is not None, f"{record} where nothing begins"
        reasons, epoch = self.wants_segment
        self.wants_segment = None
        founds = record.start == self.scenario.start
        assert (record.start, set(record.reasons), record.epoch) == (self.published, reasons, epoch)
        joined = [] if self.finished and self.members else self.pending
        for vw in joined:
            self.members[vw] = self.newcomers.pop(vw)
            self.members[vw].committed = record.start
        # Which layers a member has is not its affair.
        assert tuple(replace(member, version=0, bounds=(), moved=False) for member in record.members) == tuple(
            SegmentMember(
                VirtualWorkerIndex(vw), self.lives[vw], self.members[vw].num_stages, joined=founds or vw in joined
            )
            for vw in sorted(self.members)
        )

    def _barrier(self, record: BarrierRecord) -> None:
        assert record.epoch == self.epoch
        if self.wants_plan:
            self.wants_plan = False
            clock, reasons = self._plan()
            members = [VirtualWorkerIndex(vw) for vw in sorted(self.members)]
            dealt = divide(self.progress(), self.scenario.data, members)
            self.dealt[self.start] = {int(vw): blocks for vw, blocks in dealt.items()}
            assert (record.clock, set(record.reason.split("+"))) == (clock, reasons)
            self.reasons = reasons
            if self.asked:
                self.wants_barrier = self.asked.pop()
        elif self.wants_barrier is None:
            is_repeated = (record.clock, set(record.reason.split("+"))) == (self.barrier, self.reasons)
            assert is_repeated and record.cuts, f"nobody asked for {record}"
        else:
            self._unplanned(record, self.wants_barrier)
            self.wants_barrier = None
        self.barrier = record.clock
        for key in [key for key in self.reports if key[1] >= self.barrier]:
            assert not self.blocks.pop(key, ()), f"{record} drops the samples of wave {key}"
            del self.reports[key]

    def _unplanned(self, record: BarrierRecord, reason: str) -> None:
        clock = record.clock
        committed = max(self.waves, default=self.scenario.start - 1) + 1  # of the evicted, too
        assert clock >= committed, f"{record} below a committed clock"
        assert clock > self.published
        assert clock <= self.barrier, f"{record} is later than the planned one"
        if not self.members:
            assert clock == max(committed, self.published + 1), "nobody could have gone any further"
        elif self.scenario.d is not None:
            ahead = 1 if self.scenario.weights == "flush" else 2
            assert clock == min(self.barrier, max(committed, self.published + self.scenario.d + ahead))
        kept = (
            self.reasons - self.broken_promises
            if clock == self.barrier
            else {"stop", "evict", "join", "plan"} & self.reasons
        )
        self.broken_promises = set()
        assert set(record.reason.split("+")) == kept | {reason}
        self.reasons = kept | {reason}

    def _plan(self) -> tuple[int, set[str]]:
        """The next planned barrier: where the samples, the run, or the waves before a checkpoint end."""
        scenario = self.scenario
        unused = scenario.num_samples - len(self.used)
        blocks = -(-unused // scenario.batch_size)
        left = blocks if scenario.total_minibatches is None else scenario.total_minibatches - self.minibatches
        dealt = min(blocks, left)
        waves = 0
        while waves * scenario.n * len(self.members) < dealt:
            waves += 1
        clock, reasons = self.start + waves, set[str]()
        if scenario.every is not None:
            due = next(c for c in range(self.start + 1, clock + scenario.every + 1) if c % scenario.every == 0)
            if due <= clock:
                reasons.add("checkpoint")
            if due < clock:
                return due, reasons
        if dealt == blocks:
            reasons.add("epoch")
        ends = dealt == left if scenario.epochs is None else dealt == blocks and self.epoch + 1 == scenario.epochs
        return clock, reasons | ({"end"} if ends else set())

    # -- after every event -------------------------------------------------------------------------------------------

    def nothing_is_missing(self, acknowledged: Sequence[int]) -> None:
        """Whether a record should have been written: the log must decide whatever can be decided.

        Args:
            acknowledged: records each shard has acknowledged.
        """
        assert not self.wants_plan
        assert self.wants_segment is None
        assert self.wants_barrier is None
        assert self.evicting is None
        if self.published < self.start:
            ready = self.has_weights
        else:
            ready = True
            for vw, member in self.members.items():
                key, d = (vw, member.committed), self.scenario.d
                full = self.reports.get(key) == set(range(member.num_stages))
                late = d is None or self.published >= member.committed - d
                assert not (full and late and not self.finished), f"wave {key} should be committed"
        caught_up = all(count == self.seen for count in acknowledged)
        joined = all(m.joined == set(range(m.num_stages)) for m in self.members.values())
        waits = not self.members and self.pending and self.published >= self.start
        assert not (waits and caught_up and not self.finished), f"{self.pending} should be members"
        behind = any(m.committed <= self.published for m in self.members.values())
        assert not (ready and caught_up and joined and self.members and not behind and not self.finished), (
            f"clock {self.published + 1} should be published"
        )

    # -- answers -----------------------------------------------------------------------------------------------------

    def progress(self) -> Progress:
        """The progress at the latest barrier; only right after it."""
        used = with_used(empty_bitmap(self.scenario.num_samples), sorted(self.used))
        return Progress(Clock(self.start), self.epoch, used, self.minibatches, self.samples)

    def sums(self, clock: int) -> list[tuple[int, int]]:
        """What w^(clock) is w^(start) plus, in the order of summation: (vw, wave) of every wave with samples."""
        return [
            (vw, wave)
            for wave in range(self.scenario.start, clock)
            for vw in sorted(self.waves.get(wave, {}))
            if self.waves[wave][vw]
        ]
