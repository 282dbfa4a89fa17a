"""How time is taken on a device: on a CPU by the clock, on a GPU by events in its own stream of work."""

from __future__ import annotations

from itertools import pairwise
from typing import Protocol

import torch

from hetpipe.clock import Clock


class Stopwatch(Protocol):
    """Takes the times of one run: `lap` before, between and after its parts, then `laps_ms`."""

    def lap(self) -> None:
        """A part ends here, and the next one begins."""
        ...

    def laps_ms(self) -> list[float]:
        """The milliseconds between consecutive laps; forgets them."""
        ...


class ClockStopwatch:
    """For devices whose work is done when the call returns."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._laps: list[float] = []

    def lap(self) -> None:
        """See `Stopwatch`."""
        self._laps.append(self._clock.monotonic())

    def laps_ms(self) -> list[float]:
        """See `Stopwatch`."""
        laps, self._laps = self._laps, []
        return [1000.0 * (after - before) for before, after in pairwise(laps)]


class EventStopwatch:
    """For CUDA devices."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._laps: list[torch.cuda.Event] = []

    def lap(self) -> None:
        """See `Stopwatch`."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch ships it untyped
        event.record(torch.cuda.current_stream(self._device))
        self._laps.append(event)

    def laps_ms(self) -> list[float]:
        """See `Stopwatch`; waits for the device."""
        torch.cuda.synchronize(self._device)
        laps, self._laps = self._laps, []
        return [float(before.elapsed_time(after)) for before, after in pairwise(laps)]


def stopwatch_for(device: torch.device, clock: Clock) -> Stopwatch:
    """The one that suits `device`."""
    return EventStopwatch(device) if device.type == "cuda" else ClockStopwatch(clock)
