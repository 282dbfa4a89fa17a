"""An agent at work: a real coordinator in this process, real child programs, fake shards."""

from __future__ import annotations

import os
import queue
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from hetpipe.clock import SYSTEM_CLOCK
from hetpipe.decide.lifecycle.patience import Patience
from hetpipe.errors import Busy, HetpipeError, MemberReplaced, PeerUnreachable
from hetpipe.server.agent.agent import Agent, AgentConfig
from hetpipe.server.agent.devices import discover_devices
from hetpipe.server.coordinator.control_numbers import Election
from hetpipe.server.coordinator.coordinator import Coordinator
from hetpipe.server.coordinator.servicer import CoordinatorServicer
from hetpipe.storage.memory_store import MemoryStore
from hetpipe.values.commands import ChildExit, StageKey
from hetpipe.values.events import JobEnded, JobState, JobStatus, StateChanged, StopMode
from hetpipe.values.ids import Incarnation, JobId, StageIndex, Term
from hetpipe.values.ids import VirtualWorkerIndex as Vw
from hetpipe.values.members import MemberId, MemberRole, Registration
from hetpipe.wire.calls import (
    GET_STATUS,
    REGISTER,
    STOP_JOB,
    SUBMIT_JOB,
    GetStatusRequest,
    RegisterRequest,
    StopJobRequest,
    SubmitJobRequest,
)
from hetpipe.wire.coordinator_client import CoordinatorClient
from hetpipe.wire.server import Server, ServerConfig
from tests.certs.cluster import AGENT, cluster
from tests.polling import wait_until
from tests.server.agent.programs import ends, environment, fake_programs
from tests.server.coordinator.builders import agent_member, job, shard_member, submission
from tests.server.coordinator.fakes import FakeShards
from tests.support.fake_clock import FakeClock


class Node:
    """A coordinator with its ticker, and one agent running in a thread."""

    def __init__(self, folder: Path, *, lease_seconds: float = 5.0, election: Election | None = None) -> None:
        self.folder = folder
        self.shards = FakeShards()
        self.coordinator = Coordinator(
            MemoryStore(),
            self.shards.tools,
            clock=SYSTEM_CLOCK,
            patience=Patience(settle_seconds=0.2, echo_seconds=1.0),
            lease_seconds=lease_seconds,
            election=election,
        )
        self.server = Server(ServerConfig(num_threads=32))
        CoordinatorServicer(self.coordinator, host="here").add_to(self.server)
        self.address = self.server.start()
        # The fake shards send one heartbeat; their lease is as long as the test.
        registry = self.coordinator._registry
        registry.least_lease_seconds, lease = 1_000.0, registry.least_lease_seconds
        for index in range(2):
            shard = shard_member(index)
            token = self.coordinator.register(shard).registration
            self.coordinator.heartbeat(shard.id, token, clocks={}, jobs=(), last_command=0)
        registry.least_lease_seconds = lease
        self._ended = threading.Event()
        self._ticker = threading.Thread(target=self._tick)
        self._ticker.start()
        self.client = CoordinatorClient(self.address)
        self.outcome: queue.SimpleQueue[HetpipeError | None] = queue.SimpleQueue()
        self.agents: list[Agent] = []
        self._threads: list[threading.Thread] = []

    def _tick(self) -> None:
        while not self._ended.wait(0.05):
            self.coordinator.tick()

    def start_agent(self, *, clock: Any = SYSTEM_CLOCK, **config: Any) -> Agent:
        agent = Agent(
            AgentConfig(
                node="n0",
                host="127.0.0.1",
                pid=os.getpid(),
                coordinator=self.address,
                devices=discover_devices("n0", num_cpu_devices=4),
                environment=environment(),
                programs=fake_programs(self.folder),
                **config,
            ),
            clock=clock,
        )
        agent.start()
        thread = threading.Thread(target=self._run, args=(agent,))
        thread.start()
        self.agents.append(agent)
        self._threads.append(thread)
        return agent

    def _run(self, agent: Agent) -> None:
        try:
            agent.run()
        except HetpipeError as error:
            self.outcome.put(error)
        else:
            self.outcome.put(None)

    def submit(self, behaviour: str, *overrides: str, request_id: str = "0123456789abcdef") -> JobId:
        handed_in = submission(job(*overrides), str(self.folder / "run"), request_id=request_id)
        return self.client.invoke(SUBMIT_JOB, SubmitJobRequest(replace(handed_in, import_path=f"/{behaviour}"))).job_id

    def wait_state(self, state: JobState) -> None:
        for numbered in self.client.watch_job():
            if isinstance(numbered.event, StateChanged) and numbered.event.state is state:
                return
        pytest.fail(f"never {state}: {self.client.invoke(GET_STATUS, GetStatusRequest()).failure}")

    def wait_end(self) -> JobEnded:
        *_, last = self.client.watch_job()
        assert isinstance(last.event, JobEnded)
        return last.event

    def wait_status(self, wanted: Callable[[JobStatus], bool]) -> JobStatus:
        for _ in range(10_000):
            status = self.client.invoke(GET_STATUS, GetStatusRequest())
            if wanted(status):
                return status
        pytest.fail(f"not so: {status}")

    def stage_pids(self) -> list[int]:
        return [
            process.pid
            for process in self.client.invoke(GET_STATUS, GetStatusRequest()).processes
            if process.role == "stage"
        ]

    def close(self) -> None:
        for agent in self.agents:
            agent.stop()
        for thread in self._threads:
            thread.join()
        self._ended.set()
        self._ticker.join()
        self.client.close()
        self.server.stop(grace_seconds=0.0)
        self.coordinator.close()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path)
    yield node
    node.close()


