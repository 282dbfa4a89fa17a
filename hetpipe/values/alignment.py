"""Where tensors start in memory, as far as kernels distinguish it."""

from __future__ import annotations

from typing import Final

#: Of tensors that torch allocates on a CPU.
ALIGNMENT_BYTES: Final = 64
_GPU_ALIGNMENT_BYTES: Final = 256  # cuBLASLt is told of up to so many


def alignment_on(device_type: str) -> int:
    """The alignment (bytes) of tensors on a device of that type, `cpu` or `cuda`, up to which kernels depend on it."""
    return _GPU_ALIGNMENT_BYTES if device_type == "cuda" else ALIGNMENT_BYTES
