"""(a) The pipeline runtime alone, against torch's Schedule1F1B and a single-threaded plain loop.

One virtual worker of 2 stages, 1 thread each. Rates are samples per second; ours after the pipeline has filled. Rounds
of all contenders alternate within one run, so that a machine that drifts slows them alike.
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
import sys
import tempfile
from contextlib import nullcontext
from datetime import timedelta
from multiprocessing.queues import Queue
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks import protocol
from benchmarks.alone import AloneSynchroniser
from benchmarks.model import LEARNING_RATE, MICROBATCH, TOKENS, WIDTH, RandomTokens, layers, loss, model
from hetpipe.clock import SYSTEM_CLOCK
from hetpipe.link.gloo import connect_gloo
from hetpipe.link.policy import LinkLimits
from hetpipe.observe.history import NullHistory
from hetpipe.observe.metrics import NullMetrics
from hetpipe.observe.timeline import NullTimeline
from hetpipe.pipeline.chain import chain_of, dtype_name
from hetpipe.pipeline.compute import Emulator, StageCompute
from hetpipe.pipeline.inbox import Inbox
from hetpipe.pipeline.runner import StageRunner
from hetpipe.pipeline.setup import StageData, StageIdentity, StageParts
from hetpipe.schedule.catalogue import order_for
from hetpipe.schedule.versions import VersionTable
from hetpipe.spec.ids import Clock, Incarnation, StageIndex, VirtualWorkerIndex
from hetpipe.spec.job import OptimizerSpec
from hetpipe.spec.run import DeviceConfig, StageReport
from hetpipe.spec.sync import DataSpec, SyncSpec
from hetpipe.weights.allocator import keep_freed_memory
from hetpipe.weights.anchored import AnchoredWeights
from hetpipe.weights.flat import BufferPool, FlatLayout
from hetpipe.weights.optimizer import StageOptimizer

if TYPE_CHECKING:  # torch.distributed has this name, but only this module has its type
    from torch._C._distributed_c10d import TCPStore
else:
    from torch.distributed import TCPStore

SECONDS = timedelta(seconds=120)
NUM_STAGES = 2


def plain_loop(num_minibatches: int) -> float:
    """Samples per second of the ordinary loop: forward, backward, step, one thread."""
    torch.set_num_threads(1)
    keep_freed_memory()  # for all contenders, so that none is ahead by its allocator
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=LEARNING_RATE)
    inputs, target = _batch()
    for p in range(num_minibatches + 1):
        if p == 1:
            started = SYSTEM_CLOCK.monotonic()
        optimizer.zero_grad()
        torch.autograd.backward(loss(net(inputs), target))
        optimizer.step()
    return num_minibatches * MICROBATCH / (SYSTEM_CLOCK.monotonic() - started)


def _batch() -> tuple[Tensor, Tensor]:
    sample = RandomTokens(1)[0]
    return sample[0].expand(MICROBATCH, TOKENS, WIDTH).clone(), sample[1].expand(MICROBATCH, TOKENS, WIDTH).clone()


def torch_stage(rank: int, port: int, num_microbatches: int, num_steps: int, results: Queue[float]) -> None:
    """One rank of Schedule1F1B over gloo."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    torch.set_num_threads(1)
    keep_freed_memory()  # for all contenders, so that none is ahead by its allocator
    store = TCPStore("127.0.0.1", port, is_master=rank == 0, timeout=SECONDS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_STAGES, timeout=SECONDS)
    half = len(layers()) // NUM_STAGES
    module = nn.Sequential(*layers()[rank * half : (rank + 1) * half])
    stage = PipelineStage(module, rank, NUM_STAGES, torch.device("cpu"))
    schedule = Schedule1F1B(stage, num_microbatches, loss_fn=loss)
    optimizer = torch.optim.SGD(module.parameters(), lr=LEARNING_RATE)
    inputs, target = (value.repeat(num_microbatches, 1, 1) for value in _batch())
    for step in range(num_steps + 1):
        if step == 1:
            dist.barrier()
            started = SYSTEM_CLOCK.monotonic()
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(inputs)
        else:
            schedule.step(target=target)
        optimizer.step()
    dist.barrier()
    if rank == 0:
        results.put(num_steps * num_microbatches * MICROBATCH / (SYSTEM_CLOCK.monotonic() - started))
    dist.destroy_process_group()


