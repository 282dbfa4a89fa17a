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
from typing import Any, ClassVar, Literal

from hetpipe.values.conditions import Condition, ConditionKind
from hetpipe.values.ids import Clock, DeviceId, Incarnation, JobId, LayerIndex, StageIndex, VirtualWorkerIndex
from hetpipe.values.life_state import LifeState
from hetpipe.values.plan import ModelReport, ProofReport
from hetpipe.values.run import ClockSnapshot


class JobState(StrEnum):
    """Where a job stands. The legal steps between states are the table in `decide.lifecycle.lifecycle`."""

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
        """True when nothing can follow."""
        return self in {JobState.FINISHED, JobState.STOPPED, JobState.FAILED}

    @property
    def is_queued(self) -> bool:
        """True while nobody works for the job: it has no devices and no parameter servers yet."""
        return self in {JobState.SUBMITTED, JobState.PENDING}


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
    rewinds: int = 0
    """Which rewind the job goes on after, 0 for none: `run_dir` then is the folder of that rewind."""
    has_begun: bool = False
    """It has begun to train: where nobody knows how far it is, it goes on from its newest checkpoint in `run_dir`."""
    model: ModelReport | None = None
    """What an inspection before the submission has found; None: an agent is to inspect the model."""

    @property
    def first_run_dir(self) -> str:
        """The folder of the run, in which those of its rewinds are."""
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
    """The job came to another state."""

    state: JobState
    remark: str = ""
    """What is worth knowing about it, as a sentence: which links it was planned with, when it starts, and which its
    stages have, when it runs."""
    kind: Literal["state_changed"] = "state_changed"


@dataclass(frozen=True, slots=True)
class Waiting(Event):
    """A wait that has lasted over five seconds: who waits for whom and why."""

    sentence: str
    seconds: float
    kind: Literal["waiting"] = "waiting"


@dataclass(frozen=True, slots=True)
class Evaluated(Event):
    """An evaluation, summed over the virtual workers."""

    clock: Clock
    epoch: int
    """Pass over the training data in which, or at whose end it was made, from 1."""
    samples: int
    values: dict[str, float]
    """Mean per metric name; `loss` is always there."""
    minibatches: int = 0
    """Minibatches in those weights since the start of the training, over all virtual workers."""
    rewinds: int = 0
    """How often the whole job had gone back to a checkpoint by then."""
    within_epoch: bool = False
    """Made while the epoch was under way, by one virtual worker with its own buffers; else at its end, by all."""
    whole: bool = True
    """Over all of the evaluation data; else `evaluate.max_batches` left some out."""
    kind: Literal["evaluated"] = "evaluated"

    def to_object(self) -> dict[str, Any]:
        """The JSON object of an evaluation, as files and results have it; what is not finite becomes null."""
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
    """The evaluations of a job so far, without those that a rewind has undone."""

    number: int
    """At least 1."""
    best: Evaluated | None
    """Of those over all of the evaluation data the first one with the least loss that is finite; the first of them if
    there is no such loss; None without any."""
    last: Evaluated

    def to_object(self) -> dict[str, Any]:
        """As JSON."""
        best = None if self.best is None else self.best.to_object()
        return {"number": self.number, "best": best, "last": self.last.to_object()}


@dataclass(frozen=True, slots=True)
class WorkerLost(Notice):
    """A life of a virtual worker has ended before the run: the others go on, and it is started anew."""

    vw: VirtualWorkerIndex
    incarnation: Incarnation
    """The life that ended, 0 for the first."""
    sentence: str
    """Why."""
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
    """A virtual worker has been started anew: its stages are ready, and it counts again from the next barrier on."""

    vw: VirtualWorkerIndex
    incarnation: Incarnation
    """The new life."""
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
    """A virtual worker has left the run because it was asked to: what it committed counts, the others go on."""

    vw: VirtualWorkerIndex
    incarnation: Incarnation
    """The life that is over."""
    returns: bool
    """Whether it comes back by itself as soon as its agents are there; else somebody must ask for it."""
    kind: Literal["worker_left"] = "worker_left"

    @property
    def text(self) -> str:
        """Implement `Notice.text`."""
        rest = "it comes back as soon as it can" if self.returns else f"`hetpipe workers add {self.vw}` brings it back"
        return f"virtual worker {self.vw} has left ({_life(self.incarnation)}); {rest}"

    @property
    def pairs(self) -> dict[str, object]:
        """Implement `Notice.pairs`."""
        return {"vw": self.vw, "life": self.incarnation + 1, "returns": self.returns}


