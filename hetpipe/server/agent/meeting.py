"""Connection setup: a stage, its neighbours and its replicas find and connect to each other before computing.

Every stage first listens and registers its addresses with the clock shard. Once its neighbours have done so, it
connects to the previous stage, accepts the next one, and joins its replicas in the other virtual workers, in this
order, which excludes cycles of waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from hetpipe.clock import SYSTEM_CLOCK
from hetpipe.clock import Clock as TimeSource
from hetpipe.decide.elastic.script import most_minibatches_per_wave
from hetpipe.errors import DeadlineExceeded
from hetpipe.job.file import Job
from hetpipe.link.catalogue import LinkNetwork, call, listen
from hetpipe.link.choice import LinkChoice, check_replicas, choose_link
from hetpipe.link.cut import Cut, CutListener
from hetpipe.link.gloo import connect_rendezvous, serve_rendezvous
from hetpipe.link.policy import Link, LinkLimits
from hetpipe.link.replicas import DistributedReplicas, ReplicaGroups, connect_replicas
from hetpipe.observe.log import get_logger
from hetpipe.server.agent.stage_assembly import STALL_SECONDS, identity_of, requester_of
from hetpipe.values.cluster import node_of
from hetpipe.values.ids import Clock, StageIndex, VirtualWorkerIndex
from hetpipe.values.requests import Meeting
from hetpipe.values.run import LinkTime, StageConfig
from hetpipe.values.sync import SYNC_KINDS
from hetpipe.wire.call import Calls
from hetpipe.wire.calls import JOIN, JoinRequest
from hetpipe.wire.tls import Tls

if TYPE_CHECKING:  # torch.distributed has the name, but only its C++ module has the type
    from torch._C._distributed_c10d import TCPStore

_log = get_logger(__name__)

#: Timeout for connecting stages that are present.
MEETING_SECONDS = 120.0
_POLL_SECONDS = 0.05

#: Timeout for the presence of a neighbour. The coordinator evicts a silent one much sooner, with its whole virtual
#:#: worker; one that reports its phase is waited for.
JOIN_SECONDS = 24 * 3600.0

_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Neighbours:
    """The peers of a stage except shards."""

    upstream: Link | None
    downstream: Link | None
    replicas: ReplicaGroups | None
    link: LinkChoice | None
    """The kind of the link downstream, after any refusal of memory, and the reason; None on the last stage."""

    def close(self) -> None:
        """Close the connections."""
        for each in (self.upstream, self.downstream, self.replicas):
            if each is not None:
                each.close()


def meet(
    job: Job,
    config: StageConfig,
    clock_shard: Calls,
    *,
    tls: Tls | None = None,
    port: int = 0,
    clock: TimeSource = SYSTEM_CLOCK,
) -> Neighbours:
    """Join, and connect to all peers.

    Args:
        job: defines links and replicas.
        config: of the stage.
        clock_shard: the directory of stages' addresses.
        tls: the stage's identity; None: plaintext.
        port: for the next stage; 0: any free port.
        clock: measures the waits.

    Raises:
        UserError: the job's `link` excludes every possible link.
        HetpipeError: a peer did not appear, or refused.
    """
    return _StageMeeting(job, config, clock_shard, tls, port, clock).meet()


class _StageMeeting:
    def __init__(
        self, job: Job, config: StageConfig, clock_shard: Calls, tls: Tls | None, port: int, clock: TimeSource
    ) -> None:
        self._config = config
        self._identity = identity_of(config)
        self._own = requester_of(config)
        self._clock_shard = clock_shard
        self._tls = tls
        self._port = port
        self._clock = clock
        self._requested = job.link
        self._minibatches_per_wave = most_minibatches_per_wave(job, config.plan, config.vw)
        self._workers = [worker.index for worker in config.plan.virtual_workers]
        self._has_replicas = SYNC_KINDS[job.sync.kind].averages_gradients and len(self._workers) > 1
        #: Whether members change, so that each segment has a group of its own.
        self._has_groups = bool(job.elastic.members) or job.freeze.compress
        self._replicas_host = self._host_for_replicas() if self._has_replicas else ""

    def meet(self) -> Neighbours:
        stage = self._identity.stage
        with ExitStack() as undo:
            chosen = None if self._identity.is_last else self._choose(StageIndex(stage + 1))
            listener = None if chosen is None else self._listen(chosen)
            if listener is not None:
                undo.callback(listener.close)
            store, replicas_address = self._await_replicas()
            meeting = self._join("" if listener is None else listener.address, replicas_address)
            upstream = None if self._identity.is_first else self._call(meeting.link)
            if upstream is not None:
                undo.callback(upstream.close)
            downstream = None if listener is None else listener.accept(deadline_seconds=MEETING_SECONDS)
            if downstream is not None:
                undo.callback(downstream.close)
            if listener is not None and chosen is not None and listener.refusal:
                chosen = chosen.refused(listener.refusal)
            replicas = self._meet_replicas(store) if self._has_replicas else None
            undo.pop_all()
        return Neighbours(upstream, downstream, replicas, chosen)

    # -- links -------------------------------------------------------------------------------------------------------

    def _choose(self, neighbour: StageIndex) -> LinkChoice:
        stages = self._config.plan.virtual_workers[self._identity.vw].stages
        nodes = {node_of(stages[index].device) for index in (self._identity.stage, neighbour)}
        return choose_link(self._requested, tls=self._tls is not None, same_node=len(nodes) == 1)

    def _listen(self, chosen: LinkChoice) -> CutListener:
        neighbour = StageIndex(self._identity.stage + 1)
        _log.info("link_chosen", neighbour=neighbour, kind=chosen.kind, reason=chosen.reason)
        emulation = self._config.emulation
        cut = self._cut(neighbour, None if emulation is None else emulation.downstream)
        return listen(chosen.kind, cut, self._footing(chosen))

    def _call(self, address: str) -> Link:
        neighbour = StageIndex(self._identity.stage - 1)
        emulation = self._config.emulation
        cut = self._cut(neighbour, None if emulation is None else emulation.upstream)
        chosen = self._choose(neighbour)
        return call(
            chosen.kind,
            cut,
            address,
            self._footing(chosen),
            deadline_seconds=MEETING_SECONDS,
            may_fall_back=chosen.may_fall_back,
        )

    def _cut(self, neighbour: StageIndex, pace: LinkTime | None) -> Cut:
        n = self._minibatches_per_wave
        # As many minibatches as may be in flight, each with a norm, and a barrier.
        limits = LinkLimits(incoming_frames=2 * n + 2, outgoing_frames=4)
        return Cut(own=self._own, neighbour=replace(self._own, stage=neighbour), limits=limits, pace=pace)

    def _footing(self, chosen: LinkChoice) -> LinkNetwork:
        return LinkNetwork(host=_LOOPBACK if chosen.loopback else self._config.host, port=self._port, tls=self._tls)

    # -- replicas ----------------------------------------------------------------------------------------------------

    def _host_for_replicas(self) -> str:
        """The address of the replicas' rendezvous.

        Raises:
            UserError: gradients would leave the node unencrypted.
        """
        workers = self._config.plan.virtual_workers
        stage = self._identity.stage
        same_node = len({node_of(each.stages[stage].device) for each in workers if stage < len(each.stages)}) == 1
        tls = self._tls is not None
        check_replicas(self._requested, tls=tls, same_node=same_node)
        return _LOOPBACK if tls and same_node else self._config.host

    def _await_replicas(self) -> tuple[TCPStore | None, str]:
        """Serve the rendezvous of this stage's replicas, if it may be the first of them; returns its address."""
        if not self._has_replicas or (self._identity.vw != 0 and not self._has_groups):
            return None, ""
        return serve_rendezvous(self._replicas_host)

    def _meet_replicas(self, served: TCPStore | None) -> ReplicaGroups:
        """Join the replicas; where members change, each segment's when it begins."""

        def connect(start: Clock, members: Sequence[VirtualWorkerIndex]) -> DistributedReplicas:
            is_first = members[0] == self._identity.vw
            assert served is not None or not is_first, "who may be the first serves the rendezvous"
            return connect_replicas(
                served if served is not None and is_first else self._rendezvous(),
                stage=self._identity.stage,
                vw=self._identity.vw,
                members=members,
                host=self._replicas_host,
                device=torch.device(self._config.device.torch_device),
                stall_seconds=STALL_SECONDS,
                start=start,
                pace=None if self._config.emulation is None else self._config.emulation.replicas,
            )

        groups = ReplicaGroups(connect)
        if not self._has_groups:
            groups.regroup(Clock(0), self._workers)
        return groups

    def _rendezvous(self) -> TCPStore:
        """The store of the first replica of the current segment."""
        meeting = self._clock_shard.invoke(JOIN, JoinRequest(self._own, only_meets=True))
        return connect_rendezvous(meeting.replicas, deadline_seconds=MEETING_SECONDS)

    # -- the clock shard ---------------------------------------------------------------------------------------------

    def _join(self, link_address: str, replicas_address: str) -> Meeting:
        """Register this stage's addresses; poll until those of its peers are known, and the peers are present.

        Only present peers are waited for in `accept`: before, the clock shard can reply that this incarnation is over.
        """
        started = self._clock.monotonic()
        request = JoinRequest(self._own, link_address, replicas_address, only_meets=True)
        while True:
            meeting = self._clock_shard.invoke(JOIN, request)
            missing = self._missing(meeting)
            if not missing:
                return meeting
            elapsed = self._clock.monotonic() - started
            if elapsed > JOIN_SECONDS:
                raise DeadlineExceeded(
                    f"{self._identity} waited {elapsed:.0f} s for {missing} to join; of its virtual worker, stages "
                    f"{list(meeting.joined)} have joined"
                )
            self._clock.sleep(_POLL_SECONDS)

    def _missing(self, meeting: Meeting) -> str:
        identity = self._identity
        if not identity.is_first and not meeting.link:
            return f"stage {identity.stage - 1}"
        if not identity.is_last and identity.stage + 1 not in meeting.joined:
            return f"stage {identity.stage + 1}"
        if self._has_replicas and not self._has_groups and not meeting.replicas:
            return f"stage {identity.stage} of virtual worker 0"
        return ""
