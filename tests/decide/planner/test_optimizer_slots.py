"""The table says what the classes of torch.optim do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hetpipe.decide.planner.optimizer_slots import optimizer_slots, slots_of
from hetpipe.job.training import OptimizerSpec
from hetpipe.weights.prediction import RULES


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


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("SGD", {}),
        ("SGD", {"momentum": 0.9}),
        ("SGD", {"momentum": 0.9, "nesterov": True}),
        ("Adam", {}),
        ("AdamW", {}),
        ("RMSprop", {}),
        ("RMSprop", {"momentum": 0.9}),
    ],
)
def test_a_prediction_may_need_the_last_gradient(name: str, arguments: dict[str, Any]) -> None:
    (group,) = getattr(torch.optim, name)([nn.Parameter(torch.ones(2))], lr=0.01, **arguments).param_groups
    optimizer = OptimizerSpec.model_validate({"name": name, **arguments})
    kept = optimizer_slots(name, arguments)
    assert kept is not None
    assert slots_of(optimizer, "stash") == kept
    assert slots_of(optimizer, "predict") == kept + RULES[name].needs_gradient(group)


def test_the_group_that_keeps_most_counts() -> None:
    groups = ({"parameters": ("*.bias",), "momentum": 0.9}, {"parameters": ("*",), "lr": 0.2})
    spec = {"name": "SGD", "lr": 0.1, "groups": groups}
    assert slots_of(OptimizerSpec.model_validate(spec), "wave") == 1
    assert slots_of(OptimizerSpec.model_validate({**spec, "groups": groups[1:]}), "wave") == 0


def test_the_optimizer_of_a_job_may_be_unknown() -> None:
    assert slots_of(OptimizerSpec(name="LBFGS"), "wave") is None
