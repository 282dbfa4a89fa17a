"""When a straggler triggers a repartition, and how that goes. Pure: facts in, instructions out.

All of the decision is here. `Stragglers` says which stages take longer than planned, and have for a while;
`Repartitions` when one of them has its virtual worker planned anew, and what follows; `replanned` whether the new plan
pays. Where layers go and what that gains is calculated in `replanning.py`; the job says the thresholds (`survive`).

A report of a stage that has finished a wave since its last one closes a *window*: seconds of computing per minibatch.
A window is compared with what was foreseen for the stage. Where nothing was foreseen, with the fastest window so far of
any stage that is alike: the same layers on the same kind of device, the stage itself among them. And it is compared
with how the other stages fare: where everything takes twice as long, nothing straggles, and moving layers would not
help. A stage straggles when that has been off by the factor for as many windows in a row as patience says, and it does
until it has been clearly below for as many.

A virtual worker of which a stage has left the plan is planned anew, on the job's own thread. If the job gains enough,
that incarnation leaves at the next barrier, with a checkpoint, and the next one begins by the new plan. If that one
does not get ready, the plan before goes on. A virtual worker that waits for an agent which has been gone for half of
`survive.absence` goes on without it, if it has other devices and these have the memory.

It never flip-flops: one virtual worker at a time, only while all of them compute, only if enough is gained and enough
of the run is left; and after each look at a virtual worker there is none for a while, twice as long after each move.
"""

from __future__ import annotations

import statistics
from collections import Counter, deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

from hetpipe.decide.elastic.replanning import (
    Basis,
    Expected,
    Recut,
    can_recut,
    expected,
    gain,
    left_over,
    played,
    rate,
    recut,
)
from hetpipe.decide.elastic.virtual_workers import VirtualWorker, VirtualWorkers, WorkersOutput
from hetpipe.decide.lifecycle.configs import Assignment
from hetpipe.decide.lifecycle.exchange import Announce, Replan, Replanned, SettleReplan
from hetpipe.decide.lifecycle.progress import StagePlace
from hetpipe.values.commands import StageKey
from hetpipe.values.events import ReplanJudged, Straggling, WorkerReplanned
from hetpipe.values.ids import AgentId, Incarnation, StageIndex, VirtualWorkerIndex
from hetpipe.values.life_state import COMPUTING, LifeState
from hetpipe.values.plan import VirtualWorkerPlan
from hetpipe.values.run import StageEmulation, StageProgress

#: Windows of a virtual worker between two looks at it, for each that makes a straggler.
_PAUSE = 10

#: A move costs a barrier and the start of processes: it is to save at least so much of the time that is left.
_LEAST_SAVED_SECONDS = 20.0


@dataclass(slots=True)
class _Watched:
    """One stage of the newest life of its virtual worker."""

    expected: Expected
    #: (seconds, minibatches) of the latest windows.
    windows: deque[tuple[float, int]]
    #: How far each of them is off.
    factors: deque[float]
    incarnation: Incarnation = Incarnation(0)
    #: The report that ended the latest window; None before the first one of this life, which counts nothing.
    last: StageProgress | None = None
    #: Windows off in a row, to either side; windows in a row that are well.
    off: int = 0
    calm: int = 0
    straggles: bool = False


