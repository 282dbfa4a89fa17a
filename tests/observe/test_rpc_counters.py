"""Calls are counted by their short name, and made-up names do not grow the memory."""

from __future__ import annotations

from dataclasses import dataclass

import grpc
import pytest

from hetpipe.observe.readings import Distribution, Reading
from hetpipe.observe.rpc_counters import MAX_CALLS, OTHER, RpcCounters
from tests.support.fake_clock import FakeClock


def test_calls_are_counted() -> None:
    counters = RpcCounters()
    counters.handled("/hetpipe.proto.v2.TensorService/Push", status="OK", seconds=0.5)
    counters.handled("/hetpipe.proto.v2.TensorService/Push", status="OK", seconds=0.001)
    counters.handled("/hetpipe.proto.v2.TensorService/Push", status="NOT_FOUND", seconds=60.0)
    counters.refused("/hetpipe.proto.v2.TensorService/Push", reason="UnknownJob")
    assert list(counters.readings()) == [
        Reading("hetpipe_rpc_handled_total", 2, ("Push", "OK")),
        Reading("hetpipe_rpc_handled_total", 1, ("Push", "NOT_FOUND")),
        Reading("hetpipe_rpc_refused_total", 1, ("Push", "UnknownJob")),
        Reading("hetpipe_rpc_seconds", Distribution((1, 0, 0, 1, 0, 1), 60.501), ("Push",)),
    ]


@dataclass
class Context:
    """As gRPC's: the status is set in the course of the call."""

    status: grpc.StatusCode | None = None

    def code(self) -> grpc.StatusCode | None:
        return self.status


def test_a_call_counts_however_it_ends() -> None:
    counters, clock, context = RpcCounters(), FakeClock(), Context()
    with counters.answering("/x/Pull", context, clock):
        clock.advance(0.05)
    context.status = grpc.StatusCode.NOT_FOUND
    with pytest.raises(KeyError), counters.answering("/x/Pull", context, clock):
        raise KeyError
    handled = [reading for reading in counters.readings() if reading.name == "hetpipe_rpc_handled_total"]
    assert [reading.labels for reading in handled] == [("Pull", "OK"), ("Pull", "NOT_FOUND")]
    assert list(counters.readings())[-1].value == Distribution((1, 0, 1, 0, 0, 0), 0.05)


def test_made_up_names_count_as_one() -> None:
    counters = RpcCounters()
    for index in range(3 * MAX_CALLS):
        counters.refused(f"/x/made-up-{index}", reason="PermissionDenied")
    refused = {reading.labels: reading.value for reading in counters.readings() if "refused" in reading.name}
    assert len(refused) == MAX_CALLS + 1
    assert refused[OTHER, "PermissionDenied"] == 2 * MAX_CALLS
