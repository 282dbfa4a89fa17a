"""Swapped layers: what moves, when, and how much is on the device meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pytest
import torch
from torch import Tensor, nn

from hetpipe.errors import CallableError
from hetpipe.pipeline.chain import chain_of
from hetpipe.pipeline.compute import StageCompute
from hetpipe.pipeline.host_link import EmulatedHostLink, Transfer
from hetpipe.pipeline.layer_memory import LayerMemory
from hetpipe.values.ids import Minibatch, VirtualWorkerIndex
from hetpipe.values.memory import LayerPolicy
from tests.support.fake_clock import FakeClock

SAMPLES, WIDTH = 16, 8
BYTES = SAMPLES * WIDTH * 4
"""Of one float32 activation."""


class SeenLink(EmulatedHostLink):
    """Notes what moves."""

    def __init__(self, clock: FakeClock, bytes_per_second: float | None = None) -> None:
        super().__init__(clock, bytes_per_second)
        self.moved: list[tuple[str, int]] = []

    def take_out(self, source: Tensor) -> Transfer:
        self.moved.append(("out", source.nbytes))
        return super().take_out(source)

    def bring_back(self, source: Tensor) -> Transfer:
        self.moved.append(("back", source.nbytes))
        return super().bring_back(source)


class Function(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, value: Tensor) -> Tensor:
        return self.function(value)


class Stage:
    """All layers but the first, so that the stage's input has a gradient."""

    def __init__(
        self, modules: Sequence[nn.Module], policies: Sequence[LayerPolicy], bytes_per_second: float | None = None
    ) -> None:
        self.clock = FakeClock(auto_advance=True)
        self.link = SeenLink(self.clock, bytes_per_second)
        model = nn.Sequential(nn.Identity(), *modules)
        layers = chain_of(model)[1:]
        memory = LayerMemory(layers, policies, self.link if "swap" in policies else None)
        device = torch.device("cpu")
        self.compute = StageCompute(
            layers, vw=VirtualWorkerIndex(0), seed=0, device=device, loss=None, memory=memory, watches_activations=False
        )
        self.weights = self.own_weights(model)

    @staticmethod
    def own_weights(model: nn.Module) -> Mapping[str, Tensor]:
        generator = torch.Generator().manual_seed(3)
        return {
            name: torch.randn(parameter.shape, generator=generator).requires_grad_()
            for name, parameter in model.named_parameters()
        }

    def forward(self, p: int) -> None:
        value = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(p))
        self.compute.forward(Minibatch(p), self.weights, (value,))

    def backward(self, p: int) -> list[Tensor]:
        found = self.compute.backward(Minibatch(p), self.weights, [torch.ones(SAMPLES, WIDTH)])
        return [each for each in (*found.weights.values(), *found.inputs) if each is not None]

    def both(self, p: int) -> list[Tensor]:
        self.forward(p)
        return self.backward(p)


#: A layer each way that saves views: a transpose, a part, and the real part of complex numbers.
VIEWS = [
    Function(lambda x: (x.t() @ x).sigmoid().repeat(2, 1)),
    Function(lambda x: torch.cat([x[:, :4].exp().sigmoid(), x[:, 4:].tanh()], 1)),
    Function(lambda x: (torch.view_as_complex(x.view(SAMPLES, 4, 2)).conj() ** 2).real.repeat(1, 2)),
]


@pytest.mark.parametrize(
    "modules",
    [[nn.Sigmoid(), nn.Linear(WIDTH, WIDTH), nn.Sigmoid()], VIEWS],
    ids=["activations", "views"],
)
@pytest.mark.parametrize(
    "policies",
    [["swap"] * 3, ["swap", "keep", "swap"], ["keep", "swap", "recompute"], ["recompute", "swap", "keep"]],
)
def test_gradients_have_the_bits_of_kept_tensors(modules: list[nn.Module], policies: list[LayerPolicy]) -> None:
    swapped, kept = Stage(modules, policies), Stage(modules, ["keep"] * 3)
    for p in (1, 2):
        for found, expected in zip(swapped.both(p), kept.both(p), strict=True):
            assert torch.equal(found, expected)


def test_what_two_layers_save_moves_once_and_weights_and_inputs_not_at_all() -> None:
    """The linear layer saves the result of the sigmoid before it, and its weight; the first sigmoid only its result."""
    for policies in (["swap", "swap"], ["swap", "keep"]):
        stage = Stage([nn.Sigmoid(), nn.Linear(WIDTH, WIDTH)], policies)  # type: ignore[arg-type]
        stage.both(1)
        assert stage.link.moved == [("out", BYTES), ("back", BYTES)]
    stage = Stage([nn.Sigmoid(), nn.Linear(WIDTH, WIDTH)], ["keep", "swap"])
    stage.both(1)
    assert stage.link.moved == [], "it counts at the first of them"
    stage = Stage([nn.Linear(WIDTH, WIDTH)], ["swap"])
    stage.both(1)
    assert stage.link.moved == []


def test_the_next_backward_is_prefetched_and_two_minibatches_are_there_at_most() -> None:
    stage = Stage([nn.Sigmoid(), nn.Tanh()], ["swap", "swap"])
    out, back = ("out", BYTES), ("back", BYTES)
    for p in (1, 2, 3):
        stage.forward(p)
    assert stage.link.moved == [out] * 6
    stage.backward(1)
    assert stage.link.moved[6:] == [back] * 4, "its own, and the next one's"
    stage.forward(4)
    stage.backward(2)
    assert stage.link.moved[10:] == [out, out, back, back]
    balance = highest = 0
    for way, size in stage.link.moved[6:10]:
        balance += size if way == "back" else -size
        highest = max(highest, balance)
    assert highest == 2 * 2 * BYTES


def test_a_backward_waits_for_the_emulated_link_as_long_as_it_takes() -> None:
    stage = Stage([nn.Sigmoid(), nn.Tanh()], ["swap", "swap"], bytes_per_second=BYTES / 2)
    stage.forward(1)
    assert stage.clock.monotonic() == 0, "nobody waits for what leaves"
    stage.backward(1)
    assert stage.clock.monotonic() == 8, "two out and two back, two seconds each"


def test_a_forward_waits_until_at_most_one_other_minibatch_is_leaving() -> None:
    stage = Stage([nn.Sigmoid()], ["swap"], bytes_per_second=BYTES / 2)
    stage.forward(1)
    stage.forward(2)
    assert stage.clock.monotonic() == 0
    stage.forward(3)
    assert stage.clock.monotonic() == 2, "the first has left"
    stage.forward(4)
    assert stage.clock.monotonic() == 4


def test_a_prefetched_minibatch_is_there_when_computation_took_long_enough() -> None:
    stage = Stage([nn.Sigmoid()], ["swap"], bytes_per_second=BYTES / 2)
    stage.forward(1)
    stage.forward(2)
    stage.backward(1)
    now = stage.clock.monotonic()
    stage.clock.advance(2)
    stage.backward(2)
    assert stage.clock.monotonic() == now + 2


def test_a_saved_tensor_that_is_modified_in_place_ends_the_run() -> None:
    stage = Stage([nn.Sigmoid(), Function(lambda x: x.mul_(2))], ["swap", "keep"])
    with pytest.raises(
        CallableError, match=r"a tensor of shape \[16, 8\] that the backward needs was modified in place"
    ):
        stage.forward(1)
