"""Jobs that nobody leads: who is asked, who is waited for, and who is given up."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hetpipe.decide.lifecycle.adoption import ADOPTED
from hetpipe.decide.lifecycle.orphans import MAX_UNCONFIRMED
from hetpipe.errors import NobodyLeads, PeerUnreachable, ProtocolViolation
from hetpipe.server.coordinator.coordinator import Coordinator
from hetpipe.server.coordinator.servicer import CoordinatorServicer
from hetpipe.storage.memory_store import MemoryStore
from hetpipe.values.commands import (
    ChildExit,
    InspectCommand,
)
from hetpipe.values.events import JobEnded, JobState, StateChanged, WorkerLost
from hetpipe.values.ids import JobId, Term
from hetpipe.wire import coordinator_client
from hetpipe.wire.calls import GET_STATUS, GetStatusRequest
from hetpipe.wire.coordinator_client import CoordinatorClient
from hetpipe.wire.server import Server, ServerConfig
from tests.server.coordinator.builders import JOB_ID, agent_member, clocks, job, shard_member, submission
from tests.server.coordinator.fakes import Cluster, FlakyStore
from tests.server.coordinator.succession import Succession, key


@pytest.fixture
def succession(tmp_path: Path) -> Succession:
    return Succession(tmp_path)


class TestNobodyTells:
    def test_after_a_while_a_job_has_failed_of_which_nobody_knows_what_was_handed_in(
        self, succession: Succession
    ) -> None:
        succession.forget_submission()
        succession.replace()
        succession.come("n0", "n1")
        succession.cluster.wait(59.5)
        assert succession.coordinator.record(JOB_ID).state is JobState.RUNNING
        assert succession.coordinator.is_orphan(JOB_ID)
        succession.cluster.wait(1.0)

        record = succession.coordinator.record(JOB_ID)
        assert record.state is JobState.FAILED
        assert record.failure == (
            f"job {JOB_ID} was running when its coordinator ended, and no parameter server reports it"
        )
        last = succession.cluster.store.events(JOB_ID)[-1].event
        assert isinstance(last, JobEnded)
        assert succession.cluster.beat("n0", jobs=(JOB_ID,)).ended_jobs == (JOB_ID,)
        assert not succession.coordinator.is_orphan(JOB_ID)

    def test_a_clock_shard_that_cannot_be_reached_is_asked_again(self, succession: Succession) -> None:
        succession.cluster.shards.refusals["describe"] = PeerUnreachable("not now")
        succession.succeed(wiped=True)
        for _ in range(100):
            succession.cluster.wait(1.0)
            succession.tell_clocks()
        assert succession.coordinator.is_orphan(JOB_ID)
        assert 90 <= len(succession.asked("describe")) <= 102
        del succession.cluster.shards.refusals["describe"]
        succession.cluster.wait(1.0)
        assert succession.state() is JobState.RUNNING

    def test_one_that_refuses_is_not_asked_for_ever(self, succession: Succession) -> None:
        succession.cluster.shards.refusals["describe"] = ProtocolViolation("it has no document")
        succession.succeed()
        for _ in range(61):
            succession.cluster.wait(1.0)
            succession.tell_clocks()

        assert succession.coordinator.record(JOB_ID).failure == (
            f"job {JOB_ID} was running when its coordinator ended, and a new one cannot lead it: it has no document"
        )

    def test_a_shard_that_does_not_come_back_is_waited_for(self, succession: Succession) -> None:
        succession.replace()
        succession.come("n0", "n1", "ps0")
        succession.cluster.wait(12.0)

        assert succession.state() is JobState.RUNNING
        waits = [event.event.sentence for event in succession.host.events if event.event.kind == "waiting"]
        assert "parameter-server" not in waits[-1]
        assert "ps1 did not register with the new coordinator" in waits[-1]


class TestHandedInAgain:
    def test_it_is_the_same_job(self, succession: Succession) -> None:
        succession.replace(wiped=True)
        succession.submit()
        assert succession.state() is JobState.PENDING
        succession.come("n0", "n1", "ps0", "ps1")
        succession.cluster.executor.run_all()

        assert succession.state() is JobState.RUNNING
        assert succession.cluster.obey() == []
        assert len(succession.asked("configure")) == 2

    def test_nobody_who_may_serve_it_is_given_to_it(self, succession: Succession) -> None:
        succession.replace(wiped=True)
        succession.submit()
        succession.come("n0", "n1", "ps1")
        succession.cluster.join(shard_member(2))
        succession.cluster.wait(40.0)
        assert succession.state() is JobState.PENDING
        succession.come("ps0")

        assert succession.state() is JobState.RUNNING

    def test_a_shard_is_given_to_nobody_before_it_has_told_what_it_serves(self, succession: Succession) -> None:
        succession.replace(wiped=True)
        succession.submit()
        for member in (agent_member("n0", devices=4), shard_member(1), shard_member(0)):
            token = succession.coordinator.register(member).registration
            succession.cluster.registrations[member.id] = token
        assert succession.state() is JobState.PENDING
        succession.cluster.beat("ps1")
        assert succession.state() is JobState.PENDING
        succession.tell_clocks()
        assert succession.state() is JobState.RUNNING

    def test_one_that_is_really_lost_begins_anew(self, succession: Succession) -> None:
        succession.replace(wiped=True)
        succession.submit()
        succession.cluster.usual()

        assert any(isinstance(command, InspectCommand) for command in succession.cluster.obey())


class TestStore:
    def test_one_that_was_wiped_while_the_coordinator_led_learns_the_job_again(self, tmp_path: Path) -> None:
        succession = Succession(tmp_path)
        flaky = FlakyStore(succession.cluster.store)
        succession.cluster.store = flaky
        succession.succeed()
        flaky._behind = MemoryStore(succession.cluster.clock)
        succession.cluster.tell("n1", ChildExit(key(1, 1), 1, -9))
        succession.cluster.train()
        succession.cluster.wait(1.0)

        assert flaky.job(JOB_ID).state is JobState.RUNNING
        assert any(isinstance(event.event, WorkerLost) for event in flaky.events(JOB_ID))
        succession.cluster.finish(JOB_ID)
        succession.cluster.wait(1.0)
        assert flaky.job(JOB_ID).state is JobState.FINISHED

    def test_without_it_nobody_is_adopted_and_nothing_is_lost(self, tmp_path: Path) -> None:
        succession = Succession(tmp_path)
        flaky = FlakyStore(succession.cluster.store)
        succession.cluster.store = flaky
        succession.replace()
        for member in (agent_member("n0", devices=2), shard_member(0)):
            succession.cluster.join(member)
        flaky.away = True
        succession.tell_clocks()
        assert succession.coordinator.is_orphan(JOB_ID)
        flaky.away = False
        succession.cluster.wait(1.0)
        assert succession.state() is JobState.RUNNING


class _Lead:
    outage = ""

    def __init__(self, fence: int) -> None:
        self.fence = fence

    def raise_fence(self, fence: int) -> None:
        self.fence = fence + 1


class TestNumbers:
    def test_every_lead_has_numbers_of_its_own(self, succession: Succession) -> None:
        first = tuple(succession.host.events)
        assert [event.sequence for event in first] == list(range(1, len(first) + 1))
        cluster = succession.cluster
        cluster.new_coordinator = lambda: Coordinator(  # type: ignore[method-assign]
            cluster.store,
            cluster.shards.tools,
            clock=cluster.clock,
            executor_of=lambda _: cluster.executor,
            election=_Lead(3),
        )
        succession.succeed(wiped=True)

        assert [event.sequence for event in succession.host.events][:1] == [2_000_001]


class TestWatchers:
    @pytest.fixture
    def client(self, succession: Succession) -> Iterator[CoordinatorClient]:
        succession.replace()
        server = Server(ServerConfig())
        self.servicer = CoordinatorServicer(succession.coordinator, host="here")
        self.servicer.add_to(server)
        client = CoordinatorClient(server.start())
        yield client
        client.close()
        server.stop(grace_seconds=0.0)

    def test_they_wait_until_somebody_leads_the_job(self, succession: Succession, client: CoordinatorClient) -> None:
        heard: queue.SimpleQueue[Any] = queue.SimpleQueue()
        told = len(succession.cluster.store.events(JOB_ID))

        def watch() -> None:
            for numbered in client.watch_job(JOB_ID, after=told):
                heard.put(numbered)

        watcher = threading.Thread(target=watch)
        watcher.start()
        assert client.invoke(GET_STATUS, GetStatusRequest(JOB_ID)).state is JobState.RUNNING
        succession.come("n0", "n1", "ps0", "ps1")
        assert heard.get(timeout=10.0).event == StateChanged(JobState.RUNNING, ADOPTED)
        succession.cluster.finish(JOB_ID)
        watcher.join()

    def test_or_hear_that_nobody_does(self, succession: Succession, client: CoordinatorClient) -> None:
        succession.forget_submission()
        succession.cluster.wait(61.0)

        last = list(client.watch_job(JOB_ID))[-1].event
        assert isinstance(last, JobEnded)
        assert last.state is JobState.FAILED
        assert list(client.watch_clocks(JOB_ID)) == []

    def test_or_are_told_after_a_while_that_nobody_tells_of_it(
        self, succession: Succession, client: CoordinatorClient, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(coordinator_client, "SILENT_SECONDS", 0.0)
        self.servicer._viewers.close()  # so that every stream ends at once
        told = len(succession.cluster.store.events(JOB_ID))
        sentence = f"nothing about job {JOB_ID} for .* s; its last known state is running: its coordinator ended"

        with pytest.raises(NobodyLeads, match=sentence):
            list(client.watch_job(JOB_ID, after=told))
        with pytest.raises(NobodyLeads, match=sentence):
            list(client.watch_clocks(JOB_ID))
        assert client.invoke(GET_STATUS, GetStatusRequest(JOB_ID)).failure.startswith("its coordinator ended")

    def test_one_that_has_seen_more_gets_what_is_there(self, succession: Succession, client: CoordinatorClient) -> None:
        succession.come("n0", "n1", "ps0", "ps1")

        assert next(client.watch_job(JOB_ID, after=1_000)).sequence == 1
        assert next(client.watch_clocks(JOB_ID)) == clocks(3, 2)


class TestWhoMayTell:
    """A job that nobody leads is told of by its clock shard, and nobody else is believed."""

    def test_another_parameter_server_does_not_get_a_job_led(self, succession: Succession) -> None:
        succession.replace()
        succession.come("ps1", "n0", "n1")
        succession.cluster.beat("ps1", clocks={JOB_ID: replace(clocks(9, 9), term=Term(99))})
        succession.cluster.executor.run_all()
        assert succession.coordinator.is_orphan(JOB_ID)
        assert succession.asked("describe") == [JOB_ID]
        succession.cluster.wait(5.0)
        assert succession.asked("describe") == [JOB_ID], "it is not asked again"

        succession.come("ps0")
        succession.cluster.beat("ps0", clocks={JOB_ID: clocks(3, 2)})
        succession.cluster.executor.run_all()
        assert succession.state() is JobState.RUNNING

    def test_a_run_that_is_made_up_is_not_led(self, succession: Succession) -> None:
        succession.replace(wiped=True)
        made_up = replace(succession.run, submission=replace(succession.run.submission, request_id="another-request"))
        succession.describe(run=made_up)
        succession.come("ps0")
        succession.cluster.beat("ps0", clocks={JOB_ID: clocks(3, 2)})
        succession.cluster.executor.run_all()
        assert succession.coordinator.host(JOB_ID) is None
        assert succession.coordinator.is_orphan(JOB_ID)

    def test_one_that_cannot_be_reached_does_not_stand_before_the_right_one(self, succession: Succession) -> None:
        succession.replace()
        succession.come("ps0", "ps1")
        succession.cluster.shards.dead.add("shards.host:7001")
        succession.cluster.beat("ps1", clocks={JOB_ID: replace(clocks(9, 9), term=Term(99))})
        succession.cluster.beat("ps0", clocks={JOB_ID: clocks(3, 2)})
        for _ in range(4):
            succession.cluster.executor.run_all()
            succession.cluster.wait(1.0)
            succession.cluster.beat("ps1", clocks={JOB_ID: replace(clocks(9, 9), term=Term(99))})
            succession.cluster.beat("ps0", clocks={JOB_ID: clocks(3, 2)})
        assert succession.state() is JobState.RUNNING

    def test_jobs_that_a_member_makes_up_keep_nobody_else_waiting(self, tmp_path: Path) -> None:
        cluster = Cluster(tmp_path / "run").usual()
        cluster.join(agent_member("n2", devices=4))
        cluster.wait(61.0)
        for number in range(3):
            cluster.beat("n2", jobs=tuple(JobId(f"made-up-{number}-{i}") for i in range(90)))
        cluster.coordinator.submit_job(submission(job(), str(cluster.run_dir)))
        cluster.train()
        assert cluster.coordinator.record(JOB_ID).state is JobState.RUNNING
        host = cluster.coordinator.host(JOB_ID)
        assert host is not None
        assert {agent.agent for agent in host.machine.agents} == {"n0", "n1"}
        assert len(list(cluster.coordinator._orphans)) <= MAX_UNCONFIRMED

    def test_news_of_another_agents_stage_are_dropped_when_the_job_is_led(self, succession: Succession) -> None:
        succession.replace()
        succession.come("n0", "n1")
        # Told while nobody leads the job, and so not refused yet.
        succession.cluster.tell("n1", ChildExit(key(0, 0), 1, -9))
        succession.come("ps0", "ps1")
        succession.cluster.executor.run_all()
        assert succession.state() is JobState.RUNNING
        life = succession.machine.stages.get(key(0, 0))
        assert life is not None
        assert not life.exited
