"""The virtual workers of a run: who they are, and the wishes that one leaves or comes back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hetpipe.cli.run.asking import WhichJob, asked
from hetpipe.errors import HetpipeError, UserError
from hetpipe.report.progress import stages_text
from hetpipe.report.text import columns, count
from hetpipe.runs.outcome import ExitStatus, Output
from hetpipe.runs.shell import Shell
from hetpipe.runs.status import worker_json
from hetpipe.values.events import JobStatus, ProcessStatus, StageRow, VirtualWorkerRow, WorkerStatus
from hetpipe.values.ids import VirtualWorkerIndex
from hetpipe.values.life_state import COMPUTING, LifeState

#: What a state means, for people who asked for something.
_STATE_TEXTS = {
    LifeState.STARTING: "is starting",
    LifeState.READY: "is there",
    LifeState.LEAVING: "leaves at the next barrier",
    LifeState.DONE: "has come to the end of the run",
    LifeState.ENDING: "is being ended",
    LifeState.AWAITING: "comes back as soon as it can",
    LifeState.ADMITTING: "is coming back",
    LifeState.OUT: "is out",
}

#: States in which nothing more becomes of somebody who was asked to leave.
_GONE = frozenset({LifeState.OUT, LifeState.DONE})


def list_workers(which: WhichJob, output: Output, shell: Shell) -> ExitStatus:
    """Tell who the virtual workers are and where each stands."""
    with asked(which, shell) as there:
        status = there.client.status(there.job_id)
    if status.job_id is None:
        raise UserError("the coordinator has no job yet; hand one in with `hetpipe submit`")
    output.answer(_to_json(status), *_lines(status))
    return ExitStatus.OK


def drain(
    vws: Sequence[int], which: WhichJob, output: Output, shell: Shell, *, wait: bool, timeout_seconds: float
) -> ExitStatus:
    """Ask virtual workers to leave, and wait until they have if that is wanted."""
    with asked(which, shell) as there:
        told = _one_by_one(vws, lambda vw: (there.client.drain_worker(VirtualWorkerIndex(vw), there.job_id),), output)
        if wait:
            output.note("waiting for the next barrier")
            status = there.wait(
                there.client.status(there.job_id),
                lambda status: not _late(status, vws),
                lambda status: _sentence(status, vws, timeout_seconds),
                output.note,
                shell,
                timeout_seconds=timeout_seconds,
            )
            told = [worker for worker in status.workers if worker.vw in vws]
    _answer(told, output)
    return ExitStatus.OK


def add(vws: Sequence[int], which: WhichJob, output: Output, shell: Shell) -> ExitStatus:
    """Ask virtual workers back; without a name all that are out, or if none is, for another one."""
    with asked(which, shell) as there:
        told = _one_by_one(vws, lambda vw: there.client.add_worker(VirtualWorkerIndex(vw), there.job_id), output)
        told += () if vws else there.client.add_worker(None, there.job_id)
    _answer(told, output)
    return ExitStatus.OK


def _one_by_one(vws: Sequence[int], ask: Callable[[int], Sequence[WorkerStatus]], output: Output) -> list[WorkerStatus]:
    """Ask for each. If one is refused, what becomes of those before it is said: they have been asked."""
    told: list[WorkerStatus] = []
    try:
        for vw in vws:
            told += ask(vw)
    except HetpipeError:
        for worker in told:
            output.note(_line(worker))
        raise
    return told


# -- what is told ------------------------------------------------------------------------------------------------------


def _to_json(status: JobStatus) -> dict[str, Any]:
    return {
        "job_id": status.job_id,
        "state": None if status.state is None else status.state.value,
        "workers": [_worker_json(worker, status) for worker in status.workers],
    }


def _worker_json(worker: WorkerStatus, status: JobStatus) -> dict[str, Any]:
    row = _row_of(worker, status)
    layers = () if row is None else row.stages
    return {
        **worker_json(worker),
        "clock": _clock(worker, row, status),
        "distance": _distance(worker, row),
        "stages": [_stage_json(process, layers) for process in _stages_of(worker, status)],
    }


def _stage_json(process: ProcessStatus, layers: Sequence[StageRow]) -> dict[str, Any]:
    """`layers`: of all stages of the virtual worker; empty while that is not known."""
    known = layers[process.index] if process.index < len(layers) else None
    return {
        "stage": process.index,
        "host": process.host,
        "pid": process.pid,
        "state": process.state,
        "device": None if known is None else known.device,
        "first_layer": None if known is None else known.first_layer,
        "last_layer": None if known is None else known.last_layer,
    }


def _lines(status: JobStatus) -> list[str]:
    state = "no job" if status.state is None else status.state.value
    first = f"{status.name}: {state} (job {status.job_id})"
    if not status.workers:
        return [first, "it has no virtual workers yet, or any more"]
    heading = ["vw", "life", "state", "lost", "clock", "ahead", "stages: layers on device"]
    return [first, "", *columns([heading, *(_cells(worker, status) for worker in status.workers)])]


def _cells(worker: WorkerStatus, status: JobStatus) -> list[str]:
    """People count lives from 1."""
    row = _row_of(worker, status)
    clock, distance = _clock(worker, row, status), _distance(worker, row)
    return [
        str(worker.vw),
        str(worker.incarnation + 1),
        worker.state,
        str(worker.deaths),
        "-" if clock is None else str(clock),
        "-" if distance is None else str(distance),
        count(len(_stages_of(worker, status)), "stage") if row is None else stages_text(row.stages),
    ]


def _row_of(worker: WorkerStatus, status: JobStatus) -> VirtualWorkerRow | None:
    """Of the newest picture; None before there is one."""
    rows = () if status.progress is None else status.progress.rows
    return next((row for row in rows if row.vw == worker.vw), None)


def _stages_of(worker: WorkerStatus, status: JobStatus) -> list[ProcessStatus]:
    return [process for process in status.processes if process.role == "stage" and process.vw == worker.vw]


def _clock(worker: WorkerStatus, row: VirtualWorkerRow | None, status: JobStatus) -> int | None:
    """Its local clock; the last one that was heard of, once it is out."""
    if status.clocks is not None and worker.vw in status.clocks.local:
        return int(status.clocks.local[worker.vw])
    return None if row is None else int(row.clock)


def _distance(worker: WorkerStatus, row: VirtualWorkerRow | None) -> int | None:
    """Waves ahead of the slowest; None for one that does not compute."""
    return row.distance if row is not None and worker.state in COMPUTING else None


def _answer(workers: Sequence[WorkerStatus], output: Output) -> None:
    output.answer({"workers": [worker_json(worker) for worker in workers]}, *map(_line, workers))


def _line(worker: WorkerStatus) -> str:
    text = _STATE_TEXTS.get(worker.state, worker.state)
    if worker.devices:
        text = f"is new, and joins at a barrier as soon as it is ready; it has {', '.join(worker.devices)}"
    return f"virtual worker {worker.vw} {text}"


# -- waiting -----------------------------------------------------------------------------------------------------------


def _late(status: JobStatus, vws: Sequence[int]) -> list[WorkerStatus]:
    """Those of `vws` that have not left."""
    return [worker for worker in status.workers if worker.vw in vws and worker.state not in _GONE]


def _sentence(status: JobStatus, vws: Sequence[int], timeout_seconds: float) -> str:
    return f"not everybody has left within {timeout_seconds:.0f} s: {'; '.join(map(_line, _late(status, vws)))}"
