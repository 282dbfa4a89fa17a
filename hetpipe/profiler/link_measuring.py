"""Execute a `LinkOrder`: measure one end of a link with the training transport, or host-device copies.

Both are measured by round trips of equal payloads. Small ones give the latency; the additional time of large ones gives
the bandwidth. Sizes grow until one transfer is long enough to be timed, so that a slow link is not saturated for
minutes and a fast one is not measured by a message too small to time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

import torch

from hetpipe.clock import Clock
from hetpipe.errors import LinkClosed, MalformedFrame
from hetpipe.link.catalogue import LinkNetwork, call, listen
from hetpipe.link.cut import Cut
from hetpipe.link.policy import Frame, FrameKind, Link, LinkLimits
from hetpipe.profiler.link_order import LinkAnswer, LinkOrder
from hetpipe.profiler.machine import versions
from hetpipe.profiler.profiling import devices_here
from hetpipe.profiler.sampling import Sampling
from hetpipe.values.commands import end_key
from hetpipe.values.ids import JobId
from hetpipe.values.link_measurement import CopyMeasurement, LinkMeasurement, TransferSpeed
from hetpipe.values.requests import Requester
from hetpipe.wire.tls import Tls

#: Seconds for one round trip, given the bytes there and the bytes back.
RoundTrip = Callable[[int, int], float]

#: Largest message of a measurement.
MAX_BYTES = 16 << 20

#: Buffer limits of a measured link.
LIMITS = LinkLimits(outgoing_frames=2, incoming_frames=2, frame_bytes=MAX_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSampling:
    """Amount of data to transfer."""

    small_bytes: int = 256
    first_bytes: int = 256 << 10
    """Initial size of large messages; each further one is four times as large."""
    largest_bytes: int = MAX_BYTES
    long_enough_seconds: float = 0.02
    """Minimum duration of a timed round trip."""
    small: Sampling = field(
        default_factory=lambda: Sampling(warm_up=20, least=50, fewest=50, most_seconds=0.5, tolerance=0.02)
    )
    large: Sampling = field(
        default_factory=lambda: Sampling(warm_up=1, least=5, most=100, most_seconds=0.8, tolerance=0.02)
    )


def speed_of(round_trip: RoundTrip, sampling: LinkSampling, clock: Clock) -> TransferSpeed:
    """Fit latency and bandwidth to round trips; the slower of both directions."""
    small = sampling.small_bytes
    trip, repeats = _median(lambda: round_trip(small, small), sampling.small, clock)
    speeds = []
    for to, back in ((1, 0), (0, 1)):

        def one_way(num_bytes: int, to: int = to, back: int = back) -> float:
            return round_trip(num_bytes if to else small, num_bytes if back else small)

        num_bytes = _long_enough(one_way, sampling)
        seconds, large_repeats = _median(lambda way=one_way, size=num_bytes: way(size), sampling.large, clock)  # type: ignore[misc]
        repeats = min(repeats, large_repeats)
        # On a noisy machine a large message may appear no slower than a small one: then use its full time.
        beyond = seconds - trip if seconds > trip else seconds
        speeds.append((num_bytes / beyond, num_bytes))
    bytes_per_second, large_bytes = min(speeds)
    return TransferSpeed(
        latency_seconds=trip / 2.0,
        bytes_per_second=bytes_per_second,
        small_bytes=small,
        large_bytes=large_bytes,
        repeats=repeats,
    )


def _long_enough(one_way: Callable[[int], float], sampling: LinkSampling) -> int:
    num_bytes = sampling.first_bytes
    while num_bytes * 4 <= sampling.largest_bytes and one_way(num_bytes) < sampling.long_enough_seconds:
        num_bytes *= 4
    return num_bytes


def _median(take: Callable[[], float], sampling: Sampling, clock: Clock) -> tuple[float, int]:
    """Median of repeated `take` calls, and the number of samples."""
    for _ in range(sampling.warm_up):
        take()
    began = clock.monotonic()
    samples_ms: list[float] = []
    while not samples_ms or not sampling.is_enough([samples_ms], elapsed_seconds=clock.monotonic() - began):
        samples_ms.append(1000.0 * take())
    return median(samples_ms) / 1000.0, len(samples_ms)


# -- over a link -------------------------------------------------------------------------------------------------------


class LinkTrips:
    """Round trips over a link whose other end runs `answer_trips`. Single-threaded."""

    def __init__(self, link: Link, clock: Clock, *, deadline_seconds: float) -> None:
        """`deadline_seconds` bounds all round trips together."""
        self._link = link
        self._clock = clock
        self._until = clock.monotonic() + deadline_seconds
        self._count = 0
        self._payload = torch.zeros(MAX_BYTES, dtype=torch.uint8)

    def __call__(self, num_bytes: int, num_bytes_back: int) -> float:
        """Make one round trip.

        Raises:
            DeadlineExceeded: no reply in time.
            LinkClosed: the peer disconnected.
            MalformedFrame: unexpected reply.
        """
        self._count += 1
        requested = Frame(FrameKind.FORWARD, self._count, 0, 0, (self._payload[:num_bytes],), weight=num_bytes_back)
        began = self._clock.monotonic()
        self._link.send(requested, deadline_seconds=max(0.0, self._until - began))
        left = max(0.0, self._until - self._clock.monotonic())
        answer = self._link.receive(timeout_seconds=left, awaiting=f"{num_bytes_back} bytes of a measurement")
        seconds = self._clock.monotonic() - began
        if answer.minibatch != self._count or _num_bytes(answer) != num_bytes_back:
            raise MalformedFrame(
                f"{self._link.peer} answered {num_bytes_back} bytes of round trip {self._count} with "
                f"{_num_bytes(answer)} bytes of round trip {answer.minibatch}"
            )
        return seconds


def answer_trips(link: Link, *, patience_seconds: float) -> None:
    """Echo the peer's round trips until it closes the link.

    Args:
        link: to the measuring end.
        patience_seconds: timeout per round trip.

    Raises:
        DeadlineExceeded: no request in time.
        LinkClosed: the peer disconnected without closing.
        MalformedFrame: unexpected request.
    """
    payload = torch.zeros(MAX_BYTES, dtype=torch.uint8)
    while True:
        try:
            requested = link.receive(timeout_seconds=patience_seconds, awaiting="the next message of a measurement")
        except LinkClosed as error:
            if error.orderly:
                return
            raise
        if requested.kind is not FrameKind.FORWARD or not 0 <= requested.weight <= MAX_BYTES:
            raise MalformedFrame(
                f"{link.peer} asks for {requested.weight} bytes by a {requested.kind.name} frame; a measurement asks "
                f"for at most {MAX_BYTES} by a FORWARD frame"
            )
        answer = Frame(FrameKind.BACKWARD, requested.minibatch, 0, 0, (payload[: requested.weight],))
        link.send(answer, deadline_seconds=patience_seconds)


def _num_bytes(frame: Frame) -> int:
    return sum(tensor.numel() * tensor.itemsize for tensor in frame.tensors if tensor is not None)


# -- to and from a device ----------------------------------------------------------------------------------------------


class CopyTrips:
    """Round trips between pageable host memory and a device; on a CPU, within host memory."""

    def __init__(self, device: torch.device, clock: Clock) -> None:
        self._device = device
        self._clock = clock
        self._host = torch.zeros(MAX_BYTES, dtype=torch.uint8)
        self._there = torch.zeros(MAX_BYTES, dtype=torch.uint8, device=device)

    def __call__(self, num_bytes: int, num_bytes_back: int) -> float:
        """Copy once to the device and once back."""
        began = self._clock.monotonic()
        self._there[:num_bytes].copy_(self._host[:num_bytes])
        self._host[:num_bytes_back].copy_(self._there[:num_bytes_back])
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return self._clock.monotonic() - began


def carry_out_links(
    order: LinkOrder,
    clock: Clock,
    on_address: Callable[[str], None],
    sampling: LinkSampling | None = None,
    *,
    tls: Tls | None = None,
) -> LinkAnswer:
    """Measure the link, or serve the measuring end.

    Args:
        order: what to measure.
        clock: time source.
        on_address: called with the listening address.
        sampling: amount of data to transfer.
        tls: identity of this process for encrypted links; None: plaintext.

    Raises:
        HetpipeError: the ends cannot connect, or one disconnects.
    """
    sampling = sampling or LinkSampling()
    if order.role == "copies":
        return LinkAnswer(copies=_copies(order, clock, sampling))
    footing = LinkNetwork(host=order.host, port=order.port, tls=tls)
    link = None
    if order.role == "call":
        _answer(order, footing)
    else:
        link = _measured(order, clock, on_address, sampling, footing)
    return LinkAnswer(link=link, copies=_copies(order, clock, sampling) if order.with_copies else ())


def _measured(
    order: LinkOrder, clock: Clock, on_address: Callable[[str], None], sampling: LinkSampling, footing: LinkNetwork
) -> LinkMeasurement:
    listener = listen(order.transport, _cut(order), footing)
    try:
        on_address(listener.address)
        link = listener.accept(deadline_seconds=order.deadline_seconds)
    finally:
        listener.close()
    try:
        speed = speed_of(LinkTrips(link, clock, deadline_seconds=order.deadline_seconds), sampling, clock)
    finally:
        link.close()
    return LinkMeasurement(
        between=(order.node, order.other),
        transport=order.transport,
        speed=speed,
        measured_at=clock.wall(),
        versions=versions(),
    )


def _answer(order: LinkOrder, footing: LinkNetwork) -> None:
    cut = _cut(order).seen_from_there()
    link = call(order.transport, cut, order.address, footing, deadline_seconds=order.deadline_seconds)
    try:
        answer_trips(link, patience_seconds=order.deadline_seconds)
    finally:
        link.close()


def _copies(order: LinkOrder, clock: Clock, sampling: LinkSampling) -> tuple[CopyMeasurement, ...]:
    return tuple(
        CopyMeasurement(
            node=order.node,
            device_type=kind,
            method="cuda" if device.type == "cuda" else "memcpy",
            speed=speed_of(CopyTrips(device, clock), sampling, clock),
            measured_at=clock.wall(),
            versions=versions(),
        )
        for kind, device in devices_here(with_cpu=False).items()
    )


def _cut(order: LinkOrder) -> Cut:
    """The cut between the two ends, as the listening end sees it."""
    own, neighbour = (
        Requester(end.job_id, end.term, end.vw, end.incarnation, end.stage)
        for end in (end_key(JobId(order.job_id), order.number, is_first=is_first) for is_first in (True, False))
    )
    return Cut(own=own, neighbour=neighbour, limits=LIMITS)
