"""What one shard admits, applies and frees (`wsp.md` §4): a pure state machine that follows the decision log.

`admit` judges a push before anything is allocated; `follow` turns a record into instructions for whoever holds the
tensors (`ps.shard`). A committed wave is added in virtual-worker order, wave after wave, so every shard sums in the
same order: w^(W+1) = ((w^(W) + ũ_0) + ũ_1) + … (`wsp.md` §3).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from hetpipe.errors import ClockFreed, ClockNotPublished, SliceMismatch, StaleIncarnation, StaleTerm, WaveOutOfOrder
from hetpipe.spec.ids import Clock, Incarnation, StageIndex, Term, VirtualWorkerIndex, Wave
from hetpipe.spec.plan import SlicePlan
from hetpipe.spec.requests import PushHeader, Requester, SliceHeader
from hetpipe.sync.records import (
    BarrierRecord,
    CommitRecord,
    EvictRecord,
    InitializeRecord,
    JoinRecord,
    PublishRecord,
    Record,
    TermRecord,
)

#: How far a push may be ahead of the commits when D = ∞: all that bounds what is staged on a shard that falls behind.
MAX_WAVES_AHEAD = 16

#: What a shard stages a wave under; the first weights have no wave.
StageKey = tuple[VirtualWorkerIndex, Incarnation, Wave | None]


def stage_key(header: PushHeader) -> StageKey:
    """What a push is staged under."""
    return header.requester.vw, header.requester.incarnation, header.wave


class Admission(Enum):
    """The verdict on a push that is in order."""

    ACCEPT = "accept"
    DUPLICATE = "duplicate"


@dataclass(frozen=True, slots=True)
class Initialize:
    """Make w^(clock) from the first weights staged under `key`."""

    clock: Clock
    key: StageKey


@dataclass(frozen=True, slots=True)
class Apply:
    """Add the wave staged under `key` to the weights of `clock`, which are being built."""

    clock: Clock
    key: StageKey
    is_empty: bool
    num_members: int
    """V at the last barrier, for `combine: mean`."""


@dataclass(frozen=True, slots=True)
class Close:
    """The weights of `clock` are complete: every wave they need is added."""

    clock: Clock


@dataclass(frozen=True, slots=True)
class Drop:
    """Forget what is staged under `key`; it will never count."""

    key: StageKey


@dataclass(frozen=True, slots=True)
class Free:
    """Forget w^(clock)."""

    clock: Clock


Instruction = Initialize | Apply | Close | Drop | Free


@dataclass(slots=True)
class _Worker:
    incarnation: Incarnation
    committed: Clock


@dataclass(slots=True)
class _Staged:
    """What is staged of one wave, by stage, as indices into the shard's slices."""

    by_stage: dict[StageIndex, frozenset[int]] = field(default_factory=dict)


