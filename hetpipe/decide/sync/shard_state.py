"""The state machine of one shard (`wsp.md` §4): admits, applies and frees by the decision log. Pure.

`admit` validates a push before anything is allocated; `follow` turns a record into instructions for the owner of the
tensors (`server.shard.shard`). A committed wave is added in virtual-worker order, wave after wave, so every shard adds
in the same order: w^(W+1) = ((w^(W) + ũ_0) + ũ_1) + … (`wsp.md` §3).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property

from hetpipe.decide.sync.instructions import Apply, Close, Drop, Free, Initialize, Instruction, StageKey, stage_key
from hetpipe.decide.sync.records import (
    BarrierRecord,
    CommitRecord,
    EvictRecord,
    HandoverRecord,
    InitializeRecord,
    PlanRecord,
    PrepareRecord,
    PublishRecord,
    Record,
    SegmentRecord,
    TermRecord,
)
from hetpipe.errors import (
    ClockFreed,
    ClockNotPublished,
    SliceMismatch,
    StaleIncarnation,
    StaleTerm,
    StateLost,
    WaveOutOfOrder,
)
from hetpipe.values.ids import Clock, Incarnation, StageIndex, Term, VirtualWorkerIndex, Wave
from hetpipe.values.plan import SlicePlan
from hetpipe.values.requests import PushHeader, Requester, SliceHeader

#: Maximum distance of a push from the commits when D = ∞: the only bound on staged waves of a slow shard.
MAX_WAVES_AHEAD = 16


class Admission(Enum):
    """The verdict on a valid push."""

    ACCEPT = "accept"
    DUPLICATE = "duplicate"


@dataclass(slots=True)
class Worker:
    """A member from a shard's point of view."""

    incarnation: Incarnation
    start: Clock
    """The clock at which it joined."""
    committed: Clock


@dataclass(frozen=True, slots=True)
class CommittedWave:
    """A wave that counts and has not been added yet."""

    vw: VirtualWorkerIndex
    incarnation: Incarnation
    wave: Wave
    is_empty: bool


@dataclass(frozen=True, slots=True)
class ClosedState:
    """A shard's state when the weights of `built` were complete and nothing of the next clock had been added.

    Together with w^(built), the staged pushes, and the decision log from record `followed` on, it restores a shard.
    """

    built: Clock
    followed: int
    workers: dict[VirtualWorkerIndex, Worker]
    lives: dict[VirtualWorkerIndex, Incarnation]
    order: tuple[VirtualWorkerIndex, ...]
    num_members: int
    barrier: Clock
    published: Clock
    committed: tuple[CommittedWave, ...]
    per_wave: dict[VirtualWorkerIndex, int] = field(default_factory=dict)
    """N_v of the members at the last barrier; empty: the same for all."""
    frozen_layers: int = 0
    """The leading layers of the chain that are frozen since the last barrier."""
    inactive: tuple[int, ...] = ()
    """The layers that are inactive since the last barrier."""
    entered: Clock = Clock(0)
    """The clock of the last barrier."""


@dataclass(frozen=True)
class SliceIndex:
    """The slices of one shard of one job, by name and bounds."""

    slices: tuple[SlicePlan, ...]

    @cached_property
    def _index(self) -> dict[tuple[str, int, int], int]:
        return {(s.parameter.name, s.start, s.stop): i for i, s in enumerate(self.slices)}

    @cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(s.parameter.name for s in self.slices)

    def of(self, headers: tuple[SliceHeader, ...]) -> tuple[int, ...]:
        """Look up the positions of slices in this shard.

        Raises:
            SliceMismatch: unknown name, wrong bounds or dtype, or a duplicate slice.
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
            raise SliceMismatch("a request names a slice twice")
        return tuple(found)


@dataclass(slots=True)
class _Staged:
    """Staged parts of one wave, by stage, as indices into the shard's slices."""

    by_stage: dict[StageIndex, frozenset[int]] = field(default_factory=dict)


