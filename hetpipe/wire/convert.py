"""Members, clocks, commands and news as messages and back, in pairs `x_to_proto` and `x_from_proto`.

`x_from_proto` accepts what `x_to_proto` makes and raises `ProtocolViolation` for a message without its essential parts.
"""

from __future__ import annotations

from collections.abc import Mapping

from hetpipe.errors import ProtocolViolation
from hetpipe.proto.v1 import coordinator_pb2 as pb
from hetpipe.values.addresses import split_address
from hetpipe.values.bounds import MAX_LISTED, MAX_SHARDS, MAX_STAGES, cut
from hetpipe.values.commands import (
    AgentNews,
    ChildExit,
    Command,
    InspectCommand,
    InspectionPhase,
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
    StartStageCommand,
    StopJobCommand,
    StopVirtualWorkerCommand,
)
from hetpipe.values.ids import Clock, Incarnation, JobId, ShardIndex, StageIndex, Term, VirtualWorkerIndex
from hetpipe.values.link_measurement import MeasuredLinks
from hetpipe.values.measurement import Measurement, ProfileStep
from hetpipe.values.members import Member, MemberId, MemberInfo, MemberRole
from hetpipe.values.plan import ModelReport
from hetpipe.values.run import AgentDevice, ClockSnapshot, StageConfig, StageReport
from hetpipe.values.wire import from_json, to_json
from hetpipe.wire.checks import check_counts, check_member, checked_job_id

_ROLE_TO_PROTO: dict[MemberRole, pb.MemberRole] = {
    MemberRole.AGENT: pb.MEMBER_ROLE_AGENT,
    MemberRole.PARAMETER_SERVER: pb.MEMBER_ROLE_PARAMETER_SERVER,
    MemberRole.WORKER: pb.MEMBER_ROLE_WORKER,
}
_ROLE_FROM_PROTO = {number: role for role, number in _ROLE_TO_PROTO.items()}


def device_to_proto(device: AgentDevice) -> pb.Device:
    """One device."""
    return pb.Device(
        device=device.device, type=device.type, memory_bytes=device.memory_bytes, torch_device=device.torch_device
    )


def device_from_proto(message: pb.Device) -> AgentDevice:
    """One device."""
    return AgentDevice(
        device=message.device,
        type=message.type,
        memory_bytes=message.memory_bytes,
        torch_device=message.torch_device,
    )


def member_info_to_proto(info: MemberInfo) -> pb.MemberInfo:
    """What a process tells of itself."""
    return pb.MemberInfo(
        role=_ROLE_TO_PROTO[info.role],
        id=info.id,
        host=info.host,
        pid=info.pid,
        address=info.address,
        devices=[device_to_proto(device) for device in info.devices],
        shard_index=info.shard_index,
        highest_term=info.highest_term,
        highest_fence=info.highest_fence,
        stages=[stage_key_to_proto(stage) for stage in info.stages],
        links_json=to_json(MeasuredLinks, info.links) if info.links else "",
    )


def member_info_from_proto(message: pb.MemberInfo) -> MemberInfo:
    """What a process tells of itself."""
    role = _ROLE_FROM_PROTO.get(message.role)
    if role is None or not message.id:
        raise ProtocolViolation(f"a member needs a role and an id, not role {message.role} and id {message.id!r:.80}")
    check_member(message)
    return MemberInfo(
        role=role,
        id=MemberId(message.id),
        host=message.host,
        pid=message.pid,
        address=message.address,
        devices=tuple(device_from_proto(device) for device in message.devices),
        shard_index=ShardIndex(message.shard_index) if message.HasField("shard_index") else None,
        highest_term=Term(message.highest_term),
        highest_fence=message.highest_fence,
        stages=tuple(stage_key_from_proto(stage) for stage in message.stages),
        links=from_json(MeasuredLinks, message.links_json) if message.links_json else MeasuredLinks(),
    )


def member_to_proto(member: Member) -> pb.Member:
    """A live member."""
    return pb.Member(
        info=member_info_to_proto(member.info), order=member.order, lease_seconds_left=member.lease_seconds_left
    )


def member_from_proto(message: pb.Member) -> Member:
    """A live member."""
    return Member(
        info=member_info_from_proto(message.info),
        order=message.order,
        lease_seconds_left=message.lease_seconds_left,
    )


def clocks_to_proto(clocks: ClockSnapshot) -> pb.ClockSnapshot:
    """The clocks of one job."""
    return pb.ClockSnapshot(
        term=clocks.term,
        published=clocks.published,
        global_clock=clocks.global_clock,
        local={int(vw): int(clock) for vw, clock in clocks.local.items()},
        max_distance=clocks.max_distance,
        epoch=clocks.epoch,
        minibatches=clocks.minibatches,
        samples=clocks.samples,
        barrier=clocks.barrier,
        barrier_reason=clocks.barrier_reason,
        waves=clocks.waves,
        staged={int(vw): int(clock) for vw, clock in clocks.staged.items()},
        durable={int(vw): int(clock) for vw, clock in clocks.durable.items()},
        applied=clocks.applied,
    )


