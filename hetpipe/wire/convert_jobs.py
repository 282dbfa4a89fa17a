"""Submissions, job events and job status as messages and back, in pairs `x_to_proto` and `x_from_proto`."""

from __future__ import annotations

import json

from hetpipe.errors import ProtocolViolation
from hetpipe.proto.v1 import coordinator_pb2 as pb
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
    QueuePlace,
    ReplanJudged,
    Rewound,
    StageRow,
    StateChanged,
    StopMode,
    Straggling,
    Submission,
    VirtualWorkerRow,
    Waiting,
    WorkerLeft,
    WorkerLost,
    WorkerQuarantined,
    WorkerRejoined,
    WorkerReplanned,
    WorkerStatus,
)
from hetpipe.values.ids import Clock, DeviceId, Incarnation, JobId, LayerIndex, StageIndex, VirtualWorkerIndex
from hetpipe.values.life_state import LifeState
from hetpipe.values.plan import ModelReport, ProofReport
from hetpipe.values.wire import from_json, revive, to_json
from hetpipe.wire.checks import check_folder
from hetpipe.wire.convert import clocks_from_proto, clocks_to_proto
from hetpipe.wire.convert_conditions import condition_from_proto, condition_to_proto, kind_from_word

_STATE_TO_PROTO: dict[JobState, pb.JobState] = {
    JobState.SUBMITTED: pb.JOB_STATE_SUBMITTED,
    JobState.PENDING: pb.JOB_STATE_PENDING,
    JobState.INSPECTING: pb.JOB_STATE_INSPECTING,
    JobState.PLANNING: pb.JOB_STATE_PLANNING,
    JobState.STARTING: pb.JOB_STATE_STARTING,
    JobState.RUNNING: pb.JOB_STATE_RUNNING,
    JobState.STOPPING: pb.JOB_STATE_STOPPING,
    JobState.FINISHED: pb.JOB_STATE_FINISHED,
    JobState.STOPPED: pb.JOB_STATE_STOPPED,
    JobState.FAILED: pb.JOB_STATE_FAILED,
}
_STATE_FROM_PROTO: dict[int, JobState] = {number: state for state, number in _STATE_TO_PROTO.items()}

_MODE_TO_PROTO: dict[StopMode, pb.StopMode] = {
    StopMode.CHECKPOINT: pb.STOP_MODE_CHECKPOINT,
    StopMode.NOW: pb.STOP_MODE_NOW,
}
_MODE_FROM_PROTO: dict[int, StopMode] = {number: mode for mode, number in _MODE_TO_PROTO.items()}


def state_to_proto(state: JobState) -> pb.JobState:
    """Where a job stands."""
    return _STATE_TO_PROTO[state]


def state_from_proto(number: int) -> JobState:
    """Where a job stands."""
    state = _STATE_FROM_PROTO.get(number)
    if state is None:
        raise ProtocolViolation(f"job state {number} is not known to this version")
    return state


def life_state_from_word(word: str) -> LifeState:
    """Where a virtual worker stands."""
    try:
        return LifeState(word)
    except ValueError:
        raise ProtocolViolation(f"state {word!r:.40} of a virtual worker is not known to this version") from None


def stop_mode_to_proto(mode: StopMode) -> pb.StopMode:
    """How to stop."""
    return _MODE_TO_PROTO[mode]


def stop_mode_from_proto(number: int) -> StopMode:
    """How to stop."""
    mode = _MODE_FROM_PROTO.get(number)
    if mode is None:
        raise ProtocolViolation(f"stop mode {number} is not known to this version")
    return mode


def submission_to_proto(submission: Submission) -> pb.SubmitJobRequest:
    """A job as it is handed in."""
    return pb.SubmitJobRequest(
        request_id=submission.request_id,
        job_json=submission.job_json,
        run_dir=submission.run_dir,
        import_path=submission.import_path,
        restore=submission.restore or "",
        has_begun=submission.has_begun,
        model_report_json="" if submission.model is None else to_json(ModelReport, submission.model),
    )


def submission_from_proto(message: pb.SubmitJobRequest) -> Submission:
    """A job as it is handed in."""
    if not message.request_id or not message.run_dir:
        raise ProtocolViolation("a submission needs a request id and the folder of the run")
    for folder in (message.run_dir, message.import_path, message.restore or message.run_dir):
        check_folder(folder)
    return Submission(
        request_id=message.request_id,
        job_json=message.job_json,
        run_dir=message.run_dir,
        import_path=message.import_path,
        restore=message.restore or None,
        has_begun=message.has_begun,
        model=from_json(ModelReport, message.model_report_json) if message.model_report_json else None,
    )