class Stragglers:
    """All stages of one job. Not thread-safe."""

    def __init__(
        self, expected: Mapping[VirtualWorkerIndex, Sequence[Expected]], *, factor: float, patience_windows: int
    ) -> None:
        """Begin.

        Args:
            expected: per virtual worker, of each stage.
            factor: off by so much, or by its inverse, is off; > 1.
            patience_windows: so many in a row count; ≥ 1.
        """
        self._factor = factor
        self._patience = patience_windows
        self._stages: dict[StagePlace, _Watched] = {}
        #: The fastest window so far of stages that are alike, in seconds per minibatch.
        self._fastest: dict[Hashable, float] = {}
        for vw, stages in expected.items():
            self.expect(vw, stages)

    def expect(self, vw: VirtualWorkerIndex, stages: Sequence[Expected]) -> None:
        """A virtual worker computes by another plan from here on: nothing is known of it yet."""
        for place in [place for place in self._stages if place[0] == vw]:
            del self._stages[place]
        for index, one in enumerate(stages):
            self._stages[vw, StageIndex(index)] = self._watched(one, Incarnation(0))

    def add(self, key: StageKey, report: StageProgress) -> bool:
        """Take a report; whether it closed a window."""
        stage = self._stages.get((key.vw, key.stage))
        if stage is None or key.incarnation < stage.incarnation:
            return False
        if key.incarnation > stage.incarnation:
            # Another process: what it says is counted from its own start.
            stage = self._stages[key.vw, key.stage] = self._watched(stage.expected, key.incarnation)
        last = stage.last
        if last is None and report.minibatches:
            # What it did so far is its start, in which everything is slow.
            stage.last = report
        if last is None or report.clock <= last.clock or report.minibatches <= last.minibatches:
            return False
        stage.last = report
        minibatches = report.minibatches - last.minibatches
        stage.windows.append((report.compute_seconds - last.compute_seconds, minibatches))
        self._judge(stage)
        return True

    @property
    def straggling(self) -> tuple[Straggling, ...]:
        """Those that are named, in order, with how far the worst of their latest windows was off.

        One of these was not well, else they were named no more; the latest alone may have been.
        """
        named = {place: stage for place, stage in self._stages.items() if stage.straggles}
        return tuple(Straggling(*place, max(stage.factors)) for place, stage in named.items())

    def is_off(self, vw: VirtualWorkerIndex) -> bool:
        """Whether a stage of it has left the plan, to either side, for as long as patience says."""
        return any(stage.off >= self._patience for place, stage in self._stages.items() if place[0] == vw)

    def seconds(self, vw: VirtualWorkerIndex) -> tuple[float, ...] | None:
        """Seconds per minibatch of each stage over the latest windows; None while there are not enough."""
        stages = [stage for place, stage in self._stages.items() if place[0] == vw]
        if any(len(stage.windows) < self._patience for stage in stages):
            return None
        return tuple(
            sum(seconds for seconds, _ in stage.windows) / sum(minibatches for _, minibatches in stage.windows)
            for stage in stages
        )

    def reference(self, vw: VirtualWorkerIndex) -> tuple[float, ...] | None:
        """What each stage is compared with, in seconds per minibatch; None while that is not known."""
        found = [self._foreseen(stage) for place, stage in self._stages.items() if place[0] == vw]
        return None if None in found else tuple(one for one in found if one is not None)

    def _watched(self, expected: Expected, incarnation: Incarnation) -> _Watched:
        return _Watched(expected, deque(maxlen=self._patience), deque(maxlen=self._patience), incarnation)

    def _judge(self, stage: _Watched) -> None:
        seconds, minibatches = stage.windows[-1]
        alike = stage.expected.alike
        self._fastest[alike] = min(seconds / minibatches, self._fastest.get(alike, seconds / minibatches))
        factor = self._relative(stage)
        stage.factors.append(factor)
        is_slow = factor >= self._factor
        stage.off = stage.off + 1 if is_slow or factor <= 1.0 / self._factor else 0
        # Half way back, so that noise around the factor names nobody on and off.
        stage.calm = stage.calm + 1 if factor < (1.0 + self._factor) / 2.0 else 0
        if is_slow and stage.off >= self._patience:
            stage.straggles = True
        elif stage.calm >= self._patience:
            stage.straggles = False

    def _relative(self, stage: _Watched) -> float:
        """How far its latest window is off, after what all others are off by alike."""
        ratios = [ratio for other in self._stages.values() if (ratio := self._ratio(other)) is not None]
        own = self._ratio(stage)
        return 1.0 if own is None else own / max(1.0, statistics.median_low(ratios))

    def _ratio(self, stage: _Watched) -> float | None:
        if not stage.windows:
            return None
        seconds, minibatches = stage.windows[-1]
        foreseen = self._foreseen(stage)
        return seconds / minibatches / foreseen if foreseen else None

    def _foreseen(self, stage: _Watched) -> float | None:
        return stage.expected.seconds or self._fastest.get(stage.expected.alike)


