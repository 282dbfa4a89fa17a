"""Schedules move options exactly as they move torch's own optimizers, and as well after a resume."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from torch import nn
from torch.optim import lr_scheduler

from hetpipe.errors import CallableError, JobError
from hetpipe.job.file import LrScheduleSpec, OptimizerSpec
from hetpipe.weights.lr_schedule import GroupOptions

NUM_UPDATES = 25
GROUPS = ({"parameters": ("*.bias",), "lr": 0.5}, {"parameters": ("norm*",), "lr": 0.25})
ADAMW = OptimizerSpec.model_validate({"name": "AdamW", "lr": 0.1, "groups": GROUPS})
SGD = OptimizerSpec.model_validate({"name": "SGD", "lr": 0.1, "momentum": 0.9, "groups": GROUPS})


def spec_of(name: str, **arguments: Any) -> LrScheduleSpec:
    """A schedule's section."""
    return LrScheduleSpec.model_validate({"name": name, **arguments})


def halved(update: int) -> float:
    return 0.5**update


def shrunk(update: int) -> float:
    return 1 / (1 + update)


FUNCTIONS: Mapping[str, Callable[[int], float]] = {"rates:halved": halved, "rates:shrunk": shrunk}


def load(reference: str, *, key: str) -> Callable[..., Any]:
    """Stands in for `pipeline.callables.load_callable`."""
    if reference not in FUNCTIONS:
        raise CallableError(f"{key}: there is no {reference}")
    return FUNCTIONS[reference]


Build = Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler]

#: The section, and what a training loop would write.
CASES: list[tuple[LrScheduleSpec, Build]] = [
    (spec_of("StepLR", step_size=3, gamma=0.7), lambda o: lr_scheduler.StepLR(o, 3, 0.7)),
    (spec_of("MultiStepLR", milestones=(2, 5, 5), gamma=0.3), lambda o: lr_scheduler.MultiStepLR(o, [2, 5, 5], 0.3)),
    (spec_of("ConstantLR"), lr_scheduler.ConstantLR),
    (spec_of("LinearLR", total_iters=7), lambda o: lr_scheduler.LinearLR(o, total_iters=7)),
    (spec_of("ExponentialLR", gamma=0.9), lambda o: lr_scheduler.ExponentialLR(o, 0.9)),
    (spec_of("CosineAnnealingLR", T_max=9), lambda o: lr_scheduler.CosineAnnealingLR(o, 9)),
    (spec_of("PolynomialLR", total_iters=20, power=2), lambda o: lr_scheduler.PolynomialLR(o, 20, 2)),
    (
        spec_of("CosineAnnealingWarmRestarts", T_0=3, T_mult=2),
        lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3, 2),
    ),
    (
        spec_of("CyclicLR", base_lr=0.01, max_lr=(0.1, 0.2, 0.3), step_size_up=4),
        lambda o: lr_scheduler.CyclicLR(o, 0.01, [0.1, 0.2, 0.3], 4),
    ),
    (
        spec_of("CyclicLR", base_lr=0.01, max_lr=0.1, step_size_up=2, scale_fn="rates:shrunk"),
        lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 2, scale_fn=lambda x: shrunk(int(x))),
    ),
    (
        spec_of("OneCycleLR", max_lr=0.3, total_steps=NUM_UPDATES, three_phase=True),
        lambda o: lr_scheduler.OneCycleLR(o, 0.3, NUM_UPDATES, three_phase=True),
    ),
    (spec_of("LambdaLR", lr_lambda="rates:shrunk"), lambda o: lr_scheduler.LambdaLR(o, shrunk)),
    (
        spec_of("LambdaLR", lr_lambda=("rates:shrunk", "rates:halved", "rates:shrunk")),
        lambda o: lr_scheduler.LambdaLR(o, [shrunk, halved, shrunk]),
    ),
    (spec_of("MultiplicativeLR", lr_lambda="rates:halved"), lambda o: lr_scheduler.MultiplicativeLR(o, halved)),
    (
        spec_of(
            "SequentialLR",
            milestones=(4, 9),
            schedulers=(
                {"name": "LinearLR", "start_factor": 0.1, "total_iters": 4},
                {"name": "CosineAnnealingLR", "T_max": 5},
                {"name": "ExponentialLR", "gamma": 0.9},
            ),
        ),
        lambda o: lr_scheduler.SequentialLR(
            o,
            [
                lr_scheduler.LinearLR(o, 0.1, total_iters=4),
                lr_scheduler.CosineAnnealingLR(o, 5),
                lr_scheduler.ExponentialLR(o, 0.9),
            ],
            [4, 9],
        ),
    ),
    (
        spec_of("ChainedScheduler", schedulers=({"name": "ConstantLR"}, {"name": "ExponentialLR", "gamma": 0.9})),
        lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)]),
    ),
    (
        spec_of(
            "ChainedScheduler",
            schedulers=(
                {
                    "name": "SequentialLR",
                    "milestones": (3,),
                    "schedulers": ({"name": "LinearLR"}, {"name": "StepLR", "step_size": 2}),
                },
                {"name": "ExponentialLR", "gamma": 0.9},
            ),
        ),
        lambda o: lr_scheduler.ChainedScheduler(
            [
                lr_scheduler.SequentialLR(o, [lr_scheduler.LinearLR(o), lr_scheduler.StepLR(o, 2)], [3]),
                lr_scheduler.ExponentialLR(o, 0.9),
            ]
        ),
    ),
]
IDS = [f"{index}-{spec.name}" for index, (spec, _) in enumerate(CASES)]


