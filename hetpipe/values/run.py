"""What a stage process is told and what it tells: the values on the pipe between an agent and its children.

The agent writes one `StageConfig` as a JSON line to the child's standard input and keeps that pipe open; its end means
"your agent is gone, exit". The child writes one report per line to the descriptor it was given.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from hetpipe.values.bounds import CLOCK, COUNT, MAX_LISTED, Count, Name, Seconds, Sentence
from hetpipe.values.catalogue import type_of_device_name
from hetpipe.values.conditions import Condition
from hetpipe.values.ids import AgentId, Clock, Incarnation, ShardIndex, StageIndex, Term, VirtualWorkerIndex
from hetpipe.values.link_measurement import MeasuredLinks
from hetpipe.values.plan import Plan


@dataclass(frozen=True, slots=True)
class DeviceConfig:
    """The device of a stage, real or emulated."""

    torch_device: str
    """`cpu` or `cuda:INDEX`."""
    slowdown: float = 1.0
    """Emulation: a computation that took t seconds is stretched to slowdown·t (≥ 1)."""
    jitter: float = 0.0
    """Emulation: each stretch is multiplied by a seeded uniform draw from [1, 1 + jitter]."""


@dataclass(frozen=True, slots=True)
class LinkTime:
    """How long transfers over an emulated link take."""

    latency_seconds: float
    bytes_per_second: float

    def seconds(self, num_bytes: int) -> float:
        """The time of one transfer."""
        return self.latency_seconds + num_bytes / self.bytes_per_second


@dataclass(frozen=True, slots=True)
class StageEmulation:
    """A stage plays another device: its profiled times, and its links."""

    forward_seconds: float
    """What a minibatch's forward takes on that device; the real computation must be faster."""
    backward_seconds: float
    """Its backward, with the forward again where the plan recomputes."""
    upstream: LinkTime | None = None
    """The link to the previous stage; None: as it is."""
    downstream: LinkTime | None = None
    shards: tuple[LinkTime | None, ...] = ()
    """The link to each shard; empty: as they are."""


@dataclass(frozen=True, slots=True)
class StageConfig:
    """Everything one stage process needs."""

    job: dict[str, Any]
    """The validated job, as `Job.model_dump(mode="json")`."""
    plan: Plan
    vw: VirtualWorkerIndex
    stage: StageIndex
    incarnation: Incarnation
    device: DeviceConfig
    shard_addresses: tuple[str, ...]
    """`HOST:PORT` per shard, index = shard; shard 0 is the clock shard."""
    run_dir: str
    import_path: str
    """Folder that goes first on `sys.path` before user code is imported."""
    host: str
    """Address under which the neighbouring stages reach this process."""
    restore: str | None = None
    """A checkpoint folder to start from, or None for fresh weights."""
    shard_ids: tuple[str, ...] = ()
    """Member id per shard, which with TLS each must prove; empty where nobody needs to know."""
    emulation: StageEmulation | None = None


@dataclass(frozen=True, slots=True)
class ClockSnapshot:
    """The clocks of one job, as the clock shard sees them."""

    term: Term
    published: Clock
    global_clock: Clock
    local: dict[VirtualWorkerIndex, Clock]
    """Waves committed per member."""
    max_distance: int
    """Largest difference between the fastest and the slowest local clock seen so far."""
    epoch: int
    """Pass over the training data that is under way, from 1."""
    minibatches: int
    samples: int
    barrier: Clock
    """The next barrier."""
    barrier_reason: str
    waves: int
    """Waves committed since this run began, over all virtual workers and all their lives."""
    staged: dict[VirtualWorkerIndex, Clock] = field(default_factory=dict)
    """Waves that all stages of a member have staged on every shard, those that are committed among them."""
    durable: dict[VirtualWorkerIndex, Clock] = field(default_factory=dict)
    """Those of them that would be there after a restart of every shard, too; empty where nobody knows."""
    applied: tuple[ShardIndex, ...] = ()
    """Shards whose disk fails: what is staged there now would be lost with their process, and the job go back."""


@dataclass(frozen=True, slots=True)
class StagePhase:
    """What a stage that is not ready yet is doing (`hetpipe.phases`): it lives."""

    phase: Sentence
    """The end of "it is ..."."""
    seconds: Seconds
    """For how long."""
    kind: Literal["phase"] = "phase"


