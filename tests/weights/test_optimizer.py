"""Any optimizer, stepping on a flat buffer, does what it does on the weights themselves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR

from hetpipe.checkpoint.format import CheckpointReader
from hetpipe.checkpoint.stage_part import PartWriter, StageContent
from hetpipe.job.file import LrScheduleSpec, OptimizerSpec
from hetpipe.profiler.live_bytes import LiveBytes
from hetpipe.values.ids import Clock, JobId
from hetpipe.weights.flat import FlatBuffer, FlatLayout
from hetpipe.weights.optimizer import Decay, StageOptimizer, decay_of

CPU = torch.device("cpu")
SHAPES: dict[str, tuple[int, ...]] = {"matrix": (4, 3), "bias": (3,), "scale": (2,)}
LAYOUT = FlatLayout([(name, shape, "float64") for name, shape in SHAPES.items()])

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


#: Arguments of the optimizer, which `scale` keeps, and what differs for `bias` and for `matrix`.
GROUPED: list[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    ("SGD", {"lr": 0.1, "weight_decay": 0.05}, {"lr": 0.02}, {"weight_decay": 0.0}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}, {"nesterov": True}, {"momentum": 0.0, "maximize": True}),
    ("Adam", {"lr": 0.02, "weight_decay": 0.1}, {"decoupled_weight_decay": True}, {"betas": (0.8, 0.9)}),
    ("AdamW", {"lr": 0.02}, {"weight_decay": 0.3, "amsgrad": True}, {"weight_decay": 0.0}),
    ("RMSprop", {"lr": 0.02, "weight_decay": 0.1}, {"momentum": 0.5}, {"weight_decay": 0.0, "centered": True}),
    ("Adafactor", {"lr": 0.05, "weight_decay": 0.1}, {"weight_decay": 0.0}, {"lr": 0.2}),
]


def spec_of(name: str, arguments: Mapping[str, Any], **groups: Mapping[str, Any]) -> OptimizerSpec:
    """The optimizer's section, with a group for each pattern."""
    sections = tuple({"parameters": (pattern,), **own} for pattern, own in groups.items())
    return OptimizerSpec.model_validate({"name": name, **arguments, "groups": sections})


def name_case(case: object) -> str | None:
    return "-".join(f"{key}={value}" for key, value in case.items()) if isinstance(case, dict) else None


def initial_weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {slot.name: torch.randn(slot.shape, generator=generator, dtype=torch.float64) for slot in LAYOUT.slots}


def test_decay_keeps_no_second_gradient() -> None:
    """The gradients are the step's: each is gone before the next one is added to its decay."""
    num_layers, width = 20, 64
    layout = FlatLayout([(str(layer), (width, width), "float32") for layer in range(num_layers)])
    rho, weights = FlatBuffer(layout, CPU), FlatBuffer(layout, CPU)
    optimizer = StageOptimizer(spec_of("SGD", {"lr": 0.1, "weight_decay": 0.1}), rho)
    with LiveBytes() as live:
        gradients: dict[str, Tensor | None] = {name: torch.ones(width, width) for name in weights.views}
        before = live.now_bytes
        optimizer.step(gradients, weights.views)

    assert gradients == {}
    assert live.peak_bytes == before + before // num_layers
    assert live.now_bytes == 0


def gradient_of(weights: Mapping[str, Tensor], step: int) -> dict[str, Tensor | None]:
    """Of a bowl whose centre moves."""
    return {name: (w.detach() - step % 5) * (0.5 + 0.1 * len(name)) for name, w in weights.items()}