def progress_to_proto(table: ProgressTable) -> pb.ProgressTable:
    """A picture of a running job."""
    rows = [
        pb.VirtualWorkerRow(
            vw=row.vw,
            stages=[
                pb.StageRow(first_layer=stage.first_layer, last_layer=stage.last_layer, device=stage.device)
                for stage in row.stages
            ],
            clock=row.clock,
            distance=row.distance,
            samples_per_second=row.samples_per_second,
            loss=row.loss,
            waiting_share=row.waiting_share,
            memory_bytes=row.memory_bytes,
            state=row.state,
        )
        for row in table.rows
    ]
    return pb.ProgressTable(
        rows=rows,
        running_seconds=table.running_seconds,
        epoch=table.epoch,
        samples=table.samples,
        total_samples=table.total_samples,
        samples_per_second=table.samples_per_second,
        eta_seconds=table.eta_seconds,
        staleness=table.staleness,
        global_clock=table.global_clock,
        straggler=table.straggler,
        slow=[pb.Straggling(vw=one.vw, stage=one.stage, factor=one.factor) for one in table.slow],
        tokens_per_second=table.tokens_per_second,
        model_flops_utilisation=table.model_flops_utilisation,
        model_flops_utilisation_reason=table.model_flops_utilisation_reason,
    )


def progress_from_proto(message: pb.ProgressTable) -> ProgressTable:
    """A picture of a running job."""
    rows = tuple(
        VirtualWorkerRow(
            vw=VirtualWorkerIndex(row.vw),
            stages=tuple(
                StageRow(LayerIndex(stage.first_layer), LayerIndex(stage.last_layer), DeviceId(stage.device))
                for stage in row.stages
            ),
            clock=Clock(row.clock),
            distance=row.distance,
            samples_per_second=row.samples_per_second,
            loss=row.loss if row.HasField("loss") else None,
            waiting_share=row.waiting_share,
            memory_bytes=row.memory_bytes,
            state=life_state_from_word(row.state or LifeState.READY),
        )
        for row in message.rows
    )
    return ProgressTable(
        rows=rows,
        running_seconds=message.running_seconds,
        epoch=message.epoch,
        samples=message.samples,
        total_samples=message.total_samples,
        samples_per_second=message.samples_per_second,
        eta_seconds=message.eta_seconds if message.HasField("eta_seconds") else None,
        staleness=message.staleness if message.HasField("staleness") else None,
        global_clock=Clock(message.global_clock),
        straggler=VirtualWorkerIndex(message.straggler) if message.HasField("straggler") else None,
        slow=tuple(Straggling(VirtualWorkerIndex(one.vw), StageIndex(one.stage), one.factor) for one in message.slow),
        tokens_per_second=message.tokens_per_second if message.HasField("tokens_per_second") else None,
        model_flops_utilisation=(
            message.model_flops_utilisation if message.HasField("model_flops_utilisation") else None
        ),
        model_flops_utilisation_reason=message.model_flops_utilisation_reason or None,
    )


def evaluated_to_proto(evaluated: Evaluated) -> pb.Evaluated:
    """One evaluation."""
    return pb.Evaluated(
        clock=evaluated.clock,
        epoch=evaluated.epoch,
        samples=evaluated.samples,
        values=dict(evaluated.values),
        minibatches=evaluated.minibatches,
        rewinds=evaluated.rewinds,
        within_epoch=evaluated.within_epoch,
        partial=not evaluated.whole,
    )


def evaluated_from_proto(message: pb.Evaluated) -> Evaluated:
    """One evaluation."""
    values = {name: message.values[name] for name in sorted(message.values)}
    return Evaluated(
        Clock(message.clock),
        message.epoch,
        message.samples,
        values,
        minibatches=message.minibatches,
        rewinds=message.rewinds,
        within_epoch=message.within_epoch,
        whole=not message.partial,
    )


def evaluations_to_proto(summary: EvaluationSummary) -> pb.Evaluations:
    """What came of a job's evaluations."""
    return pb.Evaluations(
        number=summary.number,
        best=None if summary.best is None else evaluated_to_proto(summary.best),
        last=evaluated_to_proto(summary.last),
    )


def evaluations_from_proto(message: pb.Evaluations) -> EvaluationSummary:
    """What came of a job's evaluations."""
    best = evaluated_from_proto(message.best) if message.HasField("best") else None
    return EvaluationSummary(message.number, best, evaluated_from_proto(message.last))


