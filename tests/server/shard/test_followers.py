"""Who may follow the decision log: a stage whose life is over hears that instead of records."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from queue import SimpleQueue
from typing import cast

import grpc
import pytest
import torch

from hetpipe.clock import SYSTEM_CLOCK
from hetpipe.decide.sync.decision_log import FROM_NEWEST_SEGMENT
from hetpipe.decide.sync.records import CommitRecord, EvictRecord
from hetpipe.errors import ProtocolViolation, StaleIncarnation, StaleTerm
from hetpipe.observe.history import MemoryHistory
from hetpipe.server.shard import followers
from hetpipe.server.shard.followers import Followers
from hetpipe.server.shard.server import ShardServer
from hetpipe.values.ids import Incarnation, ShardIndex, Term, VirtualWorkerIndex
from hetpipe.values.requests import Requester
from hetpipe.wire.calls import EVICT, FOLLOW_LOG, EvictRequest, FollowLogRequest, LogRecords
from hetpipe.wire.feeds import Outlet
from hetpipe.wire.server import Server, ServerConfig
from hetpipe.wire.shard_client import connect_shard
from tests.server.shard.builders import JOB, OneShard, requester, shard_config, slices_of
from tests.support.fake_clock import FakeClock

CONFIG = shard_config(slices_of([4]), stages=(1, 1, 1))
EVICTED = VirtualWorkerIndex(1)


class Context:
    """Of a call that nobody ends."""

    def add_callback(self, _: object) -> bool:
        return True

    def cancel(self) -> None:
        """It takes all."""


CONTEXT = cast("grpc.ServicerContext", Context())


@pytest.fixture
def shard() -> OneShard:
    return OneShard(CONFIG).begin()


def follow(shard: OneShard, who: Requester | None, *, start: int = 0) -> Iterator[object]:
    arrived: SimpleQueue[LogRecords | Exception | None] = SimpleQueue()
    outlet: Outlet[LogRecords] = Outlet(arrived.put, arrived.put)
    followers = Followers(shard.clock, SYSTEM_CLOCK)
    followers.follow(start, CONTEXT, outlet, gathered=True, who=who)
    try:
        while (batch := arrived.get(timeout=5.0)) is not None:
            if isinstance(batch, Exception):
                raise batch
            yield from batch.records
    finally:
        followers.close()


def test_members_newcomers_and_shards_follow(shard: OneShard) -> None:
    shard.clock.admit(VirtualWorkerIndex(7), Incarnation(2), 1)
    for who in (requester(2), requester(7, incarnation=2), None):
        assert next(follow(shard, who)) == shard.clock.records_from(0)[0]


def test_who_was_drained_follows_while_it_is_at_work_at_its_last_barrier(shard: OneShard) -> None:
    shard.clock.drain(EVICTED, Incarnation(0))
    for wave in range(shard.clock.snapshot().barrier):
        for vw in range(3):
            shard.push(requester(vw), wave, [torch.ones(4)])
            shard.report(requester(vw), wave)
    assert EVICTED not in shard.clock.snapshot().local
    newest = shard.clock.records_from(FROM_NEWEST_SEGMENT)
    assert next(follow(shard, requester(1), start=newest[0].index)) == newest[0]


def test_an_evicted_one_gets_no_record(shard: OneShard) -> None:
    shard.clock.evict(EVICTED, Incarnation(0))
    with pytest.raises(StaleIncarnation, match="the newest is 0 and is evicted"):
        next(follow(shard, requester(1)))
    assert any(isinstance(record, EvictRecord) for record in follow(shard, requester(0)))


def test_an_older_life_gets_no_record(shard: OneShard) -> None:
    shard.clock.admit(EVICTED, Incarnation(1), 1)
    with pytest.raises(StaleIncarnation, match="the newest is 1"):
        next(follow(shard, requester(1)))
    assert next(follow(shard, requester(1, incarnation=1)))


@pytest.mark.parametrize("who", [requester(term=2), requester(job="other")])
def test_one_of_another_run_gets_no_record(shard: OneShard, who: Requester) -> None:
    with pytest.raises(StaleTerm):
        next(follow(shard, who))


def test_there_is_no_such_stage(shard: OneShard) -> None:
    with pytest.raises(ProtocolViolation, match="there is no stage 1"):
        next(follow(shard, requester(0, 1)))


@pytest.mark.parametrize("life", [0, 1])
def test_one_that_waits_hears_of_its_end(shard: OneShard, life: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a newcomer's end there is no record: whoever waits looks up once in a while."""
    monkeypatch.setattr(followers, "GATHER_SECONDS", 0.01)
    if life:
        shard.clock.admit(EVICTED, Incarnation(1), 1)
    records = follow(shard, requester(1, incarnation=life))
    for _ in range(shard.clock.num_records):
        next(records)
    shard.clock.evict(EVICTED, Incarnation(life))
    with pytest.raises(StaleIncarnation):
        next(records)


