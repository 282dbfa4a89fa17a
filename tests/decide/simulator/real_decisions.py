"""The simulator with the real decision log and real shard states beside it, fed with the same reports.

`TiedClocks` stands in the place of the simulator's `Clocks`. Each report of a staged wave also goes to a `DecisionLog`
and, as pushes, to a `ShardState` per shard; each instant at which a simulated shard has added an update is the one at
which the real shard has, which acknowledges as early as it may. What the two decide, and when, is written down side by
side: commits, publications, the order of updates, and the clocks that first stages are granted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hetpipe.decide.simulator import clocks as simulated
from hetpipe.decide.simulator import simulate as simulation
from hetpipe.decide.simulator.engine import Engine
from hetpipe.decide.simulator.stage import Stage
from hetpipe.decide.sync.decision_log import DecisionLog, LogConfig
from hetpipe.decide.sync.division import Block, empty_bitmap
from hetpipe.decide.sync.gate import Gate
from hetpipe.decide.sync.instructions import Apply, Close
from hetpipe.decide.sync.records import CommitRecord, PublishRecord
from hetpipe.decide.sync.segment import divide
from hetpipe.decide.sync.shard_state import Admission, ShardState
from hetpipe.errors import ClockNotPublished
from hetpipe.values.ids import Clock, Incarnation, JobId, LayerIndex, ShardIndex, StageIndex, Term, Wave
from hetpipe.values.ids import VirtualWorkerIndex as Vw
from hetpipe.values.plan import SlicePlan, TensorSpec
from hetpipe.values.requests import PushHeader, Requester, SliceHeader
from hetpipe.values.sync import DataSpec, Membership, Progress

_JOB, _TERM, _LIFE = JobId("simulated"), Term(1), Incarnation(0)


@dataclass(slots=True)
class Decisions:
    """What was decided, each with its instant."""

    commits: list[tuple[int, int, int]] = field(default_factory=list)
    """Instant, virtual worker, wave."""
    publications: list[tuple[int, int]] = field(default_factory=list)
    """Instant, clock."""
    updates: list[tuple[int, int, int, int]] = field(default_factory=list)
    """Instant, shard, virtual worker, wave: added."""
    grants: list[tuple[int, int, int, int | None]] = field(default_factory=list)
    """Instant, virtual worker, minibatch, clock; None: it has to wait."""

    def sort(self) -> None:
        """Leave the order within an instant out: only an update's, on its shard, can be seen."""
        self.commits.sort()
        self.publications.sort()


class RealShard:
    """A `ShardState` whose updates take as long as the simulated shard says."""

    def __init__(self, index: int, num_slices: int, num_stages: Sequence[int], staleness: int | None) -> None:
        self.index = index
        self._last_slice = [count - 1 for count in num_stages]
        self._slices = tuple(
            SlicePlan(TensorSpec(f"layer{i}", (1,), "float32"), LayerIndex(i), ShardIndex(index), 0, 1)
            for i in range(num_slices)
        )
        self.state = ShardState(
            job_id=_JOB,
            term=_TERM,
            slices=self._slices,
            founders=tuple(map(Vw, range(len(num_stages)))),
            start=Clock(0),
            staleness=staleness,
        )
        #: What is to be done, with the record that says so.
        self.pending: list[tuple[int, Apply | Close]] = []
        #: Whether the simulation leaves it out, because it has nothing to add.
        self.is_instant = True

    def push(self, vw: int, stage: int, wave: int | None) -> None:
        """A stage pushes its part."""
        mine = (s for i, s in enumerate(self._slices) if min(i, self._last_slice[vw]) == stage)
        headers = tuple(SliceHeader(s.parameter.name, s.start, s.stop, s.parameter.dtype) for s in mine)
        who = Requester(_JOB, _TERM, Vw(vw), _LIFE, StageIndex(stage))
        header = PushHeader(who, None if wave is None else Wave(wave), headers)
        verdict, indices = self.state.admit(header)
        assert verdict is Admission.ACCEPT
        self.state.staged_by(header, indices)

    def follow(self, log: DecisionLog) -> None:
        """Read everything."""
        for record in log.records_from(self.state.followed):
            done = self.state.follow(record)
            self.pending += [(record.index, each) for each in done if isinstance(each, Apply | Close)]

    def add(self) -> tuple[int, int] | None:
        """Carry out the next update; whose, and of which wave, or None if there is none."""
        if not self.pending:
            return None
        _, update = self.pending.pop(0)
        assert isinstance(update, Apply)
        while self.pending and isinstance(self.pending[0][1], Close):
            self.pending.pop(0)
        vw, _, wave = update.key
        assert wave is not None
        return vw, wave

    @property
    def carried_out(self) -> int:
        """Records without a clock that is still to be completed: all that a publication waits for."""
        return next((index for index, each in self.pending if isinstance(each, Close)), self.state.followed)


