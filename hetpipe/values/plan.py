"""The plan of a running job: frozen values sent from planner to coordinator, agents, stages and shards.

A `Plan` is complete: together with the job file it defines the part of every process. It is written to
`RUN_DIR/plan.json`, and each new plan has a higher term.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from pydantic import AfterValidator, Field

from hetpipe.values.activation import Activation, ActivationCut
from hetpipe.values.bounds import (
    COUNT,
    MAX_COUNT,
    MAX_LISTED,
    MAX_RANK,
    MAX_SAMPLES,
    Count,
    Name,
    Seconds,
    Sentence,
)
from hetpipe.values.freezing import FreezeCut, FreezeLineup
from hetpipe.values.ids import AgentId, DeviceId, JobId, LayerIndex, ShardIndex, StageIndex, Term, VirtualWorkerIndex
from hetpipe.values.memory import LayerPolicy
from hetpipe.values.precision import AUTOCAST_DTYPES, Precision

#: Bytes per element of every dtype that may be sent. An allow-list: any other dtype is rejected.
DTYPE_BYTES: dict[str, int] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}


#: Compute dtype of a model without trainable parameters.
DEFAULT_DTYPE = "float32"


def compute_dtype(sizes: Iterable[tuple[str, int]], precision: Precision = "fp32") -> str:
    """The dtype that a model's matrix products compute in: that of most of its parameters by bytes, or autocast's.

    Args:
        sizes: dtype and number of elements of each parameter; unknown dtypes all count with the same size.
        precision: of the job. Autocast leaves float64 as it is.

    >>> compute_dtype([("float32", 10), ("bfloat16", 30)])
    'bfloat16'
    >>> compute_dtype([("float32", 10)], "bf16"), compute_dtype([("float64", 10)], "bf16")
    ('bfloat16', 'float64')
    """
    bytes_by_dtype = Counter[str]()
    for dtype, num_elements in sizes:
        bytes_by_dtype[dtype] += num_elements * DTYPE_BYTES.get(dtype, 1)
    most = bytes_by_dtype.most_common(1)[0][0] if bytes_by_dtype else DEFAULT_DTYPE
    return most if most == "float64" else AUTOCAST_DTYPES.get(precision, most)


def _checked_dtype(dtype: str) -> str:
    if dtype not in DTYPE_BYTES:
        raise ValueError(f"one of {', '.join(DTYPE_BYTES)}")
    return dtype


def _checked_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    if len(shape) > MAX_RANK or math.prod(shape) >= MAX_COUNT:
        raise ValueError(f"at most {MAX_RANK} dimensions and 2^53 elements")
    return shape


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, shape and dtype of one tensor; `name` is the model's own (`state_dict`) name."""

    name: Name
    shape: Annotated[tuple[Count, ...], AfterValidator(_checked_shape)]
    dtype: Annotated[str, AfterValidator(_checked_dtype)]

    @property
    def num_elements(self) -> int:
        """Product of the shape; 1 for a scalar."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Size in bytes."""
        return self.num_elements * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class ForbiddenPlaces:
    """Neighbouring places within a layer where the model cannot be cut, all for one reason."""

    before: Name
    """The call behind the first of them."""
    upto: Name
    """The call behind the last of them."""
    places: Count
    """Number of these places."""
    reason: Name
    """The end of the sentence "no cut before …: "."""


@dataclass(frozen=True, slots=True)
class LayerReport:
    """Inspection result for one layer of the chain."""

    index: Annotated[LayerIndex, COUNT]
    name: Name
    parameters: tuple[TensorSpec, ...]
    buffers: tuple[TensorSpec, ...]
    activation_elements: Count
    """Elements of the layer's output for one minibatch."""
    forbidden: tuple[ForbiddenPlaces, ...] = ()
    """Places within the layer where it cannot be cut."""
    is_tied: bool = False
    """Whether this layer or a later one uses a trainable parameter of an earlier one."""


@dataclass(frozen=True, slots=True)
class ModelWork:
    """Work of one sample of the training data."""

    tokens_per_sample: Annotated[int, Field(ge=1)] | None
    """None where samples are not sequences of ids and the job gives no number."""
    flops_per_sample: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None
    """Of the model's forward and backward, without recomputation; None where torch cannot count them."""
    compute_dtype: Name = DEFAULT_DTYPE
    """The dtype of most of the parameters, by bytes."""


