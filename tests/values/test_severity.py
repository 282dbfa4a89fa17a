"""How loudly events are told is said once, for logs and screens alike."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from hetpipe.values import events
from hetpipe.values.events import Rewound, Waiting, WorkerEvent, WorkerLost, severity_of
from hetpipe.values.ids import Clock, Incarnation, VirtualWorkerIndex


@pytest.mark.parametrize("kind", get_args(WorkerEvent))
def test_what_becomes_of_a_virtual_worker_is_worth_a_line(kind: Any) -> None:
    assert severity_of(object.__new__(kind)) in {"info", "warning"}


def test_losses_are_warnings_and_waits_are_usual() -> None:
    lost = WorkerLost(VirtualWorkerIndex(0), Incarnation(0), "it was killed")
    back = Rewound(Clock(3), Clock(2), "rewind-1", "it was killed")
    assert [severity_of(event) for event in (lost, back, Waiting("for stage 1", 6.0))] == [
        "warning",
        "warning",
        "usual",
    ]


def test_every_event_of_a_worker_is_an_event_of_a_job() -> None:
    assert set(get_args(WorkerEvent)) < set(get_args(events.JobEvent))
