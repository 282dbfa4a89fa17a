"""What the clock shard keeps for a coordinator that has never heard of the job."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hetpipe.errors import ProtocolViolation, StaleTerm, UnknownJob
from hetpipe.observe.history import MemoryHistory
from hetpipe.server.shard.clock_shard import ClockShard
from hetpipe.server.shard.config_check import check_config
from hetpipe.server.shard.job_storage import JobStorage, StateOptions
from hetpipe.server.shard.server import ShardServer
from hetpipe.values.bounds import MAX_STAGES
from hetpipe.values.ids import Incarnation, JobId, ShardIndex, Term, VirtualWorkerIndex
from hetpipe.values.run_document import LifeSeen, RunDocument
from hetpipe.values.shard_config import ShardConfig
from hetpipe.wire.caller import Caller
from hetpipe.wire.calls import CONFIGURE, DESCRIBE_RUN, KEEP_RUN, DescribeRunRequest, KeepRunRequest
from hetpipe.wire.server import Server, ServerConfig
from hetpipe.wire.shard_client import connect_shard
from tests.server.shard.builders import DATA, JOB, OneShard, requester, run_document, shard_config, slices_of

BARE = shard_config(slices_of([4]), stages=(1, 2, 1))
RUN = run_document(BARE)
CONFIG = replace(BARE, run=RUN)
LATER = replace(RUN, agents=(replace(RUN.agents[0], pid=7),))


def life(vw: int, incarnation: int, num_stages: int, standing: str, *, leaving: bool = False) -> LifeSeen:
    return LifeSeen(VirtualWorkerIndex(vw), Incarnation(incarnation), num_stages, standing, leaving)  # type: ignore[arg-type]


class TestDescription:
    def test_before_the_start_everybody_is_a_newcomer(self) -> None:
        described = OneShard(CONFIG).clock.describe()
        assert described.run == RUN
        assert described.lives == (life(0, 0, 1, "newcomer"), life(1, 0, 2, "newcomer"), life(2, 0, 1, "newcomer"))
        assert (described.term, described.reasons, described.is_over) == (1, (), False)

    def test_it_says_who_counts_who_comes_who_leaves_and_who_is_gone(self) -> None:
        shard = OneShard(CONFIG).begin()
        shard.clock.evict(VirtualWorkerIndex(2), Incarnation(0))
        shard.clock.drain(VirtualWorkerIndex(1), Incarnation(0))
        shard.clock.admit(VirtualWorkerIndex(4), Incarnation(0), 3)
        described = shard.clock.describe()
        assert described.lives == (
            life(0, 0, 1, "member"),
            life(1, 0, 2, "member", leaving=True),
            life(2, 0, 0, "gone"),
            life(4, 0, 3, "newcomer"),
        )
        assert described.reasons == ("evict", "drain")
        assert described.clocks == shard.clock.snapshot()

    def test_a_new_life_hides_the_old_one(self) -> None:
        shard = OneShard(CONFIG).begin()
        shard.clock.admit(VirtualWorkerIndex(1), Incarnation(3), 1)
        assert shard.clock.describe().lives[1] == life(1, 3, 1, "newcomer")

    def test_a_run_is_over_once_its_last_barrier_is_published(self) -> None:
        shard = OneShard(replace(CONFIG, membership=replace(CONFIG.membership, num_stages={VirtualWorkerIndex(0): 1})))
        shard.begin()
        shard.clock.request_barrier("stop")
        assert (shard.clock.describe().reasons, shard.clock.describe().is_over) == (("stop",), False)
        for wave in range(shard.clock.snapshot().barrier):
            shard.push(requester(), wave, [torch.zeros(4)])
            shard.report(requester(), wave)
        assert shard.clock.describe().is_over

    def test_a_shard_that_was_told_nothing_says_so(self) -> None:
        with pytest.raises(ProtocolViolation, match="no coordinator has stored a run document for job job"):
            OneShard(BARE).clock.describe()


class TestKeeping:
    @pytest.fixture(autouse=True)
    def _quick_disk(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Nobody cuts the power here."""
        monkeypatch.setattr(os, "fsync", lambda _: None)

    @staticmethod
    def boot(config: ShardConfig, folder: Path) -> tuple[JobStorage, ClockShard]:
        """A clock shard that goes on with what is in `folder`."""
        state = JobStorage(config, StateOptions(root=folder), MemoryHistory())
        return state, ClockShard(config, state.history, state.journal, state.recovered_decisions)

    def test_the_newest_one_outlives_the_process(self, tmp_path: Path) -> None:
        _, clock = self.boot(CONFIG, tmp_path)
        assert clock.describe().run == RUN
        clock.keep_run(LATER)
        assert self.boot(CONFIG, tmp_path)[1].describe().run == LATER

    def test_one_that_is_told_again_is_written_once(self, tmp_path: Path) -> None:
        state, clock = self.boot(CONFIG, tmp_path)
        clock.keep_run(LATER)
        assert state.journal is not None
        size = state.journal._storage.log.num_bytes
        clock.keep_run(LATER)
        assert state.journal._storage.log.num_bytes == size

    def test_it_outlives_the_log_of_events_too(self, tmp_path: Path) -> None:
        state, clock = self.boot(CONFIG, tmp_path)
        clock.keep_run(LATER)
        assert state.journal is not None
        state.journal._first_bytes = -(1 << 40)  # so much has been logged since the last snapshot
        clock.join(requester())
        state.wait_idle()

        again, _ = self.boot(CONFIG, tmp_path)
        assert again.recovered_decisions is not None
        assert again.recovered_decisions.state is not None
        assert (again.recovered_decisions.state.run, again.recovered_decisions.events) == (LATER, ())


