"""`predict` in a pipeline, on a quadratic whose prediction is exact: forward on what will be, backward on what is."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import pytest

from hetpipe.decide.schedule.versions import VersionTable
from hetpipe.errors import CallableError
from hetpipe.job.file import Job
from hetpipe.weights.optimizer import StageOptimizer
from tests.numerics import tracking
from tests.numerics.compare import ROOT, trained
from tests.numerics.tracking import COUNT, NUM_LAYERS, RATE, START
from tests.support.in_process import InProcessRun, run_in_process

MOMENTUM = {"name": "SGD", "lr": RATE, "momentum": 0.5, "dampening": 0.5}


def run(folder: Path, **optimizer: object) -> dict[tuple[int, str], list[float]]:
    """The weights that the passes of each layer saw, in the order of minibatches."""
    job = Job(
        model="tests.numerics.tracking:build",
        loss="tests.numerics.tracking:loss",
        data={"train": "tests.numerics.tracking:Targets"},
        batch_size=1,
        epochs=1,
        seed=tracking.SEED,
        optimizer={**MOMENTUM, **optimizer},
        weights="predict",
        workers={"count": 1, "stages": NUM_LAYERS},
        sync={"kind": "none", "minibatches_per_wave": NUM_LAYERS},
    )
    tracking.seen.clear()
    run_in_process(InProcessRun(job=job, run_dir=folder, import_path=ROOT, keep_history=False))
    found = {
        (layer, way): [value for at, passed, value in tracking.seen if (at, passed) == (layer, way)]
        for layer in range(NUM_LAYERS)
        for way in ("forward", "backward")
    }
    for layer in range(NUM_LAYERS):
        # The inspection before the run makes some forward passes of each layer, with the initial weights.
        inspected, found[layer, "forward"] = found[layer, "forward"][:-COUNT], found[layer, "forward"][-COUNT:]
        assert set(inspected) == {START}
    return found


def check(folder: Path) -> None:
    seen = run(folder)
    for layer in range(NUM_LAYERS):
        forward, backward = seen[layer, "forward"], seen[layer, "backward"]
        assert backward == [START - RATE * p for p in range(COUNT)], "the true weights: all updates before"
        first = NUM_LAYERS - layer  # the first minibatch with an update of its stage behind it is one more
        assert forward[first:] == backward[first:], "the prediction is exact"
        assert forward[:first] == [START] * first
    assert {float(value) for value in trained(folder).values()} == {START - RATE * COUNT}


def test_the_backward_is_on_the_true_weights_and_the_forward_was_on_them_before(tmp_path: Path) -> None:
    check(tmp_path)


def test_without_the_prediction_forward_and_backward_differ(tmp_path: Path) -> None:
    def stay(self: StageOptimizer, weights: object, steps: int) -> None:
        """Predict nothing."""

    with patch.object(StageOptimizer, "predict_", stay), pytest.raises(AssertionError):
        check(tmp_path)


def test_one_step_too_far_is_seen(tmp_path: Path) -> None:
    """S = K − i, as in the authors' public code."""
    right = VersionTable.forward_steps_ahead

    def too_far(self: VersionTable, p: int, *, start: int = 0) -> int:
        return right(self, p, start=start) + 1

    with patch.object(VersionTable, "forward_steps_ahead", too_far), pytest.raises(AssertionError):
        check(tmp_path)


def test_backward_on_the_predicted_weights_is_seen(tmp_path: Path) -> None:
    with (
        patch("hetpipe.pipeline.segment_run.Remapping", lambda _: None),
        pytest.raises((AssertionError, CallableError)),
    ):
        check(tmp_path)