def moved(options: Mapping[str, Any]) -> tuple[Any, ...]:
    """What schedules move."""
    return options["lr"], options.get("momentum"), options.get("betas")


def in_a_training_loop(optimizer: OptimizerSpec, build: Build) -> list[list[tuple[Any, ...]]]:
    """Update → group → what torch's own optimizer is set to."""
    parameters = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
    groups = [
        {"params": [parameters[0]], "lr": 0.5},
        {"params": [parameters[1]], "lr": 0.25},
        {"params": [parameters[2]]},
    ]
    own = getattr(torch.optim, optimizer.name)(groups, **optimizer.arguments)
    scheduler, rates = build(own), []
    for _ in range(NUM_UPDATES):
        rates.append([moved(group) for group in own.param_groups])
        for parameter in parameters:
            parameter.grad = torch.ones(2)
        own.step()
        scheduler.step()
    return rates


def now(options: GroupOptions) -> list[tuple[Any, ...]]:
    return [moved(options.of(group)) for group in range(3)]


@pytest.mark.parametrize("optimizer", [ADAMW, SGD], ids=["AdamW", "SGD"])
@pytest.mark.parametrize(("spec", "build"), CASES, ids=IDS)
def test_the_sequence_is_torchs(optimizer: OptimizerSpec, spec: LrScheduleSpec, build: Build) -> None:
    options = GroupOptions(optimizer, spec, load)
    expected = in_a_training_loop(optimizer, build)
    found = []
    for update in range(NUM_UPDATES):
        assert options.num_updates == update
        found.append(now(options))
        options.advance()

    assert found == expected
    assert any(rates != expected[0] for rates in expected)


@pytest.mark.parametrize(("spec", "build"), CASES, ids=IDS)
def test_resumed_is_uninterrupted(spec: LrScheduleSpec, build: Build) -> None:
    expected = in_a_training_loop(SGD, build)
    options = GroupOptions(SGD, spec, load)
    for update in (11, 11, 17, 0, 4, NUM_UPDATES - 1):
        options.go_to(update)
        assert options.num_updates == update
        assert now(options) == expected[update]