def test_shards_acknowledge_at_once_only_what_a_clock_may_wait_for() -> None:
    one = OneShard(replace(CONFIG, num_shards=2))
    one.clock.acknowledge(ShardIndex(1), 1)
    one.begin()
    one.clock.acknowledge(ShardIndex(1), one.clock.num_records)
    one.settle()
    arrived: SimpleQueue[LogRecords] = SimpleQueue()
    followers = Followers(one.clock, SYSTEM_CLOCK)
    followers.follow(0, CONTEXT, Outlet(arrived.put, lambda _: None), gathered=False, who=None)
    assert arrived.get(timeout=5.0).acknowledge_later, "the first clock is published, and no wave is committed"
    for vw, later in enumerate((True, True, False)):
        one.push(requester(vw), 0, [torch.ones(4)])
        one.report(requester(vw), 0)
        assert arrived.get(timeout=5.0).acknowledge_later == later
    followers.close()


def test_commits_alone_wait_the_longer_the_more_virtual_workers_there_are(
    shard: OneShard, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[Callable[[], LogRecords | None]] = []

    class Asked:
        """Feeds that the test asks."""

        def __init__(self, **_: object) -> None:
            """There are none."""

        def open(self, _context: object, _outlet: object, take: Callable[[], LogRecords | None], **_: object) -> None:
            taken.append(take)

    monkeypatch.setattr(followers, "Feeds", Asked)
    monkeypatch.setattr(followers, "GATHERED_WORKERS", 1)
    clock = FakeClock()
    Followers(shard.clock, clock).follow(
        0, CONTEXT, Outlet(lambda _: None, lambda _: None), gathered=True, who=requester(0)
    )
    (take,) = taken
    assert take() is not None
    for vw in range(2):
        clock.advance(1.4)
        shard.push(requester(vw), 0, [torch.ones(4)])
        shard.report(requester(vw), 0)
        assert take() is None, "three virtual workers: three seconds"
    clock.advance(0.2)
    batch = take()
    assert batch is not None
    assert [record.vw for record in batch.records if isinstance(record, CommitRecord)] == [0, 1]
    shard.clock.request_barrier("stop")
    assert take() is not None, "what a stage acts on does not wait"


def test_over_the_network() -> None:
    handler, server = ShardServer(lambda _config: MemoryHistory()), Server(ServerConfig(num_threads=4))
    handler.add_to(server)
    server.on_stop(handler.stop)
    address = server.start()
    handler.configure(replace(CONFIG, run_dir="/nowhere"))
    with (
        closing(connect_shard(address, ShardIndex(0))) as stage,
        closing(connect_shard(address, ShardIndex(0))) as another_shard,
    ):
        assert next(iter(stage.stream(FOLLOW_LOG, FollowLogRequest(JOB, Term(1), 0, requester=requester(1)))))
        handler.calls.invoke(EVICT, EvictRequest(JOB, Term(1), EVICTED, Incarnation(0)))
        with pytest.raises(StaleIncarnation):
            next(iter(stage.stream(FOLLOW_LOG, FollowLogRequest(JOB, Term(1), 0, requester=requester(1)))))
        assert next(iter(another_shard.stream(FOLLOW_LOG, FollowLogRequest(JOB, Term(1), 0))))
    server.stop(grace_seconds=0.0)
