"""The components of a stage's loop: its identity, its environment, and its computation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from hetpipe.checkpoint.stage_part import PartWriter
from hetpipe.clock import Clock as TimeSource
from hetpipe.decide.schedule.loss_scale import LossScales
from hetpipe.decide.schedule.policy import Order
from hetpipe.decide.schedule.versions import VersionTable
from hetpipe.decide.sync.records import SegmentMember, SegmentRecord
from hetpipe.link.policy import Link
from hetpipe.observe.history import HistoryWriter
from hetpipe.observe.metrics import MetricsWriter
from hetpipe.observe.timeline import TimelineWriter
from hetpipe.pipeline.callables import LossFunction, MapDataset, MinibatchWeight, WeightedLosses
from hetpipe.pipeline.chain import Layer
from hetpipe.pipeline.compute import Emulator, StageCompute
from hetpipe.pipeline.frozen_prefix import FrozenPrefix
from hetpipe.pipeline.reading import DataReader
from hetpipe.pipeline.synchroniser import Synchroniser
from hetpipe.values.ids import Clock, Incarnation, Minibatch, StageIndex, VirtualWorkerIndex
from hetpipe.values.memory import LayerPolicy
from hetpipe.values.policies import Schedule
from hetpipe.values.run import StageReport
from hetpipe.values.sync import DataSpec, SyncSpec
from hetpipe.weights.flat import BufferPool
from hetpipe.weights.policy import StageWeights


class Replicas(Protocol):
    """The same stage of all replicas. Collective: all replicas must make the same calls in the same order."""

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """All-reduce: replace each tensor by its sum over the replicas; shapes and dtypes must agree.

        Raises:
            DeadlineExceeded: another replica did not take part in time.
        """
        ...

    def regroup(self, start: Clock, members: Sequence[VirtualWorkerIndex]) -> None:
        """Form the group of the segment from `start` on, of these virtual workers; no effect if they form it already.

        Raises:
            DeadlineExceeded, PeerUnreachable: another replica did not join in time, or was lost.
        """
        ...

    def copy_first_(self, tensors: Sequence[Tensor]) -> None:
        """Broadcast: replace each tensor by that of the first replica.

        Raises:
            DeadlineExceeded: another replica did not take part in time.
        """
        ...


#: Maximum time for which a frame waits for room on its link.
SEND_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class StageIdentity:
    """Identity of a stage: stage, virtual worker, and incarnation."""

    vw: VirtualWorkerIndex
    stage: StageIndex
    incarnation: Incarnation
    num_stages: int

    @property
    def is_first(self) -> bool:
        """Whether it reads inputs and starts minibatches."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether it reads targets and computes the loss."""
        return self.stage == self.num_stages - 1

    def in_segment(self, segment: SegmentRecord) -> SegmentMember | None:
        """The entry of its virtual worker's incarnation among the members of a segment; None if it is not a member."""
        lives = (member for member in segment.members if member.vw == self.vw)
        return next((member for member in lives if member.incarnation == self.incarnation), None)

    def leaves_at(self, segment: SegmentRecord) -> bool:
        """Whether its virtual worker's incarnation was drained and leaves at the barrier before a segment."""
        return any((member.vw, member.incarnation) == (self.vw, self.incarnation) for member in segment.left)

    def __str__(self) -> str:
        """Format for messages."""
        return f"stage {self.stage} of virtual worker {self.vw}"


@dataclass(frozen=True, slots=True)
class StageData:
    """The data sets (first and last stage only) and the metrics computed on them."""

    spec: DataSpec
    train: MapDataset | None
    evaluation: MapDataset | None
    metrics: Mapping[str, LossFunction]
    """`loss`, each of several losses, and the job's own metrics; last stage only."""
    reader: DataReader | None = None
    """Reads both sets; first and last stage only."""
    order_of: Callable[[int], Sequence[int] | None] | None = lambda _: None
    """Epoch → the order of its samples; None for a shuffled epoch. None on a stage that reads no data, if the job has
    an order of its own.
    """
    evaluate_every_waves: int | None = None
    """Waves between two evaluations within an epoch; None for no such evaluations."""
    max_evaluation_batches: int | None = None
    """Limit on the minibatches of such an evaluation."""
    weight: MinibatchWeight | None = None
    """The weight of a minibatch in means over several; None: its samples. Last stage only."""
    losses: WeightedLosses | None = None
    """Several losses by name; None if there is one. Last stage only."""

    def weight_of(self, target: Any, num_samples: int) -> int:
        """The weight of a minibatch of `num_samples` with this target."""
        return num_samples if self.weight is None else self.weight(target)


