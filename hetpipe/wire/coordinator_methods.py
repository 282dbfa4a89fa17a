"""The calls of `CoordinatorService`, as typed values. A test compares them with the proto file."""

from __future__ import annotations

from hetpipe.proto.v1 import coordinator_pb2 as pb
from hetpipe.wire.method import Method, Streaming, Unary

SERVICE = "hetpipe.proto.v1.CoordinatorService"

REGISTER = Unary("Register", pb.RegisterRequest, pb.RegisterResponse)
HEARTBEAT = Unary("Heartbeat", pb.HeartbeatRequest, pb.HeartbeatResponse)
LEAVE = Unary("Leave", pb.LeaveRequest, pb.LeaveResponse)
WATCH_COMMANDS = Streaming("WatchCommands", pb.WatchCommandsRequest, pb.WatchCommandsResponse)
REPORT = Unary("Report", pb.ReportRequest, pb.ReportResponse)
SUBMIT_JOB = Unary("SubmitJob", pb.SubmitJobRequest, pb.SubmitJobResponse)
STOP_JOB = Unary("StopJob", pb.StopJobRequest, pb.StopJobResponse)
DRAIN_WORKER = Unary("DrainWorker", pb.DrainWorkerRequest, pb.DrainWorkerResponse)
ADD_WORKER = Unary("AddWorker", pb.AddWorkerRequest, pb.AddWorkerResponse)
DEPART = Unary("Depart", pb.DepartRequest, pb.DepartResponse)
GET_STATUS = Unary("GetStatus", pb.GetStatusRequest, pb.GetStatusResponse)
WATCH_JOB = Streaming("WatchJob", pb.WatchJobRequest, pb.WatchJobResponse)
LIST_MEMBERS = Unary("ListMembers", pb.ListMembersRequest, pb.ListMembersResponse)
GET_CLOCKS = Unary("GetClocks", pb.GetClocksRequest, pb.GetClocksResponse)
WATCH_CLOCKS = Streaming("WatchClocks", pb.WatchClocksRequest, pb.WatchClocksResponse)
MEASURE_LINKS = Unary("MeasureLinks", pb.MeasureLinksRequest, pb.MeasureLinksResponse)
CERTIFY_STAGE = Unary("CertifyStage", pb.CertifyStageRequest, pb.CertifyStageResponse)

METHODS: tuple[Method, ...] = (
    REGISTER,
    HEARTBEAT,
    LEAVE,
    WATCH_COMMANDS,
    REPORT,
    SUBMIT_JOB,
    STOP_JOB,
    DRAIN_WORKER,
    ADD_WORKER,
    DEPART,
    GET_STATUS,
    WATCH_JOB,
    LIST_MEMBERS,
    GET_CLOCKS,
    WATCH_CLOCKS,
    MEASURE_LINKS,
    CERTIFY_STAGE,
)