class RealDecisions:
    """The decision log and the shards of one job whose members have all joined."""

    def __init__(self, gate: Gate, num_stages: Sequence[int], num_shards: int, minibatches: int) -> None:
        self.decided = Decisions()
        self.now: Callable[[], int] = lambda: 0
        sync = gate.sync
        samples = minibatches * len(num_stages)
        data = DataSpec(samples, 1, 7, 1, None)
        self.log = DecisionLog(
            LogConfig(
                term=_TERM,
                num_shards=num_shards,
                membership=Membership({Vw(vw): count for vw, count in enumerate(num_stages)}),
                sync=sync,
                data=data,
                checkpoint_every_waves=None,
                progress=Progress(Clock(0), 0, empty_bitmap(samples), 0, 0),
            )
        )
        self._n = sync.minibatches_per_wave
        self._num_reports: dict[tuple[int, int], int] = {}
        self.shards = [RealShard(i, max(num_stages), num_stages, sync.staleness) for i in range(num_shards)]
        self._start(num_stages)
        self._blocks: dict[Vw, tuple[Block, ...]] = divide(self.log.progress, data, list(self.log.members))

    def _start(self, num_stages: Sequence[int]) -> None:
        for vw, count in enumerate(num_stages):
            for stage in range(count):
                self.log.join(Vw(vw), _LIFE, StageIndex(stage))
        for stage in range(num_stages[0]):
            for shard in self.shards:
                shard.push(0, stage, None)
            self.log.initialized(Vw(0), _LIFE, StageIndex(stage))
        self._seen = 0
        self.settle()
        assert self.log.published == 0
        self.decided = Decisions()

    def staged(self, vw: int, wave: int) -> None:
        """One more stage of `vw` has its part of `wave` on every shard."""
        stage = self._num_reports.get((vw, wave), 0)
        self._num_reports[vw, wave] = stage + 1
        for shard in self.shards:
            shard.push(vw, stage, wave)
        blocks = self._blocks[Vw(vw)][wave * self._n : (wave + 1) * self._n] if stage == 0 else None
        self.log.staged(Vw(vw), _LIFE, Wave(wave), StageIndex(stage), blocks, segment=Clock(0))
        self.settle()

    def added(self, shard: int) -> None:
        """A shard is through with an update."""
        found = self.shards[shard].add()
        self.decided.updates.append((self.now(), shard, *(found or (-1, -1))))
        self.settle()

    def hold(self, vw: int, p: int) -> int | None:
        """The clock that a first stage is granted at a switch point; None: not yet."""
        switch = Gate(self.log.config.sync).switch_number(p)
        in_use = self.log.members[Vw(vw)].held
        try:
            clock = self.log.hold(Vw(vw), _LIFE, switch)
        except ClockNotPublished:
            return None
        for shard in self.shards if clock != in_use else ():
            shard.state.check_pull(clock)
        return clock

    def settle(self) -> None:
        """Everybody reads the log and says so, until nothing new is decided."""
        while True:
            for shard in self.shards:
                shard.follow(self.log)
                while shard.is_instant and shard.pending:
                    shard.pending.pop(0)
                self.log.acknowledge(ShardIndex(shard.index), shard.carried_out)
            if self._seen == self.log.num_records:
                return
            for record in self.log.records_from(self._seen):
                match record:
                    case CommitRecord(_, vw, _, wave, _):
                        self.decided.commits.append((self.now(), vw, wave))
                    case PublishRecord(_, clock, _):
                        self.decided.publications.append((self.now(), clock))
                    case _:
                        pass
            self._seen = self.log.num_records


