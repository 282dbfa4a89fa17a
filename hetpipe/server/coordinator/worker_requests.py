"""Requests of operators to drain, restart, add or cut virtual workers of a job: validated, then passed to its machine.

Impossible requests are rejected with a message that names the alternative; requests already fulfilled succeed, so they
are idempotent, except that two requests for a new virtual worker add two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from hetpipe.decide.elastic.enlarging import new_worker
from hetpipe.decide.elastic.script import cut_mistakes
from hetpipe.decide.elastic.virtual_workers import VirtualWorker
from hetpipe.decide.lifecycle.exchange import AddRequested, DrainRequested, MoveRequested, NewWorker
from hetpipe.decide.lifecycle.job_machine import JobMachine
from hetpipe.decide.planner.borders import check_borders
from hetpipe.decide.planner.costs import Costs
from hetpipe.errors import Unavailable, UserError
from hetpipe.observe.log import get_logger
from hetpipe.server.coordinator.coordinator import Coordinator
from hetpipe.server.coordinator.job_hosts import JobHost
from hetpipe.values.events import JobState, WorkerStatus
from hetpipe.values.ids import JobId, VirtualWorkerIndex
from hetpipe.values.life_state import LifeState
from hetpipe.values.run import AgentInfo
from hetpipe.values.sync import layer_counts

_log = get_logger(__name__)

#: The alternative where the number of virtual workers is fixed while the job runs.
_INSTEAD = "stop the job at a checkpoint and resume it with another `workers.count`"


class WorkerRequests:
    """Handler of drain, restart, add and move requests. Thread-safe."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    def drain(self, job_id: JobId | None, vw: VirtualWorkerIndex) -> WorkerStatus:
        """Drain a virtual worker, after the next barrier if it computes; returns its current state.

        Raises:
            UnknownJob: there is no such job.
            UserError: the job is not running, has no such virtual worker, or it cannot leave.
        """
        with self._coordinator.condition:
            host = self._host(job_id)
            worker = named(host.machine, vw)
            check_unscripted(host.machine, worker)
            check_drain(host.machine, worker)
            _log.info("drain_asked", job=host.job_id, vw=vw)
            self._coordinator.feed_job(host, DrainRequested(vw, "out"))
            return worker.status

    def add(self, job_id: JobId | None, vw: VirtualWorkerIndex | None) -> tuple[WorkerStatus, ...]:
        """Restart a virtual worker, or all that are out, or else add a new one; returns their states.

        Raises:
            UnknownJob: there is no such job. UserError: the job is not running, has no such virtual worker, or none is
            out and there is no room for another. Unavailable: this coordinator does not have enough reports yet.
        """
        with self._coordinator.condition:
            host = self._host(job_id)
            workers = missing(host.machine) if vw is None else [named(host.machine, vw)]
            if not workers:
                return (self._enlarge(host),)
            for worker in workers:
                if worker.stays_out:
                    check_unscripted(host.machine, worker)
            for worker in workers:
                _log.info("add_asked", job=host.job_id, vw=worker.vw)
                self._coordinator.feed_job(host, AddRequested(worker.vw))
            return tuple(worker.status for worker in workers)

    def move(
        self, job_id: JobId | None, vw: VirtualWorkerIndex, layers: Sequence[int]
    ) -> tuple[WorkerStatus, tuple[int, ...]]:
        """Move layers between the stages of a virtual worker at the next barrier.

        Args:
            job_id: the job; None for the newest.
            vw: the virtual worker.
            layers: of each of its stages after the move.

        Returns:
            Its state, and the layers of each of its stages now.

        Raises:
            UnknownJob: there is no such job.
            UserError: the job is not running, has no such virtual worker, or its layers cannot move like that.
        """
        with self._coordinator.condition:
            host = self._host(job_id)
            worker = named(host.machine, vw)
            request, before = requested_move(host.machine, worker, layers)
            if request is not None:
                _log.info("move_asked", job=host.job_id, vw=vw, before=list(before), after=list(layers))
                self._coordinator.feed_job(host, request)
            return worker.status, before

    def _enlarge(self, host: JobHost) -> WorkerStatus:
        """Add a new virtual worker.

        Raises:
            UserError: there is no room for another.
            Unavailable: the free devices are unknown yet.
        """
        new = another(host.machine, self._coordinator.free_devices())
        devices = [stage.device for stage in new.plan.stages]
        _log.info("new_worker_asked", job=host.job_id, vw=new.plan.index, devices=devices)
        self._coordinator.feed_job(host, new)
        return replace(named(host.machine, new.plan.index).status, devices=tuple(devices))

    def _host(self, job_id: JobId | None) -> JobHost:
        """A job whose virtual workers can change.

        Raises:
            UnknownJob: there is no such job.
            UserError: it has ended.
            Unavailable: its parameter servers have not registered with this coordinator yet.
        """
        record = self._coordinator.record(job_id)
        if record.state.is_terminal:
            raise UserError(f"job {record.job_id} has {record.state}: it has no virtual workers any more")
        host = self._coordinator.host(record.job_id)
        if host is None:
            raise Unavailable(
                f"job {record.job_id} continues, but its parameter servers have not reached the new coordinator yet; "
                "try again in a few seconds"
            )
        return host


def named(machine: JobMachine, vw: VirtualWorkerIndex) -> VirtualWorker:
    """The virtual worker with that index.

    Raises:
        UserError: it does not exist, or the job's virtual workers cannot change now.
    """
    workers = _workers(machine)
    if vw not in workers:
        known = ", ".join(map(str, workers))
        raise UserError(f"job {machine.job_id} has no virtual worker {vw}; name one of these: {known}")
    return workers[vw]


