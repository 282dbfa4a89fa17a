"""Any optimizer, stepping on a running sum, does what it does on the weights themselves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hetpipe.profiler.live_bytes import LiveBytes
from hetpipe.weights.flat import FlatBuffer, FlatLayout
from hetpipe.weights.optimizer import Decay, WaveOptimizer, decay_of

CPU = torch.device("cpu")
LAYOUT = FlatLayout([("matrix", (4, 3), "float64"), ("bias", (3,), "float64")])

CASES: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.05}),
    ("SGD", {"lr": 0.01, "weight_decay": 0.3, "maximize": True}),
    ("Adam", {"lr": 0.02}),
    ("Adam", {"lr": 0.02, "weight_decay": 0.1, "amsgrad": True}),
    ("Adam", {"lr": 0.02, "weight_decay": 0.1, "maximize": True}),
    ("Adam", {"lr": 0.02, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    ("AdamW", {"lr": 0.5}),
    ("AdamW", {"lr": 0.02, "weight_decay": 0.2, "maximize": True}),
    ("RMSprop", {"lr": 0.02, "momentum": 0.5, "centered": True, "weight_decay": 0.1}),
    ("Adagrad", {"lr": 0.1, "weight_decay": 0.1, "lr_decay": 0.01}),
    ("Adadelta", {"weight_decay": 0.1}),
    ("Adamax", {"lr": 0.02, "weight_decay": 0.1}),
    ("NAdam", {"lr": 0.02, "weight_decay": 0.1}),
    ("NAdam", {"lr": 0.02, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    ("RAdam", {"lr": 0.02, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    ("Rprop", {"lr": 0.02}),
    ("Adafactor", {"lr": 0.05, "weight_decay": 0.1}),
    ("ASGD", {"lr": 0.1, "weight_decay": 0.1}),
]


def name_case(case: object) -> str | None:
    return "-".join(f"{key}={value}" for key, value in case.items()) if isinstance(case, dict) else None


def first_weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {slot.name: torch.randn(slot.shape, generator=generator, dtype=torch.float64) for slot in LAYOUT.slots}


def test_decay_keeps_no_second_gradient() -> None:
    """The gradients are the step's: each is gone before the next one is added to its decay."""
    num_layers, width = 20, 64
    layout = FlatLayout([(str(layer), (width, width), "float32") for layer in range(num_layers)])
    rho, weights = FlatBuffer(layout, CPU), FlatBuffer(layout, CPU)
    optimizer = WaveOptimizer("SGD", {"lr": 0.1, "weight_decay": 0.1}, rho)
    with LiveBytes() as live:
        gradients: dict[str, Tensor | None] = {name: torch.ones(width, width) for name in weights.views}
        before = live.now_bytes
        optimizer.step(gradients, weights.views)

    assert gradients == {}
    assert live.peak_bytes == before + before // num_layers
    assert live.now_bytes == 0


def gradient_of(weights: Mapping[str, Tensor], step: int) -> dict[str, Tensor | None]:
    """Of a bowl whose centre moves."""
    return {name: (w.detach() - step % 5) * (0.5 + 0.1 * index) for index, (name, w) in enumerate(weights.items())}


def plain_loop(name: str, arguments: Mapping[str, Any], steps: int) -> dict[str, Tensor]:
    """What plain torch does."""
    parameters = {key: nn.Parameter(w) for key, w in first_weights().items()}
    optimizer = getattr(torch.optim, name)(list(parameters.values()), **arguments)
    for step in range(steps):
        for key, gradient in gradient_of(parameters, step).items():
            parameters[key].grad = gradient
        optimizer.step()
    return {key: p.detach() for key, p in parameters.items()}


class Loop:
    """V = 1, N = 1: every step is a wave, w = B + ρ with ρ = 0 before it."""

    def __init__(self, name: str, arguments: Mapping[str, Any]) -> None:
        self.rho = FlatBuffer(LAYOUT, CPU)
        self.anchor = FlatBuffer(LAYOUT, CPU)
        for key, w in first_weights().items():
            self.anchor.views[key].copy_(w)
        self.optimizer = WaveOptimizer(name, arguments, self.rho)
        self.steps = 0

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.optimizer.step(gradient_of(self.anchor.views, self.steps), self.anchor.views)
            self.anchor.add_(self.rho)
            self.rho = FlatBuffer(LAYOUT, CPU)  # another buffer every wave, as in a run
            self.optimizer.rebind(self.rho)
            self.steps += 1