@dataclass(frozen=True, slots=True)
class ProofReport:
    """Result of the proof before training that the cut model computes the same as the user's model."""

    scope: Name
    """Scope of the proof: `whole model`."""
    equality: Name
    """`bits`, or `rounding` where differences did not exceed rounding."""
    samples: Count
    """Of each minibatch used in the proof."""
    seconds: Seconds
    """Duration of the proof."""
    checked: Annotated[tuple[Name, ...], Field(max_length=MAX_LISTED)]
    """What was compared, in order."""
    notices: Annotated[tuple[Sentence, ...], Field(max_length=MAX_LISTED)] = ()
    """Remarks for the user."""
    work: ModelWork | None = None
    """Work of a sample, counted in the same runs of the model; None from an agent of an earlier version."""

    @property
    def sentence(self) -> str:
        """Summary in one line."""
        how = "to the bit" if self.equality == "bits" else "within rounding"
        verdict = f"the layers compute what the model computes, {how} (proof: {self.scope}, {self.seconds:.1f} s)"
        return "; ".join((verdict, *self.notices))


@dataclass(frozen=True, slots=True)
class ModelReport:
    """The planner's input from the user's code; made by the inspection process."""

    layers: tuple[LayerReport, ...]
    train_samples: Annotated[int, Field(ge=0, le=MAX_SAMPLES)]
    eval_samples: Count | None
    proof: ProofReport | None = None
    """None without a proof: in tests, and from an agent of an earlier version."""
    digest: Name = ""
    """Of the file in the run's folder from which stages build the model (`pipeline/model_file.py`); empty: none."""


@dataclass(frozen=True, slots=True)
class SlicePlan:
    """A slice of one parameter on one shard: the elements [start, stop) of the flattened parameter."""

    parameter: TensorSpec
    layer: LayerIndex
    shard: ShardIndex
    start: int
    stop: int

    @property
    def name(self) -> str:
        """Its name within its shard."""
        return f"{self.parameter.name}[{self.start}:{self.stop}]"


@dataclass(frozen=True, slots=True)
class StagePlan:
    """Consecutive layers [first_layer, last_layer) on one device of one agent."""

    agent: AgentId
    device: DeviceId
    first_layer: LayerIndex
    last_layer: LayerIndex
    memory: tuple[LayerPolicy, ...] = ()
    """Memory policy of each layer, chosen under `memory: auto`; empty: the job's."""


@dataclass(frozen=True, slots=True)
class VirtualWorkerPlan:
    """The stages of one virtual worker, first to last."""

    index: VirtualWorkerIndex
    stages: tuple[StagePlan, ...]
    minibatches_per_wave: Annotated[int, Field(ge=1, lt=MAX_COUNT)] | None = None
    """N_v of a virtual worker added to the run; None: the job's N."""

    @property
    def bounds(self) -> tuple[int, ...]:
        """Stage k has the layers [bounds[k], bounds[k + 1])."""
        return (self.stages[0].first_layer, *(stage.last_layer for stage in self.stages))


@dataclass(frozen=True, slots=True)
class Plan:
    """A complete assignment: virtual workers in index order, slices in chain order."""

    job_id: JobId
    term: Term
    virtual_workers: tuple[VirtualWorkerPlan, ...]
    slices: tuple[SlicePlan, ...]
    num_shards: int
    model_digest: str = ""
    """Of the file in the run's folder from which stages build the model; empty: each stage derives its layers."""
    freeze_levels: tuple[int, ...] = ()
    """`Freezing.levels` of the model; empty for a job that freezes nothing."""
    freeze_cuts: tuple[FreezeCut, ...] = ()
    """`Freezing.cuts`; empty where layers stay where they are (`freeze.recut`)."""
    freeze_lineups: tuple[FreezeLineup, ...] = ()
    """`Freezing.lineups`; empty where no pipelines are compressed (`freeze.compress`)."""
    activations: tuple[Activation, ...] = ()
    """Which layers are inactive from when on, in order of the clocks; empty where all are active all the time."""
    activation_cuts: tuple[ActivationCut, ...] = ()
    """The changes of cuts there, in order of the clocks; empty where layers stay where they are (`elastic.recut`)."""

    def stage(self, vw: VirtualWorkerIndex, stage: StageIndex) -> StagePlan:
        """The plan of one stage."""
        return self.virtual_workers[vw].stages[stage]

    def with_bounds(self, vw: VirtualWorkerIndex, bounds: Sequence[int]) -> Plan:
        """The plan with another cut of one virtual worker, on the same devices; layers keep their memory policies."""
        worker = self.virtual_workers[vw]
        memory = tuple(policy for stage in worker.stages for policy in stage.memory)
        stages = tuple(
            replace(stage, first_layer=LayerIndex(first), last_layer=LayerIndex(last), memory=memory[first:last])
            for stage, first, last in zip(worker.stages, bounds, bounds[1:], strict=False)
        )
        workers = (*self.virtual_workers[:vw], replace(worker, stages=stages), *self.virtual_workers[vw + 1 :])
        return replace(self, virtual_workers=workers)

    def slices_of_stage(self, stage: StagePlan) -> tuple[SlicePlan, ...]:
        """The slices of the parameters that `stage` holds, in chain order."""
        return tuple(s for s in self.slices if stage.first_layer <= s.layer < stage.last_layer)
