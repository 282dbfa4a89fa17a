"""A backward that reads other weights than its forward: the same places, wherever they were saved from.

The oracle is plain autograd whose leaves are overwritten between forward and backward, behind its back: what shares the
leaves' memory then reads the new weights, and what was computed from the old ones does not.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from hetpipe.errors import CallableError
from hetpipe.pipeline.chain import chain_of, forget_weights, run_layers, weights_in_place
from hetpipe.pipeline.remapping import Remapping
from hetpipe.weights.flat import FlatBuffer, FlatLayout

WIDTH = 8
CPU = torch.device("cpu")


class _Scale(torch.autograd.Function):
    """x · w, which saves the weight as torch wants it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient * weight, (gradient * x).sum(0)


class _ScaleByAttribute(torch.autograd.Function):
    """x · w, which keeps the weight without telling autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x * weight

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        (x,) = ctx.saved_tensors
        return gradient * ctx.weight, (gradient * x).sum(0)


class Computes(nn.Module):
    """Any function of a matrix, a vector and the input."""

    def __init__(self, function: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.empty(WIDTH, WIDTH))
        self.b = nn.Parameter(torch.empty(WIDTH))
        self._function = function

    def forward(self, x: Tensor) -> Tensor:
        return self._function(self.w, self.b, x)


class Tied(nn.Module):
    """One matrix under two names, with something in place between."""

    def __init__(self) -> None:
        super().__init__()
        self.there = nn.Linear(WIDTH, WIDTH)
        self.back = nn.Linear(WIDTH, WIDTH)
        self.back.weight = self.there.weight

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.back(torch.relu_(self.there(x)))
        return result


class Attention(nn.Module):
    """Its in-projection is one matrix in three parts."""

    def __init__(self, *, other_sizes: bool) -> None:
        super().__init__()
        sizes = {"kdim": WIDTH // 2, "vdim": WIDTH // 2} if other_sizes else {}
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True, **sizes)
        self._width = WIDTH // 2 if other_sizes else WIDTH

    def forward(self, x: Tensor) -> Tensor:
        x = x.unsqueeze(0)
        key = x[..., : self._width]
        result: Tensor = self.attention(x, key, key, need_weights=False)[0]
        return result.squeeze(0)


class Recurrent(nn.Module):
    """Keeps its weights in a list of its own as well."""

    def __init__(self, kind: type[nn.LSTM | nn.GRU]) -> None:
        super().__init__()
        self.cell = kind(WIDTH, WIDTH, num_layers=2, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.cell(x)[0]
        return output


class Looked(nn.Module):
    """An embedding of the input's signs, whose matrix is used again at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(2, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(self.table((x > 0).long()) * x.unsqueeze(-1), self.table.weight)


