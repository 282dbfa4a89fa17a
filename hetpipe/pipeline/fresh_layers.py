"""Layers that are built anew while a model trains (`dynamic-models.md` §3)."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from hetpipe.job.file import Job
from hetpipe.pipeline.callables import build_model
from hetpipe.pipeline.chain import chain_of
from hetpipe.pipeline.handover import LayerState, States
from hetpipe.pipeline.seeds import fresh_seed, preserved_generators
from hetpipe.values.ids import Clock


def built_anew(job: Job, import_path: Path, clock: Clock, layers: Collection[int]) -> States:
    """The states of `layers` as the model's constructor makes them for the barrier at `clock`.

    All of the model is built, under a seed of the clock and without `init_from`; the other layers are dropped.

    Raises:
        CallableError: the user's code cannot be used.
    """
    if not layers:
        return {}
    other = job.model_copy(update={"seed": fresh_seed(job.seed, clock), "init_from": None})
    with preserved_generators():
        chain = chain_of(build_model(other, import_path))
    return {layer.index: LayerState.as_built(layer) for layer in chain if layer.index in layers}
