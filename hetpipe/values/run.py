"""Configuration and reports of a stage process: the values on the pipe between an agent and its children.

The agent writes one `StageConfig` as a JSON line to the child's standard input and keeps that pipe open; its end means
that the agent is gone, and the child exits. The child writes one report per line to the descriptor it was given.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Annotated, Any, Literal

from pydantic import Field

from hetpipe.values.bounds import CLOCK, COUNT, MAX_LISTED, Count, Name, Seconds, Sentence
from hetpipe.values.catalogue import type_of_device_name
from hetpipe.values.conditions import Condition
from hetpipe.values.freezing import FrozenSince
from hetpipe.values.ids import AgentId, Clock, Incarnation, ShardIndex, StageIndex, Term, VirtualWorkerIndex
from hetpipe.values.link_measurement import MeasuredLinks
from hetpipe.values.memory import LayerPolicy
from hetpipe.values.plan import Plan
from hetpipe.values.sync import PlanVersion


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
    """Transfer times of an emulated link."""

    latency_seconds: float
    bytes_per_second: float

    def seconds(self, num_bytes: float) -> float:
        """Duration of one transfer."""
        return self.latency_seconds + num_bytes / self.bytes_per_second

    def ring_seconds(self, num_bytes: int, members: int) -> float:
        """Duration of a ring all-reduce: 2(G − 1) rounds, each of 1/G of the bytes.

        >>> LinkTime(latency_seconds=0.001, bytes_per_second=1e6).ring_seconds(4000, 2)
        0.006
        """
        return 2 * (members - 1) * self.seconds(num_bytes / members)


@dataclass(frozen=True, slots=True)
class StageEmulation:
    """Emulation of another device by a stage: profiled times and links."""

    forward_seconds: tuple[float, ...]
    """Duration of a minibatch's forward through each layer of the model on that device, whichever of them the stage
    has; the real computation must be faster.
    """
    backward_seconds: tuple[float, ...]
    """Duration of its backward through each of them, without the forward again where they are recomputed."""
    upstream: LinkTime | None = None
    """The link to the previous stage; None: not emulated."""
    downstream: LinkTime | None = None
    shards: tuple[LinkTime | None, ...] = ()
    """The link to each shard; empty: not emulated."""
    replicas: LinkTime | None = None
    """The slowest link between the same stages of all virtual workers, which make a ring (`sync: allreduce`)."""

    def forward_of(self, first_layer: int, last_layer: int) -> float:
        """Seconds of a forward through layers [first_layer, last_layer)."""
        return math.fsum(self.forward_seconds[first_layer:last_layer])

    def backward_of(self, first_layer: int, last_layer: int) -> float:
        """Seconds of a backward through them."""
        return math.fsum(self.backward_seconds[first_layer:last_layer])


@dataclass(frozen=True, slots=True)
class StageConfig:
    """Complete configuration of one stage process."""

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
    """Folder that is put first on `sys.path` before user code is imported."""
    host: str
    """Address at which the neighbouring stages reach this process."""
    restore: str | None = None
    """A checkpoint folder to start from, or None for fresh weights."""
    shard_ids: tuple[str, ...] = ()
    """Member id per shard, which with TLS each must prove; empty where it is not needed."""
    emulation: StageEmulation | None = None
    homes: tuple[int, ...] = ()
    """Of the run's data specification."""


