"""A cut model as stages in one thread, each with tensors of its own, and the same model as one stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hetpipe.model.absent import AbsentTensor
from hetpipe.model.cut_model import CutModel, Signature
from hetpipe.model.draws import replaced
from hetpipe.model.structure import tensors_in
from hetpipe.pipeline.callables import own_loss
from hetpipe.pipeline.chain import Layer, Values, at_boundary, cut_chain, weights_in_place
from hetpipe.pipeline.compute import StageCompute
from hetpipe.pipeline.seeds import layer_seed, seed_generators
from hetpipe.values.ids import Minibatch, VirtualWorkerIndex

P = Minibatch(1)
VW = VirtualWorkerIndex(0)
SEED = 5
CPU = torch.device("cpu")

#: What a model is called with: a mapping, or a tuple.
Made = Mapping[str, Tensor] | tuple[Tensor, ...]


@dataclass(frozen=True)
class Outcome:
    loss: float
    gradients: Mapping[str, Tensor | None]
    buffers: Mapping[str, Tensor]
    outputs: tuple[Tensor | None, ...] = ()
    """What the model returned; None for what a later stage does not need and did not get."""


def differences(one: Outcome, other: Outcome) -> list[str]:
    """What is not equal to the bit, by name."""
    found = [] if one.loss == other.loss else [f"loss {one.loss} {other.loss}"]
    for index, (output, again) in enumerate(zip(one.outputs, other.outputs, strict=True)):
        if output is not None and again is not None and not torch.equal(output, again):
            found.append(f"output {index}")
    for name, gradient in one.gradients.items():
        if not _equal(gradient, other.gradients[name]):
            found.append(name)
    return found + [name for name, buffer in one.buffers.items() if not _equal(buffer, other.buffers[name])]


def outputs_of(output: Any) -> tuple[Tensor | None, ...]:
    return tuple(None if isinstance(t, AbsentTensor) else t.detach().clone() for t in tensors_in(output))


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
        self._buffers = self._found_buffers()

    def uncut(self, made: Made) -> Outcome:
        """The model that nothing watches, from one seed."""
        self.reset()
        seed_generators(7)
        return self._bare(made)

    def uncut_with_the_seeds_of_stages(self, made: Made) -> Outcome:
        """The model that nothing watches; before each draw the generators are seeded as on a stage.

        Which draws there are is taken from a forward of one stage, whose seeds are noted; that they are the bare
        model's, in its order, is asserted.
        """
        keys: list[str] = []

        def noting(*parts: Any) -> int:
            keys.append(parts[-1])
            return layer_seed(*parts)

        with patch("hetpipe.pipeline.compute.layer_seed", noting):
            self.stages((), made)
        self.reset()
        ways = self.cut._modes[True].context
        draws = _SeededDraws(iter(keys), ways.drawing_functions)
        with draws.watching(self.bare, ways.drawing_paths - ways.open_paths):
            found = self._bare(made)
        assert draws.are_all_seeded, "a stage seeds for a draw that the model does not make"
        return found

    def _bare(self, made: Made) -> Outcome:
        output = self.signature.call(self.bare, dict(zip(self.signature.keys, copies(values_of(made)), strict=True)))
        loss = self._loss(output)
        named = {name: p for name, p in self.bare.named_parameters() if p.requires_grad}
        found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
        buffers = self._buffers_of(self.bare)
        gradients: dict[str, Tensor | None] = dict(zip(named, found, strict=True))
        return Outcome(float(loss.detach()), gradients, buffers, outputs_of(output))

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
        gradients: dict[str, Tensor | None] = dict(zip(self.weights, found, strict=True))
        return Outcome(float(loss.detach()), gradients, self._found_buffers(), outputs_of(self.cut.output))

    def stages(self, bounds: Sequence[int], made: Made) -> Outcome:
        """Stages between `bounds`; without any it is one."""
        self.reset()
        edges = [0, *bounds, len(self.layers)]
        groups = [self.layers[first:last] for first, last in pairwise(edges)]
        computes = [
            StageCompute(
                group,
                vw=VW,
                seed=SEED,
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
        loss = float(computes[-1].loss(P, values, None))
        outputs = outputs_of(self.cut.output)
        gradients: dict[str, Tensor | None] = {}
        sent: Sequence[Tensor | None] | None = None
        buffers = self._found_buffers()
        for compute, weights in reversed(list(zip(computes, own, strict=True))):
            found = compute.backward(P, weights, sent)
            gradients |= found.weights
            sent = found.inputs
        return Outcome(loss, gradients, buffers, outputs)

    def reset(self) -> None:
        """The buffers as they were made."""
        with torch.no_grad():
            for model in (self.cut.model, self.bare):
                for name, buffer in self._state_of(model):
                    buffer.copy_(self._buffers[name])

    def _found_buffers(self) -> dict[str, Tensor]:
        return self._buffers_of(self.cut.model)

    def _buffers_of(self, model: nn.Module) -> dict[str, Tensor]:
        """Buffers, and frozen parameters that the forward writes."""
        return {name: tensor.detach().clone() for name, tensor in self._state_of(model)}

    def _state_of(self, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        yield from model.named_buffers()
        rewritten = self.cut.description.rewritten
        yield from ((name, parameter) for name, parameter in model.named_parameters() if name in rewritten)


class _SeededDraws(TorchFunctionMode):
    """Seeds a bare model before its draws: of modules as a whole, and of functions outside of these."""

    def __init__(self, keys: Iterator[str], functions: frozenset[Any]) -> None:
        super().__init__()
        self._keys = keys
        self._functions = functions
        self._depth = 0

    @property
    def are_all_seeded(self) -> bool:
        return next(self._keys, None) is None

    @contextmanager
    def watching(self, model: nn.Module, paths: frozenset[str]) -> Iterator[None]:
        """Watch the modules at `paths`, and functions."""
        hooks = []
        for path in paths:
            module = model.get_submodule(path)
            hooks.append(module.register_forward_pre_hook(partial(self._enter, path), with_kwargs=True))
            hooks.append(module.register_forward_hook(self._leave))
        try:
            with replaced(self._functions, self._seeded), self:
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in self._functions and not self._depth:
            self._seed_for(func.__name__)
            args, kwargs = _normal((args, kwargs))
            return _normal(func(*args, **kwargs))
        return func(*args, **kwargs)

    def _seeded(self, function: Any) -> Any:
        """A function of `random` or NumPy that is seeded before it draws."""

        def draw(*args: Any, **kwargs: Any) -> Any:
            if not self._depth:
                self._seed_for(function.__name__)
            return function(*args, **kwargs)

        return draw

    def _enter(self, path: str, _: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if not self._depth:
            self._seed_for(path)
            args, kwargs = _normal((args, kwargs))
        self._depth += 1
        return args, kwargs

    def _leave(self, _: nn.Module, __: Any, result: Any) -> Any:
        self._depth -= 1
        return result if self._depth else _normal(result)

    def _seed_for(self, name: str) -> None:
        key = next(self._keys, "")
        own = key.rpartition("/")[2].partition("@")[0].removeprefix("shared ")
        assert own == name, f"the model draws in {name}, and a stage would for {key or 'nothing more'}"
        seed_generators(layer_seed(SEED, VW, P, key))


def _normal(value: Any, done: dict[int, Tensor] | None = None) -> Any:
    """The same in the layout that values have which cross a cut: dropout draws in the order of memory.

    What is the same tensor twice stays so: `nn.MultiheadAttention` asks whether key and value are one.
    """
    done = {} if done is None else done
    if isinstance(value, tuple):
        return tuple(_normal(item, done) for item in value)
    if isinstance(value, dict):
        return {key: _normal(item, done) for key, item in value.items()}
    if not isinstance(value, Tensor) or not value.is_floating_point() or isinstance(value, nn.Parameter):
        return value
    if id(value) not in done:
        (done[id(value)],) = at_boundary((value,))
    return done[id(value)]


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
