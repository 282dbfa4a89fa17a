"""What a parameter-server process tells Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hetpipe.observe.history import NullHistory
from hetpipe.observe.metric_names import families_of
from hetpipe.observe.readings import sorted_by_family
from hetpipe.server.shard.readings import readings
from hetpipe.server.shard.server import ShardServer
from hetpipe.values.ids import Clock, Wave
from hetpipe.values.requests import PullHeader
from hetpipe.wire.calls import (
    JOIN,
    PULL,
    PUSH,
    REPORT_INITIALIZED,
    REPORT_STAGED,
    JoinRequest,
    ReportInitializedRequest,
    ReportStagedRequest,
)
from tests.polling import wait_until
from tests.server.shard.builders import JOB, encode, headers_of, push_header, requester, shard_config, slices_of

#: One worker of one stage; two parameters of 16 and 4 float32, 64 bytes and 16 bytes, 128 in a buffer.
CONFIG = shard_config(slices_of([16, 4]), stages=(1,))
HEADERS = headers_of(CONFIG.slices)
UPDATE = [torch.ones(16), torch.ones(4)]


def read(shards: ShardServer) -> dict[str, object]:
    """Name → value; of one job."""
    found: dict[str, object] = {}
    for reading in readings(shards, silent_seconds=0.5):
        if reading.labels:
            assert reading.labels == (JOB, 0)
        found[reading.name.removeprefix("hetpipe_").removeprefix("shard_")] = reading.value
    return found


@contextmanager
def serving() -> Iterator[ShardServer]:
    """A server whose job has published w^(0)."""
    shards = ShardServer(lambda _config: NullHistory())
    try:
        shards.configure(CONFIG)
        shards.calls.invoke(JOIN, JoinRequest(requester(), ""))
        shards.calls.upload(PUSH, push_header(requester(), None, HEADERS), encode(UPDATE))
        shards.calls.invoke(REPORT_INITIALIZED, ReportInitializedRequest(requester()))
        wait_until(lambda: read(shards)["published_clock"] == 0, timeout_seconds=10.0, what="clock 0")
        yield shards
    finally:
        shards.stop()


def test_a_process_without_a_job() -> None:
    assert read(ShardServer(lambda _config: NullHistory())) == {"coordinator_silent_seconds": 0.5}


def test_pushes_and_pulls_are_counted() -> None:
    with serving() as shards:
        for _ in range(2):
            shards.calls.upload(PUSH, push_header(requester(), 0, HEADERS), encode(UPDATE))
        staged = read(shards)
        shards.calls.invoke(REPORT_STAGED, ReportStagedRequest(requester(), Wave(0), ((0,),), Clock(0)))
        wait_until(lambda: read(shards)["published_clock"] == 1, timeout_seconds=10.0, what="clock 1")
        list(shards.calls.download(PULL, PullHeader(requester(), Clock(1), HEADERS[:1])))
        found = read(shards)
    assert (staged["staged_waves"], staged["weight_bytes"]) == (1, 256)
    assert (found["pushes_total"], found["pushed_bytes_total"], found["duplicate_pushes_total"]) == (2, 160, 1)
    assert (found["pulls_total"], found["pulled_bytes_total"]) == (1, 64)
    assert found["staged_waves"] == 0
    assert found["retained_versions"] in {1, 2}, "w^(0) may be held for the next minibatch"
    assert found["followed_records_total"] == found["log_records_total"]
    assert read(shards) == {"coordinator_silent_seconds": 0.5}, "nothing of a job that is gone"


def test_every_metric_of_the_list_is_told() -> None:
    with serving() as shards:
        told = sorted_by_family(readings(shards, silent_seconds=0.5), "parameter_server")
    elsewhere = {"hetpipe_info", "hetpipe_rpc_handled_total", "hetpipe_rpc_refused_total", "hetpipe_rpc_seconds"}
    assert {family.name for family in told} == {family.name for family in families_of("parameter_server")} - elsewhere
