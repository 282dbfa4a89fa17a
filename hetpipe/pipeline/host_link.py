"""The link between a device and host memory, over which swapped tensors move (`memory-policy.md` §4).

Tensors move as vectors of bytes. A GPU copies them to and from page-locked memory on a stream of its own, beside its
computations. A CPU device has its tensors in host memory already: its link is emulated, a copy in the same memory that
counts as arrived when a link of the given speed would have moved it. Both directions share the link, and transfers
happen in the order in which they were asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hetpipe.clock import Clock


class Transfer(Protocol):
    """A transfer in progress."""

    @property
    def destination(self) -> Tensor:
        """Destination; complete after `wait`."""
        ...

    def wait(self) -> None:
        """Order all later computations of the device after the transfer."""
        ...


class HostLink(Protocol):
    """Moves vectors of bytes."""

    def take_out(self, source: Tensor) -> Transfer:
        """Start to move `source` from the device to host memory."""
        ...

    def bring_back(self, source: Tensor) -> Transfer:
        """Start to move `source` from host memory to the device."""
        ...


@dataclass(frozen=True, slots=True)
class _Emulated:
    """See `Transfer`."""

    destination: Tensor
    due: float
    clock: Clock

    def wait(self) -> None:
        """Sleep for the duration of the transfer over a real link."""
        left = self.due - self.clock.monotonic()
        if left > 0:
            self.clock.sleep(left)


class EmulatedHostLink:
    """The link of a CPU device."""

    def __init__(self, clock: Clock, bytes_per_second: float | None = None) -> None:
        """Move `bytes_per_second`, both directions together; None: as fast as this machine copies."""
        self._clock = clock
        self._bytes_per_second = bytes_per_second
        self._is_free_at = 0.0

    def take_out(self, source: Tensor) -> Transfer:
        """See `HostLink.take_out`."""
        return self._moved(source)

    def bring_back(self, source: Tensor) -> Transfer:
        """See `HostLink.bring_back`."""
        return self._moved(source)

    def _moved(self, source: Tensor) -> Transfer:
        begin = max(self._clock.monotonic(), self._is_free_at)
        rate = self._bytes_per_second
        self._is_free_at = begin + (0.0 if rate is None else source.nbytes / rate)
        return _Emulated(source.clone(), self._is_free_at, self._clock)


@dataclass(frozen=True, slots=True)
class _OnStream:
    """See `Transfer`."""

    destination: Tensor
    done: torch.cuda.Event
    device: torch.device

    def wait(self) -> None:
        """Order the device's later computations after the copy."""
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(self.done)
        if self.destination.is_cuda:
            self.destination.record_stream(stream)


class CudaHostLink:
    """The link of a GPU. Not tested on one yet."""

    def __init__(self, device: torch.device) -> None:
        """Use a stream of its own on `device`."""
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch ships it untyped

    def take_out(self, source: Tensor) -> Transfer:
        """See `HostLink.take_out`."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        source.record_stream(self._stream)
        return self._moved(source, torch.empty(source.shape, dtype=source.dtype, pin_memory=True))

    def bring_back(self, source: Tensor) -> Transfer:
        """See `HostLink.bring_back`."""
        with torch.cuda.stream(self._stream):
            destination = torch.empty(source.shape, dtype=source.dtype, device=self._device)
        return self._moved(source, destination)

    def _moved(self, source: Tensor, destination: Tensor) -> Transfer:
        with torch.cuda.stream(self._stream):
            destination.copy_(source, non_blocking=True)
            done = self._stream.record_event()
        return _OnStream(destination, done, self._device)  # torch frees the source's memory after the copy


def host_link(device: torch.device, clock: Clock, bytes_per_second: float | None = None) -> HostLink:
    """The link of `device`; the speed is that of an emulated one."""
    return CudaHostLink(device) if device.type == "cuda" else EmulatedHostLink(clock, bytes_per_second)
