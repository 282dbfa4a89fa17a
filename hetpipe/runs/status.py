"""The status of a run, from its coordinator if it has one, else from its files."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from hetpipe.checkpoint.locations import has_checkpoint_at
from hetpipe.errors import Unavailable, UnknownJob
from hetpipe.report.conditions import condition_lines
from hetpipe.report.progress import cache_text, cut_text, memory_text, no_utilisation_text, place_of, slow_text
from hetpipe.report.text import columns, count, loss_first, measure, percent, rate, shown_path
from hetpipe.runs.active_layers import InactiveSince, read_inactive
from hetpipe.runs.cuts import CutChange, read_cuts
from hetpipe.runs.result import EvaluationResult, EvaluationResults
from hetpipe.runs.run_folder import RunFolder, RunRecord, RunResult
from hetpipe.runs.shell import Shell
from hetpipe.runs.training import resume_command
from hetpipe.values.conditions import Condition
from hetpipe.values.events import (
    JobState,
    JobStatus,
    ProcessStatus,
    ProgressTable,
    QueuePlace,
    StageRow,
    Straggling,
    VirtualWorkerRow,
    WorkerStatus,
)
from hetpipe.values.freezing import FrozenSince
from hetpipe.values.ids import JobId
from hetpipe.values.life_state import LifeState
from hetpipe.values.plan import ProofReport
from hetpipe.values.rewinds import run_folders
from hetpipe.values.run import CacheUse
from hetpipe.values.utilisation import ModelSpeed
from hetpipe.values.wire import plain, revive
from hetpipe.wire.calls import GET_STATUS, GetStatusRequest

#: States of a run beyond those of its job.
STARTING, ENDING, DIED, UNKNOWN, NO_JOB = "starting", "ending", "died", "unknown", "no job"

#: States of a virtual worker that is leaving or has left without having been lost.
_AWAY = frozenset(LifeState) - {LifeState.STARTING, LifeState.READY, LifeState.DONE}


#: Conditions for such a virtual worker's restart.
_WAYS_ON = {
    LifeState.AWAITING: "it is restarted after a back-off, once its agents and all parameter servers are available",
    LifeState.OUT: "`hetpipe workers add {vw}` restarts it",
}


@dataclass(frozen=True, slots=True)
class EvaluationsSoFar:
    """The evaluations of a run, without those undone by a rewind."""

    number: int
    best: EvaluationResult | None
    """None if no evaluation covered all of the evaluation data."""
    last: EvaluationResult

    def __str__(self) -> str:
        """`evaluation: loss 0.0850 after epoch 9, clock 90 (9 so far); least loss 0.0831 after epoch 8, clock 80`."""
        values = ", ".join(f"{name} {measure(self.last.values[name])}" for name in loss_first(self.last.values))
        least = ""
        if self.best is not None and self.best != self.last:
            least = f"; least loss {measure(self.best.values.get('loss'))} {place_of(self.best)}"
        part = "" if self.last.whole else f" on {count(self.last.samples, 'sample')}"
        return f"evaluation: {values}{part} {place_of(self.last)} ({self.number} so far){least}"


@dataclass(frozen=True, slots=True)
class RunSpeed:
    """The speed of a run: current, or of the whole run."""

    samples_per_second: float
    model: ModelSpeed

    def to_json(self) -> dict[str, Any]:
        """The object of `status --json`."""
        return {"samples_per_second": self.samples_per_second, **plain(ModelSpeed, self.model)}

    def __str__(self) -> str:
        """`speed: 123 samples/s, 15744 tokens/s, 41.0 % MFU`, or why there is no MFU."""
        model, text = self.model, f"speed: {rate(self.samples_per_second)} samples/s"
        if model.tokens_per_second is not None:
            text += f", {rate(model.tokens_per_second)} tokens/s"
        if model.model_flops_utilisation is not None:
            return f"{text}, {percent(model.model_flops_utilisation)} MFU"
        reason = model.model_flops_utilisation_reason
        return f"{text}; {no_utilisation_text(reason)}" if reason else text


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """A snapshot of one run."""

    run_dir: str
    name: str
    state: str
    """State of its job; or `ending` (its services have ended, its history is being checked), `died` (its processes are
    gone and it has no result), `unknown` (its coordinator does not answer), `no job` (the coordinator has none)."""
    processes: tuple[ProcessStatus, ...] = ()
    clocks: dict[int, int] = field(default_factory=dict)
    global_clock: int | None = None
    remark: str = ""
    """The reason for its failure, or the fix."""
    workers: tuple[WorkerStatus, ...] = ()
    straggler: int | None = None
    """The virtual worker that the others mostly wait for."""
    slow: tuple[Straggling, ...] = ()
    """Stages that are slower than planned."""
    rewinds: int = 0
    """Number of rewinds of the job."""
    queue: QueuePlace | None = None
    """Position in the queue, if pending."""
    job_id: str | None = None
    """Number of agents of the coordinator; None if unknown."""
    conditions: tuple[Condition, ...] = ()
    """The conditions of the run."""
    proof: ProofReport | None = None
    """The proof of the model before training; None before that, or if unknown."""
    evaluations: EvaluationsSoFar | None = None
    """None before the first one, or if unknown."""
    speed: RunSpeed | None = None
    """None before training, or if unknown."""
    frozen: tuple[FrozenSince, ...] = ()
    """The frozen layers, one entry per barrier at which they became more, in order."""
    inactive: tuple[InactiveSince, ...] = ()
    """The inactive layers, one entry per barrier at which they changed, in order."""
    cache: CacheUse | None = None
    """Use of the caches behind frozen layers; None where no stage has used one, or if unknown."""
    checkpoints: str = ""
    """URL of its checkpoints; empty if they are in its folder."""
    pipelines: tuple[VirtualWorkerRow, ...] = ()
    """The virtual workers as they compute; none unless it trains."""
    cuts: tuple[CutChange, ...] = ()
    """How they have been cut since the plan, in order."""

    def to_json(self) -> dict[str, Any]:
        """The object of `status --json`."""
        return {
            "run_dir": self.run_dir,
            "state": self.state,
            "job_id": self.job_id,
            "queue": None if self.queue is None else plain(QueuePlace, self.queue),
            "processes": [plain(ProcessStatus, process) for process in self.processes],
            "clocks": {str(vw): clock for vw, clock in self.clocks.items()},
            "global_clock": self.global_clock,
            "workers": [worker_json(worker) for worker in self.workers],
            "straggler": self.straggler,
            "slow": [plain(Straggling, one) for one in self.slow],
            "rewinds": self.rewinds,
            "conditions": [plain(Condition, one) for one in self.conditions],
            "proof": None if self.proof is None else plain(ProofReport, self.proof),
            "evaluations": None if self.evaluations is None else plain(EvaluationsSoFar, self.evaluations),
            "speed": None if self.speed is None else self.speed.to_json(),
            "frozen": [plain(FrozenSince, one) for one in self.frozen],
            "inactive": [asdict(one) for one in self.inactive],
            "cache": None if self.cache is None else plain(CacheUse, self.cache),
            "checkpoints": self.checkpoints or None,
            "pipelines": [
                {"vw": row.vw, "version": row.version, "stages": [plain(StageRow, stage) for stage in row.stages]}
                for row in self.pipelines
            ],
            "cuts": [cut.to_json() for cut in self.cuts],
        }

    def lines(self, current: Path) -> list[str]:
        """The status as text for people; paths are relative to the folder `current`."""
        where = f" ({shown_path(Path(self.run_dir), current)})" if self.run_dir else ""
        lines = [f"{self.name or 'run'}: {self.state}{where}"]
        if self.queue is not None:
            lines.append(str(self.queue))
        if self.remark:
            lines.append(self.remark)
        if self.clocks:
            local = ", ".join(f"virtual worker {vw}: {clock}" for vw, clock in self.clocks.items())
            lines.append(f"clocks: global {self.global_clock}; {local}")
        lines += self.frozen_lines()
        lines += inactive_lines(self.inactive)
        if self.speed is not None:
            lines.append(str(self.speed))
        if self.evaluations is not None:
            lines.append(str(self.evaluations))
        if self.proof is not None:
            lines.append(f"proof: {self.proof.scope}")
        if self.checkpoints:
            lines.append(f"checkpoints: {self.checkpoints}")
        lines += map(_pipeline_text, self.pipelines)
        lines += map(str, self.cuts)
        lines += self.troubles()
        if self.processes:
            heading = ["role", "index", "vw", "host", "pid", "state"]
            lines += ["", *columns([heading, *map(_row, self.processes)])]
        return lines

    def frozen_lines(self) -> Iterator[str]:
        """Which layers are frozen, and the use of the cache behind them.

        `frozen: layers 0-3 (2 with parameters) from clock 9 on; layers 0-7 (4 with parameters) from clock 18 on`.
        """
        if self.frozen:
            yield "frozen: " + "; ".join(map(str, self.frozen))
        if self.cache is not None:
            yield cache_text(self.cache)

    def troubles(self) -> Iterator[str]:
        """Present and past problems: conditions, rewinds, lost virtual workers, stragglers."""
        yield from condition_lines(self.conditions)
        if self.rewinds:
            yield f"the job was rewound to a checkpoint {count(self.rewinds, 'time')}"
        for worker in self.workers:
            if worker.deaths or worker.state in _AWAY:
                yield _life_text(worker, is_over=self.state != JobState.RUNNING)
        if self.straggler is not None:
            yield f"the others mostly wait for virtual worker {self.straggler}, which is the slowest"
        yield from map(slow_text, self.slow)


def inactive_lines(inactive: Sequence[InactiveSince]) -> Iterator[str]:
    """Which layers are inactive.

    `inactive: layers 3-4 (b1, b2) from clock 0 on; layers 1-2 (a1, a2) from clock 4 on`.
    """
    if inactive:
        yield "inactive: " + "; ".join(map(str, inactive))


def worker_json(worker: WorkerStatus) -> dict[str, Any]:
    """The JSON object of a virtual worker; with devices only if they have just been assigned."""
    value: dict[str, Any] = plain(WorkerStatus, worker)
    return value if worker.devices else {key: entry for key, entry in value.items() if key != "devices"}


def _life_text(worker: WorkerStatus, *, is_over: bool) -> str:
    """The life, counted from 1, and the state of a virtual worker that is not computing normally."""
    lost = f", lost {count(worker.deaths, 'time')}" if worker.deaths else ""
    state = "" if worker.state is LifeState.READY else f", {worker.state}"
    way = "" if is_over or worker.state not in _WAYS_ON else f": {_WAYS_ON[worker.state].format(vw=worker.vw)}"
    return f"virtual worker {worker.vw}: life {worker.incarnation + 1}{lost}{state}{way}"


def _pipeline_text(row: VirtualWorkerRow) -> str:
    """Layers, devices and memory policies of the stages of a virtual worker, and memory against its limit, if known."""
    is_known = row.memory_bytes or any(stage.memory_bytes for stage in row.stages)
    memory = f"; memory {memory_text(row)}" if is_known else ""
    return f"virtual worker {row.vw}: layers {cut_text(row)}{memory}"


def _row(process: ProcessStatus) -> list[str]:
    vw = "-" if process.vw is None else str(process.vw)
    pid = str(process.pid) if process.pid else "-"
    return [process.role, str(process.index), vw, process.host, pid, process.state]


def status_of_run(folder: RunFolder, shell: Shell) -> RunStatus:
    """The status of the run in `folder`.

    Raises:
        UserError: it is not a run.
    """
    found = _status_of_run(folder, shell)
    return replace(
        found,
        checkpoints=folder.checkpoints_url,
        cuts=read_cuts(folder.path),
        inactive=read_inactive(folder.path, found.global_clock),
    )


def _status_of_run(folder: RunFolder, shell: Shell) -> RunStatus:
    record, result = folder.read_record(), folder.read_result()
    job_status = job_status_of(record, shell) if result is None or not record.local else None
    return status_from(folder, record, result, job_status, shell)


def job_status_of(record: RunRecord, shell: Shell) -> JobStatus | None:
    """Query the coordinator of a run for its job; None if there is none, or it does not answer or know the job."""
    if not record.coordinator or not record.job_id:
        return None
    try:
        return _ask(record.coordinator, JobId(record.job_id), shell.alone() if record.local else shell)
    except (Unavailable, UnknownJob):
        return None


def status_from(
    folder: RunFolder, record: RunRecord, result: RunResult | None, job_status: JobStatus | None, shell: Shell
) -> RunStatus:
    """The status of a run from what its coordinator says, or else from its files."""
    if job_status is not None:
        return status_of_job(job_status, result)
    if result is not None:
        return _ended(folder, record, result)
    return _without_coordinator(folder, record, shell)


def status_of_coordinator(address: str, shell: Shell) -> RunStatus:
    """The status of the newest job of the coordinator at `address`.

    Raises:
        Unavailable: it does not answer.
    """
    return status_of_job(_ask(address, None, shell))


@contextmanager
def pointing_at_status(folder: RunFolder, shell: Shell) -> Iterator[None]:
    """Append to errors of an unreachable coordinator that `hetpipe status` reads the run's folder."""
    try:
        yield
    except Unavailable as error:
        where = shown_path(folder.path, shell.current)
        raise type(error)(f"{error}; for the state of the run: hetpipe status {where}") from error