def plain_loop(
    name: str,
    arguments: Mapping[str, Any],
    steps: int,
    schedule: Callable[[torch.optim.Optimizer], LRScheduler] | None = None,
    **groups: Mapping[str, Any],
) -> dict[str, Tensor]:
    """What plain torch does, with arguments of their own for the parameters in `groups`."""
    parameters = {key: nn.Parameter(w) for key, w in initial_weights().items()}
    sections = [{"params": [parameter], **groups.get(key, {})} for key, parameter in parameters.items()]
    optimizer = getattr(torch.optim, name)(sections, **arguments)
    scheduler = None if schedule is None else schedule(optimizer)
    for step in range(steps):
        for key, gradient in gradient_of(parameters, step).items():
            parameters[key].grad = gradient
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return {key: p.detach() for key, p in parameters.items()}


class Loop:
    """V = 1, N = 1: every step is a wave, w = B + ρ with ρ = 0 before it."""

    def __init__(self, name: str, arguments: Mapping[str, Any]) -> None:
        self.rho = FlatBuffer(LAYOUT, CPU)
        self.anchor = FlatBuffer(LAYOUT, CPU)
        for key, w in initial_weights().items():
            self.anchor.views[key].copy_(w)
        self.optimizer = StageOptimizer(spec_of(name, arguments), self.rho)
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
        assert not torch.equal(expected, initial_weights()[key])


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
    rho, weights = FlatBuffer(LAYOUT, CPU), initial_weights()
    optimizer = StageOptimizer(spec_of("SGD", {"lr": 0.5, "weight_decay": 0.1}), rho)
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
    rho, weights = FlatBuffer(LAYOUT, CPU), initial_weights()
    optimizer = StageOptimizer(spec_of(name, arguments), rho)
    optimizer.step({"matrix": torch.ones(4, 3, dtype=torch.float64), "bias": None}, weights)

    assert bool(rho.views["matrix"].any())
    assert not bool(rho.views["bias"].any())
    assert torch.equal(weights["bias"], initial_weights()["bias"])


@pytest.mark.parametrize(("name", "arguments"), CASES, ids=name_case)
def test_neither_the_weights_nor_the_gradients_nor_the_gaps_are_written(name: str, arguments: dict[str, Any]) -> None:
    rho, weights = FlatBuffer(LAYOUT, CPU), initial_weights()
    gradients = gradient_of(weights, 1)
    kept = {key: g.clone() for key, g in gradients.items() if g is not None}
    optimizer = StageOptimizer(spec_of(name, arguments), rho)
    for _ in range(3):
        optimizer.step(dict(gradients), weights)

    for key, before in initial_weights().items():
        gradient = gradients[key]
        assert gradient is not None
        assert torch.equal(weights[key], before)
        assert torch.equal(gradient, kept[key])
        slot = LAYOUT.slot(key)
        assert not any(rho.memory()[slot.offset + slot.num_bytes : slot.end])


def test_rebinding_leaves_the_old_sum_as_it_was() -> None:
    old, new, weights = FlatBuffer(LAYOUT, CPU), FlatBuffer(LAYOUT, CPU), initial_weights()
    optimizer = StageOptimizer(spec_of("Adam", {"lr": 0.1}), old)
    optimizer.step(gradient_of(weights, 0), weights)
    before = old.data.clone()
    optimizer.rebind(new)
    optimizer.step(gradient_of(weights, 1), weights)

    assert torch.equal(old.data, before)
    assert bool(new.views["matrix"].any())


def test_a_stage_without_parameters_steps_nothing() -> None:
    optimizer = StageOptimizer(spec_of("SGD", {"lr": 0.1}), FlatBuffer(FlatLayout([]), CPU), predicts=True)
    optimizer.step({}, {})
    optimizer.load_state({"w": {"step": 1}})
    optimizer.predict_(FlatBuffer(FlatLayout([]), CPU), 3)

    assert optimizer.state() == {}
    assert optimizer.num_updates == 1
    assert optimizer.learning_rate is None


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


