"""Proof before training, for models that are cut by their own forward (`docs/semantics/models.md`).

Runs of one minibatch are compared. *Bare* is the unmodified model. *Watched* is the same forward as one stage, without
the seeding and normalisation of stages; it must give the same bits. With both, the model as one stage (*whole*) and
with every layer as a stage of its own (*cut*) must again give the same bits. This is repeated on other weights, which a
second instance of the model really has, and with two minibatches in flight.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from hetpipe.errors import CallableError, HetpipeError
from hetpipe.model.cut_model import CutModel
from hetpipe.model.structure import tensors_in
from hetpipe.model.user_errors import failures_after_cut, forward_failure, is_out_of_memory
from hetpipe.pipeline.callables import LossFunction, call_loss, own_loss
from hetpipe.pipeline.chain import Layer, SeedKey, Values, at_boundary, hooked, weights_in_place
from hetpipe.pipeline.comparison import same
from hetpipe.pipeline.compute import Differentiation, StageCompute
from hetpipe.pipeline.data import Batch
from hetpipe.pipeline.layering import why_one_layer
from hetpipe.pipeline.modes import modes_of
from hetpipe.pipeline.precision import autocast
from hetpipe.pipeline.proof import Proof, UncutFailure, other_weights, refuse_sparse, shares_tensors
from hetpipe.pipeline.seeds import layer_seed, preserved_generators, seed_generators
from hetpipe.values.ids import Minibatch, VirtualWorkerIndex
from hetpipe.values.profile import TIE

_VW = VirtualWorkerIndex(0)
_FIRST, _SECOND = Minibatch(1), Minibatch(2)
_CPU = torch.device("cpu")
_HEAD = "model: the cut model does not compute what the model computes"

_ONE_STAGE = "the model as one stage"

#: Cause and fix where the model fails as layers only.
_HANDED_ON = (
    "its modules hand something on in another way than by returning it or in an attribute, which later stages do not "
    "have: return it, or train the model with `workers: {stages: 1}`"
)

#: Limit on the borders listed in a notice.
_MAX_NAMED = 3

Weights = Mapping[str, Tensor]
Gradients = Mapping[str, Tensor | None]


@dataclass(frozen=True, slots=True)
class _Result:
    """Results of one minibatch, forward and backward."""

    loss: float
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]


def prove_cut_model(
    build: Callable[[], nn.Module],
    chain: Sequence[Layer],
    *,
    given_loss: LossFunction | None,
    loss: LossFunction,
    batches: tuple[Batch, Batch],
    seed: int,
    trains_whole: bool = False,
) -> Proof:
    """Compare the user's model with its layers; `chain` and the generators are left unchanged.

    Args:
        build: builds the user's model under the job's seed.
        chain: the layers of a model built by `build`.
        given_loss: the job's loss; None if the model computes it.
        loss: the loss as stages call it.
        batches: two minibatches of equal size.
        seed: seed of the job.
        trains_whole: the job has one stage per virtual worker, and no layer is run as a stage of its own.

    Raises:
        UncutFailure: the model fails on these minibatches.
        CallableError: the cut model computes something else; names the first difference and the fix.
    """
    cut = chain[0].cut
    assert cut is not None, "another proof is for chains"
    proof = _Proof(cut, chain, given_loss, loss, seed, trains_whole=trains_whole)
    with preserved_generators(), torch.enable_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            proof.run(build, *batches)
        finally:
            proof.restore()
    return Proof(batches[0].num_samples, is_exact=True, notices=_notices(cut))


def _notices(cut: CutModel) -> tuple[str, ...]:
    """Notices for the user about the cuts, as sentences."""
    if len(cut.layers) == 1:
        return (f"The model {why_one_layer(cut)}, so it trains in one stage per virtual worker",)
    return tuple(f"A module runs whole, on one stage: {why}" for why in cut.survey.whole)


class _Proof:
    def __init__(
        self,
        cut: CutModel,
        chain: Sequence[Layer],
        given_loss: LossFunction | None,
        loss: LossFunction,
        seed: int,
        *,
        trains_whole: bool,
    ) -> None:
        self._trains_whole = trains_whole
        self._cut = cut
        self._chain = chain
        self._given_loss = given_loss
        self._loss = loss
        self._seed = seed
        for layer in chain:
            layer.module.to(_CPU)
        self._start = self._buffers(cut.model)

    def restore(self) -> None:
        """Restore the buffers."""
        self._restore(self._cut.model)

    def _restore(self, model: nn.Module) -> None:
        with torch.no_grad():
            for name, buffer in self._state(model):
                buffer.copy_(self._start[name])

    def run(self, build: Callable[[], nn.Module], first: Batch, second: Batch) -> None:
        """Run all comparisons."""
        bare = build()
        if shares_tensors(bare, self._cut.model.modules()):
            raise CallableError("model: called twice, it returned the same modules; return a new one at each call")
        modes_of(bare)  # sets its training mode
        weights = {
            name: layer.module.get_parameter(local).detach().requires_grad_()
            for layer in self._chain
            for local, name in layer.parameters.items()
        }
        found = self._bare_unreplaced(bare, first)
        self._compare_made(bare, weights)
        try:
            self._compare(found, self._watched(weights, first), "the model as it is")
        except CallableError:
            self._check_repeatable(build, first)
            raise
        del found
        others = other_weights(weights)
        with torch.no_grad():
            for name, parameter in bare.named_parameters():
                if name in others:
                    parameter.copy_(others[name])
        self._restore(bare)
        self._compare(self._bare(bare, first), self._watched(others, first), "the model on other weights")
        # After the first minibatch, like the next one of a training loop.
        second_found = self._watched(others, second, starts_anew=False)
        self._compare(self._bare(bare, second), second_found, "the second minibatch of the model as it is")
        # From here on no more tensors are kept than are compared: of a large model each set of them is as large.
        del bare, second_found
        (whole,) = self._stages(others, [first], alone=False)
        self._compare(self._watched(others, first, is_seeded=True), whole, "the model on the same seeds")
        are_alone = not self._trains_whole
        if are_alone:
            (cut,) = self._stages(others, [first], alone=True)
            self._compare(whole, cut, _ONE_STAGE)
            del cut
        in_first, in_second = self._stages(others, [first, second], alone=are_alone)
        self._compare_gradients(whole.gradients, in_first.gradients, "the same with two minibatches in flight")
        del whole, in_first
        if are_alone:
            (_, both_second) = self._stages(others, [first, second], alone=False)
            self._compare(both_second, in_second, f"the second minibatch of {_ONE_STAGE}")

    def _buffers(self, model: nn.Module) -> dict[str, Tensor]:
        """Copies of the buffers of `model`, and of frozen parameters that the forward writes."""
        return {name: tensor.detach().clone() for name, tensor in self._state(model)}

    def _state(self, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        yield from model.named_buffers()
        rewritten = self._cut.description.rewritten
        yield from ((name, parameter) for name, parameter in model.named_parameters() if name in rewritten)

    def _autocast(self) -> AbstractContextManager[object]:
        return autocast(self._chain[0].precision, _CPU)

    # -- runs --------------------------------------------------------------------------------------------------------

    def _bare(self, model: nn.Module, batch: Batch) -> _Result:
        seed_generators(self._seed)
        tensors = dict(zip(self._cut.signature.keys, _copies(batch.inputs), strict=True))
        try:
            with self._autocast():
                output = self._cut.signature.call(model, tensors)
        except HetpipeError:
            raise
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise UncutFailure(forward_failure(model, tensors, error)) from error
        with self._autocast():
            loss = own_loss(output) if self._given_loss is None else call_loss(self._given_loss, output, batch.target)
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        gradients = _gradients(loss, named)
        refuse_sparse(gradients)
        return _Result(float(loss.detach()), gradients, self._buffers(model))

    def _watched(self, weights: Weights, batch: Batch, *, is_seeded: bool = False, starts_anew: bool = True) -> _Result:
        """The watched forward, under one seed, or seeded and normalised as on stages."""
        if starts_anew:
            self.restore()
        seed_generators(self._seed)

        def seed(key: SeedKey) -> None:
            seed_generators(layer_seed(self._seed, _VW, _FIRST, key))

        with failures_after_cut("a later forward of the proof"), weights_in_place(self._chain, weights):
            with self._autocast():
                self._cut.run(
                    0,
                    len(self._chain),
                    weights,
                    _copies(batch.inputs),
                    seed=seed if is_seeded else _leave,
                    normalise=(lambda value: at_boundary((value,))[0]) if is_seeded else (lambda value: value),
                )
                loss = call_loss(self._loss, tuple(tensors_in(self._cut.output)), batch.target)
            gradients = hooked(self._chain, _gradients(loss, weights))
        return _Result(float(loss.detach()), gradients, self._buffers(self._cut.model))

    def _stages(self, weights: Weights, batches: Sequence[Batch], *, alone: bool) -> list[_Result]:
        """Run `batches`, with all forwards before all backwards; the buffers are those after the forwards."""
        self.restore()
        groups = [(layer,) for layer in self._chain] if alone else [tuple(self._chain)]
        each, fix = (", with each layer as a stage,", (_HANDED_ON,)) if alone else ("", ())
        stages = [
            StageCompute(
                group,
                vw=_VW,
                seed=self._seed,
                device=_CPU,
                loss=self._loss if group is groups[-1] else None,
                watches_activations=False,
            )
            for group in groups
        ]
        own = [{n: weights[n] for layer in group for n in layer.parameters.values()} for group in groups]
        losses: list[float] = []
        names = [self._cut.value_names(group[0].index) for group in groups]
        for p, batch in zip((_FIRST, _SECOND), batches, strict=False):
            values: Values = _copies(batch.inputs)
            with failures_after_cut(f"the forward of minibatch {p} of the proof{each}", *fix):
                for stage, part, named in zip(stages, own, names, strict=True):
                    received = values if stage is stages[0] else tuple(map(_received, named, values))
                    values = stage.forward(p, part, received)
            losses.append(float(stages[-1].loss(p, values, batch.target)))
        buffers = self._buffers(self._cut.model)
        results: list[_Result] = []
        for p, value in zip((_FIRST, _SECOND), losses, strict=False):
            gradients: dict[str, Tensor | None] = {}
            sent: Sequence[Tensor | None] | None = None
            for stage, part in reversed(list(zip(stages, own, strict=True))):
                with failures_after_cut(f"the backward of minibatch {p} of the proof{each}", *fix):
                    found = stage.backward(p, part, sent)
                gradients |= found.weights
                sent = found.inputs
            results.append(_Result(value, gradients, buffers))
        return results

    def _bare_unreplaced(self, model: nn.Module, batch: Batch) -> _Result:
        """The first minibatch of the unmodified model.

        Raises:
            CallableError: its forward puts other modules in the place of its own.
        """
        before = dict(model.named_modules())
        found = self._bare(model, batch)
        after = dict(model.named_modules())
        other = next((path for path in before if after.get(path) is not before[path]), None)
        if other is not None:
            raise CallableError(
                f"model: its forward replaces {other} ({type(before[other]).__name__}) by another module, and stages "
                "build the model as it was before; configure it so that it is built as it runs, or, if only the first "
                "forward does it, run the model once on a sample before you return it"
            )
        return found

    def _check_repeatable(self, build: Callable[[], nn.Module], batch: Batch) -> None:
        """Check that two instances of the unmodified model give the same loss under one seed.

        Raises:
            CallableError: they do not.
        """
        losses: list[float] = []
        for _ in range(2):
            model = build()
            modes_of(model)
            losses.append(self._bare(model, batch).loss)
        if losses[0] != losses[1] and not losses[0] != losses[0]:
            raise CallableError(
                f"model: on one minibatch under one seed, two instances of it give the losses {losses[0]:.9g} and "
                f"{losses[1]:.9g}, so no stage can repeat what another one does: its forward seeds a generator anew "
                "(torch.seed()), or draws from one of its own; let it draw from torch, `random` or NumPy's global "
                "functions"
            )

    # -- comparisons -------------------------------------------------------------------------------------------------

    def _compare_made(self, model: nn.Module, weights: Weights) -> None:
        again = dict(model.named_parameters())
        for name, weight in weights.items():
            if name not in again or not same(again[name].detach(), weight.detach()):
                raise CallableError(
                    f"model: built twice under one seed, its parameter {name} differs; every stage builds the model "
                    "itself: draw from torch, `random` or NumPy's global functions, or from a generator with a fixed "
                    "seed"
                )

    def _compare(self, expected: _Result, found: _Result, who: str) -> None:
        self._compare_gradients(expected.gradients, found.gradients, who, (expected.loss, found.loss))
        for name, buffer in expected.buffers.items():
            if not same(buffer, found.buffers[name]):
                raise CallableError(f"{_HEAD}: first difference at {name}, compared with {who}")

    def _compare_gradients(
        self, expected: Gradients, found: Gradients, who: str, losses: tuple[float, float] = (0.0, 0.0)
    ) -> None:
        if losses[0] != losses[1] and not (losses[0] != losses[0] and losses[1] != losses[1]):
            raise CallableError(
                f"{_HEAD}: compared with {who}, the loss is {losses[1]:.9g} instead of {losses[0]:.9g}. It computes "
                "with tensors that are not registered as parameters, or keeps state between minibatches; "
                f"{self._fix(who)}"
            )
        for layer in self._chain:
            for name in layer.parameters.values():
                if (expected[name] is None) != (found[name] is None) or not same(expected[name], found[name]):
                    difference = _by(expected[name], found[name])
                    raise CallableError(
                        f"{_HEAD}: first difference at {layer.name} (gradient of {name}{difference}), compared "
                        f"with {who}; {self._fix(who)}"
                    )

    def _fix(self, who: str) -> str:
        """The fix for a difference to `who`, with any unregistered tensors that modules hold."""
        known = {id(tensor) for tensor in (*self._cut.model.parameters(), *self._cut.model.buffers())}
        for path, module in self._cut.model.named_modules():
            for attribute, value in vars(module).items():
                if attribute.startswith("_"):
                    continue
                for tensor in tensors_in(value):
                    if id(tensor) not in known or isinstance(tensor, nn.Parameter):
                        where = f"{path}.{attribute}" if path else attribute
                        return f"{where} holds a tensor that is not registered there"
        if who.endswith(_ONE_STAGE):
            return "train the model with `workers: {stages: 1}`"
        return "register its weights as parameters, keep its state in buffers, and draw with torch"


def _gradients(loss: Tensor, weights: Weights) -> dict[str, Tensor | None]:
    """The gradients of `weights`, which are leaves and in the modules, with those of nested backwards."""
    starts = [(get_gradient_edge(loss), None)] if loss.requires_grad else []
    return Differentiation().run(starts, weights, (), {})[0]


def _received(name: str, value: Tensor) -> Tensor:
    """A value as after a transfer: the next stage has its own memory.

    Not of a tied weight, which no stage writes, and which the first one sends as a copy: every stage between two uses
    of it passes it on, so a model with a tied vocabulary would need as many copies of it as it has layers.
    """
    return value.detach() if name.startswith(TIE) else value.detach().clone()


def _leave(_: Any) -> None:
    """Do not seed."""


def _copies(values: Values) -> Values:
    return tuple(value.clone() for value in values)


def _by(expected: Tensor | None, found: Tensor | None) -> str:
    if expected is None or found is None:
        return ", which is there on one side only"
    return f", {float((expected - found).abs().max()):.1e}" if expected.shape == found.shape else ""