def test_a_job_runs_to_its_end(node: Node) -> None:
    node.start_agent()
    node.submit("done")

    ended = node.wait_end()

    assert ended.state is JobState.FINISHED
    assert ended.result is not None
    assert ended.result["eval"] == {"epoch": 1, "clock": 3, "samples": 10, "loss": 0.5}


def test_one_job_after_the_other(node: Node) -> None:
    node.start_agent()
    for number in range(3):
        node.submit("done", request_id=f"request-{number}")
        assert node.wait_end().state is JobState.FINISHED


def test_mistakes_of_the_model_come_back(node: Node) -> None:
    node.start_agent()
    node.submit("unimportable")

    ended = node.wait_end()

    assert ended.state is JobState.FAILED
    assert ended.problems == ("model: no module named 'model'", "loss: the same")


def test_a_killed_stage_ends_its_virtual_worker_which_begins_a_new_life(node: Node) -> None:
    node.start_agent()
    node.submit("hang")
    node.wait_state(JobState.RUNNING)
    pids = node.stage_pids()
    os.kill(pids[1], signal.SIGKILL)

    assert all(ends(pid) for pid in pids[:2])
    wait_until(lambda: not {0, *pids[:2]} & set(node.stage_pids()), timeout_seconds=20.0, what="new life")
    assert node.stage_pids()[2:] == pids[2:], "nobody else was touched"
    assert not any(ends(pid, timeout_seconds=0.0) for pid in node.stage_pids())


def test_a_stage_that_ends_without_a_word_is_quoted(node: Node) -> None:
    node.start_agent()
    node.submit("fail", "survive.backoff=0s")

    assert node.wait_end().sentence.endswith(
        "ended with exit code 3 before the run did; its last output: ValueError: the last words"
    )


def test_a_stop_now_ends_all_processes(node: Node) -> None:
    node.start_agent()
    node.submit("hang")
    node.wait_state(JobState.RUNNING)
    pids = node.stage_pids()
    node.client.invoke(STOP_JOB, StopJobRequest(StopMode.NOW))

    assert node.wait_end().state is JobState.STOPPED
    assert all(ends(pid) for pid in pids)


def test_an_agent_that_is_stopped_ends_its_children_and_leaves(node: Node) -> None:
    agent = node.start_agent()
    node.submit("hang")
    node.wait_state(JobState.RUNNING)
    pids = node.stage_pids()
    agent.stop()
    assert node.outcome.get(timeout=20.0) is None

    assert all(ends(pid) for pid in pids)
    node.client.invoke(STOP_JOB, StopJobRequest(StopMode.NOW))
    assert node.wait_end().state is JobState.STOPPED


def test_children_of_a_job_that_has_ended_are_ended(node: Node) -> None:
    node.start_agent()
    job_id = node.submit("hang")
    node.wait_state(JobState.RUNNING)
    pids = node.stage_pids()
    with node.coordinator.condition:
        node.coordinator._jobs.remove(job_id)
        node.coordinator._jobs.note_end(job_id)

    assert all(ends(pid) for pid in pids)


def test_an_agent_that_is_told_to_end_lets_its_virtual_workers_leave(node: Node) -> None:
    agent = node.start_agent(drain_seconds=30.0)
    job_id = node.submit("leave")
    node.wait_state(JobState.RUNNING)
    agent.stop()
    wait_until(lambda: node.coordinator._registry.departs(MemberId("n0")), timeout_seconds=10.0, what="departure")
    assert node.outcome.empty()
    (node.folder / "run" / "leave").touch()
    assert node.outcome.get(timeout=20.0) is None
    status = node.client.invoke(GET_STATUS, GetStatusRequest(job_id))
    assert (status.state, status.failure) == (JobState.RUNNING, "")
    assert [(worker.deaths, worker.state) for worker in status.workers] == [(0, "awaiting")] * 2


