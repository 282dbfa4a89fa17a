"""Metrics of a coordinator: members, jobs, and the clocks of unfinished jobs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import fields
from typing import get_args

from hetpipe.observe.readings import Reading
from hetpipe.server.coordinator.coordinator import Coordinator
from hetpipe.server.coordinator.job_hosts import JobHost
from hetpipe.values.events import JobEvent, JobState, ProgressTable
from hetpipe.values.ids import JobId
from hetpipe.values.members import MemberRole
from hetpipe.values.run import ClockSnapshot

#: Counted kinds of events. Each is exposed from the start, at 0: else the first one would show no increase.
_KINDS = tuple(
    str(field.default)
    for event in get_args(JobEvent)
    if event is not ProgressTable
    for field in fields(event)
    if field.name == "kind"
)


def readings(coordinator: Coordinator) -> Iterator[Reading]:
    """All metrics, read at one moment."""
    yield from _of_members(coordinator)
    with coordinator.condition:
        hosts = coordinator.hosts()
        found = [reading for host in hosts for reading in _of_job(host)]
        states = Counter(host.machine.state for host in hosts)
    holds = any(condition.holds for condition in coordinator.conditions)
    yield Reading("hetpipe_store_unreachable", int(holds))
    yield from (Reading("hetpipe_jobs", states[state], (state.value,)) for state in JobState)
    yield from found


def _of_members(coordinator: Coordinator) -> Iterator[Reading]:
    left: dict[MemberRole, list[float]] = {role: [] for role in MemberRole}
    for member in coordinator.members():
        left[member.info.role].append(member.lease_seconds_left)
    expired = coordinator.expired_leases()
    yield Reading("hetpipe_lease_seconds", coordinator.lease_seconds)
    for role, seconds in left.items():
        labels = (role.value,)
        yield Reading("hetpipe_members", len(seconds), labels)
        yield Reading("hetpipe_leases_expired_total", expired.get(role, 0), labels)
        if seconds:
            yield Reading("hetpipe_lease_seconds_left", min(seconds), labels)


def _of_job(host: JobHost) -> Iterator[Reading]:
    """Metrics of one job; an ended one has only its events, as its clocks would look stalled."""
    job_id = host.job_id
    for kind in _KINDS:
        yield Reading("hetpipe_job_events_total", host.event_counts[kind], (job_id, kind))
    if host.machine.ended is not None:
        return
    for condition, number in host.machine.conditions.current.items():
        yield Reading("hetpipe_job_conditions", number, (job_id, condition.value))
    if host.machine.clocks is not None:
        yield from _of_clocks(job_id, host.machine.clocks)
    if host.picture is not None:
        yield from _of_picture(job_id, host.picture)


def _of_clocks(job_id: JobId, clocks: ClockSnapshot) -> Iterator[Reading]:
    local = clocks.local.values()
    for name, value in (
        ("term", clocks.term),
        ("global_clock", clocks.global_clock),
        ("published_clock", clocks.published),
        ("barrier_clock", clocks.barrier),
        ("clock_distance", max(local, default=0) - min(local, default=0)),
        ("epoch", clocks.epoch),
        ("minibatches_total", clocks.minibatches),
        ("samples_total", clocks.samples),
        ("frozen_layers", clocks.frozen[-1].layers if clocks.frozen else 0),
    ):
        yield Reading(f"hetpipe_job_{name}", value, (job_id,))
    for vw, clock in clocks.local.items():
        yield Reading("hetpipe_vw_clock", clock, (job_id, vw))


def _of_picture(job_id: JobId, picture: ProgressTable) -> Iterator[Reading]:
    yield Reading("hetpipe_job_running_seconds", picture.running_seconds, (job_id,))
    if picture.staleness is not None:
        yield Reading("hetpipe_job_clock_distance_bound", picture.staleness + 1, (job_id,))
    if picture.tokens_per_second is not None:
        yield Reading("hetpipe_job_tokens_per_second", picture.tokens_per_second, (job_id,))
    if picture.model_flops_utilisation is not None:
        yield Reading("hetpipe_job_model_flops_utilisation_ratio", picture.model_flops_utilisation, (job_id,))
    for row in picture.rows:
        labels = (job_id, row.vw)
        yield Reading("hetpipe_vw_clock_distance", row.distance, labels)
        yield Reading("hetpipe_vw_samples_per_second", row.samples_per_second, labels)
        yield Reading("hetpipe_vw_waiting_ratio", row.waiting_share, labels)
        yield Reading("hetpipe_vw_memory_bytes", row.memory_bytes, labels)
        if row.loss is not None:
            yield Reading("hetpipe_vw_loss", row.loss, labels)
        for name, value in row.losses.items():
            yield Reading("hetpipe_vw_loss_by_name", value, (*labels, name))