class Newest:
    """Direct stepping: the target holds the newest weights, and they are what decays."""

    def __init__(self, spec: OptimizerSpec, names: Iterable[str] = SHAPES, **how: Any) -> None:
        self.weights = FlatBuffer(FlatLayout([(name, SHAPES[name], "float64") for name in names]), CPU)
        for key, view in self.weights.views.items():
            view.copy_(initial_weights()[key])
        self.optimizer = StageOptimizer(spec, self.weights, **how)

    def run(self, first: int, last: int) -> None:
        for step in range(first, last):
            self.optimizer.step(gradient_of(self.weights.views, step), None)

    def predicted(self, steps: int) -> FlatBuffer:
        ahead = FlatBuffer(self.weights.layout, CPU).copy_(self.weights)
        self.optimizer.predict_(ahead, steps)
        return ahead


@pytest.mark.parametrize(("name", "arguments"), CASES, ids=name_case)
def test_on_the_weights_themselves_every_bit_is_torchs(name: str, arguments: dict[str, Any]) -> None:
    newest = Newest(spec_of(name, arguments))
    newest.run(0, 25)

    for key, expected in plain_loop(name, arguments, 25).items():
        assert torch.equal(newest.weights.views[key], expected), key


@pytest.mark.parametrize(("name", "arguments", "bias", "matrix"), GROUPED, ids=name_case)
def test_groups_are_torchs(name: str, arguments: dict[str, Any], bias: dict[str, Any], matrix: dict[str, Any]) -> None:
    newest = Newest(spec_of(name, arguments, **{"b*s": bias, "[lm]*": matrix, "*a*": {"lr": 0.03}}))
    newest.run(0, 25)

    expected = plain_loop(name, arguments, 25, bias=bias, matrix=matrix, scale={"lr": 0.03})
    for key, value in expected.items():
        assert torch.equal(newest.weights.views[key], value), key
    assert not torch.equal(expected["matrix"], plain_loop(name, arguments, 25)["matrix"])


def test_the_decay_of_a_group_enters_as_its_own_arguments_say() -> None:
    """One stage, one group coupled and the other decoupled, from weights that are not the target."""
    spec = spec_of("Adam", {"lr": 0.5, "weight_decay": 0.25}, bias={"decoupled_weight_decay": True})
    rho, weights = FlatBuffer(LAYOUT, CPU), initial_weights()
    StageOptimizer(spec, rho).step({name: torch.zeros_like(w) for name, w in weights.items()}, weights)

    assert torch.equal(rho.views["bias"], torch.zeros(3, dtype=torch.float64).add(weights["bias"], alpha=-0.125))
    # Coupled, the gradient is λ·w, and the first step of Adam is the rate long.
    torch.testing.assert_close(rho.views["scale"], -0.5 * weights["scale"].sign(), rtol=1e-6, atol=0)


class LookedUp(Mapping[str, Tensor]):
    """Weights that note who asks for them."""

    def __init__(self) -> None:
        self.weights = initial_weights()
        self.names: Counter[str] = Counter()

    def __getitem__(self, name: str) -> Tensor:
        self.names[name] += 1
        return self.weights[name]

    def __iter__(self) -> Iterator[str]:
        raise AssertionError("nobody needs all of them")

    def __len__(self) -> int:
        raise AssertionError("nobody needs all of them")


@pytest.mark.parametrize(
    ("spec", "asked"),
    [
        (spec_of("SGD", {"lr": 0.1, "momentum": 0.9}), []),
        (spec_of("SGD", {"lr": 0.1, "weight_decay": 0.1}), ["bias", "matrix"]),
        (spec_of("SGD", {"lr": 0.1, "weight_decay": 0.1}, bias={"weight_decay": 0.0}), ["matrix"]),
        (spec_of("AdamW", {"lr": 0.1}, matrix={"weight_decay": 0.0}), ["bias"]),
        (spec_of("Adafactor", {"lr": 0.1}), ["bias", "matrix"]),
    ],
    ids=["no decay", "decay", "coupled in a group", "decoupled in a group", "own"],
)
def test_weights_are_looked_up_where_needed_and_once(spec: OptimizerSpec, asked: list[str]) -> None:
    weights = LookedUp()
    optimizer = StageOptimizer(spec, FlatBuffer(LAYOUT, CPU))
    for step in range(1, 4):
        # Nothing used `scale`.
        optimizer.step({"matrix": torch.ones(4, 3).double(), "bias": torch.ones(3).double(), "scale": None}, weights)
        assert weights.names == dict.fromkeys(asked, step)


