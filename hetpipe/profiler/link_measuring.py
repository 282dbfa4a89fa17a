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
from hetpipe.spec.ids import Incarnation, JobId, StageIndex, Term, VirtualWorkerIndex
from hetpipe.spec.link_measurement import CopyMeasurement, LinkMeasurement
from hetpipe.spec.requests import Requester


def carry_out_links(
    order: LinkOrder, clock: Clock, on_address: Callable[[str], None], effort: Effort | None = None
) -> LinkAnswer:
    """Measure, or help the other end to.

    Args:
        order: what to measure.
        clock: takes the times.
        on_address: hears where the other end is awaited.
        effort: how much is transferred.

    Raises:
        HetpipeError: the two ends do not find each other, or one goes away.
    """
    effort = effort or Effort()
    if order.role == "copies":
        return LinkAnswer(copies=_copies(order, clock, effort))
    if order.role == "call":
        _answer(order)
        return LinkAnswer()
    return LinkAnswer(link=_measured(order, clock, on_address, effort))


def _measured(order: LinkOrder, clock: Clock, on_address: Callable[[str], None], effort: Effort) -> LinkMeasurement:
    door = open_door(order.transport, _cut(), Footing(host=order.host))
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


def _answer(order: LinkOrder) -> None:
    cut = _cut().seen_from_there()
    footing = Footing(host=order.host)
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


def _cut() -> Cut:
    """Between two stages of a job that there is not, as the one that awaits sees it."""
    own, neighbour = (
        Requester(JobId("links"), Term(0), VirtualWorkerIndex(0), Incarnation(0), StageIndex(stage)) for stage in (0, 1)
    )
    return Cut(own=own, neighbour=neighbour, limits=LIMITS)