@dataclass(frozen=True, slots=True)
class StageReady:
    """The stage is linked with its neighbours and about to compute."""

    pid: Count
    link: Sentence = ""
    """What the link to the next stage is, and why; empty on the last stage."""
    kind: Literal["ready"] = "ready"


@dataclass(frozen=True, slots=True)
class StageProgress:
    """Sent about once a second and at every barrier. All counts are since the start of the process."""

    minibatches: Count
    samples: Count
    clock: Annotated[Clock, COUNT]
    """Waves this stage has closed."""
    published: Annotated[Clock, CLOCK]
    loss: float | None
    """Mean loss of the latest finished wave; last stage only."""
    first_loss: float | None
    """Mean loss of the first finished wave; last stage only."""
    waiting_seconds: Seconds
    """Time without anything to compute because a wanted clock is not published yet."""
    idle_seconds: Seconds
    """Time with nothing at all to compute."""
    compute_seconds: Seconds
    """Of the minibatches that are done, and of updates."""
    pushed_bytes: Count
    pulled_bytes: Count
    weight_bytes: Count = 0
    """Weight buffers on the stage's device, at most at once."""
    activation_bytes: Count = 0
    """What forwards keep for their backwards, at most at once (`pipeline/activation_bytes.py` says how it is known)."""
    gradient_norm: float | None = None
    """Norm of the latest gradient that was stepped, before it was clipped; None without clipping."""
    learning_rate: float | None = None
    """Of the next update; None on a stage without parameters."""
    kind: Literal["progress"] = "progress"


@dataclass(frozen=True, slots=True)
class StageWaiting:
    """A wait that has lasted over five seconds: who waits for whom and why, as one sentence."""

    sentence: Sentence
    seconds: Seconds
    kind: Literal["waiting"] = "waiting"


@dataclass(frozen=True, slots=True)
class StageEvaluation:
    """One virtual worker's part of an evaluation; last stage only. Sums, so that parts add up."""

    clock: Annotated[Clock, COUNT]
    epoch: Count
    """Pass over the training data in which, or at whose end it was made, from 1."""
    samples: Count
    sums: dict[Name, float]
    """Metric name → Σ over minibatches of value × samples; `loss` is always there."""
    minibatches: Count = 0
    """Minibatches in those weights since the start of the training, over all virtual workers."""
    within_epoch: bool = False
    """Made while the epoch was under way: there are no other parts."""
    whole: bool = True
    """With the other parts, if there are any: over all of the evaluation data."""
    kind: Literal["evaluation"] = "evaluation"


@dataclass(frozen=True, slots=True)
class StageFailed:
    """The stage cannot go on; it exits after this line."""

    error: Name
    """Class name in `hetpipe.errors`, or of the Python exception."""
    sentence: Sentence
    secondary: bool = False
    """True when the failure is most likely the echo of another process's death (a closed link, an unreachable peer)."""
    kind: Literal["failed"] = "failed"


@dataclass(frozen=True, slots=True)
class StageDone:
    """The run reached its end at `clock`, or the virtual worker left it there; the stage then exits with 0."""

    clock: Annotated[Clock, COUNT]
    reason: Name
    """Reasons of the last barrier joined with `+`, for example `end` or `stop`; `drain` alone: it left."""
    kind: Literal["done"] = "done"


@dataclass(frozen=True, slots=True)
class StageConditions:
    """What endangers the run at this stage, as often as one of its conditions changes: all of them, at their newest."""

    conditions: Annotated[tuple[Condition, ...], Field(max_length=MAX_LISTED)]
    kind: Literal["conditions"] = "conditions"


StageReport = (
    StagePhase | StageReady | StageProgress | StageWaiting | StageEvaluation | StageConditions | StageFailed | StageDone
)


@dataclass(frozen=True, slots=True)
class AgentDevice:
    """One device an agent offers."""

    device: str
    """`NODE/INDEX`."""
    type: str
    """`cpu` or the CUDA device's name."""
    memory_bytes: int
    torch_device: str


def type_of(device: AgentDevice) -> str:
    """The device's type: the catalogue's name where it has one, else what the device calls itself."""
    return type_of_device_name(device.type, device.memory_bytes) or device.type


@dataclass(frozen=True, slots=True)
class AgentInfo:
    """What an agent registers."""

    agent: AgentId
    host: str
    pid: int
    devices: tuple[AgentDevice, ...] = field(default=())
    links: MeasuredLinks = field(default=MeasuredLinks())
    """What was measured of its node's links."""
