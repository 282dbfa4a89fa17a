"""Repartitioning: when it is triggered, and how it proceeds. Pure: facts in, instructions out.

The whole decision is made here. `Stragglers` detects stages that have been slower than planned for several windows;
`Repartitions` decides when a virtual worker is replanned, and what follows; `replanned` whether the new plan pays off.
The new cut and its gain are computed in `replanning.py`; the thresholds are set by the job (`survive`).

A report of a stage that has finished a wave since its last one closes a *window*: seconds of computing per minibatch. A
window is compared with the forecast for the stage or, without one, with the fastest window so far of all equal stages:
the same layers on the same type of device, including the stage itself. It is also normalized by the other stages: if
everything takes twice as long, no stage straggles, and moving layers would not help. A stage is a straggler once this
ratio has exceeded the factor for a given number of consecutive windows, and until it has been clearly below for as
many.

A virtual worker with a deviating stage is replanned, on the job's own thread. If the job gains enough, its layers move
between its running stages at the next barrier (plan-versions.md §4). A virtual worker that waits for an agent which has
been gone for half of `survive.absence` is restarted without it, if it has other devices with enough memory; if that
incarnation does not become ready, the previous plan is restored.

Oscillation is prevented: only one virtual worker at a time is replanned, only while all of them compute, only if enough
is gained and enough of the run is left; and each evaluation of a virtual worker is followed by a cool-down, which
doubles with every move. An operator asks for moves with `hetpipe workers move`; these are followed by a cool-down, too.
"""

from __future__ import annotations

import statistics
from collections import Counter, deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

from hetpipe.decide.elastic.moving import stays_near
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
from hetpipe.decide.lifecycle.exchange import (
    Announce,
    FileJudgement,
    FileStay,
    MoveAnswered,
    MoveLayers,
    Replan,
    Replanned,
    SettleReplan,
    Stay,
)
from hetpipe.decide.lifecycle.planning import check_memory_of_both
from hetpipe.decide.lifecycle.progress import StagePlace
from hetpipe.errors import InfeasiblePlan
from hetpipe.job.file import Job
from hetpipe.values.commands import StageKey
from hetpipe.values.events import ReplanJudged, Straggling, WorkerReplanned
from hetpipe.values.ids import AgentId, Clock, Incarnation, StageIndex, VirtualWorkerIndex
from hetpipe.values.life_state import COMPUTING, LifeState
from hetpipe.values.plan import VirtualWorkerPlan
from hetpipe.values.run import ClockSnapshot, StageEmulation, StageProgress
from hetpipe.values.sync import PlanMove, layer_counts

#: Windows of a virtual worker between two evaluations, as a multiple of those that make a straggler.
_PAUSE = 10

#: A move costs a barrier, and takes its time to be noticed: it must save at least this share of the remaining time.
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
    #: Reports up to this clock are of an earlier cut.
    since: Clock | None = None
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

    def expect(self, vw: VirtualWorkerIndex, stages: Sequence[Expected], *, since: Clock | None = None) -> None:
        """Set a new plan of a virtual worker and discard its measurements.

        Args:
            vw: its index.
            stages: the reference of each stage.
            since: the clock from which on its stages compute by the new plan; None: from the start of their processes.
        """
        for place in [place for place in self._stages if place[0] == vw]:
            del self._stages[place]
        for index, one in enumerate(stages):
            self._stages[vw, StageIndex(index)] = self._watched(one, Incarnation(0), since)

    def add(self, key: StageKey, report: StageProgress) -> bool:
        """Process a report; returns whether it closed a window."""
        stage = self._stages.get((key.vw, key.stage))
        if stage is None or key.incarnation < stage.incarnation:
            return False
        if key.incarnation > stage.incarnation:
            # Another process: its counts are relative to its own start.
            stage = self._stages[key.vw, key.stage] = self._watched(stage.expected, key.incarnation, stage.since)
        if stage.since is not None and report.clock <= stage.since:
            return False
        last = stage.last
        if last is None and report.minibatches:
            # The first report covers start-up, in which everything is slow.
            stage.last = report
        if last is None or report.clock <= last.clock or report.minibatches <= last.minibatches:
            return False
        stage.last = report
        minibatches = report.minibatches - last.minibatches
        stage.windows.append((report.compute_seconds - last.compute_seconds, minibatches))
        self._evaluate(stage)
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

    def _watched(self, expected: Expected, incarnation: Incarnation, since: Clock | None) -> _Watched:
        return _Watched(expected, deque(maxlen=self._patience), deque(maxlen=self._patience), incarnation, since)

    def _evaluate(self, stage: _Watched) -> None:
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
    """Layers that move between running stages."""

    vw: VirtualWorkerIndex
    before: VirtualWorkerPlan
    after: VirtualWorkerPlan
    recut: Recut | None
    """The promised times; None if an operator asked for the cut."""
    gain: float | None
    """The promised gain."""
    slowest_seconds: float
    """Seconds per minibatch of the slowest stage before; 0 if unknown."""
    move: PlanMove
    ask_at: float | None
    """When to request it from the clock shard; None while a request is pending or not needed."""
    at_barrier_from: float
    """When a live move that is not in force yet is requested at a barrier: a stage may never be prepared."""
    version: int | None = None
    """The plan version that it has made; None before it is in force."""


