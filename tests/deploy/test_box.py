"""Devices under the names that an engine hands them out by."""

from __future__ import annotations

from hetpipe.deploy.box import BoxDevice, box_devices
from hetpipe.values.ids import DeviceId
from hetpipe.values.run import AgentDevice

GIB = 1 << 30


def test_gpus_have_a_uuid_and_the_catalogue_s_type() -> None:
    found = (AgentDevice("n/0", "NVIDIA GeForce RTX 2060", 6 * GIB, "cuda:0"), AgentDevice("n/1", "cpu", GIB, "cpu"))
    assert box_devices(found, gpu_uuid=lambda device: f"GPU-of-{device}") == (
        BoxDevice(DeviceId("n/0"), "RTX_2060", "GPU-of-cuda:0"),
        BoxDevice(DeviceId("n/1"), "cpu"),
    )