@dataclass(frozen=True, slots=True)
class Clipping:
    """Clipping of gradients to a maximum norm."""

    max_norm: float
    over_stages: bool
    """Whether the norm is taken over all stages, rather than over each stage."""


#: Called with the parts of a stage, a minibatch of its virtual worker, its clock W*, and its weights by parameter name.
Watch = Callable[["StageParts", Minibatch, Clock, Mapping[str, Tensor]], None]


@dataclass(slots=True)
class StageParts:
    """The components that a stage's loop drives.

    At a barrier where layers move (`pipeline.moving`), `layers` and what depends on them change, and `bounds`.
    """

    identity: StageIdentity
    sync: SyncSpec
    layers: tuple[Layer, ...]
    compute: StageCompute
    emulator: Emulator
    versions: VersionTable
    weights: StageWeights
    has_shards: bool
    """Whether parameter servers publish weights; if not, none are fetched."""
    clipping: Clipping | None
    scales: LossScales | None
    """Scales of the loss; `precision: fp16` only."""
    replicas: Replicas | None
    """The same stage of the other virtual workers; `allreduce` only."""
    pool: BufferPool
    order: Order
    schedule: Schedule
    data: StageData
    upstream: Link | None
    downstream: Link | None
    synchroniser: Synchroniser
    history: HistoryWriter
    timeline: TimelineWriter
    metrics: MetricsWriter
    """Writes the metrics of the last stage, which has the losses."""
    report: Callable[[StageReport], None]
    clock: TimeSource
    part_writer: PartWriter
    guard: AbstractContextManager[object]
    """Held while torch's global generator is in use; a lock if stages share a process."""
    stall_seconds: float
    """Maximum duration of any wait; afterwards the stage fails with the reason of the wait."""
    last_checkpoint_seconds: float
    """Extra time for retries of the checkpoint that ends the run."""
    run_dir: Path = Path()
    """Folder of the run; for file names in messages."""
    shift: int = 0
    """Within a segment minibatches are numbered as if N had always been what it is now (wsp.md §11). Added to such a
    number, this gives the minibatch's own, which seeds, records and messages use."""
    plan_version: int = 0
    """The version of its virtual worker's plan in the current segment."""
    bounds: tuple[int, ...] = ()
    """Stage k of its virtual worker has the layers [bounds[k], bounds[k + 1])."""
    frozen: int = 0
    """F: frozen layers with trainable parameters in the current segment (freezing.md)."""
    frozen_layers: int = 0
    """The leading layers of the chain that are frozen."""
    inactive: frozenset[int] = frozenset()
    """The layers of the chain that are inactive in the current segment (dynamic-models.md)."""
    predecessor: Callable[[SegmentRecord], VirtualWorkerIndex | None] = lambda _segment: None
    """The virtual worker whose state this one takes over where it joins at a clock; None: it has its own."""
    prefix: FrozenPrefix | None = None
    """Its frozen layers, where what enters the layer behind them is cached; None: they compute it each time."""
    watch: Watch = lambda *_: None
    """Called before each forward."""
    tells_norms: bool = False
    """Whether the norms of its gradients decide what freezes, so that they go to the clock shard with each wave."""

    @property
    def is_frozen(self) -> bool:
        """Whether all layers of the stage are frozen, so that it has neither backwards nor updates."""
        return self.layers[-1].index < self.frozen_layers

    def cover(self, policies: Sequence[LayerPolicy]) -> None:
        """Emulate the device's time for the stage's layers under these memory policies."""
        self.emulator.cover(
            self.layers[0].index,
            self.layers[-1].index + 1,
            frozen=self.frozen_layers,
            policies=policies,
            inactive=self.inactive,
        )

    def leave_out(self, inactive: Iterable[int]) -> None:
        """Compute and push without these layers of the chain from here on; nothing is in flight."""
        self.inactive = frozenset(inactive)
        self.compute.leave_out(self.inactive)
        self.synchroniser.leave_out(self.inactive)
        self.cover(self.compute.memory.policies)

    @property
    def left_out(self) -> tuple[int, ...]:
        """The inactive ones of its own layers."""
        return tuple(layer.index for layer in self.layers if layer.index in self.inactive)

    @property
    def reader(self) -> DataReader:
        """Reads the minibatches; first and last stage only."""
        assert self.data.reader is not None, "only the first and the last stage read data"
        return self.data.reader
