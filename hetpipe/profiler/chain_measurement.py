"""Measure a model layer by layer on one device: times, bytes saved for the backward pass, and FLOPs.

Only one layer is resident at a time, so large models fit. CPU times come from the clock, GPU times from CUDA events
on the current stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Protocol

import torch
from torch import Tensor

from hetpipe.clock import Clock
from hetpipe.pipeline.chain import Values, alive_behind, forbidden_in, tensor_spec
from hetpipe.pipeline.flop_counter import FlopCounter
from hetpipe.profiler.kept import Saved, kept_bytes
from hetpipe.profiler.layer_run import LayerRun, as_user_errors
from hetpipe.profiler.live_bytes import storage_identity
from hetpipe.profiler.sampling import Sampling
from hetpipe.profiler.subject import Subject, tokens_per_sample
from hetpipe.values.measurement import AliveTensor, LayerMeasurement, Measurement, Work


class Stopwatch(Protocol):
    """Lap timer of one run: `lap` before, between and after its parts, then `laps_ms`."""

    def lap(self) -> None:
        """Mark the end of one part and the start of the next."""
        ...

    def laps_ms(self) -> list[float]:
        """Return the milliseconds between consecutive laps and reset."""
        ...


class ClockStopwatch:
    """Lap timer for devices that execute synchronously."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._laps: list[float] = []

    def lap(self) -> None:
        """Mark the end of one part and the start of the next."""
        self._laps.append(self._clock.monotonic())

    def laps_ms(self) -> list[float]:
        """Return the milliseconds between consecutive laps and reset."""
        laps, self._laps = self._laps, []
        return [1000.0 * (after - before) for before, after in pairwise(laps)]


class EventStopwatch:
    """Lap timer for CUDA devices, with events."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._laps: list[torch.cuda.Event] = []

    def lap(self) -> None:
        """Record an event on the device's current stream."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch ships it untyped
        event.record(torch.cuda.current_stream(self._device))
        self._laps.append(event)

    def laps_ms(self) -> list[float]:
        """Synchronize, return the milliseconds between consecutive laps and reset."""
        torch.cuda.synchronize(self._device)
        laps, self._laps = self._laps, []
        return [float(before.elapsed_time(after)) for before, after in pairwise(laps)]


def stopwatch_for(device: torch.device, clock: Clock) -> Stopwatch:
    """The stopwatch for the type of `device`."""
    return EventStopwatch(device) if device.type == "cuda" else ClockStopwatch(clock)


def trace_saved(run: LayerRun, inputs: Values) -> tuple[Values, Saved]:
    """Run the layer once on `inputs`, without copying them; return its detached outputs and the storages it saved."""
    module = run.layer.module
    own = _identities([*run.weights.values(), *module.parameters(), *module.buffers()])
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if (identity := storage_identity(storage)) not in own:
            storages[identity] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = run.forward(inputs)
    saved = Saved(storages, _identities(outputs))
    values = tuple(output.detach() for output in outputs)
    run.backward(run.gradients_for(outputs))
    return values, saved


def trace_work(run: LayerRun, inputs: Values) -> tuple[Work, Work]:
    """Run the layer once on `inputs`, which it may modify; return the work of its forward and backward."""
    with FlopCounter(is_backward=False) as forward:
        outputs = run.forward(inputs)
    gradients = run.gradients_for(outputs)
    with FlopCounter(is_backward=True) as backward:
        run.backward(gradients)
    return _work(forward), _work(backward)


def _work(counter: FlopCounter) -> Work:
    return Work(counter.flops, counter.num_operations, counter.recomputed_flops)


def _identities(tensors: Iterable[Tensor]) -> frozenset[int]:
    return frozenset(storage_identity(tensor.untyped_storage()) for tensor in tensors)


@dataclass(frozen=True, slots=True)
class _Found:
    """Intermediate results for one layer."""

    run: LayerRun
    saved: Saved
    output_bytes: int
    times_ms: tuple[float, float]
    repeats: int
    work: tuple[Work, Work]
    alive: tuple[AliveTensor, ...]


def measure_chain(
    subject: Subject,
    device: torch.device,
    device_type: str,
    *,
    sampling: Sampling,
    clock: Clock,
    on_layer: Callable[[int], None],
) -> Measurement:
    """Measure every layer of `subject` on `device`.

    Args:
        subject: the job's code.
        device: for the computation.
        device_type: its type in profiles.
        sampling: number of runs of each layer.
        clock: times CPU work.
        on_layer: called with the index of each layer before it is measured.

    Raises:
        CallableError: a layer or the loss cannot run.
    """
    stopwatch = stopwatch_for(device, clock)
    values = _copies(tuple(value.to(device) for value in subject.batch.inputs))
    input_bytes = _num_bytes(values)
    found: list[_Found] = []
    with torch.enable_grad():
        for position, layer in enumerate(subject.chain):
            on_layer(position)
            with as_user_errors(layer, values):
                run = LayerRun(subject, layer, device)
                # The layer may modify its inputs, which the previous layer has saved.
                inputs = _copies(values)
                values, saved = trace_saved(run, values)
                work = trace_work(run, _copies(inputs))
                times_ms, repeats = _median_times(run, inputs, stopwatch, sampling, clock)
            run.leave()
            alive = alive_behind(subject.chain, position, values)
            found.append(_Found(run, saved, _num_bytes(values), times_ms, repeats, work, alive))
    kept = kept_bytes([layer.saved for layer in found])
    layers = tuple(_measurement(layer, size) for layer, size in zip(found, kept, strict=True))
    return Measurement(
        device_type,
        layers,
        input_bytes,
        min(layer.repeats for layer in found),
        clock.wall(),
        tokens_per_sample=tokens_per_sample(subject),
        precision=subject.job.precision,
    )


def _median_times(
    run: LayerRun, inputs: Values, stopwatch: Stopwatch, sampling: Sampling, clock: Clock
) -> tuple[tuple[float, float], int]:
    """Median milliseconds of forward and backward, and of how many samples."""
    gradients = run.gradients_for(run.forward(_copies(inputs)))
    run.backward(gradients)
    began = clock.monotonic()
    for _ in range(sampling.warm_up):
        if clock.monotonic() - began >= sampling.most_seconds:
            break
        run.forward(_copies(inputs))
        run.backward(gradients)
    started = clock.monotonic()
    samples: tuple[list[float], list[float]] = ([], [])
    while not sampling.is_enough(samples, elapsed_seconds=clock.monotonic() - started):
        fresh = _copies(inputs)
        stopwatch.lap()
        run.forward(fresh)
        stopwatch.lap()
        run.backward(gradients)
        stopwatch.lap()
        for times, time_ms in zip(samples, stopwatch.laps_ms(), strict=True):
            times.append(time_ms)
    return (median(samples[0]), median(samples[1])), len(samples[0])


def _measurement(found: _Found, activation_bytes: int) -> LayerMeasurement:
    layer = found.run.layer
    return LayerMeasurement(
        name=layer.name,
        parameters=tuple(
            tensor_spec(name, layer.module.get_parameter(local)) for local, name in layer.parameters.items()
        ),
        activation_bytes=activation_bytes,
        output_bytes=found.output_bytes,
        forward_ms=found.times_ms[0],
        backward_ms=found.times_ms[1],
        forward=found.work[0],
        backward=found.work[1],
        alive=found.alive,
        forbidden=forbidden_in(layer),
    )


def _copies(values: Values) -> Values:
    return tuple(value.clone() for value in values)


def _num_bytes(tensors: tuple[Tensor, ...]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