def clocks_from_proto(message: pb.ClockSnapshot) -> ClockSnapshot:
    """The clocks of one job, local clocks in index order."""
    told_of = max(len(message.local), len(message.staged), len(message.durable))
    if told_of > MAX_STAGES:
        raise ProtocolViolation(f"clocks of {told_of} virtual workers; at most {MAX_STAGES} are told of")
    if len(message.applied) > MAX_SHARDS:
        raise ProtocolViolation(f"{len(message.applied)} shards whose disk fails; a job has at most {MAX_SHARDS}")
    fields = (message.term, message.published, message.global_clock, message.max_distance, message.epoch)
    counts = (message.minibatches, message.samples, message.barrier, message.waves)
    marks = (*message.local.values(), *message.staged.values(), *message.durable.values())
    check_counts("the clocks of a job", *fields, *counts, *marks)
    return ClockSnapshot(
        term=Term(message.term),
        published=Clock(message.published),
        global_clock=Clock(message.global_clock),
        local=_by_worker(message.local),
        max_distance=message.max_distance,
        epoch=message.epoch,
        minibatches=message.minibatches,
        samples=message.samples,
        barrier=Clock(message.barrier),
        barrier_reason=cut(message.barrier_reason),
        waves=message.waves,
        staged=_by_worker(message.staged),
        durable=_by_worker(message.durable),
        applied=tuple(ShardIndex(shard) for shard in message.applied),
    )


def _by_worker(clocks: Mapping[int, int]) -> dict[VirtualWorkerIndex, Clock]:
    return {VirtualWorkerIndex(vw): Clock(clocks[vw]) for vw in sorted(clocks)}


def stage_key_to_proto(key: StageKey) -> pb.StageKey:
    """The name of one life of one stage."""
    return pb.StageKey(job_id=key.job_id, vw=key.vw, stage=key.stage, incarnation=key.incarnation, term=key.term)


def stage_key_from_proto(message: pb.StageKey) -> StageKey:
    """The name of one life of one stage."""
    check_counts("the life of a stage", message.incarnation, message.term)
    return StageKey(
        checked_job_id(message.job_id),
        VirtualWorkerIndex(message.vw),
        StageIndex(message.stage),
        Incarnation(message.incarnation),
        Term(message.term),
    )


def command_to_proto(numbered: NumberedCommand) -> pb.WatchCommandsResponse:
    """One command of an agent's stream."""
    sequence, command = numbered.sequence, numbered.command
    match command:
        case InspectCommand():
            inspect = pb.InspectCommand(
                job_id=command.job_id,
                job_json=command.job_json,
                import_path=command.import_path,
                run_dir=command.run_dir,
                with_model=command.with_model,
                measure=command.measure,
            )
            return pb.WatchCommandsResponse(sequence=sequence, inspect=inspect)
        case StartStageCommand():
            start = pb.StartStageCommand(job_id=command.job_id, config_json=to_json(StageConfig, command.config))
            return pb.WatchCommandsResponse(sequence=sequence, start_stage=start)
        case StopJobCommand():
            return pb.WatchCommandsResponse(sequence=sequence, stop_job=pb.StopJobCommand(job_id=command.job_id))
        case StopVirtualWorkerCommand():
            stop = pb.StopVirtualWorkerCommand(
                job_id=command.job_id, vw=command.vw, incarnation=command.incarnation, term=command.term
            )
            return pb.WatchCommandsResponse(sequence=sequence, stop_virtual_worker=stop)
        case MeasureLinkCommand():
            measure = pb.MeasureLinkCommand(job_id=command.job_id, task_json=to_json(LinkTask, command.task))
            return pb.WatchCommandsResponse(sequence=sequence, measure_link=measure)
        case KeepLinksCommand():
            keep = pb.KeepLinksCommand(job_id=command.job_id, measured_json=to_json(MeasuredLinks, command.measured))
            return pb.WatchCommandsResponse(sequence=sequence, keep_links=keep)