def _ask(address: str, job_id: JobId | None, shell: Shell) -> JobStatus:
    client = shell.connect(address)
    try:
        return client.invoke(GET_STATUS, GetStatusRequest(job_id))
    finally:
        client.close()


def status_of_job(status: JobStatus, result: RunResult | None = None) -> RunStatus:
    """The status of a job from its coordinator, completed by its `result`."""
    # Progress from before a rewind, or before the end, is outdated.
    progress = status.progress if status.state is JobState.RUNNING else None
    clocks = {int(vw): int(clock) for vw, clock in status.clocks.local.items()} if status.clocks else {}
    global_clock = int(status.clocks.global_clock) if status.clocks else None
    if not clocks and result is not None:
        clocks, global_clock = clocks_of(result)
    return RunStatus(
        run_dir=status.run_dir,
        name=status.name,
        state=NO_JOB if status.state is None else status.state.value,
        processes=status.processes,
        clocks=clocks,
        global_clock=global_clock,
        remark=status.failure,
        workers=status.workers,
        straggler=None if progress is None else progress.straggler,
        slow=() if progress is None else progress.slow,
        rewinds=status.rewinds,
        queue=status.queue,
        job_id=status.job_id,
        conditions=status.conditions or (() if result is None else result.conditions),
        proof=status.proof,
        evaluations=None if status.evaluations is None else revive(EvaluationsSoFar, status.evaluations.to_object()),
        speed=_speed_of(result) if progress is None else _speed_now(progress),
        pipelines=() if progress is None else progress.rows,
        frozen=_frozen_of(result) if status.clocks is None else status.clocks.frozen,
        cache=_cache_of(result) if progress is None else progress.cache,
    )