@dataclass(slots=True)
class _Replacement:
    """A plan for fewer devices, being introduced with new processes."""

    before: VirtualWorkerPlan
    emulations: tuple[StageEmulation, ...]
    """Of the stages of the plan before."""
    after: VirtualWorkerPlan
    last: Incarnation
    """The last incarnation under the previous plan."""


class Repartitions:
    """The moves of one job, one at a time. Not thread-safe; every call takes the monotonic time."""

    def __init__(self, lives: VirtualWorkers, basis: Basis | None, *, retry_seconds: float) -> None:
        """Start from the forecast, if any; without a basis nothing is ever moved."""
        self._job = lives.assignment.job
        survive = self._job.survive
        self._basis = basis
        self._retry_seconds = retry_seconds
        self._patience = survive.patience_waves
        workers = lives.plan.virtual_workers
        known = [worker for worker in workers if basis is not None and basis.knows(worker)]
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
        self._strangers = {worker.index for worker in workers if worker not in known}
        #: The cuts whose stages are measured.
        self._cuts = {worker.index: worker.bounds for worker in workers}
        #: The virtual worker being replanned.
        self._requested: VirtualWorkerIndex | None = None
        self._move: _Move | _Replacement | None = None
        self._published = Clock(0)

    @property
    def slow(self) -> tuple[Straggling, ...]:
        """The stages that are slower than planned."""
        return self._stragglers.straggling

    @property
    def is_busy(self) -> bool:
        """Whether a virtual worker is being replanned, or its layers are moving."""
        return self._requested is not None or (
            self._move is not None and not (isinstance(self._move, _Move) and self._move.version is not None)
        )

    def is_moving_to(self, vw: VirtualWorkerIndex, bounds: tuple[int, ...]) -> bool:
        """Whether the layers of a virtual worker are about to be cut at `bounds`."""
        move = self._move
        return isinstance(move, _Move) and move.version is None and (move.vw, move.move.bounds) == (vw, bounds)

    def on_progress(self, key: StageKey, report: StageProgress) -> None:
        """Process a progress report of a stage of a newest incarnation."""
        if self._stragglers.add(key, report) and key.stage == 0:
            self._quiet[key.vw] = max(0, self._quiet[key.vw] - 1)

    def enlarge(self, worker: VirtualWorkerPlan, basis: Basis | None) -> None:
        """Add a new virtual worker; `basis` includes its devices, if they are known."""
        self._cuts[worker.index] = worker.bounds
        if basis is None or not basis.knows(worker):
            self._strangers.add(worker.index)
            return
        self._basis = basis
        if self._job.survive.straggler:
            self._stragglers.expect(worker.index, expected(basis, worker))

    def check(self, lives: VirtualWorkers, *, seconds_left: float | None, now: float) -> list[WorkersOutput]:
        """Request the replanning of a virtual worker if it is due.

        Args:
            lives: the virtual workers.
            seconds_left: remaining time of the run at its current rate; None: unknown.
            now: monotonic seconds.
        """
        if self._job.elastic.script:  # it decides everything
            return []
        if self._basis is None or lives.is_ending or not self._job.has_shards:
            return []
        if self._requested is not None or self._move is not None:
            return []
        return self._request_fewer(lives, self._basis, now=now) or self._request_faster(
            lives, self._basis, seconds_left
        )

    def _request_fewer(self, lives: VirtualWorkers, basis: Basis, *, now: float) -> list[WorkersOutput]:
        """Request a plan without agents that have been gone for long, if the virtual worker has devices of others."""
        for worker in lives:
            gone = lives.gone_of(worker.vw)
            agents = {stage.agent for stage in lives.assignment.plan.virtual_workers[worker.vw].stages}
            waits = worker.state is LifeState.AWAITING and worker.vw not in self._needs_all | self._strangers
            if waits and now - worker.since >= self._job.survive.absence.total_seconds() / 2 and gone and gone < agents:
                self._requested = worker.vw
                return [self._task(lives, worker.vw, basis, gone=gone)]
        return []

    def _request_faster(self, lives: VirtualWorkers, basis: Basis, seconds_left: float | None) -> list[WorkersOutput]:
        """Request a new cut of a deviating virtual worker."""
        settled = all(worker.state in {LifeState.READY, LifeState.OUT} for worker in lives)
        can_be = self._job.survive.straggler > 0.0
        if not (settled and can_be and seconds_left is not None and seconds_left > _LEAST_SAVED_SECONDS):
            return []
        known_here = [worker for worker in lives if worker.vw not in self._strangers]
        computing = [worker for worker in known_here if worker.state is LifeState.READY]
        found = {worker.vw: self._stragglers.seconds(worker.vw) for worker in computing}
        known = {vw: seconds for vw, seconds in found.items() if seconds is not None and min(seconds) > 0.0}
        if len(known) < len(found):
            return []
        workers = lives.plan.virtual_workers
        rates = {vw: rate(basis.of(workers[vw]), seconds) for vw, seconds in known.items()}
        for vw in sorted(rates, key=lambda vw: rates[vw]):
            worker = workers[vw]
            healthy = self._healthy.get(vw) or self._stragglers.reference(vw)
            if self._stragglers.is_off(vw) and not self._quiet[vw] and can_recut(basis, worker) and healthy:
                self._requested = vw
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
        """Process a new plan: request the move of layers, or restart the virtual worker by it."""
        self._requested = None
        vw, worker = answer.vw, _of(lives, answer.vw)
        if worker.state is LifeState.READY:
            self._cool_down(vw)
        if answer.plan is None:
            if worker.state is LifeState.AWAITING:
                self._needs_all.add(vw)
            return []
        seconds = self._stragglers.seconds(vw) if answer.recut is not None else (0.0,)
        wanted = LifeState.AWAITING if answer.recut is None else LifeState.READY
        if worker.incarnation != answer.incarnation or worker.state is not wanted or seconds is None:
            # It was lost or rejoined meanwhile, or leaves for another reason.
            return [] if answer.recut is not None else [SettleReplan(vw, answer.incarnation, is_in_force=False)]
        if answer.recut is None:
            before = lives.assignment.plan.virtual_workers[vw]
            emulations = lives.assignment.emulations[vw] if lives.assignment.emulations else ()
            self._move = _Replacement(before, emulations, answer.plan, answer.incarnation)
            lives.replan(answer.plan, answer.emulations)
            return []
        self._moves[vw] += 1
        slow = ", ".join(f"stage {one.stage} {one.factor:.1f} times" for one in self.slow if one.vw == vw)
        return self._begin(
            lives,
            answer.plan,
            PlanMove(
                answer.incarnation,
                answer.plan.bounds,
                "straggler",
                f"compared with the plan, virtual worker {vw} takes: {slow or 'other times'}",
                answer.gain,
            ),
            recut=answer.recut,
            now=now,
        )

    def request(
        self, vw: VirtualWorkerIndex, bounds: tuple[int, ...], lives: VirtualWorkers, *, now: float
    ) -> list[WorkersOutput]:
        """Move layers as an operator asks for; the caller has checked that it can be."""
        after = lives.assignment.plan.with_bounds(vw, bounds).virtual_workers[vw]
        move = PlanMove(_of(lives, vw).incarnation, bounds, "operator", "an operator asked for it")
        self._cool_down(vw)
        return self._begin(lives, after, move, recut=None, now=now)

    def _begin(
        self, lives: VirtualWorkers, after: VirtualWorkerPlan, move: PlanMove, *, recut: Recut | None, now: float
    ) -> list[WorkersOutput]:
        before = lives.plan.virtual_workers[after.index]
        seconds = self._stragglers.seconds(after.index)
        slowest = max(seconds) if seconds else 0.0
        reason = why_at_a_barrier(self._job, self._basis, before, after)
        if reason is None:
            move = replace(move, live=True)
        else:
            move = replace(move, reason=f"{move.reason}; at a barrier, as {reason}")
        at_barrier_from = now + self._job.survive.stall.total_seconds()
        self._move = _Move(after.index, before, after, recut, move.predicted_gain, slowest, move, now, at_barrier_from)
        return self.follow(lives, None, now=now)

    def move_answered(self, answer: MoveAnswered, *, now: float) -> list[WorkersOutput]:
        """Process the clock shard's answer to a request: retry if it was not reached, give up if it refuses."""
        move = self._move
        if isinstance(move, _Move) and (answer.vw, answer.incarnation) == (move.vw, move.move.incarnation):
            if answer.outcome == "unreachable":
                move.ask_at = now + self._retry_seconds
            elif answer.outcome == "refused" and move.version is None:
                return self._give_up(move, "the clock shard refused to move them")
        return []

    def follow(self, lives: VirtualWorkers, clocks: ClockSnapshot | None, *, now: float) -> list[WorkersOutput]:
        """Continue according to the states and the plan versions of the virtual workers.

        Args:
            lives: the virtual workers.
            clocks: the newest clocks; None if there are no new ones.
            now: monotonic seconds.
        """
        move = self._move
        out: list[WorkersOutput] = []
        if isinstance(move, _Move):
            out += self._follow_move(move, lives, now=now)
        elif move is not None:
            out += self._follow_replacement(move, lives)
        if clocks is not None:
            self._published = clocks.published
            self._follow_cuts(lives, clocks)
        return out

    def _follow_move(self, move: _Move, lives: VirtualWorkers, *, now: float) -> list[WorkersOutput]:
        worker, known = _of(lives, move.vw), lives.versions.get(move.vw)
        if move.version is None and known is not None and known.bounds == move.move.bounds:
            return self._in_force(move, known.version, worker, lives)
        if move.version is not None:
            return self._measure_gain(move, worker)
        if worker.incarnation != move.move.incarnation or worker.state in {LifeState.OUT, LifeState.DONE}:
            # The next incarnation joins at the barrier, by the plan that it had.
            return self._give_up(move, f"{worker} ended before they had moved")
        if move.move.live and now >= move.at_barrier_from:
            reason = f"{move.move.reason}; at a barrier, as its stages were not prepared in time"
            move.move, move.ask_at = replace(move.move, reason=reason, live=False), now
            return self._follow_move(move, lives, now=now)
        if move.ask_at is not None and now >= move.ask_at and worker.state is LifeState.READY:
            move.ask_at = None
            plan, shards = lives.assignment.plan, lives.assignment.shards
            return [MoveLayers(move.vw, move.move, plan.term, shards[0])]
        return []

    def _give_up(self, move: _Move, reason: str) -> list[WorkersOutput]:
        """A move that was requested, and takes no effect."""
        self._move = None
        stay = Stay(_counts(move.after), move.gain, reason)
        return [FileStay(move.vw, self._published, move.move.by, stay, was_requested=True)]

    def _follow_replacement(self, move: _Replacement, lives: VirtualWorkers) -> list[WorkersOutput]:
        worker = _of(lives, move.before.index)
        if worker.state in {LifeState.OUT, LifeState.DONE}:
            self._move = None
            return [SettleReplan(worker.vw, move.last, is_in_force=False)]
        if worker.incarnation > move.last and worker.state is LifeState.READY:
            return self._replaced(move, worker)
        if worker.incarnation > move.last and worker.state is LifeState.ENDING:
            return self._undo(move, worker, lives)
        return []

    def _follow_cuts(self, lives: VirtualWorkers, clocks: ClockSnapshot) -> None:
        """Measure the stages by the cuts and the frozen layers that are in force, whatever has changed them."""
        frozen_layers = clocks.frozen[-1].layers if clocks.frozen else 0
        if self._basis is not None and self._basis.frozen_layers != frozen_layers:
            self._basis = replace(self._basis, frozen_layers=frozen_layers)
            self._cuts = dict.fromkeys(self._cuts, ())
        for worker in lives.plan.virtual_workers:
            if self._cuts[worker.index] == worker.bounds:
                continue
            self._cuts[worker.index] = worker.bounds
            move = self._move
            if isinstance(move, _Move) and move.vw == worker.index and move.recut is not None:
                # It has a cut of its own: no other stage is equal to one of these.
                self._healthy[worker.index] = move.recut.healthy
                alike = [(worker.index, move.version, stage) for stage in range(len(move.recut.seconds))]
                of = [Expected(*one) for one in zip(alike, move.recut.seconds, strict=True)]
                self._stragglers.expect(worker.index, of, since=clocks.published)
                continue
            self._healthy.pop(worker.index, None)
            if self._job.survive.straggler and self._basis is not None and self._basis.knows(worker):
                self._stragglers.expect(worker.index, expected(self._basis, worker), since=clocks.published)

    # -- internals
    # ------------------------------------------------------------------------------------------------------

    def _cool_down(self, vw: VirtualWorkerIndex) -> None:
        """Postpone the next evaluation of a virtual worker."""
        self._quiet[vw] = _PAUSE * self._patience * 2 ** self._moves[vw]

    def _task(
        self, lives: VirtualWorkers, vw: VirtualWorkerIndex, basis: Basis, *, gone: frozenset[AgentId] = frozenset()
    ) -> Replan:
        assignment = lives.assignment
        return Replan(
            vw=vw,
            incarnation=_of(lives, vw).incarnation,
            plan=assignment.plan if gone else lives.plan,
            basis=basis,
            seconds=(),
            healthy=(),
            others=(),
            staleness=self._job.staleness,
            least_gain=0.0,
            emulations=assignment.emulations[vw] if assignment.emulations else (),
            gone=gone,
            clock=self._published,
        )

    def _in_force(self, move: _Move, version: int, worker: VirtualWorker, lives: VirtualWorkers) -> list[WorkersOutput]:
        move.version = version
        if worker.incarnation != move.move.incarnation or worker.state not in COMPUTING:
            # The record came first: its next incarnation has the new cut, but cannot be compared with it.
            self._move = None
        event = WorkerReplanned(
            move.vw, move.move.incarnation, _counts(move.before), _counts(move.after), move.gain, version
        )
        return [Announce(event)]

    def _replaced(self, move: _Replacement, worker: VirtualWorker) -> list[WorkersOutput]:
        self._move = None
        vw = worker.vw
        self._healthy.pop(vw, None)
        self._cuts[vw] = move.after.bounds
        if self._job.survive.straggler and self._basis is not None:
            self._stragglers.expect(vw, expected(self._basis, move.after))
        event = WorkerReplanned(vw, worker.incarnation, _counts(move.before), _counts(move.after), None)
        return [Announce(event), SettleReplan(vw, worker.incarnation, is_in_force=True)]

    def _undo(self, move: _Replacement, worker: VirtualWorker, lives: VirtualWorkers) -> list[WorkersOutput]:
        self._move = None
        self._needs_all.add(worker.vw)
        lives.replan(move.before, move.emulations)
        sentence = f"{worker} did not become ready under its new plan; the previous plan is restored"
        return [
            Announce(ReplanJudged(worker.vw, None, sentence)),
            SettleReplan(worker.vw, move.last, is_in_force=False),
        ]

    def _measure_gain(self, move: _Move, worker: VirtualWorker) -> list[WorkersOutput]:
        if worker.incarnation != move.move.incarnation or worker.state not in COMPUTING or not move.slowest_seconds:
            # The gain remains unknown.
            self._move = None
            return []
        if self._cuts[worker.vw] != move.after.bounds:
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
        assert move.version is not None, "a move is judged once it is in force"
        return [
            Announce(ReplanJudged(worker.vw, gained, sentence)),
            FileJudgement(worker.vw, move.version, gained, sentence),
        ]


