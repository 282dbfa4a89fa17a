"""`python -m hetpipe.server.agent.stage_process`: one stage of one virtual worker, started by an agent.

Sequence: import the user's code, connect to the neighbours, push or await the initial weights, run, report the end.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch

from hetpipe import failpoints
from hetpipe.clock import SYSTEM_CLOCK
from hetpipe.conditions import Conditions
from hetpipe.errors import HetpipeError, HistoryIncomplete, Unavailable
from hetpipe.job.file import Job
from hetpipe.observe.history import History, NullHistory, in_detail
from hetpipe.observe.log import configure_logging, get_logger
from hetpipe.observe.metrics import Metrics, NullMetrics, metrics_path
from hetpipe.observe.metrics_endpoint import metrics_endpoint
from hetpipe.observe.timeline import Timeline
from hetpipe.phases import end_phases, report_phase
from hetpipe.pipeline.cuda import peak_bytes
from hetpipe.pipeline.setup import StageIdentity
from hetpipe.server.agent.child_main import ReportPipe, run_child
from hetpipe.server.agent.children import LINK_PORT, METRICS_PORT
from hetpipe.server.agent.frozen_caches import cache_folders
from hetpipe.server.agent.meeting import meet
from hetpipe.server.agent.stage_assembly import (
    STALL_SECONDS,
    Wiring,
    assemble,
    identity_of,
    load_user_code,
    policies_in,
    requester_of,
)
from hetpipe.server.agent.stage_readings import StageReadings
from hetpipe.server.shard.emulated import over
from hetpipe.server.shard.failing import FailpointCalls
from hetpipe.server.shard.relayed_log import RelayedLog
from hetpipe.server.shard.retries import RetryingCalls, RetryPolicy, RetryState
from hetpipe.values import wire
from hetpipe.values.commands import stage_name
from hetpipe.values.conditions import ConditionKind
from hetpipe.values.ids import ShardIndex
from hetpipe.values.memory import policies_text
from hetpipe.values.run import StageConditions, StageConfig, StageDone, StageFailed, StageReady, StageReport
from hetpipe.weights.allocator import settle_memory
from hetpipe.wire.call import Calls
from hetpipe.wire.caller import Caller
from hetpipe.wire.segment_client import SharedMemoryCalls
from hetpipe.wire.shard_client import connect_shard
from hetpipe.wire.tls import Tls, tls_from_environment

_log = get_logger(__name__)


def main(
    pipe: ReportPipe,
    first_line: bytes,
    *,
    metrics_port: int | None = None,
    link_port: int = 0,
    relayed: RelayedLog | None = None,
) -> int:
    """Run the stage configured by the first line; returns the exit status.

    Args:
        pipe: receives its reports.
        first_line: its configuration.
        metrics_port: port of its metrics; None: no metrics.
        link_port: port for the next stage; 0: any free port.
        relayed: the decision log from the agent; None: there is no agent that relays it.
    """
    torch.set_num_threads(1)
    settle_memory(one_heap=True)
    config: StageConfig = wire.from_json(StageConfig, first_line)
    identity = identity_of(config)
    name = f"vw-{config.vw}-stage-{config.stage}"
    run_dir = Path(config.run_dir)
    job_id = config.plan.job_id
    configure_logging(
        run_dir / "logs" / f"{name}.log",
        role="stage",
        run=run_dir.name,
        job=job_id,
        vw=config.vw,
        stage=config.stage,
    )
    stage_readings = StageReadings(job_id, identity)

    def report(message: StageReport) -> None:
        stage_readings.observe(message)
        pipe.write(wire.to_json(StageReport, message))

    try:
        # The agent has validated that it is permitted.
        failpoints.arm(
            os.environ,
            is_allowed=True,
            role="stage",
            vw=config.vw,
            stage=config.stage,
            incarnation=config.incarnation,
        )
        with _metrics(config.host, metrics_port, stage_readings):
            done = _run(config, identity, name, report, link_port=link_port, relayed=relayed)
    except Exception as error:  # noqa: BLE001 - the outermost frame: any error becomes one sentence and a status
        _log.exception("the stage failed")
        report(_failure(identity, error))
        return 1
    report(done)
    return 0


@contextmanager
def _metrics(host: str, port: int | None, stage_readings: StageReadings) -> Iterator[None]:
    """Serve the metrics of this stage; a failure is not fatal."""
    with ExitStack() as stack:
        try:
            stack.enter_context(metrics_endpoint(host, port, "stage", stage_readings.readings))
        except HetpipeError as error:
            _log.warning("no_metrics", port=port, reason=str(error))
        yield


def _failure(identity: StageIdentity, error: Exception) -> StageFailed:
    if isinstance(error, HetpipeError):
        return StageFailed(type(error).__name__, str(error), secondary=isinstance(error, Unavailable))
    return StageFailed(
        type(error).__name__, f"{identity} failed: {type(error).__name__}: {error} (details are in the log)"
    )


def _run(
    config: StageConfig,
    identity: StageIdentity,
    name: str,
    report: Callable[[StageReport], None],
    *,
    link_port: int,
    relayed: RelayedLog | None,
) -> StageDone:
    report_phase("importing the user's code and building model and data")
    # The only place where a stage parses the job.
    job = Job.model_validate(config.job)
    code = load_user_code(job, config)
    tls = tls_from_environment(os.environ)
    # The job's timeout for a parameter server, but at least that of every other wait.
    absence_seconds = job.survive.absence.total_seconds()
    patience_seconds = max(STALL_SECONDS, absence_seconds, job.patience.data.total_seconds())
    waits = RetryPolicy(who=str(identity), report=report, seconds=patience_seconds)
    shares_memory = job.parameter_servers.transport == "auto"
    shards, clock_shard = _parameter_servers(config, waits, tls, shares_memory=shares_memory)
    report_phase("meeting its neighbours")
    neighbours = meet(job, config, clock_shard, tls=tls, port=link_port)
    report_phase("preparing the weights")
    timeline, history, metrics = _records(
        job, config, identity, name, policies_text(policies_in(job, config, code.layers), code.layers[0].index)
    )
    conditions = Conditions()
    conditions.on_change(lambda: report(StageConditions(conditions.active())))

    def history_ends(alarm: HistoryIncomplete) -> None:
        conditions.raise_(ConditionKind.HISTORY_INCOMPLETE, stage_name(config.vw, config.stage), str(alarm))

    for record in (history, timeline, metrics):
        record.on_alarm(history_ends)
    wiring = Wiring(
        shards=shards,
        clock_shard=clock_shard,
        upstream=neighbours.upstream,
        downstream=neighbours.downstream,
        replicas=neighbours.replicas,
        history=in_detail(history, job.history),
        report=report,
        timeline=timeline,
        metrics=metrics,
        cache=cache_folders(os.environ, job),
        stall_seconds=patience_seconds,
        relayed=relayed,
    )
    runner, client = assemble(job, config, code, wiring)
    end_phases()
    report(StageReady(os.getpid(), link=str(neighbours.link or "")))
    gc.freeze()  # exclude imported modules from garbage collections
    try:
        done = runner.run()
        if (peak := peak_bytes(torch.device(config.device.torch_device))) is not None:
            _log.info("gpu_memory", allocated_bytes=peak[0], reserved_bytes=peak[1])
        return done
    finally:
        for each in (client, clock_shard, timeline, metrics, history, neighbours):
            each.close()


def _parameter_servers(
    config: StageConfig, waits: RetryPolicy, tls: Tls | None, *, shares_memory: bool
) -> tuple[Sequence[Calls], Calls]:
    """Retrying calls to all shards, over emulated links if the job has them, and to the clock shard."""
    addresses = config.shard_addresses
    emulation = config.emulation
    times = emulation.shards if emulation is not None and emulation.shards else (None,) * len(addresses)
    ids = config.shard_ids or ("",) * len(addresses)
    retries = [RetryState(f"parameter server {index} at {address}", waits) for index, address in enumerate(addresses)]

    def connect(index: int) -> Caller:
        return connect_shard(addresses[index], ShardIndex(index), member_id=ids[index], tls=tls)

    def tensors(index: int) -> Calls:
        caller = connect(index)
        return FailpointCalls(SharedMemoryCalls(caller, requester_of(config)) if shares_memory else caller)

    shards = [RetryingCalls(over(tensors(index), time), retries[index]) for index, time in enumerate(times)]
    # On a separate connection, so that reports and the log do not queue behind tensors.
    return shards, RetryingCalls(FailpointCalls(connect(0)), retries[0])


def _records(
    job: Job, config: StageConfig, identity: StageIdentity, name: str, policies: str
) -> tuple[Timeline, History | NullHistory, Metrics | NullMetrics]:
    """The stage's files in the folder of the run."""
    run_dir = Path(config.run_dir)
    timeline = Timeline(
        run_dir / "trace" / f"{name}.jsonl",
        process_index=config.vw,
        process_name=f"virtual worker {config.vw}",
        thread_index=config.stage,
        thread_name=f"stage {config.stage}" + (f" ({policies})" if policies else ""),
    )
    history: History | NullHistory = NullHistory()
    if job.history != "off":
        path = run_dir / "history" / f"{name}.jsonl"
        history = History(path, host=config.host, pid=os.getpid(), role="stage", term=config.plan.term)
    metrics = Metrics(metrics_path(run_dir, config.vw)) if identity.is_last else NullMetrics()
    return timeline, history, metrics


def program() -> NoReturn:
    """Run this process; see `hetpipe.launch`."""
    metrics_port, link_port = (int(os.environ.get(name) or 0) for name in (METRICS_PORT, LINK_PORT))
    relayed = RelayedLog(SYSTEM_CLOCK)
    run_child(
        partial(main, metrics_port=metrics_port or None, link_port=link_port, relayed=relayed), on_input=relayed.feed
    )


if __name__ == "__main__":
    program()
