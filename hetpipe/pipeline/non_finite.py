"""What a non-finite loss, gradient or update is told with: which of them, where, in which samples, and how to see them.

Nothing here costs a minibatch anything: a loss is a number on the host already, and gradients are looked at where their
norm is there for clipping. Otherwise an update is checked once per wave; only when it is not finite, the optimizer's
state says whether the gradient was so already.
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
from hetpipe.pipeline.setup import StageParts
from hetpipe.values.sync import DataSpec

_log = get_logger(__name__)

#: So many sample indices are written out in a sentence; the log has all.
_MAX_SHOWN = 64


def explained(error: NonFiniteUpdate, parts: StageParts, blocks: tuple[Block, ...], *, first: int) -> NonFiniteUpdate:
    """The same error with stage, layer, samples, and the call that reads them again.

    Args:
        error: of a stage's segment.
        parts: of that stage.
        blocks: the sample indices of its virtual worker's minibatches in that segment.
        first: the number of the first of these minibatches.
    """
    p, name = error.minibatch, error.parameter
    if error.minibatches and name and _is_from_gradient(parts, name):
        error = NonFiniteUpdate.in_parameter(name, quantity="gradient", minibatches=error.minibatches)
    layer = next((layer for layer in parts.layers if name in layer.parameters.values()), None)
    where = "" if layer is None else f" of layer {layer.index} ({layer.name})"
    replay = ""
    if p is not None and 0 <= p - first < len(blocks):
        replay = _replay(parts, p, blocks[p - first])
    return NonFiniteUpdate(f"{parts.identity}: {error}{where}{replay}", minibatch=p, parameter=name)


def known_data(parts: StageParts) -> DataSpec:
    """What is dealt to the virtual workers; a stage that reads no data finds its length in the folder of the run."""
    spec = parts.data.spec
    if spec.num_samples:
        return spec
    try:
        return replace(spec, num_samples=int(json.loads((parts.run_dir / "facts.json").read_bytes())["num_samples"]))
    except (OSError, ValueError, KeyError, TypeError):
        return spec


def _is_from_gradient(parts: StageParts, name: str) -> bool:
    """Whether the optimizer has averaged a gradient of the parameter that was not finite."""
    state: Mapping[str, Tensor | float | int] = parts.weights.optimizer.state().get(name, {})
    kept = (value for value in state.values() if isinstance(value, Tensor) and value.is_floating_point())
    return any(not bool(torch.isfinite(value).all()) for value in kept)


def _replay(parts: StageParts, p: int, block: Block) -> str:
    """The samples of minibatch `p`, as the call that returns them."""
    vw, job = parts.identity.vw, str(parts.run_dir / "job.json")
    _log.error("not_finite", vw=vw, p=p, indices=str(list(block)))
    shown = list(block[:_MAX_SHOWN])
    more = "" if len(shown) == len(block) else f" # and {len(block) - len(shown)} more: `not_finite` in the log has all"
    return f"; its samples are those of: hetpipe.minibatch({job!r}, vw={vw}, p={p}, indices={shown}){more}"
