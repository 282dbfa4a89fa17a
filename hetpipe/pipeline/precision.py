"""The precision that layers, losses and metrics compute in: torch's autocast around each of them.

Autocast's cache of cast weights is off. With it, two uses of a weight in one process share a cast, and their gradients
are summed in the short format; two uses on two stages cannot. Without it every use casts for itself, the gradients of
all uses are summed in the weight's own format, and a partition does not change the bits
(`docs/semantics/precision.md`).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from hetpipe.values.precision import AUTOCAST_DTYPES, Precision


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """A block whose operations compute in `precision` on `device`; without effect for `fp32`."""
    name = AUTOCAST_DTYPES.get(precision)
    if name is None:
        return nullcontext()
    return torch.autocast(device.type, getattr(torch, name), cache_enabled=False)