def test_without_a_schedule_nothing_moves() -> None:
    options = GroupOptions(ADAMW)
    before = now(options)
    options.advance()
    options.go_to(1000)

    assert now(options) == before
    assert options.of(-1)["lr"] == 0.1
    assert not options.is_scheduled
    assert options.num_updates == 1000


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        (spec_of("StepLr"), "lr_schedule.name: torch.optim.lr_scheduler has no 'StepLr'; did you mean `StepLR`?"),
        (spec_of("Counter"), "lr_schedule.name: torch.optim.lr_scheduler has no 'Counter'; "),
        (spec_of("_LRScheduler"), "lr_schedule.name: torch.optim.lr_scheduler has no '_LRScheduler'; "),
        (spec_of("ReduceLROnPlateau"), "lr_schedule.name: ReduceLROnPlateau is not supported: it depends on a metric"),
        (spec_of("SWALR"), "lr_schedule.name: SWALR is not supported: it requires averaged weights"),
        (spec_of("LRScheduler"), "lr_schedule.name: LRScheduler is not supported: it is the base of the others"),
        (spec_of("CosineAnnealingLR"), "lr_schedule.T_max: is missing; CosineAnnealingLR has no default for it"),
        (
            spec_of("CosineAnnealingLR", T_mx=3, T_max=4),
            "lr_schedule.T_mx: CosineAnnealingLR has no such argument; did you mean `T_max`?",
        ),
        (spec_of("StepLR", step_size=2, last_epoch=3), "lr_schedule.last_epoch: StepLR has no such argument; use "),
        (
            spec_of("StepLR", step_size=2, schedulers=({"name": "ConstantLR"},)),
            "lr_schedule.schedulers: StepLR has no such argument; use ",
        ),
        (spec_of("SequentialLR", milestones=(2,)), "lr_schedule.schedulers: is missing; SequentialLR has no default"),
        (
            spec_of("LinearLR", start_factor=3.0, total_iters=2),
            "lr_schedule: LinearLR rejects its arguments: Starting multiplicative factor expected to be",
        ),
        (
            spec_of("CosineAnnealingWarmRestarts", T_0=-1, T_mult=2),
            "lr_schedule.T_0: CosineAnnealingWarmRestarts rejects its arguments: Expected positive integer T_0",
        ),
        (
            spec_of("ConstantLR", factor="half"),
            "lr_schedule.factor: ConstantLR rejects its arguments: TypeError: ",
        ),
        (
            spec_of("CyclicLR", base_lr=0.1, max_lr=(0.1, 0.2)),
            "lr_schedule.max_lr: CyclicLR rejects its arguments: max_lr must have the same length as optimizer.param_g",
        ),
        (
            spec_of("SequentialLR", milestones=(3,), schedulers=({"name": "ConstantLR"},)),
            "lr_schedule: SequentialLR rejects its arguments: Sequential Schedulers expects number of schedulers",
        ),
        (
            spec_of(
                "SequentialLR",
                milestones=(3,),
                schedulers=(
                    {"name": "ConstantLR"},
                    {"name": "ChainedScheduler", "schedulers": ({"name": "LinearLR"},)},
                ),
            ),
            "lr_schedule.schedulers[1]: torch cannot start a ChainedScheduler inside a SequentialLR; make ",
        ),
        (
            spec_of("SequentialLR", milestones=(3,), schedulers=({"name": "ConstantLR"}, {"name": "StepLr"})),
            "lr_schedule.schedulers[1].name: torch.optim.lr_scheduler has no 'StepLr'; did you mean `StepLR`?",
        ),
        (
            spec_of(
                "ChainedScheduler",
                schedulers=({"name": "ChainedScheduler", "schedulers": ({"name": "ReduceLROnPlateau"},)},),
            ),
            "lr_schedule.schedulers[0].schedulers[0].name: ReduceLROnPlateau is not supported: ",
        ),
    ],
    ids=lambda case: case.name if isinstance(case, LrScheduleSpec) else "",
)
def test_refused(spec: LrScheduleSpec, problem: str) -> None:
    with pytest.raises(JobError) as caught:
        GroupOptions(ADAMW, spec, load)
    assert len(caught.value.problems) == 1
    assert caught.value.problems[0].startswith(problem)


def test_callables_are_asked_for_by_their_path() -> None:
    inner = spec_of("ChainedScheduler", schedulers=({"name": "LambdaLR", "lr_lambda": ("rates:halved", "rates:no")},))
    with pytest.raises(CallableError, match=r"^lr_schedule\.schedulers\[0\]\.lr_lambda\[1\]: there is no rates:no$"):
        GroupOptions(ADAMW, inner, load)


#: One update after the other; what is over stays as it was for the last one.
ENDING: list[LrScheduleSpec] = [
    spec_of("OneCycleLR", max_lr=0.1, total_steps=5),
    spec_of("ChainedScheduler", schedulers=({"name": "OneCycleLR", "max_lr": 0.1, "epochs": 1, "steps_per_epoch": 5},)),
    spec_of("PolynomialLR", total_iters=4),
    spec_of("LinearLR", total_iters=4),
]


@pytest.mark.parametrize("spec", ENDING, ids=lambda spec: spec.name)
def test_a_schedule_of_a_fixed_number_of_updates_stays_at_its_end(spec: LrScheduleSpec) -> None:
    """Who survives others makes more updates than were planned for it; a newcomer may be told of more."""
    options, resumed, told = GroupOptions(SGD, spec, load), GroupOptions(SGD, spec, load), []
    with capture_logs() as logs:
        for _ in range(12):
            told.append(dict(options.of(-1)))
            options.advance()
    resumed.go_to(11)

    assert len({each["lr"] for each in told[:5]}) == 5
    assert all(each == told[4] for each in told[5:])
    assert resumed.of(-1)["lr"] == told[4]["lr"]
    assert len(logs) == ("OneCycleLR" in repr(spec)), "said once"


@pytest.mark.parametrize(
    ("spec", "updates", "problem"),
    [
        (
            spec_of("SequentialLR", milestones=(9,), schedulers=({"name": "StepLR", "step_size": 0},) * 2),
            0,
            "lr_schedule: SequentialLR has no rate after 1 update: ZeroDivisionError: ",
        ),
        (
            spec_of("LambdaLR", lr_lambda="rates:domain"),
            2,
            "lr_schedule.lr_lambda: LambdaLR has no rate after 3 updates: math domain error",
        ),
    ],
    ids=["inside", "the user's"],
)
def test_a_schedule_that_ends_too_early_says_so(
    spec: LrScheduleSpec, updates: int, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FUNCTIONS, "rates:domain", lambda update: math.sqrt(2 - update))
    options = GroupOptions(SGD, spec, load)
    for _ in range(updates):
        options.advance()
    with pytest.raises(JobError) as caught:
        options.advance()
    assert caught.value.problems[0].startswith(problem)
    assert caught.value.problems[0].endswith("; give it arguments that last for the whole run")
