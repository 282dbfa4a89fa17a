"""A minibatch with recomputed runs of layers, in the reference executor (`memory-policy.md` §4).

Each run, and the layers between two runs, is a computation of its own: of a run nothing is left after its forward but
its input and the buffers that it found, and its backward begins with its forward, on the weights of that time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from hetpipe.pipeline.chain import Layer, SeedKey, Values, run_layers, weights_in_place

Seed = Callable[[SeedKey], None]


@dataclass(frozen=True, slots=True)
class _Part:
    """Consecutive layers after their forward."""

    layers: Sequence[Layer]
    inputs: Values
    """Leaves."""
    outputs: Values | None
    """With their graph; None if they are recomputed."""
    buffers: Sequence[Tensor]
    """Values of the buffers before the forward."""


class RecomputedPass:
    """One minibatch: `forward`, the loss of what that returns, `backward`."""

    def __init__(self, layers: Sequence[Layer], runs: Sequence[tuple[int, int]], seed: Seed) -> None:
        """Of `layers`, those in `runs` [first, last) are recomputed."""
        borders = sorted({0, len(layers), *(border for run in runs for border in run)})
        self._cut = [(layers[a:b], (a, b) in runs) for a, b in pairwise(borders)]
        self._seed = seed
        self._parts: list[_Part] = []
        self._ends: Values = ()

    def forward(self, weights: Mapping[str, Tensor], inputs: Values) -> Values:
        """Run the layers on `weights`; returns what the loss takes."""
        values = inputs
        for layers, is_recomputed in self._cut:
            given = tuple(value.detach().clone().requires_grad_(value.requires_grad) for value in values)
            buffers = [buffer.clone() for buffer in _buffers_of(layers)]
            values = run_layers(layers, weights, tuple(_copy(value) for value in given), self._seed)
            self._parts.append(_Part(layers, given, None if is_recomputed else values, buffers))
        self._ends = tuple(value.detach().requires_grad_(value.requires_grad) for value in values)
        return self._ends

    def backward(self, start: Tensor, weights: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
        """The gradients of `start`, by name of the parameter; `weights` are the leaves of the forward."""
        found: dict[str, Tensor | None] = dict.fromkeys(weights)
        gradients = torch.autograd.grad(start, [value for value in self._ends if value.requires_grad])
        for part in reversed(self._parts):
            outputs = part.outputs if part.outputs is not None else self._again(part, weights)
            names = [name for layer in part.layers for name in layer.parameters.values() if weights[name].requires_grad]
            inputs = [value for value in part.inputs if value.requires_grad]
            ends = [value for value in outputs if value.requires_grad]
            with weights_in_place(part.layers, weights):
                wanted = [*(weights[name] for name in names), *inputs]
                if not wanted:
                    break
                each = torch.autograd.grad(ends, wanted, gradients, allow_unused=True)
            found.update(zip(names, each, strict=False))
            gradients = tuple(
                torch.zeros_like(value) if gradient is None else gradient
                for value, gradient in zip(inputs, each[len(names) :], strict=True)
            )
        return found

    def _again(self, part: _Part, weights: Mapping[str, Tensor]) -> Values:
        """A second forward of a run, which leaves the buffers as they are."""
        now = [buffer.clone() for buffer in _buffers_of(part.layers)]
        _write(part.layers, part.buffers)
        outputs = run_layers(part.layers, weights, tuple(_copy(value) for value in part.inputs), self._seed)
        _write(part.layers, now)
        return outputs


def _copy(value: Tensor) -> Tensor:
    """A copy that layers may modify in place."""
    return value.clone() if value.requires_grad else value.detach().clone()


def _buffers_of(layers: Sequence[Layer]) -> list[Tensor]:
    return [buffer for layer in layers for buffer in layer.module.buffers()]


def _write(layers: Sequence[Layer], values: Sequence[Tensor]) -> None:
    """Let the buffers have other values, which no version counter sees."""
    for buffer, value in zip(_buffers_of(layers), values, strict=True):
        buffer.data.copy_(value)