class TiedClocks(simulated.Clocks):
    """The simulator's clocks, which tell the real ones what they are told."""

    def __init__(
        self,
        engine: Engine,
        gate: Gate,
        *,
        num_stages: Sequence[int],
        apply_ticks: Sequence[int],
        exchange_ticks: int,
        on_publish: Callable[[int], None],
        minibatches: int,
    ) -> None:
        assert not exchange_ticks, "the real log has no time of its own"
        self.real = RealDecisions(gate, num_stages, max(1, len(apply_ticks)), minibatches)
        self.real.now = lambda: engine.now
        self.decided = Decisions()
        busy = [index for index, ticks in enumerate(apply_ticks) if ticks]
        for index in busy:
            self.real.shards[index].is_instant = False
        #: Ticks of an update → the shards that take as long, which the simulator makes together.
        self.numbers: dict[int, list[int]] = {}
        for index in busy:
            self.numbers.setdefault(apply_ticks[index], []).append(index)

        def published(clock: int) -> None:
            self.decided.publications.append((engine.now, clock))
            on_publish(clock)

        super().__init__(engine, gate, num_stages=num_stages, apply_ticks=apply_ticks, on_publish=published)

    def staged(self, vw: int, wave: int) -> None:
        self.real.staged(vw, wave)
        super().staged(vw, wave)

    def _commit(self) -> None:
        before = list(self.committed)
        super()._commit()
        for vw, (start, stop) in enumerate(zip(before, self.committed, strict=True)):
            self.decided.commits += [(self._engine.now, vw, wave) for wave in range(start, stop)]


class TiedShards(simulated._Shards):
    """Simulated shards whose updates take as long on the real ones."""

    def __init__(self, engine: Engine, clocks: TiedClocks, apply_ticks: int, count: int) -> None:
        self._numbers = clocks.numbers[apply_ticks]
        assert len(self._numbers) == count
        self._tied = clocks
        super().__init__(engine, clocks, apply_ticks, count)

    def _added(self, _: int) -> None:
        for number in self._numbers:
            self._tied.decided.updates.append((self._engine.now, number, self._next, self._built))
            self._tied.real.added(number)
        super()._added(_)


class TiedStage(Stage):
    """A simulated stage that asks the real log, too, with which clock it may go on."""

    def _has_chosen(self, p: int) -> bool:
        assert isinstance(self._clocks, TiedClocks)
        chosen, vw, now = self._worker.chosen, self._worker.index, self._engine.now
        before = len(chosen)
        is_first_question = (p - self._gate.first_switch) // self._gate.sync.minibatches_per_wave == before
        answer = super()._has_chosen(p)
        if is_first_question:
            granted = chosen[-1] if len(chosen) > before else None
            self._clocks.decided.grants.append((now, vw, p, granted))
            # Nobody asks where nothing newer than the start can be used: `double_buffer`, in its second wave.
            real = self._clocks.real.hold(vw, p) if self._gate.newest_usable(p) else 0
            self._clocks.real.decided.grants.append((now, vw, p, real))
        return answer


def tie(patch: Callable[[object, str, object], None], minibatches: int) -> list[TiedClocks]:
    """Have every simulation from now on run beside the real decisions; its clocks appear in the list."""
    made: list[TiedClocks] = []

    def clocks(*args: object, **kwargs: object) -> TiedClocks:
        made.append(TiedClocks(*args, **kwargs, minibatches=minibatches))  # type: ignore[arg-type]
        return made[-1]

    patch(simulation, "Clocks", clocks)
    patch(simulation, "Stage", TiedStage)
    patch(simulated, "_Shards", TiedShards)
    return made
