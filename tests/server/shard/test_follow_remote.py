"""A shard follows the clock shard however often that is away or has too much to do: else it would never apply again."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from hetpipe.errors import Busy, HetpipeError, PeerUnreachable
from hetpipe.observe.history import NullHistory
from hetpipe.server.shard.job_shard import JobShard
from hetpipe.wire.calls import AcknowledgeRequest, FollowLogRequest, LogRecords
from tests.server.shard.builders import shard_config
from tests.support.fake_clock import FakeClock
from tests.support.method_calls import MethodCalls


class Refusing(MethodCalls):
    """A clock shard that refuses once, and then has no records."""

    def __init__(self, error: HetpipeError) -> None:
        self._errors = [error]
        self.followed = threading.Event()
        self._closed = threading.Event()

    def acknowledge(self, _: AcknowledgeRequest) -> None:
        if self._errors:
            raise self._errors.pop()

    def follow_log(self, _: FollowLogRequest) -> Iterator[LogRecords]:
        self.followed.set()
        self._closed.wait(10.0)
        yield from ()

    def close(self) -> None:
        self._closed.set()


@pytest.mark.parametrize("error", [PeerUnreachable("away"), Busy("too much to do")])
def test_it_asks_again(error: HetpipeError) -> None:
    clock_shard = Refusing(error)
    shard = JobShard(shard_config((), shard=1, num_shards=2), NullHistory())
    shard.start(clock_shard, FakeClock(auto_advance=True))
    assert clock_shard.followed.wait(5.0)
    shard.stop()
