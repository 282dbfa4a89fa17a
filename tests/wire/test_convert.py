"""What goes out comes back the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
from google.protobuf.message import Message

from hetpipe.decide.lifecycle.configs import Assignment, stage_commands
from hetpipe.decide.planner.partition import plan_job
from hetpipe.errors import ProtocolViolation
from hetpipe.proto.v1 import coordinator_pb2 as pb
from hetpipe.values.commands import (
    AgentNews,
    ChildExit,
    Command,
    InspectCommand,
    InspectionResult,
    InspectionStep,
    KeepLinksCommand,
    LinkAwaited,
    LinkResult,
    LinkTask,
    MeasureLinkCommand,
    NumberedCommand,
    StageKey,
    StageNews,
    StopJobCommand,
    StopVirtualWorkerCommand,
)
from hetpipe.values.conditions import Condition, ConditionKind
from hetpipe.values.events import (
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
    Submission,
    Waiting,
    WorkerLeft,
    WorkerLost,
    WorkerQuarantined,
    WorkerRejoined,
    WorkerReplanned,
    WorkerStatus,
)
from hetpipe.values.ids import AgentId, Clock, Incarnation, ShardIndex, StageIndex, Term
from hetpipe.values.ids import VirtualWorkerIndex as Vw
from hetpipe.values.life_state import LifeState
from hetpipe.values.link_measurement import MeasuredLinks
from hetpipe.values.measurement import ProfileStep
from hetpipe.values.members import Member, MemberId, MemberInfo, MemberRole
from hetpipe.values.plan import ModelReport
from hetpipe.values.run import (
    StageDone,
    StageEvaluation,
    StageFailed,
    StageReady,
    StageReport,
    StageWaiting,
)
from hetpipe.wire import convert, convert_conditions, convert_jobs
from hetpipe.wire.coordinator_methods import METHODS, SERVICE
from hetpipe.wire.method import Streaming
from tests.decide.lifecycle.test_known_links import copies, link
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

PLAN = plan_job(job(), model(), [agent_info()], Term(1), JOB_ID)
KEY = StageKey(JOB_ID, Vw(1), StageIndex(0), FIRST_LIFE, Term(1))
START = stage_commands(
    Assignment(job=job(), submission=submission(job()), plan=PLAN, agents=(agent_info(),), shards=(shard_member(0),))
)[0]


CONDITIONS = (
    Condition(ConditionKind.DISK_NEARLY_FULL, "the disk at /runs", "it is nearly full", 12.5, 14.0, "room again", 2),
    Condition(ConditionKind.STORE_UNREACHABLE, "Redis", "it is away", 13.5, times=1),
)


def over_the_wire(message: Message) -> Message:
    return type(message).FromString(message.SerializeToString())


def test_conditions() -> None:
    told = {JOB_ID: CONDITIONS}
    sent = convert_conditions.job_conditions_to_proto(told)
    back = convert_conditions.job_conditions_from_proto([over_the_wire(message) for message in sent])  # type: ignore[misc]
    assert back == told


@pytest.mark.parametrize(
    "message",
    [
        pb.Condition(kind="no_such_kind"),
        pb.Condition(kind="disk_nearly_full", since=-1.0),
        pb.Condition(kind="disk_nearly_full", since=float("nan")),
        pb.Condition(kind="disk_nearly_full", who="x" * 2_000),
        pb.Condition(kind="disk_nearly_full", times=1 << 60),
    ],
    ids=["kind", "before 1970", "no time", "a long name", "no count"],
)
def test_conditions_that_cannot_be_are_refused(message: pb.Condition) -> None:
    with pytest.raises(ProtocolViolation):
        convert_conditions.condition_from_proto(message)


def test_the_methods_are_those_of_the_proto_file() -> None:
    service = pb.DESCRIPTOR.services_by_name["CoordinatorService"]

    assert service.full_name == SERVICE
    assert [
        (method.name, method.input_type.name, method.output_type.name, method.server_streaming)
        for method in service.methods
    ] == [
        (method.name, method.request.DESCRIPTOR.name, method.response.DESCRIPTOR.name, isinstance(method, Streaming))
        for method in METHODS
    ]


@pytest.mark.parametrize(
    "info",
    [
        agent_member(),
        replace(agent_member(), stages=(KEY,)),
        shard_member(0),
        shard_member(3, term=9),
        MemberInfo(MemberRole.WORKER, MemberId("w"), "h", 1),
        replace(agent_member(), links=MeasuredLinks(links=(link("n0", "n1", 1e9),), copies=(copies("n0", 1e9),))),
    ],
)
def test_members(info: MemberInfo) -> None:
    member = Member(info, 7, 4.5)

    assert convert.member_from_proto(over_the_wire(convert.member_to_proto(member))) == member  # type: ignore[arg-type]


def test_clocks() -> None:
    marks = {Vw(0): Clock(4), Vw(2): Clock(5)}
    snapshot = replace(
        clocks(3, 2, 5, samples=80, minibatches=20, max_distance=3),
        staged=marks,
        durable={Vw(2): Clock(1)},
        applied=(ShardIndex(1), ShardIndex(0)),
    )

    back = convert.clocks_from_proto(over_the_wire(convert.clocks_to_proto(snapshot)))  # type: ignore[arg-type]

    assert back == snapshot
    assert list(back.local) == [0, 1, 2]


@pytest.mark.parametrize(
    "command",
    [
        InspectCommand(JOB_ID, "{}", "/code", "/run"),
        InspectCommand(JOB_ID, "{}", "/code", "/run", with_model=False, measure=("cpu", "T4")),
        START,
        StopJobCommand(JOB_ID),
        StopVirtualWorkerCommand(JOB_ID, Vw(1), Incarnation(2), Term(1)),
        MeasureLinkCommand(JOB_ID, LinkTask(number=2, other=AgentId("n1"), run_dir="/run", link="grpc")),
        MeasureLinkCommand(
            JOB_ID,
            LinkTask(number=0, other=AgentId("n1"), run_dir="/run", address="n0.host:7000", with_copies=True),
        ),
        KeepLinksCommand(JOB_ID, MeasuredLinks(links=(link("n0", "n1", 1e9),))),
    ],
)
def test_commands(command: Command) -> None:
    numbered = NumberedCommand(4, command)

    assert convert.command_from_proto(over_the_wire(convert.command_to_proto(numbered))) == numbered  # type: ignore[arg-type]


REPORTS: list[StageReport] = [
    StageReady(7, "grpc: the job says so"),
    progress(samples=3, clock=2, loss=0.5),
    StageWaiting("a waits for b", 5.5),
    StageEvaluation(Clock(1), 0, 3, {"loss": 1.5}, minibatches=4),
    StageEvaluation(Clock(2), 0, 2, {"loss": 1.5}, minibatches=6, within_epoch=True, whole=False),
    StageFailed("LinkClosed", "its neighbour is gone", secondary=True),
    StageDone(Clock(3), "end"),
]


@pytest.mark.parametrize(
    "news",
    [
        *(StageNews(KEY, report) for report in REPORTS),
        LinkAwaited(JOB_ID, 3, "n0.host:7000"),
        LinkResult(JOB_ID, 3, MeasuredLinks(links=(link("n0", "n1", 1e9),), copies=(copies("n0", 1e9),))),
        LinkResult(JOB_ID, 0, problem="nobody came"),
        InspectionResult(JOB_ID, model()),
        InspectionResult(JOB_ID, None, "JobError", ("a", "b")),
        InspectionResult(JOB_ID, None, measurements=(measurement("cpu"), measurement("T4", layer(parameters=3)))),
        InspectionStep(JOB_ID, ProfileStep("cpu", "head", 2, 8)),
        ChildExit(KEY, 12, -9),
        ChildExit(KEY, 12, 3, "MemoryError"),
        ChildExit(KEY, 12, -9, ordered=True),
    ],
)
def test_news(news: AgentNews) -> None:
    assert convert.news_from_proto(over_the_wire(convert.news_to_proto(news))) == news  # type: ignore[arg-type]


def picture() -> ProgressTable:
    driver = Driver().to(JobState.RUNNING)
    driver.report(0, 1, progress(samples=10, loss=0.25, weight_bytes=300, activation_bytes=20))
    driver.wait(1.0)
    return driver.events(ProgressTable)[-1]


@pytest.mark.parametrize(
    "event",
    [
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
    ],
)
def test_events(event: JobEvent) -> None:
    numbered = NumberedEvent(9, event)

    assert convert_jobs.event_from_proto(over_the_wire(convert_jobs.event_to_proto(numbered))) == numbered  # type: ignore[arg-type]


@pytest.mark.parametrize("restore", [None, "/old/checkpoint"])
@pytest.mark.parametrize("report", [None, model()])
def test_submissions(restore: str | None, report: ModelReport | None) -> None:
    handed_in = Submission("0123456789", "{}", "/run", "/code", restore, model=report)

    back = convert_jobs.submission_from_proto(over_the_wire(convert_jobs.submission_to_proto(handed_in)))  # type: ignore[arg-type]

    assert back == handed_in


@pytest.mark.parametrize(
    "status",
    [
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
    ],
)
def test_status(status: JobStatus) -> None:
    assert convert_jobs.status_from_proto(over_the_wire(convert_jobs.status_to_proto(status))) == status  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", StopMode)
def test_stop_modes(mode: StopMode) -> None:
    assert convert_jobs.stop_mode_from_proto(convert_jobs.stop_mode_to_proto(mode)) is mode


def test_what_is_left_out_or_unknown_is_refused() -> None:
    for refuse in (
        lambda: convert.member_info_from_proto(pb.MemberInfo(id="n0")),
        lambda: convert.member_info_from_proto(pb.MemberInfo(role=pb.MEMBER_ROLE_AGENT)),
        lambda: convert.member_info_from_proto(
            pb.MemberInfo(role=pb.MEMBER_ROLE_AGENT, id="n0", host="h", links_json='{"links": [{}]}')
        ),
        lambda: convert.member_info_from_proto(pb.MemberInfo(role=99, id="n0")),  # type: ignore[arg-type]
        lambda: convert.command_from_proto(pb.WatchCommandsResponse(sequence=1)),
        lambda: convert.news_from_proto(pb.AgentNews()),
        lambda: convert.news_from_proto(pb.AgentNews(stage=pb.StageNews(report_json='{"kind":"sung"}'))),
        lambda: convert_jobs.event_from_proto(pb.WatchJobResponse()),
        lambda: convert_jobs.event_from_proto(pb.WatchJobResponse(ended=pb.JobEnded(state=8, result_json="["))),  # type: ignore[arg-type]
        lambda: convert_jobs.state_from_proto(0),
        lambda: convert_jobs.state_from_proto(99),
        lambda: convert_jobs.worker_from_proto(pb.WorkerStatus(vw=1, state="asleep")),
        lambda: convert_jobs.stop_mode_from_proto(0),
        lambda: convert_jobs.submission_from_proto(pb.SubmitJobRequest(run_dir="/run")),
        lambda: convert_jobs.process_from_proto(pb.Process(role="cook")),
    ):
        with pytest.raises(ProtocolViolation):
            refuse()
