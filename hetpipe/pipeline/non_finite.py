"""Details of a non-finite loss, gradient or update: its location, the samples, and how to reproduce it.

Detection costs nothing per minibatch: losses are on the host anyway, and gradients are checked where their norm is
computed for clipping. Otherwise updates are checked once per wave; only for a non-finite one, the optimizer's state
shows whether the gradient was non-finite already.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from hetpipe.decide.sync.division import Block
from hetpipe.errors import NonFiniteUpdate
from hetpipe.observe.log import get_logger
from hetpipe.pipeline.callables import stream_of
from hetpipe.pipeline.setup import StageParts
from hetpipe.values.sync import DataSpec

_log = get_logger(__name__)

#: Limit on the sample indices in a message; the log contains all of them.
_MAX_SHOWN = 64


def explained(
    error: NonFiniteUpdate, parts: StageParts, blocks: tuple[Block, ...], *, first: int, epoch: int = 0
) -> NonFiniteUpdate:
    """Add stage, layer, samples, and the call that reads the samples to the error.

    Args:
        error: error of a stage's segment.
        parts: the stage.
        blocks: sample indices of its virtual worker's minibatches in that segment.
        first: number of the first of these minibatches.
        epoch: of the segment, from 0.
    """
    p, name = error.minibatch, error.parameter
    if error.minibatches and name and _is_from_gradient(parts, name):
        error = NonFiniteUpdate.in_parameter(name, quantity="gradient", minibatches=error.minibatches)
    layer = next((layer for layer in parts.layers if name in layer.parameters.values()), None)
    where = "" if layer is None else f" of layer {layer.index} ({layer.name})"
    replay = ""
    if p is not None and 0 <= p - first < len(blocks):
        replay = _replay(parts, p, blocks[p - first], epoch)
    return NonFiniteUpdate(f"{parts.identity}: {error}{where}{replay}", minibatch=p, parameter=name)


def known_data(parts: StageParts) -> DataSpec:
    """The data assigned to virtual workers; a stage that reads none takes its length from the run's folder."""
    spec = parts.data.spec
    if spec.num_samples:
        return spec
    try:
        return replace(spec, num_samples=int(json.loads((parts.run_dir / "facts.json").read_bytes())["num_samples"]))
    except (OSError, ValueError, KeyError, TypeError):
        return spec


def _is_from_gradient(parts: StageParts, name: str) -> bool:
    """Whether the optimizer has averaged a non-finite gradient of the parameter."""
    state: Mapping[str, Tensor | float | int] = parts.weights.optimizer.state().get(name, {})
    kept = (value for value in state.values() if isinstance(value, Tensor) and value.is_floating_point())
    return any(not bool(torch.isfinite(value).all()) for value in kept)


def _replay(parts: StageParts, p: int, block: Block, epoch: int) -> str:
    """Python call that returns the samples of minibatch `p`."""
    vw, job = parts.identity.vw, str(parts.run_dir / "job.json")
    _log.error("not_finite", vw=vw, p=p, indices=str(list(block)))
    shown = list(block[:_MAX_SHOWN])
    more = "" if len(shown) == len(block) else f" # and {len(block) - len(shown)} more: `not_finite` in the log has all"
    is_stream = parts.data.train is not None and stream_of(parts.data.train) is not None
    which = f"{shown}, epoch={epoch + 1}" if is_stream else str(shown)
    return f"; its samples are those of: hetpipe.minibatch({job!r}, vw={vw}, p={p}, indices={which}){more}"