def _ended(folder: RunFolder, record: RunRecord, result: RunResult) -> RunStatus:
    clocks, global_clock = clocks_of(result)
    return RunStatus(
        run_dir=record.run_dir,
        name=record.name,
        state=result.state,
        clocks=clocks,
        global_clock=global_clock,
        remark="; ".join(result.errors),
        rewinds=len(run_folders(folder.path)) - 1,
        job_id=record.job_id or None,
        conditions=result.conditions,
        proof=_proof_of(result),
        evaluations=_evaluations_of(result),
        speed=_speed_of(result),
        frozen=_frozen_of(result),
        cache=_cache_of(result),
    )


def _speed_now(progress: ProgressTable) -> RunSpeed:
    model = ModelSpeed(
        progress.tokens_per_second, progress.model_flops_utilisation, progress.model_flops_utilisation_reason
    )
    return RunSpeed(progress.samples_per_second, model)


def _speed_of(result: RunResult | None) -> RunSpeed | None:
    """The speed in the result of an ended run; results of earlier versions may lack figures."""
    values = {} if result is None else result.values
    if "samples_per_second" not in values:
        return None
    figures = {key.name: values.get(key.name) for key in fields(ModelSpeed)}
    return RunSpeed(float(values["samples_per_second"]), revive(ModelSpeed, figures))