class _Stamps(NullTimeline):
    """Remembers when each step ended; the timeline is where the runner says so."""

    def __init__(self) -> None:
        self.steps: list[float] = []

    def record(
        self, activity: Any, *, start_seconds: float, end_seconds: float, p: int | None = None, **args: Any
    ) -> None:
        """Keep the end of a step."""
        if activity.name == "STEP":
            self.steps.append(end_seconds)


def hetpipe_stage(rank: int, port: int, minibatches_per_wave: int, num_waves: int, results: Queue[float]) -> None:
    """One stage of the runtime, with `AloneSynchroniser`."""
    torch.set_num_threads(1)
    keep_freed_memory()  # for all contenders, so that none is ahead by its allocator
    store = TCPStore("127.0.0.1", port, is_master=rank == 0, timeout=SECONDS)
    limits = LinkLimits(incoming_frames=minibatches_per_wave + 2)
    upstream, downstream = connect_gloo(
        store, vw=0, stage=rank, num_stages=NUM_STAGES, host="127.0.0.1", deadline_seconds=60.0, limits=limits
    )
    chain = chain_of(model())
    half = len(chain) // NUM_STAGES
    mine = chain[rank * half : (rank + 1) * half]
    tensors = []
    for layer in mine:
        for local, name in layer.parameters.items():
            parameter = layer.module.get_parameter(local)
            tensors.append((name, tuple(parameter.shape), dtype_name(parameter.dtype)))
    pool = BufferPool(FlatLayout(tensors), torch.device("cpu"))
    first = pool.take()
    for layer in mine:
        for local, name in layer.parameters.items():
            first.views[name].copy_(layer.module.get_parameter(local).detach())
    rho = pool.take().zero_()
    versions = VersionTable("wave", rank, NUM_STAGES, minibatches_per_wave)
    num_samples = minibatches_per_wave * num_waves * MICROBATCH
    data = DataSpec(num_samples, MICROBATCH, 0, 1, None)
    synchroniser = AloneSynchroniser(data, pool, first, num_waves)
    stamps = _Stamps()
    checkpoints: list[Path] = []
    inbox = Inbox(upstream, downstream, Clock(0))
    is_last = rank == NUM_STAGES - 1
    parts = StageParts(
        identity=StageIdentity(VirtualWorkerIndex(0), StageIndex(rank), Incarnation(0), NUM_STAGES, 1),
        sync=SyncSpec(minibatches_per_wave, None),
        layers=mine,
        compute=StageCompute(
            mine, vw=VirtualWorkerIndex(0), seed=0, device=torch.device("cpu"), loss=loss if is_last else None
        ),
        emulator=Emulator(DeviceConfig("cpu"), SYSTEM_CLOCK, seed=0),
        versions=versions,
        weights=AnchoredWeights(pool, StageOptimizer(OptimizerSpec(name="SGD", lr=LEARNING_RATE), rho), rho, versions),
        has_shards=True,
        clipping=None,
        replicas=None,
        pool=pool,
        order=order_for("wave", "1f1b"),
        schedule="1f1b",
        data=StageData(data, RandomTokens(num_samples), None, {}),
        upstream=upstream,
        downstream=downstream,
        synchroniser=synchroniser,
        history=NullHistory(),
        timeline=stamps,
        metrics=NullMetrics(),
        report=_ignore,
        clock=SYSTEM_CLOCK,
        checkpoint_dir=lambda _clock: checkpoints[0],
        guard=nullcontext(),
        stall_seconds=120.0,
    )
    runner = StageRunner(parts, inbox)
    synchroniser.begin(inbox)
    with tempfile.TemporaryDirectory() as folder:  # the checkpoint of the last barrier: after the measured time
        checkpoints.append(Path(folder))
        runner.run(Clock(0))
    if rank == 0:
        fill = NUM_STAGES
        counted = stamps.steps[fill:]
        results.put((len(counted) - 1) * MICROBATCH / (counted[-1] - counted[0]))


