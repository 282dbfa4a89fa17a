"""The processes an agent has started: stages and inspections, by job."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetpipe.agent.child import Child, ChildSpec, Listener, end_children
from hetpipe.agent.inspection_order import InspectionAnswer, InspectionOrder
from hetpipe.clock import Clock
from hetpipe.errors import JobFailed, ProtocolViolation
from hetpipe.observe.log import get_logger
from hetpipe.profiler.cache import cache_folder
from hetpipe.spec.commands import (
    AgentNews,
    ChildExit,
    InspectCommand,
    InspectionResult,
    InspectionStep,
    StageKey,
    StageNews,
    StartStageCommand,
    exit_sentence,
)
from hetpipe.spec.ids import JobId
from hetpipe.spec.measurement import ProfileStep
from hetpipe.spec.run import StageConfig, StageFailed, StageReport
from hetpipe.spec.wire import from_json, revive, to_json

_log = get_logger(__name__)

#: Seconds from SIGTERM to SIGKILL.
GRACE_SECONDS = 2.0

#: What every child's environment has: one thread per stage process, so that stages share the CPUs evenly.
SINGLE_THREADED: Mapping[str, str] = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Programs:
    """What children run, without the arguments the agent adds."""

    stage: Sequence[str] = (sys.executable, "-m", "hetpipe.agent.stage_process")
    inspection: Sequence[str] = (sys.executable, "-m", "hetpipe.agent.inspect_process")


class Children:
    """All children of one agent. What they tell goes to `tell`, from their threads.

    Thread-safe, but `inspect` and `start_stage` belong to one thread that lives as long as the agent (`Child`).
    """

    def __init__(
        self,
        *,
        tell: Callable[[AgentNews], None],
        environment: Mapping[str, str],
        clock: Clock,
        programs: Programs | None = None,
    ) -> None:
        self._tell = tell
        self._environment = {**environment, **SINGLE_THREADED}
        self._clock = clock
        self._programs = programs or Programs()
        self._lock = threading.Lock()
        #: Live children.
        self._stages: dict[StageKey, Child] = {}
        self._inspections: dict[JobId, Child] = {}

    def jobs(self) -> tuple[JobId, ...]:
        """The jobs that have live children."""
        with self._lock:
            return tuple(sorted({key.job_id for key in self._stages} | self._inspections.keys()))

    def inspect(self, command: InspectCommand) -> None:
        """Start an inspection, unless one of the job is running."""
        job_id = command.job_id
        with self._lock:
            if job_id in self._inspections:
                return
        order = InspectionOrder(
            job=json.loads(command.job_json),
            import_path=command.import_path,
            with_model=command.with_model,
            measure=command.measure,
            cache_folder=str(cache_folder(self._environment)),
        )
        spec = ChildSpec(
            name=f"inspection-{job_id}",
            command=self._programs.inspection,
            first_line=to_json(InspectionOrder, order),
            environment=self._environment,
            log_path=Path(command.run_dir) / "logs" / "inspection.out",
        )
        inspection = _Inspection(job_id, self._tell)

        def on_exit(exit_code: int, last_words: str) -> None:
            with self._lock:
                self._inspections.pop(job_id, None)
            inspection.ended(exit_code, last_words)

        try:
            self._add(self._inspections, job_id, spec, Listener(on_line=inspection.heard, on_exit=on_exit))
        except OSError as error:
            inspection.ended(error.errno or 1, str(error))

    def start_stage(self, command: StartStageCommand) -> None:
        """Start a stage, unless it is running."""
        key, config = command.key, command.config
        with self._lock:
            if key in self._stages:
                return
        life = f"-life-{key.incarnation}" if key.incarnation else ""
        spec = ChildSpec(
            name=f"vw-{key.vw}-stage-{key.stage}",
            command=self._programs.stage,
            first_line=to_json(StageConfig, config),
            environment=self._environment,
            log_path=Path(config.run_dir) / "logs" / f"vw-{key.vw}-stage-{key.stage}{life}.out",
        )

        def on_line(line: bytes) -> None:
            report: StageReport = from_json(StageReport, line)
            self._tell(StageNews(key, report))

        def on_exit(exit_code: int, last_words: str) -> None:
            with self._lock:
                child = self._stages.pop(key, None)
            self._tell(ChildExit(key, 0 if child is None else child.pid, exit_code, last_words))

        try:
            self._add(self._stages, key, spec, Listener(on_line=on_line, on_exit=on_exit))
        except OSError as error:
            _log.exception("stage_not_started", stage=str(key))
            failed = StageFailed(type(error).__name__, f"its process could not be started: {error}")
            self._tell(StageNews(key, failed))
            self._tell(ChildExit(key, 0, error.errno or 1))

    def stop_job(self, job_id: JobId) -> None:
        """End the children of a job, in the background."""
        children = self._children(lambda of: of == job_id)
        if children:
            _log.info("ending_children", job=job_id, count=len(children))
            threading.Thread(
                target=end_children,
                args=(children,),
                kwargs={"grace_seconds": GRACE_SECONDS, "clock": self._clock},
                name=f"end-{job_id}",
            ).start()

    def stop_all(self) -> None:
        """End all children; returns when they are gone."""
        end_children(self._children(lambda _: True), grace_seconds=GRACE_SECONDS, clock=self._clock)

    def _children(self, wanted: Callable[[JobId], bool]) -> list[Child]:
        with self._lock:
            stages = [child for key, child in self._stages.items() if wanted(key.job_id)]
            return stages + [child for job_id, child in self._inspections.items() if wanted(job_id)]

    def _add(self, table: dict[Any, Child], key: StageKey | JobId, spec: ChildSpec, listener: Listener) -> None:
        # Under the lock, so that a child that ends at once finds itself in the table.
        with self._lock:
            child = Child(spec, listener)
            table[key] = child
        _log.info("child_started", child=spec.name, pid=child.pid)


class _Inspection:
    """One inspection: its steps, and then its outcome, or the end without one."""

    def __init__(self, job_id: JobId, tell: Callable[[AgentNews], None]) -> None:
        self._job_id = job_id
        self._tell = tell
        self._told = False

    def heard(self, line: bytes) -> None:
        if self._told:
            return
        try:
            answer = json.loads(line)
        except ValueError as error:
            raise ProtocolViolation(f"an inspection reported what is no JSON: {error}") from error
        if not isinstance(answer, dict):
            raise ProtocolViolation("an inspection reported what is no JSON object")
        if "step" in answer:
            self._tell(InspectionStep(self._job_id, revive(ProfileStep, answer["step"])))
            return
        if "ok" in answer:
            found: InspectionAnswer = revive(InspectionAnswer, answer["ok"])
            result = InspectionResult(self._job_id, found.model, measurements=found.measurements)
        else:
            problems = tuple(str(problem) for problem in answer.get("problems", ()))
            result = InspectionResult(self._job_id, None, str(answer.get("error", JobFailed.__name__)), problems)
        self._told = True
        self._tell(result)

    def ended(self, exit_code: int, last_words: str) -> None:
        if self._told:
            return
        self._told = True
        words = f"; its last words: {last_words}" if last_words else ""
        problem = f"the inspection of the model {exit_sentence(exit_code)} before it reported{words}"
        self._tell(InspectionResult(self._job_id, None, JobFailed.__name__, (problem,)))
