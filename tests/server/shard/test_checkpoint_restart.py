"""All parameter servers are killed while a checkpoint is made; they finish it when they are back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hetpipe.checkpoint.format import CheckpointReader
from hetpipe.checkpoint.manifest import newest_complete, read_complete
from hetpipe.checkpoint.shard_part import ShardCheckpoints
from hetpipe.decide.sync.records import Record
from hetpipe.decide.sync.segment import CHECKPOINT
from hetpipe.errors import ClockNotPublished
from hetpipe.observe.history import MemoryHistory
from hetpipe.server.shard.in_process import clock_calls, tensor_calls
from hetpipe.server.shard.job_shard import JobShard
from hetpipe.server.shard.job_storage import JobStorage, StateOptions
from hetpipe.values.ids import Clock, ShardIndex, Wave
from hetpipe.values.requests import PushHeader
from hetpipe.weights.flat import FlatBuffer
from hetpipe.wire.calls import (
    GET_PROGRESS,
    JOIN,
    PUSH,
    REPORT_CHECKPOINT,
    REPORT_INITIALIZED,
    REPORT_STAGED,
    GetProgressRequest,
    JoinRequest,
    ReportCheckpointRequest,
    ReportInitializedRequest,
    ReportStagedRequest,
)
from hetpipe.wire.serving import Handlers
from tests.checkpoints import stage_part
from tests.polling import wait_until
from tests.server.shard.builders import encode, headers_of, push_header, requester, shard_config, slices_of

SECONDS = 20.0


class Servers:
    """Two shards of a job of one virtual worker, in one process."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        whole = slices_of([4, 4])
        self.configs = [
            shard_config(
                (replace(whole[i], shard=ShardIndex(i)),), shard=i, num_shards=2, stages=(1,), run_dir=str(run_dir)
            )
            for i in range(2)
        ]
        self.start()

    def start(self) -> None:
        self.shards = []
        for config in self.configs:
            history = MemoryHistory()
            self.shards.append(JobShard(config, history, JobStorage(config, StateOptions(), history)))
        for shard in self.shards:
            shard.start(None if shard is self.shards[0] else clock_calls(self.shards[0]))
        self.clock = clock_calls(self.shards[0])

    def stop(self) -> None:
        for shard in self.shards:
            shard.stop()

    def push(self, wave: int | None, value: float) -> None:
        for index, shard in enumerate(self.shards):
            header = push_header(requester(), wave, headers_of(self.configs[index].slices))
            chunks = encode([torch.full((4,), value + index)])
            wait_until(
                lambda: _is_pushed(tensor_calls(shard), header, chunks),  # noqa: B023 - called at once
                timeout_seconds=SECONDS,
                what="shard that has followed so far",
            )

    def pass_barrier(self) -> int:
        """Train until a barrier that asks for a checkpoint is passed on all shards; its clock."""
        self.clock.invoke(JOIN, JoinRequest(requester()))
        self.push(None, 10.0)
        self.clock.invoke(REPORT_INITIALIZED, ReportInitializedRequest(requester()))
        log = self.shards[0].clock_shard
        wait_until(lambda: log.passed()[0] is not None, timeout_seconds=SECONDS, what="start")
        clock = log.request_barrier(CHECKPOINT)
        for wave in range(clock):
            self.push(wave, 1.0)
            self.clock.invoke(REPORT_STAGED, ReportStagedRequest(requester(), Wave(wave), ((wave,),), Clock(0)))
        wait_until(
            lambda: self.clock.invoke(GET_PROGRESS, GetProgressRequest(requester())).clock == clock,
            timeout_seconds=SECONDS,
            what="barrier",
        )
        followed = [shard.shard for shard in self.shards]
        wait_until(
            lambda: all(shard.num_records == log.num_records for shard in followed),
            timeout_seconds=SECONDS,
            what="shards",
        )
        return clock


def _is_pushed(shard: Handlers, header: PushHeader, chunks: Sequence[bytes]) -> bool:
    """Push, as stages do: a shard that has yet to follow the record that makes it possible is asked again."""
    try:
        shard.upload(PUSH, header, chunks)
    except ClockNotPublished:
        return False
    return True


@pytest.mark.parametrize("wrote", [(), (0,), (1,)], ids=["no shard wrote", "shard 0 wrote", "shard 1 wrote"])
def test_the_checkpoint_becomes_complete_by_itself(
    wrote: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stage has reported its part, and does not again; nothing but the restart happens."""
    follow = ShardCheckpoints.follow

    def some(own: ShardCheckpoints[FlatBuffer], record: Record) -> None:
        if own._shard.config.shard in wrote:
            follow(own, record)

    monkeypatch.setattr(ShardCheckpoints, "follow", some)
    servers = Servers(tmp_path)
    try:
        clock = servers.pass_barrier()
        assert not servers.clock.invoke(
            REPORT_CHECKPOINT,
            ReportCheckpointRequest(requester(), Clock(clock), (stage_part(tmp_path, clock, 0, 0),)),
        ).complete
        for shard in wrote:
            path = tmp_path / "checkpoints" / f"clock-{clock:08d}" / f"shard-{ShardIndex(shard)}.safetensors"
            wait_until(path.exists, timeout_seconds=SECONDS, what="part")
    finally:
        servers.stop()
    monkeypatch.undo()
    assert newest_complete(tmp_path) is None

    servers.start()
    try:
        wait_until(lambda: newest_complete(tmp_path) is not None, timeout_seconds=SECONDS, what="checkpoint")
        assert servers.clock.invoke(
            REPORT_CHECKPOINT,
            ReportCheckpointRequest(requester(), Clock(clock), (stage_part(tmp_path, clock, 0, 0),)),
        ).complete
    finally:
        servers.stop()
    folder = newest_complete(tmp_path)
    assert folder is not None
    manifest = read_complete(folder)
    assert (manifest.progress.clock, manifest.num_shards) == (clock, 2)
    weights = CheckpointReader(folder / file.name for file in manifest.shared_files)
    assert weights.tensor("weights/p0").tolist() == [10.0 + clock] * 4
    assert weights.tensor("weights/p1").tolist() == [11.0 + 2 * clock] * 4
