"""What cannot make updates is refused before a stage starts, not in every stage."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hetpipe.errors import CallableError, JobError
from hetpipe.job.file import Job, LrScheduleSpec, OptimizerSpec
from hetpipe.pipeline.optimizer_choice import (
    check_groups,
    check_lr_schedule,
    check_optimization,
    check_optimizer_arguments,
)


def spec(name: str, *groups: dict[str, object], **arguments: object) -> OptimizerSpec:
    """An optimizer section; each group that names no parameters is of the biases."""
    sections = tuple({"parameters": ("*.bias",), **group} for group in groups)
    return OptimizerSpec.model_validate({"name": name, **arguments, "groups": sections})


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
    assert check_optimizer_arguments(spec(name, **arguments)) is getattr(torch.optim, name)


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
        ("SGD", {"lr": -1.0}, ("optimizer: SGD rejects its arguments: Invalid learning rate: -1.0",)),
        ("SGD", {"nesterov": True}, ("optimizer: SGD rejects its arguments: Nesterov momentum requires",)),
        ("Adam", {"betas": 0.9}, ("optimizer: Adam rejects its arguments: ",)),
        ("Adam", {"lr": "fast"}, ("optimizer: Adam rejects its arguments: ",)),
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


@pytest.mark.parametrize(
    ("optimizer", "problems"),
    [
        (spec("SGD", {"lr": 0.2}, {"momentum": 0.9, "nesterov": True}, lr=0.1), ()),
        (spec("AdamW", {"betas": (0.5, 0.9), "foreach": True}), ()),
        (
            spec("SGD", {"momentm": 0.9}, {"params": 3}, zebra=1),
            (
                "optimizer.zebra: SGD has no such argument; use ",
                "optimizer.groups[0].momentm: SGD has no such argument; did you mean `momentum`?",
                "optimizer.groups[1].params: SGD has no such argument; ",
            ),
        ),
        (
            spec("Adam", {"capturable": True}),
            ("optimizer.groups[0].capturable: is not supported: it is for CUDA graphs",),
        ),
        (
            spec("SGD", {"lr": 0.2}, {"lr": -0.2, "momentum": 0.5, "weight_decay": -1.0}),
            (
                "optimizer.groups[1].lr: SGD rejects it: Invalid learning rate: -0.2",
                "optimizer.groups[1].weight_decay: SGD rejects it: Invalid weight_decay value: -1.0",
            ),
        ),
        (
            spec("SGD", {"nesterov": True}, momentum=0.0),
            ("optimizer.groups[0].nesterov: SGD rejects it: Nesterov momentum requires a momentum and zero",),
        ),
        (
            spec("SGD", {"momentum": 0.0, "dampening": 0.5}, {"dampening": 0.5}, momentum=0.9, nesterov=True),
            (
                "optimizer.groups[0].momentum: SGD rejects it: Nesterov momentum",
                "optimizer.groups[0].dampening: SGD rejects it: Nesterov momentum",
                "optimizer.groups[1].dampening: SGD rejects it: Nesterov momentum",
            ),
        ),
        (
            spec("Adam", {"fused": True, "foreach": True}),
            ("optimizer.groups[0]: Adam rejects its arguments: `fused` and `foreach` cannot be `True` together.",),
        ),
    ],
)
def test_arguments_of_groups(optimizer: OptimizerSpec, problems: tuple[str, ...]) -> None:
    if not problems:
        check_optimizer_arguments(optimizer)
        return
    with pytest.raises(JobError) as caught:
        check_optimizer_arguments(optimizer)
    assert len(caught.value.problems) == len(problems)
    for found, expected in zip(caught.value.problems, problems, strict=True):
        assert found.startswith(expected)


NAMES = ("0.weight", "0.bias", "1.weight", "1.bias", "norm.weight")


@pytest.mark.parametrize(
    ("patterns", "problems"),
    [
        ([("*.bias", "norm.*")], ()),
        ([("*.bias",), ("*",)], ()),
        (
            [("*.bais", "*.bias"), ("head.*",)],
            (
                "optimizer.groups[0].parameters: no parameter matches '*.bais'; there are 0.bias, 1.bias …",
                "optimizer.groups[1].parameters: no parameter matches 'head.*'; there are 0.bias, 0.weight, 1.weight …",
            ),
        ),
        (
            [("*",), ("*.bias",)],
            ("optimizer.groups[1].parameters: every parameter that matches belongs to an earlier group, ",),
        ),
    ],
    ids=["two patterns", "the rest", "unknown", "in the shade"],
)
def test_groups_have_parameters(patterns: list[tuple[str, ...]], problems: tuple[str, ...]) -> None:
    optimizer = spec("SGD", *({"parameters": given, "lr": 0.5} for given in patterns))
    if not problems:
        check_groups(optimizer, NAMES)
        return
    with pytest.raises(JobError) as caught:
        check_groups(optimizer, NAMES)
    assert len(caught.value.problems) == len(problems)
    for found, expected in zip(caught.value.problems, problems, strict=True):
        assert found.startswith(expected)


def test_a_schedule_finds_the_users_functions(tmp_path: Path) -> None:
    (tmp_path / "rates_of_this_test.py").write_text("def halved(update):\n    return 0.5 ** update\n")

    check_lr_schedule(schedule("LambdaLR", lr_lambda="rates_of_this_test:halved"), spec("SGD"), tmp_path)
    with pytest.raises(CallableError, match=r"^lr_schedule\.lr_lambda: `rates_of_this_test` has no `halve`; did you"):
        check_lr_schedule(schedule("LambdaLR", lr_lambda="rates_of_this_test:halve"), spec("SGD"), tmp_path)


def test_a_schedule_is_tried(tmp_path: Path) -> None:
    with pytest.raises(
        JobError, match=r"^lr_schedule\.step_size: StepLR has no rate after 1 update: ZeroDivisionError"
    ):
        check_lr_schedule(schedule("StepLR", step_size=0), spec("SGD"), tmp_path)
    with pytest.raises(
        JobError, match=r"^lr_schedule: CyclicLR rejects its arguments: optimizer must support momentum"
    ):
        check_lr_schedule(schedule("CyclicLR", base_lr=0.1, max_lr=0.2), spec("Adagrad"), tmp_path)


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({}, None),
        ({"lr_schedule": {"name": "StepLR", "step_size": 3}}, None),
        ({"optimizer": {"name": "sgd"}}, "optimizer.name: torch.optim has no 'sgd'; did you mean `SGD`?"),
        ({"optimizer": {"name": "Adagrad"}}, None),
        ({"optimizer": {"name": "Adagrad"}, "weights": "predict"}, "optimizer.name: is Adagrad, but update rules "),
        ({"lr_schedule": {"name": "StepLR"}}, "lr_schedule.step_size: is missing; StepLR has no default for it"),
    ],
    ids=["plain", "scheduled", "unknown", "unpredicted", "unpredictable", "unscheduled"],
)
def test_all_of_a_job(keys: dict[str, object], problem: str | None, tmp_path: Path) -> None:
    base = {
        "model": "model:build",
        "loss": "model:loss",
        "data": {"train": "model:train_data"},
        "optimizer": {"name": "SGD", "lr": 0.1},
        "epochs": 1,
        "batch_size": 4,
    }
    job = Job.model_validate({**base, **keys})
    if problem is None:
        check_optimization(job, tmp_path)
        return
    with pytest.raises(JobError) as caught:
        check_optimization(job, tmp_path)
    assert caught.value.problems[0].startswith(problem)


def schedule(name: str, **arguments: object) -> LrScheduleSpec:
    """A schedule's section."""
    return LrScheduleSpec.model_validate({"name": name, **arguments})
