"""Weights in place of a module's own: what `functional_call` computes, also where it is not obvious."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hetpipe.pipeline.chain import chain_of, forget_weights, run_layers, weights_in_place


class Tied(nn.Module):
    """The same matrix on the way in and out, under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.there = nn.Linear(6, 6)
        self.back = nn.Linear(6, 6)
        self.back.weight = self.there.weight

    def forward(self, value: Tensor) -> Tensor:
        if value.isnan().any():
            raise ValueError("no numbers")
        result: Tensor = self.back(torch.tanh(self.there(value)))
        return result


class Recurrent(nn.Module):
    """A module that keeps its weights in a second place as well."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(6, 6, num_layers=2)

    def forward(self, value: Tensor) -> Tensor:
        output: Tensor = self.cell(value)[0]
        return output


def leaves_like(model: nn.Module, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(parameter.shape, generator=generator).requires_grad_()
        for name, parameter in model.named_parameters()
    }


@pytest.mark.parametrize("layer", [Tied, Recurrent, lambda: nn.Linear(6, 6)])
def test_other_weights_compute_what_functional_call_computes(layer: type[nn.Module]) -> None:
    model = nn.Sequential(layer(), layer())
    own = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    value = torch.randn(3, 6)
    for seed in (1, 2):
        leaves = leaves_like(model, seed)
        (output,) = run_layers(chain_of(model), leaves, (value,))
        expected = torch.func.functional_call(model, leaves, (value,))
        assert torch.equal(output, expected)
        found = torch.autograd.grad(output.sum(), list(leaves.values()))
        wanted = torch.autograd.grad(expected.sum(), list(leaves.values()))
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert all(torch.equal(own[name], parameter) for name, parameter in model.named_parameters())


def test_forgotten_weights_leave_the_shapes() -> None:
    tied = Tied()
    model = nn.Sequential(tied, nn.BatchNorm1d(6))
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    leaves = leaves_like(model, 1)
    value = torch.randn(3, 6)
    expected = torch.func.functional_call(model.eval(), leaves, (value,))
    forget_weights(chain_of(model))
    assert {name: parameter.shape for name, parameter in model.named_parameters()} == shapes
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not any(buffer.is_meta for buffer in model.buffers())
    assert tied.there.weight is tied.back.weight
    assert torch.equal(run_layers(chain_of(model), leaves, (value,))[0], expected)


def test_a_module_gets_its_own_weights_back_after_an_error() -> None:
    tied = Tied()
    model = nn.Sequential(tied)
    parameters = dict(model.named_parameters())
    with pytest.raises(ValueError, match="no numbers"):
        run_layers(chain_of(model), leaves_like(model, 1), (torch.full((2, 6), float("nan")),))
    assert all(dict(model.named_parameters())[name] is parameter for name, parameter in parameters.items())
    assert tied.there.weight is tied.back.weight


def test_weights_stand_in_every_place_for_as_long_as_the_block() -> None:
    tied = Tied()
    model = nn.Sequential(nn.Linear(6, 6), tied)
    parameters, leaves = dict(model.named_parameters()), leaves_like(model, 1)
    with weights_in_place(chain_of(model), leaves):
        assert model[0].weight is leaves["0.weight"]
        assert tied.there.weight is tied.back.weight is leaves["1.there.weight"]
    assert all(dict(model.named_parameters())[name] is parameter for name, parameter in parameters.items())
    assert tied.there.weight is tied.back.weight


def test_a_missing_weight_leaves_the_modules_as_they_were() -> None:
    model = nn.Sequential(nn.Linear(6, 6), Tied())
    parameters, leaves = dict(model.named_parameters()), leaves_like(model, 1)
    del leaves["1.back.bias"]
    with pytest.raises(KeyError, match=r"1\.back\.bias"), weights_in_place(chain_of(model), leaves):
        pass
    assert all(dict(model.named_parameters())[name] is parameter for name, parameter in parameters.items())
