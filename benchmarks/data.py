"""Slow data, read ahead by data workers: one stage of hetpipe beside a plain loop over torch's `DataLoader`.

A sample takes 5 ms, in which its reader waits, as for a disk or a network; the model is small. So the speed is that of
the reading, and a stage reaches the plain loop's only if nothing of it happens where it computes. Each contender of a
round has a process of its own; the rate is from the update after minibatch `WARM_UP` on, when what was read before the
first minibatch is used up.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from benchmarks.sizes import sized
from benchmarks.stages import Setting, Stage, StageFigures, Stamps, run_stage, use_one_thread
from hetpipe.clock import SYSTEM_CLOCK
from hetpipe.job.file import OptimizerSpec
from hetpipe.pipeline.chain import chain_of

BATCH_SIZE = sized(32, 4)
NUM_WORKERS = sized(4, 2)
SAMPLE_SECONDS = 0.005
WARM_UP = sized(12, 2)
NUM_MINIBATCHES = sized(60, 6)
WIDTH = 64

Rates = Mapping[str, Sequence[float]]


class SlowSamples(Dataset[tuple[Tensor, int]]):
    """Random samples that take a while."""

    def __len__(self) -> int:
        """As many as are trained on."""
        return BATCH_SIZE * NUM_MINIBATCHES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Wait, then draw."""
        time.sleep(SAMPLE_SECONDS)
        return torch.rand(WIDTH), index % 4


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 4))


def hetpipe_rate() -> float:
    """Samples per second of a stage."""
    use_one_thread()
    figures = StageFigures()
    setting = Setting(1, NUM_MINIBATCHES, OptimizerSpec.model_validate({"name": "SGD", "lr": 0.1}), has_shards=False)
    stage = Stage(
        chain_of(_model()),
        functional.cross_entropy,
        SlowSamples(),
        BATCH_SIZE,
        Stamps(figures),
        num_workers=NUM_WORKERS,
    )
    run_stage(setting, stage, upstream=None, downstream=None)
    return BATCH_SIZE * figures.minibatches_per_second(WARM_UP, NUM_MINIBATCHES)


def plain_rate() -> float:
    """Samples per second of a loop as people write it."""
    use_one_thread()
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    times: list[float] = []
    # A process that was spawned would spawn its workers, too; those of people and of hetpipe are forked.
    loader = DataLoader(
        SlowSamples(), BATCH_SIZE, shuffle=True, num_workers=NUM_WORKERS, multiprocessing_context="fork"
    )
    for inputs, target in loader:
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs), target).backward()  # type: ignore[no-untyped-call]  # torch ships it untyped
        optimizer.step()
        times.append(SYSTEM_CLOCK.monotonic())
    return BATCH_SIZE * (NUM_MINIBATCHES - WARM_UP) / (times[-1] - times[WARM_UP - 1])


#: Name → what measures it.
CONTENDERS: Mapping[str, Callable[[], float]] = {"hetpipe": hetpipe_rate, "plain DataLoader loop": plain_rate}


def _send(target: Callable[[], float], to: Connection) -> None:
    to.send(target())


def _in_process(target: Callable[[], float]) -> float:
    """Run `target` in a process that may start workers."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(target, theirs))
    process.start()
    theirs.close()
    try:
        found: float = ours.recv()
    finally:
        process.join(20)
        process.kill()
    return found


def measure(rounds: int) -> Rates:
    """Samples per second of both, interleaved."""
    found: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    for _ in range(rounds):
        for name, target in CONTENDERS.items():
            found[name].append(_in_process(target))
    return found


def ratios(rates: Rates) -> list[float]:
    """Hetpipe / plain loop, of each round."""
    ours, theirs = rates.values()
    return [a / b for a, b in zip(ours, theirs, strict=True)]
