"""The coordinator as a whole, without a network: failures, a store that goes away, restarts."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import pytest

from hetpipe.errors import (
    StoreUnavailable,
    UnknownMember,
)
from hetpipe.storage.memory_store import MemoryStore
from hetpipe.values.commands import ChildExit, InspectionResult, KeyedStageReport
from hetpipe.values.events import (
    JobEnded,
    JobState,
    NumberedEvent,
    WorkerLost,
)
from hetpipe.values.ids import JobId
from hetpipe.values.run import StageFailed
from tests.server.coordinator.builders import JOB_ID, agent_member, model, shard_member
from tests.server.coordinator.fakes import Cluster, FlakyStore, events, failure, state, submit
from tests.support.fake_clock import FakeClock

T = TypeVar("T")


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path / "run").usual()


class TestFailures:
    def test_a_dead_shard_fails_a_job_that_is_being_prepared(self, cluster: Cluster) -> None:
        cluster.shards.dead.add("shards.host:7001")
        submit(cluster)
        cluster.obey()

        assert "parameter server at shards.host:7001 cannot be reached" in failure(cluster)
        assert [address for address, _ in cluster.shards.asked("release")] == ["shards.host:7000", "shards.host:7001"]

    def test_a_shard_that_stops_answering_ends_the_run_in_time(self, cluster: Cluster) -> None:
        submit(cluster, "survive.absence=10s")
        cluster.train()
        start = cluster.clock.monotonic()
        cluster.shards.dead.add("shards.host:7001")
        while not state(cluster).is_terminal:
            cluster.wait(0.5, silent=("ps1",))

        assert cluster.clock.monotonic() - start <= 17.0
        assert failure(cluster) == (
            "parameter server ps1 (pid 201 on shards.host:7001) stopped answering: no heartbeat for 5.0 s; it did not "
            "return at shards.host:7001 within 10 s"
        )

    def test_one_that_comes_back_in_time_does_not(self, cluster: Cluster) -> None:
        submit(cluster, "survive.absence=10s")
        cluster.train()
        cluster.wait(12.0, silent=("ps1",))
        cluster.join(shard_member(1))
        cluster.wait(20.0)

        assert state(cluster) is JobState.RUNNING

    def test_a_coordinator_that_was_stopped_itself_evicts_nobody(self, cluster: Cluster) -> None:
        submit(cluster)
        cluster.train()
        cluster.clock.advance(300.0)
        cluster.coordinator.tick()
        cluster.wait(4.5, silent=("n1",))
        assert len(cluster.coordinator.members()) == 4
        cluster.wait(0.5, silent=("n1",))

        assert len(cluster.coordinator.members()) == 3

    def test_a_batch_that_comes_twice_counts_once(self, cluster: Cluster) -> None:
        submit(cluster)
        cluster.train()
        key = cluster.stages("n0", JOB_ID)[0]
        registration = cluster.registrations["n0"]
        reports = (ChildExit(key, 1, -9),)
        for _ in range(3):
            cluster.coordinator.report("n0", registration, 50, reports)  # type: ignore[arg-type]
        cluster.coordinator.report("n0", registration, 49, (ChildExit(key, 1, -11),))  # type: ignore[arg-type]
        cluster.wait(1.5)

        assert [lost.sentence[-17:] for lost in events(cluster, WorkerLost)] == ["killed by SIGKILL"]

    def test_news_of_unknown_jobs_are_ignored(self, cluster: Cluster) -> None:
        cluster.tell("n0", InspectionResult(JobId("unknown"), model()))

    def test_after_a_failure_the_devices_are_free_again(self, cluster: Cluster) -> None:
        submit(cluster)
        cluster.train()
        cluster.tell(
            "n0", KeyedStageReport(cluster.stages("n0", JOB_ID)[0], StageFailed("CallableError", "it is wrong"))
        )
        cluster.wait(1.5)
        cluster.train()
        second = submit(cluster, request_id="another-request")
        cluster.train()

        assert state(cluster, second) is JobState.RUNNING


class TestStoreThatGoesAway:
    @pytest.fixture
    def flaky(self) -> FlakyStore:
        return FlakyStore(MemoryStore(FakeClock()))

    @pytest.fixture
    def cluster(self, tmp_path: Path, flaky: FlakyStore) -> Cluster:
        return Cluster(tmp_path / "run", store=flaky).usual()

    def test_a_running_job_does_not_notice(self, cluster: Cluster, flaky: FlakyStore) -> None:
        job_id = submit(cluster)
        cluster.train()
        flaky.away = True
        cluster.wait(30.0)
        assert state(cluster) is JobState.RUNNING
        cluster.finish(job_id)
        assert state(cluster) is JobState.FINISHED
        flaky.away = False
        cluster.wait(1.0)

        assert flaky.job(job_id).state is JobState.FINISHED
        host = cluster.coordinator.host(job_id)
        assert host is not None
        assert flaky.events(job_id) == tuple(host.events)

    def test_new_members_and_jobs_wait(self, cluster: Cluster, flaky: FlakyStore) -> None:
        flaky.away = True

        with pytest.raises(StoreUnavailable):
            cluster.join(agent_member("n9"))
        with pytest.raises(StoreUnavailable):
            submit(cluster)
        cluster.coordinator.leave(agent_member().id, cluster.registrations["n0"])
        assert len(cluster.coordinator.members()) == 3

    def test_a_store_that_lost_its_memory_learns_the_members_again(self, cluster: Cluster, flaky: FlakyStore) -> None:
        flaky._behind = MemoryStore(FakeClock())
        cluster.wait(1.0)

        assert [record.info.id for record in flaky.members()] == ["n0", "n1", "ps0", "ps1"]


class TestRestart:
    def test_an_end_that_was_told_but_not_kept_is_kept_by_the_next(self, cluster: Cluster) -> None:
        job_id = submit(cluster)
        cluster.train()
        cluster.wait(0.5)
        told = cluster.store.events(job_id)
        ended = NumberedEvent(len(told) + 1, JobEnded(JobState.FINISHED, result={"loss": 0.5}))
        cluster.store.append_event(job_id, ended)

        cluster.coordinator = cluster.new_coordinator()

        assert state(cluster) is JobState.FINISHED
        assert cluster.store.events(job_id) == (*told, ended)

    def test_members_must_register_again(self, cluster: Cluster) -> None:
        cluster.coordinator = cluster.new_coordinator()

        with pytest.raises(UnknownMember):
            cluster.beat("n0")
        cluster.join(agent_member("n0", devices=2))
        cluster.beat("n0")
