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
from hetpipe.proto.v1 import coordinator_pb2 as pb
from hetpipe.proto.v1 import link_pb2 as link_pb
from hetpipe.proto.v1 import parameter_server_pb2 as shard_pb
from hetpipe.server.coordinator.servicer import CoordinatorServicer
from hetpipe.server.shard.run_history import file_history
from hetpipe.server.shard.server import ShardServer
from hetpipe.values import wire
from hetpipe.values.commands import InspectionResult, StageNews
from hetpipe.values.ids import Clock, JobId, Wave
from hetpipe.values.members import MemberId, MemberInfo, MemberRole
from hetpipe.values.requests import BuffersHeader, LinkHello, PullHeader, SliceHeader
from hetpipe.values.run import StageReady
from hetpipe.values.run_document import RunDocument
from hetpipe.values.shard_config import ShardConfig
from hetpipe.wire import convert, convert_jobs, convert_shard, shard_methods
from hetpipe.wire.coordinator_client import CoordinatorClient
from hetpipe.wire.link_client import connect_link
from hetpipe.wire.link_server import LinkServer
from hetpipe.wire.link_stream import CALL
from hetpipe.wire.method import as_is
from hetpipe.wire.server import Server, ServerConfig
from hetpipe.wire.shard_client import GrpcClock
from hetpipe.wire.shard_service import add_shard_service
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
        add_shard_service(self.server, self.handler)
        self.server.on_stop(self.handler.stop)
        self.address = self.server.start()
        self.config = shard_config(slices_of(_SIZES), stages=(1, 2), run_dir=str(run_dir))
        self._slices = headers_of(self.config.slices)
        self._begin()

    def _begin(self) -> None:
        self.handler.configure(self.config)
        for vw, stage in ((0, 0), (1, 0), (1, 1)):
            self.handler.join(requester(vw, stage), "127.0.0.1:7300")
        zeros = [torch.zeros(size) for size in _SIZES]
        self.handler.push(push_header(requester(), None, self._slices), encode(zeros))
        self.handler.initialized(requester())
        wait_until(self._is_published, timeout_seconds=SECONDS, what="clock 0 to be published")
        for vw in (0, 1):
            self.handler.push(push_header(requester(vw), 0, self._slices), encode(zeros))
        self.handler.staged(requester(), Wave(0), ((0, 1),), segment=Clock(0))

    def _is_published(self) -> bool:
        try:
            list(self.handler.pull(PullHeader(requester(), Clock(0), self._slices)))
        except ClockNotPublished:
            return False
        return True

    def control_cases(self) -> Iterator[BadInput]:
        yield from service_cases(shard_pb.DESCRIPTOR.services_by_name["ParameterServerService"], self._valid())

    def _valid(self) -> Mapping[str, Message]:
        who = convert_shard.requester_to_proto(requester())
        other = convert_shard.requester_to_proto(requester(1))
        file = shard_pb.CheckpointFile(name="vw-1-stage-0.safetensors", sha256="0" * 64, num_bytes=3)
        shard_file = shard_pb.CheckpointFile(name="shard-0.safetensors", sha256="0" * 64, num_bytes=3)
        return {
            "Configure": shard_pb.ConfigureRequest(config=wire.to_json(ShardConfig, self.config)),
            "Release": shard_pb.ReleaseRequest(job_id="other"),
            "Join": shard_pb.JoinRequest(requester=who, link_address="127.0.0.1:7300"),
            "ReportInitialized": shard_pb.ReportInitializedRequest(requester=who),
            "ReportStaged": shard_pb.ReportStagedRequest(
                requester=other, wave=0, blocks=[shard_pb.Block(indices=[5, 6])]
            ),
            "HoldClock": shard_pb.HoldClockRequest(requester=who, switch=0),
            "RequestBarrier": shard_pb.RequestBarrierRequest(job_id=JOB, term=1, reason="stop"),
            "Evict": shard_pb.EvictRequest(job_id=JOB, term=1, vw=0, incarnation=0),
            "Drain": shard_pb.DrainRequest(job_id=JOB, term=1, vw=0, incarnation=0),
            "Admit": shard_pb.AdmitRequest(job_id=JOB, term=1, vw=2, incarnation=0, num_stages=1),
            "ReportShardCheckpoint": shard_pb.ReportShardCheckpointRequest(
                job_id=JOB, term=1, shard=0, clock=0, files=[shard_file]
            ),
            "KeepRun": shard_pb.KeepRunRequest(
                job_id=JOB, term=1, run=wire.to_json(RunDocument, run_document(self.config))
            ),
            "DescribeRun": shard_pb.DescribeRunRequest(job_id=JOB),
            "GetShardClocks": shard_pb.GetShardClocksRequest(job_id=JOB),
            "GetProgress": shard_pb.GetProgressRequest(requester=who),
            "ReportCheckpoint": shard_pb.ReportCheckpointRequest(requester=other, clock=0, files=[file]),
            "FollowLog": shard_pb.FollowLogRequest(job_id=JOB, term=1, start=0, requester=who),
            "Acknowledge": shard_pb.AcknowledgeRequest(job_id=JOB, term=1, shard=0, num_records=1),
        }

    def tensor_cases(self) -> Iterator[BadInput]:
        service = f"/{shard_methods.TENSOR_SERVICE}"
        push = convert_shard.push_header_to_proto(push_header(requester(1), 2, self._slices))
        pull = convert_shard.pull_header_to_proto(PullHeader(requester(), Clock(0), self._slices))
        mean = SliceHeader("mean", 0, sum(_SIZES), "float32")
        buffers = convert_shard.buffers_header_to_proto(BuffersHeader(requester(), Clock(0), (mean,)))
        yield from push_cases(f"{service}/{shard_methods.PUSH}", push, _NUM_BYTES)
        yield from pull_cases(f"{service}/{shard_methods.PULL}", pull)
        yield from push_cases(f"{service}/{shard_methods.PUSH_BUFFERS}", buffers, _NUM_BYTES)
        yield from pull_cases(f"{service}/{shard_methods.PULL_BUFFERS}", buffers)

    def still_works(self) -> None:
        """A pull, and a question to the clock shard."""
        with closing(GrpcClock(self.address, job_id=JOB, term=self.config.term)) as clock:
            assert clock.progress(requester()).clock == 0

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
        hello = link_pb.LinkHello(requester=convert_shard.requester_to_proto(self._neighbour), room=4)
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
        news = [convert.news_to_proto(StageNews(key, StageReady(7)))]
        found = InspectionResult(self.job_id, model())
        member = pb.MemberInfo(
            role=pb.MEMBER_ROLE_WORKER,
            id="x",
            host="h",
            pid=1,
            devices=[pb.Device(device="x/0", type="cpu", memory_bytes=1, torch_device="cpu")],
        )
        told = {str(self.job_id): convert.clocks_to_proto(clocks(1, 2))}
        handed_in = convert_jobs.submission_to_proto(submission(job(), request_id="another-request"))
        return {
            "Register": pb.RegisterRequest(member=member),
            "Heartbeat": pb.HeartbeatRequest(
                member_id="ps0",
                registration=shard,
                clocks=told,
                job_ids=[self.job_id],
                lost_jobs={"another": "its disk is gone"},
                conditions=[
                    pb.JobCondition(
                        job_id=self.job_id,
                        condition=pb.Condition(
                            kind="disk_nearly_full", who="the disk at /", sentence="it is full", since=1.0, times=1
                        ),
                    )
                ],
            ),
            "Leave": pb.LeaveRequest(member_id="w", registration="none of its own"),
            "WatchCommands": pb.WatchCommandsRequest(agent_id="n0", registration=agent),
            "Report": pb.ReportRequest(
                agent_id="n0", registration=agent, batch=100, news=[*news, convert.news_to_proto(found)]
            ),
            "CertifyStage": pb.CertifyStageRequest(
                agent_id="n0", registration=agent, stage=convert.stage_key_to_proto(key), request_pem=b"none"
            ),
            "SubmitJob": handed_in,
            "StopJob": pb.StopJobRequest(job_id=self.job_id, mode=pb.STOP_MODE_CHECKPOINT),
            "MeasureLinks": pb.MeasureLinksRequest(request_id="0123456789abcdef"),
            "DrainWorker": pb.DrainWorkerRequest(job_id=self.job_id, vw=1),
            "AddWorker": pb.AddWorkerRequest(job_id=self.job_id, vw=1),
            "Depart": pb.DepartRequest(agent_id="n0", registration=agent),
            "GetStatus": pb.GetStatusRequest(job_id=self.job_id),
            "WatchJob": pb.WatchJobRequest(job_id=self.job_id),
            "ListMembers": pb.ListMembersRequest(),
            "GetClocks": pb.GetClocksRequest(job_id=self.job_id),
            "WatchClocks": pb.WatchClocksRequest(job_id=self.job_id),
        }

    def still_works(self) -> None:
        with closing(CoordinatorClient(self.address)) as client:
            assert client.status(self.job_id).job_id == self.job_id

    def close(self) -> None:
        self.server.stop(grace_seconds=0.0)
