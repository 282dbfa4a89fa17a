"""A shard whose clock shard goes on with another decision log: a power cut took the end of the first one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hetpipe.decide.sync.records import BarrierRecord, Record, TermRecord
from hetpipe.errors import StateLost
from hetpipe.observe.history import MemoryHistory
from hetpipe.server.shard.job_shard import JobShard
from hetpipe.server.shard.job_storage import JobStorage, StateOptions
from hetpipe.values.ids import Clock, Term
from hetpipe.wire.calls import AcknowledgeRequest, FollowLogRequest, LogRecords
from tests.polling import wait_until
from tests.server.shard.builders import shard_config, slices_of
from tests.support.method_calls import MethodCalls

FIRST = TermRecord(0, Term(1))


class Connections(MethodCalls):
    """A clock shard that gives each stream that follows its log one batch."""

    def __init__(self, batches: list[list[Record]]) -> None:
        self.batches = batches
        self.asked: list[int] = []

    def acknowledge(self, _: AcknowledgeRequest) -> None:
        """Hear it."""

    def follow_log(self, request: FollowLogRequest) -> Iterator[LogRecords]:
        """The next batch from `start` on."""
        assert not request.gathered
        self.asked.append(request.start)
        if self.batches:
            yield LogRecords(tuple(record for record in self.batches.pop(0) if record.index >= request.start))


def barrier(index: int, clock: int) -> BarrierRecord:
    return BarrierRecord(index, Clock(clock), "stop", 0)


@pytest.mark.parametrize(
    ("second", "is_lost"),
    [
        ([FIRST, barrier(1, 3), barrier(2, 5)], False),
        ([FIRST, barrier(1, 4), barrier(2, 5)], True),
    ],
)
def test_a_record_that_is_another_than_it_was(tmp_path: Path, second: list[Record], *, is_lost: bool) -> None:
    config = shard_config(slices_of((4,)), shard=1, num_shards=2, clock_shard_address="localhost:1")
    clock = Connections([[FIRST, barrier(1, 3)], second])
    history = MemoryHistory()
    shard = JobShard(config, history, JobStorage(config, StateOptions(root=tmp_path), history))
    lost: list[StateLost] = []
    shard.start(clock, on_lost=lost.append)
    wait_until(lambda: bool(lost) or shard.shard.num_records == 3, timeout_seconds=10.0, what="second batch")
    shard.stop()

    assert clock.asked[:2] == [0, 1]
    assert [str(error)[:96] for error in lost] == (
        ["shard 1 has followed another decision log than the clock shard's current one (record 1 was Barri"]
        if is_lost
        else []
    )
