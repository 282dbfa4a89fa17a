"""Backward starts where forward ended, whatever a stage's last layer returned, and nothing else is kept for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hetpipe.pipeline.chain import Values, chain_of
from hetpipe.pipeline.compute import StageCompute
from hetpipe.profiler.live_bytes import LiveBytes
from hetpipe.spec.ids import Minibatch, VirtualWorkerIndex

P = Minibatch(1)
WIDTH = 8


class _Double(torch.autograd.Function):
    """A node of Python's own."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return 2 * value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


class Returns(nn.Module):
    """A linear layer, and then what `ending` makes of the weight, the input and the result."""

    def __init__(self, ending: Callable[[Tensor, Tensor, Tensor], Values]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self._ending = ending

    def forward(self, x: Tensor) -> Values:
        return self._ending(self.linear.weight, x, self.linear(x))


ENDINGS: dict[str, Callable[[Tensor, Tensor, Tensor], Values]] = {
    "a result": lambda _, x, y: (y + x,),
    "a weight itself": lambda w, _, y: (y, w),
    "its input": lambda _, x, y: (x, y),
    "one tensor twice": lambda _, __, y: (y, y),
    "a view": lambda _, __, y: (y.t(), y[1:]),
    "in place": lambda _, __, y: (torch.relu_(y),),
    "a node of Python's": lambda _, __, y: (_Double.apply(y),),  # type: ignore[no-untyped-call]  # torch ships it untyped
    "integers": lambda _, __, y: (y.argmax(dim=1), y),
    "no gradient": lambda _, __, y: (y.detach(), y),
}


def stage(ending: Callable[[Tensor, Tensor, Tensor], Values]) -> tuple[StageCompute, dict[str, Tensor]]:
    """The second layer of two, so that its input has a gradient."""
    torch.manual_seed(1)
    layer = chain_of(nn.Sequential(nn.Identity(), Returns(ending)))[1]
    weights = {
        name: layer.module.get_parameter(local).detach().clone().requires_grad_()
        for local, name in layer.parameters.items()
    }
    compute = StageCompute((layer,), vw=VirtualWorkerIndex(0), seed=0, device=torch.device("cpu"), loss=None)
    return compute, weights


def gradients_of(outputs: Values) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(y.shape, generator=generator) if y.requires_grad else None for y in outputs]


@pytest.mark.parametrize("name", ENDINGS)
def test_the_gradients_are_autograds(name: str) -> None:
    compute, weights = stage(ENDINGS[name])
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(2))

    outputs = compute.forward(P, weights, (x.clone(),))
    sent = gradients_of(outputs)
    del outputs
    found = compute.backward(P, weights, sent)

    leaf = x.clone().requires_grad_()
    linear = torch.nn.functional.linear(leaf, weights["1.linear.weight"], weights["1.linear.bias"])
    plain = ENDINGS[name](weights["1.linear.weight"], leaf, linear)
    pairs = [(y, g) for y, g in zip(plain, sent, strict=True) if g is not None]
    expected = torch.autograd.grad(
        [y for y, _ in pairs], [*weights.values(), leaf], [g for _, g in pairs], allow_unused=True
    )
    for gradient, wanted in zip((*found.weights.values(), *found.inputs), expected, strict=True):
        assert gradient is not None and wanted is not None
        assert torch.equal(gradient, wanted)


def test_outputs_live_no_longer_than_their_receiver() -> None:
    """The sum keeps nothing: only the input, which the linear layer saved, is there until backward."""
    compute, weights = stage(ENDINGS["a result"])
    with LiveBytes() as live:
        x = torch.ones(4, WIDTH)
        outputs = compute.forward(P, weights, (x,))
        sent = gradients_of(outputs)
        del outputs
        assert live.now_bytes == x.nbytes + sum(gradient.nbytes for gradient in sent if gradient is not None)
        compute.backward(P, weights, sent)

    assert compute.num_pending == 0
