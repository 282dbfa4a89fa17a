"""`hetpipe workers list`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hetpipe.cli.options import Coordinator, JobOfCoordinator, Json, RunDirOption, RunsDir, TlsFolder
from hetpipe.cli.run.job_connection import job_connection
from hetpipe.errors import UserError
from hetpipe.report.progress import cut_text
from hetpipe.report.text import columns, count
from hetpipe.runs.outcome import ExitStatus, Output
from hetpipe.runs.run_folder import RUNS
from hetpipe.runs.shell import Shell
from hetpipe.runs.status import worker_json
from hetpipe.values.events import JobStatus, ProcessStatus, StageRow, VirtualWorkerRow, WorkerStatus
from hetpipe.values.life_state import COMPUTING
from hetpipe.wire.calls import GET_STATUS, GetStatusRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Show the virtual workers of a run. Life, state, clock, layers per device."""

    run_dir: RunDirOption = None
    coordinator: Coordinator = None
    job: JobOfCoordinator = None
    runs_dir: RunsDir = RUNS
    tls: TlsFolder = None
    as_json: Json = False


def run(options: Options, output: Output, shell: Shell) -> ExitStatus:
    """Print the virtual workers and their states."""
    with job_connection(options, shell) as there:
        status = there.client.invoke(GET_STATUS, GetStatusRequest(there.job_id))
    if status.job_id is None:
        raise UserError("the coordinator has no job yet; submit one with `hetpipe submit`")
    output.answer(_to_json(status), *_lines(status))
    return ExitStatus.OK


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
    """The JSON object of a stage. `layers`: of all stages of the virtual worker; empty while unknown."""
    known = layers[process.index] if process.index < len(layers) else None
    return {
        "stage": process.index,
        "host": process.host,
        "pid": process.pid,
        "state": process.state,
        "device": None if known is None else known.device,
        "first_layer": None if known is None else known.first_layer,
        "last_layer": None if known is None else known.last_layer,
        "memory": None if known is None else list(known.memory),
        "memory_bytes": None if known is None else known.memory_bytes,
        "device_bytes": None if known is None else known.device_bytes or None,
    }


def _lines(status: JobStatus) -> list[str]:
    state = "no job" if status.state is None else status.state.value
    first = f"{status.name}: {state} (job {status.job_id})"
    if not status.workers:
        return [first, "it has no virtual workers at the moment"]
    heading = ["vw", "life", "state", "lost", "clock", "ahead", "stages: layers on device"]
    return [first, "", *columns([heading, *(_cells(worker, status) for worker in status.workers)])]


def _cells(worker: WorkerStatus, status: JobStatus) -> list[str]:
    """The cells of a row; lives count from 1."""
    row = _row_of(worker, status)
    clock, distance = _clock(worker, row, status), _distance(worker, row)
    return [
        str(worker.vw),
        str(worker.incarnation + 1),
        worker.state,
        str(worker.deaths),
        "-" if clock is None else str(clock),
        "-" if distance is None else str(distance),
        count(len(_stages_of(worker, status)), "stage") if row is None else cut_text(row),
    ]


def _row_of(worker: WorkerStatus, status: JobStatus) -> VirtualWorkerRow | None:
    """The row in the newest progress table; None without one."""
    rows = () if status.progress is None else status.progress.rows
    return next((row for row in rows if row.vw == worker.vw), None)


def _stages_of(worker: WorkerStatus, status: JobStatus) -> list[ProcessStatus]:
    return [process for process in status.processes if process.role == "stage" and process.vw == worker.vw]


def _clock(worker: WorkerStatus, row: VirtualWorkerRow | None, status: JobStatus) -> int | None:
    """Its local clock; for a worker that is out, the last reported one."""
    if status.clocks is not None and worker.vw in status.clocks.local:
        return int(status.clocks.local[worker.vw])
    return None if row is None else int(row.clock)


def _distance(worker: WorkerStatus, row: VirtualWorkerRow | None) -> int | None:
    """Waves ahead of the slowest; None for a worker that does not compute."""
    return row.distance if row is not None and worker.state in COMPUTING else None
