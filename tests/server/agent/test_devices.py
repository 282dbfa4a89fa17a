"""The devices a node offers."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace

import pytest

from hetpipe.errors import UserError
from hetpipe.server.agent.devices import discover_devices


def cuda(*names: str) -> SimpleNamespace:
    properties = [SimpleNamespace(name=name, total_memory=8 << 30) for name in names]
    return SimpleNamespace(
        cuda=SimpleNamespace(
            is_available=lambda: bool(names),
            device_count=lambda: len(names),
            get_device_properties=properties.__getitem__,
        )
    )


def test_cpu_devices_are_declared() -> None:
    devices = discover_devices("n0", num_cpu_devices=3)

    assert [device.device for device in devices] == ["n0/0", "n0/1", "n0/2"]
    assert {(device.type, device.torch_device) for device in devices} == {("cpu", "cpu")}
    assert all(device.memory_bytes > 0 for device in devices)


def test_by_default_there_is_one_per_cpu() -> None:
    assert len(discover_devices("n0", has_nvidia=lambda: False)) == os.cpu_count()


def test_none_at_all_is_refused() -> None:
    with pytest.raises(UserError, match="--cpu-devices must be at least 1, not 0"):
        discover_devices("n0", num_cpu_devices=0)


def test_cuda_devices_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", cuda("RTX 2060", "TITAN V"))

    devices = discover_devices("n0", has_nvidia=lambda: True)

    assert [(device.device, device.type, device.torch_device) for device in devices] == [
        ("n0/0", "RTX 2060", "cuda:0"),
        ("n0/1", "TITAN V", "cuda:1"),
    ]
    assert devices[0].memory_bytes == 8 << 30


def test_a_gpu_can_be_several_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", cuda("RTX 2060", "TITAN V"))

    devices = discover_devices("n0", devices_per_gpu=2, has_nvidia=lambda: True)

    # The first part of every GPU comes before the second of any, so neighbouring stages get different GPUs.
    assert [(device.device, device.type, device.torch_device) for device in devices] == [
        ("n0/0", "RTX 2060", "cuda:0"),
        ("n0/1", "TITAN V", "cuda:1"),
        ("n0/2", "RTX 2060", "cuda:0"),
        ("n0/3", "TITAN V", "cuda:1"),
    ]
    assert {device.memory_bytes for device in devices} == {4 << 30}


def test_a_gpu_is_at_least_one_device() -> None:
    with pytest.raises(UserError, match="--devices-per-gpu must be at least 1, not 0"):
        discover_devices("n0", devices_per_gpu=0)


def test_a_driver_without_devices_leaves_the_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", cuda())

    assert {device.type for device in discover_devices("n0", has_nvidia=lambda: True)} == {"cpu"}


def test_asking_for_cpu_devices_means_those_alone() -> None:
    assert len(discover_devices("n0", num_cpu_devices=2, has_nvidia=lambda: pytest.fail("not asked"))) == 2
