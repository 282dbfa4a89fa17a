"""The states of a job, its events, and its status at one moment.

An event is a frozen dataclass: a subclass of `Event`, or of `Notice` if people see it as one line, and a member of
`JobEvent`. Its class attributes and properties determine how it is logged, displayed and counted.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from hetpipe.values.bounds import MAX_CODE_BYTES, Name
from hetpipe.values.conditions import Condition, ConditionKind
from hetpipe.values.ids import AgentId, Clock, DeviceId, Incarnation, JobId, LayerIndex, StageIndex, VirtualWorkerIndex
from hetpipe.values.life_state import LifeState
from hetpipe.values.measurement import ProfileStep
from hetpipe.values.memory import LayerPolicy
from hetpipe.values.plan import ModelReport, ProofReport
from hetpipe.values.run import CacheUse, ClockSnapshot
from hetpipe.values.sync import HexBytes


class JobState(StrEnum):
    """Lifecycle state of a job. The legal transitions are the table in `decide.lifecycle.lifecycle`."""

    SUBMITTED = "submitted"
    PENDING = "pending"
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
        """Whether no transition can follow."""
        return self in {JobState.FINISHED, JobState.STOPPED, JobState.FAILED}

    @property
    def is_queued(self) -> bool:
        """Whether nothing is running for the job: it has no devices and no parameter servers yet."""
        return self in {JobState.SUBMITTED, JobState.PENDING}


class StopMode(StrEnum):
    """Ways to stop a job."""

    CHECKPOINT = "checkpoint"
    """At a barrier, with a checkpoint."""
    NOW = "now"
    """Immediately, without one."""


@dataclass(frozen=True, slots=True)
class CodeArchive:
    """Python files as one archive."""

    digest: Name
    """SHA-256 of the archive, hexadecimal."""
    archive: Annotated[HexBytes, Field(max_length=MAX_CODE_BYTES)]
    """A zip file."""


@dataclass(frozen=True, slots=True)
class Submission:
    """A job as submitted."""

    request_id: str
    """Chosen by the caller, unique per job; makes resends idempotent."""
    job_json: str
    run_dir: str
    import_path: str
    """Folder that is put first on the module search path of the stages."""
    restore: str | None = None
    """Checkpoint folder to start from, or None for fresh weights."""
    rewinds: int = 0
    """Number of the rewind after which the job continues, 0 for none: `run_dir` then is the folder of that rewind."""
    has_begun: bool = False
    """Training has begun: if the progress is unknown, the job continues from its newest checkpoint in `run_dir`."""
    model: ModelReport | None = None
    """Result of an inspection before the submission; None: an agent inspects the model."""
    code: CodeArchive | None = None
    """The code of the job, for nodes that do not have it; None: all have it below `import_path`."""

    @property
    def code_digest(self) -> str:
        """Digest of the code that was sent along; empty for none."""
        return "" if self.code is None else self.code.digest

    @property
    def first_run_dir(self) -> str:
        """The folder of the run, which contains those of its rewinds."""
        return str(Path(self.run_dir).parent) if self.rewinds else self.run_dir


Severity = Literal["usual", "info", "warning"]
"""`usual` events are part of every run and not logged; the others are, at that level."""


class Event:
    """Base class of job events."""

    __slots__ = ()

    severity: ClassVar[Severity] = "usual"
    kind: str
    """Its name in logs, lines and counters; a constant of each class."""


class Notice(Event, ABC):
    """An event that is displayed as one line: a sentence for people, and a `key=value` line for programs."""

    __slots__ = ()

    severity: ClassVar[Severity] = "info"

    @property
    @abstractmethod
    def text(self) -> str:
        """The sentence for people."""

    @property
    @abstractmethod
    def pairs(self) -> dict[str, object]:
        """The keys and values of the `key=value` line, in order, after `event`."""


@dataclass(frozen=True, slots=True)
class StateChanged(Event):
    """The job entered another state."""

    state: JobState
    remark: str = ""
    """Details as a sentence: the links it was planned with, when it starts, and those its stages use, when it runs."""
    kind: Literal["state_changed"] = "state_changed"


@dataclass(frozen=True, slots=True)
class Waiting(Event):
    """A wait that has lasted over five seconds: who waits for whom and why."""

    sentence: str
    seconds: float
    kind: Literal["waiting"] = "waiting"


@dataclass(frozen=True, slots=True)
class Measuring(Event):
    """An agent measures the layers of the model; reported every few seconds."""

    step: ProfileStep
    agent: AgentId
    kind: Literal["measuring"] = "measuring"


@dataclass(frozen=True, slots=True)
class Evaluated(Event):
    """An evaluation, summed over the virtual workers."""

    clock: Clock
    epoch: int
    """Pass over the training data during or at the end of which it was made, from 1."""
    samples: int
    values: dict[str, float]
    """Mean per metric name; `loss` is always present."""
    minibatches: int = 0
    """Minibatches contained in those weights since the start of the training, over all virtual workers."""
    rewinds: int = 0
    """Number of rewinds of the job up to then."""
    within_epoch: bool = False
    """Made during the epoch, by one virtual worker with its own buffers; else at its end, by all."""
    whole: bool = True
    """Covers all evaluation data; else `evaluate.max_batches` limited it."""
    kind: Literal["evaluated"] = "evaluated"

    def to_object(self) -> dict[str, Any]:
        """The JSON object of an evaluation in files and results; non-finite values become null."""
        return {
            "epoch": self.epoch,
            "clock": self.clock,
            "minibatches": self.minibatches,
            "samples": self.samples,
            "rewinds": self.rewinds,
            "within_epoch": self.within_epoch,
            "whole": self.whole,
            "values": {name: value if math.isfinite(value) else None for name, value in self.values.items()},
        }


@dataclass(frozen=True, slots=True)
class EvaluationSummary:
    """The evaluations of a job so far, without those undone by a rewind."""

    number: int
    """At least 1."""
    best: Evaluated | None
    """Among those over all evaluation data, the first one with the lowest finite loss; the first one if no loss is
    finite; None if there are none.
    """
    last: Evaluated

    def to_object(self) -> dict[str, Any]:
        """Convert to JSON data."""
        best = None if self.best is None else self.best.to_object()
        return {"number": self.number, "best": best, "last": self.last.to_object()}


@dataclass(frozen=True, slots=True)
class WorkerLost(Notice):
    """An incarnation of a virtual worker ended before the run: the others continue, and it is restarted."""

    vw: VirtualWorkerIndex
    incarnation: Incarnation
    """The incarnation that ended, 0 for the first."""
    sentence: str
    """The reason."""
    kind: Literal["worker_lost"] = "worker_lost"
    severity: ClassVar[Severity] = "warning"

    @property
    def text(self) -> str:
        """Implement `Notice.text`."""
        return f"virtual worker {self.vw} is lost ({_life(self.incarnation)}): {self.sentence}"

    @property
    def pairs(self) -> dict[str, object]:
        """Implement `Notice.pairs`."""
        return {"vw": self.vw, "life": self.incarnation + 1, "sentence": self.sentence}


@dataclass(frozen=True, slots=True)
class WorkerRejoined(Notice):
    """A virtual worker was restarted: its stages are ready, and it counts again from the next barrier on."""

    vw: VirtualWorkerIndex
    incarnation: Incarnation
    """The new incarnation."""
    kind: Literal["worker_rejoined"] = "worker_rejoined"

    @property
    def text(self) -> str:
        """Implement `Notice.text`."""
        return f"virtual worker {self.vw} is ready ({_life(self.incarnation)}); it joins at the next barrier"

    @property
    def pairs(self) -> dict[str, object]:
        """Implement `Notice.pairs`."""
        return {"vw": self.vw, "life": self.incarnation + 1}


@dataclass(frozen=True, slots=True)
class WorkerLeft(Notice):
    """A virtual worker left the run on request: its committed waves count, the others continue."""

    vw: VirtualWorkerIndex
    incarnation: Incarnation
    """The incarnation that ended."""
    returns: bool
    """Whether it returns automatically once its agents are available; else only on request."""
    kind: Literal["worker_left"] = "worker_left"

    @property
    def text(self) -> str:
        """Implement `Notice.text`."""
        restart = f"`hetpipe workers add {self.vw}` restarts it"
        rest = "it rejoins once its agents are available" if self.returns else restart
        return f"virtual worker {self.vw} has left ({_life(self.incarnation)}); {rest}"

    @property
    def pairs(self) -> dict[str, object]:
        """Implement `Notice.pairs`."""
        return {"vw": self.vw, "life": self.incarnation + 1, "returns": self.returns}


@dataclass(frozen=True, slots=True)
class WorkerQuarantined(Notice):
    """A virtual worker is no longer restarted; the others continue without it."""

    vw: VirtualWorkerIndex
    sentence: str
    """The reason."""
    kind: Literal["worker_quarantined"] = "worker_quarantined"
    severity: ClassVar[Severity] = "warning"

    @property
    def text(self) -> str:
        """Implement `Notice.text`."""
        return self.sentence

    @property
    def pairs(self) -> dict[str, object]:
        """Implement `Notice.pairs`."""
        return {"vw": self.vw, "sentence": self.sentence}


@dataclass(frozen=True, slots=True)
class WorkerReplanned(Notice):
    """A virtual worker uses a new plan.

    Its stages deviated from the old one, some of its agents are gone, or an operator asked for it.
    """

    vw: VirtualWorkerIndex
    incarnation: Incarnation
    """The first incarnation under the new plan."""
    before: tuple[int, ...]
    """Layers of each stage in the previous plan."""
    after: tuple[int, ...]
    """Layers of each stage in the new plan."""
    foreseen: float | None
    """Expected speed-up of the job, as a fraction: 0.5 is half as fast again; None if the plan only replaces lost
    devices, or an operator asked for it.
    """
    version: int | None = None
    """The plan version that it has made between running stages; None: with new processes."""
    kind: Literal["worker_replanned"] = "worker_replanned"

    @property
    def text(self) -> str:
        """Implement `Notice.text`."""
        gain = "" if self.foreseen is None else f"; expected speed-up of the job: {100 * self.foreseen:.1f} %"
        moved = f"layers {_counts(self.before)} become {_counts(self.after)}"
        return f"virtual worker {self.vw} has a new plan: {moved}{gain}"

    @property
    def pairs(self) -> dict[str, object]:
        """Implement `Notice.pairs`."""
        return {
            "vw": self.vw,
            "life": self.incarnation + 1,
            "before": _counts(self.before),
            "after": _counts(self.after),
            "foreseen_percent": None if self.foreseen is None else round(100 * self.foreseen, 1),
        }


@dataclass(frozen=True, slots=True)
class ReplanJudged(Notice):
    """Measured gain of a virtual worker's new plan, or why it was reverted to the one before."""

    vw: VirtualWorkerIndex
    gained: float | None
    """Speed-up of the virtual worker, as a fraction, by its slowest stage; None: the previous plan continues."""
    sentence: str
    kind: Literal["replan_judged"] = "replan_judged"

    @property
    def text(self) -> str:
        """Implement `Notice.text`."""
        return self.sentence

    @property
    def pairs(self) -> dict[str, object]:
        """Implement `Notice.pairs`."""
        gained = None if self.gained is None else round(100 * self.gained, 1)
        return {"vw": self.vw, "gained_percent": gained, "sentence": self.sentence}


