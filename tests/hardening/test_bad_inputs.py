"""Hundreds of malformed inputs to every service: each gets a typed error, nothing stays behind, the server lives."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from pathlib import Path

import grpc
import pytest
import structlog
from grpc_health.v1 import health_pb2

from hetpipe.wire.calls import CALLS
from tests.fuzz.memory import bytes_in_use
from tests.hardening.bad_inputs import HARMLESS, BadInput, message_cases
from tests.hardening.live import LiveCoordinator, LiveLink, LiveShard, RawClient
from tests.polling import wait_until

#: What an error of ours, or a limit of gRPC's, ends a call with. INTERNAL and UNKNOWN are bugs.
TYPED = frozenset(
    {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.OUT_OF_RANGE,
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.DATA_LOSS,
    }
)

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _quiet() -> None:
    """A refusal is a line in the log; here they are hundreds."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))


@pytest.fixture
def shard(tmp_path: Path) -> Iterator[LiveShard]:
    with closing(LiveShard(tmp_path)) as live:
        yield live


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[LiveCoordinator]:
    with closing(LiveCoordinator(tmp_path)) as live:
        yield live


def send_all(address: str, cases: Iterable[BadInput], *, again: bool = False) -> tuple[int, list[str]]:
    """How many were refused, and what should have been and was not; `again`: what was taken before may be taken now."""
    refused, wrong = 0, []
    with closing(RawClient(address)) as client:
        for case in cases:
            code, details = client.status(case)
            refused += code in TYPED
            if code not in TYPED and not (code is grpc.StatusCode.OK and (again or case.is_harmless)):
                wrong.append(f"{case}: {code.name} {details}")
    return refused, wrong


def judge(address: str, cases: list[BadInput], still_works: Callable[[], None]) -> None:
    refused, wrong = send_all(address, cases)
    assert not wrong, "\n".join(wrong)
    assert refused >= 70
    before = bytes_in_use()
    assert send_all(address, cases, again=True)[1] == []
    # What is on its way, and what gRPC keeps of a connection that has just ended, is freed a little later.
    wait_until(lambda: bytes_in_use() - before < MIB, timeout_seconds=10.0, what="memory to be what it was")
    still_works()


def share(cases: Iterable[BadInput], step: int, *, is_whole: bool) -> list[BadInput]:
    """Each `step`-th case, which fail for the same reasons as their neighbours; or all."""
    return list(cases)[:: 1 if is_whole else step]


some_or_all = pytest.mark.parametrize("is_whole", [False, pytest.param(True, marks=pytest.mark.exhaustive)])


@pytest.mark.matrix
@some_or_all
def test_the_coordinator(coordinator: LiveCoordinator, *, is_whole: bool) -> None:
    judge(coordinator.address, share(coordinator.cases(), 8, is_whole=is_whole), coordinator.still_works)


@pytest.mark.matrix
@some_or_all
def test_a_parameter_server(shard: LiveShard, *, is_whole: bool) -> None:
    judge(shard.address, share(shard.control_cases(), 4, is_whole=is_whole), shard.still_works)


@pytest.mark.matrix
@some_or_all
def test_the_tensors_of_a_parameter_server(shard: LiveShard, *, is_whole: bool) -> None:
    judge(shard.address, share(shard.tensor_cases(), 2, is_whole=is_whole), shard.still_works)


@pytest.mark.matrix
@some_or_all
def test_a_link(*, is_whole: bool) -> None:
    with closing(LiveLink()) as live:
        judge(live.address, share(live.cases(), 2, is_whole=is_whole), live.still_works)


def test_health(shard: LiveShard) -> None:
    call = "/grpc.health.v1.Health/Check"
    cases = [BadInput(call, what, (raw,)) for what, raw in message_cases(health_pb2.HealthCheckRequest(service="x"))]
    refused, wrong = send_all(shard.address, [case for case in cases if case.what != "service = ''"])
    assert (refused, wrong) == (len(cases) - 1, [])
    shard.still_works()


def test_every_call_has_cases(shard: LiveShard, coordinator: LiveCoordinator) -> None:
    calls = {case.call for case in (*shard.control_cases(), *shard.tensor_cases(), *coordinator.cases())}
    wanted = {call.path for call in CALLS}
    assert calls == wanted


def test_what_is_harmless_is_still_there(shard: LiveShard, coordinator: LiveCoordinator) -> None:
    """An exception that no case needs any more is to be taken out."""
    cases = (*shard.control_cases(), *shard.tensor_cases(), *coordinator.cases())
    for call, exceptions in HARMLESS.items():
        for pattern, _ in exceptions:
            found = (case for case in cases if case.call.endswith(f"/{call}") and re.fullmatch(pattern, case.what))
            assert next(found, None) is not None, (call, pattern)