@dataclass(frozen=True, slots=True)
class ClockSnapshot:
    """The clocks of one job at its clock shard."""

    term: Term
    published: Clock
    global_clock: Clock
    local: dict[VirtualWorkerIndex, Clock]
    """Waves committed per member."""
    max_distance: int
    """Largest difference between the fastest and the slowest local clock so far."""
    epoch: int
    """Current pass over the training data, from 1."""
    minibatches: int
    samples: int
    barrier: Clock
    """The next barrier."""
    barrier_reason: str
    waves: int
    """Waves committed since this run began, over all virtual workers and incarnations."""
    staged: dict[VirtualWorkerIndex, Clock] = field(default_factory=dict)
    """Waves that all stages of a member have staged on every shard, including committed ones."""
    durable: dict[VirtualWorkerIndex, Clock] = field(default_factory=dict)
    """Those of them that would survive a restart of every shard; empty if unknown."""
    applied: tuple[ShardIndex, ...] = ()
    """Shards with a failed disk: what is staged there would be lost with their process, and the job rewound."""
    plans: dict[VirtualWorkerIndex, PlanVersion] = field(default_factory=dict)
    """The plan versions in force since the newest barrier; empty before the first one."""
    frozen: Annotated[tuple[FrozenSince, ...], Field(max_length=MAX_LISTED)] = ()
    """The frozen layers since the start of the run, one entry per barrier at which they became more, in order; the
    newest ones only, if there are very many."""
    lineup: Count = 0
    """F of those who train; below that of `frozen` where others are about to (`Progress.lineup`)."""


@dataclass(frozen=True, slots=True)
class StagePhase:
    """Current phase of a stage that is starting up (`hetpipe.phases`); serves as a sign of life."""

    phase: Sentence
    """Completes the phrase "it is ..."."""
    seconds: Seconds
    """Duration of the phase so far."""
    kind: Literal["phase"] = "phase"


@dataclass(frozen=True, slots=True)
class StageReady:
    """The stage is linked with its neighbours and about to compute."""

    pid: Count
    link: Sentence = ""
    """Kind of the link to the next stage, and why it was chosen; empty on the last stage."""
    kind: Literal["ready"] = "ready"


@dataclass(frozen=True, slots=True)
class CacheUse:
    """Use of a node's cache by one stage (docs/semantics/caching.md)."""

    reads: Count
    """Minibatches read from it."""
    computed: Count
    """Minibatches of which the stage has computed frozen layers."""
    read_bytes: Count
    kept_bytes: Count
    """That all stages of the node keep."""
    stopped: Sentence = ""
    """Why nothing more is kept; empty while it may be."""


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
    """Time without work because a required clock is not published yet."""
    idle_seconds: Seconds
    """Time without work for other reasons."""
    compute_seconds: Seconds
    """Of completed minibatches, and of updates."""
    pushed_bytes: Count
    pulled_bytes: Count
    weight_bytes: Count = 0
    """Peak of weight buffers on the stage's device."""
    activation_bytes: Count = 0
    """Peak of activations saved for the backward (determined as described in `pipeline/activation_bytes.py`)."""
    gradient_norm: float | None = None
    """Norm of the latest gradient stepped, before clipping; None without clipping."""
    learning_rate: float | None = None
    """Of the next update; None on a stage without parameters."""
    losses: dict[Name, float] = field(default_factory=dict)
    """Name → mean in the latest finished wave, of a job with several losses; last stage only."""
    first_losses: dict[Name, float] = field(default_factory=dict)
    """Name → mean in the first finished wave."""
    loss_scale: float | None = None
    """After the latest update; None without `precision: fp16`."""
    skipped_updates: Count = 0
    """Updates skipped because a gradient overflowed."""
    memory: tuple[LayerPolicy, ...] = ()
    """Memory policies of the stage's layers; empty if all are kept, and from a stage of an earlier version."""
    cache: CacheUse | None = None
    """Of the cache behind frozen layers; None on a stage that does not use it."""
    kind: Literal["progress"] = "progress"


@dataclass(frozen=True, slots=True)
class StageWaiting:
    """A wait that has lasted over five seconds: who waits for whom and why, as one sentence."""

    sentence: Sentence
    seconds: Seconds
    kind: Literal["waiting"] = "waiting"


#: Limit on the entries of one metric, such as the classes of F1.
MAX_RATIO_ENTRIES = 4096