@dataclass(frozen=True, slots=True)
class WorkerQuarantined(Notice):
    """A virtual worker is not started anew any more; the others go on without it."""

    vw: VirtualWorkerIndex
    sentence: str
    """Why."""
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
    """A virtual worker computes by a new plan: stages of it had left the old one, or agents of it are gone."""

    vw: VirtualWorkerIndex
    incarnation: Incarnation
    """The first life by the new plan."""
    before: tuple[int, ...]
    """Layers of each stage by the plan before."""
    after: tuple[int, ...]
    """The same by the new one."""
    foreseen: float | None
    """How much faster the job is to be, as a share: 0.5 is half as fast again; None where it only makes do."""
    kind: Literal["worker_replanned"] = "worker_replanned"

    @property
    def text(self) -> str:
        """Implement `Notice.text`."""
        gain = "" if self.foreseen is None else f"; the job is to be {100 * self.foreseen:.1f} % faster"
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
    """What a new plan of a virtual worker has gained, or why it was given up for the one before."""

    vw: VirtualWorkerIndex
    gained: float | None
    """How much faster the virtual worker is, as a share, by its slowest stage; None: the plan before goes on."""
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
    """The whole job went back to a checkpoint: what was committed after that is lost, and is trained again."""

    from_clock: Clock
    """The newest published clock that was known."""
    to_clock: Clock
    """Of the checkpoint, or where the run began."""
    folder: str
    """Where the run goes on: histories, checkpoints, plan and facts."""
    sentence: str
    """Why."""
    kind: Literal["rewound"] = "rewound"
    severity: ClassVar[Severity] = "warning"

    @property
    def text(self) -> str:
        """Implement `Notice.text`."""
        lost = f"what was committed from clock {self.to_clock} to {self.from_clock} is lost and is trained again"
        return f"THE JOB WENT BACK TO CLOCK {self.to_clock}: {lost}, in {self.folder}; {self.sentence}"

    @property
    def pairs(self) -> dict[str, object]:
        """Implement `Notice.pairs`."""
        clocks: dict[str, object] = {"from_clock": self.from_clock, "to_clock": self.to_clock}
        return {**clocks, "folder": self.folder, "sentence": self.sentence}


@dataclass(frozen=True, slots=True)
class ConditionRaised(Event):
    """The run goes on, and is less safe than it was."""

    condition: ConditionKind
    who: tuple[str, ...]
    """All of whom that is true."""
    sentence: str
    """The cause, the path, and the fix; of the first of them."""
    since: float
    """When that one noticed it, in seconds since 1970."""
    times: int
    """How often it was raised since followers were last told."""
    kind: Literal["condition_raised"] = "condition_raised"
    severity: ClassVar[Severity] = "warning"


@dataclass(frozen=True, slots=True)
class ConditionCleared(Event):
    """What `ConditionRaised` told is over."""

    condition: ConditionKind
    who: tuple[str, ...]
    """All for whom it is over."""
    sentence: str
    """What is well again; of the last of them."""
    cleared: float
    """When that one noticed it, in seconds since 1970."""
    remaining: int
    """For how many others it still holds."""
    kind: Literal["condition_cleared"] = "condition_cleared"
    severity: ClassVar[Severity] = "warning"


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
    state: LifeState = LifeState.READY


@dataclass(frozen=True, slots=True)
class Straggling:
    """A stage that takes longer than planned, and has for a while."""

    vw: VirtualWorkerIndex
    stage: StageIndex
    factor: float
    """How many times longer, by how the other stages fare."""


