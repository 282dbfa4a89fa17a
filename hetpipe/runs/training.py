"""The execution of a run, from job to result, for `hetpipe train`, `hetpipe submit` and `hetpipe.train`.

Without a coordinator's address the services are started here first and ended afterwards; submitting the job and
following it are the same. In any case `train` returns the ending of the run and writes result.json.

A follower of a job on a cluster does not own it: SIGTERM ends only the follower, and a later command with the same
folder follows the same job, which is recorded in `submission.json`.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hetpipe.checkpoint.best import Best, find_best
from hetpipe.checkpoint.locations import has_checkpoint_at
from hetpipe.decide.lifecycle.inspections import is_to_measure
from hetpipe.decide.lifecycle.known_cluster import BETWEEN_NODES, WITHIN_NODE
from hetpipe.decide.lifecycle.planning import num_devices_wanted
from hetpipe.errors import CheckpointError, HetpipeError, JobFailed, Unavailable, UserError
from hetpipe.job.file import Job
from hetpipe.report.plan_view import plan_line
from hetpipe.report.text import count, shown_path
from hetpipe.report.view import View
from hetpipe.runs.follow import Detached, Ending, Follower, Inbox, Interrupted, OwnServices, Remark, RunningJob
from hetpipe.runs.interrupts import Interrupts
from hetpipe.runs.judge import count_violations
from hetpipe.runs.local_inspection import inspect_locally
from hetpipe.runs.outcome import ExitStatus, error_of, sentences_of, status_of
from hetpipe.runs.result import TrainResult
from hetpipe.runs.run_folder import RunFolder, RunRecord, RunResult
from hetpipe.runs.shell import CoordinatorPort, Shell
from hetpipe.runs.supervisor import GRACE_SECONDS, ServiceRestart, Services, Supervisor
from hetpipe.server.agent.devices import DeviceOffer, discover_devices
from hetpipe.values.conditions import Condition, consequence
from hetpipe.values.events import CodeArchive, JobState, Submission, Waiting
from hetpipe.values.ids import JobId
from hetpipe.values.plan import ModelReport
from hetpipe.values.plan_document import PlanDocument
from hetpipe.values.rewinds import discard_model_file
from hetpipe.values.wire import plain
from hetpipe.wire.calls import SUBMIT_JOB, SubmitJobRequest
from hetpipe.wire.coordinator_client import new_request_id

#: `GRACE_SECONDS` after a second interrupt.
_HASTY_GRACE_SECONDS = 0.5

#: Timeout for a remote coordinator to end a job after a second interrupt.
_REMOTE_STOP_SECONDS = 5.0

#: Duration of a phase of the inspection above which it is displayed.
_NOTICE_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """The job to train, and its folders and cluster."""

    job: Job
    import_path: Path
    """The first folder from which user code is imported."""
    restore: str | None = None
    """The checkpoint to resume from: an absolute path, or a URL."""
    coordinator: str | None = None
    """`HOST:PORT` of a running cluster; None: a local run with its own services."""
    detaches: bool = False
    """SIGTERM ends the follower and not the run; only on a persistent cluster."""
    code: CodeArchive | None = None
    """The code, for nodes that do not have it below `import_path`."""
    remarks: tuple[str, ...] = ()
    """Remarks displayed before the run begins."""
    resumed_by: str = ""
    """The command that resumes the run, without `--resume`; empty: `hetpipe train`, or `submit` on a cluster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnd:
    """The ending of a run."""

    run_dir: Path
    state: JobState
    result: TrainResult | None = None
    """None unless it finished, or stopped at a barrier."""
    error: str = ""
    """Class name in `hetpipe.errors`; empty unless it failed, or its result could not be written."""
    sentences: tuple[str, ...] = ()
    """The reasons, unless it finished and its result is recorded."""
    interrupted: bool = False
    """Ctrl-C or SIGTERM was received."""
    resumable: bool = False
    """There is a complete checkpoint."""
    forecast: PlanDocument | None = None
    """The planner's forecast, if it planned the run."""
    emulated: bool = False
    """The devices of `cluster.file` are emulated: the forecast is of those, not of this machine's."""
    detached: bool = False
    """The run continues without this follower."""
    job_id: str = ""
    """Job id; empty without a submission."""
    conditions: tuple[Condition, ...] = ()
    """The conditions of the run."""
    checkpoints: str = ""
    """URL of its checkpoints; empty if they are in its folder."""
    best: Best | None = None
    """Its best evaluation, if the checkpoint of that was kept."""

    @property
    def exit_status(self) -> ExitStatus:
        """The exit status of the command."""
        if self.detached:
            return ExitStatus.LOST_CONTACT if self.error else ExitStatus.DETACHED
        if self.state is JobState.FINISHED and not self.error:
            return ExitStatus.OK
        if self.interrupted:
            return ExitStatus.INTERRUPTED
        return status_of(self.exception()) if self.state is JobState.FAILED else ExitStatus.FAILED

    def exception(self) -> HetpipeError:
        """The exception raised to a Python caller."""
        return error_of(self.error, self.sentences)

    def to_json(self) -> dict[str, Any]:
        """The object of `train --json`."""
        if self.detached:
            return {"detached": True, "run_dir": str(self.run_dir), "job_id": self.job_id}
        if self.result is not None:
            return self.result.to_json()
        met = {"conditions": [plain(Condition, one) for one in self.conditions]} if self.conditions else {}
        return {"errors": list(self.sentences), **met}


