"""A stage's records come from its agent or from the clock shard: each once and in order, whoever falls silent."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from queue import SimpleQueue
from typing import cast

import pytest
import torch

from hetpipe.decide.sync.decision_log import FROM_NEWEST_SEGMENT
from hetpipe.decide.sync.records import EvictRecord, PublishRecord, Record, SegmentMember, SegmentRecord
from hetpipe.errors import StaleIncarnation
from hetpipe.observe.timeline import NullTimeline
from hetpipe.pipeline.synchroniser import SyncListener
from hetpipe.server.shard.client import ShardClient
from hetpipe.server.shard.relayed_log import (
    MAX_WAITING_BYTES,
    SILENCE_SECONDS,
    FrameReader,
    LogFrame,
    RelayedLog,
)
from hetpipe.values.ids import Clock, Incarnation, VirtualWorkerIndex
from hetpipe.weights.flat import BufferPool, FlatLayout
from hetpipe.wire.call import Calls
from hetpipe.wire.calls import FollowLogRequest, LogRecords
from tests.server.shard.builders import requester
from tests.support.fake_clock import FakeClock
from tests.support.method_calls import MethodCalls

#: A log: its first segment counts only virtual worker 1; its incarnation 0 is the stage of these tests.
RECORDS: tuple[Record, ...] = (
    SegmentRecord(0, Clock(0), (), 0, (SegmentMember(VirtualWorkerIndex(1), Incarnation(0), 1, joined=True),)),
    *(PublishRecord(index, Clock(index), (Clock(index),)) for index in range(1, 12)),
)


def frame(first: int, following: int) -> bytes:
    return LogFrame.of(first, following, RECORDS[first:following]).packed()


def pulse(following: int) -> bytes:
    return LogFrame(following, following).packed()


def indices(found: LogRecords | None) -> list[int]:
    return [] if found is None else [record.index for record in found.records]


def test_frames_are_found_wherever_the_bytes_are_cut() -> None:
    data = frame(0, 3) + pulse(3) + frame(3, 4)
    whole = FrameReader().take(data)
    assert [(each.first, each.following, bool(each.data)) for each in whole] == [
        (0, 3, True),
        (3, 3, False),
        (3, 4, True),
    ]
    for step in (1, 7, 25):
        reader = FrameReader()
        assert [each for at in range(0, len(data), step) for each in reader.take(data[at : at + step])] == whole


class TestRelayedLog:
    def setup_method(self) -> None:
        self.clock = FakeClock()
        self.log = RelayedLog(self.clock)

    def test_it_begins_with_what_the_agent_has_kept(self) -> None:
        self.log.feed(frame(0, 3) + frame(3, 4))
        assert indices(self.log.take(FROM_NEWEST_SEGMENT)) == [0, 1, 2]
        assert indices(self.log.take(3)) == [3]
        assert self.log.serves(4)

    def test_what_is_known_is_not_told_again(self) -> None:
        self.log.feed(frame(0, 3) + frame(3, 6) + frame(6, 7))
        assert indices(self.log.take(5)) == [5], "the rest of a frame"
        assert indices(self.log.take(6)) == [6]

    def test_nothing_is_left_out(self) -> None:
        self.log.feed(frame(4, 6))
        assert self.log.take(3) is None
        assert not self.log.serves(3)
        assert indices(self.log.take(4)) == [4, 5], "once the stage has the third from the clock shard"
        assert not self.log.serves(5), "the agent has told record 5 already"
        self.log.feed(pulse(8))
        assert not self.log.serves(6)
        assert self.log.serves(8)

    def test_a_silent_agent_is_not_waited_for(self) -> None:
        self.log.feed(frame(0, 3))
        assert indices(self.log.take(FROM_NEWEST_SEGMENT)) == [0, 1, 2]
        self.clock.advance(SILENCE_SECONDS)
        assert self.log.take(3) is None
        self.log.feed(pulse(3))
        assert self.log.serves(3)

    def test_one_that_never_says_anything_is_waited_for_as_long(self) -> None:
        assert self.log.take(3) is None, "who knows the log already asks the clock shard at once"
        self.clock.advance(SILENCE_SECONDS)
        assert self.log.take(FROM_NEWEST_SEGMENT) is None

    def test_frames_do_not_fill_the_memory(self) -> None:
        self.log.feed(frame(0, 3))
        big = LogFrame(3, 4, bytes(MAX_WAITING_BYTES))
        self.log.feed(big.packed())
        assert self.log.take(FROM_NEWEST_SEGMENT) is None, "the beginning is lost"
        self.log.feed(frame(4, 5))
        assert self.log.take(3) is None
        assert indices(self.log.take(4)) == [4]

    @pytest.mark.parametrize("garbage", [LogFrame(0, 1, b"\xff").packed(), b"\xff" * 40])
    def test_what_is_not_understood_ends_it(self, garbage: bytes) -> None:
        self.log.feed(garbage)
        assert self.log.take(0) is None
        self.log.feed(frame(0, 3))
        assert self.log.take(0) is None

    def test_closing_ends_a_wait(self) -> None:
        self.log.feed(frame(0, 3))
        self.log.close()
        assert self.log.take(3) is None


class ClockShard(MethodCalls):
    """Streams the log up to some record from wherever it is asked, then raises or lets the test go on."""

    def __init__(self) -> None:
        self.asked: SimpleQueue[int] = SimpleQueue()
        self.go_on: SimpleQueue[int | Exception] = SimpleQueue()

    def follow_log(self, request: FollowLogRequest) -> Iterator[LogRecords]:
        self.asked.put(request.start)
        start, following = max(0, request.start), self.go_on.get(timeout=5.0)
        if isinstance(following, Exception):
            raise following
        for index in range(start, following):
            yield LogRecords((RECORDS[index],))


class Stage:
    """Follows as a stage does."""

    def __init__(self, vw: int = 1) -> None:
        self.clock, self.shard = FakeClock(), ClockShard()
        self.relayed = RelayedLog(self.clock)
        self.told: SimpleQueue[int] = SimpleQueue()
        self.errors: SimpleQueue[Exception] = SimpleQueue()
        self.client = ShardClient(
            requester(vw),
            (),
            BufferPool(FlatLayout([]), torch.device("cpu")),
            shards=(),
            clock_shard=cast("Calls", self.shard),
            listener=cast("SyncListener", self),
            clock=self.clock,
            timeline=NullTimeline(),
            relayed=self.relayed,
        )

    def on_records(self, records: Sequence[Record]) -> None:
        for record in records:
            self.told.put(record.index)

    def on_error(self, error: Exception) -> None:
        self.errors.put(error)

    def next(self, number: int) -> list[int]:
        return [self.told.get(timeout=5.0) for _ in range(number)]


def test_a_stage_goes_to_the_clock_shard_and_back() -> None:
    stage = Stage()
    stage.relayed.feed(frame(0, 3))
    stage.client.start()
    assert stage.next(3) == [0, 1, 2]
    # The agent is stopped, and the clock shard goes on.
    stage.clock.advance(SILENCE_SECONDS)
    stage.relayed.feed(b"")  # wakes the wait, as its deadline would
    assert stage.shard.asked.get(timeout=5.0) == 3
    stage.shard.go_on.put(6)
    assert stage.next(3) == [3, 4, 5]
    assert stage.shard.asked.get(timeout=5.0) == 6
    # The agent goes on, where it was.
    stage.relayed.feed(frame(3, 5) + frame(5, 8))
    stage.shard.go_on.put(7)
    assert stage.next(2) == [6, 7], "6 from the clock shard, 7 from the agent"
    stage.relayed.feed(pulse(8) + frame(8, 10))
    assert stage.next(2) == [8, 9]
    stage.client.close()
    assert stage.shard.asked.empty()
    assert stage.told.empty()
    assert stage.errors.empty()


def test_who_is_not_a_member_asks_the_clock_shard_which_knows_of_its_eviction() -> None:
    stage = Stage(vw=0)
    stage.relayed.feed(frame(0, 3))
    stage.client.start()
    assert stage.next(3) == [0, 1, 2]
    assert stage.shard.asked.get(timeout=5.0) == 3
    stage.shard.go_on.put(StaleIncarnation("evicted"))
    assert isinstance(stage.errors.get(timeout=5.0), StaleIncarnation)
    stage.client.close()


def test_a_member_is_told_of_its_eviction_by_the_agent() -> None:
    stage = Stage()
    evicted = EvictRecord(1, VirtualWorkerIndex(1), Incarnation(0), Clock(0))
    stage.relayed.feed(LogFrame.of(0, 2, (RECORDS[0], evicted)).packed())
    stage.client.start()
    assert stage.next(2) == [0, 1]
    stage.client.close()
    assert stage.shard.asked.empty()