def why_at_a_barrier(job: Job, basis: Basis | None, before: VirtualWorkerPlan, after: VirtualWorkerPlan) -> str | None:
    """Why layers can move at a barrier only, as a part of a sentence; None: also while minibatches are in flight."""
    obstacle = job.obstacle_to_live_moves
    if obstacle is not None:
        return obstacle.cause
    if not stays_near(before.bounds, after.bounds):
        return "some layers go beyond the next stage"
    if basis is not None and basis.knows(after):
        try:
            kinds = [basis.kind(stage) for stage in after.stages]
            check_memory_of_both(job, basis.costs, before, after, kinds)
        except InfeasiblePlan as error:
            return str(error).partition(";")[0]
    return None


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
    if found is None:
        stay = Stay((), None, "no cut fits in the memory of its devices")
        return Replanned(task.vw, task.incarnation, None, None, None, (), stay)
    stages = layer_counts(found.worker.bounds)
    if found.worker.bounds == before.bounds:
        stay = Stay(stages, 0.0, "it is cut best already, for stages as slow as these")
        return Replanned(task.vw, task.incarnation, None, None, None, (), stay)
    share = gain(found, task.others, staleness=task.staleness)
    if share < task.least_gain:
        reason = (
            f"the best cut speeds the job up by {100 * share:.1f} %; a move has to by {100 * task.least_gain:.1f} %"
        )
        return Replanned(task.vw, task.incarnation, None, None, None, (), Stay(stages, share, reason))
    return Replanned(task.vw, task.incarnation, found.worker, found, share, _emulations(task, before, found.worker))


def _emulations(task: Replan, before: VirtualWorkerPlan, after: VirtualWorkerPlan | None) -> tuple[StageEmulation, ...]:
    return played(before, after, task.emulations) if after is not None and task.emulations else ()
