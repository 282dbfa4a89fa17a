"""Several losses by name: their weighted sum trains, each is told by name (docs/semantics/losses.md, section 3)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from hetpipe.decide.lifecycle.evaluations import whole
from hetpipe.observe.metrics import read_metrics
from hetpipe.values.run import StageEvaluation, StageProgress
from tests import models
from tests.numerics.compare import MOMENTUM, Case, assert_same_bits, run, trained
from tests.reference.executor import evaluate, run_reference

LOSSES: dict[str, Any] = {"main": "tests.models:loss", "aux": {"call": "tests.models:spread", "weight": 0.25}}


def summed(output: Tensor, target: Tensor) -> Tensor:
    return models.loss(output, target) * 1.0 + models.spread(output, target) * 0.25


@pytest.mark.parametrize("mean_over", ["samples", "tokens"])
def test_the_weighted_sum_trains_and_each_is_reported_by_name(mean_over: str, tmp_path: Path) -> None:
    case = Case(
        loss=LOSSES,
        metrics=("accuracy", "f1", "perplexity"),
        data="unlabelled32" if mean_over == "tokens" else "data32",
        mean_over=mean_over,
        evaluate={},
        epochs=1,
        batch_size=4,
        optimizer=MOMENTUM,
    )
    result = run(case, tmp_path, writes_metrics=True)
    reference = run_reference(case.reference(loss=summed))
    assert_same_bits(trained(tmp_path), reference)

    for one in read_metrics(tmp_path):
        if one.wave.loss is not None:
            main, aux = one.wave.losses["main"], one.wave.losses["aux"]
            assert main is not None and aux is not None
            assert one.wave.loss == pytest.approx(main + 0.25 * aux, rel=1e-6)
    told = [report for _, _, report in result.reports if isinstance(report, StageProgress) and report.loss is not None]
    assert told and all(list(report.losses) == list(report.first_losses) == ["main", "aux"] for report in told)

    parts = {vw: report for vw, _, report in result.reports if isinstance(report, StageEvaluation)}
    values = whole(parts).values
    run_of = case.reference(loss=summed)
    functions: dict[str, Any] = {"main": models.loss, "aux": models.spread}
    expected = evaluate(
        run_of, weights=reference.weights, buffers=reference.buffers, dataset=run_of.train, metrics=functions
    ).means
    assert {name: values[name] for name in expected} == expected
    assert list(values) == ["accuracy", "aux", "f1", "loss", "main", "perplexity"]
    scores = torch.func.functional_call(models.mlp32(), dict(reference.weights), (run_of.train.tensors[0],))  # type: ignore[attr-defined]
    targets = run_of.train.tensors[1]  # type: ignore[attr-defined]
    assert values["perplexity"] == pytest.approx(float(functional.cross_entropy(scores, targets).exp()), rel=1e-5)
    assert 0.0 < values["f1"] <= 1.0


@pytest.mark.parametrize("stages", [1, 2])
def test_the_models_own_loss_may_be_one_of_them(stages: int, tmp_path: Path) -> None:
    """Over tokens, with minibatches in which no label counts: there the model's own loss is not a number."""
    losses = {"own": {}, "small": {"call": "tests.models:small_scores", "weight": 0.5}}
    case = Case(
        model="own_loss",
        data="mappings",
        loss=losses,
        mean_over="tokens",
        stages=stages,
        accumulate=2,
        minibatches=24,
        optimizer=MOMENTUM,
    )
    run(case, tmp_path, writes_metrics=True)

    def both(output: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
        return output["loss"] * 1.0 + models.small_scores(output, batch) * 0.5

    def count(batch: dict[str, Tensor]) -> int:
        return models.num_labelled(batch["labels"])

    assert_same_bits(trained(tmp_path), run_reference(case.reference(loss=both, weigh=count)))
    assert {name for one in read_metrics(tmp_path) for name in one.wave.losses} == {"own", "small"}
