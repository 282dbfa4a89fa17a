"""Stages come together: through the clock shard, over the links that they choose, and with nobody else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

from hetpipe.errors import DeadlineExceeded, PeerUnreachable, StaleIncarnation, UserError
from hetpipe.job.file import Job
from hetpipe.link.gloo import GlooLink
from hetpipe.link.policy import Frame, FrameKind, Link
from hetpipe.link.stream_link import StreamLink
from hetpipe.observe.history import NullHistory
from hetpipe.server.agent import meeting
from hetpipe.server.agent.meeting import Neighbours
from hetpipe.server.agent.stage_assembly import requester_of
from hetpipe.server.shard.in_process import clock_calls
from hetpipe.server.shard.job_shard import JobShard
from hetpipe.values.ids import AgentId, DeviceId, Incarnation, LayerIndex, StageIndex, Term
from hetpipe.values.ids import VirtualWorkerIndex as Vw
from hetpipe.values.plan import Plan, StagePlan, VirtualWorkerPlan
from hetpipe.values.run import DeviceConfig, StageConfig
from hetpipe.wire import segment_server
from hetpipe.wire.call import Calls
from hetpipe.wire.calls import JOIN, JoinRequest
from hetpipe.wire.serving import Handlers
from hetpipe.wire.tls import Tls
from tests.certs.cluster import cluster, stage_peer
from tests.server.coordinator.builders import job
from tests.server.shard.builders import JOB, shard_config
from tests.support.fake_clock import FakeClock

#: The device of every stage, virtual worker by virtual worker.
Devices = Sequence[Sequence[str]]
_SECONDS = 20.0


def configs(devices: Devices, *, link: str = "auto", kind: str = "wsp") -> list[StageConfig]:
    """All stages of a job, in order."""
    workers = tuple(
        VirtualWorkerPlan(
            Vw(vw),
            tuple(
                StagePlan(AgentId(device[:2]), DeviceId(device), LayerIndex(index), LayerIndex(index + 1))
                for index, device in enumerate(own)
            ),
        )
        for vw, own in enumerate(devices)
    )
    plan = Plan(JOB, Term(1), workers, (), 1)
    wanted = job(f"link={link}", f"sync.kind={kind}", "sync.minibatches_per_wave=2", "weights=flush")
    return [
        StageConfig(
            job=wanted.model_dump(mode="json"),
            plan=plan,
            vw=Vw(vw),
            stage=StageIndex(index),
            incarnation=Incarnation(0),
            device=DeviceConfig("cpu"),
            shard_addresses=(),
            run_dir="",
            import_path="",
            host="127.0.0.1",
        )
        for vw, own in enumerate(devices)
        for index in range(len(own))
    ]


def meet(config: StageConfig, shard: Calls, **options: Any) -> Neighbours:
    return meeting.meet(Job.model_validate(config.job), config, shard, **options)


def clock_shard(devices: Devices) -> Handlers:
    return clock_calls(JobShard(shard_config((), stages=[len(own) for own in devices]), NullHistory()))


def own_tls(config: StageConfig) -> Tls:
    return cluster().tls(stage_peer(JOB, config.vw, config.stage))


def no_tls(_: StageConfig) -> None:
    return None


def all_meet(devices: Devices, *, tls: Callable[[StageConfig], Tls | None] = no_tls, **job: str) -> list[Neighbours]:
    shard = clock_shard(devices)
    stages = configs(devices, **job)
    with ThreadPoolExecutor(len(stages)) as threads:
        met: list[Future[Neighbours]] = [threads.submit(meet, config, shard, tls=tls(config)) for config in stages]
    return [future.result() for future in met]


def leave(stages: Sequence[Neighbours]) -> None:
    with ThreadPoolExecutor(len(stages)) as threads:
        list(threads.map(Neighbours.close, stages))


def carry(sender: Link | None, receiver: Link | None) -> None:
    assert sender is not None
    assert receiver is not None
    sender.send(Frame(FrameKind.FORWARD, 1, 0, 0, (torch.ones(2),)), deadline_seconds=_SECONDS)
    assert receiver.receive(timeout_seconds=_SECONDS).minibatch == 1


@pytest.mark.parametrize(
    ("link", "made"), [("auto", (GlooLink, StreamLink)), ("grpc", (StreamLink, StreamLink)), ("gloo", (GlooLink,) * 2)]
)
def test_three_stages_find_their_neighbours(link: str, made: tuple[type[object], type[object]]) -> None:
    stages = all_meet([["n0/0", "n1/0", "n1/1"]], link=link)
    first, middle, last = stages
    assert (first.upstream, last.downstream, last.link) == (None, None, None)
    assert isinstance(first.downstream, made[0])
    assert isinstance(middle.upstream, made[0])
    assert isinstance(middle.downstream, made[1])
    assert isinstance(last.upstream, made[1])
    assert middle.upstream is not None
    assert (middle.upstream.own, middle.upstream.peer) == ("stage 1 of virtual worker 0", "stage 0 of virtual worker 0")
    carry(first.downstream, middle.upstream)
    carry(last.upstream, middle.downstream)
    leave(stages)


def test_with_tls_what_leaves_a_node_is_encrypted() -> None:
    stages = all_meet([["n0/0", "n0/1", "n1/0"]], tls=own_tls)
    first, middle, last = stages
    assert isinstance(first.downstream, StreamLink)
    assert isinstance(middle.downstream, StreamLink)
    assert str(first.link) == "shared memory: it is the fastest, and both stages are on one node"
    assert "on different nodes" in str(middle.link)
    carry(first.downstream, middle.upstream)
    carry(middle.downstream, last.upstream)
    leave(stages)


@pytest.fixture
def no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A system without sealed memory files."""

    def none(*_: object) -> int:
        raise OSError("no memfds")

    monkeypatch.setattr(segment_server, "make_segment", none)