class ShardState:
    """One shard's view of one job.

    Invariants: a slice is staged at most once per key; `built` counts the clocks complete here and never falls; only
    published clocks in `retained` are served.
    """

    def __init__(
        self,
        *,
        job_id: str,
        term: Term,
        slices: tuple[SlicePlan, ...],
        members: tuple[VirtualWorkerIndex, ...],
        start: Clock,
        staleness: int | None,
    ) -> None:
        self.job_id = job_id
        self.term = term
        self.slices = slices
        self._index = {(s.parameter.name, s.start, s.stop): i for i, s in enumerate(slices)}
        self._names = {s.parameter.name for s in slices}
        self._staleness = staleness
        self._start = start
        self._workers = {vw: _Worker(Incarnation(0), start) for vw in members}
        #: What is staged and not applied yet.
        self.staged: dict[StageKey, _Staged] = {}
        #: Members whose waves the clock being built still lacks, in order.
        self._order: list[VirtualWorkerIndex] = list(members)
        self._num_members = len(members)
        self._barrier = start
        #: Newest clock whose weights are complete here.
        self.built = Clock(start - 1)
        self.published = Clock(start - 1)
        #: Clocks that are complete here and not freed.
        self.alive: set[Clock] = set()
        #: Waves committed but not yet added.
        self._committed: dict[StageKey, bool] = {}
        #: Records followed.
        self.followed = 0

    def check_request(self, requester: Requester) -> None:
        """Refuse a request of another job's, term's or life's.

        Raises:
            StaleTerm, StaleIncarnation: as named.
        """
        if requester.job_id != self.job_id or requester.term != self.term:
            raise StaleTerm(
                f"request for job {requester.job_id} term {requester.term}; this shard serves job {self.job_id} "
                f"term {self.term}"
            )
        worker = self._workers.get(requester.vw)
        if worker is None or worker.incarnation != requester.incarnation:
            present = "no member" if worker is None else f"in incarnation {worker.incarnation}"
            raise StaleIncarnation(f"request of {requester}, whose virtual worker is {present}")

    def slice_indices(self, headers: tuple[SliceHeader, ...]) -> tuple[int, ...]:
        """The positions of the named slices in this shard.

        Raises:
            SliceMismatch: unknown name, other bounds or dtype, or a slice named twice.
        """
        found: list[int] = []
        for header in headers:
            index = self._index.get((header.parameter, header.start, header.stop))
            if index is None:
                known = "with other bounds" if header.parameter in self._names else "not at all"
                raise SliceMismatch(
                    f"slice {header.parameter!r:.200} [{header.start}, {header.stop}): this shard holds it {known}"
                )
            wanted = self.slices[index].parameter.dtype
            if header.dtype != wanted:
                raise SliceMismatch(f"slice {header.parameter} is {wanted}, not {header.dtype!r:.40}")
            found.append(index)
        if len(set(found)) != len(found):
            raise SliceMismatch("a slice is named twice in one request")
        return tuple(found)

    def admit(self, header: PushHeader) -> tuple[Admission, tuple[int, ...]]:
        """Judge a push before anything is allocated; returns the verdict and the slices' positions.

        Raises:
            StaleTerm, StaleIncarnation, SliceMismatch: as named.
            WaveOutOfOrder: negative, or beyond D + 2 waves ahead.
            ClockNotPublished: D = ∞, and this shard has yet to apply earlier waves; ask again.
        """
        requester = header.requester
        self.check_request(requester)
        indices = self.slice_indices(header.slices)
        key = stage_key(header)
        if self._already_counted(header):
            return Admission.DUPLICATE, indices
        if header.wave is not None:
            self._check_wave(requester.vw, header.wave)
        staged = self.staged.get(key)
        if staged is not None:
            if staged.by_stage.get(requester.stage) == frozenset(indices):
                return Admission.DUPLICATE, indices
            taken = set().union(*staged.by_stage.values()) & set(indices)
            if taken:
                name = self.slices[min(taken)].parameter.name
                raise SliceMismatch(f"slice {name} of wave {header.wave} is staged already, by another push")
        return Admission.ACCEPT, indices

    def staged_by(self, header: PushHeader, indices: tuple[int, ...]) -> None:
        """The bytes of an admitted push are all there, and finite."""
        self.staged.setdefault(stage_key(header), _Staged()).by_stage[header.requester.stage] = frozenset(indices)

    def check_pull(self, clock: Clock) -> None:
        """Whether w^(clock) can be served.

        Raises:
            ClockNotPublished, ClockFreed: as named.
        """
        if clock > self.published:
            raise ClockNotPublished(f"clock {clock} is not published; the newest is {self.published}")
        if clock not in self.alive:
            raise ClockFreed(f"clock {clock} was freed; this shard holds {sorted(self.alive)}")

    def follow(self, record: Record) -> list[Instruction]:
        """Take the next record of the decision log; returns what to do with the tensors, in order."""
        assert record.index == self.followed, f"record {record.index} after {self.followed - 1}"
        self.followed += 1
        match record:
            case InitializeRecord():
                first = next(iter(self._workers))
                return self._initialize(record.clock, (first, self._workers[first].incarnation, None))
            case CommitRecord():
                return self._commit(record)
            case EvictRecord():
                return self._evict(record)
            case PublishRecord():
                self.published = record.clock
                if record.clock == self._barrier:
                    self._num_members = len(self._workers)
                gone = sorted(c for c in self.alive if c <= record.clock and c not in record.retained)
                self.alive.difference_update(gone)
                return [Free(c) for c in gone]
            case BarrierRecord():
                self._barrier = record.clock
                return self._drop([k for k in self.staged if k[2] is not None and k[2] >= record.clock])
            case JoinRecord() | TermRecord():
                return []

    # -- inside ------------------------------------------------------------------------------------------------------

    def _already_counted(self, header: PushHeader) -> bool:
        if header.wave is None:
            return bool(self.alive)
        return self._start <= header.wave < self._workers[header.requester.vw].committed

    def _check_wave(self, vw: VirtualWorkerIndex, wave: Wave) -> None:
        committed = self._workers[vw].committed
        furthest = committed + (MAX_WAVES_AHEAD if self._staleness is None else self._staleness + 2)
        if self._staleness is None and wave > furthest:
            raise ClockNotPublished(
                f"wave {wave} of virtual worker {vw} is far ahead of the {committed} committed here; push it later"
            )
        if not committed <= wave <= furthest:
            raise WaveOutOfOrder(f"wave {wave} of virtual worker {vw}, which has committed {committed} waves here")

    def _initialize(self, clock: Clock, key: StageKey) -> list[Instruction]:
        staged = self.staged.pop(key, _Staged())
        self._assert_complete(staged, f"first weights for clock {clock}")
        self.built = clock
        self.alive.add(clock)
        return [Initialize(clock, key), *self._drop([k for k in self.staged if k[2] is None])]

    def _commit(self, record: CommitRecord) -> list[Instruction]:
        key: StageKey = (record.vw, record.incarnation, record.wave)
        staged = self.staged.pop(key, None)
        if staged is not None or record.samples:
            self._assert_complete(staged or _Staged(), f"wave {record.wave} of virtual worker {record.vw}")
        self._workers[record.vw].committed = Clock(record.wave + 1)
        self._committed[key] = staged is None
        return self._add_what_is_due()

    def _assert_complete(self, staged: _Staged, what: str) -> None:
        have = set().union(*staged.by_stage.values()) if staged.by_stage else set()
        missing = sorted(set(range(len(self.slices))) - have)
        assert not missing, f"{what}: committed without slices {[self.slices[i].parameter.name for i in missing]}"

    def _add_what_is_due(self) -> list[Instruction]:
        instructions: list[Instruction] = []
        while self._order:
            key = self._committed_key(self._order[0])
            if key is None:
                break
            self._order.pop(0)
            clock = Clock(self.built + 1)
            instructions.append(Apply(clock, key, self._committed.pop(key), self._num_members))
            if not self._order:
                instructions.append(self._close())
        return instructions

    def _committed_key(self, vw: VirtualWorkerIndex) -> StageKey | None:
        wave = Wave(self.built)
        return next((key for key in self._committed if key[0] == vw and key[2] == wave), None)

    def _close(self) -> Close:
        self.built = Clock(self.built + 1)
        self.alive.add(self.built)
        wave = Wave(self.built)
        self._order = sorted({*self._workers, *(key[0] for key in self._committed if key[2] == wave)})
        return Close(self.built)

    def _evict(self, record: EvictRecord) -> list[Instruction]:
        instructions = self._drop([k for k in self.staged if k[0] == record.vw and k[1] == record.incarnation])
        self._workers.pop(record.vw, None)
        if record.vw in self._order and self._committed_key(record.vw) is None:
            self._order.remove(record.vw)
            if not self._order and self._workers:
                instructions.append(self._close())
        return instructions + self._add_what_is_due()

    def _drop(self, keys: list[StageKey]) -> list[Instruction]:
        for key in keys:
            del self.staged[key]
        return [Drop(key) for key in keys]
