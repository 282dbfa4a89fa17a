"""Examples of every request and reply of the table of calls, by class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from hetpipe.code_archive import digest_of
from hetpipe.decide.lifecycle.configs import Assignment, stage_commands
from hetpipe.decide.planner.partition import plan_job
from hetpipe.decide.sync.records import (
    BarrierRecord,
    CommitRecord,
    EvictRecord,
    HandoverRecord,
    InitializeRecord,
    PlanRecord,
    PrepareRecord,
    PublishRecord,
    SegmentMember,
    SegmentRecord,
    TermRecord,
)
from hetpipe.values.commands import (
    AgentReport,
    ChildExit,
    Command,
    InspectCommand,
    InspectionPhase,
    InspectionResult,
    InspectionStep,
    KeepLinksCommand,
    KeyedStageReport,
    LinkAwaited,
    LinkResult,
    LinkTask,
    MeasureLinkCommand,
    NumberedCommand,
    StageKey,
    StopJobCommand,
    StopVirtualWorkerCommand,
)
from hetpipe.values.conditions import Condition, ConditionKind
from hetpipe.values.events import (
    CodeArchive,
    ConditionCleared,
    ConditionRaised,
    Evaluated,
    EvaluationSummary,
    JobEnded,
    JobEvent,
    JobState,
    JobStatus,
    NumberedEvent,
    ProcessStatus,
    ProgressTable,
    ReplanJudged,
    Rewound,
    StateChanged,
    StopMode,
    Straggling,
    Waiting,
    WorkerLeft,
    WorkerLost,
    WorkerQuarantined,
    WorkerRejoined,
    WorkerReplanned,
    WorkerStatus,
)
from hetpipe.values.ids import AgentId, Clock, Incarnation, JobId, ShardIndex, StageIndex, Term, Wave
from hetpipe.values.ids import VirtualWorkerIndex as Vw
from hetpipe.values.life_state import LifeState
from hetpipe.values.link_measurement import LinksProgress, MeasuredLinks
from hetpipe.values.measurement import ProfileStep
from hetpipe.values.members import Lease, Member, MemberId, MemberInfo, MemberRole, Registration, Renewal
from hetpipe.values.requests import (
    BuffersHeader,
    CheckpointFile,
    Meeting,
    MemoryOffer,
    PullHeader,
    PushReply,
    SliceHeader,
    Watermarks,
)
from hetpipe.values.run import (
    StageConditions,
    StageDone,
    StageEvaluation,
    StageFailed,
    StagePhase,
    StageReady,
    StageReport,
    StageWaiting,
)
from hetpipe.values.run_document import RunDescription
from hetpipe.values.sync import PlanMove, Progress
from hetpipe.wire import calls
from tests.decide.lifecycle.test_known_links import copies, link
from tests.fuzz.decoder import LIVES, RUN, SHARD_CONFIG
from tests.profiler.builders import layer, measurement
from tests.server.coordinator.builders import (
    FIRST_LIFE,
    JOB_ID,
    agent_info,
    agent_member,
    clocks,
    job,
    model,
    progress,
    shard_member,
    submission,
)
from tests.server.coordinator.machine_driver import Driver
from tests.server.shard.builders import headers_of, push_header, requester

PLAN = plan_job(job(), model(), [agent_info()], Term(1), JOB_ID)
KEY = StageKey(JOB_ID, Vw(1), StageIndex(0), FIRST_LIFE, Term(1))
START = stage_commands(
    Assignment(job=job(), submission=submission(job()), plan=PLAN, agents=(agent_info(),), shards=(shard_member(0),))
)[0]
LINKS = MeasuredLinks(links=(link("n0", "n1", 1e9),), copies=(copies("n0", 1e9),))
CONDITIONS = (
    Condition(ConditionKind.DISK_NEARLY_FULL, "the disk at /runs", "it is nearly full", 12.5, 14.0, "room again", 2),
    Condition(ConditionKind.STORE_UNREACHABLE, "Redis", "it is away", 13.5, times=1),
)

MEMBERS = (
    agent_member(),
    replace(agent_member(), stages=(KEY,)),
    shard_member(0),
    shard_member(3, term=9),
    MemberInfo(MemberRole.WORKER, MemberId("w"), "h", 1),
    replace(agent_member(), links=LINKS),
)

CODE = CodeArchive(digest_of(b"PK"), b"PK")

COMMANDS: tuple[Command, ...] = (
    InspectCommand(JOB_ID, "{}", "/code", "/run"),
    InspectCommand(JOB_ID, "{}", "/code", "/run", with_model=False, measure=("cpu", "T4"), code=CODE.digest),
    START,
    StopJobCommand(JOB_ID),
    StopVirtualWorkerCommand(JOB_ID, Vw(1), Incarnation(2), Term(1)),
    MeasureLinkCommand(JOB_ID, LinkTask(number=2, other=AgentId("n1"), run_dir="/run", link="grpc")),
    MeasureLinkCommand(
        JOB_ID, LinkTask(number=0, other=AgentId("n1"), run_dir="/run", address="n0.host:7000", with_copies=True)
    ),
    KeepLinksCommand(JOB_ID, LINKS),
)

REPORTS: tuple[StageReport, ...] = (
    StagePhase("importing the user's code", 2.5),
    StageReady(7, "grpc: the job says so"),
    progress(samples=3, clock=2, loss=0.5),
    StageWaiting("a waits for b", 5.5),
    StageEvaluation(Clock(1), 0, 3, {"loss": 1.5}, minibatches=4),
    StageEvaluation(Clock(2), 0, 2, {"loss": 1.5}, minibatches=6, within_epoch=True, whole=False),
    StageConditions(CONDITIONS),
    StageFailed("LinkClosed", "its neighbour is gone", secondary=True),
    StageDone(Clock(3), "end"),
)

NEWS: tuple[AgentReport, ...] = (
    *(KeyedStageReport(KEY, report) for report in REPORTS),
    LinkAwaited(JOB_ID, 3, "n0.host:7000"),
    LinkResult(JOB_ID, 3, LINKS),
    LinkResult(JOB_ID, 0, problem="nobody came"),
    InspectionResult(JOB_ID, model()),
    InspectionResult(JOB_ID, None, "JobError", ("a", "b")),
    InspectionResult(JOB_ID, None, measurements=(measurement("cpu"), measurement("T4", layer(parameters=3)))),
    InspectionStep(JOB_ID, ProfileStep("cpu", "head", 2, 8)),
    InspectionPhase(JOB_ID, "loading the data", 3.0),
    ChildExit(KEY, 12, -9),
    ChildExit(KEY, 12, 3, "MemoryError"),
    ChildExit(KEY, 12, -9, ordered=True),
)


def picture() -> ProgressTable:
    """A picture of a running job."""
    driver = Driver().to(JobState.RUNNING)
    driver.report(0, 1, progress(samples=10, loss=0.25, weight_bytes=300, activation_bytes=20))
    driver.wait(1.0)
    return driver.events(ProgressTable)[-1]


EVENTS: tuple[JobEvent, ...] = (
    *(StateChanged(state) for state in JobState),
    StateChanged(JobState.RUNNING, "links between stages: gloo"),
    Waiting("a waits for b", 5.0),
    Evaluated(Clock(3), 1, 10, {"accuracy": 0.5, "loss": 1.0}, minibatches=7, rewinds=2),
    Evaluated(Clock(4), 2, 5, {"loss": 1.0}, minibatches=9, within_epoch=True, whole=False),
    picture(),
    replace(picture(), straggler=Vw(0), slow=(Straggling(Vw(0), StageIndex(1), 9.5),)),
    WorkerLost(Vw(1), Incarnation(2), "it was killed"),
    WorkerRejoined(Vw(1), Incarnation(3)),
    WorkerLeft(Vw(1), Incarnation(3), returns=True),
    WorkerLeft(Vw(1), Incarnation(3), returns=False),
    WorkerQuarantined(Vw(1), "it died too often"),
    WorkerReplanned(Vw(1), Incarnation(3), (3, 5), (7, 1), 0.5),
    WorkerReplanned(Vw(1), Incarnation(3), (3, 5), (8,), None),
    ReplanJudged(Vw(1), 0.25, "it is faster"),
    ReplanJudged(Vw(1), None, "it did not get ready"),
    Rewound(Clock(9), Clock(4), "/run/rewind-1", "a disk is gone"),
    ConditionRaised(ConditionKind.CHECKPOINT_GIVEN_UP, ("checkpoints",), "no room", 12.5, 3),
    ConditionCleared(ConditionKind.DURABILITY_LOST, ("parameter server 0",), "room again", 13.5, 1),
    JobEnded(JobState.FINISHED, result={"loss": {"last": None}, "clocks": {"0": 3}}, conditions=CONDITIONS),
    JobEnded(JobState.FAILED, "it broke", "JobError", ("one", "two")),
)

STATUSES = (
    JobStatus(None, "", None, "", "", conditions=CONDITIONS),
    JobStatus(
        JOB_ID,
        "digits",
        JobState.RUNNING,
        "/run",
        "",
        (ProcessStatus("coordinator", 0, None, "h", 1, "up"), ProcessStatus("stage", 1, Vw(0), "h", 2, "ready")),
        clocks(1, 1),
        picture(),
        (WorkerStatus(Vw(1), Incarnation(2), 2, LifeState.AWAITING),),
        3,
        evaluations=EvaluationSummary(
            5,
            Evaluated(Clock(3), 1, 10, {"accuracy": 0.5, "loss": 0.5}, minibatches=7),
            Evaluated(Clock(6), 2, 10, {"loss": 1.0}, minibatches=14, rewinds=2),
        ),
    ),
)

_MARKS = {Vw(0): Clock(4), Vw(2): Clock(5)}
CLOCKS = replace(
    clocks(3, 2, 5, samples=80, minibatches=20, max_distance=3),
    staged=_MARKS,
    durable={Vw(2): Clock(1)},
    applied=(ShardIndex(1), ShardIndex(0)),
)

RECORDS = (
    TermRecord(0, Term(1)),
    InitializeRecord(1, Clock(0), Vw(0), Incarnation(0)),
    SegmentRecord(
        2,
        Clock(0),
        ("epoch",),
        0,
        (SegmentMember(Vw(0), Incarnation(0), 1, joined=True),),
        (SegmentMember(Vw(1), Incarnation(3), 2, joined=False),),
    ),
    CommitRecord(3, Vw(0), Incarnation(0), Wave(0), 1),
    BarrierRecord(4, Clock(4), "epoch", 0),
    PublishRecord(5, Clock(1), (Clock(0), Clock(1))),
    EvictRecord(6, Vw(1), Incarnation(3), Clock(0)),
    PlanRecord(7, Vw(0), Incarnation(0), Clock(3), 1, (0, 1, 4)),
    PrepareRecord(8, Vw(0), Incarnation(0), (0, 1, 4)),
    HandoverRecord(9, Vw(1), Incarnation(0), Clock(4), whole=True),
)

_AGENT, _TOKEN, _MEMBER = AgentId("n0"), Registration("0123"), MemberId("n0")
_JOB, _TERM, _VW, _LIFE, _SHARD = JobId("job"), Term(1), Vw(1), Incarnation(2), ShardIndex(1)
_FILE = CheckpointFile("shard-1.safetensors", "0f" * 32, 10)
_HEADERS = headers_of(SHARD_CONFIG.slices)
_WORKER = WorkerStatus(_VW, _LIFE, 1, LifeState.LEAVING, ("n0/0",))

_EXAMPLES: Sequence[object] = (
    *(calls.RegisterRequest(info) for info in MEMBERS),
    Lease(_TOKEN, 10.0, 3, 7),
    calls.HeartbeatRequest(_MEMBER, _TOKEN),
    calls.HeartbeatRequest(
        _MEMBER,
        _TOKEN,
        clocks={_JOB: CLOCKS},
        jobs=(_JOB, JOB_ID),
        last_command=3,
        lost={JOB_ID: "its disk is gone"},
        conditions={_JOB: CONDITIONS},
    ),
    Renewal(10.0, (_JOB,), 7),
    calls.LeaveRequest(_MEMBER, _TOKEN),
    calls.WatchCommandsRequest(_AGENT, _TOKEN, 4),
    *(NumberedCommand(number, command) for number, command in enumerate(COMMANDS, 1)),
    *(calls.ReportRequest(_AGENT, _TOKEN, 4, (reports,)) for reports in NEWS),
    calls.ReportRequest(_AGENT, _TOKEN, 5, NEWS),
    calls.CertifyStageRequest(_AGENT, _TOKEN, KEY, b"-----BEGIN"),
    calls.Certificate(b"-----BEGIN"),
    calls.FetchCodeRequest(_AGENT, _TOKEN, CODE.digest),
    CODE,
    calls.SubmitJobRequest(submission(job())),
    calls.SubmitJobRequest(replace(submission(job()), restore="/old/checkpoint", model=model(), has_begun=True)),
    calls.SubmitJobRequest(replace(submission(job()), code=CODE)),
    calls.SubmittedJob(_JOB),
    calls.StopJobRequest(StopMode.NOW),
    calls.StopJobRequest(StopMode.CHECKPOINT, _JOB),
    calls.StoppingJob(JobState.STOPPING),
    calls.DrainWorkerRequest(_VW, _JOB),
    _WORKER,
    calls.AddWorkerRequest(),
    calls.AddWorkerRequest(Vw(0), _JOB),
    calls.MoveWorkerRequest(_VW, (3, 1)),
    calls.MoveWorkerRequest(Vw(0), (1, 2, 1), _JOB),
    calls.MovingWorker(_WORKER, (2, 2)),
    calls.Workers((_WORKER,)),
    calls.DepartRequest(_AGENT, _TOKEN),
    calls.MeasureLinksRequest("0123456789", fresh=True),
    LinksProgress(done=1, total=3, awaited="n0 measures", remark="n1 was skipped"),
    calls.GetStatusRequest(),
    calls.GetStatusRequest(_JOB),
    *STATUSES,
    calls.WatchJobRequest(_JOB, 4),
    *(NumberedEvent(9, event) for event in EVENTS),
    calls.ListMembersRequest(),
    calls.Members(tuple(Member(info, 7, 4.5) for info in MEMBERS)),
    calls.GetClocksRequest(_JOB),
    calls.KnownClocks(None),
    calls.KnownClocks(CLOCKS),
    calls.WatchClocksRequest(_JOB),
    CLOCKS,
    SHARD_CONFIG,
    calls.ReleaseRequest(_JOB),
    calls.JoinRequest(requester(), "h:1", "h:2", only_meets=True),
    Meeting("h:1", "", (StageIndex(0), StageIndex(2)), makes_weights=True),
    calls.ReportInitializedRequest(requester()),
    calls.ReportStagedRequest(requester(), Wave(3), ((1, 2), (3,)), Clock(2)),
    calls.ReportStagedRequest(requester(1), Wave(0), (), Clock(0)),
    calls.HoldClockRequest(requester(), 3),
    calls.HeldClock(Clock(2), Clock(8), 1),
    calls.ReportPreparedRequest(requester(), 17, can=True),
    calls.RequestBarrierRequest(_JOB, _TERM, "stop"),
    calls.Barrier(Clock(8)),
    calls.EvictRequest(_JOB, _TERM, _VW, _LIFE),
    calls.DrainRequest(_JOB, _TERM, _VW, _LIFE),
    calls.MoveRequest(_JOB, _TERM, _VW, PlanMove(_LIFE, (0, 3, 4), "straggler", "it is slow", 0.5, live=True)),
    calls.AdmitRequest(_JOB, _TERM, _VW, _LIFE, 2),
    calls.KeepRunRequest(_JOB, _TERM, RUN),
    calls.DescribeRunRequest(_JOB),
    RunDescription(Term(2), RUN, LIVES, clocks(3, 4), ("stop",), is_over=False),
    calls.GetShardClocksRequest(_JOB),
    calls.GetProgressRequest(requester()),
    calls.ShareMemoryRequest(requester(), "Push"),
    MemoryOffer("hetpipe-0", "1f", "2e", ""),
    MemoryOffer("", "", "", "none left"),
    Progress(Clock(1), 0, b"\x01", 1, 1),
    calls.ReportCheckpointRequest(requester(), Clock(4), (_FILE,)),
    calls.ReportCheckpointRequest(requester(), Clock(4), failure="no room"),
    calls.CheckpointParts(complete=True),
    calls.FollowLogRequest(_JOB, _TERM, -1, gathered=True, requester=requester()),
    calls.FollowLogRequest(_JOB, _TERM, 3),
    calls.LogRecords(RECORDS),
    *(calls.LogRecords((record,)) for record in RECORDS),
    calls.AcknowledgeRequest(_JOB, _TERM, _SHARD, 4),
    calls.AcknowledgeRequest(_JOB, _TERM, _SHARD, 4, 0, applied=True),
    calls.ReportShardCheckpointRequest(_JOB, _TERM, _SHARD, Clock(3), (_FILE,)),
    push_header(requester(), 0, _HEADERS),
    push_header(requester(), None, _HEADERS),
    PushReply(duplicate=True, marks=Watermarks(Clock(3), Clock(2), Clock(3))),
    PullHeader(requester(), Clock(0), _HEADERS),
    BuffersHeader(requester(), Clock(0), (SliceHeader("mean", 0, 5, "float32"),)),
)


def _by_class() -> Mapping[type, tuple[object, ...]]:
    found: dict[type, list[object]] = {}
    for example in _EXAMPLES:
        found.setdefault(type(example), []).append(example)
    return {kind: tuple(examples) for kind, examples in found.items()}


#: Class → examples of it; the fuzzer needs those of headers to fit what the decoder judges them by.
EXAMPLES = {kind: tuple(example for example in found) for kind, found in _by_class().items()}
