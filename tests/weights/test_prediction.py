"""Predicted weights are those of the papers' equations, and those that torch arrives at where they can be known."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from hetpipe.errors import JobError
from hetpipe.job.file import LrScheduleSpec, OptimizerSpec
from hetpipe.values.policies import WEIGHT_POLICIES
from hetpipe.weights.flat import FlatBuffer, FlatLayout
from hetpipe.weights.optimizer import StageOptimizer
from hetpipe.weights.prediction import RULES, check_predictable

CPU = torch.device("cpu")
LAYOUT = FlatLayout([("w", (3,), "float64"), ("b", (2,), "float64")])
WEIGHTS = {"w": [1.0, -2.0, 0.5], "b": [4.0, -0.25]}
LR = 0.125


class Stage:
    """Weights that an optimizer steps on, and predicts from."""

    def __init__(self, name: str, schedule: LrScheduleSpec | None = None, **arguments: Any) -> None:
        include_decay = arguments.pop("include_decay", True)
        spec = OptimizerSpec.model_validate({"name": name, "lr": LR, **arguments})
        self.buffer = buffer_of(WEIGHTS)
        self.optimizer = StageOptimizer(spec, self.buffer, schedule, predicts=True, include_decay=include_decay)

    def step(self, gradients: Mapping[str, list[float] | None]) -> None:
        self.optimizer.step({key: None if g is None else tensor(g) for key, g in gradients.items()}, None)

    def ahead(self, steps: int) -> dict[str, list[float]]:
        predicted = FlatBuffer(LAYOUT, CPU).copy_(self.buffer)
        before = self.buffer.data.clone()
        self.optimizer.predict_(predicted, steps)
        assert torch.equal(self.buffer.data, before), "a prediction moves the copy alone"
        return numbers(predicted)

    def now(self) -> dict[str, list[float]]:
        return numbers(self.buffer)


def tensor(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def buffer_of(values: Mapping[str, list[float]]) -> FlatBuffer:
    buffer = FlatBuffer(LAYOUT, CPU)
    for key, view in buffer.views.items():
        view.copy_(tensor(values[key]))
    return buffer


def numbers(buffer: FlatBuffer) -> dict[str, list[float]]:
    return {key: view.tolist() for key, view in buffer.views.items()}


#: Three gradients of `w`; `b` gets the last two entries of each.
GRADIENTS = [[1.0, -0.5, 2.0], [0.25, 1.0, -1.0], [-2.0, 0.5, 0.75]]


def given(gradient: list[float]) -> dict[str, list[float]]:
    return {"w": gradient, "b": gradient[1:]}


# -- by hand: one number at a time, nothing of torch -----------------------------------------------------------------

Arguments = dict[str, Any]
#: (gradients as the optimizer minimizes them, arguments) → Δ.
ByHand = Callable[[list[float], Arguments], float]


def momentum_by_hand(gradients: list[float], arguments: Arguments) -> float:
    mu: float = arguments.get("momentum", 0.0)
    tau: float = arguments.get("dampening", 0.0)
    velocity = gradients[0]
    for g in gradients[1:]:
        velocity = mu * velocity + (1 - tau) * g
    if arguments.get("nesterov"):
        return gradients[-1] + mu * velocity
    return velocity if mu else gradients[-1]


def adam_by_hand(gradients: list[float], arguments: Arguments) -> float:
    betas: tuple[float, float] = arguments.get("betas", (0.9, 0.999))
    beta1, beta2 = betas
    eps: float = arguments.get("eps", 1e-8)
    m = v = largest = 0.0
    for g in gradients:
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g * g
        largest = max(largest, v)
    t = len(gradients)
    second = largest if arguments.get("amsgrad") else v
    return (m / (1 - beta1**t)) / (math.sqrt(second / (1 - beta2**t)) + eps)


def rmsprop_by_hand(gradients: list[float], arguments: Arguments) -> float:
    alpha: float = arguments.get("alpha", 0.99)
    mu: float = arguments.get("momentum", 0.0)
    eps: float = arguments.get("eps", 1e-8)
    square = mean = velocity = scaled = 0.0
    for g in gradients:
        square = alpha * square + (1 - alpha) * g * g
        mean = alpha * mean + (1 - alpha) * g
        centered = square - mean * mean if arguments.get("centered") else square
        scaled = g / (math.sqrt(centered) + eps)
        velocity = mu * velocity + scaled
    return velocity if mu else scaled


CASES: list[tuple[str, Arguments, ByHand]] = [
    ("SGD", {}, momentum_by_hand),
    ("SGD", {"momentum": 0.9}, momentum_by_hand),
    ("SGD", {"momentum": 0.9, "dampening": 0.25}, momentum_by_hand),
    ("SGD", {"momentum": 0.9, "nesterov": True}, momentum_by_hand),
    ("Adam", {}, adam_by_hand),
    ("Adam", {"betas": (0.5, 0.75), "eps": 0.125}, adam_by_hand),
    ("Adam", {"betas": (0.5, 0.25), "amsgrad": True}, adam_by_hand),
    ("AdamW", {"weight_decay": 0.0, "betas": (0.8, 0.9)}, adam_by_hand),
    ("RMSprop", {}, rmsprop_by_hand),
    ("RMSprop", {"alpha": 0.5, "eps": 0.25, "centered": True}, rmsprop_by_hand),
    ("RMSprop", {"alpha": 0.75, "momentum": 0.5}, rmsprop_by_hand),
    ("RMSprop", {"alpha": 0.75, "momentum": 0.5, "centered": True}, rmsprop_by_hand),
]


def name_case(case: object) -> str | None:
    return "-".join(f"{key}={value}" for key, value in case.items()) if isinstance(case, dict) else None


@pytest.mark.parametrize("maximize", [False, True], ids=["minimize", "maximize"])
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize(("name", "arguments", "by_hand"), CASES, ids=name_case)
def test_every_rule_is_the_papers(
    *, name: str, arguments: Arguments, by_hand: ByHand, steps: int, maximize: bool
) -> None:
    """Fails if the prediction is removed, if it goes s + 1 updates ahead, or if a rule is wrong."""
    stage = Stage(name, **arguments, maximize=maximize)
    sign = -1.0 if maximize else 1.0
    for count, gradient in enumerate(GRADIENTS, start=1):
        stage.step(given(gradient))
        for key, weights in stage.now().items():
            seen = [[sign * x for x in given(g)[key]] for g in GRADIENTS[:count]]
            expected = [
                w - LR * steps * by_hand(list(gradients), arguments)
                for w, gradients in zip(weights, zip(*seen, strict=True), strict=True)
            ]
            assert stage.ahead(steps)[key] == pytest.approx(expected, rel=1e-12)
            assert stage.ahead(steps)[key] != pytest.approx(weights, rel=1e-3)


@pytest.mark.parametrize("name", ["SGD", "RMSprop"])
@pytest.mark.parametrize("maximize", [False, True], ids=["minimize", "maximize"])
def test_a_coupled_decay_is_in_the_last_gradient(*, name: str, maximize: bool) -> None:
    stage = Stage(name, weight_decay=0.5, maximize=maximize)
    before = stage.now()
    stage.step(given(GRADIENTS[0]))

    for key, weights in stage.now().items():
        pairs = zip(given(GRADIENTS[0])[key], before[key], strict=True)
        direction = [(-g if maximize else g) + 0.5 * w for g, w in pairs]
        # RMSprop divides by the root of what it saw of it, a hundredth.
        change = [math.copysign(10.0, d) for d in direction] if name == "RMSprop" else direction
        expected = [w - LR * 2 * c for w, c in zip(weights, change, strict=True)]
        assert stage.ahead(2)[key] == pytest.approx(expected, rel=1e-6)


# -- what torch arrives at -------------------------------------------------------------------------------------------

ONES = {"w": [1.0, 1.0, 1.0], "b": [1.0, 1.0]}
#: Optimizer, arguments, and a state with which equal gradients make equal updates.
STEADY: list[tuple[str, Arguments, dict[str, float]]] = [
    ("SGD", {}, {}),
    ("SGD", {"momentum": 0.5, "dampening": 0.5}, {}),
    ("SGD", {"momentum": 0.5}, {"momentum_buffer": 2.0}),
    ("SGD", {"momentum": 0.5, "nesterov": True}, {"momentum_buffer": 2.0}),
    ("SGD", {"momentum": 0.5, "nesterov": True, "foreach": True}, {"momentum_buffer": 2.0}),
    ("SGD", {"momentum": 0.5, "dampening": 0.5, "maximize": True}, {}),
    ("Adam", {}, {}),
    ("Adam", {"amsgrad": True, "fused": True}, {}),
    ("Adam", {"eps": 0.5, "foreach": True}, {}),
    ("RMSprop", {}, {"square_avg": 1.0}),
    ("RMSprop", {"momentum": 0.5, "eps": 0.25}, {"square_avg": 1.0, "momentum_buffer": 1.6}),
]


@pytest.mark.parametrize(("name", "arguments", "state"), STEADY, ids=name_case)
def test_predicted_weights_are_the_coming_ones_where_updates_repeat(
    name: str, arguments: Arguments, state: dict[str, float]
) -> None:
    stage = Stage(name, **arguments)
    stage.step(ONES)
    kept = stage.optimizer.state()
    for key, values in state.items():
        for entries in kept.values():
            value = entries[key]
            assert isinstance(value, Tensor)
            value.fill_(values)
    stage.step(ONES)

    expected = [stage.ahead(steps) for steps in range(4)]
    for ahead in expected:
        now = stage.now()
        for key in WEIGHTS:
            assert ahead[key] == pytest.approx(now[key], rel=1e-12)
        stage.step(ONES)


def test_decay_of_adamw_is_predicted() -> None:
    """The next update with the same gradient is known to the last digit only with λ·W in it: fails if λ is dropped."""
    stage = Stage("AdamW", weight_decay=0.5)
    stage.step(ONES)
    stage.step(ONES)
    ahead = stage.ahead(1)
    stage.step(ONES)

    for key, weights in stage.now().items():
        assert ahead[key] == pytest.approx(weights, rel=1e-9)


@pytest.mark.parametrize(
    ("name", "arguments", "has_own_term"),
    [
        ("AdamW", {"weight_decay": 0.5}, True),
        ("AdamW", {"weight_decay": 0.5, "maximize": True}, True),
        ("AdamW", {"weight_decay": 0.5, "include_decay": False}, False),
        ("Adam", {"weight_decay": 0.5, "decoupled_weight_decay": True}, True),
        ("Adam", {"weight_decay": 0.5, "decoupled_weight_decay": True, "include_decay": False}, False),
        ("Adam", {"weight_decay": 0.5}, False),
    ],
    ids=name_case,
)
def test_only_a_decoupled_decay_is_a_term_of_its_own(*, name: str, arguments: Arguments, has_own_term: bool) -> None:
    """W − lr·s·(Δ + λ·W), and W − lr·s·Δ as in Table I where the job says so; decay pulls towards zero either way."""
    stage = Stage(name, **arguments)
    # Also with a coupled decay in it, such a gradient is positive, and Adam's first update is as long as the rate.
    stage.step({"w": [2.0, 2.0, 2.0], "b": None})
    change = -1.0 if arguments.get("maximize") else 1.0
    expected = [w - LR * 3 * (change + (0.5 * w if has_own_term else 0.0)) for w in stage.now()["w"]]

    assert stage.ahead(3)["w"] == pytest.approx(expected, abs=1e-7)


def test_the_rate_is_that_of_the_next_update() -> None:
    schedule = LrScheduleSpec.model_validate({"name": "StepLR", "step_size": 2, "gamma": 0.5})
    stage = Stage("SGD", schedule, groups=({"parameters": ("b",), "lr": 1.0},))
    stage.step(ONES)
    stage.step(ONES)

    ahead, now = stage.ahead(1), stage.now()
    assert [a - n for a, n in zip(ahead["w"], now["w"], strict=True)] == [-LR / 2] * 3
    assert [a - n for a, n in zip(ahead["b"], now["b"], strict=True)] == [-0.5] * 2


@pytest.mark.parametrize("name", sorted(RULES))
def test_nothing_is_predicted_without_steps_or_updates(name: str) -> None:
    stage = Stage(name)
    assert stage.ahead(3) == WEIGHTS
    stage.step({"w": [1.0, 1.0, 1.0], "b": None})
    assert stage.ahead(3)["b"] == WEIGHTS["b"]
    assert stage.ahead(3)["w"] != stage.now()["w"]
    assert stage.ahead(0) == stage.now()


def test_an_unknown_optimizer_is_told_the_known_ones() -> None:
    for weights in WEIGHT_POLICIES:
        check_predictable(torch.optim.AdamW, "AdamW", weights)
    check_predictable(torch.optim.Adagrad, "Adagrad", "stash")
    with pytest.raises(JobError) as caught:
        check_predictable(torch.optim.Adagrad, "Adagrad", "predict")
    assert str(caught.value).startswith("optimizer.name: is Adagrad, but update rules exist only for SGD, ")
    assert "one function in hetpipe/weights/prediction.py" in str(caught.value)
    with pytest.raises(JobError, match=r"is Adagrad"):
        Stage("Adagrad")