RatioEntries = Annotated[tuple[float, ...], Field(max_length=MAX_RATIO_ENTRIES)]


@dataclass(frozen=True, slots=True)
class RatioSums:
    """The sums of a metric over minibatches (docs/semantics/losses.md, section 4)."""

    numerators: RatioEntries
    denominators: RatioEntries
    """As many."""
    exponential: bool = False
    """Whether the value is the exponential of the mean quotient."""

    def __add__(self, other: RatioSums) -> RatioSums:
        """Add the sums of other minibatches of the same metric, which have as many entries."""
        return RatioSums(
            tuple(a + b for a, b in zip_longest(self.numerators, other.numerators, fillvalue=0.0)),
            tuple(a + b for a, b in zip_longest(self.denominators, other.denominators, fillvalue=0.0)),
            self.exponential,
        )

    @property
    def value(self) -> float:
        """The mean of the quotients whose denominator is above 0, or its exponential; NaN if there are none.

        >>> RatioSums((1.0, 3.0, 0.0), (2.0, 4.0, 0.0)).value
        0.625
        """
        pairs = zip(self.numerators, self.denominators, strict=False)
        quotients = [numerator / denominator for numerator, denominator in pairs if denominator > 0.0]
        mean = sum(quotients) / len(quotients) if quotients else math.nan
        if not self.exponential:
            return mean
        try:
            return math.exp(mean)
        except OverflowError:
            return math.inf


@dataclass(frozen=True, slots=True)
class StageEvaluation:
    """One virtual worker's part of an evaluation; last stage only. Sums, so that parts can be added."""

    clock: Annotated[Clock, COUNT]
    epoch: Count
    """Pass over the training data during or at the end of which it was made, from 1."""
    samples: Count
    sums: dict[Name, float]
    """Metric name → Σ over minibatches of value × weight; `loss` is always there."""
    minibatches: Count = 0
    """Minibatches contained in those weights since the start of the training, over all virtual workers."""
    within_epoch: bool = False
    """Made during the epoch: there are no other parts."""
    whole: bool = True
    """Whether all parts together cover all of the evaluation data."""
    weight: Count | None = None
    """Σ of the weights of the minibatches (job key `mean_over`); None: the samples."""
    ratios: dict[Name, RatioSums] = field(default_factory=dict)
    """Metric name → its sums, of the metrics that are a quotient of sums."""
    kind: Literal["evaluation"] = "evaluation"


@dataclass(frozen=True, slots=True)
class StageFailed:
    """The stage cannot continue; it exits after this line."""

    error: Name
    """Class name in `hetpipe.errors`, or of the Python exception."""
    sentence: Sentence
    secondary: bool = False
    """Whether the failure is most likely a consequence of another process's death (a closed link, an unreachable peer).
    """
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
    """Current state of all conditions at this stage; sent whenever one changes."""

    conditions: Annotated[tuple[Condition, ...], Field(max_length=MAX_LISTED)]
    kind: Literal["conditions"] = "conditions"


StageReport = (
    StagePhase | StageReady | StageProgress | StageWaiting | StageEvaluation | StageConditions | StageFailed | StageDone
)


@dataclass(frozen=True, slots=True)
class AgentDevice:
    """A device offered by an agent."""

    device: str
    """`NODE/INDEX`."""
    type: str
    """`cpu` or the CUDA device's name."""
    memory_bytes: int
    torch_device: str


def type_of(device: AgentDevice) -> str:
    """The device's type: the catalogue's name if it has one, else the reported name."""
    return type_of_device_name(device.type, device.memory_bytes) or device.type


@dataclass(frozen=True, slots=True)
class AgentInfo:
    """The registration of an agent."""

    agent: AgentId
    host: str
    pid: int
    devices: tuple[AgentDevice, ...] = field(default=())
    links: MeasuredLinks = field(default=MeasuredLinks())
    """Measurements of its node's links."""
