"""Execute a `ProfileOrder`: one measurement per local device type, cached where possible.

A measurement includes the framework's own memory on the device (`framework_reserve`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from hetpipe.clock import Clock
from hetpipe.job.file import Job
from hetpipe.pipeline.chain import Layer
from hetpipe.profiler.cache import MeasurementCache
from hetpipe.profiler.chain_measurement import measure_chain
from hetpipe.profiler.fingerprint import fingerprint_of
from hetpipe.profiler.order import ProfileAnswer, ProfileOrder
from hetpipe.profiler.sampling import Sampling
from hetpipe.profiler.subject import Subject, load_subject
from hetpipe.values.catalogue import type_of_device_name
from hetpipe.values.measurement import CPU_TYPE, Measurement, ProfileStep


@dataclass(frozen=True, slots=True)
class Target:
    """A device to measure on."""

    device: torch.device
    key: str
    """Key of its measurement in the cache."""


def carry_out(order: ProfileOrder, clock: Clock, on_step: Callable[[ProfileStep], None]) -> ProfileAnswer:
    """Measure, or return cached measurements.

    Args:
        order: what to measure.
        clock: time source.
        on_step: called before each layer is measured.

    Raises:
        CallableError, JobError: the user's code cannot be used.
    """
    subject = load_subject(Job.model_validate(order.job), Path(order.import_path))
    return measured(subject, targets_of(subject, order), order, clock, on_step)


def targets_of(subject: Subject, order: ProfileOrder) -> dict[str, Target]:
    """Device type → device to measure; all user modules imported so far are part of the cache key."""
    devices = devices_here(with_cpu=order.with_cpu)
    import_path = Path(order.import_path)
    return {
        kind: Target(device, fingerprint_of(subject, device, import_path).key)
        for kind, device in devices.items()
        if order.types is None or kind in order.types
    }


def measured(
    subject: Subject,
    targets: Mapping[str, Target],
    order: ProfileOrder,
    clock: Clock,
    on_step: Callable[[ProfileStep], None],
) -> ProfileAnswer:
    """Measure `subject` on its `targets`; see `carry_out`.

    Raises:
        CallableError: a layer or the loss cannot run.
    """
    cache = MeasurementCache(Path(order.cache_folder), Measurement)
    found: dict[str, Measurement] = {}
    if not order.fresh:
        for kind, target in targets.items():
            measurement = cache.find(target.key)
            if measurement is not None and measurement.repeats >= (order.repeats or 0):
                found[kind] = measurement
    cached = tuple(found)
    names = [layer.name for layer in subject.chain]
    missing = [kind for kind in targets if kind not in found]
    sampling = Sampling.within(num_layers=len(names)) if order.repeats is None else Sampling.fixed(order.repeats)
    for turn, kind in enumerate(missing):

        def on_layer(position: int, kind: str = kind, before: int = turn * len(names)) -> None:
            on_step(ProfileStep(kind, names[position], before + position, len(missing) * len(names)))

        device, key = targets[kind].device, targets[kind].key
        reserve_bytes = framework_reserve(device, subject.chain)
        measurement = measure_chain(subject, device, kind, sampling=sampling, clock=clock, on_layer=on_layer)
        found[kind] = replace(measurement, reserve_bytes=reserve_bytes)
        cache.keep(key, found[kind])
    return ProfileAnswer(tuple(found[kind] for kind in targets), cached)


def devices_here(*, with_cpu: bool) -> dict[str, torch.device]:
    """Device type → first local device of that type; CPU only on request or without a GPU."""
    found: dict[str, torch.device] = {}
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        kind = type_of_device_name(properties.name, properties.total_memory) or properties.name
        found.setdefault(kind, torch.device("cuda", index))
    if with_cpu or not found:
        found[CPU_TYPE] = torch.device("cpu")
    return found


#: Size of the square matrices whose product makes libraries allocate their workspace.
_WARM_UP_SIZE = 64


def framework_reserve(device: torch.device, chain: Sequence[Layer]) -> int:
    """Bytes of `device` that a process like this one takes in addition to the tensors of the model.

    On a GPU: memory not free after a first matrix product and not held by torch for tensors: the context, library
    workspaces, and allocations of other programs, which are unavailable too. On the CPU: resident memory of this
    process without the model `chain`: Python, torch and the imports of the user's code.
    """
    if device.type == "cuda":
        side = torch.ones(_WARM_UP_SIZE, _WARM_UP_SIZE, device=device)
        torch.mm(side, side).sum().item()
        free, total = torch.cuda.mem_get_info(device)
        return max(0, total - free - torch.cuda.memory_reserved(device))
    modules = [layer.module for layer in chain]
    tensors = {id(t): t for module in modules for t in (*module.parameters(), *module.buffers()) if t.device == device}
    return max(0, _resident_bytes() - sum(tensor.nbytes for tensor in tensors.values()))


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
