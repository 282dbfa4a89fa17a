"""Configuration of torch for the GPU of a stage."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

import torch

#: The workspaces with which cuBLAS is deterministic; read at its first use.
_CUBLAS_WORKSPACE = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def use_device(
    device: torch.device, *, deterministic: bool, environment: MutableMapping[str, str] = os.environ
) -> None:
    """Make `device` the current one, so that `device="cuda"` in a model's code refers to it; no effect for CPU devices.

    Args:
        device: of the stage.
        deterministic: use deterministic kernels, with a warning for operations without one.
        environment: of the process; a workspace configured there takes precedence.
    """
    if device.type != "cuda":
        return
    if deterministic:
        environment.setdefault(*_CUBLAS_WORKSPACE)
        torch.use_deterministic_algorithms(mode=True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # the stub lacks it
    torch.cuda.set_device(device)


def peak_bytes(device: torch.device) -> tuple[int, int] | None:
    """Peak bytes of GPU memory that torch allocated, and reserved, in this process; None for the CPU."""
    if device.type != "cuda":
        return None
    return torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
