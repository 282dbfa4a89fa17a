"""What one stage's loop is built from: who it is, what surrounds it, and what it computes with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor

from hetpipe.checkpoint.stage_part import PartWriter
from hetpipe.clock import Clock as TimeSource
from hetpipe.decide.schedule.policy import Order
from hetpipe.decide.schedule.versions import VersionTable
from hetpipe.decide.sync.records import SegmentMember, SegmentRecord
from hetpipe.link.policy import Link
from hetpipe.observe.history import HistoryWriter
from hetpipe.observe.metrics import MetricsWriter
from hetpipe.observe.timeline import TimelineWriter
from hetpipe.pipeline.callables import LossFunction, MapDataset
from hetpipe.pipeline.chain import Layer
from hetpipe.pipeline.compute import Emulator, StageCompute
from hetpipe.pipeline.synchroniser import Synchroniser
from hetpipe.values.ids import Incarnation, StageIndex, VirtualWorkerIndex
from hetpipe.values.policies import Schedule
from hetpipe.values.run import StageReport
from hetpipe.values.sync import DataSpec, SyncSpec
from hetpipe.weights.flat import BufferPool
from hetpipe.weights.policy import StageWeights


class Replicas(Protocol):
    """The same stage of all replicas. All of them make the same calls in the same order."""

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over the replicas; shapes and dtypes are the same everywhere.

        Raises:
            DeadlineExceeded: another replica did not come in time.
        """
        ...

    def copy_first_(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by replica 0's.

        Raises:
            DeadlineExceeded: another replica did not come in time.
        """
        ...


#: Longest time a frame may wait for room on its link.
SEND_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class StageIdentity:
    """Which stage of which virtual worker, in which life."""

    vw: VirtualWorkerIndex
    stage: StageIndex
    incarnation: Incarnation
    num_stages: int

    @property
    def is_first(self) -> bool:
        """It reads inputs and opens minibatches."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """It reads targets and computes the loss."""
        return self.stage == self.num_stages - 1

    def in_segment(self, segment: SegmentRecord) -> SegmentMember | None:
        """The entry of this life of its virtual worker among the members of a segment."""
        lives = (member for member in segment.members if member.vw == self.vw)
        return next((member for member in lives if member.incarnation == self.incarnation), None)

    def leaves_at(self, segment: SegmentRecord) -> bool:
        """Whether this life of its virtual worker was drained, and leaves at the barrier before a segment."""
        return any((member.vw, member.incarnation) == (self.vw, self.incarnation) for member in segment.left)

    def __str__(self) -> str:
        """As people say it."""
        return f"stage {self.stage} of virtual worker {self.vw}"


@dataclass(frozen=True, slots=True)
class StageData:
    """The data sets (first and last stage only) and what is measured on them."""

    spec: DataSpec
    train: MapDataset | None
    evaluation: MapDataset | None
    metrics: Mapping[str, LossFunction]
    """`loss` and the job's own; last stage only."""
    evaluate_every_waves: int | None = None
    """How often the weights are evaluated within an epoch; None: not at all."""
    max_evaluation_batches: int | None = None
    """Minibatches of such an evaluation, at most."""


@dataclass(frozen=True, slots=True)
class Clipping:
    """Gradients of a larger norm are scaled down to it."""

    max_norm: float
    over_stages: bool
    """The norm is taken over all stages, or else over each by itself."""


@dataclass(frozen=True, slots=True)
class StageParts:
    """Everything a stage's loop drives."""

    identity: StageIdentity
    sync: SyncSpec
    layers: tuple[Layer, ...]
    compute: StageCompute
    emulator: Emulator
    versions: VersionTable
    weights: StageWeights
    has_shards: bool
    """Parameter servers publish weights; if not, nothing is fetched."""
    clipping: Clipping | None
    replicas: Replicas | None
    """The same stage of the other virtual workers under `allreduce`."""
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
    """Of the last stage, where the losses are."""
    report: Callable[[StageReport], None]
    clock: TimeSource
    part_writer: PartWriter
    guard: AbstractContextManager[object]
    """Held while torch's global generator is in use; a lock where stages share a process."""
    stall_seconds: float
    """Longest wait for anything before the stage gives up, naming what it waited for."""
    last_checkpoint_seconds: float
    """How long the checkpoint that ends the run is tried again; added to that for it."""
    run_dir: Path = Path()
    """Of the run; messages name files in it."""
