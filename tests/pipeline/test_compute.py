"""Backward starts where forward ended, whatever a stage's last layer returned, and nothing else is kept for it.

What a layer recomputes meanwhile is computed on the weights of the backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from hetpipe.pipeline.chain import Values, chain_of, forget_weights, weights_in_place
from hetpipe.pipeline.compute import Gradients, StageCompute
from hetpipe.pipeline.remapping import Remapping
from hetpipe.pipeline.seeds import layer_seed
from hetpipe.profiler.live_bytes import LiveBytes
from hetpipe.values.ids import LayerIndex, Minibatch, VirtualWorkerIndex

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


class Block(nn.Module):
    """Two linear layers with dropout; recomputed in the backward, all or from the middle on, or not at all."""

    def __init__(self, recomputes: str) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self._recomputes = recomputes

    def from_middle(self, x: Tensor) -> Tensor:
        second: Tensor = self.second(nn.functional.dropout(torch.tanh(x), 0.5))
        return second + nn.functional.linear(x, self.first.weight)

    def forward(self, x: Tensor) -> Tensor:
        what, _, how = self._recomputes.partition(" ")
        if what == "none":
            return self.from_middle(self.first(x))
        reentrant = how == "reentrant"
        if what == "middle":
            result: Tensor = checkpoint(self.from_middle, self.first(x), use_reentrant=reentrant)
        else:
            result = checkpoint(lambda y: self.from_middle(self.first(y)), x, use_reentrant=reentrant)
        return result


RECOMPUTES = ("all", "middle", "all reentrant", "middle reentrant")
X = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(2))
G = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(3))


def block(recomputes: str) -> StageCompute:
    """The second layer of two. Like a stage's, its modules have no weights of their own."""
    layers = chain_of(nn.Sequential(nn.Identity(), Block(recomputes)))[1:]
    compute = StageCompute(layers, vw=VirtualWorkerIndex(0), seed=0, device=torch.device("cpu"), loss=None)
    forget_weights(layers)
    return compute


def leaves(seed: int) -> dict[str, Tensor]:
    """Weights of a block, all in one storage."""
    data = torch.randn(2 * (WIDTH + 1), WIDTH, generator=torch.Generator().manual_seed(seed))
    first, b, second, c = torch.split(data, [WIDTH, 1, WIDTH, 1])
    tensors = {"1.first.weight": first, "1.first.bias": b[0], "1.second.weight": second, "1.second.bias": c[0]}
    return {name: tensor.detach().requires_grad_() for name, tensor in tensors.items()}


def assert_same(found: Gradients, wanted: Gradients) -> None:
    assert found.weights.keys() == wanted.weights.keys()
    for one, other in zip(
        (*found.weights.values(), *found.inputs), (*wanted.weights.values(), *wanted.inputs), strict=True
    ):
        assert one is not None and other is not None
        assert torch.equal(one, other)


@pytest.mark.parametrize("recomputes", RECOMPUTES)
def test_layers_that_recompute_have_the_gradients_of_those_that_keep(recomputes: str) -> None:
    """Also dropout draws the same numbers again, and a second minibatch in flight is a second minibatch."""
    compute, plain = block(recomputes), block("none")
    versions = {Minibatch(p): leaves(p) for p in (1, 2)}
    for p, weights in versions.items():
        ours, theirs = (c.forward(p, weights, (X.clone(),)) for c in (compute, plain))
        assert torch.equal(ours[0], theirs[0])
    state = torch.get_rng_state()
    for p, weights in versions.items():
        assert_same(*(c.backward(p, weights, (G,)) for c in (compute, plain)))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(weight.grad is None for weights in versions.values() for weight in weights.values())


@pytest.mark.parametrize("recomputes", ["all", "all reentrant"])
def test_a_predicted_forward_that_is_recomputed_has_the_gradients_at_the_current_weights(recomputes: str) -> None:
    """Nothing of the region is left of the forward but its input and its random numbers."""
    compute, plain = block(recomputes), block("none")
    predicted, current = leaves(1), leaves(2)
    compute.forward(P, predicted, (X.clone(),), Remapping(predicted))
    found = compute.backward(P, current, (G,))
    plain.forward(P, current, (X.clone(),))
    assert_same(found, plain.backward(P, current, (G,)))
    assert all(weight.grad is None for weight in (*predicted.values(), *current.values()))


@pytest.mark.parametrize("recomputes", ["middle", "middle reentrant"])
def test_a_predicted_forward_recomputed_in_part(recomputes: str) -> None:
    """Up to the region the activations are those of the forward; the region is the one on the current weights."""
    compute, predicted, current = block(recomputes), leaves(1), leaves(2)
    compute.forward(P, predicted, (X.clone(),), Remapping(predicted))
    found = compute.backward(P, current, (G,))

    region = Block("none")
    first, bias = leaves(1)["1.first.weight"], leaves(1)["1.first.bias"]
    middle = nn.functional.linear(X, first, bias).detach().requires_grad_()
    torch.manual_seed(layer_seed(0, VirtualWorkerIndex(0), P, LayerIndex(1)))
    with weights_in_place(chain_of(nn.Sequential(nn.Identity(), region)), current):
        output = region.from_middle(middle)
    inside = ("1.first.weight", "1.second.weight", "1.second.bias")
    *of_region, of_middle = torch.autograd.grad(output, [*(current[name] for name in inside), middle], G)
    wanted = dict.fromkeys(current, of_middle.sum(0)) | dict(zip(inside, of_region, strict=True))
    wanted["1.first.weight"] = of_middle.t() @ X + wanted["1.first.weight"]
    assert_same(found, Gradients({**wanted}, (of_middle @ current["1.first.weight"],)))


def test_a_predicted_backward_reads_the_current_weights() -> None:
    """As the layer with its weights overwritten in between, behind autograd's back; the predicted ones are gone."""
    compute, plain = block("none"), block("none")
    overwritten, current = leaves(1), leaves(2)
    plain.forward(P, overwritten, (X.clone(),))
    for name, weight in current.items():
        overwritten[name].data.copy_(weight.detach())
    expected = plain.backward(P, overwritten, (G,))

    predicted = leaves(1)
    memory = predicted["1.first.weight"].detach()
    compute.forward(P, predicted, (X.clone(),), Remapping(predicted))
    memory.fill_(float("nan"))
    assert_same(compute.backward(P, current, (G,)), expected)
    assert compute.num_pending == 0


def test_a_predicted_stage_may_return_a_weight() -> None:
    """Its values travel on, and what comes back is the weight's gradient."""
    compute, _ = stage(ENDINGS["a weight itself"])
    memory = torch.ones(WIDTH + 1, WIDTH)
    predicted, current = _leaves_in(memory), _leaves_in(torch.zeros(WIDTH + 1, WIDTH))
    _, returned = compute.forward(P, predicted, (X.clone(),), Remapping(predicted))
    memory.fill_(float("nan"))
    assert torch.equal(returned, torch.ones(WIDTH, WIDTH))
    found = compute.backward(P, current, (torch.zeros(4, WIDTH), 2 * torch.ones(WIDTH, WIDTH)))
    gradient = found.weights["1.linear.weight"]
    assert gradient is not None
    assert torch.equal(gradient, 2 * torch.ones(WIDTH, WIDTH))


def _leaves_in(memory: Tensor) -> dict[str, Tensor]:
    parts = {"1.linear.weight": memory[:WIDTH], "1.linear.bias": memory[WIDTH]}
    return {name: part.detach().requires_grad_() for name, part in parts.items()}
