"""When layers of a virtual worker are moved, and how that goes. Pure: facts in, instructions out.

A virtual worker of which a stage has left the plan is planned anew, on the job's own thread. If the job gains enough,
that life leaves at the next barrier, with a checkpoint, and the next one begins by the new plan. If that one does not
get ready, the plan before goes on. A virtual worker that waits for an agent which has been gone for half of
`survive.absence` goes on without it, if it has other devices and these have the memory.

It never flip-flops: one virtual worker at a time, only while all of them compute, only if enough is gained and enough
of the run is left; and after each look at a virtual worker there is none for a while, twice as long after each move.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from hetpipe.decide.elastic.replanning import Basis, Recut, can_recut, expected, rate
from hetpipe.decide.elastic.stragglers import Expected, Stragglers
from hetpipe.decide.elastic.virtual_workers import VirtualWorker, VirtualWorkers, WorkersOutput
from hetpipe.decide.lifecycle.configs import Assignment
from hetpipe.decide.lifecycle.exchange import Announce, Replan, Replanned, SettleReplan
from hetpipe.values.commands import StageKey
from hetpipe.values.events import ReplanJudged, Straggling, WorkerReplanned
from hetpipe.values.ids import AgentId, Incarnation, VirtualWorkerIndex
from hetpipe.values.life_state import COMPUTING, LifeState
from hetpipe.values.plan import VirtualWorkerPlan
from hetpipe.values.run import StageEmulation, StageProgress

#: Windows of a virtual worker between two looks at it, for each that makes a straggler.
_PAUSE = 10

#: A move costs a barrier and the start of processes: it is to save at least so much of the time that is left.
_LEAST_SAVED_SECONDS = 20.0


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
        recut, vw = move.recut, worker.vw
        if recut is None:
            self._move = None
            self._healthy.pop(vw, None)
            if self._job.survive.straggler and self._basis is not None:
                self._stragglers.expect(vw, expected(self._basis, move.after))
        else:
            move.first = worker.incarnation
            self._healthy[vw] = recut.healthy
            # A plan of its own: no other stage is like one of these.
            alike = [(vw, worker.incarnation, stage) for stage in range(len(recut.seconds))]
            self._stragglers.expect(vw, [Expected(*one) for one in zip(alike, recut.seconds, strict=True)])
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
