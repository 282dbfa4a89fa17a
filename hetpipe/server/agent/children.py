"""The child processes of an agent: stages, inspections and link measurements, by job."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hetpipe.clock import Clock
from hetpipe.errors import (
    HetpipeError,
    JobFailed,
    PermissionDenied,
    ProtocolViolation,
    Unavailable,
    UnknownMember,
    UserError,
)
from hetpipe.forking.environment import SINGLE_THREADED
from hetpipe.forking.process import Starter, spawn
from hetpipe.job.sections import EnvironmentSection
from hetpipe.link.choice import choose_link
from hetpipe.observe.log import get_logger
from hetpipe.phases import LAUNCH, PHASE
from hetpipe.pipeline.allowed_modules import OPTION, checked_patterns
from hetpipe.profiler.cache import cache_folder
from hetpipe.profiler.link_order import LinkAnswer, LinkOrder
from hetpipe.roots import Roots
from hetpipe.server.agent.child import Child, ChildSpec, Listener, end_children
from hetpipe.server.agent.environment import child_environment, missing
from hetpipe.server.agent.frozen_caches import FrozenCaches
from hetpipe.server.agent.inspection_order import InspectionAnswer, InspectionOrder
from hetpipe.server.agent.log_relay import ClockShardAt, LogRelays
from hetpipe.server.agent.sent_code import OPTION as ACCEPT_CODE
from hetpipe.server.agent.sent_code import SentCode
from hetpipe.values.commands import (
    AgentReport,
    ChildExit,
    InspectCommand,
    InspectionPhase,
    InspectionResult,
    InspectionStep,
    KeyedStageReport,
    LinkAwaited,
    LinkResult,
    MeasureLinkCommand,
    StageKey,
    StartStageCommand,
    StopVirtualWorkerCommand,
    end_key,
    exit_sentence,
)
from hetpipe.values.ids import AgentId, DeviceId, JobId
from hetpipe.values.link_measurement import MeasuredLinks
from hetpipe.values.measurement import ProfileStep
from hetpipe.values.rewinds import discard_model_file
from hetpipe.values.run import StageConditions, StageConfig, StageDone, StageFailed, StagePhase, StageReady, StageReport
from hetpipe.values.wire import from_json, revive, to_json
from hetpipe.wire.tls import TLS_VARIABLE

if TYPE_CHECKING:  # imported only with TLS, as it is slow
    from hetpipe.server.agent.stage_certificates import StageCertificates

_log = get_logger(__name__)

#: Seconds from SIGTERM to SIGKILL.
GRACE_SECONDS = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Programs:
    """The programs of children, without the arguments that the agent adds, and their launcher."""

    stage: Sequence[str] = (*LAUNCH, "hetpipe.server.agent.stage_process")
    inspection: Sequence[str] = (*LAUNCH, "hetpipe.server.agent.inspect_process")
    link: Sequence[str] = (*LAUNCH, "hetpipe.server.agent.link_process")
    allowed_environment: Sequence[str] | None = None
    """Patterns of the environment variables that jobs may inherit and set; None: any."""
    starter: Starter = spawn
    """Launches their processes."""
    sent_code: SentCode | None = None
    """The code that was sent along with jobs; None: none is accepted."""

    def allowing(self, patterns: Sequence[str]) -> Programs:
        """The same programs, limited to importing matching modules for a job.

        Raises:
            UserError: a pattern is empty, or there are no patterns.
        """
        options = [f"{OPTION}={pattern}" for pattern in checked_patterns(patterns)]
        return replace(self, stage=(*self.stage, *options), inspection=(*self.inspection, *options))


#: Environment variable with the port of a stage process's Prometheus endpoint; empty: no endpoint.
METRICS_PORT = "HETPIPE_METRICS_PORT"

#: Environment variable with the link port of a stage process; empty: any free port.
LINK_PORT = "HETPIPE_LINK_PORT"

#: Timeout for the connection of the other end of a measured link, and likewise for all messages.
LINK_SECONDS = 25.0

ChildKind = Literal["stage", "inspection", "link"]
Outcome = Literal["ok", "error", "signal"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildCounts:
    """The numbers of running, started and ended children."""

    running: Counter[ChildKind] = field(default_factory=Counter)
    started: Counter[ChildKind] = field(default_factory=Counter)
    exited: Counter[tuple[ChildKind, Outcome]] = field(default_factory=Counter)
    later_lives: int = 0
    """Stages started for a later incarnation of their virtual worker."""


class Children:
    """All children of one agent. Their reports go to `tell`, from their threads.

    Thread-safe, but `inspect` and `start_stage` belong to one thread that lives as long as the agent (`Child`).
    """

    def __init__(  # noqa: PLR0913 - what children are started with, and what they share
        self,
        *,
        send: Callable[[AgentReport], None],
        environment: Mapping[str, str],
        clock: Clock,
        programs: Programs | None = None,
        first_metrics_port: int | None = None,
        first_link_port: int | None = None,
        certificates: StageCertificates | None = None,
        roots: Roots | None = None,
        relays: LogRelays | None = None,
    ) -> None:
        """Prepare; nothing is started.

        Args:
            tell: receives the reports of children.
            environment: of the children, before additions.
            clock: for the grace period of termination.
            programs: the children's programs.
            first_metrics_port: metrics port of the stage on device 0; stages on later devices use the following ports.
                None: no metrics.
            first_link_port: link port of the stage on device 0, likewise; None: any free port.
            certificates: certificates of stages; None without TLS.
            roots: folders below which jobs may have their code and their runs; None: anywhere.
            relays: relay the decision logs of their jobs to stages; None: these follow them themselves.
        """
        self._relays = relays
        self._roots = roots or Roots()
        self._send = send
        # A child never has the agent's identity: it has none, or that of its own certificate.
        inherited = {name: value for name, value in environment.items() if name != TLS_VARIABLE}
        self._environment = inherited
        self._certificates = certificates
        self._clock = clock
        self._programs = programs or Programs()
        self._lock = threading.Lock()
        #: Live children.
        self._stages: dict[StageKey, Child] = {}
        self._inspections: dict[JobId, Child] = {}
        #: Ends of measured links.
        self._ends: dict[StageKey, Child] = {}
        #: Time of each stage's request, in monotonic seconds.
        self._requested: dict[StageKey, float] = {}
        #: The ready reports of live stages.
        self._ready: dict[StageKey, KeyedStageReport] = {}
        #: The newest conditions of live stages that have reported any.
        self._conditions: dict[StageKey, KeyedStageReport] = {}
        #: Live stages that were killed because their incarnation was evicted.
        self._ordered: set[StageKey] = set()
        self._first_ports = {METRICS_PORT: first_metrics_port, LINK_PORT: first_link_port}
        self._started: Counter[ChildKind] = Counter()
        self._exited: Counter[tuple[ChildKind, Outcome]] = Counter()
        self._later_lives = 0
        self._frozen_caches = FrozenCaches()

    @property
    def counts(self) -> ChildCounts:
        """The numbers of running and ended children."""
        with self._lock:
            return ChildCounts(
                running=Counter(
                    {"stage": len(self._stages), "inspection": len(self._inspections), "link": len(self._ends)}
                ),
                started=self._started.copy(),
                exited=self._exited.copy(),
                later_lives=self._later_lives,
            )

    def jobs(self) -> tuple[JobId, ...]:
        """The jobs that have live children."""
        with self._lock:
            return tuple(sorted({key.job_id for key in (*self._stages, *self._ends)} | self._inspections.keys()))

    def stages(self) -> tuple[StageKey, ...]:
        """The live stages."""
        with self._lock:
            return tuple(sorted(self._stages))

    def inspect(self, command: InspectCommand) -> None:
        """Start an inspection, unless one of the job is running."""
        job_id = command.job_id
        with self._lock:
            if job_id in self._inspections:
                return
        inspection = Inspection(job_id, self._send)
        job: dict[str, Any] = from_json(dict[str, Any], command.job_json)
        try:
            import_path = self._code_of(command.import_path, command.code)
            self._roots.check_run(command.run_dir)
            self._roots.check_initial_weights(_initial_weights_of(job), import_path)
            environment = self._environment_of(job, f"inspection-{job_id}")
        except HetpipeError as error:
            inspection.refused(error)
            return
        order = InspectionOrder(
            job=job,
            import_path=import_path,
            with_model=command.with_model,
            measure=command.measure,
            cache_folder=str(cache_folder(self._environment)),
            run_folder=command.run_dir,
        )
        spec = ChildSpec(
            name=f"inspection-{job_id}",
            command=self._programs.inspection,
            first_line=to_json(InspectionOrder, order),
            environment=environment,
            log_path=Path(command.run_dir) / "logs" / "inspection.out",
        )

        def on_exit(exit_code: int, last_words: str) -> None:
            if exit_code and command.with_model:
                # The job may have ended before the file was written.
                with suppress(OSError):
                    discard_model_file(Path(command.run_dir))
            with self._lock:
                self._inspections.pop(job_id, None)
                self._exited["inspection", _outcome(exit_code)] += 1
            inspection.ended(exit_code, last_words)

        try:
            self._add(
                self._inspections, job_id, spec, Listener(on_line=inspection.on_line, on_exit=on_exit), "inspection"
            )
        except OSError as error:
            inspection.ended(error.errno or 1, str(error))

    def measure_link(self, command: MeasureLinkCommand, node: AgentId, *, host: str) -> None:
        """Start the process for one end of a link measurement, unless it is running.

        Args:
            command: the end and the link.
            node: this agent's node.
            host: address under which other nodes reach this one.
        """
        task = command.task
        key = end_key(command.job_id, task.number, is_first=not task.address)
        with self._lock:
            if key in self._ends:
                return
        logs = Path(task.run_dir) / "logs" if task.run_dir else None
        end = LinkEnd(command.job_id, task.number, self._send)
        try:
            if task.run_dir:
                self._roots.check_run(task.run_dir)
            order, environment = self._link_order(command, key, node=node, host=host)
        except HetpipeError as error:
            end.failed(str(error))
            return
        spec = ChildSpec(
            name=f"link-{command.job_id}-{task.number}",
            command=self._programs.link,
            first_line=to_json(LinkOrder, order),
            environment=environment,
            log_path=logs / f"link-{task.number}-{node}.out" if logs else Path(os.devnull),
        )

        def on_exit(exit_code: int, last_words: str) -> None:
            self._forget_certificate(key)
            with self._lock:
                self._ends.pop(key, None)
                self._exited["link", _outcome(exit_code)] += 1
            end.ended(exit_code, last_words)

        try:
            self._add(self._ends, key, spec, Listener(on_line=end.on_line, on_exit=on_exit), "link")
        except OSError as error:
            self._forget_certificate(key)
            end.failed(f"its process could not be started: {error}")

    def _link_order(
        self, command: MeasureLinkCommand, key: StageKey, *, node: AgentId, host: str
    ) -> tuple[LinkOrder, Mapping[str, str]]:
        """Configuration and environment of the process, with a certificate of its own for an encrypted link.

        Raises:
            HetpipeError: the coordinator does not certify it.
        """
        task = command.task
        choice = choose_link(task.link, tls=self._certificates is not None, same_node=False)
        order = LinkOrder(
            role="call" if task.address else "await",
            node=node,
            other=task.other,
            transport=choice.kind,
            job_id=command.job_id,
            number=task.number,
            with_copies=task.with_copies,
            port=self._first_ports[LINK_PORT] or 0,
            host=host,
            address=task.address,
            deadline_seconds=LINK_SECONDS,
        )
        own = child_environment(self._environment, EnvironmentSection(), self._programs.allowed_environment)
        environment = {**own, **SINGLE_THREADED}
        if self._certificates is None or choice.kind != "grpc":
            return order, environment
        return order, {**environment, TLS_VARIABLE: str(self._certificates.make(key))}

    def start_stage(self, command: StartStageCommand) -> None:
        """Start a stage, unless it is running."""
        key, config = command.key, command.config
        with self._lock:
            if key in self._stages:
                return
        life = f"-life-{key.incarnation}" if key.incarnation else ""
        try:
            config = replace(config, import_path=self._code_of(config.import_path, command.code))
            self._roots.check_run(config.run_dir, config.restore, _storage_of(config.job))
            self._roots.check_initial_weights(_initial_weights_of(config.job), config.import_path)
            environment = self._stage_environment(key, config)
        except HetpipeError as error:
            self._not_started(key, error, 1)
            return
        spec = ChildSpec(
            name=f"vw-{key.vw}-stage-{key.stage}",
            command=self._programs.stage,
            first_line=to_json(StageConfig, config),
            environment=environment,
            log_path=Path(config.run_dir) / "logs" / f"vw-{key.vw}-stage-{key.stage}{life}.out",
        )

        def on_line(line: bytes) -> None:
            report: StageReport = from_json(StageReport, line)
            self._on_report(KeyedStageReport(key, report))
            if isinstance(report, StageReady):
                self._relay_log(key, config)

        def on_exit(exit_code: int, last_words: str) -> None:
            self._forget_certificate(key)
            if self._relays is not None:
                self._relays.remove(key)
            with self._lock:
                child = self._stages.pop(key, None)
                self._requested.pop(key, None)
                self._ready.pop(key, None)
                self._conditions.pop(key, None)
                self._exited["stage", _outcome(exit_code)] += 1
                ordered = key in self._ordered
                self._ordered.discard(key)
                if not exit_code and all(other.job_id != key.job_id for other in self._stages):
                    self._frozen_caches.remove(key.job_id)
                # Under the lock, so that the report precedes the absence of stages.
                self._send(ChildExit(key, 0 if child is None else child.pid, exit_code, last_words, ordered=ordered))

        try:
            self._add(self._stages, key, spec, Listener(on_line=on_line, on_exit=on_exit), "stage")
        except OSError as error:
            self._forget_certificate(key)
            self._not_started(key, error, error.errno or 1)

    def refuse_stage(self, command: StartStageCommand, error: HetpipeError) -> None:
        """Report that a stage is not started."""
        self._not_started(command.key, error, 1)

    def resend(self) -> None:
        """Repeat the ready reports and conditions of stages, for a new coordinator."""
        with self._lock:
            for keyed in (*self._ready.values(), *self._conditions.values()):
                self._send(keyed)

    def _on_report(self, keyed: KeyedStageReport) -> None:
        """Handle a stage's report."""
        # Under the lock, so that a ready report never follows the report of the exit.
        with self._lock:
            if isinstance(keyed.report, StageReady):
                self._ready[keyed.key] = keyed
                seconds = self._clock.monotonic() - self._requested.get(keyed.key, self._clock.monotonic())
                _log.info("stage_ready", stage=str(keyed.key), pid=keyed.report.pid, seconds=round(seconds, 3))
            elif isinstance(keyed.report, StageConditions):
                self._conditions[keyed.key] = keyed
            elif isinstance(keyed.report, StageDone | StageFailed):
                self._ready.pop(keyed.key, None)
            self._send(keyed)

    def _relay_log(self, key: StageKey, config: StageConfig) -> None:
        """Relay the decision log to a stage, which reads its input from now on."""
        with self._lock:
            child = self._stages.get(key)
        if self._relays is not None and child is not None and config.shard_addresses:
            member_id = config.shard_ids[0] if config.shard_ids else ""
            self._relays.add(key, ClockShardAt(config.shard_addresses[0], member_id), child.tell)

    def _forget_certificate(self, key: StageKey) -> None:
        if self._certificates is not None:
            self._certificates.forget(key)

    def _code_of(self, import_path: str, digest: str) -> str:
        """The folder to import a job's code from: what was sent along with it if this agent accepts that.

        Args:
            import_path: the folder that the job names.
            digest: of the code that was sent along; empty for none.

        Raises:
            UserError: the folder is not permitted or not here, or the code is refused.
            HetpipeError: the code cannot be fetched.
        """
        sent_code = self._programs.sent_code
        if digest and sent_code is not None:
            return str(sent_code.folder(digest))
        self._roots.check_code(import_path)
        if digest and not Path(import_path).is_dir():
            raise UserError(
                f"the folder of code {import_path} is not on this node, and the code that was sent along with the job "
                f"is not accepted here; put it there, or start this agent with {ACCEPT_CODE}"
            )
        return import_path

    def _environment_of(self, job: Mapping[str, Any], child: str) -> Mapping[str, str]:
        """The environment of a process that runs a job's code: permitted variables of the agent, and those of the job.

        Raises:
            UserError: the job names a variable that this agent does not allow.
        """
        wish = EnvironmentSection.model_validate_json(json.dumps(job.get("environment") or {}))
        if absent := missing(self._environment, wish):
            _log.warning("environment_not_set", child=child, names=list(absent))
        return {**child_environment(self._environment, wish, self._programs.allowed_environment), **SINGLE_THREADED}

    def _stage_environment(self, key: StageKey, config: StageConfig) -> Mapping[str, str]:
        """The environment of a new stage, with a certificate of its own under TLS.

        Raises:
            HetpipeError: the coordinator does not certify it.
        """
        device = config.plan.stage(config.vw, config.stage).device
        ports = {name: _port_of(device, first) for name, first in self._first_ports.items()}
        environment = {
            **self._environment_of(config.job, f"vw-{config.vw}-stage-{config.stage}"),
            **ports,
            **self._frozen_caches.environment(key.job_id, config.job),
        }
        if self._certificates is None:
            return environment
        return {**environment, TLS_VARIABLE: str(self._certificates.make(key))}

    def _not_started(self, key: StageKey, error: Exception, exit_code: int) -> None:
        # No traceback for a mistake in the job: it might reveal the environment.
        details = {"reason": str(error)} if isinstance(error, UserError) else {"exc_info": error}
        _log.error("stage_not_started", stage=str(key), **details)
        # A stage unknown to a new coordinator is certified in its next incarnation.
        is_passing = isinstance(error, Unavailable | UnknownMember | PermissionDenied)
        sentence = f"its process could not be started: {error}"
        failed = StageFailed(type(error).__name__, sentence, secondary=is_passing)
        self._send(KeyedStageReport(key, failed))
        self._send(ChildExit(key, 0, exit_code))

    def stop_job(self, job_id: JobId) -> None:
        """End the children of a job, in the background."""
        self._frozen_caches.remove(job_id)
        children = self._children(lambda of: of == job_id)
        if children:
            _log.info("ending_children", job=job_id, count=len(children))
            threading.Thread(
                target=end_children,
                args=(children,),
                kwargs={"grace_seconds": GRACE_SECONDS, "clock": self._clock},
                name=f"end-{job_id}",
            ).start()

    def kill_worker(self, command: StopVirtualWorkerCommand) -> None:
        """Kill the stages of an evicted virtual worker, with SIGKILL, so that stopped processes die as well."""
        # Under the lock, so that no exit is reported before it is marked as intended.
        with self._lock:
            wanted = [key for key in self._stages if command.means(key)]
            self._ordered.update(key for key in wanted if self._stages[key].send_signal(signal.SIGKILL))
        if wanted:
            _log.info("virtual_worker_killed", job=command.job_id, vw=command.vw, count=len(wanted))

    def stop_all(self, *, grace_seconds: float = GRACE_SECONDS) -> None:
        """Terminate all children, with SIGKILL after the grace period; returns when they are gone."""
        end_children(self._children(lambda _: True), grace_seconds=grace_seconds, clock=self._clock)
        if self._relays is not None:
            self._relays.close()
        self._frozen_caches.close()

    def _children(self, wanted: Callable[[JobId], bool]) -> list[Child]:
        with self._lock:
            stages = [child for key, child in self._stages.items() if wanted(key.job_id)]
            ends = [child for key, child in self._ends.items() if wanted(key.job_id)]
            return stages + ends + [child for job_id, child in self._inspections.items() if wanted(job_id)]

    def _add(
        self, table: dict[Any, Child], key: StageKey | JobId, spec: ChildSpec, listener: Listener, kind: ChildKind
    ) -> None:
        # Without the lock, which heartbeats need: the fork server may still be importing torch.
        is_entered = threading.Event()

        def on_exit(exit_code: int, last_words: str) -> None:
            is_entered.wait()  # the entry exists even if the child ends immediately
            listener.on_exit(exit_code, last_words)

        if isinstance(key, StageKey):
            with self._lock:
                self._requested[key] = self._clock.monotonic()
        child = Child(spec, replace(listener, on_exit=on_exit), starter=self._programs.starter)
        with self._lock:
            table[key] = child
            self._started[kind] += 1
            if kind == "stage" and isinstance(key, StageKey):
                self._later_lives += key.incarnation > 0
        is_entered.set()
        _log.info("child_started", child=spec.name, pid=child.pid)