def command_from_proto(message: pb.WatchCommandsResponse) -> NumberedCommand:
    """One command of an agent's stream."""
    command: Command
    match message.WhichOneof("command"):
        case "inspect":
            inspect = message.inspect
            command = InspectCommand(
                job_id=JobId(inspect.job_id),
                job_json=inspect.job_json,
                import_path=inspect.import_path,
                run_dir=inspect.run_dir,
                with_model=inspect.with_model,
                measure=tuple(inspect.measure),
            )
        case "start_stage":
            start = message.start_stage
            command = StartStageCommand(JobId(start.job_id), from_json(StageConfig, start.config_json))
        case "stop_job":
            command = StopJobCommand(JobId(message.stop_job.job_id))
        case "stop_virtual_worker":
            stop = message.stop_virtual_worker
            command = StopVirtualWorkerCommand(
                JobId(stop.job_id), VirtualWorkerIndex(stop.vw), Incarnation(stop.incarnation), Term(stop.term)
            )
        case "measure_link":
            measure = message.measure_link
            command = MeasureLinkCommand(JobId(measure.job_id), from_json(LinkTask, measure.task_json))
        case "keep_links":
            keep = message.keep_links
            command = KeepLinksCommand(JobId(keep.job_id), from_json(MeasuredLinks, keep.measured_json))
        case _:
            raise ProtocolViolation(f"command {message.sequence} is of a kind this version does not know")
    return NumberedCommand(message.sequence, command)


def news_to_proto(news: AgentNews) -> pb.AgentNews:  # noqa: PLR0911 - one case per kind of news
    """One thing an agent tells."""
    match news:
        case StageNews():
            report_json = to_json(StageReport, news.report)
            return pb.AgentNews(stage=pb.StageNews(key=stage_key_to_proto(news.key), report_json=report_json))
        case InspectionResult():
            result = pb.InspectionResult(
                job_id=news.job_id,
                model_report_json="" if news.model is None else to_json(ModelReport, news.model),
                error=news.error,
                problems=news.problems,
                measurements_json=[to_json(Measurement, measurement) for measurement in news.measurements],
            )
            return pb.AgentNews(inspection=result)
        case InspectionStep(step=step):
            about = pb.InspectionStep(
                job_id=news.job_id, device_type=step.device_type, layer=step.layer, done=step.done, total=step.total
            )
            return pb.AgentNews(inspection_step=about)
        case InspectionPhase():
            phase = pb.InspectionPhase(job_id=news.job_id, phase=news.phase, seconds=news.seconds)
            return pb.AgentNews(inspection_phase=phase)
        case LinkAwaited():
            awaited = pb.LinkAwaited(job_id=news.job_id, number=news.number, address=news.address)
            return pb.AgentNews(link_awaited=awaited)
        case LinkResult():
            measured = to_json(MeasuredLinks, news.measured) if news.measured else ""
            told = pb.LinkResult(job_id=news.job_id, number=news.number, measured_json=measured, problem=news.problem)
            return pb.AgentNews(link_result=told)
        case ChildExit():
            child_exit = pb.ChildExit(
                key=stage_key_to_proto(news.key),
                pid=news.pid,
                exit_code=news.exit_code,
                last_output=news.last_output,
                ordered=news.ordered,
            )
            return pb.AgentNews(exit=child_exit)


def news_from_proto(message: pb.AgentNews) -> AgentNews:  # noqa: PLR0911 - one case per kind of news
    """One thing an agent tells."""
    match message.WhichOneof("news"):
        case "stage":
            report: StageReport = from_json(StageReport, message.stage.report_json)
            return StageNews(stage_key_from_proto(message.stage.key), report)
        case "inspection":
            text = message.inspection.model_report_json
            return InspectionResult(
                job_id=checked_job_id(message.inspection.job_id),
                model=from_json(ModelReport, text) if text else None,
                error=cut(message.inspection.error),
                problems=tuple(cut(problem) for problem in message.inspection.problems[:MAX_LISTED]),
                measurements=tuple(from_json(Measurement, text) for text in message.inspection.measurements_json),
            )
        case "inspection_step":
            about = message.inspection_step
            step = ProfileStep(cut(about.device_type), cut(about.layer), about.done, about.total)
            return InspectionStep(checked_job_id(about.job_id), step)
        case "inspection_phase":
            phase = message.inspection_phase
            return InspectionPhase(checked_job_id(phase.job_id), cut(phase.phase), phase.seconds)
        case "link_awaited":
            awaited = message.link_awaited
            split_address(awaited.address)
            return LinkAwaited(checked_job_id(awaited.job_id), awaited.number, awaited.address)
        case "link_result":
            told = message.link_result
            measured = from_json(MeasuredLinks, told.measured_json) if told.measured_json else MeasuredLinks()
            return LinkResult(checked_job_id(told.job_id), told.number, measured, cut(told.problem))
        case "exit":
            return ChildExit(
                key=stage_key_from_proto(message.exit.key),
                pid=message.exit.pid,
                exit_code=message.exit.exit_code,
                last_output=cut(message.exit.last_output),
                ordered=message.exit.ordered,
            )
        case _:
            raise ProtocolViolation("the agent's news are of a kind this version does not know")