def _frozen_of(result: RunResult | None) -> tuple[FrozenSince, ...]:
    """The frozen layers of an ended run; results of earlier versions have none."""
    lines = () if result is None else result.values.get("frozen", ())
    return tuple(revive(FrozenSince, line) for line in lines)


def _cache_of(result: RunResult | None) -> CacheUse | None:
    """Use of the caches in an ended run, of which nothing is kept any more."""
    values = {} if result is None else result.values.get("cache", {})
    return revive(CacheUse, {**values, "kept_bytes": 0}) if values.get("computed") else None


def _proof_of(result: RunResult) -> ProofReport | None:
    proof = result.values.get("proof")
    return None if proof is None else revive(ProofReport, proof)


def _evaluations_of(result: RunResult) -> EvaluationsSoFar | None:
    results: EvaluationResults = revive(EvaluationResults, result.values.get("evaluations", {}))
    return EvaluationsSoFar(results.number, results.best, results.listed[-1]) if results.listed else None


def clocks_of(result: RunResult) -> tuple[dict[int, int], int | None]:
    """The last local clocks and global clock of an ended run; empty if it never trained."""
    clocks = {int(vw): int(clock) for vw, clock in result.values.get("clocks", {}).items()}
    return clocks, result.values.get("global_clock")


def _without_coordinator(folder: RunFolder, record: RunRecord, shell: Shell) -> RunStatus:
    """A run without a result whose coordinator does not answer."""
    processes = _services(record)
    any_up = any(process.state == _UP for process in processes)
    if not record.local or record.host != socket.gethostname():
        state = UNKNOWN
        remark = f"the coordinator at {record.coordinator or '(no address yet)'} does not answer"
    elif any_up:
        state, remark = UNKNOWN, "its coordinator does not answer, but some of its processes are running"
    elif not record.job_id and _exists(record.pids.get("hetpipe", 0)):
        state, remark = STARTING, "its services are starting"
    elif _is_hetpipe(record.pids.get("hetpipe", 0)):
        state, remark = ENDING, "its services have ended; its history is being checked, which may take half a minute"
    else:
        state, remark = DIED, f"its processes are gone and it has no result{_way_on(folder, record, shell)}"
    return RunStatus(run_dir=record.run_dir, name=record.name, state=state, processes=processes, remark=remark)


