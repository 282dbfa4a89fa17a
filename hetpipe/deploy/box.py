"""The devices of one machine, with their names in a container engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hetpipe.values.ids import DeviceId
from hetpipe.values.run import AgentDevice, type_of

_CUDA = "cuda"


@dataclass(frozen=True, slots=True)
class BoxDevice:
    """One device."""

    device: DeviceId
    """`NODE/INDEX`, as in plans for this machine."""
    type: str
    """Its device type."""
    gpu: str = ""
    """The GPU's UUID; empty for a CPU device. Unlike an index it is the same for CUDA and the engine, which number GPUs
    in different orders."""


def box_devices(
    devices: Sequence[AgentDevice], *, gpu_uuid: Callable[[str], str] | None = None
) -> tuple[BoxDevice, ...]:
    """The devices found by `discover_devices`, with the UUIDs of the GPUs.

    Args:
        devices: of this machine.
        gpu_uuid: from a torch device to the UUID of its GPU; torch's own answer by default.
    """
    name_of = gpu_uuid or _gpu_uuid
    return tuple(
        BoxDevice(
            DeviceId(device.device),
            type_of(device),
            name_of(device.torch_device) if device.torch_device.startswith(_CUDA) else "",
        )
        for device in devices
    )


def _gpu_uuid(torch_device: str) -> str:
    import torch  # slow to import, and not needed without GPUs

    return f"GPU-{torch.cuda.get_device_properties(torch_device).uuid}"
