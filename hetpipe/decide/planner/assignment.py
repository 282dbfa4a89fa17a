"""Conversion of a plan document to the plan of a run: its devices become agents' devices, its bytes slices. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate

from hetpipe.errors import PlanError
from hetpipe.values.ids import AgentId, DeviceId, JobId, LayerIndex, ShardIndex, Term, VirtualWorkerIndex
from hetpipe.values.plan import (
    DTYPE_BYTES,
    LayerReport,
    ModelReport,
    Plan,
    SlicePlan,
    StagePlan,
    TensorSpec,
    VirtualWorkerPlan,
)
from hetpipe.values.plan_document import PlanDocument, SliceRange

#: Device name in a plan document → the agent that has it, and the agent's name for it.
Offered = Mapping[DeviceId, tuple[AgentId, DeviceId]]


def assign(document: PlanDocument, model: ModelReport, offered: Offered, *, term: Term, job_id: JobId) -> Plan:
    """The plan of a run.

    Args:
        document: the plan document.
        model: report on the model.
        offered: devices offered by agents, including all those in the document.
        term: the term of the plan.
        job_id: the job's id.

    Raises:
        PlanError: the document is for another model, or a device is not offered.
    """
    num_layers = document.virtual_workers[0].stages[-1].layers[1]
    if num_layers != len(model.layers):
        raise PlanError(
            f"the plan is for a model of {num_layers} layers, but the job's model has {len(model.layers)}; profile the "
            "job and plan again"
        )
    workers = tuple(
        VirtualWorkerPlan(
            VirtualWorkerIndex(index),
            tuple(
                StagePlan(
                    *_offer(offered, stage.device),
                    LayerIndex(stage.layers[0]),
                    LayerIndex(stage.layers[1]),
                    stage.memory,
                )
                for stage in worker.stages
            ),
        )
        for index, worker in enumerate(document.virtual_workers)
    )
    slices = tuple(piece for layer in model.layers for piece in _slices(layer, document)) if document.has_shards else ()
    return Plan(
        job_id=job_id,
        term=term,
        virtual_workers=workers,
        slices=slices,
        num_shards=max(1, len(document.shards)),
        model_digest=model.digest,
    )


def _offer(offered: Offered, device: DeviceId) -> tuple[AgentId, DeviceId]:
    if device not in offered:
        raise PlanError(
            f"the plan uses device {device}, which no agent offers; offered are {', '.join(sorted(offered)) or 'none'}"
        )
    return offered[device]


def _slices(layer: LayerReport, document: PlanDocument) -> Iterator[SlicePlan]:
    """The slices of a layer's parameters, which are placed individually or, under the layer's name, consecutively."""
    ends = list(accumulate(parameter.num_bytes for parameter in layer.parameters))
    for parameter, end in zip(layer.parameters, ends, strict=True):
        where, offset = document.placement.get(parameter.name), 0
        by_layer = where is None
        if by_layer:
            where, offset = document.placement.get(layer.name), end - parameter.num_bytes
        if where is None:
            raise PlanError(f"the plan does not place parameter {parameter.name}; profile the job and plan again")
        pieces = ((where, 0, ends[-1]),) if isinstance(where, int) else where
        if by_layer:
            pieces = tuple(_between_elements(parameter, piece, offset) for piece in pieces)
        yield from _pieces(parameter, layer.index, pieces, offset)


def _between_elements(parameter: TensorSpec, piece: SliceRange, offset: int) -> SliceRange:
    """The part of a layer's piece within one parameter, with its ends rounded down to whole elements."""
    size = DTYPE_BYTES[parameter.dtype]
    shard, *ends = piece
    start, stop = (end - (end - offset) % size if 0 < end - offset < parameter.num_bytes else end for end in ends)
    return shard, start, stop


def _pieces(
    parameter: TensorSpec, layer: LayerIndex, pieces: tuple[SliceRange, ...], offset: int
) -> Iterator[SlicePlan]:
    size = DTYPE_BYTES[parameter.dtype]
    if parameter.num_bytes == 0:
        yield SlicePlan(parameter, layer, ShardIndex(pieces[0][0]), 0, 0)
        return
    covered = 0
    for shard, begin, end in pieces:
        start, stop = max(0, begin - offset), min(parameter.num_bytes, end - offset)
        if start >= stop:
            continue
        if start % size or stop % size:
            raise PlanError(f"the plan cuts parameter {parameter.name} within an element; plan again")
        covered += stop - start
        yield SlicePlan(parameter, layer, ShardIndex(shard), start // size, stop // size)
    if covered != parameter.num_bytes:
        raise PlanError(
            f"the plan places {covered} of the {parameter.num_bytes} bytes of parameter {parameter.name}; profile the "
            "job and plan again"
        )
