"""`python -m hetpipe.agent.stage_process`: one stage of one virtual worker, started by an agent.

Order of its life: import the user's code, meet the neighbours, push or await the first weights, run, say how it ended.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path

import torch

from hetpipe.agent.child_main import ReportPipe, run_child
from hetpipe.agent.stage_assembly import Wiring, assemble, identity_of, load_user_code, requester_of
from hetpipe.clock import SYSTEM_CLOCK
from hetpipe.errors import DeadlineExceeded, HetpipeError, Unavailable
from hetpipe.link.gloo import connect_gloo, connect_rendezvous, serve_rendezvous
from hetpipe.link.policy import Link, LinkLimits
from hetpipe.observe.history import History
from hetpipe.observe.log import configure_logging, get_logger
from hetpipe.observe.timeline import Timeline
from hetpipe.pipeline.setup import StageIdentity
from hetpipe.ps.emulated import over
from hetpipe.ps.transport import ShardTransport
from hetpipe.rpc.shard_client import GrpcClock, GrpcShard
from hetpipe.spec import wire
from hetpipe.spec.ids import ShardIndex
from hetpipe.spec.run import StageConfig, StageDone, StageFailed, StageReady, StageReport
from hetpipe.weights.allocator import keep_freed_memory

_log = get_logger(__name__)

#: How long the stages of a virtual worker may take to find each other.
MEETING_SECONDS = 120.0
_POLL_SECONDS = 0.05


def main(pipe: ReportPipe, first_line: bytes) -> int:
    """Run the stage of the first line; the exit status."""
    torch.set_num_threads(1)
    keep_freed_memory()
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
    upstream, downstream = _meet(config, identity, clock_shard)
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
    wiring = Wiring(
        shards=shards,
        clock_shard=clock_shard,
        upstream=upstream,
        downstream=downstream,
        history=history,
        report=report,
        timeline=timeline,
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
        history.close()
        for link in (upstream, downstream):
            if link is not None:
                link.close()


def _meet(config: StageConfig, identity: StageIdentity, clock_shard: GrpcClock) -> tuple[Link | None, Link | None]:
    """Join, find the neighbours through the clock shard, and connect to them."""
    requester = requester_of(config)
    if identity.num_stages == 1:
        clock_shard.join(requester, "")
        return None, None
    if identity.is_first:
        store, address = serve_rendezvous(config.host)
        clock_shard.join(requester, address)
    else:
        store = connect_rendezvous(_meeting_point(config, identity, clock_shard), deadline_seconds=MEETING_SECONDS)
    n = int(config.job["sync"]["minibatches_per_wave"])
    emulation = config.emulation
    return connect_gloo(
        store,
        vw=config.vw,
        stage=config.stage,
        num_stages=identity.num_stages,
        host=config.host,
        deadline_seconds=MEETING_SECONDS,
        limits=LinkLimits(incoming_frames=n + 2, outgoing_frames=4),
        paces=(None, None) if emulation is None else (emulation.upstream, emulation.downstream),
    )


def _meeting_point(config: StageConfig, identity: StageIdentity, clock_shard: GrpcClock) -> str:
    """Where the first stage waits; asks until it is there."""
    started = SYSTEM_CLOCK.monotonic()
    while True:
        address, joined = clock_shard.join(requester_of(config), "")
        if address:
            return address
        elapsed = SYSTEM_CLOCK.monotonic() - started
        if elapsed > MEETING_SECONDS:
            raise DeadlineExceeded(f"{identity} waited {elapsed:.0f} s for stage 0 to join; joined: {list(joined)}")
        SYSTEM_CLOCK.sleep(_POLL_SECONDS)


if __name__ == "__main__":
    run_child(main)
