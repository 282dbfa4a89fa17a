"""torchvision beside a torch without its compiled operators: wheels for CUDA do not load beside a torch for CPUs.

Its models need none of them, but importing it declares how two of them behave on fake tensors; so they are declared.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

_kept: list[Any] = []


def import_torchvision() -> Any:
    """The package."""
    try:
        return importlib.import_module("torchvision")
    except RuntimeError as error:
        if "does not exist" not in str(error):
            raise
    library = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch ships it untyped
    _kept.append(library)
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")  # type: ignore[no-untyped-call]
    return importlib.import_module("torchvision")