@pytest.mark.parametrize("pattern", ["*", "nothing", "b*"])
def test_the_rate_of_every_group_follows_the_schedule(pattern: str) -> None:
    """A group may have no parameter on a stage, or all; a list of rates is of the groups of the job all the same."""
    spec = spec_of("SGD", {"lr": 8.0}, **{pattern: {"lr": 2.0}})
    schedule = LrScheduleSpec.model_validate(
        {"name": "CyclicLR", "base_lr": (1.0, 4.0), "max_lr": (3.0, 8.0), "step_size_up": 2, "cycle_momentum": False}
    )
    newest = Newest(spec, ["bias", "matrix"], schedule=schedule)
    rates: dict[str, list[float]] = {"bias": [], "matrix": []}
    of_default = []
    for _ in range(4):
        of_default.append(newest.optimizer.learning_rate)
        before = {name: view.clone() for name, view in newest.weights.views.items()}
        newest.optimizer.step({name: torch.ones_like(view) for name, view in before.items()}, None)
        for name, view in newest.weights.views.items():
            rates[name].append(round(float((before[name] - view).mean()), 9))

    slow, fast = [1.0, 2.0, 3.0, 2.0], [4.0, 6.0, 8.0, 6.0]
    assert of_default == fast
    assert rates["bias"] == (fast if pattern == "nothing" else slow)
    assert rates["matrix"] == (slow if pattern == "*" else fast)


#: Moves the momentum, too.
ONE_CYCLE = LrScheduleSpec.model_validate({"name": "OneCycleLR", "max_lr": 0.1, "total_steps": 20})


@pytest.mark.parametrize(("name", "arguments", "bias", "matrix"), GROUPED[:4], ids=name_case)
def test_scheduled_steps_are_torchs(
    name: str, arguments: dict[str, Any], bias: dict[str, Any], matrix: dict[str, Any]
) -> None:
    arguments = {**arguments, "momentum": 0.9} if name == "SGD" else arguments
    newest = Newest(spec_of(name, arguments, bias=bias, matrix=matrix), schedule=ONE_CYCLE)
    newest.run(0, 20)

    expected = plain_loop(
        name, arguments, 20, lambda own: OneCycleLR(own, 0.1, total_steps=20), bias=bias, matrix=matrix
    )
    for key, value in expected.items():
        assert torch.equal(newest.weights.views[key], value), key


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
        ("AdamW", {"lr": 0.1}),
        ("RMSprop", {"lr": 0.01, "centered": True, "weight_decay": 0.1}),
    ],
    ids=name_case,
)
@pytest.mark.parametrize("stages", [[["matrix", "bias", "scale"]], [["scale"], ["bias", "matrix"]]], ids=["one", "two"])
def test_resumed_by_any_partition_is_uninterrupted(
    name: str, arguments: dict[str, Any], stages: list[list[str]], tmp_path: Path
) -> None:
    """Through a checkpoint's file, parameter by parameter; the schedule, which moves momentum too, and predictions."""
    if name == "RMSprop":
        schedule = LrScheduleSpec.model_validate({"name": "ExponentialLR", "gamma": 0.9})
    else:
        schedule = ONE_CYCLE
    spec = spec_of(name, arguments, bias={"lr": 0.05})
    whole = Newest(spec, schedule=schedule, predicts=True)
    whole.run(0, 6)
    writer = PartWriter(lambda _: tmp_path, JobId("job"), "part.safetensors")
    content = StageContent(weights=whole.weights.views, buffers={}, optimizer=whole.optimizer.state())
    path = writer.write(Clock(6), content, is_keeper=True)
    ahead = whole.predicted(2)
    whole.run(6, 12)
    reader = CheckpointReader([path])

    for names in stages:
        resumed = Newest(spec, names, schedule=schedule, predicts=True)
        for key, view in resumed.weights.views.items():
            view.copy_(reader.tensor(f"weights/{key}"))
            resumed.optimizer.load_state(reader.optimizer_state([key]))
        assert resumed.optimizer.num_updates == 6
        for key, view in resumed.predicted(2).views.items():
            assert torch.equal(view, ahead.views[key]), key
            assert not torch.equal(view, resumed.weights.views[key]), key
        resumed.run(6, 12)
        for key, view in resumed.weights.views.items():
            assert torch.equal(view, whole.weights.views[key]), key