class Training:
    """One run in progress. Use it once, in a thread that lives as long as the run."""

    def __init__(
        self, request: RunRequest, folder: RunFolder, shell: Shell, *, view: View, interrupts: Interrupts
    ) -> None:
        """Prepare, without starting or writing anything.

        Args:
            request: the job to train.
            folder: the run's folder, new.
            shell: the command's environment.
            view: displays events; closed when the run has ended.
            interrupts: entered by the caller.
        """
        self._request = request
        self._folder = folder
        self._shell = shell if request.coordinator is not None else shell.alone()
        self._view = view
        self._interrupts = interrupts
        self._inbox: Inbox = Inbox()
        #: Guards the record.
        self._noting = threading.RLock()
        #: The submission; None on this machine.
        self._submission = folder.read_submission() if request.detaches else None
        self._record = record_of(request, folder, shell)
        #: Training has begun, and the plan was shown.
        self._has_begun = False

    def run(self) -> RunEnd:
        """Execute the run and record its ending.

        Raises:
            UserError: the run's folder cannot be written to.
        """
        if self._submission is not None:
            ended = self._follow_again()
            if ended is not None:
                return ended
        else:
            self._begin()
        self._folder.write_record(self._record)
        self._view.say(f"the run's folder is {shown_path(self._folder.path, self._shell.current)}")
        for remark in self._request.remarks:
            self._view.say(remark)
        for remark in filter(None, (planning_remark(self._request.job), metrics_remark(self._request.job))):
            self._view.say(remark)
        try:
            ending = self._on_cluster() if self._request.coordinator is not None else self._on_this_machine()
        except KeyboardInterrupt:
            ending = self._interrupted_early()
        except HetpipeError as error:
            name, sentences = type(error).__name__, sentences_of(error)
            lost = isinstance(error, Unavailable)
            ending = Ending(state=JobState.FAILED, error=name, sentences=sentences, lost_contact=lost)
        except Exception as error:
            mistake = f"internal error ({type(error).__name__}: {error})"
            self._folder.write_result(JobState.FAILED, {"errors": [mistake]})
            raise
        self._interrupts.listen(None)
        goes_on = ending.detached or (ending.lost_contact and self._request.detaches)
        return self._leave(ending) if goes_on else self._conclude(ending)

    def _begin(self) -> None:
        """Record the request, so that a later command with this folder can continue it."""
        if self._request.detaches:
            self._submission = submission_of(self._request, self._folder)
            self._folder.write_submission(self._submission)
        self._folder.write_job(self._request.job)

    def _follow_again(self) -> RunEnd | None:
        """Continue the run of an earlier process in this folder; its ending, if recorded."""
        result = self._folder.read_result()
        if result is not None:
            return end_of(self._folder, result)
        if not self._folder.has_job:
            self._folder.write_job(self._request.job)
        try:
            before = self._folder.read_record()
        except UserError:  # it ended before that
            return None
        self._record = replace(self._record, job_id=before.job_id, started_wall=before.started_wall)
        return None

    def _interrupted_early(self) -> Ending:
        """The ending of a run terminated before it is followed."""
        if self._request.detaches and self._interrupts.newest is signal.SIGTERM:
            return Ending(state=JobState.SUBMITTED, detached=True)
        return Ending(state=JobState.STOPPED, sentences=("the run was stopped before it began",))

    def _leave(self, ending: Ending) -> RunEnd:
        """The ending of a follower whose run continues; the result is not written here."""
        where, address = shown_path(self._folder.path, self._shell.current), self._request.coordinator
        self._note(pids={})
        again = f"follow it again with: hetpipe submit --run-dir {where} --coordinator {address}"
        if ending.lost_contact:
            sentence = f"{ending.sentences[-1]}; {again}"
        elif self._record.job_id:
            sentence = (
                f"detached from job {self._record.job_id}, which continues; {again}; stop it with: hetpipe stop {where}"
            )
        else:
            sentence = f"terminated before the job was submitted; {again}"
        return RunEnd(
            run_dir=self._folder.path,
            state=ending.state,
            error=ending.error,
            sentences=(sentence,),
            interrupted=True,
            detached=True,
            job_id=self._record.job_id,
        )

    def _on_cluster(self) -> Ending:
        assert self._request.coordinator is not None
        address = self._request.coordinator
        hint = f"the run may still continue; check it with: hetpipe status --coordinator {address}"
        return self._follow(address, when_lost=hint, stop_now_seconds=_REMOTE_STOP_SECONDS)

    def _on_this_machine(self) -> Ending:
        job = self._request.job
        devices, remark = choose_devices(job)
        services = Services(
            num_shards=job.parameter_servers.count,
            devices=devices,
            logs=self._folder.logs,
            state=self._folder.state,
            programs=self._shell.programs,
            patience_seconds=job.patience.members.total_seconds(),
        )
        self._shell.fork_server.begin(self._shell.inspection)
        shards = count(services.num_shards, "parameter server")
        self._view.say(f"starting 1 coordinator, {shards} and 1 agent on this machine{remark}")
        with Supervisor(
            services,
            environment=self._shell.environment,
            on_death=self._inbox.put,
            on_restart=self._restarted,
            starter=self._shell.fork_server.start,
            clock=self._shell.clock,
        ) as supervisor:
            supervisor.begin()
            try:
                model = self._inspect()
            except BaseException:
                supervisor.stop(grace_seconds=0.0)  # they have no job
                raise
            address = supervisor.wait_started()
            self._note(coordinator=address, pids={**self._record.pids, **supervisor.pids})
            ending = self._follow(address, stop_now_seconds=0.0, services=supervisor, model=model)
            hasty = ending.state is JobState.STOPPED and ending.result is None
            supervisor.stop(grace_seconds=_HASTY_GRACE_SECONDS if hasty else GRACE_SECONDS)
        return ending

    def _inspect(self) -> ModelReport:
        """Inspect the job while the services start.

        Raises:
            HetpipeError: the job cannot be trained, or its inspection failed.
        """
        request, clock = self._request, self._shell.clock
        began = clock.monotonic()
        self._view.say("inspecting the job: optimizer, imports, loss, data, model, one minibatch")

        while not self._shell.fork_server.wait_ready(timeout_seconds=1.0):
            elapsed = clock.monotonic() - began
            if elapsed >= _NOTICE_SECONDS:
                self._view.show(Waiting(f"waiting for the import of torch ({elapsed:.0f} s)", elapsed))

        def on_phase(phase: str, seconds: float) -> None:
            elapsed = clock.monotonic() - began
            # Only long phases are displayed.
            if elapsed >= _NOTICE_SECONDS and seconds >= 1.0:
                sentence = f"waiting for the inspection of the model, which is {phase} ({seconds:.0f} s)"
                self._view.show(Waiting(sentence, elapsed))

        return inspect_locally(
            request.job,
            request.import_path,
            run_folder=self._folder.path,
            logs=self._folder.logs,
            shell=self._shell,
            on_phase=on_phase,
        )

    def _follow(
        self,
        address: str,
        *,
        stop_now_seconds: float,
        when_lost: str = "",
        services: OwnServices | None = None,
        model: ModelReport | None = None,
    ) -> Ending:
        request, clock = self._request, self._shell.clock
        client = self._shell.connect(address)
        try:
            submission = self._submission or replace(submission_of(request, self._folder), model=model)
            job = RunningJob(client, submission, self._inbox, clock=clock, when_lost=when_lost)
            if self._record.job_id and self._folder.has_begun:
                # A coordinator without a record of the job must not train it a second time.
                job.adopt(JobId(self._record.job_id))
            else:
                self._note(job_id=job.hand_in())
            job.watch()
            self._interrupts.listen(self._on_signal)
            return Follower(
                job,
                self._view,
                inbox=self._inbox,
                clock=clock,
                stop_now_seconds=stop_now_seconds,
                services=services,
                on_training=self._on_training,
            ).run()
        finally:
            self._view.close()
            client.close()

    def _on_training(self) -> None:
        self._folder.point_latest()
        if not self._has_begun:
            self._has_begun = True
            if (forecast := self._folder.read_forecast()) is not None:
                self._view.say(plan_line(forecast))

    def _on_signal(self, number: signal.Signals) -> None:
        """Handle a signal; in the main thread, between any two of its steps."""
        detaches = self._request.detaches and number is signal.SIGTERM
        self._inbox.put(Detached() if detaches else Interrupted())

    def _restarted(self, restart: ServiceRestart) -> None:
        """Handle the restart of a service; called from another thread."""
        try:
            with self._noting:
                self._note(pids={**self._record.pids, restart.key: restart.pid})
        except UserError as error:
            self._inbox.put(Remark(str(error)))
        self._inbox.put(restart)

    def _note(self, **changes: Any) -> None:
        with self._noting:
            self._record = replace(self._record, **changes)
            self._folder.write_record(self._record)

    def _conclude(self, ending: Ending) -> RunEnd:
        """Collect the result of the run, and write result.json."""
        resumable = has_checkpoint_at(self._folder.place)
        end = RunEnd(
            run_dir=self._folder.path,
            state=ending.state,
            result=None if ending.result is None else TrainResult.from_json(ending.result),
            error=ending.error,
            sentences=self._with_hint(ending, resumable=resumable),
            interrupted=self._interrupts.count > 0,
            job_id=self._record.job_id,
            resumable=resumable,
            forecast=self._folder.read_forecast(),
            emulated=self._request.job.cluster.emulate,
            conditions=ending.conditions,
            checkpoints=self._folder.checkpoints_url,
            best=_best_of(self._folder),
        )
        if self._request.coordinator is None:
            # The coordinator of this run may have been stopped before it did so.
            try:
                discard_model_file(self._folder.path)
            except OSError as error:
                self._view.say(f"the model file of the inspection could not be deleted: {error}")
        try:
            self._folder.merge_trace()
        except OSError as error:
            self._view.say(f"trace.json could not be written: {error}")
        if end.result is not None:
            staleness = replace(end.result.staleness, violations=self._count_violations())
            end = replace(end, result=replace(end.result, staleness=staleness))
        return self._written_down(end)

    def _written_down(self, end: RunEnd) -> RunEnd:
        """Write result.json. A failure here is reported after the causes of the run's own failure."""
        cause = {"error": end.error} if end.error else {}
        try:
            self._folder.write_result(end.state, {**end.to_json(), **cause})
        except UserError as error:
            sentence = consequence(str(error), "", end.conditions)
            if end.state is JobState.FINISHED:
                return replace(end, error=JobFailed.__name__, sentences=(f"the run finished, but {sentence}",))
            self._view.say(str(error))
        return end

    def _count_violations(self) -> int | None:
        try:
            return count_violations(self._folder.path, say=self._view.say)
        except KeyboardInterrupt:
            return None

    def _with_hint(self, ending: Ending, *, resumable: bool) -> tuple[str, ...]:
        """The sentences of `ending`; for an interrupted run with the command to resume it."""
        broke_off = ending.state is not JobState.FINISHED and not isinstance(
            error_of(ending.error, ending.sentences), UserError
        )
        if not broke_off or not resumable:
            return ending.sentences
        command = resume_command(
            self._folder.path, self._shell.current, self._request.coordinator, self._request.resumed_by
        )
        hint = f"resume with: {command}"
        return (*ending.sentences[:-1], f"{ending.sentences[-1]}; {hint}")