class Scores(nn.Module):
    """Attention to its own weights."""

    def __init__(self) -> None:
        super().__init__()
        self.keys = nn.Parameter(torch.empty(1, 2, 5, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(x.expand(1, 2, *x.shape), self.keys, self.keys)


def _convolution() -> nn.Module:
    layers = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(inplace=True), nn.ConvTranspose2d(3, 1, 3))
    return nn.Sequential(nn.Unflatten(0, (1, 1, 5)), layers)


def _apply(function: Any) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return lambda _, b, x: function.apply(x, b)


def _of(function: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[[], nn.Module]:
    return lambda: Computes(function)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "linear, transposed": _of(lambda w, b, x: functional.linear(x, w.t(), b)),
    "product": _of(lambda w, b, x: (x @ w) * b),
    "both operands": _of(lambda w, b, x: w * w.t() * b * x[0] * x.sum()),
    "slices": _of(lambda w, b, x: torch.cat((x @ w[:, 1:4], x * b[None, :], x @ w[2::2].t()), dim=1)),
    "one row, expanded": _of(lambda w, _, x: x * w[3].expand(5, WIDTH)),
    "as_strided": _of(lambda w, _, x: x * w.as_strided((WIDTH,), (3,), 2)),
    "another shape": _of(lambda w, b, x: (x @ w.reshape(WIDTH // 2, -1).view(WIDTH, WIDTH)) * b.view(1, 1, -1)[0]),
    "complex": _of(lambda w, _, x: torch.view_as_real(x.to(torch.complex64) @ torch.view_as_complex(w.view(8, 4, 2)))),
    "conjugate": _of(
        lambda w, _, x: torch.view_as_real(torch.view_as_complex(w.view(8, 4, 2)).conj() * (x[0, 0] * (1 + 2j)))
    ),
    "negative": _of(lambda w, _, x: torch.view_as_complex(w.view(8, 4, 2)).conj().imag * x[:, :4].sum(0)),
    "saved output": _of(lambda w, b, x: torch.exp(functional.linear(x, w) * b.sigmoid())),
    "masked": _of(lambda w, b, x: functional.linear(x, w * (torch.arange(WIDTH) > 2), b)),
    "another dtype": _of(lambda w, b, x: functional.linear(x.double(), w.double(), b.double()).float()),
    "contiguous": _of(lambda w, b, x: functional.linear(x, w.t().contiguous(), b)),
    "weights alone": _of(lambda w, b, x: functional.linear(x, w @ w.t(), b * b)),
    "detached": _of(lambda w, b, x: (x @ w.detach()) * b),
    "a function that saves": _of(_apply(_Scale)),
    "a function with an attribute": _of(_apply(_ScaleByAttribute)),
    "two layers": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), nn.LayerNorm(WIDTH)),
    "tied": Tied,
    "prelu": lambda: nn.PReLU(WIDTH),
    "bilinear": _of(lambda w, b, x: functional.bilinear(x, x, w.expand(3, WIDTH, WIDTH), b[:3])),
    "group norm": lambda: nn.GroupNorm(2, WIDTH),
    "batch norm": lambda: nn.BatchNorm1d(WIDTH),
    "convolutions": _convolution,
    "embedding": Looked,
    "attention": lambda: Attention(other_sizes=False),
    "attention in parts": lambda: Attention(other_sizes=True),
    "attention to weights": Scores,
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
    "encoder": lambda: nn.TransformerEncoderLayer(WIDTH, 2, WIDTH, dropout=0.0),
    "lstm": lambda: Recurrent(nn.LSTM),
    "gru": lambda: Recurrent(nn.GRU),
}


def buffer_like(model: nn.Module, seed: int) -> FlatBuffer:
    """A buffer for the parameters of `model`, with other numbers for another seed."""
    parameters = dict(model.named_parameters())
    buffer = FlatBuffer(FlatLayout([(name, tuple(p.shape), "float32") for name, p in parameters.items()]), CPU)
    generator = torch.Generator().manual_seed(seed)
    for view in buffer.views.values():
        view.copy_(torch.randn(view.shape, generator=generator))
    return buffer


def leaves_of(buffer: FlatBuffer) -> dict[str, Tensor]:
    return {name: view.detach().requires_grad_() for name, view in buffer.views.items()}


def inputs() -> tuple[Tensor, ...]:
    return (torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(5)).requires_grad_(),)


def gradients_of(outputs: tuple[Tensor, ...], leaves: Mapping[str, Tensor], x: tuple[Tensor, ...]) -> list[Any]:
    """Of a sum with unlike weights."""
    loss = sum((y * torch.linspace(1, 2, y.numel()).view_as(y)).sum() for y in outputs)
    assert isinstance(loss, Tensor)
    return list(torch.autograd.grad(loss, [*leaves.values(), *x], allow_unused=True))


@pytest.mark.parametrize("name", LAYERS)
def test_the_backward_reads_the_current_weights(name: str) -> None:
    layer = LAYERS[name]()
    layers = chain_of(nn.Sequential(layer))
    predicted, current = buffer_like(nn.Sequential(layer), 1), buffer_like(nn.Sequential(layer), 2)
    forget_weights(layers)

    plain, x = leaves_of(FlatBuffer(predicted.layout, CPU).copy_(predicted)), inputs()
    outputs = run_layers(layers, plain, x)
    for leaf_name, leaf in plain.items():
        leaf.data.copy_(current.views[leaf_name])
    expected = gradients_of(outputs, plain, x)

    leaves, x = leaves_of(predicted), inputs()
    remapping = Remapping(leaves)
    with remapping:
        found = remapping.apart(run_layers(layers, leaves, x))
    predicted.data.fill_(255)  # every number is NaN now
    assert all(torch.equal(a, b) for a, b in zip(found, outputs, strict=True))
    weights = leaves_of(current)
    remapping.read_from(weights)
    with weights_in_place(layers, weights):
        gradients = gradients_of(found, leaves, x)

    assert any(gradient is not None for gradient in gradients)
    for gradient, wanted in zip(gradients, expected, strict=True):
        assert (gradient is None) == (wanted is None)
        if gradient is not None:
            assert gradient.isfinite().all()
            assert torch.equal(gradient, wanted)


def test_a_linear_layer_by_hand() -> None:
    """With y = x Ŵᵀ + b: the input's gradient is g W, not g Ŵ, and the weights' are those of any W."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    predicted, current = buffer_like(model, 1), buffer_like(model, 2)
    leaves, (x,) = leaves_of(predicted), inputs()
    remapping = Remapping(leaves)
    with remapping:
        (y,) = run_layers(chain_of(model), leaves, (x,))
    assert torch.equal(y, functional.linear(x, predicted.views["0.weight"], predicted.views["0.bias"]))
    g = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(6))
    remapping.read_from(leaves_of(current))
    of_x, of_weight, of_bias = torch.autograd.grad(y, [x, *leaves.values()], g)
    assert torch.equal(of_x, g @ current.views["0.weight"])
    assert torch.equal(of_weight, g.t() @ x)
    assert torch.equal(of_bias, g.sum(0))


@pytest.mark.parametrize("name", LAYERS)
def test_the_predicted_weights_die_with_the_forward(name: str) -> None:
    layer = LAYERS[name]()
    layers = chain_of(nn.Sequential(layer))
    predicted = buffer_like(nn.Sequential(layer), 1)
    forget_weights(layers)
    leaves = leaves_of(predicted)
    remapping = Remapping(leaves)
    with remapping:
        outputs = remapping.apart(run_layers(layers, leaves, inputs()))
    storage = weakref.ref(predicted.data.untyped_storage())
    assert storage() is not None
    del predicted
    assert storage() is None
    assert all(output.isfinite().all() for output in outputs)


def test_outputs_do_not_lie_in_the_weights() -> None:
    """A layer may return a weight: the next stage gets its values, and the weight gets a gradient."""
    model = nn.Sequential(Computes(lambda w, b, x: w.t()))
    predicted, current = buffer_like(model, 1), buffer_like(model, 2)
    leaves, values = leaves_of(predicted), predicted.views["0.w"].t().clone()
    remapping = Remapping(leaves)
    with remapping:
        (output,) = remapping.apart(run_layers(chain_of(model), leaves, inputs()))
    predicted.data.fill_(255)
    assert torch.equal(output, values)
    remapping.read_from(leaves_of(current))
    (gradient,) = torch.autograd.grad(output, [leaves["0.w"]], values)
    assert torch.equal(gradient, values.t())


def test_a_change_in_place_is_noticed_as_without_hooks() -> None:
    model = nn.Sequential(Computes(lambda w, _, x: torch.exp(x @ w).mul_(2)))
    leaves, x = leaves_of(buffer_like(model, 1)), inputs()
    plain = run_layers(chain_of(model), leaves, x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradients_of(plain, leaves, x)
    remapping = Remapping(leaves)
    with remapping:
        outputs = run_layers(chain_of(model), leaves, x)
    remapping.read_from(leaves_of(buffer_like(model, 2)))
    with pytest.raises(CallableError, match=r"shape \[5, 8\] .* modified in place"):
        gradients_of(outputs, leaves, x)


def test_what_refuses_hooks_is_told_with_a_way_out() -> None:
    model = nn.Sequential(Computes(lambda w, b, x: torch.func.grad(lambda z: (z @ w).square().sum())(x) * b))
    leaves = leaves_of(buffer_like(model, 1))
    with (
        pytest.raises(CallableError, match=r"torch\.func\.grad .* choose weights that are not predicted"),
        Remapping(leaves),
    ):
        run_layers(chain_of(model), leaves, inputs())


def test_weights_of_another_buffer_are_refused() -> None:
    leaves = leaves_of(buffer_like(nn.Linear(2, 2), 1))
    leaves["bias"] = torch.zeros(2, requires_grad=True)
    with pytest.raises(AssertionError, match="bias is not in the buffer"), Remapping(leaves):
        pass


def test_a_stage_without_weights() -> None:
    x = inputs()
    remapping = Remapping({})
    with remapping:
        outputs = remapping.apart(run_layers(chain_of(nn.Sequential(nn.Tanh())), {}, x))
    remapping.read_from({})
    assert torch.equal(gradients_of(outputs, {}, x)[0], gradients_of((x[0].tanh(),), {}, x)[0])
