"""A cut model as stages in one thread, each with tensors of its own, and the same model as one stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from hetpipe.model.cut_model import CutModel, Signature
from hetpipe.pipeline.chain import Layer, Values, cut_chain, weights_in_place
from hetpipe.pipeline.compute import StageCompute
from hetpipe.pipeline.layering import own_loss
from hetpipe.pipeline.seeds import seed_generators
from hetpipe.values.ids import Minibatch, VirtualWorkerIndex

P = Minibatch(1)
CPU = torch.device("cpu")

#: What a model is called with: a mapping, or a tuple.
Made = Mapping[str, Tensor] | tuple[Tensor, ...]


@dataclass(frozen=True)
class Outcome:
    loss: float
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]


def differences(one: Outcome, other: Outcome) -> list[str]:
    """What is not equal to the bit, by name."""
    found = [] if one.loss == other.loss else [f"loss {one.loss} {other.loss}"]
    for name, gradient in one.gradients.items():
        if not _equal(gradient, other.gradients[name]):
            found.append(name)
    return found + [name for name, buffer in one.buffers.items() if not _equal(buffer, other.buffers[name])]


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other if one is None or other is None else torch.equal(one, other)


class Subject:
    """A model, made twice: once to be cut, once as it is."""

    def __init__(
        self,
        build: Callable[[], nn.Module],
        example: Made,
        *,
        loss: Callable[[Any], Tensor] | None = None,
        keep_all: bool = True,
    ) -> None:
        """Cut it on `example`; `loss` takes its output, None: it has its own."""
        self._loss = loss or own_loss
        torch.manual_seed(0)
        self.bare = build()
        torch.manual_seed(0)
        model = build()
        is_mapping = isinstance(example, Mapping)
        keys = tuple(example) if isinstance(example, Mapping) else tuple(map(str, range(len(example))))
        self.signature = Signature(keys, is_mapping=is_mapping)
        self.layers: tuple[Layer, ...] = cut_chain(
            model,
            self.signature,
            values_of(example),
            results_of=own_loss if loss is None else lambda output: output,
            keep_all=keep_all,
        )
        assert self.layers[0].cut is not None
        self.cut: CutModel = self.layers[0].cut
        self.weights = {
            name: p.detach().clone().requires_grad_() for name, p in model.named_parameters() if p.requires_grad
        }
        self._buffers = {name: b.detach().clone() for name, b in model.named_buffers()}

    def uncut(self, made: Made) -> Outcome:
        """The model that nothing watches, from one seed."""
        seed_generators(7)
        output = self.signature.call(self.bare, dict(zip(self.signature.keys, copies(values_of(made)), strict=True)))
        loss = self._loss(output)
        named = {name: p for name, p in self.bare.named_parameters() if p.requires_grad}
        found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
        return Outcome(float(loss.detach()), dict(zip(named, found, strict=True)), dict(self.bare.named_buffers()))

    def watched(self, made: Made) -> Outcome:
        """The same, watched, from the same seed."""
        self.reset()
        seed_generators(7)
        with weights_in_place(self.layers, self.weights):
            self.cut.run(
                0, len(self.layers), self.weights, copies(values_of(made)), seed=lambda _: None, normalise=lambda v: v
            )
            loss = self._loss(self.cut.output)
            found = torch.autograd.grad(loss, list(self.weights.values()), allow_unused=True)
        return Outcome(float(loss.detach()), dict(zip(self.weights, found, strict=True)), self._found_buffers())

    def stages(self, bounds: Sequence[int], made: Made) -> Outcome:
        """Stages between `bounds`; without any it is one."""
        self.reset()
        edges = [0, *bounds, len(self.layers)]
        groups = [self.layers[first:last] for first, last in pairwise(edges)]
        computes = [
            StageCompute(
                group,
                vw=VirtualWorkerIndex(0),
                seed=5,
                device=CPU,
                loss=(lambda _, __: self._loss(self.cut.output)) if group is groups[-1] else None,
                watches_activations=False,
            )
            for group in groups
        ]
        own = [{n: self.weights[n] for layer in group for n in layer.parameters.values()} for group in groups]
        values: Values = copies(values_of(made))
        for compute, weights in zip(computes, own, strict=True):
            received = values if compute is computes[0] else copies(tuple(value.detach() for value in values))
            values = compute.forward(P, weights, received)
        loss = computes[-1].loss(P, values, None)
        gradients: dict[str, Tensor | None] = {}
        sent: Sequence[Tensor | None] | None = None
        buffers = self._found_buffers()
        for compute, weights in reversed(list(zip(computes, own, strict=True))):
            found = compute.backward(P, weights, sent)
            gradients |= found.weights
            sent = found.inputs
        return Outcome(loss, gradients, buffers)

    def reset(self) -> None:
        """The buffers as they were made."""
        with torch.no_grad():
            for name, buffer in self.cut.model.named_buffers():
                buffer.copy_(self._buffers[name])

    def _found_buffers(self) -> dict[str, Tensor]:
        return {name: b.detach().clone() for name, b in self.cut.model.named_buffers()}


def values_of(made: Made) -> Values:
    return tuple(made.values()) if isinstance(made, Mapping) else made


def copies(values: Values) -> Values:
    return tuple(value.clone() for value in values)


def assert_cut_anywhere(subject: Subject, made: Made, *, at_most: int = 1000) -> int:
    """At each border of layers, and at all at once: the bits of one stage. Returns how many borders there are."""
    whole = subject.stages((), made)
    count = len(subject.layers)
    step = max(1, count // at_most)
    for bound in range(1, count, step):
        found = differences(whole, subject.stages((bound,), made))
        assert not found, f"cut before {subject.layers[bound].name}: {found[:4]}"
    assert not differences(whole, subject.stages(tuple(range(1, count)), made))
    return count - 1
