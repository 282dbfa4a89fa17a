"""Metrics."""

from __future__ import annotations

import pytest
import torch

from hetpipe.pipeline.metrics import accuracy


def test_accuracy_of_single_labels() -> None:
    scores = torch.tensor([[1.0, 2.0], [3.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
    assert accuracy(scores, torch.tensor([1, 0, 0, 1])).item() == 0.75


def test_accuracy_of_sequences() -> None:
    scores = torch.eye(3).expand(2, 3, 3)
    assert accuracy(scores, torch.tensor([[0, 1, 2], [0, 0, 0]])).item() == pytest.approx(4 / 6)


def test_shapes_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match=r"not \[2, 3\] and \[3\]; move the classes to the last dimension"):
        accuracy(torch.zeros(2, 3), torch.zeros(3, dtype=torch.int64))
