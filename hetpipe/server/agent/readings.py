"""Metrics of an agent: devices, children, and the reachability of the coordinator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import get_args

from hetpipe.observe.readings import Reading
from hetpipe.server.agent.agent import Agent
from hetpipe.server.agent.children import ChildKind, Outcome


def readings(agent: Agent) -> Iterator[Reading]:
    """All metrics, read at one moment."""
    for kind, number in Counter(device.type for device in agent.devices).items():
        yield Reading("hetpipe_devices", number, (kind,))
    counts = agent.children
    for child in get_args(ChildKind):
        yield Reading("hetpipe_children", counts.running[child], (child,))
        yield Reading("hetpipe_children_started_total", counts.started[child], (child,))
        for outcome in get_args(Outcome):
            yield Reading("hetpipe_children_exited_total", counts.exited[child, outcome], (child, outcome))
    yield Reading("hetpipe_stage_restarts_total", counts.later_lives)
    yield Reading("hetpipe_coordinator_silent_seconds", agent.silent_seconds)
