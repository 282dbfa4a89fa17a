"""Repartitioning because of stragglers: when it is triggered, and how it proceeds. Pure: facts in, instructions out.

The whole decision is made here. `Stragglers` detects stages that have been slower than planned for several windows;
`Repartitions` decides when a virtual worker is replanned, and what follows; `replanned` whether the new plan pays off.
The new cut and its gain are computed in `replanning.py`; the thresholds are set by the job (`survive`).

A report of a stage that has finished a wave since its last one closes a *window*: seconds of computing per minibatch. A
window is compared with the forecast for the stage or, without one, with the fastest window so far of all equal stages:
the same layers on the same type of device, including the stage itself. It is also normalized by the other stages: if
everything takes twice as long, no stage straggles, and moving layers would not help. A stage is a straggler once this
ratio has exceeded the factor for a given number of consecutive windows, and until it has been clearly below for as
many.

A virtual worker with a deviating stage is replanned, on the job's own thread. If the job gains enough, that incarnation
leaves at the next barrier, with a checkpoint, and the next one starts with the new plan. If that one does not become
ready, the previous plan is restored. A virtual worker that waits for an agent which has been gone for half of
`survive.absence` continues without it, if it has other devices with enough memory.

Oscillation is prevented: only one virtual worker at a time is replanned, only while all of them compute, only if enough
is gained and enough of the run is left; and each evaluation of a virtual worker is followed by a cool-down, which
doubles with every move.
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
    rates_to_match,
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

#: Windows of a virtual worker between two evaluations, as a multiple of those that make a straggler.
_PAUSE = 10

#: A move costs a barrier and process starts: it must save at least this share of the remaining time.
_LEAST_SAVED_SECONDS = 20.0


@dataclass(slots=True)
class _Watched:
    """One stage of the newest incarnation of its virtual worker."""

    expected: Expected
    #: (seconds, minibatches) of the latest windows.
    windows: deque[tuple[float, int]]
    #: The deviation of each of them.
    factors: deque[float]
    incarnation: Incarnation = Incarnation(0)
    #: The report that ended the latest window; None before the first one of this incarnation, which is not counted.
    last: StageProgress | None = None
    #: Consecutive windows off in either direction; consecutive windows within the bounds.
    off: int = 0
    calm: int = 0
    straggles: bool = False


class Stragglers:
    """Straggler detection for all stages of a job. Not thread-safe."""

    def __init__(
        self, expected: Mapping[VirtualWorkerIndex, Sequence[Expected]], *, factor: float, patience_windows: int
    ) -> None:
        """Start without measurements.

        Args:
            expected: per virtual worker, for each stage.
            factor: deviation threshold, in either direction; > 1.
            patience_windows: consecutive windows required; ≥ 1.
        """
        self._factor = factor
        self._patience = patience_windows
        self._stages: dict[StagePlace, _Watched] = {}
        #: The fastest window so far of equal stages, in seconds per minibatch.
        self._fastest: dict[Hashable, float] = {}
        for vw, stages in expected.items():
            self.expect(vw, stages)

    def expect(self, vw: VirtualWorkerIndex, stages: Sequence[Expected]) -> None:
        """Set a new plan of a virtual worker and discard its measurements."""
        for place in [place for place in self._stages if place[0] == vw]:
            del self._stages[place]
        for index, one in enumerate(stages):
            self._stages[vw, StageIndex(index)] = self._watched(one, Incarnation(0))

    def add(self, key: StageKey, report: StageProgress) -> bool:
        """Process a report; returns whether it closed a window."""
        stage = self._stages.get((key.vw, key.stage))
        if stage is None or key.incarnation < stage.incarnation:
            return False
        if key.incarnation > stage.incarnation:
            # Another process: its counts are relative to its own start.
            stage = self._stages[key.vw, key.stage] = self._watched(stage.expected, key.incarnation)
        last = stage.last
        if last is None and report.minibatches:
            # The first report covers start-up, in which everything is slow.
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
        """The current stragglers, in order, with the largest deviation of their latest windows.

        At least one of these windows exceeds the bounds, although the latest may not.
        """
        named = {place: stage for place, stage in self._stages.items() if stage.straggles}
        return tuple(Straggling(*place, max(stage.factors)) for place, stage in named.items())

    def is_off(self, vw: VirtualWorkerIndex) -> bool:
        """Whether one of its stages has deviated, in either direction, for the required number of windows."""
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
        """The reference of each stage, in seconds per minibatch; None while unknown."""
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
        # Half of the threshold, as hysteresis against noise.
        stage.calm = stage.calm + 1 if factor < (1.0 + self._factor) / 2.0 else 0
        if is_slow and stage.off >= self._patience:
            stage.straggles = True
        elif stage.calm >= self._patience:
            stage.straggles = False

    def _relative(self, stage: _Watched) -> float:
        """The deviation of its latest window, normalized by the common deviation of the others."""
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
    """A new plan being introduced."""

    before: VirtualWorkerPlan
    emulations: tuple[StageEmulation, ...]
    """Index of the plan before."""
    after: VirtualWorkerPlan
    recut: Recut | None
    """The promised gain; None if it only continues with fewer devices."""
    gain: float | None
    slowest_seconds: float
    """Seconds per minibatch of the slowest stage under the previous plan; 0 if not needed."""
    last: Incarnation
    """The last incarnation under the previous plan."""
    first: Incarnation | None = None
    """The first incarnation under the new plan; None before it is ready."""


class Repartitions:
    """The moves of one job, one at a time. Not thread-safe; every call takes the monotonic time."""

    def __init__(self, assignment: Assignment, basis: Basis | None) -> None:
        """Start from the forecast, if any; without a basis nothing is ever moved."""
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
        #: Times of stages on unimpaired devices, for replanned virtual workers.
        self._healthy: dict[VirtualWorkerIndex, tuple[float, ...]] = {}
        #: Windows until a virtual worker is evaluated again, and the number of its moves.
        self._quiet: Counter[VirtualWorkerIndex] = Counter()
        self._moves: Counter[VirtualWorkerIndex] = Counter()
        #: Virtual workers that cannot do with fewer devices.
        self._needs_all: set[VirtualWorkerIndex] = set()
        #: Virtual workers with devices of which too little is known.
        self._strangers = {worker.index for worker in assignment.plan.virtual_workers if worker not in known}
        #: The virtual worker being replanned.
        self._asked: VirtualWorkerIndex | None = None
        self._move: _Move | None = None

    @property
    def slow(self) -> tuple[Straggling, ...]:
        """The stages that are slower than planned."""
        return self._stragglers.straggling

    def heard(self, key: StageKey, report: StageProgress) -> None:
        """Process a progress report of a stage of a newest incarnation."""
        if self._stragglers.add(key, report) and key.stage == 0:
            self._quiet[key.vw] = max(0, self._quiet[key.vw] - 1)

    def enlarge(self, worker: VirtualWorkerPlan, basis: Basis | None) -> None:
        """Add a new virtual worker; `basis` includes its devices, if they are known."""
        if basis is None or not basis.knows(worker):
            self._strangers.add(worker.index)
            return
        self._basis = basis
        if self._job.survive.straggler:
            self._stragglers.expect(worker.index, expected(basis, worker))

    def look(self, lives: VirtualWorkers, *, seconds_left: float | None, now: float) -> list[WorkersOutput]:
        """Request the replanning of a virtual worker if it is due.

        Args:
            lives: the virtual workers.
            seconds_left: remaining time of the run at its current rate; None: unknown.
            now: monotonic seconds.
        """
        is_busy = self._asked is not None or self._move is not None
        if self._job.elastic.script:  # it decides everything
            return []
        if self._basis is None or lives.is_ending or not self._job.has_shards or is_busy:
            return []
        return self._ask_for_fewer(lives, self._basis, now=now) or self._ask_for_faster(
            lives, self._basis, seconds_left
        )

    def _ask_for_fewer(self, lives: VirtualWorkers, basis: Basis, *, now: float) -> list[WorkersOutput]:
        """Request a plan without agents that have been gone for long, if the virtual worker has devices of others."""
        for worker in lives:
            gone = lives.gone_of(worker.vw)
            agents = {stage.agent for stage in lives.assignment.plan.virtual_workers[worker.vw].stages}
            waits = worker.state is LifeState.AWAITING and worker.vw not in self._needs_all | self._strangers
            if waits and now - worker.since >= self._job.survive.absence.total_seconds() / 2 and gone and gone < agents:
                self._asked = worker.vw
                return [self._task(lives, worker.vw, basis, gone=gone)]
        return []

    def _ask_for_faster(self, lives: VirtualWorkers, basis: Basis, seconds_left: float | None) -> list[WorkersOutput]:
        """Request a new cut of a deviating virtual worker."""
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
        workers = lives.assignment.plan.virtual_workers
        rates = {vw: rate(basis.of(workers[vw]), seconds) for vw, seconds in known.items()}
        for vw in sorted(rates, key=lambda vw: rates[vw]):
            worker = workers[vw]
            healthy = self._healthy.get(vw) or self._stragglers.reference(vw)
            if self._stragglers.is_off(vw) and not self._quiet[vw] and can_recut(basis, worker) and healthy:
                self._asked = vw
                # To save s of t seconds with a rate higher by g: t - t / (1 + g) >= s.
                pays = _LEAST_SAVED_SECONDS / (seconds_left - _LEAST_SAVED_SECONDS)
                task = replace(
                    self._task(lives, vw, basis),
                    seconds=known[vw],
                    healthy=healthy,
                    others=rates_to_match(basis, workers, rates, vw, staleness=self._job.staleness),
                    least_gain=max(self._job.survive.least_gain, pays),
                )
                return [task]
        return []

    def planned(self, answer: Replanned, lives: VirtualWorkers, *, now: float) -> list[WorkersOutput]:
        """Process a new plan; drains the virtual worker unless it is leaving anyway."""
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
            # It was lost or rejoined meanwhile, or leaves for another reason.
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
        """Continue a move according to the state of its virtual worker."""
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

    # -- internals
    # ------------------------------------------------------------------------------------------------------

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
            # It has a plan of its own: no other stage is equal to one of these.
            alike = [(vw, worker.incarnation, stage) for stage in range(len(new_cut.seconds))]
            self._stragglers.expect(vw, [Expected(*one) for one in zip(alike, new_cut.seconds, strict=True)])
        told = WorkerReplanned(vw, worker.incarnation, _counts(move.before), _counts(move.after), move.gain)
        return [Announce(told), SettleReplan(vw, worker.incarnation, is_in_force=True)]

    def _undo(self, move: _Move, worker: VirtualWorker, lives: VirtualWorkers) -> list[WorkersOutput]:
        self._move = None
        if move.recut is None:
            self._needs_all.add(worker.vw)
        lives.replan(move.before, move.emulations)
        sentence = f"{worker} did not become ready under its new plan; the previous plan is restored"
        return [
            Announce(ReplanJudged(worker.vw, None, sentence)),
            SettleReplan(worker.vw, move.last, is_in_force=False),
        ]

    def _judge(self, move: _Move, worker: VirtualWorker) -> list[WorkersOutput]:
        if worker.incarnation != move.first or worker.state not in COMPUTING:
            # The gain remains unknown.
            self._move = None
            return []
        seconds = self._stragglers.seconds(worker.vw)
        if seconds is None:
            return []
        self._move = None
        slowest = max(seconds)
        gained = move.slowest_seconds / slowest - 1.0 if slowest > 0.0 else 0.0
        sentence = (
            f"the slowest stage of {worker} takes {1000 * slowest:.1f} ms per minibatch under its new plan, "
            f"{1000 * move.slowest_seconds:.1f} ms before"
        )
        return [Announce(ReplanJudged(worker.vw, gained, sentence))]


def _of(lives: VirtualWorkers, vw: VirtualWorkerIndex) -> VirtualWorker:
    return next(worker for worker in lives if worker.vw == vw)


def _counts(worker: VirtualWorkerPlan) -> tuple[int, ...]:
    """Layers of each stage."""
    return tuple(stage.last_layer - stage.first_layer for stage in worker.stages)


def replanned(task: Replan) -> Replanned:
    """Result of replanning a virtual worker: the new plan if it is possible and pays off, else the current one."""
    before = task.plan.virtual_workers[task.vw]
    if task.gone:
        # It continues without some devices, whatever the gain.
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