@dataclass(frozen=True, slots=True)
class Rewound(Notice):
    """The whole job was rewound to a checkpoint: waves committed after it are lost and trained again."""

    from_clock: Clock
    """The newest known published clock."""
    to_clock: Clock
    """Clock of the checkpoint, or where the run began."""
    folder: str
    """Folder in which the run continues: histories, checkpoints, plan and facts."""
    sentence: str
    """The reason."""
    kind: Literal["rewound"] = "rewound"
    severity: ClassVar[Severity] = "warning"

    @property
    def text(self) -> str:
        """Implement `Notice.text`."""
        lost = f"waves committed from clock {self.to_clock} to {self.from_clock} are lost and are trained again"
        return f"THE JOB WAS REWOUND TO CLOCK {self.to_clock}: {lost}, in {self.folder}; {self.sentence}"

    @property
    def pairs(self) -> dict[str, object]:
        """Implement `Notice.pairs`."""
        clocks: dict[str, object] = {"from_clock": self.from_clock, "to_clock": self.to_clock}
        return {**clocks, "folder": self.folder, "sentence": self.sentence}


@dataclass(frozen=True, slots=True)
class LoggerFailed(Notice):
    """A logger of the job (job key `log`) failed: the run continues, and nothing more is logged there."""

    logger: str
    """`tensorboard`, `wandb` or `mlflow`."""
    sentence: str
    """The reason."""
    kind: Literal["logger_failed"] = "logger_failed"
    severity: ClassVar[Severity] = "warning"

    @property
    def text(self) -> str:
        """Implement `Notice.text`."""
        return f"nothing more is logged to {self.logger}, the run goes on: {self.sentence}"

    @property
    def pairs(self) -> dict[str, object]:
        """Implement `Notice.pairs`."""
        return {"logger": self.logger, "sentence": self.sentence}