def _port_of(device: DeviceId, first: int | None) -> str:
    """The port of a device, as text; empty if no port range is configured."""
    return "" if first is None else str(first + int(device.rpartition("/")[2]))


def _initial_weights_of(job: Mapping[str, Any]) -> object:
    """`init_from` in the document of a job, not validated yet."""
    return job.get("init_from")


def _storage_of(job: Mapping[str, Any]) -> str | None:
    """The object store of a job's document, which the stage validates; here only its URL is needed.

    Raises:
        UserError: it is not text.
    """
    storage = job.get("storage")
    if storage is not None and not isinstance(storage, str):
        raise UserError(f"storage: {storage!r:.100} is not the URL of an object store; write it as text")
    return storage


def _outcome(exit_code: int) -> Outcome:
    if exit_code < 0:
        return "signal"
    return "error" if exit_code else "ok"


class Inspection:
    """One inspection: its steps, then its result, or its exit without one."""

    def __init__(self, job_id: JobId, send: Callable[[AgentReport], None]) -> None:
        self._job_id = job_id
        self._send = send
        self._answered = False

    def on_line(self, line: bytes) -> None:
        """Handle a line of the inspection.

        Raises:
            ProtocolViolation: it is not a line of an inspection.
        """
        if self._answered:
            return
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ProtocolViolation(f"an inspection reported invalid JSON: {error}") from error
        if not isinstance(answer, dict):
            raise ProtocolViolation("an inspection reported a value that is not a JSON object")
        if answer.get("kind") == PHASE:
            phase: StagePhase = revive(StagePhase, answer)
            self._send(InspectionPhase(self._job_id, phase.phase, phase.seconds))
            return
        if "step" in answer:
            self._send(InspectionStep(self._job_id, revive(ProfileStep, answer["step"])))
            return
        if "ok" in answer:
            found: InspectionAnswer = revive(InspectionAnswer, answer["ok"])
            result = InspectionResult(self._job_id, found.model, measurements=found.measurements)
        else:
            problems: tuple[str, ...] = revive(tuple[str, ...], answer.get("problems", ()))
            result = InspectionResult(self._job_id, None, str(answer.get("error", JobFailed.__name__)), problems)
        self._answered = True
        self._send(result)

    def refused(self, error: HetpipeError) -> None:
        """Report that it is not started."""
        self._answered = True
        self._send(InspectionResult(self._job_id, None, type(error).__name__, (str(error),)))

    def ended(self, exit_code: int, last_words: str) -> None:
        """Handle the exit of its process, which is a failure if it has not answered."""
        if self._answered:
            return
        self._answered = True
        words = f"; its last output: {last_words}" if last_words else ""
        problem = f"the inspection of the model {exit_sentence(exit_code)} before it reported{words}"
        self._send(InspectionResult(self._job_id, None, JobFailed.__name__, (problem,)))