def event_to_proto(numbered: NumberedEvent) -> pb.WatchJobResponse:  # noqa: C901, PLR0911, PLR0912 - one per kind of event
    """One event of a job."""
    sequence, event = numbered.sequence, numbered.event
    match event:
        case StateChanged():
            changed = pb.StateChanged(state=state_to_proto(event.state), remark=event.remark)
            return pb.WatchJobResponse(sequence=sequence, state_changed=changed)
        case Waiting():
            waiting = pb.Waiting(sentence=event.sentence, seconds=event.seconds)
            return pb.WatchJobResponse(sequence=sequence, waiting=waiting)
        case Evaluated():
            return pb.WatchJobResponse(sequence=sequence, evaluated=evaluated_to_proto(event))
        case ProgressTable():
            return pb.WatchJobResponse(sequence=sequence, progress=progress_to_proto(event))
        case WorkerLost():
            lost = pb.WorkerLost(vw=event.vw, incarnation=event.incarnation, sentence=event.sentence)
            return pb.WatchJobResponse(sequence=sequence, worker_lost=lost)
        case WorkerRejoined():
            rejoined = pb.WorkerRejoined(vw=event.vw, incarnation=event.incarnation)
            return pb.WatchJobResponse(sequence=sequence, worker_rejoined=rejoined)
        case WorkerLeft():
            has_left = pb.WorkerLeft(vw=event.vw, incarnation=event.incarnation, returns=event.returns)
            return pb.WatchJobResponse(sequence=sequence, worker_left=has_left)
        case WorkerQuarantined():
            quarantined = pb.WorkerQuarantined(vw=event.vw, sentence=event.sentence)
            return pb.WatchJobResponse(sequence=sequence, worker_quarantined=quarantined)
        case WorkerReplanned():
            replanned = pb.WorkerReplanned(
                vw=event.vw,
                incarnation=event.incarnation,
                before=event.before,
                after=event.after,
                foreseen=event.foreseen,
            )
            return pb.WatchJobResponse(sequence=sequence, worker_replanned=replanned)
        case ReplanJudged():
            judged = pb.ReplanJudged(vw=event.vw, gained=event.gained, sentence=event.sentence)
            return pb.WatchJobResponse(sequence=sequence, replan_judged=judged)
        case Rewound():
            rewound = pb.Rewound(
                from_clock=event.from_clock, to_clock=event.to_clock, folder=event.folder, sentence=event.sentence
            )
            return pb.WatchJobResponse(sequence=sequence, rewound=rewound)
        case ConditionRaised():
            raised = pb.ConditionRaised(
                condition=event.condition,
                who=event.who,
                sentence=event.sentence,
                since=event.since,
                times=event.times,
            )
            return pb.WatchJobResponse(sequence=sequence, condition_raised=raised)
        case ConditionCleared():
            cleared = pb.ConditionCleared(
                condition=event.condition,
                who=event.who,
                sentence=event.sentence,
                cleared=event.cleared,
                remaining=event.remaining,
            )
            return pb.WatchJobResponse(sequence=sequence, condition_cleared=cleared)
        case JobEnded():
            ended = pb.JobEnded(
                state=state_to_proto(event.state),
                sentence=event.sentence,
                error=event.error,
                problems=event.problems,
                result_json="" if event.result is None else json.dumps(event.result),
                conditions=map(condition_to_proto, event.conditions),
            )
            return pb.WatchJobResponse(sequence=sequence, ended=ended)


def event_from_proto(message: pb.WatchJobResponse) -> NumberedEvent:  # noqa: C901, PLR0912 - one per kind of event
    """One event of a job."""
    event: JobEvent
    match message.WhichOneof("event"):
        case "state_changed":
            event = StateChanged(state_from_proto(message.state_changed.state), message.state_changed.remark)
        case "waiting":
            event = Waiting(message.waiting.sentence, message.waiting.seconds)
        case "evaluated":
            event = evaluated_from_proto(message.evaluated)
        case "progress":
            event = progress_from_proto(message.progress)
        case "worker_lost":
            lost = message.worker_lost
            event = WorkerLost(VirtualWorkerIndex(lost.vw), Incarnation(lost.incarnation), lost.sentence)
        case "worker_rejoined":
            rejoined = message.worker_rejoined
            event = WorkerRejoined(VirtualWorkerIndex(rejoined.vw), Incarnation(rejoined.incarnation))
        case "worker_left":
            left = message.worker_left
            event = WorkerLeft(VirtualWorkerIndex(left.vw), Incarnation(left.incarnation), left.returns)
        case "worker_quarantined":
            quarantined = message.worker_quarantined
            event = WorkerQuarantined(VirtualWorkerIndex(quarantined.vw), quarantined.sentence)
        case "worker_replanned":
            replanned = message.worker_replanned
            event = WorkerReplanned(
                VirtualWorkerIndex(replanned.vw),
                Incarnation(replanned.incarnation),
                tuple(replanned.before),
                tuple(replanned.after),
                replanned.foreseen if replanned.HasField("foreseen") else None,
            )
        case "replan_judged":
            judged = message.replan_judged
            gained = judged.gained if judged.HasField("gained") else None
            event = ReplanJudged(VirtualWorkerIndex(judged.vw), gained, judged.sentence)
        case "rewound":
            rewound = message.rewound
            event = Rewound(Clock(rewound.from_clock), Clock(rewound.to_clock), rewound.folder, rewound.sentence)
        case "condition_raised":
            raised = message.condition_raised
            kind = kind_from_word(raised.condition)
            event = ConditionRaised(kind, tuple(raised.who), raised.sentence, raised.since, raised.times)
        case "condition_cleared":
            over = message.condition_cleared
            kind = kind_from_word(over.condition)
            event = ConditionCleared(kind, tuple(over.who), over.sentence, over.cleared, over.remaining)
        case "ended":
            ended = message.ended
            event = JobEnded(
                state=state_from_proto(ended.state),
                sentence=ended.sentence,
                error=ended.error,
                problems=tuple(ended.problems),
                result=_result_from_json(ended.result_json),
                conditions=tuple(map(condition_from_proto, ended.conditions)),
            )
        case _:
            raise ProtocolViolation(f"event {message.sequence} is of a kind this version does not know")
    return NumberedEvent(message.sequence, event)