@dataclass(slots=True)
class _Move:
    """A new plan on its way."""

    before: VirtualWorkerPlan
    emulations: tuple[StageEmulation, ...]
    """Of the plan before."""
    after: VirtualWorkerPlan
    recut: Recut | None
    """What the new one promises; None where it only makes do with fewer devices."""
    gain: float | None
    slowest_seconds: float
    """What the slowest stage took by the plan before, per minibatch; 0 if nobody wants to know."""
    last: Incarnation
    """The last life by the plan before."""
    first: Incarnation | None = None
    """The first life by the new plan; None before it got ready."""


class Repartitions:
    """The moves of one job, one at a time. Not thread-safe; every call gives the monotonic time."""

    def __init__(self, assignment: Assignment, basis: Basis | None) -> None:
        """Begin with what was foreseen, if anything was; without a basis nothing is ever moved."""
        survive = assignment.job.survive
        self._job = assignment.job
        self._basis = basis
        self._patience = survive.patience_waves
        known = [worker for worker in assignment.plan.virtual_workers if basis is not None and basis.knows(worker)]
        self._stragglers = Stragglers(
            {one.index: expected(basis, one) for one in known} if basis is not None and survive.straggler else {},
            factor=survive.straggler,
            patience_windows=survive.patience_waves,
        )
        #: What stages would take if their devices were not off, of virtual workers that were planned anew.
        self._healthy: dict[VirtualWorkerIndex, tuple[float, ...]] = {}
        #: Windows until a virtual worker is looked at again, and moves so far.
        self._quiet: Counter[VirtualWorkerIndex] = Counter()
        self._moves: Counter[VirtualWorkerIndex] = Counter()
        #: Who cannot do with fewer devices.
        self._needs_all: set[VirtualWorkerIndex] = set()
        #: Who has devices of which too little is known.
        self._strangers = {worker.index for worker in assignment.plan.virtual_workers if worker not in known}
        #: Who is being planned anew.
        self._asked: VirtualWorkerIndex | None = None
        self._move: _Move | None = None

    @property
    def slow(self) -> tuple[Straggling, ...]:
        """The stages that take longer than planned."""
        return self._stragglers.straggling

    def heard(self, key: StageKey, report: StageProgress) -> None:
        """A stage of a newest life has told how far it is."""
        if self._stragglers.add(key, report) and key.stage == 0:
            self._quiet[key.vw] = max(0, self._quiet[key.vw] - 1)

    def enlarge(self, worker: VirtualWorkerPlan, basis: Basis | None) -> None:
        """A virtual worker joins that the run has not had yet; `basis` is of its devices, too, if they are known."""
        if basis is None or not basis.knows(worker):
            self._strangers.add(worker.index)
            return
        self._basis = basis
        if self._job.survive.straggler:
            self._stragglers.expect(worker.index, expected(basis, worker))

    def look(self, lives: VirtualWorkers, *, seconds_left: float | None, now: float) -> list[WorkersOutput]:
        """Have somebody planned anew, if it is time.

        Args:
            lives: the virtual workers.
            seconds_left: of the run at its present rate; None: not known.
            now: monotonic seconds.
        """
        is_busy = self._asked is not None or self._move is not None
        if self._basis is None or lives.is_ending or not self._job.has_shards or is_busy:
            return []
        return self._ask_for_fewer(lives, self._basis, now=now) or self._ask_for_faster(
            lives, self._basis, seconds_left
        )

    def _ask_for_fewer(self, lives: VirtualWorkers, basis: Basis, *, now: float) -> list[WorkersOutput]:
        """Have somebody go on without agents that have been gone for long, if it has devices of others, too."""
        for worker in lives:
            gone = lives.gone_of(worker.vw)
            agents = {stage.agent for stage in lives.assignment.plan.virtual_workers[worker.vw].stages}
            waits = worker.state is LifeState.AWAITING and worker.vw not in self._needs_all | self._strangers
            if waits and now - worker.since >= self._job.survive.absence.total_seconds() / 2 and gone and gone < agents:
                self._asked = worker.vw
                return [self._task(lives, worker.vw, basis, gone=gone)]
        return []

    def _ask_for_faster(self, lives: VirtualWorkers, basis: Basis, seconds_left: float | None) -> list[WorkersOutput]:
        """Have somebody cut anew that is off."""
        settled = all(worker.state in {LifeState.READY, LifeState.OUT} for worker in lives)
        can_be = not self._job.sync.deterministic and self._job.survive.straggler > 0.0
        if not (settled and can_be and seconds_left is not None and seconds_left > _LEAST_SAVED_SECONDS):
            return []
        known_here = [worker for worker in lives if worker.vw not in self._strangers]
        computing = [worker for worker in known_here if worker.state is LifeState.READY]
        found = {worker.vw: self._stragglers.seconds(worker.vw) for worker in computing}
        known = {vw: seconds for vw, seconds in found.items() if seconds is not None and min(seconds) > 0.0}
        if len(known) < len(found):
            return []
        rates = {vw: rate(basis, seconds) for vw, seconds in known.items()}
        for vw in sorted(rates, key=lambda vw: rates[vw]):
            worker = lives.assignment.plan.virtual_workers[vw]
            healthy = self._healthy.get(vw) or self._stragglers.reference(vw)
            if self._stragglers.is_off(vw) and not self._quiet[vw] and can_recut(basis, worker) and healthy:
                self._asked = vw
                # To save s of t seconds at a rate that is higher by g: t - t / (1 + g) >= s.
                pays = _LEAST_SAVED_SECONDS / (seconds_left - _LEAST_SAVED_SECONDS)
                task = replace(
                    self._task(lives, vw, basis),
                    seconds=known[vw],
                    healthy=healthy,
                    others=tuple(other for who, other in rates.items() if who != vw),
                    least_gain=max(self._job.survive.least_gain, pays),
                )
                return [task]
        return []

    def planned(self, answer: Replanned, lives: VirtualWorkers, *, now: float) -> list[WorkersOutput]:
        """Somebody was planned anew; have it leave, if it has not anyway."""
        self._asked = None
        vw, worker = answer.vw, _of(lives, answer.vw)
        if worker.state is LifeState.READY:
            self._quiet[vw] = _PAUSE * self._patience * 2 ** self._moves[vw]
        if answer.plan is None:
            if worker.state is LifeState.AWAITING:
                self._needs_all.add(vw)
            return []
        seconds = self._stragglers.seconds(vw) if answer.recut is not None else (0.0,)
        wanted = LifeState.AWAITING if answer.recut is None else LifeState.READY
        if worker.incarnation != answer.incarnation or worker.state is not wanted or seconds is None:
            # It was lost or has come back meanwhile, or is to leave for another reason.
            return [SettleReplan(vw, answer.incarnation, is_in_force=False)]
        before = lives.assignment.plan.virtual_workers[vw]
        emulations = lives.assignment.emulations[vw] if lives.assignment.emulations else ()
        self._move = _Move(before, emulations, answer.plan, answer.recut, answer.gain, max(seconds), answer.incarnation)
        lives.replan(answer.plan, answer.emulations)
        if answer.recut is None:
            return []
        self._moves[vw] += 1
        return lives.drain(vw, "again", now)

    def follow(self, lives: VirtualWorkers) -> list[WorkersOutput]:
        """Say and do what follows from where the virtual worker of a move stands now."""
        move = self._move
        if move is None:
            return []
        worker = _of(lives, move.before.index)
        if move.first is not None:
            return self._judge(move, worker)
        if worker.state in {LifeState.OUT, LifeState.DONE}:
            self._move = None
            return [SettleReplan(worker.vw, move.last, is_in_force=False)]
        if worker.incarnation > move.last and worker.state is LifeState.READY:
            return self._in_force(move, worker)
        if worker.incarnation > move.last and worker.state is LifeState.ENDING:
            return self._undo(move, worker, lives)
        return []

    # -- inside ------------------------------------------------------------------------------------------------------

    def _task(
        self, lives: VirtualWorkers, vw: VirtualWorkerIndex, basis: Basis, *, gone: frozenset[AgentId] = frozenset()
    ) -> Replan:
        assignment = lives.assignment
        return Replan(
            vw=vw,
            incarnation=_of(lives, vw).incarnation,
            plan=assignment.plan,
            basis=basis,
            seconds=(),
            healthy=(),
            others=(),
            staleness=self._job.staleness,
            least_gain=0.0,
            emulations=assignment.emulations[vw] if assignment.emulations else (),
            gone=gone,
        )

    def _in_force(self, move: _Move, worker: VirtualWorker) -> list[WorkersOutput]:
        new_cut, vw = move.recut, worker.vw
        if new_cut is None:
            self._move = None
            self._healthy.pop(vw, None)
            if self._job.survive.straggler and self._basis is not None:
                self._stragglers.expect(vw, expected(self._basis, move.after))
        else:
            move.first = worker.incarnation
            self._healthy[vw] = new_cut.healthy
            # A plan of its own: no other stage is like one of these.
            alike = [(vw, worker.incarnation, stage) for stage in range(len(new_cut.seconds))]
            self._stragglers.expect(vw, [Expected(*one) for one in zip(alike, new_cut.seconds, strict=True)])
        told = WorkerReplanned(vw, worker.incarnation, _counts(move.before), _counts(move.after), move.gain)
        return [Announce(told), SettleReplan(vw, worker.incarnation, is_in_force=True)]

    def _undo(self, move: _Move, worker: VirtualWorker, lives: VirtualWorkers) -> list[WorkersOutput]:
        self._move = None
        if move.recut is None:
            self._needs_all.add(worker.vw)
        lives.replan(move.before, move.emulations)
        sentence = f"{worker} did not get ready by its new plan; the plan before goes on"
        return [
            Announce(ReplanJudged(worker.vw, None, sentence)),
            SettleReplan(worker.vw, move.last, is_in_force=False),
        ]

    def _judge(self, move: _Move, worker: VirtualWorker) -> list[WorkersOutput]:
        if worker.incarnation != move.first or worker.state not in COMPUTING:
            # Nobody will ever know.
            self._move = None
            return []
        seconds = self._stragglers.seconds(worker.vw)
        if seconds is None:
            return []
        self._move = None
        slowest = max(seconds)
        gained = move.slowest_seconds / slowest - 1.0 if slowest > 0.0 else 0.0
        sentence = (
            f"the slowest stage of {worker} takes {1000 * slowest:.1f} ms for a minibatch by its new plan, "
            f"{1000 * move.slowest_seconds:.1f} ms before"
        )
        return [Announce(ReplanJudged(worker.vw, gained, sentence))]


