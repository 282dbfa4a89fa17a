"""A coordinator and a shard that really serve, and a client that sends them whatever it is told to."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import grpc
import torch
from google.protobuf.message import Message

from hetpipe.errors import ClockNotPublished
from hetpipe.proto.v2 import coordinator_pb2 as pb
from hetpipe.proto.v2 import parameter_server_pb2 as shard_pb
from hetpipe.server.coordinator.servicer import CoordinatorServicer
from hetpipe.server.shard.run_history import file_history
from hetpipe.server.shard.server import ShardServer
from hetpipe.values.commands import InspectionResult, KeyedStageReport
from hetpipe.values.conditions import Condition, ConditionKind
from hetpipe.values.events import StopMode
from hetpipe.values.ids import AgentId, Clock, Incarnation, JobId, ShardIndex, Term, VirtualWorkerIndex, Wave
from hetpipe.values.members import MemberId, MemberInfo, MemberRole, Registration
from hetpipe.values.requests import BuffersHeader, CheckpointFile, LinkHello, PullHeader, SliceHeader
from hetpipe.values.run import AgentDevice, StageReady
from hetpipe.values.sync import PlanMove
from hetpipe.wire import calls
from hetpipe.wire.channel import as_is
from hetpipe.wire.codec import to_message
from hetpipe.wire.coordinator_client import CoordinatorClient
from hetpipe.wire.link_client import connect_link
from hetpipe.wire.link_server import LinkServer
from hetpipe.wire.link_stream import CALL
from hetpipe.wire.server import Server, ServerConfig
from hetpipe.wire.shard_client import connect_shard
from tests.hardening.bad_inputs import BadInput, message_cases, pull_cases, push_cases, service_cases
from tests.polling import wait_until
from tests.server.coordinator.builders import clocks, job, model, submission
from tests.server.coordinator.fakes import Cluster
from tests.server.shard.builders import (
    JOB,
    encode,
    headers_of,
    push_header,
    requester,
    run_document,
    shard_config,
    slices_of,
)

#: No call of the table may take longer.
SECONDS = 10.0

#: Streams that are open as long as there may be more to tell, and how long a test waits.
_WAITING_CALLS = ("WatchCommands", "WatchJob", "WatchClocks", "FollowLog")
_WAIT_SECONDS = 0.1

_SIZES = (32, 64)
_NUM_BYTES = 4 * sum(_SIZES)


class RawClient:
    """Sends bytes and takes the status; without limits of its own."""

    def __init__(self, address: str) -> None:
        options = [
            ("grpc.max_send_message_length", -1),
            ("grpc.max_receive_message_length", -1),
            ("grpc.use_local_subchannel_pool", 1),
        ]
        self._channel = grpc.insecure_channel(address, options=options)

    def status(self, case: BadInput) -> tuple[grpc.StatusCode, str]:
        """What the call ends with; a stream that waits for more to tell, where that is no mistake, counts as good."""
        waits = case.is_harmless and case.call.endswith(_WAITING_CALLS)
        seconds = _WAIT_SECONDS if waits else SECONDS
        call: Any
        if case.streams_requests:
            call = self._channel.stream_unary(case.call, as_is, as_is).future(iter(case.messages), timeout=seconds)
        else:
            call = self._channel.unary_stream(case.call, as_is, as_is)(case.messages[0], timeout=seconds)
        with suppress(grpc.RpcError):
            if case.streams_requests:
                call.result()
            elif not case.call.endswith(_WAITING_CALLS):
                deque(call, maxlen=0)
            elif next(call, None) is not None:
                call.cancel()
                return grpc.StatusCode.OK, ""
        if waits and call.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            return grpc.StatusCode.OK, "waits"
        return call.code(), call.details()

    def close(self) -> None:
        self._channel.close()


class LiveShard:
    """The clock shard of a job of two virtual workers, of 1 and 2 stages, in its first wave."""

    def __init__(self, run_dir: Path) -> None:
        self.handler = ShardServer(file_history("here", 1))
        self.server = Server(ServerConfig(num_threads=8))
        self.handler.add_to(self.server)
        self.server.on_stop(self.handler.stop)
        self.address = self.server.start()
        self.config = shard_config(slices_of(_SIZES), stages=(1, 2), run_dir=str(run_dir))
        self._slices = headers_of(self.config.slices)
        self._begin()

    def _begin(self) -> None:
        self.handler.configure(self.config)
        for vw, stage in ((0, 0), (1, 0), (1, 1)):
            self.handler.calls.invoke(calls.JOIN, calls.JoinRequest(requester(vw, stage), "127.0.0.1:7300"))
        zeros = [torch.zeros(size) for size in _SIZES]
        self.handler.calls.upload(calls.PUSH, push_header(requester(), None, self._slices), encode(zeros))
        self.handler.calls.invoke(calls.REPORT_INITIALIZED, calls.ReportInitializedRequest(requester()))
        wait_until(self._is_published, timeout_seconds=SECONDS, what="clock 0 to be published")
        for vw in (0, 1):
            self.handler.calls.upload(calls.PUSH, push_header(requester(vw), 0, self._slices), encode(zeros))
        self.handler.calls.invoke(
            calls.REPORT_STAGED, calls.ReportStagedRequest(requester(), Wave(0), ((0, 1),), Clock(0))
        )

    def _is_published(self) -> bool:
        try:
            list(self.handler.calls.download(calls.PULL, PullHeader(requester(), Clock(0), self._slices)))
        except ClockNotPublished:
            return False
        return True

    def control_cases(self) -> Iterator[BadInput]:
        yield from service_cases(shard_pb.DESCRIPTOR.services_by_name["ParameterServerService"], self._valid())

    def _valid(self) -> Mapping[str, Message]:
        who, other = requester(), requester(1)
        file = CheckpointFile("vw-1-stage-0.safetensors", "0" * 64, 3)
        part = CheckpointFile("shard-0.safetensors", "0" * 64, 3)
        vw, life, term, clock = VirtualWorkerIndex(0), Incarnation(0), Term(1), Clock(0)
        return {
            call.name: to_message(request)
            for call, request in (
                (calls.CONFIGURE, self.config),
                (calls.RELEASE, calls.ReleaseRequest(JobId("other"))),
                (calls.JOIN, calls.JoinRequest(who, "127.0.0.1:7300")),
                (calls.REPORT_INITIALIZED, calls.ReportInitializedRequest(who)),
                (calls.REPORT_STAGED, calls.ReportStagedRequest(other, Wave(0), ((5, 6),), clock)),
                (calls.HOLD_CLOCK, calls.HoldClockRequest(who, 0)),
                (calls.REPORT_PREPARED, calls.ReportPreparedRequest(who, 1, can=True)),
                (calls.REQUEST_BARRIER, calls.RequestBarrierRequest(JOB, term, "stop")),
                (calls.EVICT, calls.EvictRequest(JOB, term, vw, life)),
                (calls.DRAIN, calls.DrainRequest(JOB, term, vw, life)),
                (
                    calls.MOVE,
                    calls.MoveRequest(JOB, term, vw, PlanMove(life, (0, len(_SIZES)), "straggler", "it is slow")),
                ),
                (calls.ADMIT, calls.AdmitRequest(JOB, term, VirtualWorkerIndex(2), life, 1)),
                (
                    calls.REPORT_SHARD_CHECKPOINT,
                    calls.ReportShardCheckpointRequest(JOB, term, ShardIndex(0), clock, (part,)),
                ),
                (calls.KEEP_RUN, calls.KeepRunRequest(JOB, term, run_document(self.config))),
                (calls.DESCRIBE_RUN, calls.DescribeRunRequest(JOB)),
                (calls.GET_SHARD_CLOCKS, calls.GetShardClocksRequest(JOB)),
                (calls.GET_PROGRESS, calls.GetProgressRequest(who)),
                (calls.SHARE_MEMORY, calls.ShareMemoryRequest(who, "Push")),
                (calls.REPORT_CHECKPOINT, calls.ReportCheckpointRequest(other, clock, (file,))),
                (calls.FOLLOW_LOG, calls.FollowLogRequest(JOB, term, 0, requester=who)),
                (calls.ACKNOWLEDGE, calls.AcknowledgeRequest(JOB, term, ShardIndex(0), 1)),
            )
        }

    def tensor_cases(self) -> Iterator[BadInput]:
        push = to_message(push_header(requester(1), 2, self._slices))
        pull = to_message(PullHeader(requester(), Clock(0), self._slices))
        mean = SliceHeader("mean", 0, sum(_SIZES), "float32")
        buffers = to_message(BuffersHeader(requester(), Clock(0), (mean,)))
        yield from push_cases(calls.PUSH.path, push, _NUM_BYTES)
        yield from pull_cases(calls.PULL.path, pull)
        yield from push_cases(calls.PUSH_BUFFERS.path, buffers, _NUM_BYTES)
        yield from pull_cases(calls.PULL_BUFFERS.path, buffers)

    def still_works(self) -> None:
        """A pull, and a question to the clock shard."""
        with closing(connect_shard(self.address, ShardIndex(0))) as clock:
            assert clock.invoke(calls.GET_PROGRESS, calls.GetProgressRequest(requester())).clock == 0

    def close(self) -> None:
        self.server.stop(grace_seconds=0.0)


class LiveLink:
    """A stage that waits for its neighbour."""

    def __init__(self) -> None:
        self._neighbour = requester(0, 0)
        self._hello = LinkHello(requester(0, 1), 4)
        self.server = LinkServer("127.0.0.1", 0, hello=self._hello, neighbour=self._neighbour, tls=None)
        self.address = self.server.start()

    def cases(self) -> Iterator[BadInput]:
        """Hellos of nobody that is awaited, with and without what would follow."""
        hello = to_message(LinkHello(self._neighbour, 4))
        following: Mapping[str, tuple[bytes, ...]] = {
            "": (),
            ", then a frame": (bytes(64),),
            ", then garbage": (b"\xff" * 16,),
            ", then a good one": (hello.SerializeToString(),),
        }
        for what, raw in (*message_cases(hello), ("an empty hello", b"")):
            if not what.startswith("room = ") or what in {"room = 0", "room = -1"}:
                for behind, messages in following.items():
                    yield BadInput(CALL, f"{what}{behind}", (raw, *messages), streams_requests=True)
        yield BadInput(CALL, "no hello", (), streams_requests=True)

    def still_works(self) -> None:
        """The neighbour comes."""
        stream = connect_link(
            self.address,
            hello=LinkHello(self._neighbour, 4),
            neighbour=self._hello.requester,
            tls=None,
            deadline_seconds=SECONDS,
        )
        assert self.server.accept(deadline_seconds=SECONDS).peer.requester == self._neighbour
        stream.cancel()
        stream.close()

    def close(self) -> None:
        self.server.close()


class LiveCoordinator:
    """A coordinator with a job that trains."""

    def __init__(self, run_dir: Path) -> None:
        self.cluster = Cluster(run_dir).usual()
        self.job_id: JobId = self.cluster.coordinator.submit_job(submission(job(), str(run_dir)))
        self.cluster.train()
        self.cluster.beat("ps0", clocks={self.job_id: clocks(1, 2)})
        self.cluster.join(MemberInfo(MemberRole.WORKER, MemberId("w"), "h", 1))
        self.server = Server(ServerConfig(num_threads=8))
        CoordinatorServicer(self.cluster.coordinator, host="here").add_to(self.server)
        self.address = self.server.start()

    def cases(self) -> Iterator[BadInput]:
        yield from service_cases(pb.DESCRIPTOR.services_by_name["CoordinatorService"], self._valid())

    def _valid(self) -> Mapping[str, Message]:
        agent, shard = self.cluster.registrations["n0"], self.cluster.registrations["ps0"]
        (key, *_) = self.cluster.stages("n0", self.job_id)
        reports = (KeyedStageReport(key, StageReady(7)), InspectionResult(self.job_id, model()))
        device = AgentDevice("x/0", "cpu", 1, "cpu")
        member = MemberInfo(MemberRole.WORKER, MemberId("x"), "h", 1, devices=(device,))
        full = Condition(ConditionKind.DISK_NEARLY_FULL, "the disk at /", "it is full", 1.0, times=1)
        agent_id, vw = AgentId("n0"), VirtualWorkerIndex(1)
        return {
            call.name: to_message(request)
            for call, request in (
                (calls.REGISTER, calls.RegisterRequest(member)),
                (
                    calls.HEARTBEAT,
                    calls.HeartbeatRequest(
                        MemberId("ps0"),
                        shard,
                        clocks={self.job_id: clocks(1, 2)},
                        jobs=(self.job_id,),
                        lost={JobId("another"): "its disk is gone"},
                        conditions={self.job_id: (full,)},
                    ),
                ),
                (calls.LEAVE, calls.LeaveRequest(MemberId("w"), Registration("none of its own"))),
                (calls.WATCH_COMMANDS, calls.WatchCommandsRequest(agent_id, agent, 0)),
                (calls.REPORT, calls.ReportRequest(agent_id, agent, 100, reports)),
                (calls.CERTIFY_STAGE, calls.CertifyStageRequest(agent_id, agent, key, b"none")),
                (calls.FETCH_CODE, calls.FetchCodeRequest(agent_id, agent, "0" * 64)),
                (calls.SUBMIT_JOB, calls.SubmitJobRequest(submission(job(), request_id="another-request"))),
                (calls.STOP_JOB, calls.StopJobRequest(StopMode.CHECKPOINT, self.job_id)),
                (calls.MEASURE_LINKS, calls.MeasureLinksRequest("0123456789abcdef")),
                (calls.DRAIN_WORKER, calls.DrainWorkerRequest(vw, self.job_id)),
                (calls.ADD_WORKER, calls.AddWorkerRequest(vw, self.job_id)),
                (calls.MOVE_WORKER, calls.MoveWorkerRequest(vw, (3, 1), self.job_id)),
                (calls.DEPART, calls.DepartRequest(agent_id, agent)),
                (calls.GET_STATUS, calls.GetStatusRequest(self.job_id)),
                (calls.WATCH_JOB, calls.WatchJobRequest(self.job_id)),
                (calls.LIST_MEMBERS, calls.ListMembersRequest()),
                (calls.GET_CLOCKS, calls.GetClocksRequest(self.job_id)),
                (calls.WATCH_CLOCKS, calls.WatchClocksRequest(self.job_id)),
            )
        }

    def still_works(self) -> None:
        with closing(CoordinatorClient(self.address)) as client:
            assert client.invoke(calls.GET_STATUS, calls.GetStatusRequest(self.job_id)).job_id == self.job_id

    def close(self) -> None:
        self.server.stop(grace_seconds=0.0)