@dataclass(frozen=True, slots=True)
class ConditionRaised(Event):
    """The run continues with reduced safety."""

    condition: ConditionKind
    who: tuple[str, ...]
    """All subjects of the condition."""
    sentence: str
    """The cause, the path, and the fix; of the first subject."""
    since: float
    """When that subject detected it, in seconds since 1970."""
    times: int
    """How often it was raised since followers were last notified."""
    kind: Literal["condition_raised"] = "condition_raised"
    severity: ClassVar[Severity] = "warning"


@dataclass(frozen=True, slots=True)
class ConditionCleared(Event):
    """A condition reported by `ConditionRaised` is over."""

    condition: ConditionKind
    who: tuple[str, ...]
    """All subjects for which it is over."""
    sentence: str
    """What has recovered; of the last subject."""
    cleared: float
    """When that subject detected it, in seconds since 1970."""
    remaining: int
    """Number of other subjects for which it still holds."""
    kind: Literal["condition_cleared"] = "condition_cleared"
    severity: ClassVar[Severity] = "warning"


@dataclass(frozen=True, slots=True)
class StageRow:
    """A stage in a row of the progress table: layers [first_layer, last_layer) on `device`."""

    first_layer: LayerIndex
    last_layer: LayerIndex
    device: DeviceId
    memory: tuple[LayerPolicy, ...] = ()
    """Memory policies of its layers; empty if all are kept."""
    memory_bytes: int = 0
    """Peak of weight buffers and activations on its device so far."""
    device_bytes: int = 0
    """Memory of its device; 0 if unknown."""