def _ignore(report: StageReport) -> None:
    del report


def two_processes(target: Any, *arguments: int) -> float:
    """Run `target` as rank 0 and 1; returns what rank 0 measured."""
    context = multiprocessing.get_context("spawn")
    results: Queue[float] = context.Queue()
    port = _free_port()
    processes = [
        context.Process(target=target, args=(rank, port, *arguments, results), daemon=True)
        for rank in range(NUM_STAGES)
    ]
    for process in processes:
        process.start()
    try:
        return results.get(timeout=300)
    finally:
        for process in processes:
            process.join(20)
            process.kill()


def _free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def with_shards(minibatches_per_wave: int) -> float:
    """The same pipeline as a real run: command line, history, trace, and one shard that takes every wave."""
    job = {
        "name": "pipeline",
        "model": "benchmarks.model:model",
        "loss": "benchmarks.model:loss",
        "data": {"train": "benchmarks.model:data"},
        "batch_size": MICROBATCH,
        "minibatches": 28,
        "optimizer": {"name": "SGD", "lr": LEARNING_RATE},
        "workers": {"count": 1, "stages": NUM_STAGES},
        "sync": {"kind": "wsp", "D": 1, "minibatches_per_wave": minibatches_per_wave},
        "parameter_servers": {"count": 1},
    }
    folder, _, _ = protocol.train(job)
    return protocol.rate(folder / "history" / "vw-0-stage-0.jsonl", margin=NUM_STAGES) * MICROBATCH


def one_process(num_minibatches: int) -> float:
    """The plain loop in a process of its own, as the others are."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as workers:
        return float(workers.apply(plain_loop, (num_minibatches,)))


def measure(rounds: int) -> dict[str, list[float]]:
    """Samples per second of every contender, `rounds` times, in turn."""
    rates: dict[str, list[float]] = {}
    for number in range(rounds):
        for m, steps in ((4, 4), (16, 1)):
            rates.setdefault(f"Schedule1F1B, {m} microbatches", []).append(two_processes(torch_stage, m, steps))
            rates.setdefault(f"hetpipe, {m} minibatches per wave", []).append(
                two_processes(hetpipe_stage, m, max(2, 24 // m))
            )
        rates.setdefault("hetpipe, 4 per wave, with a shard", []).append(with_shards(4))
        rates.setdefault("plain loop, 1 thread", []).append(one_process(8))
        sys.stderr.write(f"pipeline: round {number + 1} of {rounds}\n")
    return rates


def ratios(rates: dict[str, list[float]]) -> dict[str, float]:
    """The figures that count: medians of round-by-round ratios."""

    def over(a: str, b: str, factor: float = 1.0) -> float:
        return statistics.median(x / (factor * y) for x, y in zip(rates[a], rates[b], strict=True))

    return {
        "hetpipe / Schedule1F1B, 4": over("hetpipe, 4 minibatches per wave", "Schedule1F1B, 4 microbatches"),
        "hetpipe / Schedule1F1B, 16": over("hetpipe, 16 minibatches per wave", "Schedule1F1B, 16 microbatches"),
        "hetpipe with a shard / hetpipe without": over(
            "hetpipe, 4 per wave, with a shard", "hetpipe, 4 minibatches per wave"
        ),
        "hetpipe (4) / twice the plain loop": over("hetpipe, 4 minibatches per wave", "plain loop, 1 thread", 2.0),
        "hetpipe (16) / twice the plain loop": over("hetpipe, 16 minibatches per wave", "plain loop, 1 thread", 2.0),
    }


if __name__ == "__main__":
    found = measure(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
    medians = {name: round(statistics.median(values), 2) for name, values in found.items()}
    sys.stdout.write(json.dumps({"samples_per_second": medians, "ratios": ratios(found)}, indent=1) + "\n")