def end_of(folder: RunFolder, result: RunResult) -> RunEnd:
    """The ending of a run followed by another process, from its result.json."""
    state = JobState(result.state)
    has_result = state is not JobState.FAILED and "clocks" in result.values
    stopped = ("the run was stopped before its end",) if state is JobState.STOPPED else ()
    return RunEnd(
        run_dir=folder.path,
        state=state,
        result=TrainResult.from_json({key: result.values[key] for key in result.values if key != "state"})
        if has_result
        else None,
        error=str(result.values.get("error", "")),
        sentences=result.errors or stopped,
        resumable=has_checkpoint_at(folder.place),
        forecast=folder.read_forecast(),
        emulated=folder.read_job().cluster.emulate,
        checkpoints=folder.checkpoints_url,
        best=_best_of(folder),
    )


def _best_of(folder: RunFolder) -> Best | None:
    try:
        return find_best(folder.path)[1]
    except CheckpointError:
        return None


def record_of(request: RunRequest, folder: RunFolder, shell: Shell) -> RunRecord:
    """The initial content of run.json."""
    return RunRecord(
        run_dir=str(folder.path),
        name=request.job.name,
        host=socket.gethostname(),
        started_wall=shell.clock.wall(),
        coordinator=request.coordinator or "",
        local=request.coordinator is None,
        pids={"hetpipe": os.getpid()},
        restored_from=request.restore,
        import_path=str(request.import_path.absolute()),
    )


