"""A coordinator that plays a script, and the values it tells."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hetpipe.errors import HetpipeError
from hetpipe.job.file import Job, load_job
from hetpipe.report.view import SilentView
from hetpipe.runs.shell import Shell
from hetpipe.values.events import (
    Evaluated,
    JobEnded,
    JobEvent,
    JobState,
    JobStatus,
    NumberedEvent,
    ProcessStatus,
    ProgressTable,
    StageRow,
    StateChanged,
    StopMode,
    Submission,
    VirtualWorkerRow,
    WorkerStatus,
)
from hetpipe.values.ids import Clock, DeviceId, Incarnation, JobId, LayerIndex, Term, VirtualWorkerIndex
from hetpipe.values.life_state import LifeState
from hetpipe.values.link_measurement import LinksProgress
from hetpipe.values.members import Member, MemberId, MemberInfo, MemberRole
from hetpipe.values.run import AgentDevice, ClockSnapshot
from hetpipe.wire.calls import (
    AddWorkerRequest,
    DrainWorkerRequest,
    GetClocksRequest,
    GetStatusRequest,
    KnownClocks,
    ListMembersRequest,
    MeasureLinksRequest,
    Members,
    MoveWorkerRequest,
    MovingWorker,
    StopJobRequest,
    StoppingJob,
    SubmitJobRequest,
    SubmittedJob,
    Workers,
)
from tests.support.fake_clock import FakeClock
from tests.support.method_calls import MethodCalls

JOB_ID = JobId("small-1")

DEVICE = AgentDevice("n0/0", "cpu", 1 << 30, "cpu")

#: A whole result, as the coordinator tells it.
RESULT: dict[str, Any] = {
    "run_dir": "/runs/small",
    "waves": 12,
    "minibatches": 24,
    "samples": 92,
    "wall_seconds": 0.5,
    "samples_per_second": 184.0,
    "loss": {"first": 1.2, "last": 1.1},
    "eval": {"epoch": 2, "clock": 6, "samples": 46, "accuracy": 0.9, "loss": 1.06},
    "staleness": {"bound_clock_distance": 2, "max_clock_distance": 1, "violations": None},
    "clocks": {"0": 6, "1": 6},
    "global_clock": 6,
    "bytes": {"pushed": 9152, "pulled": 7744},
    "waiting_seconds": {"0": 0.1, "1": 0.2},
    "idle_seconds": {"0": 0.0, "1": 0.1},
    "losses": {},
    "evaluations": {
        "number": 2,
        "best": {
            "epoch": 1,
            "clock": 3,
            "minibatches": 12,
            "samples": 46,
            "rewinds": 0,
            "values": {"accuracy": 0.8, "loss": 1.05},
            "within_epoch": False,
            "whole": True,
        },
        "listed": [
            {
                "epoch": epoch,
                "clock": 3 * epoch,
                "minibatches": 12 * epoch,
                "samples": 46,
                "rewinds": 0,
                "values": {"accuracy": accuracy, "loss": loss},
                "within_epoch": False,
                "whole": True,
            }
            for epoch, accuracy, loss in ((1, 0.8, 1.05), (2, 0.9, 1.06))
        ],
    },
    "deaths": {"0": 0, "1": 0},
    "skipped_updates": {"0": 0, "1": 0},
    "rewinds": 0,
    "frozen": [],
    "cache": {"reads": 0, "computed": 0, "read_bytes": 0, "stopped": ""},
    "conditions": [],
    "proof": None,
    "tokens_per_second": None,
    "model_flops_utilisation": None,
    "model_flops_utilisation_reason": "the operations of the model were not counted",
    "stages": [
        {
            "vw": vw,
            "stage": 0,
            "weight_bytes": 8192,
            "activation_bytes": 1536,
            "gradient_norm": None,
            "learning_rate": 0.1,
        }
        for vw in (0, 1)
    ],
}


def small_job(**changes: Any) -> Job:
    """The job that scripts are about."""
    values: dict[str, Any] = {
        "name": "small",
        "model": "tests.models:mlp32",
        "loss": "tests.models:loss",
        "data": {"train": "tests.models:data32"},
        "batch_size": 4,
        "epochs": 2,
        "optimizer": {"name": "SGD", "lr": 0.1},
        "workers": {"count": 2, "stages": 1},
        "sync": {"D": 1, "minibatches_per_wave": 2},
    }
    return load_job(values, changes)


def table(*clocks: int, staleness: int | None = 1, eta_seconds: float | None = 6.0) -> ProgressTable:
    """A picture of a run whose virtual workers have these clocks."""
    rows = tuple(
        VirtualWorkerRow(
            vw=VirtualWorkerIndex(vw),
            stages=(
                StageRow(LayerIndex(0), LayerIndex(1), DeviceId(f"n0/{2 * vw}")),
                StageRow(LayerIndex(1), LayerIndex(5), DeviceId(f"n0/{2 * vw + 1}")),
            ),
            clock=Clock(clock),
            distance=clock - min(clocks),
            samples_per_second=150.25,
            loss=None if clock == 0 else 1.25,
            waiting_share=0.125,
        )
        for vw, clock in enumerate(clocks)
    )
    return ProgressTable(
        rows=rows,
        running_seconds=3.0,
        epoch=2,
        samples=60,
        total_samples=240,
        samples_per_second=300.5,
        eta_seconds=eta_seconds,
        staleness=staleness,
        global_clock=Clock(min(clocks)),
    )


def evaluated(epoch: int = 2) -> Evaluated:
    """An evaluation at the end of `epoch`."""
    return Evaluated(clock=Clock(6), epoch=epoch, samples=46, values={"accuracy": 0.9634, "loss": 0.1312})


def snapshot(*clocks: int) -> ClockSnapshot:
    """The clocks of a run in which everybody has staged one wave more than is committed."""
    staged = {VirtualWorkerIndex(vw): Clock(clock + 1) for vw, clock in enumerate(clocks)}
    return ClockSnapshot(
        term=Term(1),
        published=Clock(min(clocks)),
        global_clock=Clock(min(clocks)),
        local={VirtualWorkerIndex(vw): Clock(clock) for vw, clock in enumerate(clocks)},
        max_distance=2,
        epoch=2,
        minibatches=20,
        samples=80,
        barrier=Clock(9),
        barrier_reason="epoch",
        waves=sum(clocks),
        staged=staged,
        durable=staged,
    )


def running_status(run_dir: str) -> JobStatus:
    """The status of a running job of one stage per virtual worker."""
    processes = (
        ProcessStatus("coordinator", 0, None, "127.0.0.1", 11, "up"),
        ProcessStatus("parameter_server", 0, None, "127.0.0.1", 12, "up"),
        ProcessStatus("agent", 0, None, "127.0.0.1", 13, "up"),
        ProcessStatus("stage", 0, VirtualWorkerIndex(0), "127.0.0.1", 14, "ready"),
        ProcessStatus("stage", 0, VirtualWorkerIndex(1), "127.0.0.1", 0, "starting"),
    )
    return JobStatus(JOB_ID, "small", JobState.RUNNING, run_dir, "", processes, snapshot(4, 3))


FINISHES: tuple[JobEvent, ...] = (
    StateChanged(JobState.INSPECTING),
    StateChanged(JobState.RUNNING),
    table(1, 2),
    evaluated(),
    StateChanged(JobState.FINISHED),
    JobEnded(JobState.FINISHED, result=RESULT),
)


#: The live members of every scripted cluster.
MEMBERS = (
    Member(MemberInfo(MemberRole.AGENT, MemberId("n0"), "n0.example", 13, devices=(DEVICE, DEVICE)), 0, 4.25),
    Member(
        MemberInfo(MemberRole.PARAMETER_SERVER, MemberId("parameter-server-0"), "n0.example", 12, "n0.example:7500"),
        1,
        3.5,
    ),
)


class FakeCoordinator(MethodCalls):
    """`CoordinatorPort` with a script. What it is asked is kept."""

    def __init__(self, events: Sequence[JobEvent | HetpipeError] = FINISHES, status: JobStatus | None = None) -> None:
        #: Told one by one; an error is raised in place of an event, and then the script goes on.
        self.script: queue.SimpleQueue[JobEvent | HetpipeError] = queue.SimpleQueue()
        for event in events:
            self.script.put(event)
        self._status = status
        self.submissions: list[Submission] = []
        self.stops: list[StopMode] = []
        #: Drains and adds: what, who, of which job.
        self.wishes: list[tuple[str, int | None, JobId | None]] = []
        #: Whom an addition brings that the run has not had yet.
        self.new: tuple[WorkerStatus, ...] = ()
        #: Layers of each stage of a virtual worker, and the moves that were asked for: who, to what, of which job.
        self.cut: tuple[int, ...] = (2, 2)
        self.moves: list[tuple[int, tuple[int, ...], JobId | None]] = []
        #: Called with each wish to stop, in the caller's thread.
        self.on_stop: Callable[[StopMode], None] = lambda _: None
        #: What it was asked to measure, and what it tells of that, call by call.
        self.surveys: list[tuple[str, bool]] = []
        self.links_progress: list[LinksProgress] = []
        self.member_list: tuple[Member, ...] = MEMBERS
        self._told = 0

    def submit_job(self, request: SubmitJobRequest) -> SubmittedJob:
        self.submissions.append(request.submission)
        return SubmittedJob(JOB_ID)

    def stop_job(self, request: StopJobRequest) -> StoppingJob:
        self.stops.append(request.mode)
        self.on_stop(request.mode)
        return StoppingJob(JobState.STOPPING)

    def measure_links(self, request: MeasureLinksRequest) -> LinksProgress:
        self.surveys.append((request.request_id, request.fresh))
        return self.links_progress.pop(0)

    def drain_worker(self, request: DrainWorkerRequest) -> WorkerStatus:
        self.wishes.append(("drain", request.vw, request.job_id))
        return WorkerStatus(request.vw, Incarnation(0), 0, LifeState.LEAVING)

    def add_worker(self, request: AddWorkerRequest) -> Workers:
        vw = request.vw
        self.wishes.append(("add", vw, request.job_id))
        if self.new:
            return Workers(self.new)
        known = (1, 2) if vw is None else (vw,)
        coming = (WorkerStatus(VirtualWorkerIndex(one), Incarnation(1), 0, LifeState.ADMITTING) for one in known)
        return Workers(tuple(coming))

    def move_worker(self, request: MoveWorkerRequest) -> MovingWorker:
        self.moves.append((request.vw, request.layers, request.job_id))
        return MovingWorker(WorkerStatus(request.vw, Incarnation(0), 0, LifeState.READY), self.cut)

    def get_status(self, request: GetStatusRequest) -> JobStatus:
        return self.status(request.job_id)

    def status(self, job_id: JobId | None = None) -> JobStatus:
        """The answer to `GetStatus`."""
        return self._status or JobStatus(None, "", None, "", "")

    def list_members(self, _: ListMembersRequest) -> Members:
        return Members(self.member_list)

    def get_clocks(self, _: GetClocksRequest) -> KnownClocks:
        return KnownClocks(self._status.clocks if self._status is not None else None)

    def watch_job(self, job_id: JobId | None = None, *, after: int = 0) -> Iterator[NumberedEvent]:
        while True:
            event = self.script.get(timeout=10.0)
            if isinstance(event, HetpipeError):
                raise event
            self._told += 1
            yield NumberedEvent(self._told, event)
            if isinstance(event, JobEnded):
                return

    def watch_clocks(self, job_id: JobId | None = None) -> Iterator[ClockSnapshot]:
        yield snapshot(1, 1)
        yield snapshot(2, 1)


def shell_with(coordinator: FakeCoordinator, current: Path) -> Shell:
    """A world in which every address is that coordinator's, seen from the folder `current`."""
    return Shell(
        clock=FakeClock(auto_advance=True),
        environment={},
        current=current,
        open_coordinator=lambda _address, _tls: coordinator,
    )


class RecordingView(SilentView):
    """Keeps what it was shown."""

    def __init__(self) -> None:
        self.events: list[JobEvent] = []
        self.remarks: list[str] = []
        self.closed = False

    def show(self, event: JobEvent) -> None:
        self.events.append(event)

    def say(self, sentence: str) -> None:
        self.remarks.append(sentence)

    def close(self) -> None:
        self.closed = True