@dataclass(frozen=True, slots=True)
class ProgressTable(Event):
    """A picture of a running job. Only the newest counts; it is not kept among the job's events."""

    rows: tuple[VirtualWorkerRow, ...]
    running_seconds: float
    epoch: int
    """Pass over the training data that is under way, from 1."""
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
    slow: tuple[Straggling, ...] = ()
    """The stages that take longer than planned."""
    tokens_per_second: float | None = None
    """None where samples are no sequences of tokens."""
    model_flops_utilisation: float | None = None
    """MFU: operations of the model per second, as a share of the devices' peak; None where either is not known."""
    model_flops_utilisation_reason: str | None = None
    """Why there is no MFU; None where there is one, or from a coordinator of an earlier version."""
    kind: Literal["progress"] = "progress"


@dataclass(frozen=True, slots=True)
class JobEnded(Event):
    """The job has ended; nothing follows."""

    state: JobState
    sentence: str = ""
    """Why it failed, or was stopped short of its barrier."""
    error: str = ""
    """Class name in `hetpipe.errors`, or of the Python exception."""
    problems: tuple[str, ...] = ()
    """Every mistake found, when the user's input was refused."""
    result: dict[str, Any] | None = None
    """The object that `hetpipe train --json` prints; None when the job failed."""
    conditions: tuple[Condition, ...] = ()
    """What endangered the run, by the time at which it began; those without `cleared` held to the end."""
    kind: Literal["ended"] = "ended"


JobEvent = (
    StateChanged
    | Waiting
    | Evaluated
    | ProgressTable
    | WorkerLost
    | WorkerRejoined
    | WorkerLeft
    | WorkerQuarantined
    | WorkerReplanned
    | ReplanJudged
    | Rewound
    | ConditionRaised
    | ConditionCleared
    | JobEnded
)


def _life(incarnation: Incarnation) -> str:
    """As people count."""
    return f"life {incarnation + 1}"


def _counts(layers: Sequence[int]) -> str:
    """Layers of each stage.

    >>> _counts((3, 5))
    '3-5'
    """
    return "-".join(map(str, layers))


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
    """`up`, or for a stage `starting`, `ready`, `left`, `done`, `failed`, `exited`."""


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """One virtual worker of a job."""

    vw: VirtualWorkerIndex
    incarnation: Incarnation
    """Its newest life, 0 for the first."""
    deaths: int
    """Lives that ended before the run."""
    state: LifeState
    devices: tuple[str, ...] = ()
    """Those that it has just been given, as it is new to the run."""


@dataclass(frozen=True, slots=True)
class QueuePlace:
    """Where a job stands that is pending."""

    position: int
    """In the queue of the cluster, 1 is next."""
    reason: str
    """What it needs and what is there, or who goes first."""

    def __str__(self) -> str:
        """For a sentence."""
        return f"{_ordinal(self.position)} in the queue; {self.reason}"


def _ordinal(number: int) -> str:
    """As it is spoken.

    >>> [_ordinal(number) for number in (1, 2, 3, 4, 11, 22, 113)]
    ['1st', '2nd', '3rd', '4th', '11th', '22nd', '113th']
    """
    ending = "th" if number // 10 % 10 == 1 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


@dataclass(frozen=True, slots=True)
class JobStatus:
    """One job's status."""

    job_id: JobId | None
    """None when no job was ever handed in."""
    name: str
    state: JobState | None
    run_dir: str
    failure: str
    """Why it failed, or was stopped short of its barrier; of a job under way that nobody leads, what is waited for."""
    processes: tuple[ProcessStatus, ...] = field(default=())
    clocks: ClockSnapshot | None = None
    """None before the clock shard told any."""
    progress: ProgressTable | None = None
    """The newest picture; None before training began."""
    workers: tuple[WorkerStatus, ...] = ()
    """In index order; empty before they were started."""
    rewinds: int = 0
    """How often the whole job went back to a checkpoint."""
    queue: QueuePlace | None = None
    """None unless it is pending."""
    conditions: tuple[Condition, ...] = ()
    """What endangers the job, or has, by the time at which it began; without a job, of the cluster."""
    proof: ProofReport | None = None
    """What was proven of the model before training; None before that, and where nobody knows."""
    evaluations: EvaluationSummary | None = None
    """None before the first one."""

    @property
    def is_led(self) -> bool:
        """Whether a coordinator leads it, or nobody has to."""
        return self.state is None or self.state.is_terminal or not self.failure
