"""The coordinator without a network: what endangers a job reaches its followers, status, metrics and last words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hetpipe.errors import PermissionDenied, StoreUnavailable
from hetpipe.server.coordinator.candidate import Candidate
from hetpipe.server.coordinator.coordinator import Coordinator
from hetpipe.server.coordinator.servicer import CoordinatorServicer
from hetpipe.storage.memory_store import MemoryStore
from hetpipe.values.commands import ChildExit, KeyedStageReport
from hetpipe.values.conditions import Condition, ConditionKind
from hetpipe.values.events import ConditionCleared, ConditionRaised, JobEnded, JobState, Rewound
from hetpipe.values.ids import Clock, JobId
from hetpipe.values.run import StageConditions, StageFailed
from hetpipe.values.sync import Progress
from tests.server.coordinator.builders import JOB_ID
from tests.server.coordinator.fakes import Cluster, events, state, submit
from tests.server.coordinator.succession import Succession
from tests.server.coordinator.test_readings import read

GIVEN_UP = Condition(
    ConditionKind.CHECKPOINT_GIVEN_UP,
    "checkpoints",
    "the checkpoint at clock 42 was given up: No space left on device; free space in /runs",
    since=50.0,
    times=1,
)
WELL = Condition(
    ConditionKind.CHECKPOINT_GIVEN_UP,
    "checkpoints",
    GIVEN_UP.sentence,
    50.0,
    cleared=90.0,
    clearance="checkpoints are written again at clock 57",
    times=1,
)
CUT = Condition(ConditionKind.HISTORY_INCOMPLETE, "stage 0 of virtual worker 1", "it ends here", since=55.0, times=1)


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    cluster = Cluster(tmp_path / "run").usual()
    submit(cluster)
    cluster.train()
    return cluster


def tell(cluster: Cluster, *conditions: Condition, shard: str = "ps0", job_id: JobId = JOB_ID) -> None:
    cluster.beat(shard, conditions={job_id: conditions})


def cut(cluster: Cluster) -> None:
    """A stage of virtual worker 1 tells that its history is cut."""
    key = next(key for key in cluster.stages("n1", JOB_ID) if key.stage == 0)
    cluster.tell("n1", KeyedStageReport(key, StageConditions((CUT,))))


class TestWhoTells:
    def test_a_parameter_server(self, cluster: Cluster) -> None:
        tell(cluster, GIVEN_UP)
        (raised,) = events(cluster, ConditionRaised)
        assert (raised.condition, raised.sentence, raised.since) == (GIVEN_UP.kind, GIVEN_UP.sentence, 50.0)
        tell(cluster, WELL)
        assert events(cluster, ConditionCleared) == [], "it comes close behind the other one"
        cluster.wait(3.0)
        (over,) = events(cluster, ConditionCleared)
        assert over.sentence == "checkpoints are written again at clock 57"

    def test_a_stage(self, cluster: Cluster) -> None:
        cut(cluster)
        assert [event.who for event in events(cluster, ConditionRaised)] == [("stage 0 of virtual worker 1",)]

    def test_nobody_who_does_not_serve_the_job(self, cluster: Cluster) -> None:
        tell(cluster, GIVEN_UP, job_id=JobId("another-job"))
        with pytest.raises(PermissionDenied, match="which only parameter servers have"):
            cluster.beat("n0", conditions={JOB_ID: (GIVEN_UP,)})
        assert events(cluster, ConditionRaised) == []


class TestWhereItShows:
    def test_in_the_status(self, cluster: Cluster) -> None:
        tell(cluster, GIVEN_UP)
        cut(cluster)
        status = CoordinatorServicer(cluster.coordinator, host="h").status(JOB_ID)
        assert status.conditions == (GIVEN_UP, CUT)

    def test_in_the_metrics(self, cluster: Cluster) -> None:
        assert read(cluster)["job_conditions", JOB_ID, "checkpoint_given_up"] == 0
        tell(cluster, GIVEN_UP)
        assert read(cluster)["job_conditions", JOB_ID, "checkpoint_given_up"] == 1
        tell(cluster, WELL)
        assert read(cluster)["job_conditions", JOB_ID, "checkpoint_given_up"] == 0

    def test_in_the_result(self, cluster: Cluster) -> None:
        tell(cluster, WELL)
        cut(cluster)
        cluster.finish(JOB_ID)
        (ended,) = events(cluster, JobEnded)
        assert ended.conditions == (WELL, CUT)
        assert ended.result is not None
        assert [one["kind"] for one in ended.result["conditions"]] == ["checkpoint_given_up", "history_incomplete"]


class TestLastWords:
    def fail(self, cluster: Cluster, error: str, sentence: str) -> str:
        key = next(key for key in cluster.stages("n0", JOB_ID) if key.stage == 0)
        cluster.tell("n0", KeyedStageReport(key, StageFailed(error, sentence)))
        cluster.tell("n0", ChildExit(key, 1, 1))
        cluster.wait(10.0)
        assert state(cluster) is JobState.FAILED
        return events(cluster, JobEnded)[0].sentence

    def test_name_the_first_cause(self, cluster: Cluster) -> None:
        tell(cluster, GIVEN_UP)
        told = self.fail(cluster, "CheckpointNotWritten", "the checkpoint at clock 400 was given up")
        assert told.endswith(f"the checkpoint at clock 400 was given up; first cause: {GIVEN_UP.sentence}")

    def test_but_not_that_of_another_failure(self, cluster: Cluster) -> None:
        tell(cluster, GIVEN_UP)
        assert "first cause" not in self.fail(cluster, "ValueError", "the user's loss has the wrong shape")

    def test_a_rewind_says_why_so_much_is_lost(self, cluster: Cluster) -> None:
        cluster.shards.newest_checkpoint = "/run/checkpoints/clock-00000004"
        tell(cluster, GIVEN_UP)
        start = Progress(Clock(4), 1, bytes([0b101, 0, 0, 0, 0]), minibatches=8, samples=32)
        cluster.shards.progress["/run/checkpoints/clock-00000004"] = start
        cluster.shards.serving["shards.host:7001"].clear()
        for _ in range(2):
            cluster.beat("ps1", lost={JOB_ID: "its disk is gone"})
        cluster.train()
        cluster.wait(0.5)
        cluster.train()
        (rewound,) = events(cluster, Rewound)
        assert rewound.sentence.endswith(f"; first cause: {GIVEN_UP.sentence}")


class TestAnotherCoordinator:
    def test_it_is_told_again_by_who_raised_it_and_followers_hear_it_once(self, tmp_path: Path) -> None:
        succession = Succession(tmp_path)
        tell(succession.cluster, GIVEN_UP)
        succession.cluster.wait(0.5)
        succession.replace()
        succession.come("ps0", "ps1", "n0", "n1")
        succession.cluster.wait(1.0)
        assert succession.machine.conditions.current[GIVEN_UP.kind] == 1
        tell(succession.cluster, GIVEN_UP)
        assert len(succession.events(ConditionRaised)) == 1
        tell(succession.cluster, WELL)
        assert len(succession.events(ConditionCleared)) == 1

    def test_also_where_the_store_is_gone_too(self, tmp_path: Path) -> None:
        succession = Succession(tmp_path)
        tell(succession.cluster, GIVEN_UP)
        succession.replace(wiped=True)
        succession.come("ps0", "ps1", "n0", "n1")
        succession.cluster.wait(1.0)
        tell(succession.cluster, GIVEN_UP)
        assert [event.sentence for event in succession.events(ConditionRaised)] == [GIVEN_UP.sentence]


class Away(MemoryStore):
    """A store that can be away."""

    is_away = False

    def renew_lead(self, *arguments: Any, **values: Any) -> None:
        if self.is_away:
            raise StoreUnavailable("Redis at h:6379 does not answer")
        super().renew_lead(*arguments, **values)


class TestRedisAway:
    def test_a_leader_that_holds_tells_every_job_and_when_it_is_over(self, tmp_path: Path) -> None:
        cluster = Cluster(tmp_path / "run").usual()
        store = Away(cluster.clock)
        election = Candidate(store, "c0", clock=cluster.clock, on_lost=lambda _: None)
        election.request_lead()
        before = cluster.coordinator
        cluster.coordinator = Coordinator(
            cluster.store, before._tools, clock=cluster.clock, executor_of=before._jobs.executor_of, election=election
        )
        cluster.registrations.clear()
        cluster.usual()
        submit(cluster)
        cluster.train()

        def wait(seconds: float) -> None:
            for _ in range(round(seconds / 0.5)):
                election.request_lead()
                election.check_lease()
                cluster.wait(0.5)

        wait(2.0)
        assert read(cluster)["store_unreachable",] == 0
        store.is_away = True
        wait(6.0)
        (raised,) = events(cluster, ConditionRaised)
        assert raised.condition is ConditionKind.STORE_UNREACHABLE
        assert "Redis at h:6379 does not answer" in raised.sentence
        assert "restart Redis" in raised.sentence
        assert read(cluster)["store_unreachable",] == 1
        servicer = CoordinatorServicer(cluster.coordinator, host="h")
        assert [one.holds for one in servicer.status(JOB_ID).conditions] == [True]
        store.is_away = False
        wait(1.0)
        (over,) = events(cluster, ConditionCleared)
        assert over.sentence.startswith("Redis answers the coordinator again")
        assert read(cluster)["store_unreachable",] == 0
