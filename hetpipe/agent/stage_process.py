"""`python -m hetpipe.agent.stage_process`: one stage of one virtual worker, started by an agent.

Order of its life: import the user's code, meet the neighbours, push or await the first weights, run, say how it ended.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hetpipe.agent.child_main import ReportPipe, run_child
from hetpipe.agent.stage_assembly import (
    STALL_SECONDS,
    Wiring,
    assemble,
    identity_of,
    load_user_code,
    requester_of,
)
from hetpipe.clock import SYSTEM_CLOCK
from hetpipe.errors import DeadlineExceeded, HetpipeError, Unavailable
from hetpipe.link.gloo import connect_gloo, connect_rendezvous, serve_rendezvous
from hetpipe.link.policy import Link, LinkLimits
from hetpipe.link.replicas import DistributedReplicas, connect_replicas
from hetpipe.observe.history import History
from hetpipe.observe.log import configure_logging, get_logger
from hetpipe.observe.metrics import Metrics, NullMetrics, metrics_path
from hetpipe.observe.timeline import Timeline
from hetpipe.pipeline.setup import StageIdentity
from hetpipe.ps.emulated import over
from hetpipe.ps.transport import ShardTransport
from hetpipe.rpc.shard_client import GrpcClock, GrpcShard
from hetpipe.spec import wire
from hetpipe.spec.ids import ShardIndex
from hetpipe.spec.requests import Meeting
from hetpipe.spec.run import StageConfig, StageDone, StageFailed, StageReady, StageReport
from hetpipe.weights.allocator import settle_memory

if TYPE_CHECKING:  # torch.distributed has the name, but only its C++ module has the type
    from torch._C._distributed_c10d import TCPStore

_log = get_logger(__name__)

#: How long the stages of a virtual worker may take to find each other.
MEETING_SECONDS = 120.0
_POLL_SECONDS = 0.05


def main(pipe: ReportPipe, first_line: bytes) -> int:
    """Run the stage of the first line; the exit status."""
    torch.set_num_threads(1)
    settle_memory()
    config: StageConfig = wire.from_json(StageConfig, first_line)
    identity = identity_of(config)
    name = f"vw-{config.vw}-stage-{config.stage}"
    run_dir = Path(config.run_dir)
    configure_logging(run_dir / "logs" / f"{name}.log", role="stage", vw=config.vw, stage=config.stage)

    def report(message: StageReport) -> None:
        pipe.write(wire.to_json(StageReport, message))

    try:
        done = _run(config, identity, name, report)
    except Exception as error:  # noqa: BLE001 - the outermost frame: whatever it is, one sentence and a status
        _log.exception("the stage failed")
        report(_failure(identity, error))
        return 1
    report(done)
    return 0


def _failure(identity: StageIdentity, error: Exception) -> StageFailed:
    if isinstance(error, HetpipeError):
        return StageFailed(type(error).__name__, str(error), secondary=isinstance(error, Unavailable))
    return StageFailed(
        type(error).__name__, f"{identity} failed: {type(error).__name__}: {error} (the log has the whole story)"
    )


def _run(config: StageConfig, identity: StageIdentity, name: str, report: Callable[[StageReport], None]) -> StageDone:
    run_dir = Path(config.run_dir)
    code = load_user_code(config)
    shards: list[ShardTransport] = [GrpcShard(a, ShardIndex(i)) for i, a in enumerate(config.shard_addresses)]
    emulation = config.emulation
    if emulation is not None and emulation.shards:
        shards = [over(shard, time) for shard, time in zip(shards, emulation.shards, strict=True)]
    clock_shard = GrpcClock(config.shard_addresses[0], job_id=config.plan.job_id, term=config.plan.term)
    upstream, downstream, replicas = _meet(config, identity, clock_shard)
    timeline = Timeline(
        run_dir / "trace" / f"{name}.jsonl",
        process_index=config.vw,
        process_name=f"virtual worker {config.vw}",
        thread_index=config.stage,
        thread_name=f"stage {config.stage}",
    )
    history = History(
        run_dir / "history" / f"{name}.jsonl", host=config.host, pid=os.getpid(), role="stage", term=config.plan.term
    )
    metrics = Metrics(metrics_path(run_dir, config.vw)) if identity.is_last else NullMetrics()
    wiring = Wiring(
        shards=shards,
        clock_shard=clock_shard,
        upstream=upstream,
        downstream=downstream,
        replicas=replicas,
        history=history,
        report=report,
        timeline=timeline,
        metrics=metrics,
    )
    runner, client, start = assemble(config, code, wiring)
    report(StageReady(os.getpid()))
    gc.freeze()  # what was imported stays: the collector need not look at it again and again
    try:
        return runner.run(start)
    finally:
        client.close()
        clock_shard.close()
        timeline.close()
        metrics.close()
        history.close()
        for link in (upstream, downstream):
            if link is not None:
                link.close()
        if replicas is not None:
            replicas.close()


def _meet(
    config: StageConfig, identity: StageIdentity, clock_shard: GrpcClock
) -> tuple[Link | None, Link | None, DistributedReplicas | None]:
    """Join, find the neighbours and replicas through the clock shard, and connect to them."""
    requester = requester_of(config)
    has_replicas = config.job["sync"]["kind"] == "allreduce" and identity.num_workers > 1
    store: TCPStore | None = None
    if identity.is_first and (identity.num_stages > 1 or has_replicas):
        store, address = serve_rendezvous(config.host)
        clock_shard.join(requester, address)
    elif identity.num_stages > 1:
        address = _meeting_point(config, identity, clock_shard, lambda meeting: meeting.address)
        store = connect_rendezvous(address, deadline_seconds=MEETING_SECONDS)
    else:
        clock_shard.join(requester, "")
    links: tuple[Link | None, Link | None] = (None, None)
    if store is not None and identity.num_stages > 1:
        links = _connect_neighbours(config, identity, store)
    return *links, _connect_replicas(config, identity, clock_shard, store) if has_replicas else None


def _connect_neighbours(
    config: StageConfig, identity: StageIdentity, store: TCPStore
) -> tuple[Link | None, Link | None]:
    n = int(config.job["sync"]["minibatches_per_wave"])
    emulation = config.emulation
    return connect_gloo(
        store,
        vw=config.vw,
        stage=config.stage,
        num_stages=identity.num_stages,
        host=config.host,
        deadline_seconds=MEETING_SECONDS,
        # As many minibatches as may be in flight, each with a norm beside it, and a barrier.
        limits=LinkLimits(incoming_frames=2 * n + 2, outgoing_frames=4),
        paces=(None, None) if emulation is None else (emulation.upstream, emulation.downstream),
    )


def _connect_replicas(
    config: StageConfig, identity: StageIdentity, clock_shard: GrpcClock, own: TCPStore | None
) -> DistributedReplicas:
    """Meet the same stage of the other virtual workers where stage 0 of virtual worker 0 serves."""
    if config.vw == 0 and own is not None:
        store = own
    else:
        address = _meeting_point(config, identity, clock_shard, lambda meeting: meeting.first_address)
        store = connect_rendezvous(address, deadline_seconds=MEETING_SECONDS)
    return connect_replicas(
        store,
        stage=config.stage,
        vw=config.vw,
        num_workers=identity.num_workers,
        host=config.host,
        device=torch.device(config.device.torch_device),
        stall_seconds=STALL_SECONDS,
    )


def _meeting_point(
    config: StageConfig, identity: StageIdentity, clock_shard: GrpcClock, address_in: Callable[[Meeting], str]
) -> str:
    """Where a first stage waits; asks until it is there."""
    started = SYSTEM_CLOCK.monotonic()
    while True:
        meeting = clock_shard.join(requester_of(config), "")
        address = address_in(meeting)
        if address:
            return address
        elapsed = SYSTEM_CLOCK.monotonic() - started
        if elapsed > MEETING_SECONDS:
            raise DeadlineExceeded(
                f"{identity} waited {elapsed:.0f} s for stage 0 to join; joined: {list(meeting.joined)}"
            )
        SYSTEM_CLOCK.sleep(_POLL_SECONDS)


if __name__ == "__main__":
    run_child(main)
