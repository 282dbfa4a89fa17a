"""What a minibatch of a cut model costs beside the model's own time, as far as it can be counted."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from hetpipe.pipeline.chain import at_boundary, run_layers
from tests.model.harness import Subject

WIDTH = 6


class Watched(nn.Module):
    """Keeps what stands for its forward while it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.stood: list[Any] = []

    def forward(self, value: Tensor) -> Tensor:
        self.stood.append(vars(self).get("forward"))
        found: Tensor = self.linear(value)
        return found


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Watched() for _ in range(3)])
        self.relu = nn.ReLU(inplace=True)

    def forward(self, value: Tensor) -> Tensor:
        for block in self.blocks:
            value = value + self.relu(block(value))
        return value


VALUE = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))


def subject() -> Subject:
    return Subject(Model, (VALUE,), loss=lambda output: output.square().mean())


def output_of(subject: Subject) -> Tensor:
    (output,) = run_layers(subject.layers, subject.weights, (VALUE.clone(),))
    return output


def test_a_value_that_is_contiguous_and_aligned_adds_no_function_to_the_graph() -> None:
    cut = subject()
    assert len(cut.layers) > 4
    ahead: list[Node | None] = [output_of(cut).grad_fn]
    names = []
    while ahead:
        node = ahead.pop()
        if node is not None:
            names.append(node.name())
            ahead += [following for following, _ in node.next_functions]
    assert "AddmmBackward0" in names
    assert not [name for name in names if "Boundary" in name]


class Seen(torch.autograd.Function):
    """Identity that keeps the strides of the gradients that come back to it."""

    strides: ClassVar[list[tuple[int, ...]]] = []

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        Seen.strides.append(gradient.stride())
        return gradient


def test_its_gradient_is_normalised_all_the_same() -> None:
    Seen.strides.clear()
    made = Seen.apply(VALUE.clone().requires_grad_())  # type: ignore[no-untyped-call]  # torch ships it untyped
    (same,) = at_boundary((made,))
    assert same is made
    torch.autograd.backward(made, torch.ones(WIDTH, 4).t())
    assert Seen.strides == [(WIDTH, 1)]


def test_modules_are_wrapped_once_and_not_in_every_minibatch() -> None:
    cut = subject()
    block = cut.cut.model.get_submodule("blocks.1")
    assert isinstance(block, Watched)
    block.stood.clear()
    for _ in range(3):
        output_of(cut)
    assert len(block.stood) == 3
    assert None not in block.stood
    assert len(set(map(id, block.stood))) == 1
    assert "forward" not in vars(block)


def test_a_forward_that_is_replaced_between_two_minibatches_is_called() -> None:
    cut = subject()
    before = output_of(cut)
    block: Any = cut.cut.model.get_submodule("blocks.1")
    original = block.forward
    block.forward = lambda value: original(value) * 0.0
    without = output_of(cut)
    del block.forward
    assert not torch.equal(before, without)
    assert torch.equal(before, output_of(cut))