@pytest.mark.usefixtures("no_memory")
def test_where_memory_cannot_be_shared_the_link_is_grpc_and_says_why() -> None:
    first, last = all_meet([["n0/0", "n0/1"]])
    assert str(first.link) == "grpc: memory cannot be shared: this process cannot share memory"
    carry(first.downstream, last.upstream)
    carry(last.upstream, first.downstream)
    leave([first, last])


@pytest.mark.usefixtures("no_memory")
def test_memory_that_the_job_demands_and_that_cannot_be_shared_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "MEETING_SECONDS", _SECONDS)
    shard = clock_shard([["n0/0", "n0/1"]])
    with ThreadPoolExecutor(2) as threads:
        first, last = (threads.submit(meet, each, shard) for each in configs([["n0/0", "n0/1"]], link="shared_memory"))
        with pytest.raises(UserError, match="cannot share memory with stage 0"):
            last.result()
        with pytest.raises(PeerUnreachable, match="left while it was offered memory"):
            first.result()


def test_memory_that_the_job_demands_is_shared_within_a_node() -> None:
    first, last = all_meet([["n0/0", "n0/1"]], link="shared_memory")
    assert str(first.link) == "shared memory: set by the job"
    carry(first.downstream, last.upstream)
    leave([first, last])


def test_one_stage_meets_nobody() -> None:
    (alone,) = all_meet([["n0/0"]])
    assert (alone.upstream, alone.downstream, alone.replicas, alone.link) == (None, None, None, None)


def test_replicas_meet_stage_by_stage() -> None:
    stages = all_meet([["n0/0", "n0/1"], ["n1/0", "n1/1"]], kind="allreduce")
    sums = [torch.full((2,), float(index)) for index in range(4)]

    def add_up(index: int) -> None:
        replicas = stages[index].replicas
        assert replicas is not None
        replicas.sum_([sums[index]])

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(add_up, range(4)))
    assert [int(tensor[0]) for tensor in sums] == [0 + 2, 1 + 3, 0 + 2, 1 + 3]
    leave(stages)


def test_with_tls_replicas_on_several_nodes_are_refused() -> None:
    (config, _) = configs([["n0/0"], ["n1/0"]], kind="allreduce")
    with pytest.raises(UserError, match="`link: gloo`"):
        meet(config, clock_shard([["n0/0"], ["n1/0"]]), tls=own_tls(config))


def test_with_tls_replicas_on_one_node_meet_on_loopback() -> None:
    stages = all_meet([["n0/0"], ["n0/1"]], kind="allreduce", tls=own_tls)
    assert all(stage.replicas is not None for stage in stages)
    leave(stages)


def test_a_stage_that_never_joins_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "JOIN_SECONDS", 120.0)
    clock = FakeClock(auto_advance=True)
    _, config = configs([["n0/0", "n0/1"]])
    told = r"stage 1 .* waited 120 s for stage 0 to join; .* stages \[1\] have joined"
    with pytest.raises(DeadlineExceeded, match=told):
        meet(config, clock_shard([["n0/0", "n0/1"]]), clock=clock)


def test_a_stage_hears_that_its_life_is_over_while_it_waits_for_the_next_one() -> None:
    served = JobShard(shard_config((), stages=[2]), NullHistory())
    config, _ = configs([["n0/0", "n0/1"]])

    class Evicting(FakeClock):
        def sleep(self, seconds: float) -> None:
            del seconds
            served.clock_shard.evict(Vw(0), Incarnation(0))

    with pytest.raises(StaleIncarnation, match="is evicted"):
        meet(config, clock_calls(served), clock=Evicting())


def test_stages_of_a_new_life_find_each_other_and_nobody_of_the_old_one() -> None:
    served = JobShard(shard_config((), stages=[2]), NullHistory())
    old, _ = configs([["n0/0", "n0/1"]])
    clock_calls(served).invoke(JOIN, JoinRequest(requester_of(old), "127.0.0.1:1"))
    served.clock_shard.admit(Vw(0), Incarnation(1), 2)
    new = [replace(config, incarnation=Incarnation(1)) for config in configs([["n0/0", "n0/1"]])]
    with ThreadPoolExecutor(2) as threads:
        first, last = threads.map(lambda config: meet(config, clock_calls(served)), new)
    carry(first.downstream, last.upstream)
    leave([first, last])


def test_a_neighbour_that_does_not_come_leaves_no_door_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "MEETING_SECONDS", 0.1)
    config, absent = configs([["n0/0", "n0/1"]], link="grpc")
    shard = clock_shard([["n0/0", "n0/1"]])
    shard.invoke(JOIN, JoinRequest(requester_of(absent)))
    with pytest.raises(DeadlineExceeded, match=r"waited \d+\.\d s for stage 1 of virtual worker 0"):
        meet(config, shard)