def test_it_waits_no_longer_than_it_may(node: Node) -> None:
    agent = node.start_agent(drain_seconds=1.0)
    node.submit("hang")
    node.wait_state(JobState.RUNNING)
    pids = node.stage_pids()
    agent.stop()
    assert node.outcome.get(timeout=20.0) is None
    assert all(ends(pid) for pid in pids)


def test_a_forgotten_agent_registers_again_and_keeps_its_children(node: Node) -> None:
    agent = node.start_agent()
    job_id = node.submit("hang")
    node.wait_state(JobState.RUNNING)
    pids, first = node.stage_pids(), agent.registered
    with node.coordinator.condition:
        node.coordinator._registry.remove(MemberId("n0"))
    wait_until(lambda: agent.registered != first, timeout_seconds=10.0, what="registration")
    (told,) = node.coordinator.members_of(MemberRole.AGENT)
    assert [(key.job_id, key.vw, key.stage, key.incarnation) for key in told.stages] == [
        (job_id, vw, stage, 0) for vw in range(2) for stage in range(2)
    ]
    os.kill(pids[0], signal.SIGKILL)
    node.wait_status(lambda status: any(process.state == "exited" for process in status.processes))
    assert not any(ends(pid, timeout_seconds=0.0) for pid in pids[1:])
    node.client.invoke(STOP_JOB, StopJobRequest(StopMode.NOW))
    assert all(ends(pid) for pid in pids)


def test_children_go_on_without_the_coordinator(node: Node) -> None:
    clock = FakeClock()
    node.start_agent(clock=clock)
    node.submit("hang")
    node.wait_state(JobState.RUNNING)
    pids = node.stage_pids()
    with capture_logs() as logs:
        node.server.stop(grace_seconds=0.0)
        clock.advance(100.0)
        wait_until(
            lambda: any(line["event"] == "coordinator_lost" for line in logs), timeout_seconds=10.0, what="remark"
        )
    assert not any(ends(pid, timeout_seconds=0.0) for pid in pids)
    assert node.outcome.empty()


def test_an_agent_may_be_told_to_end_with_its_coordinator(node: Node) -> None:
    clock = FakeClock()
    node.start_agent(clock=clock, exit_with_coordinator=True)
    node.submit("hang")
    node.wait_state(JobState.RUNNING)
    pids = node.stage_pids()
    node.server.stop(grace_seconds=0.0)
    clock.advance(9.9)
    assert not ends(pids[0], timeout_seconds=0.3)
    clock.advance(0.2)
    assert all(ends(pid) for pid in pids)
    error = node.outcome.get(timeout=20.0)
    assert isinstance(error, PeerUnreachable)
    assert str(error).startswith(f"the coordinator at {node.address} has not answered agent n0 for 10.")


def test_an_agent_whose_name_was_taken_ends_for_good(node: Node) -> None:
    node.start_agent()
    node.submit("hang")
    node.wait_state(JobState.RUNNING)
    pids = node.stage_pids()
    node.client.invoke(REGISTER, RegisterRequest(agent_member("n0", pid=1)))

    error = node.outcome.get(timeout=20.0)
    assert isinstance(error, MemberReplaced)
    assert str(error) == "agent n0 (pid 1 on n0.host) has registered as n0; give each process its own name"
    assert all(ends(pid) for pid in pids)


def test_an_agent_without_a_coordinator_does_not_start() -> None:
    config = AgentConfig(
        node="n0", host="h", pid=1, coordinator="127.0.0.1:1", devices=(), environment={}, start_seconds=0.0
    )

    with pytest.raises(PeerUnreachable, match=r"coordinator at 127.0.0.1:1"):
        Agent(config).start()


def test_an_agent_that_does_not_start_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tls = cluster().tls(AGENT)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    config = AgentConfig(
        node="n0", host="h", pid=1, coordinator="127.0.0.1:1", devices=(), environment={}, start_seconds=0.0, tls=tls
    )
    with pytest.raises(PeerUnreachable):
        Agent(config).start()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [PeerUnreachable("away"), Busy("too much to do")])
def test_news_that_did_not_arrive_are_sent_again(error: HetpipeError, monkeypatch: pytest.MonkeyPatch) -> None:
    config = AgentConfig(node="n0", host="h", pid=1, coordinator="127.0.0.1:1", devices=(), environment={})
    agent = Agent(config)
    agent._stopping.set()  # so that it does not rest
    agent._outbox.restart(Registration("r"))
    agent._outbox.put(ChildExit(StageKey(JobId("job"), Vw(0), StageIndex(0), Incarnation(0), Term(1)), 7, 1))
    batch = agent._outbox.take(timeout_seconds=0.0)
    assert batch is not None

    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(agent._client, "invoke", fail)
    agent._send(batch)
    assert agent._outbox.take(timeout_seconds=0.0) is batch
    agent._client.close()
