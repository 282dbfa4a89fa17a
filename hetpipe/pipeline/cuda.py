"""How a stage sets torch up for its GPU."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

import torch

#: The workspaces that cuBLAS needs to give the same bits every time; it reads them when it is first used.
_CUBLAS_WORKSPACE = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def use_device(
    device: torch.device, *, deterministic: bool, environment: MutableMapping[str, str] = os.environ
) -> None:
    """Make `device` the current one, so that `device="cuda"` in a model's code means it; no effect for CPU devices.

    Args:
        device: that of the stage.
        deterministic: use deterministic kernels where torch has some, and warn where it has none.
        environment: that of the process; a workspace that is set there stays.
    """
    if device.type != "cuda":
        return
    if deterministic:
        environment.setdefault(*_CUBLAS_WORKSPACE)
        torch.use_deterministic_algorithms(mode=True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # the stub lacks it
    torch.cuda.set_device(device)


def peak_bytes(device: torch.device) -> tuple[int, int] | None:
    """The most bytes of GPU memory that torch had given out, and had reserved, in this process; None for the CPU."""
    if device.type != "cuda":
        return None
    return torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