@pytest.mark.parametrize(("name", "arguments"), CASES, ids=name_case)
def test_a_wave_of_one_is_a_plain_step(name: str, arguments: dict[str, Any]) -> None:
    loop = Loop(name, arguments)
    loop.run(25)

    for key, expected in plain_loop(name, arguments, 25).items():
        torch.testing.assert_close(loop.anchor.views[key], expected, rtol=1e-9, atol=1e-10)
        assert not torch.equal(expected, first_weights()[key])


@pytest.mark.parametrize(("name", "arguments"), CASES, ids=name_case)
def test_state_round_trip(name: str, arguments: dict[str, Any]) -> None:
    first = Loop(name, arguments)
    first.run(4)
    second = Loop(name, arguments)
    second.anchor.copy_(first.anchor)
    second.steps = first.steps
    second.optimizer.load_state(
        {
            key: {entry: v.clone() if isinstance(v, Tensor) else v for entry, v in entries.items()}
            for key, entries in first.optimizer.state().items()
        }
    )

    first.run(4)
    second.run(4)

    for key in first.anchor.views:
        assert torch.equal(first.anchor.views[key], second.anchor.views[key])


def test_several_steps_of_a_wave_add_up_in_rho() -> None:
    rho, weights = FlatBuffer(LAYOUT, CPU), first_weights()
    optimizer = WaveOptimizer("SGD", {"lr": 0.5, "weight_decay": 0.1}, rho)
    expected = {key: torch.zeros_like(w) for key, w in weights.items()}
    for step in range(3):
        gradients = gradient_of(weights, step)
        optimizer.step(dict(gradients), weights)
        for key, gradient in gradients.items():
            assert gradient is not None
            expected[key].add_(gradient.add(weights[key], alpha=0.1), alpha=-0.5)

    for key, value in expected.items():
        assert torch.equal(rho.views[key], value)


@pytest.mark.parametrize(("name", "arguments"), CASES, ids=name_case)
def test_a_parameter_without_gradient_is_left_alone(name: str, arguments: dict[str, Any]) -> None:
    rho, weights = FlatBuffer(LAYOUT, CPU), first_weights()
    optimizer = WaveOptimizer(name, arguments, rho)
    optimizer.step({"matrix": torch.ones(4, 3, dtype=torch.float64), "bias": None}, weights)

    assert bool(rho.views["matrix"].any())
    assert not bool(rho.views["bias"].any())
    assert torch.equal(weights["bias"], first_weights()["bias"])


@pytest.mark.parametrize(("name", "arguments"), CASES, ids=name_case)
def test_neither_the_weights_nor_the_gradients_nor_the_gaps_are_written(name: str, arguments: dict[str, Any]) -> None:
    rho, weights = FlatBuffer(LAYOUT, CPU), first_weights()
    gradients = gradient_of(weights, 1)
    kept = {key: g.clone() for key, g in gradients.items() if g is not None}
    optimizer = WaveOptimizer(name, arguments, rho)
    for _ in range(3):
        optimizer.step(dict(gradients), weights)

    for key, before in first_weights().items():
        gradient = gradients[key]
        assert gradient is not None
        assert torch.equal(weights[key], before)
        assert torch.equal(gradient, kept[key])
        slot = LAYOUT.slot(key)
        assert not any(rho.memory()[slot.offset + slot.num_bytes : slot.end])


def test_rebinding_leaves_the_old_sum_as_it_was() -> None:
    old, new, weights = FlatBuffer(LAYOUT, CPU), FlatBuffer(LAYOUT, CPU), first_weights()
    optimizer = WaveOptimizer("Adam", {"lr": 0.1}, old)
    optimizer.step(gradient_of(weights, 0), weights)
    before = old.data.clone()
    optimizer.rebind(new)
    optimizer.step(gradient_of(weights, 1), weights)

    assert torch.equal(old.data, before)
    assert bool(new.views["matrix"].any())


def test_a_stage_without_parameters_steps_nothing() -> None:
    optimizer = WaveOptimizer("SGD", {"lr": 0.1}, FlatBuffer(FlatLayout([]), CPU))
    optimizer.step({}, {})
    optimizer.load_state({"w": {"step": 1}})

    assert optimizer.state() == {}


@pytest.mark.parametrize(
    ("name", "arguments", "decay"),
    [
        ("SGD", {}, Decay.COUPLED),
        ("AdamW", {}, Decay.DECOUPLED),
        ("NAdam", {"decoupled_weight_decay": True}, Decay.DECOUPLED),
        ("Adafactor", {}, Decay.OWN),
        ("ASGD", {}, Decay.OWN),
        ("NobodyKnowsThis", {}, Decay.OWN),
    ],
)
def test_how_decay_enters(name: str, arguments: dict[str, Any], decay: Decay) -> None:
    assert decay_of(name, arguments) is decay
