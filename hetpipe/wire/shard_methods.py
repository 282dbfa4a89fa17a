"""The calls of a parameter-server shard, named once for servicer and client.

`TensorService` moves raw bytes: the first message of a stream is a serialized header, the others are chunks
(`server.shard.chunks`), with identity serializers on both ends.
"""

from __future__ import annotations

from typing import Final

from hetpipe.proto.v1 import parameter_server_pb2 as pb
from hetpipe.wire.method import Method, Streaming, Unary

SERVICE: Final = "hetpipe.proto.v1.ParameterServerService"
TENSOR_SERVICE: Final = "hetpipe.proto.v1.TensorService"

CONFIGURE = Unary("Configure", pb.ConfigureRequest, pb.ConfigureResponse)
RELEASE = Unary("Release", pb.ReleaseRequest, pb.ReleaseResponse)
JOIN = Unary("Join", pb.JoinRequest, pb.JoinResponse)
REPORT_INITIALIZED = Unary("ReportInitialized", pb.ReportInitializedRequest, pb.ReportInitializedResponse)
REPORT_STAGED = Unary("ReportStaged", pb.ReportStagedRequest, pb.ReportStagedResponse)
HOLD_CLOCK = Unary("HoldClock", pb.HoldClockRequest, pb.HoldClockResponse)
REQUEST_BARRIER = Unary("RequestBarrier", pb.RequestBarrierRequest, pb.RequestBarrierResponse)
EVICT = Unary("Evict", pb.EvictRequest, pb.EvictResponse)
DRAIN = Unary("Drain", pb.DrainRequest, pb.DrainResponse)
ADMIT = Unary("Admit", pb.AdmitRequest, pb.AdmitResponse)
KEEP_RUN = Unary("KeepRun", pb.KeepRunRequest, pb.KeepRunResponse)
DESCRIBE_RUN = Unary("DescribeRun", pb.DescribeRunRequest, pb.DescribeRunResponse)
GET_SHARD_CLOCKS = Unary("GetShardClocks", pb.GetShardClocksRequest, pb.GetShardClocksResponse)
GET_PROGRESS = Unary("GetProgress", pb.GetProgressRequest, pb.GetProgressResponse)
REPORT_CHECKPOINT = Unary("ReportCheckpoint", pb.ReportCheckpointRequest, pb.ReportCheckpointResponse)
FOLLOW_LOG = Streaming("FollowLog", pb.FollowLogRequest, pb.FollowLogResponse)
ACKNOWLEDGE = Unary("Acknowledge", pb.AcknowledgeRequest, pb.AcknowledgeResponse)
REPORT_SHARD_CHECKPOINT = Unary(
    "ReportShardCheckpoint", pb.ReportShardCheckpointRequest, pb.ReportShardCheckpointResponse
)

#: Every call of the control service; a test compares it with the descriptors.
METHODS: Final[tuple[Method, ...]] = (
    CONFIGURE,
    RELEASE,
    JOIN,
    REPORT_INITIALIZED,
    REPORT_STAGED,
    HOLD_CLOCK,
    REQUEST_BARRIER,
    EVICT,
    DRAIN,
    ADMIT,
    KEEP_RUN,
    DESCRIBE_RUN,
    GET_SHARD_CLOCKS,
    GET_PROGRESS,
    REPORT_CHECKPOINT,
    FOLLOW_LOG,
    ACKNOWLEDGE,
    REPORT_SHARD_CHECKPOINT,
)

#: Raw calls, by name.
PUSH: Final = "Push"
PULL: Final = "Pull"
PUSH_BUFFERS: Final = "PushBuffers"
PULL_BUFFERS: Final = "PullBuffers"