class ShardState:
    """One shard's state of one job.

    Invariants: a slice is staged at most once per key; `built` counts the clocks complete here and never decreases;
    only published clocks in `retained` are served.
    """

    def __init__(
        self,
        *,
        job_id: str,
        term: Term,
        slices: tuple[SlicePlan, ...],
        founders: tuple[VirtualWorkerIndex, ...],
        start: Clock,
        staleness: int | None,
    ) -> None:
        self.job_id = job_id
        self.term = term
        self.slices = slices
        self.slice_index = SliceIndex(slices)
        self._staleness = staleness
        #: Virtual workers that may create the initial weights.
        self._founders = founders
        #: The members; none before the first segment.
        self._workers: dict[VirtualWorkerIndex, Worker] = {}
        #: The newest incarnation of every virtual worker that was ever a member.
        self._lives: dict[VirtualWorkerIndex, Incarnation] = {}
        #: Staged and not applied yet.
        self.staged: dict[StageKey, _Staged] = {}
        #: Members whose waves are still missing for the clock being built, in order.
        self._order: list[VirtualWorkerIndex] = []
        self._num_members = 0
        #: N_v of the members at the last barrier; empty: the same for all.
        self._per_wave: dict[VirtualWorkerIndex, int] = {}
        #: The slices of frozen and of inactive layers, which carry over from clock to clock; none before the first
        #: segment.
        self.idle: frozenset[int] = frozenset()
        self._frozen_layers = 0
        self._inactive: tuple[int, ...] = ()
        #: The slices of layers that are built anew for the segment, and whether they have been put in their places.
        self.fresh: frozenset[int] = frozenset()
        self._is_renewed = False
        #: The first clock of the segment.
        self._entered = start
        self._barrier = start
        #: Newest clock whose weights are complete here.
        self.built = Clock(start - 1)
        self.published = Clock(start - 1)
        #: Clocks that are complete here and not freed.
        self.alive: set[Clock] = set()
        #: Waves committed but not yet added.
        self._committed: dict[StageKey, bool] = {}
        #: clock → the state when it was complete; for clocks that are not freed.
        self._closed: dict[Clock, ClosedState] = {}
        #: Records processed.
        self.followed = 0

    def check_request(self, requester: Requester) -> None:
        """Check job, term and incarnation of a request.

        Raises:
            StaleTerm, StaleIncarnation: as named.
            ClockNotPublished: it may be a member whose record this shard has not read yet; retry.
        """
        self._check_term(requester)
        self._check_life(requester)

    def _check_term(self, requester: Requester) -> None:
        if requester.job_id != self.job_id or requester.term != self.term:
            raise StaleTerm(
                f"request for job {requester.job_id} term {requester.term}, but this shard serves job "
                f"{self.job_id} term {self.term}"
            )

    def _check_life(self, requester: Requester) -> None:
        worker = self._workers.get(requester.vw)
        newest = self._lives.get(requester.vw, Incarnation(-1))
        if requester.incarnation > newest:
            raise ClockNotPublished(
                f"{requester} is not a member here yet: this shard has not yet read the record of its join"
            )
        if worker is None or worker.incarnation != requester.incarnation:
            present = "no longer a member" if worker is None else f"in incarnation {worker.incarnation}"
            raise StaleIncarnation(f"request of {requester}, but its virtual worker is {present}")

    def admit(self, header: PushHeader) -> tuple[Admission, tuple[int, ...]]:
        """Validate a push before anything is allocated; returns the verdict and the slices' positions.

        Raises:
            StaleTerm, StaleIncarnation, SliceMismatch: as named.
            WaveOutOfOrder: negative, or beyond D + 2 waves ahead.
            ClockNotPublished: this shard has not read the record of the wave's segment; or D = ∞, and it has not
                applied earlier waves yet. Retry.
        """
        requester = header.requester
        self._check_term(requester)
        if header.wave is None:
            self._check_maker(requester)
        else:
            self._check_life(requester)
        indices = self.slice_index.of(header.slices)
        key = stage_key(header)
        if self._already_counted(header):
            return Admission.DUPLICATE, indices
        if header.wave is not None:
            self._check_wave(requester.vw, header.wave)
            self._check_trained(indices, header.wave, is_fresh=header.fresh)
        staged = self.staged.get(key)
        if staged is not None:
            if staged.by_stage.get(requester.stage) == frozenset(indices):
                return Admission.DUPLICATE, indices
            taken = set().union(*staged.by_stage.values()) & set(indices)
            if taken:
                name = self.slices[min(taken)].parameter.name
                raise SliceMismatch(f"slice {name} of wave {header.wave} is already staged by another push")
        return Admission.ACCEPT, indices

    def staged_by(self, header: PushHeader, indices: tuple[int, ...]) -> None:
        """Record that the data of an admitted push is complete and finite."""
        self.staged.setdefault(stage_key(header), _Staged()).by_stage[header.requester.stage] = frozenset(indices)

    def check_pull(self, clock: Clock) -> None:
        """Check that w^(clock) can be served.

        Raises:
            ClockNotPublished, ClockFreed: as named.
        """
        if clock > self.published:
            raise ClockNotPublished(f"clock {clock} is not published; the newest is {self.published}")
        if clock not in self.alive:
            raise ClockFreed(f"clock {clock} was freed; this shard holds {sorted(self.alive)}")

    def follow(self, record: Record) -> list[Instruction]:
        """Process the next record of the decision log; returns the instructions for the tensors, in order.

        Raises:
            StateLost: it commits a wave that this shard had acknowledged but has lost.
        """
        assert record.index == self.followed, f"record {record.index} after {self.followed - 1}"
        self.followed += 1
        instructions: list[Instruction] = []
        match record:
            case InitializeRecord():
                instructions = self._initialize(record.clock, (record.vw, record.incarnation, None))
            case CommitRecord():
                instructions = self._commit(record)
            case EvictRecord():
                instructions = self._evict(record)
            case PublishRecord():
                instructions = self._publish(record)
            case BarrierRecord():
                self._barrier = record.clock
                # Beyond it there are only empty waves, which are not pushed.
                instructions = self._add_what_is_due()
            case SegmentRecord():
                self._enter(record)
            case TermRecord() | HandoverRecord() | PrepareRecord() | PlanRecord():
                pass
        return instructions

    # -- watermarks (`reliability.md` P2) ----------------------------------------------------------------------------

    @property
    def committed_clock(self) -> Clock:
        """The minimum over the members of their committed waves."""
        return min((worker.committed for worker in self._workers.values()), default=self.built)

    @property
    def staged_clock(self) -> Clock:
        """The minimum over the members of their waves staged or committed here. Empty waves count once committed."""
        return min((self._staged_through(vw, worker) for vw, worker in self._workers.items()), default=self.built)

    def clocks_of(self, vw: VirtualWorkerIndex) -> tuple[Clock, Clock]:
        """Staged and committed clock of one virtual worker; if it is not a member, the clock being built."""
        worker = self._workers.get(vw)
        return (self.built, self.built) if worker is None else (self._staged_through(vw, worker), worker.committed)

    def _staged_through(self, vw: VirtualWorkerIndex, worker: Worker) -> Clock:
        clock = worker.committed
        while (staged := self.staged.get((vw, worker.incarnation, Wave(clock)))) is not None and len(
            set().union(*staged.by_stage.values())
        ) == len(self.slices) - len(self.idle):
            clock = Clock(clock + 1)
        return clock

    # -- after a restart ---------------------------------------------------------------------------------------------

    def closed(self, clock: Clock) -> ClosedState:
        """The state when the weights of `clock`, which is not freed, were complete."""
        return self._closed[clock]

    def restore(self, closed: ClosedState) -> None:
        """Restore `closed` in a new instance. Then call `restage` for staged pushes, and `resume`."""
        self._workers = {vw: replace(worker) for vw, worker in closed.workers.items()}
        self._lives = dict(closed.lives)
        self._order = list(closed.order)
        self._num_members = closed.num_members
        self._per_wave = dict(closed.per_wave)
        self._idle(closed.frozen_layers, closed.inactive)
        self._barrier, self._entered = closed.barrier, closed.entered
        self.built = closed.built
        self.published = closed.published
        self.alive = {closed.built}
        self._committed = {(wave.vw, wave.incarnation, wave.wave): wave.is_empty for wave in closed.committed}
        self._closed = {closed.built: closed}
        self.followed = closed.followed

    def restage(self, header: PushHeader, indices: tuple[int, ...]) -> bool:
        """Restore a push staged before the restart; returns whether its data is still needed."""
        vw, incarnation, wave = header.requester.vw, header.requester.incarnation, header.wave
        if (vw, incarnation, wave) in self._committed:
            return True
        worker = self._workers.get(vw)
        if incarnation > self._lives.get(vw, Incarnation(-1)):
            wanted = wave is not None or not self.alive
        elif worker is None or worker.incarnation != incarnation or wave is None:
            wanted = False
        else:
            wanted = wave >= worker.committed
        if wanted:
            self.staged_by(header, indices)
        return wanted

    def resume(self) -> list[Instruction]:
        """Instructions due after `restore` and `restage`."""
        return self._add_what_is_due()

    # -- internals
    # ------------------------------------------------------------------------------------------------------

    def _already_counted(self, header: PushHeader) -> bool:
        if header.wave is None:
            return bool(self.alive)
        worker = self._workers[header.requester.vw]
        return worker.start <= header.wave < worker.committed

    def _check_wave(self, vw: VirtualWorkerIndex, wave: Wave) -> None:
        committed = self._workers[vw].committed
        furthest = committed + (MAX_WAVES_AHEAD if self._staleness is None else self._staleness + 2)
        if self._staleness is None and wave > furthest:
            raise ClockNotPublished(
                f"wave {wave} of virtual worker {vw} is too far ahead of the {committed} committed here; push it later"
            )
        if not committed <= wave <= furthest:
            raise WaveOutOfOrder(
                f"wave {wave} of virtual worker {vw}, which has already committed {committed} waves here"
            )

    def _check_trained(self, indices: tuple[int, ...], wave: Wave, *, is_fresh: bool) -> None:
        idle = sorted(self.idle.intersection(indices))
        is_undue = is_fresh and not (self._renews(wave) and self.fresh.issuperset(indices))
        if (idle or is_undue) and self._entered < self._barrier <= wave:
            raise ClockNotPublished(
                f"wave {wave} is behind the barrier at clock {self._barrier}, which this shard has not passed yet"
            )
        if is_undue:
            raise SliceMismatch(f"weights are pushed for wave {wave} of layers that are not built anew there")
        if idle:
            piece = self.slices[idle[0]]
            frozen = f"but the first {self._frozen_layers} layers are frozen"
            why = "which is inactive" if piece.layer in self._inactive else frozen
            raise SliceMismatch(f"slice {piece.parameter.name} of wave {wave} is of layer {piece.layer}, {why} there")

    def _publish(self, record: PublishRecord) -> list[Instruction]:
        self.published = record.clock
        gone = sorted(c for c in self.alive if c <= record.clock and c not in record.retained)
        self.alive.difference_update(gone)
        for clock in gone:
            del self._closed[clock]
        return [Free(c) for c in gone]

    def _check_maker(self, requester: Requester) -> None:
        """Check that initial weights come from an initial member, and from one incarnation at a time."""
        if requester.vw not in self._founders:
            raise StaleIncarnation(f"initial weights from {requester}, whose virtual worker is not part of this run")
        lives = [key[1] for key in self.staged if key[0] == requester.vw]
        newest = max(lives, default=self._lives.get(requester.vw, Incarnation(0)))
        if requester.incarnation < newest:
            raise StaleIncarnation(
                f"initial weights from {requester}, but its virtual worker is in incarnation {newest}"
            )

    def _enter(self, record: SegmentRecord) -> None:
        """Start a segment: its members are those that count."""
        began = {vw: worker.start for vw, worker in self._workers.items()}
        self._workers = {
            m.vw: Worker(m.incarnation, record.start if m.joined else began[m.vw], record.start) for m in record.members
        }
        self._lives.update({m.vw: m.incarnation for m in record.members})
        self._num_members = len(self._workers)
        given = ((member.vw, member.minibatches_per_wave) for member in record.members)
        self._per_wave = {vw: count for vw, count in given if count is not None}
        self._order = sorted(self._workers)
        self._entered = record.start
        self._idle(record.frozen_layers, record.inactive)
        self.fresh = frozenset(index for index, piece in enumerate(self.slices) if piece.layer in record.fresh)
        self._is_renewed = False

    def _idle(self, frozen: int, inactive: tuple[int, ...]) -> None:
        """Train neither the first `frozen` layers nor the inactive ones from here on."""
        self._frozen_layers, self._inactive = frozen, inactive
        idle = {*range(frozen), *inactive}
        self.idle = frozenset(index for index, piece in enumerate(self.slices) if piece.layer in idle)

    def _initialize(self, clock: Clock, key: StageKey) -> list[Instruction]:
        staged = self.staged.pop(key, _Staged())
        self._check_complete(staged, f"the initial weights for clock {clock}", self._trained)
        self._complete(clock)
        return [Initialize(clock, key), *self._drop([k for k in self.staged if k[2] is None])]

    def _complete(self, clock: Clock) -> None:
        self.built = clock
        self.alive.add(clock)
        self._closed[clock] = ClosedState(
            built=clock,
            followed=self.followed,
            workers={vw: replace(worker) for vw, worker in self._workers.items()},
            lives=dict(self._lives),
            order=tuple(self._order),
            num_members=self._num_members,
            barrier=self._barrier,
            published=self.published,
            committed=tuple(
                CommittedWave(vw, life, wave, empty)
                for (vw, life, wave), empty in self._committed.items()
                if wave is not None
            ),
            per_wave=dict(self._per_wave),
            frozen_layers=self._frozen_layers,
            inactive=self._inactive,
            entered=self._entered,
        )

    def _commit(self, record: CommitRecord) -> list[Instruction]:
        key: StageKey = (record.vw, record.incarnation, record.wave)
        staged = self.staged.pop(key, None)
        if staged is not None or record.samples:
            what = f"wave {record.wave} of virtual worker {record.vw}"
            self._check_complete(staged or _Staged(), what, self._trained)
            if self._renews(record.wave):
                beside = self.staged.pop((record.vw, record.incarnation, None), _Staged())
                self._check_complete(beside, f"what is built anew for {what}", self.fresh)
        self._workers[record.vw].committed = Clock(record.wave + 1)
        self._committed[key] = staged is None
        return self._add_what_is_due()

    @property
    def _trained(self) -> frozenset[int]:
        """The slices that make a wave whole."""
        return frozenset(range(len(self.slices))) - self.idle

    def _check_complete(self, staged: _Staged, what: str, slices: frozenset[int]) -> None:
        """Check that `slices` are staged: only acknowledged pushes are committed, so missing ones have been lost."""
        missing = sorted(slices.difference(*staged.by_stage.values()))
        if missing:
            names = ", ".join(self.slices[index].parameter.name for index in missing[:3])
            raise StateLost(
                f"{what} counts, but {len(missing)} slices of it that this shard had acknowledged are lost "
                f"({names}): its machine or its disk has failed; the job must be rewound to a checkpoint"
            )

    def _add_what_is_due(self) -> list[Instruction]:
        instructions: list[Instruction] = []
        while True:
            while self._order and (key := self._committed_key(self._order[0])) is not None:
                self._order.pop(0)
                empty = self._committed.pop(key)
                share = (self._per_wave[key[0]], sum(self._per_wave.values())) if self._per_wave else None
                apply = Apply(Clock(self.built + 1), key, empty, self._num_members, share)
                instructions += [apply] if empty or not self._renews(key[2]) else self._renewing(apply)
            if self._order or not self._goes_on():
                return instructions
            instructions += self._close()

    def _goes_on(self) -> bool:
        """Whether the clock being built is complete once no wave is missing.

        Without members, clocks are completed up to the barrier at which virtual workers may join.
        """
        return bool(self.alive) and (bool(self._workers) or self.built < self._barrier)

    def _committed_key(self, vw: VirtualWorkerIndex) -> StageKey | None:
        wave = Wave(self.built)
        return next((key for key in self._committed if key[0] == vw and key[2] == wave), None)

    def _renews(self, wave: Wave | None) -> bool:
        """Whether weights of layers that are built anew are staged beside a wave."""
        return bool(self.fresh) and wave == Wave(self._entered)

    def _renewing(self, apply: Apply) -> list[Instruction]:
        """Add a wave to what is staged beside it if it is the first one; all members have staged the same."""
        beside: StageKey = (*apply.key[:2], None)
        if self._is_renewed:
            return [apply, Drop(beside)]
        self._is_renewed = True
        return [replace(apply, fresh=beside)]

    def _close(self) -> list[Instruction]:
        clock = Clock(self.built + 1)
        self._order = sorted({*self._workers, *(key[0] for key in self._committed if key[2] == Wave(clock))})
        self._complete(clock)
        # What is left of layers that are built anew: of members whose waves are empty.
        return [Close(clock), *self._drop([key for key in self.staged if key[2] is None])]

    def _evict(self, record: EvictRecord) -> list[Instruction]:
        instructions = self._drop([k for k in self.staged if k[0] == record.vw and k[1] == record.incarnation])
        self._workers.pop(record.vw, None)
        if record.vw in self._order and self._committed_key(record.vw) is None:
            self._order.remove(record.vw)
        if not self._workers:
            self._barrier = self.built  # the next record determines how far
        return instructions + self._add_what_is_due()

    def _drop(self, keys: list[StageKey]) -> list[Instruction]:
        for key in keys:
            del self.staged[key]
        return [Drop(key) for key in keys]