@dataclass(frozen=True, slots=True)
class VirtualWorkerRow:
    """A virtual worker's row of the progress table."""

    vw: VirtualWorkerIndex
    stages: tuple[StageRow, ...]
    clock: Clock
    distance: int
    """Waves ahead of the slowest virtual worker."""
    samples_per_second: float
    """Over the last few seconds."""
    loss: float | None
    """Mean loss of the latest finished wave."""
    waiting_share: float
    """Share of the running time that its first stage waited for a clock, 0 to 1."""
    memory_bytes: int = 0
    """Peak of weight buffers and activations on its devices so far, summed over its stages."""
    state: LifeState = LifeState.READY
    losses: dict[str, float] = field(default_factory=dict)
    """Name → mean in that wave, of a job with several losses."""
    version: int = 0
    """The version of its plan in force, by which `stages` are cut."""


@dataclass(frozen=True, slots=True)
class Straggling:
    """A stage that has been slower than planned for several waves."""

    vw: VirtualWorkerIndex
    stage: StageIndex
    factor: float
    """Slowdown factor, relative to the other stages."""


@dataclass(frozen=True, slots=True)
class ProgressTable(Event):
    """A snapshot of a running job. Only the newest counts; it is not stored among the job's events."""

    rows: tuple[VirtualWorkerRow, ...]
    running_seconds: float
    epoch: int
    """Current pass over the training data, from 1."""
    samples: int
    """Committed since the start of the run."""
    total_samples: int
    """Total number of the whole run."""
    samples_per_second: float
    eta_seconds: float | None
    """Estimated time to the end at that rate; None while unknown."""
    staleness: int | None
    """D: the distance stays at or below D + 1; None for `asp`."""
    global_clock: Clock
    straggler: VirtualWorkerIndex | None = None
    """The virtual worker that the others spend most of their time waiting for; None if there is none."""
    slow: tuple[Straggling, ...] = ()
    """Stages that are slower than planned."""
    tokens_per_second: float | None = None
    """None where samples are not token sequences."""
    model_flops_utilisation: float | None = None
    """MFU: operations of the model per second, as a share of the devices' peak; None where either is unknown."""
    model_flops_utilisation_reason: str | None = None
    """Why there is no MFU; None if there is one, or from a coordinator of an earlier version."""
    cache: CacheUse | None = None
    """Use of the caches behind frozen layers, of all stages and nodes; None where no stage uses one."""
    kind: Literal["progress"] = "progress"


