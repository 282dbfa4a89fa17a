"""An agent follows the decision log of a job once, for all its stages."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from queue import SimpleQueue
from typing import cast

from hetpipe.decide.sync.decision_log import FROM_NEWEST_SEGMENT
from hetpipe.decide.sync.records import PublishRecord, Record, SegmentRecord
from hetpipe.errors import PeerUnreachable
from hetpipe.server.agent.log_relay import MAX_KEPT_RECORDS, ClockShardAt, JobRelay, LogRelays
from hetpipe.server.shard.relayed_log import FrameReader
from hetpipe.values.commands import StageKey
from hetpipe.values.ids import Clock, Incarnation, JobId, StageIndex, Term, VirtualWorkerIndex
from hetpipe.wire.call import Calls
from hetpipe.wire.calls import FollowLogRequest, LogRecords
from hetpipe.wire.codec import from_bytes
from tests.polling import wait_until
from tests.support.method_calls import MethodCalls

JOB, TERM = JobId("job"), Term(1)
AT = ClockShardAt("127.0.0.1:1")


def key(stage: int) -> StageKey:
    return StageKey(JOB, VirtualWorkerIndex(0), StageIndex(stage), Incarnation(0), TERM)


def publish(index: int) -> Record:
    return PublishRecord(index, Clock(index), (Clock(index),))


def segment(index: int) -> Record:
    return SegmentRecord(index, Clock(index), ("checkpoint",), 0, ())


class Told:
    """What a stage is told: for each frame, the records that it covers and those that it holds."""

    def __init__(self) -> None:
        self.frames: list[tuple[int, int, list[int]]] = []
        self.takes_more = True

    def __call__(self, data: bytes) -> bool:
        for frame in FrameReader().take(data):
            held = from_bytes(LogRecords, frame.data).records if frame.data else ()
            self.frames.append((frame.first, frame.following, [record.index for record in held]))
        return self.takes_more


class TestOneJob:
    def setup_method(self) -> None:
        self.relay, self.first, self.second = JobRelay(JOB, TERM), Told(), Told()

    def test_all_stages_are_told_the_same(self) -> None:
        self.relay.add(key(0), self.first)
        self.relay.add(key(1), self.second)
        assert self.relay.request == FollowLogRequest(JOB, TERM, FROM_NEWEST_SEGMENT, gathered=True)
        self.relay.spread((segment(4), publish(5)))
        self.relay.pulse()
        self.relay.spread((publish(6),))
        assert self.first.frames == [(4, 6, [4, 5]), (6, 6, []), (6, 7, [6])]
        assert self.second.frames == self.first.frames
        assert self.relay.request.start == 7

    def test_commits_that_are_left_out_are_covered(self) -> None:
        self.relay.add(key(0), self.first)
        self.relay.spread((segment(4), publish(5)))
        self.relay.spread((publish(9),))
        assert self.first.frames[-1] == (6, 10, [9])

    def test_a_later_stage_begins_at_the_newest_segment(self) -> None:
        self.relay.spread((publish(0), publish(1)))
        self.relay.spread((segment(2), publish(3)))
        self.relay.spread((publish(4),))
        self.relay.add(key(0), self.first)
        self.relay.spread((publish(5),))
        assert self.first.frames == [(2, 5, [2, 3, 4]), (5, 6, [5])]

    def test_in_a_long_segment_it_waits_for_the_next(self) -> None:
        self.relay.spread(tuple(publish(index) for index in range(MAX_KEPT_RECORDS + 1)))
        self.relay.add(key(0), self.first)
        self.relay.pulse()
        self.relay.spread((publish(MAX_KEPT_RECORDS + 1),))
        assert self.first.frames == [], "it follows the clock shard itself"
        at = MAX_KEPT_RECORDS + 2
        self.relay.spread((publish(at), segment(at + 1), publish(at + 2)))
        assert self.first.frames == [(at + 1, at + 3, [at + 1, at + 2])]

    def test_a_stream_that_jumps_covers_nothing_before(self) -> None:
        self.relay.add(key(0), self.first)
        self.relay.spread((segment(4), publish(5)))
        self.relay.spread((segment(9), publish(10)))
        assert self.first.frames[-1] == (9, 11, [9, 10])

    def test_while_the_stream_is_broken_there_are_no_pulses(self) -> None:
        self.relay.add(key(0), self.first)
        self.relay.spread((segment(4), publish(5)))
        assert self.relay.failed()
        assert not self.relay.failed(), "it is told once"
        self.relay.pulse()
        assert self.relay.request.start == 5, "again the newest one, whose arrival says that the stream works"
        self.relay.add(key(1), self.second)
        self.relay.spread((publish(5),))
        self.relay.pulse()
        assert self.first.frames == [(4, 6, [4, 5]), (6, 6, [])]
        assert self.second.frames == []
        self.relay.spread((publish(6),))
        assert self.second.frames == [(4, 7, [4, 5, 6])]

    def test_a_stage_that_does_not_read_is_cut_off(self) -> None:
        self.relay.add(key(0), self.first)
        self.first.takes_more = False
        self.relay.spread((segment(4),))
        assert not self.relay.has_stages
        self.relay.spread((publish(5),))
        assert self.first.frames == [(4, 5, [4])]


class ClockShard(MethodCalls):
    """Streams what the test says, and fails once it is closed."""

    def __init__(self) -> None:
        self.asked: SimpleQueue[int] = SimpleQueue()
        self.batches: SimpleQueue[LogRecords | Exception | None] = SimpleQueue()
        self.is_closed = threading.Event()

    def follow_log(self, request: FollowLogRequest) -> Iterator[LogRecords]:
        self.asked.put(request.start)
        while (batch := self.batches.get(timeout=5.0)) is not None:
            if isinstance(batch, Exception):
                raise batch
            yield batch

    def close(self) -> None:
        self.is_closed.set()
        self.batches.put(PeerUnreachable("closed"))


def test_one_stream_per_job_as_long_as_it_has_stages() -> None:
    shards: list[ClockShard] = []

    def connect(at: ClockShardAt) -> Calls:
        assert at == AT
        shards.append(ClockShard())
        return cast("Calls", shards[-1])

    relays, told = LogRelays(connect), [Told() for _ in range(3)]
    relays.add(key(0), AT, told[0])
    relays.add(key(1), AT, told[1])
    relays.add(replace(key(0), job_id=JobId("other")), AT, told[2])
    assert len(shards) == 2
    assert shards[0].asked.get(timeout=5.0) == FROM_NEWEST_SEGMENT
    shards[0].batches.put(LogRecords((segment(4),)))
    shards[0].batches.put(None)
    assert shards[0].asked.get(timeout=5.0) == 5, "the stream has ended and is opened again"
    assert [len(each.frames) > 0 for each in told] == [True, True, False]
    relays.remove(key(0))
    assert not shards[0].is_closed.is_set()
    relays.remove(key(1))
    assert shards[0].is_closed.is_set()
    assert not shards[1].is_closed.is_set()
    relays.add(key(2), AT, told[0])
    assert len(shards) == 3
    relays.close()
    assert all(shard.is_closed.is_set() for shard in shards)
    relays.add(key(3), AT, told[0])
    assert len(shards) == 3


def test_a_relay_whose_stages_are_all_cut_off_ends() -> None:
    shard, told = ClockShard(), Told()
    told.takes_more = False
    relays = LogRelays(lambda _: cast("Calls", shard))
    relays.add(key(0), AT, told)
    shard.batches.put(LogRecords((segment(4),)))
    wait_until(lambda: bool(told.frames), timeout_seconds=5.0, what="a frame")
    relays.remove(key(7))
    assert shard.is_closed.is_set()
    relays.close()
