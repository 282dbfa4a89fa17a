"""Alignment of tensors in memory, up to which kernels depend on it."""

from __future__ import annotations

from typing import Final

#: Alignment of tensors that torch allocates on a CPU.
ALIGNMENT_BYTES: Final = 64
_GPU_ALIGNMENT_BYTES: Final = 256  # the largest alignment that torch reports to cuBLASLt


def alignment_on(device_type: str) -> int:
    """The alignment (bytes) of tensors on a device of type `device_type`, `cpu` or `cuda`."""
    return _GPU_ALIGNMENT_BYTES if device_type == "cuda" else ALIGNMENT_BYTES
