"""The shipped metrics, minibatch by minibatch against the whole."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce
from operator import add
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional

from hetpipe.job.model import SHIPPED_METRICS
from hetpipe.pipeline import metrics
from hetpipe.pipeline.callables import call_metric
from hetpipe.pipeline.metrics import Ratio, accuracy, f1, f1_binary, next_token_perplexity, perplexity
from hetpipe.values.run import RatioSums


def sums(function: Callable[[Any, Any], Ratio], output: Any, target: Any) -> RatioSums:
    found = call_metric("m", function, output, target)
    assert isinstance(found, RatioSums)
    return found


def test_all_shipped_metrics_are_there_by_name() -> None:
    functions = {
        name
        for name, value in vars(metrics).items()
        if callable(value) and not name.startswith("_") and getattr(value, "__module__", "") == metrics.__name__
    }
    assert functions - {"Ratio"} == set(SHIPPED_METRICS)


def test_accuracy_of_single_labels() -> None:
    scores = torch.tensor([[1.0, 2.0], [3.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
    assert accuracy(scores, torch.tensor([1, 0, 0, 1])).item() == 0.75


def test_accuracy_of_sequences() -> None:
    scores = torch.eye(3).expand(2, 3, 3)
    assert accuracy(scores, torch.tensor([[0, 1, 2], [0, 0, 0]])).item() == pytest.approx(4 / 6)


def test_entries_without_a_target_do_not_count() -> None:
    scores = torch.eye(3).expand(2, 3, 3)
    assert accuracy(scores, torch.tensor([[0, -100, 2], [0, 0, -100]])).item() == 0.75


@pytest.mark.parametrize("output", [SimpleNamespace(logits=torch.eye(3)), {"logits": torch.eye(3)}, torch.eye(3)])
@pytest.mark.parametrize("target", [{"labels": torch.arange(3)}, torch.arange(3)])
def test_what_a_model_returns_and_what_a_sample_holds(output: object, target: object) -> None:
    assert accuracy(output, target).item() == 1.0
    assert sums(f1, output, target).value == 1.0


class TestF1:
    def test_by_hand(self) -> None:
        """Class 0: TP 1, FP 1, FN 1; class 1: TP 1, FN 1; class 2: TP 0, FP 1; class 3 does not occur."""
        scores = functional.one_hot(torch.tensor([0, 0, 1, 2]), 4).float()
        target = torch.tensor([0, 1, 1, 0])
        assert sums(f1, scores, target).value == pytest.approx((2 / 4 + 2 / 3 + 0 / 1) / 3)
        assert sums(f1_binary, scores[:, :2], target).value == pytest.approx(2 / 3)

    @pytest.mark.parametrize("sizes", [(100,), (1,) * 100, (3, 50, 47), (99, 1)])
    def test_minibatches_of_any_sizes_give_the_value_of_the_whole(self, sizes: tuple[int, ...]) -> None:
        generator = torch.Generator().manual_seed(1)
        scores, target = torch.randn(100, 5, generator=generator), torch.randint(0, 5, (100,), generator=generator)
        parts = zip(torch.split(scores, list(sizes)), torch.split(target, list(sizes)), strict=True)
        found = reduce(add, [sums(f1, *part) for part in parts])
        predicted = scores.argmax(-1)
        expected = []
        for label in range(5):
            hits = int(((predicted == label) & (target == label)).sum())
            expected.append(2 * hits / int((predicted == label).sum() + (target == label).sum()))
        assert found.value == pytest.approx(sum(expected) / 5, rel=1e-15)

    def test_nothing_to_judge(self) -> None:
        found = sums(f1_binary, torch.tensor([[1.0, 0.0]]), torch.tensor([0]))
        assert math.isnan(found.value)

    def test_three_classes_are_not_two(self) -> None:
        with pytest.raises(ValueError, match="f1_binary takes scores of 2 classes, not of 3; use f1"):
            f1_binary(torch.eye(3), torch.arange(3))


class TestPerplexity:
    @pytest.mark.parametrize("sizes", [(12,), (1,) * 12, (5, 7)])
    def test_sums_first_then_the_quotient(self, sizes: tuple[int, ...]) -> None:
        generator = torch.Generator().manual_seed(1)
        scores, target = torch.randn(12, 6, 9, generator=generator), torch.randint(0, 9, (12, 6), generator=generator)
        for row in range(12):  # of another length each
            target[row, 1 + row // 2 :] = -100
        parts = list(zip(torch.split(scores, list(sizes)), torch.split(target, list(sizes)), strict=True))
        found = reduce(add, [sums(perplexity, *part) for part in parts])
        expected = functional.cross_entropy(scores.flatten(0, 1).double(), target.flatten()).exp()
        assert found.value == pytest.approx(expected.item(), rel=1e-6)
        found = reduce(add, [sums(next_token_perplexity, *part) for part in parts])
        shifted = functional.cross_entropy(scores[:, :-1].flatten(0, 1).double(), target[:, 1:].flatten()).exp()
        assert found.value == pytest.approx(shifted.item(), rel=1e-6)

    def test_nothing_to_judge_and_nothing_finite(self) -> None:
        assert math.isnan(sums(perplexity, torch.zeros(2, 3), torch.tensor([-100, -100])).value)
        assert sums(perplexity, torch.tensor([[0.0, 5000.0]]), torch.tensor([0])).value == math.inf


@pytest.mark.parametrize("function", [accuracy, f1, f1_binary, perplexity, next_token_perplexity])
def test_shapes_that_do_not_fit(function: Callable[[Any, Any], object]) -> None:
    with pytest.raises(ValueError, match=r"not \[2, 3\] and \[3\]; move the classes to the last dimension"):
        function(torch.zeros(2, 3), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"the class indices are of type NoneType; name a metric of yours"):
        function(torch.zeros(2, 3), {"input_ids": torch.zeros(2)})
    with pytest.raises(ValueError, match=r"the scores are of type list; name a metric of yours"):
        function([1.0], torch.zeros(1))
