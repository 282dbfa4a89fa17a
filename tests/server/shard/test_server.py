"""Two shards of one job behind real sockets, with every call and every kind of nonsense."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from torch import Tensor

from hetpipe.checkpoint.format import CheckpointReader
from hetpipe.checkpoint.manifest import newest_checkpoint, read_complete
from hetpipe.clock import SYSTEM_CLOCK
from hetpipe.decide.sync.records import BarrierRecord, CommitRecord, PublishRecord, Record, SegmentRecord
from hetpipe.errors import (
    ClockFreed,
    ClockNotPublished,
    DamagedChunk,
    HetpipeError,
    MalformedChunk,
    NonFiniteUpdate,
    PeerUnreachable,
    ProtocolViolation,
    ResourceExhausted,
    SliceMismatch,
    StaleTerm,
    StateLost,
    UnknownJob,
    WaveOutOfOrder,
)
from hetpipe.observe.history import MemoryHistory
from hetpipe.server.shard.server import ShardServer
from hetpipe.values.ids import Clock, JobId, ShardIndex, StageIndex, Term, Wave
from hetpipe.values.requests import BuffersHeader, Meeting, PullHeader, Requester, SliceHeader
from hetpipe.wire.caller import Caller
from hetpipe.wire.calls import (
    ACKNOWLEDGE,
    CONFIGURE,
    FOLLOW_LOG,
    GET_PROGRESS,
    GET_SHARD_CLOCKS,
    HOLD_CLOCK,
    JOIN,
    PULL,
    PULL_BUFFERS,
    PUSH,
    PUSH_BUFFERS,
    RELEASE,
    REPORT_CHECKPOINT,
    REPORT_INITIALIZED,
    REPORT_SHARD_CHECKPOINT,
    REPORT_STAGED,
    REQUEST_BARRIER,
    SHARD_SERVICE,
    TENSOR_SERVICE,
    AcknowledgeRequest,
    FollowLogRequest,
    GetProgressRequest,
    GetShardClocksRequest,
    HeldClock,
    HoldClockRequest,
    JoinRequest,
    ReleaseRequest,
    ReportCheckpointRequest,
    ReportInitializedRequest,
    ReportShardCheckpointRequest,
    ReportStagedRequest,
    RequestBarrierRequest,
)
from hetpipe.wire.channel import MAX_MESSAGE_BYTES, as_is, open_channel
from hetpipe.wire.server import Server, ServerConfig
from hetpipe.wire.shard_client import connect_shard
from hetpipe.wire.status import translate_rpc_error
from tests.checkpoints import stage_part
from tests.pipeline.witness import Witness
from tests.polling import wait_until
from tests.server.shard.builders import (
    DATA,
    JOB,
    decode,
    encode,
    headers_of,
    push_header,
    requester,
    shard_config,
    slices_of,
)

WITNESS = Witness(num_vws=2, num_waves=3, num_slices=2, copies=2)
SECONDS = 10.0


class Job:
    """One job of two virtual workers on two shards; each shard holds one slice."""

    def __init__(self, run_dir: Path) -> None:
        self.history = MemoryHistory()
        self.servers: list[Server] = []
        self.handlers: list[ShardServer] = []
        for _ in range(2):
            handler = ShardServer(lambda _config: self.history)
            server = Server(ServerConfig(num_threads=12))
            handler.add_to(server)
            server.on_stop(handler.stop)
            server.start()
            self.handlers.append(handler)
            self.servers.append(server)
        self.addresses = [server.address for server in self.servers]
        whole = slices_of([WITNESS.slice_elements] * 2)
        self.configs = [
            shard_config(
                (replace(whole[shard], shard=ShardIndex(shard)),),
                shard=shard,
                num_shards=2,
                clock_shard_address=self.addresses[0],
                run_dir=str(run_dir),
            )
            for shard in range(2)
        ]
        self.controls = [connect_shard(address) for address in self.addresses]
        self.shards = [connect_shard(address, ShardIndex(i)) for i, address in enumerate(self.addresses)]
        self.clock = connect_shard(self.addresses[0], ShardIndex(0))
        self.next_sample = 0

    def configure(self) -> None:
        for control, config in zip(self.controls, self.configs, strict=True):
            control.invoke(CONFIGURE, config)

    def close(self) -> None:
        clients: list[Caller] = [*self.controls, *self.shards, self.clock]
        for client in clients:
            client.close()
        for server in reversed(self.servers):
            server.stop(grace_seconds=0.0)

    def slice(self, shard: int) -> tuple[SliceHeader, ...]:
        return headers_of(self.configs[shard].slices)

    def push(self, who: Requester, wave: int | None, shard: int, tensor: Tensor) -> bool:
        return self.shards[shard].upload(PUSH, push_header(who, wave, self.slice(shard)), encode([tensor])).duplicate

    def pull(self, clock: int, shard: int, who: Requester | None = None) -> Tensor:
        stream = self.shards[shard].download(PULL, PullHeader(who or requester(), Clock(clock), self.slice(shard)))
        return decode(stream, self.slice(shard))[0]

    def begin(self) -> None:
        """Everyone joins, and zeros become w^(0)."""
        for vw in range(2):
            self.clock.invoke(JOIN, JoinRequest(requester(vw), ""))
        for shard in range(2):
            self.push(requester(), None, shard, torch.zeros(WITNESS.slice_elements))
        self.clock.invoke(REPORT_INITIALIZED, ReportInitializedRequest(requester()))
        self.wait_published(0)

    def run_wave(self, wave: int) -> None:
        for vw in range(2):
            for shard in range(2):
                assert not self.push(requester(vw), wave, shard, WITNESS.update(vw, wave, shard))
            self.clock.invoke(
                REPORT_STAGED, ReportStagedRequest(requester(vw), Wave(wave), ((self.next_sample,),), Clock(0))
            )
            self.next_sample += 1
        self.wait_published(wave + 1)

    def wait_published(self, clock: int) -> None:
        """On every shard: each follows the log by itself."""

        def published() -> bool:
            try:
                for shard in range(2):
                    self.pull(clock, shard)
            except ClockNotPublished:
                return False
            return True

        wait_until(published, timeout_seconds=SECONDS, what=f"clock {clock}")


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with closing(Job(tmp_path)) as value:
        value.configure()
        yield value


@pytest.fixture
def begun(job: Job) -> Job:
    job.begin()
    return job


class TestCalls:
    def test_two_shards_follow_one_log(self, begun: Job) -> None:
        for wave in range(3):
            begun.run_wave(wave)

        assert WITNESS.faults([begun.pull(3, shard) for shard in range(2)]) == []
        snapshot = begun.controls[0].invoke(GET_SHARD_CLOCKS, GetShardClocksRequest(JOB))
        assert (snapshot.published, snapshot.local, snapshot.samples) == (3, {0: 3, 1: 3}, 6)
        applied = [(e["shard"], e["vw"], e["wave"]) for e in begun.history.of("apply")]
        assert sorted(applied) == [(s, v, w) for s in range(2) for v in range(2) for w in range(3)]
        with pytest.raises(ClockFreed):
            begun.pull(0, 1)

    def test_join_tells_where_virtual_worker_0_awaits_its_replicas(self, job: Job) -> None:
        there = (StageIndex(0),)
        assert job.clock.invoke(JOIN, JoinRequest(requester(1), "h:9", "h:8")) == Meeting("", "", there)
        assert job.clock.invoke(JOIN, JoinRequest(requester(0), "h:1", "h:2")) == Meeting(
            "", "h:2", there, makes_weights=True
        )
        assert job.clock.invoke(JOIN, JoinRequest(requester(1))) == Meeting("", "h:2", there)

    def test_resends_are_duplicates(self, begun: Job) -> None:
        update = WITNESS.update(0, 0, 1)
        assert not begun.push(requester(), 0, 1, update)
        assert begun.push(requester(), 0, 1, update)
        assert begun.push(requester(), None, 0, update)

    def test_hold_waits_for_a_clock(self, begun: Job) -> None:
        begun.run_wave(0)
        with pytest.raises(ClockNotPublished, match="minibatch 3 needs clock 2"):
            begun.clock.invoke(HOLD_CLOCK, HoldClockRequest(requester(), 3))
        assert begun.clock.invoke(HOLD_CLOCK, HoldClockRequest(requester(), 2)) == HeldClock(Clock(1), Clock(500), 0)

    def test_the_log_from_any_position(self, begun: Job) -> None:
        begun.run_wave(0)
        records: list[Record] = []
        for batch in begun.clock.stream(FOLLOW_LOG, FollowLogRequest(JOB, Term(1), 0)):
            records += batch.records
            if any(isinstance(r, PublishRecord) and r.clock == 1 for r in batch.records):
                break
        assert [r.index for r in records] == list(range(len(records)))
        kinds = [type(r) for r in records]
        assert (kinds.count(SegmentRecord), kinds.count(CommitRecord), kinds.count(PublishRecord)) == (1, 2, 2)

        assert next(iter(begun.clock.stream(FOLLOW_LOG, FollowLogRequest(JOB, Term(1), 3)))).records[0] == records[3]

    def test_commits_alone_wake_no_gathering_follower(self, begun: Job, monkeypatch: pytest.MonkeyPatch) -> None:
        clock_shard = begun.handlers[0]._jobs[JOB].shard.clock_shard
        rung: list[int] = []
        monkeypatch.setattr(
            clock_shard.stage_condition, "notify_all", lambda: rung.append(clock_shard.snapshot().published)
        )
        begun.run_wave(0)
        begun.run_wave(1)
        assert rung == [1, 2], "at each published clock, and not at the two commits before it"

    def test_gathered_or_not_the_log_is_the_same(self, begun: Job) -> None:
        begun.run_wave(0)
        gathered: list[Record] = []
        for batch in begun.clock.stream(FOLLOW_LOG, FollowLogRequest(JOB, Term(1), 0)):
            gathered += batch.records
            if any(isinstance(r, PublishRecord) and r.clock == 1 for r in batch.records):
                break
        found = next(iter(begun.clock.stream(FOLLOW_LOG, FollowLogRequest(JOB, Term(1), 0))))
        assert tuple(gathered) == found.records

    def test_a_barrier_reaches_a_follower_that_waits(self, begun: Job) -> None:
        seen: list[Record] = []

        def follow() -> None:
            for batch in begun.clock.stream(FOLLOW_LOG, FollowLogRequest(JOB, Term(1), 0)):
                seen.extend(batch.records)
                if any(isinstance(r, BarrierRecord) and r.reason == "stop" for r in batch.records):
                    return

        thread = threading.Thread(target=follow)
        thread.start()
        wait_until(lambda: bool(seen), timeout_seconds=SECONDS, what="record")
        assert begun.controls[0].invoke(REQUEST_BARRIER, RequestBarrierRequest(JOB, Term(1), "stop")).clock == 2
        thread.join(SECONDS)

        assert not thread.is_alive()
        assert begun.controls[0].invoke(GET_SHARD_CLOCKS, GetShardClocksRequest(JOB)).barrier_reason == "stop"

    def test_progress_and_a_checkpoint(self, begun: Job, tmp_path: Path) -> None:
        assert begun.clock.invoke(GET_PROGRESS, GetProgressRequest(requester())) == begun.configs[0].progress
        begun.controls[0].invoke(REQUEST_BARRIER, RequestBarrierRequest(JOB, Term(1), "checkpoint"))
        for wave in range(2):
            begun.run_wave(wave)
        wait_until(
            lambda: begun.clock.invoke(GET_PROGRESS, GetProgressRequest(requester())).clock == 2,
            timeout_seconds=SECONDS,
            what="barrier",
        )
        progress = begun.clock.invoke(GET_PROGRESS, GetProgressRequest(requester()))
        assert (progress.clock, progress.minibatches, progress.samples) == (2, 4, 4)
        parts = [stage_part(tmp_path, 2, vw, 0) for vw in range(2)]
        assert not begun.clock.invoke(
            REPORT_CHECKPOINT, ReportCheckpointRequest(requester(0), Clock(2), (parts[0],))
        ).complete
        request = ReportShardCheckpointRequest(JOB, Term(1), ShardIndex(1), Clock(7), failure="none")
        with pytest.raises(ProtocolViolation, match="at clock 7, but no barrier requires one there"):
            begun.clock.invoke(REPORT_SHARD_CHECKPOINT, request)

        def reported() -> bool:
            return begun.clock.invoke(
                REPORT_CHECKPOINT, ReportCheckpointRequest(requester(1), Clock(2), (parts[1],))
            ).complete

        wait_until(reported, timeout_seconds=SECONDS, what="the shards' parts")
        manifest = read_complete(newest_checkpoint(tmp_path))
        assert manifest.progress == progress
        names = [file.name for file in manifest.files]
        assert names == [f"{who}.safetensors" for who in ("shard-0", "shard-1", "vw-0-stage-0", "vw-1-stage-0")]
        weights = CheckpointReader(tmp_path.glob("checkpoints/*/shard-*"))
        for shard in range(2):
            assert torch.equal(weights.tensor(f"weights/p{shard}"), begun.pull(2, shard))

    def test_buffers(self, begun: Job) -> None:
        begun.controls[0].invoke(REQUEST_BARRIER, RequestBarrierRequest(JOB, Term(1), "checkpoint"))
        for wave in range(2):
            begun.run_wave(wave)
        wait_until(
            lambda: begun.clock.invoke(GET_PROGRESS, GetProgressRequest(requester())).clock == 2,
            timeout_seconds=SECONDS,
            what="barrier",
        )
        slices = (SliceHeader("mean", 0, 3, "float32"), SliceHeader("count", 0, 1, "int64"))
        headers = [BuffersHeader(requester(vw), Clock(2), slices) for vw in range(2)]
        begun.clock.upload(PUSH_BUFFERS, headers[0], encode([torch.tensor([1.0, 2.0, 3.0]), torch.tensor([5])]))
        with pytest.raises(ClockNotPublished, match=r"virtual workers \[1\]"):
            list(begun.clock.download(PULL_BUFFERS, headers[0]))
        begun.clock.upload(PUSH_BUFFERS, headers[1], encode([torch.tensor([3.0, 2.0, 0.0]), torch.tensor([4])]))
        mean, count = decode(begun.clock.download(PULL_BUFFERS, headers[0]), slices)

        assert (mean.tolist(), count.tolist()) == ([2.0, 2.0, 1.5], [5])
        with pytest.raises(SliceMismatch):
            list(begun.clock.download(PULL_BUFFERS, replace(headers[0], buffers=(SliceHeader("m", 0, 3, "object"),))))

    def test_several_chunks_each_way(self, tmp_path: Path) -> None:
        with closing(Job(tmp_path)) as job:
            job.configs = [replace(c, slices=slices_of([700_001], shard=c.shard)) for c in job.configs]
            job.configure()
            for vw in range(2):
                job.clock.invoke(JOIN, JoinRequest(requester(vw), ""))
            weights = torch.arange(700_001, dtype=torch.float32)
            for shard in range(2):
                job.push(requester(), None, shard, weights)
            job.clock.invoke(REPORT_INITIALIZED, ReportInitializedRequest(requester()))
            job.wait_published(0)

            assert torch.equal(job.pull(0, 1), weights)

    def test_release_forgets(self, begun: Job) -> None:
        for control in begun.controls:
            control.invoke(RELEASE, ReleaseRequest(JOB))
            control.invoke(RELEASE, ReleaseRequest(JOB))
            control.invoke(RELEASE, ReleaseRequest(JobId("never seen")))
        assert begun.handlers[0].jobs() == ()
        with pytest.raises(UnknownJob):
            begun.pull(0, 1)
        with pytest.raises(UnknownJob):
            begun.controls[0].invoke(GET_SHARD_CLOCKS, GetShardClocksRequest(JOB))

    def test_a_newer_term_takes_over(self, begun: Job) -> None:
        begun.configure()
        assert begun.pull(0, 0).shape == (WITNESS.slice_elements,)
        for control, config in zip(begun.controls, begun.configs, strict=True):
            control.invoke(CONFIGURE, replace(config, term=Term(2)))
        with pytest.raises(StaleTerm):
            begun.pull(0, 0)
        with pytest.raises(StaleTerm, match="is in term 2; 1 is over"):
            begun.controls[0].invoke(CONFIGURE, begun.configs[0])
        with pytest.raises(StaleTerm):
            next(iter(begun.clock.stream(FOLLOW_LOG, FollowLogRequest(JOB, Term(1), 0))))

        assert begun.handlers[0].snapshots()[JOB].term == 2
        assert not begun.push(requester(term=2), None, 1, torch.ones(WITNESS.slice_elements))

    def test_one_that_is_not_told_of_a_newer_term_loses_the_job_until_it_is(self, begun: Job) -> None:
        """As where a coordinator dies between two parameter servers that it sends to a new term."""
        configs = [replace(config, term=Term(2)) for config in begun.configs]
        begun.controls[0].invoke(CONFIGURE, configs[0])
        wait_until(lambda: begun.handlers[1].jobs() == (), timeout_seconds=SECONDS, what="the end of the old term")
        assert "was not configured for the job's newest term" in begun.handlers[1].lost_jobs()[JOB]
        with pytest.raises(StateLost):
            begun.pull(0, 1)

        begun.controls[1].invoke(CONFIGURE, configs[1])
        assert begun.handlers[1].lost_jobs() == {}
        assert not begun.push(requester(term=2), None, 1, torch.ones(WITNESS.slice_elements))

    def test_health(self, job: Job) -> None:
        with closing(open_channel(job.addresses[1])) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            for service in ("", SHARD_SERVICE, TENSOR_SERVICE):
                answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=SECONDS)
                assert answer.status == health_pb2.HealthCheckResponse.SERVING

    def test_a_stopped_server_ends_its_streams_at_once(self, begun: Job) -> None:
        stream = iter(begun.clock.stream(FOLLOW_LOG, FollowLogRequest(JOB, Term(1), 0)))
        next(stream)
        started = SYSTEM_CLOCK.monotonic()
        begun.servers[0].stop(grace_seconds=30.0)
        with suppress(PeerUnreachable):
            list(stream)

        assert SYSTEM_CLOCK.monotonic() - started < SECONDS
        with pytest.raises(PeerUnreachable):
            next(iter(begun.clock.stream(FOLLOW_LOG, FollowLogRequest(JOB, Term(1), 0))))

    def test_after_close_there_is_nobody(self, begun: Job) -> None:
        for shard in begun.shards:
            shard.close()
        with pytest.raises(PeerUnreachable, match="closed on this side"):
            begun.push(requester(), 0, 0, WITNESS.update(0, 0))
        with pytest.raises(PeerUnreachable, match="closed on this side"):
            begun.pull(0, 1)


class TestRefusals:
    @pytest.mark.parametrize(
        ("who", "wave", "error"),
        [
            (requester(job="other"), 0, UnknownJob),
            (requester(term=2), 0, StaleTerm),
            (requester(incarnation=1), 0, ClockNotPublished),
            (requester(vw=9), 0, ClockNotPublished),
            (requester(), -1, WaveOutOfOrder),
            (requester(), 2**62, WaveOutOfOrder),
        ],
    )
    def test_pushes(self, begun: Job, who: Requester, wave: int, error: type[HetpipeError]) -> None:
        with pytest.raises(error) as caught:
            begun.push(who, wave, 1, WITNESS.update(0, 0, 1))

        assert type(caught.value) is error
        self.assert_alive(begun)

    def test_slices_and_chunks(self, begun: Job) -> None:
        mine = begun.slice(1)
        good = encode([WITNESS.update(0, 0, 1)])
        with pytest.raises(SliceMismatch):
            begun.shards[1].upload(PUSH, push_header(requester(), 0, begun.slice(0)), good)
        with pytest.raises(SliceMismatch):
            begun.shards[1].upload(PUSH, push_header(requester(), 0, (replace(mine[0], stop=2**30),)), good)
        for bad in ([], [b""], [*good, *good]):
            with pytest.raises(MalformedChunk):
                begun.shards[1].upload(PUSH, push_header(requester(), 0, mine), bad)
        for bad in ([good[0][:-1]], [b"\xff" + good[0][1:]]):
            with pytest.raises(DamagedChunk):
                begun.shards[1].upload(PUSH, push_header(requester(), 0, mine), bad)
        with pytest.raises(NonFiniteUpdate):
            begun.push(requester(), 0, 1, torch.full((WITNESS.slice_elements,), float("nan")))

        self.assert_alive(begun)

    def test_reports(self, begun: Job) -> None:
        with pytest.raises(WaveOutOfOrder):
            begun.clock.invoke(REPORT_STAGED, ReportStagedRequest(requester(), Wave(1), ((1,),), Clock(0)))
        with pytest.raises(ProtocolViolation, match=f"used sample {DATA.num_samples}"):
            begun.clock.invoke(
                REPORT_STAGED, ReportStagedRequest(requester(), Wave(0), ((DATA.num_samples,),), Clock(0))
            )
        with pytest.raises(ProtocolViolation, match="there is no stage 5"):
            begun.clock.invoke(JOIN, JoinRequest(requester(0, 5), ""))
        with pytest.raises(ProtocolViolation, match="there is no shard 7"):
            begun.clock.invoke(ACKNOWLEDGE, AcknowledgeRequest(JOB, Term(1), ShardIndex(7), 0))
        with pytest.raises(ProtocolViolation, match="acknowledges 1000000 of"):
            begun.clock.invoke(ACKNOWLEDGE, AcknowledgeRequest(JOB, Term(1), ShardIndex(1), 1_000_000))

        self.assert_alive(begun)

    def test_only_shard_0_is_the_clock_shard(self, begun: Job) -> None:
        with closing(connect_shard(begun.addresses[1], ShardIndex(0))) as wrong:
            for call in (
                lambda: wrong.invoke(JOIN, JoinRequest(requester(), "")),
                lambda: wrong.invoke(GET_PROGRESS, GetProgressRequest(requester())),
                lambda: next(iter(wrong.stream(FOLLOW_LOG, FollowLogRequest(JOB, Term(1), 0)))),
            ):
                with pytest.raises(
                    ProtocolViolation, match="shard 1 is not the clock shard; send the request to shard 0"
                ):
                    call()

    def test_a_config_that_is_none(self, begun: Job) -> None:
        with closing(open_channel(begun.addresses[0])) as channel:
            call = channel.unary_unary(CONFIGURE.path, as_is, as_is)
            with pytest.raises(ProtocolViolation, match="a ShardConfig without its required field membership"):
                _translating(lambda: call(b"\x0a\x02{}", timeout=SECONDS))

        self.assert_alive(begun)

    @pytest.mark.parametrize("name", ["Push", "PushBuffers"])
    def test_garbage_for_a_header(self, begun: Job, name: str) -> None:
        with closing(open_channel(begun.addresses[0])) as channel:
            call = channel.stream_unary(f"/{TENSOR_SERVICE}/{name}", as_is, as_is)
            for messages in ([], [b""], [b"\xff\xff\xff garbage"], [b"\xff" * 60_000, b"more"]):
                with pytest.raises(MalformedChunk):
                    _translating(lambda messages=messages: call(iter(messages), timeout=SECONDS))

        self.assert_alive(begun)

    @pytest.mark.parametrize("name", ["Pull", "PullBuffers"])
    def test_garbage_for_a_question(self, begun: Job, name: str) -> None:
        with closing(open_channel(begun.addresses[0])) as channel:
            call = channel.unary_stream(f"/{TENSOR_SERVICE}/{name}", as_is, as_is)
            with pytest.raises(MalformedChunk):
                _translating(lambda: list(call(b"\xff\xff\xff garbage", timeout=SECONDS)))

        self.assert_alive(begun)

    def test_a_message_that_is_too_large(self, begun: Job) -> None:
        with closing(open_channel(begun.addresses[0], max_message_bytes=8 * MAX_MESSAGE_BYTES)) as channel:
            call = channel.stream_unary(PUSH.path, as_is, as_is)
            with pytest.raises(ResourceExhausted):
                _translating(lambda: call(iter([bytes(MAX_MESSAGE_BYTES + 1)]), timeout=SECONDS))

        self.assert_alive(begun)

    @staticmethod
    def assert_alive(job: Job) -> None:
        """Nothing was applied, and everything works."""
        job.run_wave(0)
        assert WITNESS.faults([job.pull(1, shard) for shard in range(2)], {0: 1, 1: 1}) == []


def _translating(call: object) -> None:
    assert callable(call)
    try:
        call()
    except grpc.RpcError as error:
        raise translate_rpc_error(error, peer="p", role="r", call="c", elapsed_seconds=0.0) from error


def test_one_that_ends_sends_nobody_away_for_good() -> None:
    server = ShardServer(lambda _config: MemoryHistory())
    server.configure(shard_config(slices_of([4]), stages=(1,)))
    with pytest.raises(UnknownJob):
        server.clocks(JobId("another"))
    server.stop()
    with pytest.raises(PeerUnreachable):
        server.clocks(JOB)