def check_unscripted(machine: JobMachine, worker: VirtualWorker) -> None:
    """Check that an operator, and neither the script of the job nor frozen layers, decide whether it trains.

    Raises:
        UserError: they do.
    """
    if any(line.vw == worker.vw for line in machine.job.elastic.members):
        raise UserError(f"the script of the job (elastic.script) decides when {worker} trains; change it there")
    if machine.job.freeze.compress:
        raise UserError(f"frozen layers decide when {worker} trains (freeze.compress); remove that")


def check_drain(machine: JobMachine, worker: VirtualWorker) -> None:
    """Check that a virtual worker can leave.

    Raises:
        UserError: it cannot.
    """
    if not machine.job.has_shards:
        raise UserError(
            f"{worker} cannot leave: under `{machine.job.sync.kind}` only the stages hold the weights; {_INSTEAD}"
        )
    others = [other for other in _workers(machine).values() if other is not worker and other.will_train]
    if worker.will_train and not others:
        raise UserError(
            f"{worker} is the last one of job {machine.job_id}, which would stop training; add another one first "
            "(`hetpipe workers add`), or stop the job"
        )


def requested_move(
    machine: JobMachine, worker: VirtualWorker, layers: Sequence[int]
) -> tuple[MoveRequested | None, tuple[int, ...]]:
    """The move of layers that an operator asks for.

    Args:
        machine: state machine of the job.
        worker: one of its virtual workers.
        layers: of each of its stages after the move, ≥ 1.

    Returns:
        The request, None where the layers are cut like that, or are about to be; and those of each stage now.

    Raises:
        UserError: it cannot be done.
    """
    job, lives, run, repartitions = machine.job, machine.lives, machine.run, machine.repartitions
    assert lives is not None, "a virtual worker was found"
    assert run is not None, "virtual workers have a plan"
    assert repartitions is not None, "it watches the virtual workers"
    if job.sync.traits.averages_gradients:
        raise UserError(
            f"the layers of {worker} cannot move: under `{job.sync.kind}` all virtual workers are cut alike, at the "
            "same time; write the moves as `elastic.script` of a job"
        )
    if job.elastic.script:
        raise UserError(f"the script of the job (elastic.script) decides how {worker} is cut; change it there")
    plan = lives.plan.virtual_workers[worker.vw]
    mistake = next(cut_mistakes(layers, plan), None)
    if mistake is not None:
        raise UserError(f"the cut {_text(layers)} {mistake}")
    bounds = (0, *accumulate(layers))
    if run.described is not None:
        check_borders(bounds[1:-1], Costs(run.described.profile, run.described.cluster), worker.vw)
    before = layer_counts(plan.bounds)
    if repartitions.is_moving_to(worker.vw, bounds):
        return None, before
    if repartitions.is_busy:
        raise UserError(
            f"layers of job {machine.job_id} move already, or are about to; try again behind the next barrier "
            "(`hetpipe workers list` shows the cut in force)"
        )
    if bounds == plan.bounds:
        return None, before
    if lives.is_ending:
        raise UserError(f"the run of job {machine.job_id} is over, or about to be; no layers move any more")
    if worker.state is not LifeState.READY:
        raise UserError(
            f"{worker} is {worker.state}, and layers move between stages that compute; try again when `hetpipe workers "
            "list` shows it `ready`"
        )
    return MoveRequested(worker.vw, bounds), before


def _text(layers: Sequence[int]) -> str:
    return ",".join(map(str, layers))


def missing(machine: JobMachine) -> list[VirtualWorker]:
    """Virtual workers that are not restarted automatically.

    Raises:
        UserError: the job's virtual workers cannot change now.
    """
    return [worker for worker in _workers(machine).values() if worker.state is LifeState.OUT or worker.stays_out]


def another(machine: JobMachine, free: Sequence[AgentInfo]) -> NewWorker:
    """Create the new virtual worker of a job whose virtual workers are all running.

    Args:
        machine: state machine of the job.
        free: agents with their free devices.

    Raises:
        UserError: it cannot be added.
    """
    job, lives, run = machine.job, machine.lives, machine.run
    if machine.state is not JobState.RUNNING or lives is None or run is None:
        raise UserError(f"job {machine.job_id} is {machine.state}; try again when it runs")
    if not job.has_shards:
        raise UserError(
            f"job {machine.job_id} gets no more virtual workers: under `{job.sync.kind}` only the stages hold the "
            f"weights; {_INSTEAD}"
        )
    if lives.assignment.emulations:
        raise UserError(
            f"job {machine.job_id} gets no more virtual workers: with `cluster.emulate` each device plays one of the "
            f"file; {_INSTEAD}"
        )
    if lives.is_ending:
        raise UserError(
            f"the run of job {machine.job_id} is over, or about to be; no virtual worker can join it any more"
        )
    return new_worker(run, lives.assignment.plan, free)


def _workers(machine: JobMachine) -> dict[VirtualWorkerIndex, VirtualWorker]:
    """Virtual workers of a live job, by index."""
    if machine.state is JobState.STOPPING:
        raise UserError(f"job {machine.job_id} is about to stop, and all its virtual workers with it")
    if machine.lives is None:
        raise UserError(
            f"job {machine.job_id} is {machine.state}: it has no virtual workers yet; try again when it runs"
        )
    return {worker.vw: worker for worker in machine.lives}
