"""Means over several minibatches that are weighted by tokens (`mean_over`, docs/semantics/losses.md, section 2)."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from hetpipe.decide.sync.segment import first_progress, planned_segments
from hetpipe.observe.metrics import read_metrics
from hetpipe.pipeline.chain import chain_of
from hetpipe.pipeline.data import read_batch
from hetpipe.values.ids import VirtualWorkerIndex
from tests import models
from tests.numerics.compare import ADAMW, MOMENTUM, SGD, Case, assert_same_bits, run, trained
from tests.pairwise import every_nth
from tests.reference.executor import run_reference

CASES: dict[str, dict[str, Any]] = {
    "accumulate, clipped": {"wave": 4, "accumulate": 4, "max_norm": 0.5, "optimizer": ADAMW},
    "accumulate": {"wave": 4, "accumulate": 2},
    "flush": {"weights": "flush", "wave": 3, "optimizer": ADAMW},
    "one minibatch per update": {"wave": 2, "optimizer": ADAMW},
    "allreduce": {"kind": "allreduce", "weights": "flush", "wave": 2},
    "double_buffer": {"weights": "double_buffer", "wave": 4, "stages": 3},
    "none": {"kind": "none", "weights": "flush", "wave": 3, "workers": 1},
}


@pytest.mark.parametrize(
    ("name", "mean_over"),
    [*every_nth(2, ((name, "tokens") for name in CASES)), ("accumulate", "tests.models:num_labelled")],
)
def test_bits_are_those_of_the_reference(name: str, mean_over: str, tmp_path: Path) -> None:
    """Among the minibatches of two are some with one target, and many with none: those leave no trace."""
    case = Case(
        **{"data": "unlabelled32", "optimizer": MOMENTUM, "minibatches": 24, **CASES[name]}, mean_over=mean_over
    )
    run(case, tmp_path)
    assert_same_bits(trained(tmp_path), run_reference(case.reference()))


@pytest.mark.parametrize("weights", ["flush", "wave"])
def test_an_update_is_that_of_a_plain_loop_over_all_its_tokens(weights: Any, tmp_path: Path) -> None:
    accumulate = 1 if weights == "flush" else 4
    case = Case(
        data="unlabelled32",
        mean_over="tokens",
        weights=weights,
        accumulate=accumulate,
        workers=1,
        stages=2,
        wave=4,
        staleness=0,
        kind="none",
        minibatches=40,
        batch_size=4,
        optimizer=SGD,
    )
    if weights == "wave":  # forwards do not wait for the update before: compare one update
        case = replace(case, minibatches=4)
    run(case, tmp_path)
    torch.manual_seed(3)
    model, data = models.mlp32(), models.unlabelled32()
    optimizer = torch.optim.SGD(model.parameters(), lr=SGD["lr"])
    spec = case.job().data_spec(len(data))
    segments = planned_segments(
        first_progress(spec), spec, per_wave={VirtualWorkerIndex(0): 4}, checkpoint_every_waves=None
    )
    for _, blocks in segments:
        own = blocks[VirtualWorkerIndex(0)]
        for first in range(0, len(own), 4):
            wave = [read_batch(data, block) for block in own[first : first + 4]]
            count = sum(models.num_labelled(batch.target) for batch in wave)
            optimizer.zero_grad()
            for batch in wave:
                loss = functional.cross_entropy(model(*batch.inputs), batch.target, reduction="sum")
                torch.autograd.backward(loss / count)
            optimizer.step()
    found = trained(tmp_path)
    for layer in chain_of(model):
        for local, name in layer.parameters.items():
            torch.testing.assert_close(found[name], layer.module.get_parameter(local).detach(), rtol=0.0, atol=1e-6)


def test_losses_of_waves_are_means_over_tokens(tmp_path: Path) -> None:
    case = Case(data="unlabelled32", mean_over="tokens", workers=1, stages=2, wave=2, minibatches=24)
    run(case, tmp_path, writes_metrics=True)
    result = run_reference(case.reference())
    data = models.unlabelled32()
    expected = []
    for first in range(1, 25, 2):
        records = [result.minibatches[VirtualWorkerIndex(0), p] for p in (first, first + 1)]  # type: ignore[index]  # a NewType
        counted = [
            (record.loss, models.num_labelled(data[list(record.samples)][1]))
            for record in records
            if not math.isnan(record.loss)
        ]
        weight = sum(count for _, count in counted)
        expected.append((sum(loss * count for loss, count in counted) / weight if weight else None, weight))
    assert any(weight == 0 for _, weight in expected)
    assert [(one.wave.loss, one.wave.weight) for one in read_metrics(tmp_path)] == expected