class LinkEnd:
    """One end of a link measurement: the address on which it listens, then its result."""

    def __init__(self, job_id: JobId, number: int, send: Callable[[AgentReport], None]) -> None:
        self._job_id = job_id
        self._number = number
        self._send = send
        self._answered = False

    def on_line(self, line: bytes) -> None:
        """Handle a line of the process.

        Raises:
            ProtocolViolation: it is not a line of a measuring process.
        """
        message: dict[str, Any] = from_json(dict[str, Any], line)
        if self._answered or message.get("kind") == PHASE:
            return
        if "address" in message:
            self._send(LinkAwaited(self._job_id, self._number, str(message["address"])))
        elif "ok" in message:
            found: LinkAnswer = revive(LinkAnswer, message["ok"])
            links = () if found.link is None else (found.link,)
            self._end(LinkResult(self._job_id, self._number, MeasuredLinks(links=links, copies=found.copies)))
        else:
            problems: tuple[str, ...] = revive(tuple[str, ...], message.get("problems", ()))
            self.failed("; ".join(problems) or "the measuring process gave no reason")

    def failed(self, problem: str) -> None:
        """Report a failed measurement."""
        self._end(LinkResult(self._job_id, self._number, problem=problem))

    def ended(self, exit_code: int, last_words: str) -> None:
        """Handle the exit of its process, which is a failure if it has not answered."""
        words = f"; its last output: {last_words}" if last_words else ""
        if not self._answered:
            self.failed(f"the measuring process {exit_sentence(exit_code)} before it reported{words}")

    def _end(self, result: LinkResult) -> None:
        self._answered = True
        self._send(result)