class TestRefusals:
    @pytest.mark.parametrize(
        ("changed", "wrong"),
        [
            (
                {"shard": ShardIndex(1), "num_shards": 2, "clock_shard_address": "h:1"},
                "on shard 1; it belongs on shard 0",
            ),
            ({"term": Term(2)}, "a run of job 'job' in term 1"),
            ({"job_id": JobId("other")}, "a run of job 'job' in term 1"),
            ({"num_shards": 2}, "on 1 shards, planned for 1"),
            ({"data": replace(DATA, seed=1)}, "other data, or another start"),
        ],
    )
    def test_a_configuration_with_the_run_of_another(self, changed: dict[str, object], wrong: str) -> None:
        with pytest.raises(ProtocolViolation, match=wrong):
            check_config(replace(CONFIG, **changed), memory_bytes=1 << 20)  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        ("run", "wrong"),
        [
            (replace(RUN, plan=replace(RUN.plan, virtual_workers=())), "0 virtual workers"),
            (
                replace(RUN, plan=replace(RUN.plan, virtual_workers=RUN.plan.virtual_workers[::-1])),
                "virtual workers are not in order",
            ),
            (
                replace(RUN, plan=replace(RUN.plan, virtual_workers=RUN.plan.virtual_workers[:1] * (MAX_STAGES + 1))),
                f"of {MAX_STAGES + 1} stages",
            ),
        ],
    )
    def test_a_run_that_nobody_can_lead(self, run: RunDocument, wrong: str) -> None:
        with pytest.raises(ProtocolViolation, match=wrong):
            check_config(replace(CONFIG, run=run), memory_bytes=1 << 20)


@pytest.fixture
def control(tmp_path: Path) -> Iterator[Caller]:
    """A coordinator's connection to a clock shard that serves the job."""
    handler, server = ShardServer(lambda _config: MemoryHistory()), Server(ServerConfig(num_threads=4))
    handler.add_to(server)
    server.on_stop(handler.stop)
    server.start()
    with closing(connect_shard(server.address)) as client:
        client.invoke(CONFIGURE, replace(CONFIG, run_dir=str(tmp_path)))
        yield client
    server.stop(grace_seconds=0.0)


def test_over_the_network(control: Caller) -> None:
    assert control.invoke(DESCRIBE_RUN, DescribeRunRequest(JOB)).run == RUN
    control.invoke(KEEP_RUN, KeepRunRequest(JOB, Term(1), LATER))
    described = control.invoke(DESCRIBE_RUN, DescribeRunRequest(JOB))
    assert (described.run, [life.standing for life in described.lives]) == (LATER, ["newcomer"] * 3)
    with pytest.raises(StaleTerm):
        control.invoke(KEEP_RUN, KeepRunRequest(JOB, Term(2), LATER))
    with pytest.raises(ProtocolViolation, match="a shard cannot store the document of a run with other data"):
        control.invoke(KEEP_RUN, KeepRunRequest(JOB, Term(1), replace(LATER, data=replace(DATA, seed=1))))
    with pytest.raises(UnknownJob):
        control.invoke(DESCRIBE_RUN, DescribeRunRequest(JobId("other")))