def submission_of(request: RunRequest, folder: RunFolder) -> Submission:
    """The submission of a job."""
    return Submission(
        request_id=new_request_id(),
        job_json=request.job.model_dump_json(),
        run_dir=str(folder.path),
        import_path=str(request.import_path.absolute()),
        restore=request.restore,
        code=request.code,
    )


def hand_in(request: RunRequest, folder: RunFolder, client: CoordinatorPort, shell: Shell) -> JobId:
    """Submit a job to a cluster without following it, once: repeated with the same folder, it is the same job.

    Raises:
        HetpipeError: the coordinator did not accept it, or is unreachable.
    """
    submission = folder.read_submission()
    if submission is None:
        submission = submission_of(request, folder)
        folder.write_submission(submission)
    if not folder.has_job:
        folder.write_job(request.job)  # before the coordinator may replace it by its plan
    job_id = client.invoke(SUBMIT_JOB, SubmitJobRequest(submission)).job_id
    folder.write_record(replace(record_of(request, folder, shell), job_id=job_id, pids={}))
    folder.point_latest()  # no follower does so once it trains
    return job_id


def resume_command(run_dir: Path, current: Path, coordinator: str | None, resumed_by: str = "") -> str:
    """The command that resumes a run, for use in `current`.

    Args:
        run_dir: its folder.
        current: the folder that displayed paths are relative to.
        coordinator: `HOST:PORT` of its cluster; None: on this machine.
        resumed_by: as in `RunRequest`.
    """
    if resumed_by:
        return f"{resumed_by} --resume {shown_path(run_dir, current)}"
    if coordinator:
        return f"hetpipe submit --resume {shown_path(run_dir, current)} --coordinator {coordinator}"
    return f"hetpipe train --resume {shown_path(run_dir, current)}"


