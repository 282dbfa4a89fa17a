"""The devices of this node: its CUDA devices, or the given number of CPU devices."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hetpipe.errors import UserError
from hetpipe.values.run import AgentDevice


@dataclass(frozen=True, slots=True)
class DeviceOffer:
    """The devices that a node offers."""

    num_cpu_devices: int | None = None
    """Offer this many CPU devices and no others; None: the CUDA devices."""
    devices_per_gpu: int = 1
    """Devices offered per GPU; more than one if stages share a GPU."""


def discover_devices(
    node: str,
    *,
    num_cpu_devices: int | None = None,
    devices_per_gpu: int = 1,
    has_nvidia: Callable[[], bool] | None = None,
) -> tuple[AgentDevice, ...]:
    """The devices node `node` offers, named `NODE/0`, `NODE/1` and so on.

    Args:
        node: name of the node.
        num_cpu_devices: offer this many CPU devices and no others; None: the CUDA devices, or without any one CPU
        device per CPU. A CPU device is only a slot for a stage process, so there may be more than CPUs.
        devices_per_gpu: number of devices per GPU, with equal parts of its memory; the first of every GPU precede the
        second ones.
        has_nvidia: an NVIDIA driver is present; otherwise torch is not imported, which takes seconds.

    Raises:
        UserError: `num_cpu_devices` or `devices_per_gpu` is not positive.
    """
    if devices_per_gpu < 1:
        raise UserError(f"--devices-per-gpu must be at least 1, not {devices_per_gpu}")
    if num_cpu_devices is None:
        cuda = _cuda_devices(node, devices_per_gpu) if (has_nvidia or _has_nvidia)() else ()
        return cuda or _cpu_devices(node, os.cpu_count() or 1)
    if num_cpu_devices < 1:
        raise UserError(f"--cpu-devices must be at least 1, not {num_cpu_devices}")
    return _cpu_devices(node, num_cpu_devices)


def _has_nvidia() -> bool:
    return any(Path("/dev").glob("nvidia[0-9]*")) or shutil.which("nvidia-smi") is not None


def _cuda_devices(node: str, per_gpu: int) -> tuple[AgentDevice, ...]:
    import torch

    if not torch.cuda.is_available():
        return ()
    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return tuple(
        AgentDevice(f"{node}/{part * len(properties) + index}", gpu.name, gpu.total_memory // per_gpu, f"cuda:{index}")
        for part in range(per_gpu)
        for index, gpu in enumerate(properties)
    )


def _cpu_devices(node: str, count: int) -> tuple[AgentDevice, ...]:
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // count
    return tuple(AgentDevice(f"{node}/{index}", "cpu", memory_bytes, "cpu") for index in range(count))
