"""What is to be evaluated within epochs, by the reference executor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

from torch.utils.data import Subset

from hetpipe.values.ids import Clock, Minibatch
from tests.numerics.compare import Case
from tests.reference.executor import ReferenceRun, evaluate, run_reference
from tests.reference.values import MinibatchRecord, ReferenceResult, ReferenceState, Tensors
from tests.reference.worker import ReferenceWorker


@dataclass(frozen=True)
class Expected:
    """What is to be evaluated: the weights of a clock, or what each stage sees of them, and the buffers then."""

    weights: Tensors
    buffers: Tensors
    minibatches: int
    epoch: int


def reference_of(case: Case) -> tuple[ReferenceRun, ReferenceResult, dict[int, Expected]]:
    """The reference's run, and what virtual worker 0 is to evaluate in it, by clock."""
    found: dict[int, Expected] = {}
    progress: list[ReferenceState] = []
    passed = [0]
    begin, minibatch = ReferenceWorker.begin, ReferenceWorker.minibatch
    assert case.evaluate is not None, "the case evaluates within epochs"
    every = case.evaluate["every_waves"]
    run_of = case.reference()
    n, num_blocks = case.wave, [0] * case.workers

    def noting_begin(worker: ReferenceWorker, state: ReferenceState, last: int) -> None:
        if worker.index == 0:
            progress.append(state)
            if not state.used:
                passed[0] = max(passed[0], state.clock)
        num_blocks[worker.index] = last - state.clock * n
        begin(worker, state, last)

    def noting_minibatch(
        worker: ReferenceWorker, p: Minibatch, block: tuple[int, ...], published: Mapping[Clock, Tensors]
    ) -> MinibatchRecord:
        if worker.index == 0:
            equations, local = worker._equations, worker._local
            versions = [equations.forward(p, stage) for stage in range(len(worker._stages))]
            clock = versions[0].clock if case.has_shards else Clock(versions[0].through // n)
            if clock // every > passed[0] // every:
                weights = published[clock] if case.has_shards else {}
                for names, version in zip(worker._stages, versions, strict=True):
                    if not case.has_shards:
                        weights = {**weights, **{name: local.at(version, published)[name] for name in names}}
                state = progress[-1]
                done = sum(min((clock - state.clock) * n, blocks) for blocks in num_blocks)
                copied = {name: tensor.clone() for name, tensor in weights.items()}
                found[clock] = Expected(copied, worker.buffers(), state.minibatches + done, state.epoch + 1)
            passed[0] = max(passed[0], clock)
        return minibatch(worker, p, block, published)

    with patch.multiple(ReferenceWorker, begin=noting_begin, minibatch=noting_minibatch):
        result = run_reference(run_of)
    return run_of, result, found


def value_of(reference: ReferenceRun, expected: Expected, num_samples: int) -> float:
    alone = replace(reference, num_virtual_workers=1, stages=None, sync="none", weights="flush", accumulate=1)
    dataset: Any = Subset(reference.train, range(num_samples))  # type: ignore[arg-type]
    means = evaluate(alone, weights=expected.weights, buffers=expected.buffers, dataset=dataset).means
    return means["loss"]
