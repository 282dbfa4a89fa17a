"""The optimizer is refused before a stage starts, not in every stage."""

from __future__ import annotations

import pytest
import torch

from hetpipe.errors import JobError
from hetpipe.pipeline.optimizer_choice import build_optimizer_class, check_optimizer_arguments
from hetpipe.spec.job import OptimizerSpec


def spec(name: str, **arguments: object) -> OptimizerSpec:
    """An optimizer section."""
    return OptimizerSpec.model_validate({"name": name, **arguments})


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
        ("AdamW", {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.01}),
        ("Muon", {"lr": 0.02}),
        ("RMSprop", {}),
    ],
)
def test_good(name: str, arguments: dict[str, object]) -> None:
    assert build_optimizer_class(spec(name)) is getattr(torch.optim, name)
    check_optimizer_arguments(spec(name, **arguments))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("sgd", "optimizer.name: torch.optim has no 'sgd'; did you mean `SGD`?"),
        ("Adamw", "optimizer.name: torch.optim has no 'Adamw'; did you mean `AdamW`?"),
        ("Optimizer", "optimizer.name: torch.optim has no 'Optimizer'; use ASGD, Adadelta, "),
        ("lr_scheduler", "optimizer.name: torch.optim has no 'lr_scheduler'; use ASGD, "),
        ("LBFGS", "optimizer.name: LBFGS is not supported: it computes the loss several times per step"),
        ("SparseAdam", "optimizer.name: SparseAdam is not supported: it needs sparse gradients"),
    ],
)
def test_bad_names(name: str, message: str) -> None:
    with pytest.raises(JobError) as caught:
        check_optimizer_arguments(spec(name))
    assert caught.value.problems[0].startswith(message)


@pytest.mark.parametrize(
    ("name", "arguments", "problems"),
    [
        (
            "SGD",
            {"momentm": 0.9, "zebra": 1},
            (
                "optimizer.momentm: SGD has no such argument; did you mean `momentum`?",
                "optimizer.zebra: SGD has no such argument; use dampening, differentiable, ",
            ),
        ),
        ("SGD", {"params": 1}, ("optimizer.params: SGD has no such argument",)),
        ("SGD", {"lr": -1.0}, ("optimizer: SGD refuses its arguments: Invalid learning rate: -1.0",)),
        ("SGD", {"nesterov": True}, ("optimizer: SGD refuses its arguments: Nesterov momentum requires",)),
        ("Adam", {"betas": 0.9}, ("optimizer: Adam refuses its arguments: ",)),
        ("Adam", {"lr": "fast"}, ("optimizer: Adam refuses its arguments: ",)),
        ("SGD", {"differentiable": True}, ("optimizer.differentiable: is not supported: nothing here differentiates",)),
        ("Adam", {"capturable": True}, ("optimizer.capturable: is not supported: it is for CUDA graphs",)),
    ],
)
def test_bad_arguments(name: str, arguments: dict[str, object], problems: tuple[str, ...]) -> None:
    with pytest.raises(JobError) as caught:
        check_optimizer_arguments(spec(name, **arguments))
    assert len(caught.value.problems) == len(problems)
    for found, expected in zip(caught.value.problems, problems, strict=True):
        assert found.startswith(expected)