def _way_on(folder: RunFolder, record: RunRecord, shell: Shell) -> str:
    if not has_checkpoint_at(folder.place):
        return "; it had no complete checkpoint yet"
    coordinator = None if record.local else record.coordinator
    return f"; resume with: {resume_command(folder.path, shell.current, coordinator)}"


_UP, _GONE = "up", "gone"

_ROLES: tuple[tuple[str, Literal["coordinator", "parameter_server", "agent"]], ...] = (
    ("coordinator", "coordinator"),
    ("parameter-server", "parameter_server"),
    ("agent", "agent"),
)


def _services(record: RunRecord) -> tuple[ProcessStatus, ...]:
    """The services of a local run, and whether their processes are running."""
    found = []
    for prefix, role in _ROLES:
        for key, pid in sorted(record.pids.items()):
            if key.startswith(prefix):
                index = key.removeprefix(prefix).lstrip("-")
                state = _UP if is_service(pid, record.run_dir) else _GONE
                found.append(ProcessStatus(role, int(index or 0), None, record.host, pid, state))
    return tuple(found)


def is_running_here(record: RunRecord) -> bool:
    """Whether services of the local run are still running on this machine."""
    return record.local and record.host == socket.gethostname() and any(p.state == _UP for p in _services(record))


def is_service(pid: int, run_dir: str) -> bool:
    """Whether process `pid` of this machine is a service of the run in `run_dir`: its log is named in its arguments.

    So a reused process id is not mistaken for the process.
    """
    try:
        return f"{run_dir}/".encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _is_hetpipe(pid: int) -> bool:
    """Whether process `pid` of this machine is `hetpipe`, and not another one with a reused id."""
    try:
        return pid > 0 and b"hetpipe" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _exists(pid: int) -> bool:
    if pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
