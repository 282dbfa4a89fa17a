"""The coordinator behind a real server: typed calls, streams, heartbeats, the user's client."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hetpipe import __version__
from hetpipe.client import AsyncClient, Client
from hetpipe.errors import (
    JobError,
    MemberReplaced,
    PeerUnreachable,
    PermissionDenied,
    ProtocolViolation,
    UnknownJob,
    UnknownMember,
    UserError,
)
from hetpipe.runs.run_folder import RunFolder
from hetpipe.server.coordinator import servicer
from hetpipe.server.coordinator.servicer import CoordinatorServicer
from hetpipe.server.member_session import Hooks, MemberSession
from hetpipe.values.commands import AgentReport, ChildExit, InspectCommand, KeyedStageReport, StopJobCommand
from hetpipe.values.conditions import Condition, ConditionKind
from hetpipe.values.events import (
    ConditionRaised,
    JobEnded,
    JobEvent,
    JobState,
    ProgressTable,
    StateChanged,
    StopMode,
    Submission,
)
from hetpipe.values.ids import AgentId, JobId
from hetpipe.values.ids import VirtualWorkerIndex as Vw
from hetpipe.values.members import Lease, MemberId, MemberInfo, MemberRole, Registration
from hetpipe.values.run import StageReady
from hetpipe.wire.calls import (
    ADD_WORKER,
    DEPART,
    DRAIN_WORKER,
    GET_CLOCKS,
    GET_STATUS,
    HEARTBEAT,
    LEAVE,
    LIST_MEMBERS,
    MOVE_WORKER,
    REGISTER,
    REPORT,
    STOP_JOB,
    SUBMIT_JOB,
    WATCH_COMMANDS,
    AddWorkerRequest,
    DepartRequest,
    DrainWorkerRequest,
    GetClocksRequest,
    GetStatusRequest,
    HeartbeatRequest,
    LeaveRequest,
    ListMembersRequest,
    MoveWorkerRequest,
    RegisterRequest,
    ReportRequest,
    StopJobRequest,
    SubmitJobRequest,
    WatchCommandsRequest,
)
from hetpipe.wire.coordinator_client import CoordinatorClient, all_members, new_request_id
from hetpipe.wire.server import Server, ServerConfig
from tests.server.coordinator.builders import JOB_ID, agent_member, clocks, job, submission
from tests.server.coordinator.fakes import Cluster
from tests.support.fake_clock import FakeClock


class Network:
    """A cluster whose coordinator listens, and a client of it. Its time moves by hand."""

    def __init__(self, run_dir: Path) -> None:
        self.cluster = Cluster(run_dir).usual()
        self.server = Server(ServerConfig(num_threads=16))
        CoordinatorServicer(self.cluster.coordinator, host="here").add_to(self.server)
        self.address = self.server.start()
        self.client = CoordinatorClient(self.address)

    def submit(self) -> JobId:
        return self.client.invoke(SUBMIT_JOB, SubmitJobRequest(submission(job(), str(self.cluster.run_dir)))).job_id

    def close(self) -> None:
        self.client.close()
        self.server.stop(grace_seconds=0.0)


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    network = Network(tmp_path / "run")
    yield network
    network.close()


class TestCalls:
    def test_membership(self, network: Network) -> None:
        client = network.client
        worker = MemberInfo(MemberRole.WORKER, MemberId("w"), "h", 1, "h:5")
        lease = client.invoke(REGISTER, RegisterRequest(worker))
        assert lease.lease_seconds == 5.0
        assert [member.info for member in client.invoke(LIST_MEMBERS, ListMembersRequest()).members][-1] == worker
        network.cluster.coordinator._jobs.note_end(JobId("gone"))
        assert client.invoke(HEARTBEAT, HeartbeatRequest(worker.id, lease.registration)).ended_jobs == ()
        with pytest.raises(PermissionDenied, match="the heartbeat of a user's own worker reports jobs"):
            client.invoke(HEARTBEAT, HeartbeatRequest(worker.id, lease.registration, jobs=(JobId("gone"),)))
        client.invoke(LEAVE, LeaveRequest(worker.id, lease.registration))
        client.invoke(LEAVE, LeaveRequest(worker.id, lease.registration))
        with pytest.raises(UnknownMember):
            client.invoke(HEARTBEAT, HeartbeatRequest(worker.id, lease.registration))

    def test_members_come_in_pages(self, network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(servicer, "MEMBERS_PER_PAGE", 3)
        everyone = [member.info.id for member in network.cluster.coordinator.members()]
        assert len(everyone) == 4
        first = network.client.invoke(LIST_MEMBERS, ListMembersRequest())
        assert ([member.info.id for member in first.members], first.has_more) == (everyone[:3], True)
        assert [member.info.id for member in all_members(network.client)] == everyone

    def test_jobs(self, network: Network) -> None:
        job_id = network.submit()
        assert job_id == JOB_ID
        network.cluster.train()
        status = network.client.invoke(GET_STATUS, GetStatusRequest())
        assert (status.job_id, status.name, status.state) == (JOB_ID, "digits", JobState.RUNNING)
        assert status.run_dir == str(network.cluster.run_dir)
        assert [(p.role, p.index, p.vw, p.state) for p in status.processes] == [
            ("coordinator", 0, None, "up"),
            ("parameter_server", 0, None, "up"),
            ("parameter_server", 1, None, "up"),
            ("agent", 0, None, "up"),
            ("agent", 1, None, "up"),
            ("stage", 0, 0, "ready"),
            ("stage", 1, 0, "ready"),
            ("stage", 0, 1, "ready"),
            ("stage", 1, 1, "ready"),
        ]
        assert network.client.invoke(STOP_JOB, StopJobRequest(StopMode.NOW)).state is JobState.STOPPING

    def test_a_peer_of_another_format_is_told_so(self, network: Network) -> None:
        older = replace(GET_STATUS, service="hetpipe.proto.v1.CoordinatorService")
        with pytest.raises(ProtocolViolation, match=f"does not implement GetStatus; it may .*hetpipe {__version__}"):
            network.client.invoke(older, GetStatusRequest())

    @pytest.mark.parametrize(("version", "told"), [("0.0.9", "hetpipe 0.0.9"), ("", "an earlier hetpipe")])
    def test_a_member_of_another_version_is_refused(self, network: Network, version: str, told: str) -> None:
        worker = MemberInfo(MemberRole.WORKER, MemberId("w"), "h", 1, "h:5")
        with pytest.raises(ProtocolViolation, match=f"runs {told}, and the coordinator hetpipe {__version__}"):
            network.client.invoke(REGISTER, RegisterRequest(worker, version))
        members = network.client.invoke(LIST_MEMBERS, ListMembersRequest()).members
        assert worker.id not in [member.info.id for member in members]

    def test_errors_come_through(self, network: Network) -> None:
        with pytest.raises(JobError) as caught:
            network.client.invoke(SUBMIT_JOB, SubmitJobRequest(Submission(new_request_id(), "{}", "/run", "/code")))
        assert len(caught.value.problems) > 2
        with pytest.raises(UnknownJob):
            network.client.invoke(GET_STATUS, GetStatusRequest(JobId("nonsense")))
        with pytest.raises(UnknownJob):
            next(network.client.watch_job())
        with pytest.raises(UnknownJob):
            next(network.client.watch_clocks(JobId("nonsense")))
        assert network.client.invoke(GET_STATUS, GetStatusRequest()).job_id is None

    def test_reports_reach_the_job(self, network: Network) -> None:
        network.submit()
        network.cluster.train()
        agent, registration = AgentId("n0"), network.cluster.registrations["n0"]
        key = network.cluster.stages("n0", JOB_ID)[0]
        reports: list[AgentReport] = [KeyedStageReport(key, StageReady(77)), ChildExit(key, 77, -9)]
        network.client.invoke(REPORT, ReportRequest(agent, registration, 100, tuple(reports)))

        workers = network.client.invoke(GET_STATUS, GetStatusRequest()).workers
        assert [(worker.vw, worker.state, worker.deaths) for worker in workers] == [(0, "ending", 1), (1, "ready", 0)]

    def test_layers_of_a_virtual_worker_move(self, network: Network) -> None:
        job_id = network.submit()
        network.cluster.train()
        moving = network.client.invoke(MOVE_WORKER, MoveWorkerRequest(Vw(1), (3, 1), job_id))
        assert (moving.worker.state, moving.layers) == ("ready", (2, 2))
        with pytest.raises(UserError, match="has 3 layers for virtual worker 0, but the model has 4"):
            network.client.invoke(MOVE_WORKER, MoveWorkerRequest(Vw(0), (2, 1)))
        with pytest.raises(ProtocolViolation, match=r"layers\.1"):
            network.client.invoke(MOVE_WORKER, MoveWorkerRequest(Vw(0), (4, 0)))

    def test_virtual_workers_leave_and_come_back(self, network: Network) -> None:
        job_id = network.submit()
        network.cluster.train()
        assert network.client.invoke(DRAIN_WORKER, DrainWorkerRequest(Vw(1))).state == "leaving"
        with pytest.raises(UserError, match="is the last one"):
            network.client.invoke(DRAIN_WORKER, DrainWorkerRequest(Vw(0), job_id))
        assert [(one.vw, one.state) for one in network.client.invoke(ADD_WORKER, AddWorkerRequest()).workers] == [
            (1, "leaving")
        ]
        assert network.client.invoke(ADD_WORKER, AddWorkerRequest(Vw(0), job_id)).workers[0].state == "ready"
        network.client.invoke(DEPART, DepartRequest(AgentId("n0"), network.cluster.registrations["n0"]))

        assert [worker.state for worker in network.client.invoke(GET_STATUS, GetStatusRequest()).workers] == [
            "leaving",
            "leaving",
        ]
        with pytest.raises(UnknownMember):
            network.client.invoke(DEPART, DepartRequest(AgentId("n7"), Registration("x")))


class TestStreams:
    def test_a_job_is_watched_from_its_beginning_to_its_end(self, network: Network) -> None:
        job_id = network.submit()
        seen: list[object] = []
        running = threading.Event()

        def watch() -> None:
            for numbered in network.client.watch_job(job_id):
                seen.append(numbered.event)
                if isinstance(numbered.event, ProgressTable):
                    running.set()

        watcher = threading.Thread(target=watch)
        watcher.start()
        network.cluster.train()
        network.cluster.wait(2.0)
        assert running.wait(5.0)
        network.cluster.finish(job_id)
        watcher.join(5.0)

        states = [event.state.value for event in seen if isinstance(event, StateChanged)]
        assert states == ["inspecting", "planning", "starting", "running", "finished"]
        assert isinstance(seen[-1], JobEnded)
        assert seen[-1].result is not None

    def test_a_late_watcher_sees_everything_and_one_who_knows_more_only_the_rest(self, network: Network) -> None:
        job_id = network.submit()
        network.cluster.train()
        network.cluster.finish(job_id)

        events = list(network.client.watch_job())
        assert [event.sequence for event in events] == list(range(1, len(events) + 1))
        assert list(network.client.watch_job(after=3)) == events[3:]

    def test_an_agent_follows_its_commands(self, network: Network) -> None:
        registration = network.cluster.registrations["n0"]
        commands = network.client.stream(WATCH_COMMANDS, WatchCommandsRequest(AgentId("n0"), registration, 0))
        network.submit()
        first = next(commands)
        assert isinstance(first.command, InspectCommand)
        network.client.invoke(STOP_JOB, StopJobRequest(StopMode.NOW))
        assert isinstance(next(commands).command, StopJobCommand)
        again = network.client.stream(WATCH_COMMANDS, WatchCommandsRequest(AgentId("n0"), registration, first.sequence))
        assert isinstance(next(again).command, StopJobCommand)
        assert list(commands) == []

    def test_a_stream_ends_when_its_registration_is_replaced(self, network: Network) -> None:
        network.submit()
        commands = network.client.stream(
            WATCH_COMMANDS, WatchCommandsRequest(AgentId("n0"), network.cluster.registrations["n0"], 0)
        )
        next(commands)
        network.cluster.join(agent_member("n0", devices=2))

        with pytest.raises(UnknownMember, match="newer registration"):
            next(commands)

    def test_streams_end_at_once_with_the_server(self, network: Network) -> None:
        network.submit()
        events = network.client.watch_job()
        next(events)
        network.server.stop(grace_seconds=5.0)

        with pytest.raises(PeerUnreachable):
            list(events)

    def test_clocks_are_watched_until_the_job_ends(self, network: Network) -> None:
        job_id = network.submit()
        network.cluster.train()
        assert network.client.invoke(GET_CLOCKS, GetClocksRequest()).clocks is None
        network.cluster.beat("ps0", clocks={job_id: clocks(1, 1)})
        watch = network.client.watch_clocks()
        assert next(watch) == clocks(1, 1)
        network.cluster.beat("ps0", clocks={job_id: clocks(1, 1)})
        network.cluster.beat("ps0", clocks={job_id: clocks(2, 1)})
        assert next(watch) == clocks(2, 1)
        network.cluster.finish(job_id)
        assert list(watch) == [network.cluster.shards.last_clocks]
        assert network.client.invoke(GET_CLOCKS, GetClocksRequest()).clocks == network.cluster.shards.last_clocks

    def test_lost_safety_goes_from_a_heartbeat_to_followers_and_status(self, network: Network) -> None:
        job_id = network.submit()
        network.cluster.train()
        full = Condition(ConditionKind.DISK_NEARLY_FULL, "the disk at /", "it is nearly full", since=5.0, times=1)
        registration = network.cluster.registrations["ps0"]
        network.client.invoke(
            HEARTBEAT, HeartbeatRequest(MemberId("ps0"), registration, jobs=(job_id,), conditions={job_id: (full,)})
        )
        assert network.client.invoke(GET_STATUS, GetStatusRequest(job_id)).conditions == (full,)
        told = next(numbered.event for numbered in network.client.watch_job(job_id) if _is_raised(numbered.event))
        assert told == ConditionRaised(full.kind, (full.who,), full.sentence, 5.0, 1)


def _is_raised(event: JobEvent) -> bool:
    return isinstance(event, ConditionRaised)


class TestMembership:
    def member(self, network: Network, hooks: Hooks | None = None) -> MemberSession:
        info = MemberInfo(MemberRole.WORKER, MemberId("w"), "h", 1)
        return MemberSession(network.client, info, hooks=hooks, clock=network.cluster.clock)

    def test_it_registers_and_leaves(self, network: Network) -> None:
        membership = self.member(network)
        membership.start()
        assert "w" in [member.info.id for member in network.client.invoke(LIST_MEMBERS, ListMembersRequest()).members]
        membership.close()
        assert "w" not in [
            member.info.id for member in network.client.invoke(LIST_MEMBERS, ListMembersRequest()).members
        ]

    def test_a_heartbeat_tells_how_long_leases_are_now(self, network: Network) -> None:
        membership = self.member(network)
        membership.start()
        network.cluster.coordinator._registry.least_lease_seconds = 9.0
        membership.beat()
        assert membership.lease.lease_seconds == 9.0
        membership.close()

    def test_a_heartbeat_tells_and_hears(self, network: Network) -> None:
        network.cluster.coordinator._jobs.note_end(JobId("gone"))
        ended: list[JobId] = []
        leases: list[Lease] = []
        hooks = Hooks(jobs=lambda: [JobId("gone")], on_ended_jobs=ended.extend, on_registered=leases.append)
        membership = MemberSession(network.client, agent_member("n7"), hooks=hooks, clock=network.cluster.clock)
        membership.start()
        membership.beat()
        membership.close()

        assert set(ended) == {"gone"}
        assert leases == [membership.lease]

    def test_a_heartbeat_tells_what_endangers_the_jobs(self, network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
        sent: list[object] = []
        invoke = network.client.invoke

        def recording(call: Any, request: Any) -> Any:
            if isinstance(request, HeartbeatRequest):
                sent.append(request.conditions)
            return invoke(call, request)

        monkeypatch.setattr(network.client, "invoke", recording)
        away = Condition(ConditionKind.DURABILITY_LOST, "parameter server 0", "no room", since=5.0, times=1)
        membership = self.member(network, Hooks(conditions=lambda: {JOB_ID: (away,)}))
        membership.start()
        membership.beat()
        membership.close()
        assert {JOB_ID: (away,)} in sent

    def test_it_registers_again_when_it_was_forgotten(self, network: Network) -> None:
        leases: list[Lease] = []
        membership = self.member(network, Hooks(on_registered=leases.append))
        first = membership.start()
        network.client.invoke(LEAVE, LeaveRequest(MemberId("w"), first.registration))
        membership.beat()
        assert membership.lease.registration != first.registration
        assert leases[0] == first
        assert leases[-1] == membership.lease
        membership.close()

    def test_silence_is_measured(self, network: Network) -> None:
        membership = self.member(network)
        membership.start()
        membership.abandon()
        network.cluster.clock.advance(3.0)
        assert membership.silent_seconds == 3.0
        network.server.stop(grace_seconds=0.0)
        membership.beat()
        assert membership.silent_seconds == 3.0

    def test_a_coordinator_that_is_not_there_is_waited_for(self) -> None:
        clock = FakeClock(auto_advance=True)
        client = CoordinatorClient("127.0.0.1:1", clock=clock)
        membership = MemberSession(client, MemberInfo(MemberRole.WORKER, MemberId("w"), "h", 1), clock=clock)

        with pytest.raises(PeerUnreachable, match=r"coordinator at 127.0.0.1:1 cannot be reached: Register"):
            membership.start(wait_seconds=1.0)
        assert clock.monotonic() >= 1.0
        client.close()


class TestClient:
    def test_a_worker_registers_for_the_length_of_a_block(self, network: Network) -> None:
        with Client(network.address) as client:
            with client.register_worker("mine", address="h:1") as worker:
                assert worker.id == "mine"
                assert worker.lease.lease_seconds == 5.0
                [member] = [member for member in client.members() if member.info.role is MemberRole.WORKER]
                assert (member.info.id, member.info.address) == ("mine", "h:1")
            assert "mine" not in [member.info.id for member in client.members()]
            with pytest.raises(UserError):
                client.register_worker("")

    def test_who_loses_the_name_gets_an_exception(self, network: Network) -> None:
        def lose() -> None:
            with Client(network.address) as client, client.register_worker("mine") as worker:
                worker.check()
                with closing(CoordinatorClient(network.address)) as other:
                    other.invoke(
                        REGISTER, RegisterRequest(MemberInfo(MemberRole.WORKER, MemberId("mine"), "elsewhere", 1))
                    )
                    worker._membership.beat()
                    with pytest.raises(MemberReplaced, match="has registered as mine"):
                        worker.check()

        with pytest.raises(MemberReplaced, match="has registered as mine"):
            lose()

    def test_who_asks_for_it_is_called_when_the_name_is_lost(self, network: Network) -> None:
        lost: list[MemberReplaced] = []
        with (
            Client(network.address) as client,
            client.register_worker("mine", on_lost=lost.append) as worker,
            closing(CoordinatorClient(network.address)) as other,
        ):
            other.invoke(REGISTER, RegisterRequest(MemberInfo(MemberRole.WORKER, MemberId("mine"), "elsewhere", 1)))
            worker._membership.beat()
            assert ["has registered as mine" in str(error) for error in lost] == [True]

    def test_clocks_are_asked_for(self, network: Network) -> None:
        job_id = network.submit()
        network.cluster.train()
        with Client(network.address) as client:
            with pytest.raises(UnknownJob, match="no clocks yet"):
                client.clocks()
            network.cluster.beat("ps0", clocks={job_id: clocks(4, 2)})
            assert client.clocks(job_id) == clocks(4, 2)
            assert (client.local_clock(0), client.local_clock(1), client.global_clock()) == (4, 2, 2)
            with pytest.raises(UserError, match=r"virtual worker 7 is not one of \[0, 1\]"):
                client.local_clock(7)
            assert next(client.watch_clocks()) == clocks(4, 2)

    def test_a_job_is_submitted_followed_and_stopped(self, network: Network, tmp_path: Path) -> None:
        with Client(network.address) as client:
            assert client.status().state is None
            with pytest.raises(UnknownJob, match="has no job yet: there is nothing to stop"):
                client.stop()
            with pytest.raises(JobError, match="epochs"):
                client.submit(job(), run_dir=tmp_path / "other", epochs=0)
            job_id = client.submit(job(), run_dir=tmp_path / "mine", epochs=3)
            status = client.status(job_id)
            assert (status.name, status.run_dir) == ("digits", str(tmp_path / "mine"))
            submission = RunFolder(tmp_path / "mine").read_submission()
            assert submission is not None
            assert json.loads(submission.job_json)["epochs"] == 3
            assert RunFolder(tmp_path / "mine").read_record().job_id == job_id
            assert client.stop(now=True).state is JobState.STOPPING

    def test_events_are_those_of_the_job(self, network: Network) -> None:
        job_id = network.submit()
        network.cluster.train()
        network.cluster.finish(job_id)
        with Client(network.address) as client:
            assert list(client.events()) == [event.event for event in network.client.watch_job(job_id)]
            assert client.stop().state is JobState.FINISHED

    def test_a_running_job_stops_at_a_barrier(self, network: Network) -> None:
        job_id = network.submit()
        network.cluster.train()
        with Client(network.address) as client:
            assert client.stop(job_id).state is JobState.STOPPING

    def test_the_same_without_blocking_an_event_loop(self, network: Network) -> None:
        async def use() -> list[JobEvent]:
            async with AsyncClient(network.address) as client:
                job_id = await client.submit(job(), run_dir=network.cluster.run_dir)
                assert (await client.status(job_id)).name == "digits"
                assert [member.info.id for member in await client.members()][:2] == ["n0", "n1"]
                events = client.events(job_id)
                first = await anext(events)
                await asyncio.to_thread(network.cluster.train)
                await asyncio.to_thread(network.cluster.finish, job_id)
                assert (await client.stop()).state is JobState.FINISHED
                return [first, *[event async for event in events]]

        *_, last = asyncio.run(use())
        assert isinstance(last, JobEnded)

    def test_clocks_in_an_event_loop(self, network: Network) -> None:
        job_id = network.submit()
        network.cluster.train()
        network.cluster.beat("ps0", clocks={job_id: clocks(4, 2)})

        async def use() -> None:
            async with AsyncClient(network.address) as client:
                assert await client.clocks(job_id) == clocks(4, 2)
                assert (await client.local_clock(0), await client.global_clock()) == (4, 2)
                async for snapshot in client.watch_clocks(job_id):
                    assert snapshot == clocks(4, 2)
                    break
                (await client.register_worker("mine")).close()

        asyncio.run(use())

    def test_an_address_must_be_one(self) -> None:
        with pytest.raises(UserError, match="HOST:PORT"):
            Client("nowhere")


def test_history_of_an_earlier_coordinator_is_shown(network: Network) -> None:
    job_id = network.submit()
    network.cluster.train()
    network.cluster.finish(job_id)
    successor = network.cluster.new_coordinator()
    server = Server(ServerConfig())
    CoordinatorServicer(successor, host="here").add_to(server)
    client = CoordinatorClient(server.start())

    assert client.invoke(GET_STATUS, GetStatusRequest(job_id)).state is JobState.FINISHED
    assert isinstance(list(client.watch_job(job_id))[-1].event, JobEnded)
    assert client.invoke(GET_CLOCKS, GetClocksRequest(job_id)).clocks is None
    assert list(client.watch_clocks(job_id)) == []
    client.close()
    server.stop(grace_seconds=0.0)


def test_the_coordinator_needs_neither_torch_nor_user_code() -> None:
    probe = "import sys, hetpipe.server.coordinator.main; print(sorted({'torch', 'numpy', 'redis'} & set(sys.modules)))"
    answer = subprocess.run(
        [sys.executable, "-c", probe],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    assert answer.stdout.strip() == "[]"


def test_a_resent_submission_over_the_network_is_one_job(network: Network) -> None:
    handed_in = submission(job(), str(network.cluster.run_dir))

    assert network.client.invoke(SUBMIT_JOB, SubmitJobRequest(handed_in)) == network.client.invoke(
        SUBMIT_JOB, SubmitJobRequest(replace(handed_in))
    )
