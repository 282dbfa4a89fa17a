"""The work of one sample: tokens, and floating-point operations of the model's forward and backward.

Operations are counted during one minibatch, by the same `FlopCounter` as in a profile. Recomputation in the backward
does not count, as usual for model FLOPs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import structlog
import torch
from torch import Tensor

from hetpipe.pipeline.chain import dtype_name
from hetpipe.pipeline.flop_counter import FlopCounter
from hetpipe.values.plan import ModelWork, compute_dtype
from hetpipe.values.precision import Precision

_log = structlog.get_logger(__name__)

_IDS = (torch.int16, torch.int32, torch.int64)
#: Dimensions of a tensor of ids: samples, and at least one of tokens.
_LEAST_DIMENSIONS = 2


def model_work(
    samples: int,
    compute_loss: Callable[[], Tensor],
    parameters: Sequence[Tensor],
    *,
    tokens_per_sample: int | None,
    precision: Precision = "fp32",
) -> ModelWork:
    """Measure the work of one sample.

    Args:
        samples: samples in a minibatch.
        compute_loss: runs the model on one.
        parameters: the trainable parameters.
        tokens_per_sample: None if unknown.
        precision: what the model computes in.
    """
    dtype = compute_dtype(((dtype_name(one.dtype), one.numel()) for one in parameters), precision)
    return ModelWork(tokens_per_sample, _count(compute_loss, parameters, samples), dtype)


def tokens_of(inputs: Sequence[Tensor]) -> int | None:
    """Tokens per sample: elements of the first input, if it holds ids (integers, samples × at least one dimension).

    >>> tokens_of([torch.zeros(8, 128, dtype=torch.int64)]), tokens_of([torch.zeros(8, 3, 32, 32)])
    (128, None)
    """
    first = inputs[0]
    if first.dtype not in _IDS or first.dim() < _LEAST_DIMENSIONS or not first.shape[0]:
        return None
    return first.numel() // first.shape[0] or None


def _count(compute_loss: Callable[[], Tensor], parameters: Sequence[Tensor], samples: int) -> float | None:
    """Operations per sample; None if torch counted none, or cannot count this model."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    forward, backward = FlopCounter(is_backward=False), FlopCounter(is_backward=True)
    try:
        with torch.enable_grad(), forward:
            loss = compute_loss()
        if trained and loss.requires_grad:
            with backward:
                torch.autograd.grad(loss, trained, allow_unused=True)
    except Exception as error:  # noqa: BLE001 - no run fails because it cannot be counted
        _log.warning("flops_not_counted", reason=f"{type(error).__name__}: {error}")
        return None
    total = forward.model_flops + backward.model_flops
    return total / samples if total and samples else None