def metrics_remark(job: Job) -> str:
    """What becomes of metrics that nothing is evaluated by; empty if there are none."""
    if not job.metrics or job.data.eval is not None:
        return ""
    return f"{', '.join(job.metrics)}: metrics are of evaluations, which need `data.eval`; this run makes none"


def planning_remark(job: Job) -> str:
    """The steps before the run can start, and assumptions; empty if the job needs no planning."""
    if job.is_planned:
        return "the model is measured first" if is_to_measure(job) else ""
    steps = ["the model is measured"] if is_to_measure(job) else []
    if job.cluster.file is None:
        within, between = (f"{link.effective_bytes_per_second / 1e9:g} GB/s" for link in (WITHIN_NODE, BETWEEN_NODES))
        steps.append(
            f"unmeasured links are assumed to carry {within} within a node and {between} between nodes (no "
            "cluster.file)"
        )
    return f"the run is planned first{': ' if steps else ''}{', '.join(steps)}"


def choose_devices(job: Job, *, count_cuda: Callable[[], int] | None = None) -> tuple[DeviceOffer, str]:
    """The devices of a local run's agent, and a remark: its GPUs, shared if there are fewer than stages, else CPUs."""
    wanted = num_devices_wanted(job)
    if wanted is not None and (job.cluster.emulate or job.cluster.devices):
        return DeviceOffer(num_cpu_devices=wanted), f", with {count(wanted, 'emulated device')}"
    found = (count_cuda or _count_cuda)()
    if not found:
        wanted = wanted or len(os.sched_getaffinity(0))
        return DeviceOffer(num_cpu_devices=wanted), f", with {count(wanted, 'CPU device')}"
    per_gpu = math.ceil((wanted or found) / found)
    shared = f", shared by the job's {wanted} stages" if per_gpu > 1 else ""
    return DeviceOffer(devices_per_gpu=per_gpu), f", with {count(found, 'CUDA device')}{shared}"


def _count_cuda() -> int:
    return sum(device.torch_device.startswith("cuda") for device in discover_devices("local"))