@dataclass(frozen=True, slots=True)
class JobEnded(Event):
    """The job has ended; the last event."""

    state: JobState
    sentence: str = ""
    """Why it failed, or stopped before its barrier."""
    error: str = ""
    """Class name in `hetpipe.errors`, or of the Python exception."""
    problems: tuple[str, ...] = ()
    """Every mistake found, if the user's input was rejected."""
    result: dict[str, Any] | None = None
    """The object printed by `hetpipe train --json`; None if the job failed."""
    conditions: tuple[Condition, ...] = ()
    """Conditions of the run, by start time; those without `cleared` held to the end."""
    kind: Literal["ended"] = "ended"


JobEvent = (
    StateChanged
    | Waiting
    | Measuring
    | Evaluated
    | ProgressTable
    | WorkerLost
    | WorkerRejoined
    | WorkerLeft
    | WorkerQuarantined
    | WorkerReplanned
    | ReplanJudged
    | Rewound
    | LoggerFailed
    | ConditionRaised
    | ConditionCleared
    | JobEnded
)


def _life(incarnation: Incarnation) -> str:
    """The incarnation as users see it: lives, counted from 1."""
    return f"life {incarnation + 1}"


def _counts(layers: Sequence[int]) -> str:
    """Layers of each stage.

    >>> _counts((3, 5))
    '3-5'
    """
    return "-".join(map(str, layers))


@dataclass(frozen=True, slots=True)
class NumberedEvent:
    """An event with its position among the job's events, from 1; 0 for a progress table."""

    sequence: int
    event: JobEvent


@dataclass(frozen=True, slots=True)
class ProcessStatus:
    """One process of the cluster."""

    role: Literal["coordinator", "parameter_server", "agent", "stage"]
    index: int
    """Index among the processes of its role; for a stage, its position in the virtual worker."""
    vw: VirtualWorkerIndex | None
    """Stages only."""
    host: str
    pid: int
    """0 while unknown."""
    state: str
    """`up`, or for a stage `starting`, `ready`, `left`, `done`, `failed`, `exited`."""


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """One virtual worker of a job."""

    vw: VirtualWorkerIndex
    incarnation: Incarnation
    """Its newest incarnation, 0 for the first."""
    deaths: int
    """Incarnations that ended before the run."""
    state: LifeState
    devices: tuple[str, ...] = ()
    """Devices just assigned to it, if it is new to the run."""


@dataclass(frozen=True, slots=True)
class QueuePlace:
    """Position of a pending job."""

    position: int
    """In the cluster's queue; 1 is next."""
    reason: str
    """Required and available resources, or the job ahead of it."""
    priority: int = 0
    """Its job key `priority`; of pending jobs those with a higher one go first."""

    def __str__(self) -> str:
        """For use in a sentence."""
        return f"{self.short}; {self.reason}"

    @property
    def short(self) -> str:
        """`2nd in the queue, priority 0`."""
        return f"{_ordinal(self.position)} in the queue, priority {self.priority}"


def _ordinal(number: int) -> str:
    """The English ordinal.

    >>> [_ordinal(number) for number in (1, 2, 3, 4, 11, 22, 113)]
    ['1st', '2nd', '3rd', '4th', '11th', '22nd', '113th']
    """
    ending = "th" if number // 10 % 10 == 1 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


@dataclass(frozen=True, slots=True)
class JobStatus:
    """Status of one job."""

    job_id: JobId | None
    """None if no job was ever submitted."""
    name: str
    state: JobState | None
    run_dir: str
    failure: str
    """Why it failed, or stopped before its barrier; for a running job without a leader, what it is waiting for."""
    processes: tuple[ProcessStatus, ...] = field(default=())
    clocks: ClockSnapshot | None = None
    """None until the clock shard has reported."""
    progress: ProgressTable | None = None
    """The newest snapshot; None before training began."""
    workers: tuple[WorkerStatus, ...] = ()
    """In index order; empty before they were started."""
    rewinds: int = 0
    """Number of rewinds of the job."""
    queue: QueuePlace | None = None
    """None unless it is pending."""
    conditions: tuple[Condition, ...] = ()
    """Conditions of the job, active and cleared, by start time; without a job, of the cluster."""
    proof: ProofReport | None = None
    """Result of the proof before training; None before that, and if unknown."""
    evaluations: EvaluationSummary | None = None
    """None before the first one."""

    @property
    def is_led(self) -> bool:
        """Whether it has a leader or needs none."""
        return self.state is None or self.state.is_terminal or not self.failure
