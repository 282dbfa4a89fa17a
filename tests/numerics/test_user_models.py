"""What users do to their models and data counts in training as in a plain loop, whatever the cut: bit for bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hetpipe.pipeline.seeds import fetch_seed, layer_seed, preserved_generators, seed_generators
from hetpipe.values.ids import LayerIndex, VirtualWorkerIndex
from hetpipe.values.run import StageEvaluation
from tests import models
from tests.numerics.compare import MOMENTUM, ROOT, Case, assert_same_bits, run, trained
from tests.reference.executor import evaluate, run_reference
from tests.reference.worker import read_block
from tests.support.in_process import InProcessRun, run_in_process

#: Name → what differs from `Case`, and the loss.
CASES: dict[str, tuple[dict[str, Any], Any]] = {
    "frozen by eval()": ({"model": "frozen_by_eval"}, models.loss),
    "frozen by train()": ({"model": "frozen_by_train"}, models.loss),
    "hooks on parameters": ({"model": "hooked"}, models.loss),
    "augmentation by random, NumPy and torch": ({"data": "flipped32", "loss": "distance"}, models.distance),
    "layers that draw from random and NumPy": ({"model": "noisy"}, models.loss),
}


def case_of(name: str, **changes: Any) -> Case:
    return Case(**{"data": "data32", "batch_size": 4, "epochs": 2, "wave": 2, **CASES[name][0], **changes})


@pytest.mark.parametrize("name", CASES)
def test_two_stages_train_to_the_bits_of_the_reference(name: str, tmp_path: Path) -> None:
    case = case_of(name)
    run(case, tmp_path)
    assert_same_bits(trained(tmp_path), run_reference(case.reference(loss=CASES[name][1])))


@pytest.mark.parametrize("name", CASES)
def test_the_reference_is_a_plain_loop(name: str) -> None:
    case = case_of(name, workers=1, stages=1, wave=1, kind="none")
    reference = replace(case.reference(loss=CASES[name][1]), stages=None)
    result = run_reference(reference)
    with preserved_generators():
        weights, buffers = plain_loop(name, reference, [record.samples for record in result.minibatches.values()])
    found = {**result.weights, **result.buffers}
    assert not [key for key, value in {**weights, **buffers}.items() if not torch.equal(found[key], value)]


def plain_loop(name: str, reference: Any, blocks: list[tuple[int, ...]]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What anybody would write, but that the seeds are hetpipe's."""
    seed_generators(3)
    model = reference.model()
    if name == "frozen by train()":
        model.train()
    optimizer = torch.optim.SGD(model.parameters(), **{key: value for key, value in MOMENTUM.items() if key != "name"})
    vw = VirtualWorkerIndex(0)
    for p, block in enumerate(blocks, start=1):
        seed_generators(fetch_seed(3, vw, p))  # type: ignore[arg-type]  # a minibatch's number
        (x,), y = read_block(reference.train, block)
        optimizer.zero_grad()
        for index, layer in enumerate(model):
            seed_generators(layer_seed(3, vw, p, LayerIndex(index)))  # type: ignore[arg-type]
            x = layer(x)
        torch.autograd.backward(reference.loss(x, y))
        optimizer.step()
    return dict(model.named_parameters()), dict(model.named_buffers())


def test_frozen_statistics_stay_what_they_were_made_with(tmp_path: Path) -> None:
    for name in ("frozen_by_eval", "frozen_by_train"):
        run(case_of("frozen by eval()", model=name), tmp_path / name)
        found = trained(tmp_path / name)
        assert torch.equal(found["1.running_mean"], torch.linspace(-0.5, 0.5, 7))
        assert int(found["1.num_batches_tracked"]) == 0


def test_an_evaluation_reads_inputs_and_targets_that_belong_together(tmp_path: Path) -> None:
    """Both are flipped or none is, so a model that copies has no loss; and flags are put back after it."""
    case = case_of("augmentation by random, NumPy and torch", model="copies", workers=1, kind="none", epochs=1)
    job = case.job()
    job = job.model_copy(update={"data": job.data.model_copy(update={"eval": "tests.models:flipped32"})})
    result = run_in_process(InProcessRun(job=job, run_dir=tmp_path, import_path=ROOT))
    told = [report for _, _, report in result.reports if isinstance(report, StageEvaluation)]
    assert told and all(report.samples == 46 and report.sums["loss"] == 0.0 for report in told)


def test_the_evaluation_is_the_references(tmp_path: Path) -> None:
    """Also where layers draw in it."""
    case = case_of("layers that draw from random and NumPy", epochs=1)
    job = case.job()
    job = job.model_copy(update={"data": job.data.model_copy(update={"eval": "tests.models:data32"})})
    result = run_in_process(InProcessRun(job=job, run_dir=tmp_path, import_path=ROOT))
    told = [report for _, _, report in result.reports if isinstance(report, StageEvaluation)]
    reference = case.reference()
    final = run_reference(reference)
    expected = evaluate(reference, weights=final.weights, buffers=final.buffers, dataset=reference.train)
    assert sum(report.sums["loss"] for report in told) / 46 == pytest.approx(expected.means["loss"], rel=1e-6)
    assert {report.minibatches for report in told} == {12}, "of all virtual workers together"
