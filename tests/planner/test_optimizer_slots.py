"""The table says what the classes of torch.optim do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hetpipe.planner.optimizer_slots import optimizer_slots


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("SGD", {}),
        ("SGD", {"momentum": 0.9}),
        ("SGD", {"momentum": 0.9, "nesterov": True}),
        ("Adam", {}),
        ("Adam", {"amsgrad": True}),
        ("AdamW", {}),
        ("AdamW", {"amsgrad": True}),
        ("NAdam", {}),
        ("RAdam", {}),
        ("Adamax", {}),
        ("Adadelta", {}),
        ("Adagrad", {}),
        ("ASGD", {}),
        ("RMSprop", {}),
        ("RMSprop", {"momentum": 0.9}),
        ("RMSprop", {"momentum": 0.9, "centered": True}),
        ("Rprop", {}),
        ("Muon", {}),
    ],
)
def test_what_an_optimizer_keeps(name: str, arguments: dict[str, Any]) -> None:
    weights = nn.Parameter(torch.ones(3, 4))
    optimizer = getattr(torch.optim, name)([weights], lr=0.01, **arguments)
    for _ in range(2):
        weights.grad = torch.ones(3, 4)
        optimizer.step()
    kept = [v for v in optimizer.state[weights].values() if isinstance(v, torch.Tensor) and v.shape == weights.shape]
    assert optimizer_slots(name, arguments) == len(kept)


def test_an_unknown_optimizer_is_not_guessed() -> None:
    assert optimizer_slots("LBFGS", {}) is None
