"""Carries out a `LinkOrder`: one end of a link that is measured with the transport of runs, or copies to devices."""

from __future__ import annotations

from collections.abc import Callable

from hetpipe.clock import Clock
from hetpipe.link.catalogue import Footing, call, open_door
from hetpipe.link.cut import Cut
from hetpipe.profiler.link_order import LinkAnswer, LinkOrder
from hetpipe.profiler.link_speed import LIMITS, CopyTrips, Effort, LinkTrips, answer_trips, speed_of
from hetpipe.profiler.machine import versions
from hetpipe.profiler.profiling import devices_here
from hetpipe.rpc.tls import Tls
from hetpipe.values.commands import end_key
from hetpipe.values.ids import JobId
from hetpipe.values.link_measurement import CopyMeasurement, LinkMeasurement
from hetpipe.values.requests import Requester


def carry_out_links(
    order: LinkOrder,
    clock: Clock,
    on_address: Callable[[str], None],
    effort: Effort | None = None,
    *,
    tls: Tls | None = None,
) -> LinkAnswer:
    """Measure, or help the other end to.

    Args:
        order: what to measure.
        clock: takes the times.
        on_address: hears where the other end is awaited.
        effort: how much is transferred.
        tls: who this process is, for links that encrypt; None: plaintext.

    Raises:
        HetpipeError: the two ends do not find each other, or one goes away.
    """
    effort = effort or Effort()
    if order.role == "copies":
        return LinkAnswer(copies=_copies(order, clock, effort))
    footing = Footing(host=order.host, port=order.port, tls=tls)
    link = None
    if order.role == "call":
        _answer(order, footing)
    else:
        link = _measured(order, clock, on_address, effort, footing)
    return LinkAnswer(link=link, copies=_copies(order, clock, effort) if order.with_copies else ())


def _measured(
    order: LinkOrder, clock: Clock, on_address: Callable[[str], None], effort: Effort, footing: Footing
) -> LinkMeasurement:
    door = open_door(order.transport, _cut(order), footing)
    try:
        on_address(door.address)
        link = door.accept(deadline_seconds=order.deadline_seconds)
    finally:
        door.close()
    try:
        speed = speed_of(LinkTrips(link, clock, deadline_seconds=order.deadline_seconds), effort, clock)
    finally:
        link.close()
    return LinkMeasurement(
        between=(order.node, order.other),
        transport=order.transport,
        speed=speed,
        measured_at=clock.wall(),
        versions=versions(),
    )


def _answer(order: LinkOrder, footing: Footing) -> None:
    cut = _cut(order).seen_from_there()
    link = call(order.transport, cut, order.address, footing, deadline_seconds=order.deadline_seconds)
    try:
        answer_trips(link, patience_seconds=order.deadline_seconds)
    finally:
        link.close()


def _copies(order: LinkOrder, clock: Clock, effort: Effort) -> tuple[CopyMeasurement, ...]:
    return tuple(
        CopyMeasurement(
            node=order.node,
            device_type=kind,
            method="cuda" if device.type == "cuda" else "memcpy",
            speed=speed_of(CopyTrips(device, clock), effort, clock),
            measured_at=clock.wall(),
            versions=versions(),
        )
        for kind, device in devices_here(with_cpu=False).items()
    )


def _cut(order: LinkOrder) -> Cut:
    """Between the two ends, as the one that awaits sees it."""
    own, neighbour = (
        Requester(end.job_id, end.term, end.vw, end.incarnation, end.stage)
        for end in (end_key(JobId(order.job_id), order.number, is_first=is_first) for is_first in (True, False))
    )
    return Cut(own=own, neighbour=neighbour, limits=LIMITS)
