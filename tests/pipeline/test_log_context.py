"""Lines of the log say what they are about: the wave on a stage, the job on shards and at the coordinator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from structlog.contextvars import get_contextvars

from hetpipe.pipeline.tally import Tally
from hetpipe.server.coordinator.job_hosts import thread_per_job
from hetpipe.server.shard.shard import Shard
from hetpipe.values.ids import JobId
from tests.numerics.compare import ROOT, Case
from tests.support.in_process import InProcessRun, run_in_process


@pytest.mark.matrix
def test_stages_bind_the_wave_and_shards_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waves: list[tuple[int, int]] = []
    shards: list[tuple[str, int]] = []
    close, follow = Tally.wave_closed, Shard.follow

    def closing(tally: Tally, num_waves: int, *arguments: Any) -> None:
        waves.append((num_waves - 1, get_contextvars()["wave"]))
        close(tally, num_waves, *arguments)

    def following(shard: Shard, *arguments: Any) -> None:
        shards.append((get_contextvars()["job"], get_contextvars()["shard"]))
        follow(shard, *arguments)

    monkeypatch.setattr(Tally, "wave_closed", closing)
    monkeypatch.setattr(Shard, "follow", following)
    job = Case(minibatches=12).job()
    run_in_process(InProcessRun(job, tmp_path, ROOT, keep_history=False))
    assert len(waves) >= 12
    assert all(closed == bound for closed, bound in waves)
    assert {shard for _, shard in shards} == set(range(job.parameter_servers.count))
    assert {job_id for job_id, _ in shards} == {job.name}


def test_the_coordinator_binds_the_job_for_its_thread() -> None:
    with thread_per_job(JobId("digits-1")) as executor:
        assert executor.submit(get_contextvars).result() == {"job": "digits-1"}
