"""(a) The pipeline runtime alone, against torch's Schedule1F1B and a single-threaded plain loop.

One virtual worker of 2 stages, 1 thread each. Rates are samples per second; ours after the pipeline has filled. Rounds
of all contenders alternate within one run, so that a machine that drifts slows them alike.
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks import protocol
from benchmarks.model import LEARNING_RATE, MICROBATCH, TOKENS, WIDTH, RandomTokens, layers, loss, model
from benchmarks.stages import (
    NUM_STAGES,
    Setting,
    hetpipe_stage,
    store_of,
    two_processes,
    use_one_thread,
)
from hetpipe.clock import SYSTEM_CLOCK
from hetpipe.job.file import OptimizerSpec

SECONDS = timedelta(seconds=120)


def plain_loop(num_minibatches: int) -> float:
    """Samples per second of the ordinary loop: forward, backward, step, one thread."""
    use_one_thread()
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


def torch_stage(rank: int, port: int, num_microbatches: int, num_steps: int) -> float:
    """One rank of Schedule1F1B over gloo; samples per second."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    use_one_thread()
    dist.init_process_group("gloo", store=store_of(rank, port), rank=rank, world_size=NUM_STAGES, timeout=SECONDS)
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
    rate = num_steps * num_microbatches * MICROBATCH / (SYSTEM_CLOCK.monotonic() - started)
    dist.destroy_process_group()
    return rate


def torch_rate(num_microbatches: int, num_steps: int) -> float:
    """Samples per second of Schedule1F1B."""
    return two_processes(torch_stage, num_microbatches, num_steps)[0]


def hetpipe_rate(minibatches_per_wave: int, num_waves: int) -> float:
    """Samples per second of hetpipe with parameter traffic off, once the pipeline is full."""
    optimizer = OptimizerSpec.model_validate({"name": "SGD", "lr": LEARNING_RATE})
    first, _ = two_processes(hetpipe_stage, Setting(minibatches_per_wave, num_waves, optimizer))
    return MICROBATCH * first.minibatches_per_second(NUM_STAGES + 1, minibatches_per_wave * num_waves)


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
            rates.setdefault(f"Schedule1F1B, {m} microbatches", []).append(torch_rate(m, steps))
            rates.setdefault(f"hetpipe, {m} minibatches per wave", []).append(hetpipe_rate(m, max(2, 24 // m)))
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