def _of(lives: VirtualWorkers, vw: VirtualWorkerIndex) -> VirtualWorker:
    return next(worker for worker in lives if worker.vw == vw)


def _counts(worker: VirtualWorkerPlan) -> tuple[int, ...]:
    """Layers of each stage."""
    return tuple(stage.last_layer - stage.first_layer for stage in worker.stages)


def replanned(task: Replan) -> Replanned:
    """What comes of planning a virtual worker anew: its new plan if that is possible and pays, else the one it has."""
    before = task.plan.virtual_workers[task.vw]
    if task.gone:
        # It goes on without some devices, whatever that gains.
        plan = left_over(task.basis, before, task.gone)
        return Replanned(task.vw, task.incarnation, plan, None, None, _emulations(task, before, plan))
    found = recut(task.basis, before, task.seconds, task.healthy)
    if found is None or found.worker == before:
        return Replanned(task.vw, task.incarnation, None, None, None, ())
    share = gain(found, task.others, staleness=task.staleness)
    if share < task.least_gain:
        return Replanned(task.vw, task.incarnation, None, None, share, ())
    return Replanned(task.vw, task.incarnation, found.worker, found, share, _emulations(task, before, found.worker))


def _emulations(task: Replan, before: VirtualWorkerPlan, after: VirtualWorkerPlan | None) -> tuple[StageEmulation, ...]:
    return played(task.basis, before, after, task.emulations) if after is not None and task.emulations else ()
