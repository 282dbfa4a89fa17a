"""Carries out a `ProfileOrder`: one measurement per kind of device on this machine, from the cache where it has one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from hetpipe.clock import Clock
from hetpipe.profiler.cache import MeasurementCache
from hetpipe.profiler.chain_measurement import measure_chain
from hetpipe.profiler.fingerprint import fingerprint_of
from hetpipe.profiler.measurement import CPU_TYPE, Measurement
from hetpipe.profiler.order import ProfileAnswer, ProfileOrder, ProfileStep
from hetpipe.profiler.sampling import Sampling
from hetpipe.profiler.subject import load_subject
from hetpipe.spec.catalogue import type_of_device_name
from hetpipe.spec.job import Job


def carry_out(order: ProfileOrder, clock: Clock, on_step: Callable[[ProfileStep], None]) -> ProfileAnswer:
    """Measure, or find what was measured before.

    Args:
        order: what to measure.
        clock: takes the times.
        on_step: hears of each layer before it is measured.

    Raises:
        CallableError, JobError: the user's code cannot be used.
    """
    import_path = Path(order.import_path)
    subject = load_subject(Job.model_validate(order.job), import_path)
    devices = devices_here(with_cpu=order.with_cpu)
    cache = MeasurementCache(Path(order.cache_folder))
    keys = {kind: fingerprint_of(subject, device, import_path).key for kind, device in devices.items()}
    found: dict[str, Measurement] = {}
    if not order.fresh:
        for kind, key in keys.items():
            measurement = cache.find(key)
            if measurement is not None and measurement.repeats >= (order.repeats or 0):
                found[kind] = measurement
    cached = tuple(found)
    names = [layer.name for layer in subject.chain]
    missing = [kind for kind in devices if kind not in found]
    sampling = Sampling.within(num_layers=len(names)) if order.repeats is None else Sampling.fixed(order.repeats)
    for turn, kind in enumerate(missing):

        def on_layer(position: int, kind: str = kind, before: int = turn * len(names)) -> None:
            on_step(ProfileStep(kind, names[position], before + position, len(missing) * len(names)))

        found[kind] = measure_chain(subject, devices[kind], kind, sampling=sampling, clock=clock, on_layer=on_layer)
        cache.keep(keys[kind], found[kind])
    return ProfileAnswer(tuple(found[kind] for kind in devices), cached)


def devices_here(*, with_cpu: bool) -> dict[str, torch.device]:
    """Device type → the first device of that type on this machine; the CPU only if asked for or without any other."""
    found: dict[str, torch.device] = {}
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        kind = type_of_device_name(properties.name, properties.total_memory) or properties.name
        found.setdefault(kind, torch.device("cuda", index))
    if with_cpu or not found:
        found[CPU_TYPE] = torch.device("cpu")
    return found