def process_to_proto(process: ProcessStatus) -> pb.Process:
    """One process of the cluster."""
    return pb.Process(
        role=process.role,
        index=process.index,
        vw=process.vw,
        host=process.host,
        pid=process.pid,
        state=process.state,
    )


def process_from_proto(message: pb.Process) -> ProcessStatus:
    """One process of the cluster."""
    plain = {
        "role": message.role,
        "index": message.index,
        "vw": message.vw if message.HasField("vw") else None,
        "host": message.host,
        "pid": message.pid,
        "state": message.state,
    }
    process: ProcessStatus = revive(ProcessStatus, plain)
    return process


def worker_to_proto(worker: WorkerStatus) -> pb.WorkerStatus:
    """One virtual worker of a job."""
    return pb.WorkerStatus(
        vw=worker.vw,
        incarnation=worker.incarnation,
        deaths=worker.deaths,
        state=worker.state,
        devices=worker.devices,
    )


def worker_from_proto(message: pb.WorkerStatus) -> WorkerStatus:
    """One virtual worker of a job."""
    return WorkerStatus(
        VirtualWorkerIndex(message.vw),
        Incarnation(message.incarnation),
        message.deaths,
        life_state_from_word(message.state),
        tuple(message.devices),
    )


def status_to_proto(status: JobStatus) -> pb.JobStatus:
    """One job's status."""
    return pb.JobStatus(
        job_id=status.job_id or "",
        name=status.name,
        state=pb.JOB_STATE_UNSPECIFIED if status.state is None else state_to_proto(status.state),
        run_dir=status.run_dir,
        failure=status.failure,
        processes=[process_to_proto(process) for process in status.processes],
        clocks=None if status.clocks is None else clocks_to_proto(status.clocks),
        progress=None if status.progress is None else progress_to_proto(status.progress),
        workers=[worker_to_proto(worker) for worker in status.workers],
        rewinds=status.rewinds,
        queue=None
        if status.queue is None
        else pb.QueuePlace(position=status.queue.position, reason=status.queue.reason),
        conditions=map(condition_to_proto, status.conditions),
        proof_json="" if status.proof is None else to_json(ProofReport, status.proof),
        evaluations=None if status.evaluations is None else evaluations_to_proto(status.evaluations),
    )


def status_from_proto(message: pb.JobStatus) -> JobStatus:
    """One job's status."""
    unspecified = message.state == pb.JOB_STATE_UNSPECIFIED
    return JobStatus(
        job_id=JobId(message.job_id) if message.job_id else None,
        name=message.name,
        state=None if unspecified else state_from_proto(message.state),
        run_dir=message.run_dir,
        failure=message.failure,
        processes=tuple(process_from_proto(process) for process in message.processes),
        clocks=clocks_from_proto(message.clocks) if message.HasField("clocks") else None,
        progress=progress_from_proto(message.progress) if message.HasField("progress") else None,
        workers=tuple(worker_from_proto(worker) for worker in message.workers),
        rewinds=message.rewinds,
        queue=QueuePlace(message.queue.position, message.queue.reason) if message.HasField("queue") else None,
        conditions=tuple(map(condition_from_proto, message.conditions)),
        proof=from_json(ProofReport, message.proof_json) if message.proof_json else None,
        evaluations=evaluations_from_proto(message.evaluations) if message.HasField("evaluations") else None,
    )


def _result_from_json(text: str) -> dict[str, object] | None:
    if not text:
        return None
    try:
        result = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ProtocolViolation(f"the result of the job is not JSON: {error}") from error
    if not isinstance(result, dict):
        raise ProtocolViolation("the result of the job is not a JSON object")
    return result
