"""(q) What a minibatch of one stage costs beside a plain loop on a GPU; the cases of `models`, and a larger one."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks import models
from hetpipe.values.precision import Precision

PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16")


def name_of_gpu() -> str | None:
    """The first GPU; None without one."""
    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else None


def measure() -> Iterator[tuple[str, dict[str, float]]]:
    """Case and precision, and the figures; nothing without a GPU."""
    if name_of_gpu() is None:
        return
    for precision in PRECISIONS:
        place = models.Place(torch.device("cuda", 0), precision)
        yield from ((f"{case}, {precision}", figures) for case, figures in models.measure(place).items())
