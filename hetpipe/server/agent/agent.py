"""The agent: registers its node's devices, executes the coordinator's commands, and reports their results.

Four threads: `run` itself, which starts the children and so must be the process's main thread (`Child`); the heartbeat;
one that reads commands; one that sends reports. They share nothing but queues. The decision logs of its jobs have
threads of their own (`log_relay`).
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from hetpipe.clock import SYSTEM_CLOCK, Clock
from hetpipe.errors import Busy, HetpipeError, MemberReplaced, PeerUnreachable, Unavailable, UnknownMember
from hetpipe.forking.fork_server import ForkServer
from hetpipe.observe.log import get_logger
from hetpipe.profiler.link_cache import NodeLinks
from hetpipe.roots import Roots
from hetpipe.server.agent.children import GRACE_SECONDS, ChildCounts, Children, Programs
from hetpipe.server.agent.departure import Departure
from hetpipe.server.agent.log_relay import ClockShardAt, LogRelays
from hetpipe.server.agent.outbox import Outbox, ReportBatch
from hetpipe.server.agent.sent_code import SentCode
from hetpipe.server.member_session import Hooks, MemberSession
from hetpipe.values.commands import (
    AgentReport,
    InspectCommand,
    KeepLinksCommand,
    LinkResult,
    MeasureLinkCommand,
    NumberedCommand,
    StageKey,
    StartStageCommand,
    StopJobCommand,
    StopVirtualWorkerCommand,
)
from hetpipe.values.events import CodeArchive
from hetpipe.values.ids import AgentId, JobId, ShardIndex
from hetpipe.values.link_measurement import MeasuredLinks
from hetpipe.values.members import Lease, MemberId, MemberInfo, MemberRole, Registration
from hetpipe.values.run import AgentDevice
from hetpipe.wire.call import Calls
from hetpipe.wire.calls import (
    CERTIFY_STAGE,
    DEPART,
    FETCH_CODE,
    REPORT,
    WATCH_COMMANDS,
    CertifyStageRequest,
    DepartRequest,
    FetchCodeRequest,
    ReportRequest,
    WatchCommandsRequest,
)
from hetpipe.wire.coordinator_client import CoordinatorClient
from hetpipe.wire.shard_client import connect_shard
from hetpipe.wire.tls import Tls

if TYPE_CHECKING:
    from hetpipe.server.agent.stage_certificates import StageCertificates

_log = get_logger(__name__)

#: Leases without an answer after which the coordinator counts as lost.
LOST_AFTER_LEASES = 2.0

#: Longest pause of the main loop, the delay of detecting the loss of the coordinator.
_LOOP_SECONDS = 0.2

#: Pause after a failed call.
_RETRY_SECONDS = 0.3

#: Timeout for the last reports to be delivered.
_FLUSH_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    """The configuration of an agent."""

    node: str
    """Name of the node, unique in the cluster; the agent's id."""
    host: str
    """Address under which other nodes reach this one."""
    pid: int
    coordinator: str
    """`HOST:PORT`."""
    devices: tuple[AgentDevice, ...]
    tls: Tls | None = None
    """Credentials of this agent; None: plaintext."""
    environment: Mapping[str, str]
    """Environment of the children, before the agent's additions."""
    drain_seconds: float = 0.0
    """Grace period in which its stages leave the run on termination; 0: they are ended immediately."""
    exit_with_coordinator: bool = False
    """End with an error when the coordinator is lost, instead of waiting for it."""
    start_seconds: float = 30.0
    """Timeout for the first contact with the coordinator."""
    programs: Programs = field(default_factory=Programs)
    fork_server: ForkServer = field(default_factory=lambda: ForkServer(None))
    """Launches the children."""
    roots: Roots = field(default_factory=Roots)
    """Folders below which jobs may have their code and their runs."""
    accepts_code: bool = False
    """Run code that was sent along with jobs."""
    first_metrics_port: int | None = None
    """Metrics port of the stage on device 0; stages on later devices use the following ports. None: no metrics."""
    first_link_port: int | None = None
    """Link port of the stage on device 0, likewise; None: any free port."""
    machine: str = ""
    """The machine's host name, the key of cached link measurements. Empty: none are cached."""


