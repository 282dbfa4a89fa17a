"""A checkpoint is resumed by a run of another shape, and computes what the reference executor says it must.

The reference goes on from its own state at the same barrier, with the optimizer states that the rule of
`checkpoint.layout.optimizer_source` gives to each virtual worker. The history checker judges every run: each sample of
the epoch counts once, before or after.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hetpipe.checkpoint.layout import optimizer_source
from hetpipe.checkpoint.manifest import checkpoint_dir, newest_checkpoint, read_manifest
from hetpipe.errors import CheckpointError
from hetpipe.values.ids import Clock, VirtualWorkerIndex
from tests.numerics.compare import ADAMW, MOMENTUM, Case, assert_same_bits, run, trained
from tests.numerics.test_stops import assert_same_optimizers
from tests.reference.executor import ReferenceState, run_reference

pytestmark = pytest.mark.matrix

#: 12 minibatches an epoch: the first checkpoint, at clock 2, is within the first of two epochs.
BASE: dict[str, Any] = {
    "model": "dropout_batch_norm",
    "data": "data32",
    "batch_size": 4,
    "epochs": 2,
    "every_waves": 2,
    "combine": "mean",
    "optimizer": ADAMW,
    "lr_schedule": {"name": "StepLR", "step_size": 4, "gamma": 0.7},
}
NESTEROV: dict[str, Any] = {**MOMENTUM, "nesterov": True}
ALONE: dict[str, Any] = {"kind": "none", "workers": 1, "servers": 1}

#: What the first run has beyond `BASE`, and what the second one changes.
SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "deeper": ({}, {"stages": 4}),
    "another cut of each": ({"stages": [[1, 3], [3, 1]]}, {"stages": [[2, 2], [1, 1, 2]]}),
    "more shards": ({"servers": 1}, {"servers": 3, "stages": 1}),
    "a parameter in other pieces": ({"model": "wide32", "servers": 2}, {"servers": 3, "stages": 1}),
    "fewer shards, another D": ({"servers": 3, "staleness": 0}, {"servers": 1, "staleness": 2}),
    "longer waves": ({"wave": 2}, {"wave": 3}),
    "shorter waves": ({"wave": 4}, {"wave": 1, "stages": 1}),
    "another virtual worker": ({}, {"workers": 3}),
    "twice as many, cut elsewhere": ({}, {"workers": 4, "stages": 1, "servers": 3}),
    "one virtual worker less": ({"workers": 3}, {"workers": 2, "stages": 4, "wave": 4}),
    "one alone": ({"workers": 3}, {"workers": 1}),
    "counted in minibatches": ({"epochs": None, "minibatches": 15}, {"workers": 3}),
    "longer groups": ({}, {"accumulate": 2}),
    "other options": ({}, {"groups": ({"parameters": ("*.bias",), "weight_decay": 0.0},), "lr_schedule": None}),
    "prediction": (
        {"weights": "predict", "optimizer": NESTEROV, "stages": 1, "workers": 2},
        {"workers": 3, "stages": [[1, 3], [3, 1], [2, 2]]},
    ),
    "replicas": ({"kind": "allreduce", "weights": "flush", "servers": 1}, {"workers": 3, "stages": 4, "wave": 4}),
    "from shards to replicas": ({"weights": "flush"}, {"kind": "allreduce", "servers": 1, "workers": 3}),
    "from replicas to shards": ({"kind": "allreduce", "weights": "flush", "servers": 1}, {"kind": "wsp", "servers": 2}),
    "from shards to none": ({"workers": 3}, ALONE),
    "from none to shards": (ALONE, {"kind": "wsp", "workers": 2, "servers": 2}),
}


#: What `make test` takes: a change of each kind, where several change the same in both directions or by another number.
ALWAYS = {
    "another cut of each",
    "a parameter in other pieces",
    "fewer shards, another D",
    "one virtual worker less",
    "longer groups",
    "other options",
    "prediction",
    "from shards to replicas",
    "from none to shards",
}


def carried_over(state: ReferenceState, case: Case) -> ReferenceState:
    """`state` for the virtual workers of `case`."""
    members = tuple(VirtualWorkerIndex(vw) for vw in range(len(state.optimizers)))
    sources = [
        optimizer_source(members, VirtualWorkerIndex(vw), is_shared=case.kind == "allreduce")
        for vw in range(case.workers)
    ]
    return taken_from(state, sources)


def taken_from(state: ReferenceState, sources: Sequence[int]) -> ReferenceState:
    """`state` for virtual workers that continue with the optimizer states of `sources`."""
    return replace(
        state,
        optimizers=tuple(state.optimizers[source] for source in sources),
        updates=tuple(state.updates[source] for source in sources),
        last_gradients=tuple(state.last_gradients[source] for source in sources),
        scales=tuple(state.scales[source] for source in sources),
    )


@pytest.mark.parametrize(
    ("first", "changes"),
    [
        pytest.param(*shape, id=name, marks=() if name in ALWAYS else pytest.mark.exhaustive)
        for name, shape in SHAPES.items()
    ],
)
def test_a_run_of_another_shape_goes_on_exactly(first: dict[str, Any], changes: dict[str, Any], tmp_path: Path) -> None:
    before = Case(**{**BASE, **first})
    after = replace(before, **changes)
    stopped = run_reference(before.reference())
    run(before, tmp_path / "before", stop_when=lambda clocks: clocks.published >= 2, delay_seconds=0.0)
    run(after, tmp_path / "after", restore=checkpoint_dir(tmp_path / "before", Clock(2)))
    expected = run_reference(after.reference(), carried_over(stopped.barriers[Clock(2)], after))
    assert_same_bits(trained(tmp_path / "after"), expected)
    assert_same_optimizers(newest_checkpoint(tmp_path / "after"), expected.final)
    progress = read_manifest(newest_checkpoint(tmp_path / "after")).progress
    assert (progress.clock, progress.minibatches, progress.samples) == (
        expected.final.clock,
        expected.final.minibatches,
        expected.final.samples,
    )


def test_another_model_is_refused(tmp_path: Path) -> None:
    case = Case(minibatches=4)
    run(case, tmp_path / "before")
    middle = newest_checkpoint(tmp_path / "before")
    longer = replace(case, minibatches=6)
    with pytest.raises(CheckpointError, match=r"is \[.*\] torch\.float32 in the checkpoint, .*float64 in the model"):
        run(replace(longer, model="mlp64", data="more64"), tmp_path / "dtype", restore=middle)
    with pytest.raises(CheckpointError, match=r"has no weights/|in the model"):
        run(replace(longer, model="dropout_batch_norm", stages=1), tmp_path / "layers", restore=middle)