def test_an_older_checkpoint_knows_no_number_of_updates() -> None:
    """Its schedule begins anew, and a rule without its last gradient predicts nothing."""
    schedule = LrScheduleSpec.model_validate({"name": "ExponentialLR", "gamma": 0.5})
    spec = spec_of("SGD", {"lr": 1.0, "momentum": 0.5, "nesterov": True})
    newest = Newest(spec, schedule=schedule, predicts=True)
    newest.run(0, 3)
    fresh = Newest(spec, schedule=schedule, predicts=True)
    for optimizer in (newest.optimizer, fresh.optimizer):
        optimizer.load_state({name: {"momentum_buffer": torch.ones(shape)} for name, shape in SHAPES.items()})
        assert (optimizer.num_updates, optimizer.learning_rate) == (0, 1.0)

    assert torch.equal(fresh.predicted(2).data, fresh.weights.data)


@pytest.mark.parametrize(
    ("spec", "predicts", "kept"),
    [
        (spec_of("SGD", {"lr": 0.1, "momentum": 0.9}), True, []),
        (spec_of("SGD", {"lr": 0.1, "momentum": 0.9}, bias={"momentum": 0.0}), True, ["bias"]),
        (spec_of("SGD", {"lr": 0.1}), False, []),
        (spec_of("AdamW", {"lr": 0.1}), True, []),
    ],
    ids=["momentum", "one group without", "no prediction", "AdamW"],
)
def test_last_gradients_are_kept_only_for_rules_that_need_them(
    *, spec: OptimizerSpec, predicts: bool, kept: list[str]
) -> None:
    newest = Newest(spec, predicts=predicts)
    newest.run(0, 2)
    state = newest.optimizer.state()
    other = Newest(spec, predicts=predicts)
    other.optimizer.load_state({name: {**entries, "last_gradient": torch.ones(1)} for name, entries in state.items()})

    assert [name for name, entries in state.items() if "last_gradient" in entries] == kept
    assert [name for name, entries in other.optimizer.state().items() if "last_gradient" in entries] == kept


@pytest.mark.parametrize(("fused", "step_on"), [(False, "cpu"), (True, "meta")])
def test_a_loaded_state_lies_where_torch_wants_it(*, fused: bool, step_on: str) -> None:
    """The meta device stands for one that is not the host's."""
    optimizer = StageOptimizer(spec_of("Adam", {"lr": 0.1}), FlatBuffer(LAYOUT, torch.device("meta")))
    assert optimizer.optimizer is not None
    optimizer.optimizer.param_groups[0]["fused"] = fused
    optimizer.load_state({"bias": {"step": torch.tensor(3.0), "exp_avg": torch.ones(3), "num_updates": 3}})

    entries = optimizer.state()["bias"]
    assert {key: v.device.type for key, v in entries.items() if isinstance(v, Tensor)} == {
        "step": step_on,
        "exp_avg": "meta",
    }