def _links_of(config: AgentConfig) -> NodeLinks | None:
    """The cached measurements of the node's links; None: there is no cache."""
    if not config.machine:
        return None
    types = [device.type for device in config.devices]
    return NodeLinks(config.environment, machine=config.machine, node=config.node, device_types=types)


@dataclass(frozen=True, slots=True)
class _Order:
    """A command and the registration under which it was received; None: from the heartbeat."""

    registration: Registration | None
    numbered: NumberedCommand


class Agent:
    """One agent. `run` it once; `stop` may be called from any thread and from a signal handler."""

    def __init__(self, config: AgentConfig, *, clock: Clock = SYSTEM_CLOCK) -> None:
        """Prepare everything; nothing is started or connected.

        Raises:
            UserError: the coordinator's address is malformed.
        """
        self._config = config
        self._clock = clock
        self._id = AgentId(config.node)
        self._client = CoordinatorClient(config.coordinator, tls=config.tls, clock=clock)
        self._outbox = Outbox(clock)
        self._links = _links_of(config)
        self._certificates = None if config.tls is None else self._prepare_certificates(config.tls)
        self._sent_code = SentCode(self._fetch_code) if config.accepts_code else None
        self._children = Children(
            send=self._enqueue,
            environment=config.environment,
            clock=clock,
            programs=replace(config.programs, starter=config.fork_server.start, sent_code=self._sent_code),
            roots=config.roots,
            first_metrics_port=config.first_metrics_port,
            first_link_port=config.first_link_port,
            certificates=self._certificates,
            relays=LogRelays(self._connect_clock_shard),
        )
        self._membership = MemberSession(
            self._client,
            MemberInfo(MemberRole.AGENT, MemberId(config.node), config.host, config.pid, devices=config.devices),
            hooks=Hooks(
                jobs=self._children.jobs,
                last_command=self._last_command,
                newest_info=lambda info: replace(info, stages=self._children.stages(), links=self._known_links()),
                on_ended_jobs=self._jobs_ended,
                on_registered=self._registered,
                on_replaced=self._was_replaced,
            ),
            clock=clock,
        )
        #: Commands for the main loop; None wakes it.
        self._orders: queue.SimpleQueue[_Order | None] = queue.SimpleQueue()
        #: Set on termination; its threads end.
        self._asked_to_end = threading.Event()
        self._stopping = threading.Event()
        #: Number of the last command executed, and its registration.
        self._done = (Registration(""), 0)
        self._coordinator_lost = False
        #: The reason why this agent was replaced or rejected; None otherwise.
        self._replaced: MemberReplaced | None = None

    @property
    def registered(self) -> Lease:
        """The terms of the newest registration."""
        return self._membership.lease

    @property
    def devices(self) -> tuple[AgentDevice, ...]:
        """The devices on offer."""
        return self._config.devices

    @property
    def children(self) -> ChildCounts:
        """The numbers of running and ended children."""
        return self._children.counts

    @property
    def silent_seconds(self) -> float:
        """Time since the coordinator last answered."""
        return self._membership.silent_seconds

    def stop(self) -> None:
        """Make `run` drain and end its children, leave and return, or make `start` fail."""
        self._asked_to_end.set()
        self._membership.cancel_start()
        self._orders.put(None)

    def start(self) -> None:
        """Register and start the threads. Once, before `run`.

        Raises:
            HetpipeError: the coordinator did not accept the registration.
        """
        try:
            self._membership.start(wait_seconds=self._config.start_seconds)
        except BaseException:
            self._release()
            raise
        for target, name in ((self._watch_commands, "commands"), (self._send_reports, "reports")):
            threading.Thread(target=target, name=name, daemon=True).start()

    def run(self) -> None:
        """Work until `stop`; then let the stages leave the run, end all children, and leave the cluster.

        Raises:
            PeerUnreachable: the coordinator is lost, and the agent is configured to end with it.
            MemberReplaced: another process has registered under this node's name.
        """
        grace_seconds = GRACE_SECONDS
        try:
            while not self._asked_to_end.is_set():
                self._look_after_coordinator()
                self._config.fork_server.look_after()
                if self._certificates is not None:
                    self._certificates.renew()
                self._obey_next()
            if self._config.drain_seconds > 0.0:
                self._drain()
                grace_seconds = 0.0
        finally:
            self._stopping.set()
            # First the outbox, so that the end of the children is not reported as their failure.
            self._outbox.close()
            self._children.stop_all(grace_seconds=grace_seconds)
            if self._coordinator_lost:
                self._membership.abandon()
            else:
                self._membership.close()
            self._release()

    def _release(self) -> None:
        """Release the resources acquired before any child was started."""
        if self._certificates is not None:
            self._certificates.close()
        if self._sent_code is not None:
            self._sent_code.close()
        self._config.fork_server.close()
        self._client.close()

    # -- the main loop ---------------------------------------------------------------------------------------------

    def _drain(self) -> None:
        """Let the stages leave within the grace period, while commands are still executed."""
        departure = Departure(
            request=self._depart,
            stages=self._children.stages,
            clock=self._clock,
            seconds=self._config.drain_seconds,
        )
        while not self._coordinator_lost and self._replaced is None and not departure.is_over():
            self._obey_next()
        if departure.is_accepted:
            self._outbox.wait_empty(timeout_seconds=_FLUSH_SECONDS)

    def _depart(self) -> None:
        try:
            self._client.invoke(DEPART, DepartRequest(self._id, self._membership.lease.registration))
        except UnknownMember:
            self._membership.send_soon()
            raise

    def _obey_next(self) -> None:
        try:
            order = self._orders.get(timeout=_LOOP_SECONDS)
        except queue.Empty:
            return
        if order is None:
            return
        if order.registration is None:
            self._obey(order.numbered)
        elif not self._membership.is_led:
            _log.error(
                "command_refused", sequence=order.numbered.sequence, reason="its coordinator is no longer the leader"
            )
        elif order.registration == self.registered.registration and order.numbered.sequence > self._last_command():
            self._obey(order.numbered)
            self._done = (order.registration, order.numbered.sequence)

    def _last_command(self) -> int:
        """Number of the last command executed under the newest registration."""
        registration, sequence = self._done
        return sequence if registration == self.registered.registration else 0

    def _obey(self, numbered: NumberedCommand) -> None:
        match numbered.command:
            case InspectCommand() as inspect:
                self._children.inspect(inspect)
            case StartStageCommand() as start if self._asked_to_end.is_set():
                refusal = Unavailable(f"agent {self._id} is terminating; it starts no more stages")
                self._children.refuse_stage(start, refusal)
            case StartStageCommand() as start:
                self._children.start_stage(start)
            case StopJobCommand(job_id=job_id):
                self._children.stop_job(job_id)
            case StopVirtualWorkerCommand() as stop:
                self._children.kill_worker(stop)
            case MeasureLinkCommand() as measure:
                self._children.measure_link(measure, self._id, host=self._config.host)
            case KeepLinksCommand(measured=measured):
                self._keep_links(measured)

    def _prepare_certificates(self, tls: Tls) -> StageCertificates:
        # Imported only with TLS, as it is slow.
        from hetpipe.server.agent.stage_certificates import StageCertificates

        return StageCertificates(tls, self._certify, clock=self._clock)

    def _certify(self, stage: StageKey, request_pem: bytes) -> bytes:
        registration = self._membership.lease.registration
        request = CertifyStageRequest(self._id, registration, stage, request_pem)
        return self._client.invoke(CERTIFY_STAGE, request).pem

    def _connect_clock_shard(self, at: ClockShardAt) -> Calls:
        return connect_shard(at.address, ShardIndex(0), member_id=at.member_id, tls=self._config.tls, clock=self._clock)

    def _fetch_code(self, digest: str) -> CodeArchive:
        return self._client.invoke(FETCH_CODE, FetchCodeRequest(self._id, self._membership.lease.registration, digest))

    def _look_after_coordinator(self) -> None:
        """Log losses and returns of the coordinator. The children continue, unless the agent is configured to end."""
        if self._replaced is not None:
            raise self._replaced
        silent = self._membership.silent_seconds
        was_lost, self._coordinator_lost = (
            self._coordinator_lost,
            silent > LOST_AFTER_LEASES * self._membership.lease.lease_seconds,
        )
        if was_lost == self._coordinator_lost:
            return
        if was_lost:
            _log.warning("coordinator_back", coordinator=self._config.coordinator)
            return
        who = f"the coordinator at {self._config.coordinator} has not answered agent {self._config.node} for"
        if self._config.exit_with_coordinator:
            raise PeerUnreachable(f"{who} {silent:.1f} s; all its stage processes were ended")
        _log.warning("coordinator_lost", sentence=f"{who} {silent:.1f} s; its stage processes continue without it")

    def _known_links(self) -> MeasuredLinks:
        """The measurements of this node's links so far."""
        return MeasuredLinks() if self._links is None else self._links.find(now=self._clock.wall())

    def _keep_links(self, measured: MeasuredLinks) -> None:
        if self._links is not None:
            self._links.keep(measured, now=self._clock.wall())

    def _enqueue(self, report: AgentReport) -> None:
        """Report on behalf of the children."""
        if isinstance(report, LinkResult) and report.measured:
            self._keep_links(report.measured)
        self._outbox.put(report)

    # -- other threads ---------------------------------------------------------------------------------------------

    def _registered(self, lease: Lease) -> None:
        self._outbox.restart(lease.registration)
        self._children.resend()

    def _was_replaced(self, error: MemberReplaced) -> None:
        self._replaced = error
        self._orders.put(None)

    def _jobs_ended(self, jobs: Sequence[JobId]) -> None:
        for job_id in jobs:
            self._orders.put(_Order(None, NumberedCommand(0, StopJobCommand(job_id))))

    def _watch_commands(self) -> None:
        registration, received = self._membership.lease.registration, 0
        while not self._stopping.is_set():
            current = self._membership.lease.registration
            if current != registration:
                registration, received = current, 0
            try:
                request = WatchCommandsRequest(self._id, registration, received)
                with closing(self._client.stream(WATCH_COMMANDS, request)) as commands:
                    for numbered in commands:
                        received = numbered.sequence
                        self._orders.put(_Order(registration, numbered))
            except HetpipeError as error:
                self._pause_after(error)

    def _send_reports(self) -> None:
        while not self._stopping.is_set():
            batch = self._outbox.take(timeout_seconds=_LOOP_SECONDS)
            if batch is not None:
                self._send(batch)

    def _send(self, batch: ReportBatch) -> None:
        try:
            self._client.invoke(REPORT, ReportRequest(self._id, batch.registration, batch.number, tuple(batch.reports)))
        except (Unavailable, Busy, UnknownMember) as error:
            self._pause_after(error)
        except HetpipeError:
            # A retry would be rejected again.
            _log.exception("news_refused", batch=batch.number)
            self._outbox.confirm(batch)
        else:
            self._outbox.confirm(batch)

    def _pause_after(self, error: HetpipeError) -> None:
        if isinstance(error, UnknownMember):
            self._membership.send_soon()
        if not self._stopping.is_set():
            _log.info("call_failed", error=type(error).__name__, reason=str(error))
            self._stopping.wait(_RETRY_SECONDS)
