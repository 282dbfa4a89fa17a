"""How a job is doing: its states, the events a watcher sees, and the status at one moment."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

from hetpipe.spec.ids import Clock, DeviceId, Incarnation, JobId, LayerIndex, VirtualWorkerIndex
from hetpipe.spec.run import ClockSnapshot


class JobState(StrEnum):
    """Where a job stands. The legal steps between states are the table in `coordinator.lifecycle`."""

    SUBMITTED = "submitted"
    INSPECTING = "inspecting"
    PLANNING = "planning"
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"

    @property
    def is_terminal(self) -> bool:
        """True when nothing can follow."""
        return self in {JobState.FINISHED, JobState.STOPPED, JobState.FAILED}


class StopMode(StrEnum):
    """How to stop a job."""

    CHECKPOINT = "checkpoint"
    """At a barrier, with a checkpoint."""
    NOW = "now"
    """At once, without one."""


@dataclass(frozen=True, slots=True)
class Submission:
    """A job as it is handed in."""

    request_id: str
    """Chosen by the caller, unique per job; makes a resend safe."""
    job_json: str
    run_dir: str
    import_path: str
    """Folder that goes first on the module search path of the stages."""
    restore: str | None = None
    """Checkpoint folder to start from, or None for fresh weights."""


@dataclass(frozen=True, slots=True)
class StateChanged:
    """The job came to another state."""

    state: JobState
    remark: str = ""
    """What is worth knowing about it, as a sentence: which links its stages have, when it runs."""
    kind: Literal["state_changed"] = "state_changed"


@dataclass(frozen=True, slots=True)
class Waiting:
    """A wait that has lasted over five seconds: who waits for whom and why."""

    sentence: str
    seconds: float
    kind: Literal["waiting"] = "waiting"


@dataclass(frozen=True, slots=True)
class Evaluated:
    """A whole evaluation, summed over the virtual workers."""

    clock: Clock
    epoch: int
    """Pass over the training data at whose end it was made, 0-based."""
    samples: int
    values: dict[str, float]
    """Mean per metric name; `loss` is always there."""
    kind: Literal["evaluated"] = "evaluated"


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """A life of a virtual worker has ended before the run: the others go on, and it is started anew."""

    vw: VirtualWorkerIndex
    incarnation: Incarnation
    """The life that ended, 0 for the first."""
    sentence: str
    """Why."""
    kind: Literal["worker_lost"] = "worker_lost"


@dataclass(frozen=True, slots=True)
class WorkerRejoined:
    """A virtual worker has been started anew: its stages are ready, and it counts again from the next barrier on."""

    vw: VirtualWorkerIndex
    incarnation: Incarnation
    """The new life."""
    kind: Literal["worker_rejoined"] = "worker_rejoined"


@dataclass(frozen=True, slots=True)
class WorkerQuarantined:
    """A virtual worker is not started anew any more; the others go on without it."""

    vw: VirtualWorkerIndex
    sentence: str
    """Why."""
    kind: Literal["worker_quarantined"] = "worker_quarantined"


@dataclass(frozen=True, slots=True)
class StageRow:
    """One stage of one row of the progress table: layers [first_layer, last_layer) on `device`."""

    first_layer: LayerIndex
    last_layer: LayerIndex
    device: DeviceId


@dataclass(frozen=True, slots=True)
class VirtualWorkerRow:
    """One virtual worker's row of the progress table."""

    vw: VirtualWorkerIndex
    stages: tuple[StageRow, ...]
    clock: Clock
    distance: int
    """Waves ahead of the slowest virtual worker."""
    samples_per_second: float
    """Over the last seconds."""
    loss: float | None
    """Mean loss of the latest finished wave."""
    waiting_share: float
    """Share of the running time its first stage waited for a clock, 0 to 1."""
    memory_bytes: int = 0
    """Weight buffers and activations on its devices, at most at once so far, summed over its stages."""


@dataclass(frozen=True, slots=True)
class ProgressTable:
    """A picture of a running job. Only the newest counts; it is not kept among the job's events."""

    rows: tuple[VirtualWorkerRow, ...]
    running_seconds: float
    epoch: int
    samples: int
    """Committed since the start of the run."""
    total_samples: int
    """What the whole run commits."""
    samples_per_second: float
    eta_seconds: float | None
    """To the end at that rate; None while unknown."""
    staleness: int | None
    """D: the distance stays at or below D + 1; None for `asp`."""
    global_clock: Clock
    straggler: VirtualWorkerIndex | None = None
    """Whom the others spend most of their time waiting for; None while nobody holds them up."""
    kind: Literal["progress"] = "progress"


@dataclass(frozen=True, slots=True)
class JobEnded:
    """The job has ended; nothing follows."""

    state: JobState
    sentence: str = ""
    """Why it failed."""
    error: str = ""
    """Class name in `hetpipe.errors`, or of the Python exception."""
    problems: tuple[str, ...] = ()
    """Every mistake found, when the user's input was refused."""
    result: dict[str, Any] | None = None
    """The object that `hetpipe train --json` prints; None when the job failed."""
    kind: Literal["ended"] = "ended"


JobEvent = (
    StateChanged | Waiting | Evaluated | ProgressTable | WorkerLost | WorkerRejoined | WorkerQuarantined | JobEnded
)


@dataclass(frozen=True, slots=True)
class NumberedEvent:
    """An event and its place among the job's events, from 1; 0 for a progress table."""

    sequence: int
    event: JobEvent


@dataclass(frozen=True, slots=True)
class ProcessStatus:
    """One process of the cluster."""

    role: Literal["coordinator", "parameter_server", "agent", "stage"]
    index: int
    """Among the processes of its role; of a stage, its place in the virtual worker."""
    vw: VirtualWorkerIndex | None
    """Stages only."""
    host: str
    pid: int
    """0 while unknown."""
    state: str
    """`up`, or for a stage `starting`, `ready`, `done`, `failed`, `exited`."""


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """One virtual worker of a job."""

    vw: VirtualWorkerIndex
    incarnation: Incarnation
    """Its newest life, 0 for the first."""
    deaths: int
    """Lives that ended before the run."""
    state: str
    """`starting`, `ready`, `done`, `ending`, `awaiting`, `admitting` or `out`."""


@dataclass(frozen=True, slots=True)
class JobStatus:
    """One job's status."""

    job_id: JobId | None
    """None when no job was ever handed in."""
    name: str
    state: JobState | None
    run_dir: str
    failure: str
    processes: tuple[ProcessStatus, ...] = field(default=())
    clocks: ClockSnapshot | None = None
    """None before the clock shard told any."""
    progress: ProgressTable | None = None
    """The newest picture; None before training began."""
    workers: tuple[WorkerStatus, ...] = ()
    """In index order; empty before they were started."""
