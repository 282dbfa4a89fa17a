"""Proof before training that the cut model computes the same as the user's own model.

The user's model is run as the user would run it, *uncut*; its layers are run as stages run them, each as a stage of its
own, with weights put in place for that layer alone (*cut*). With the same minibatch and seeds, outputs, loss, gradients
and buffers must be equal. `docs/semantics/proof.md` lists the checks, their tolerances and their cost.

Two instances of the model are needed, so the user's callable is called a second time. Hooks on the layers of the uncut
one seed the generators and normalise values where stages would, so that equal means equal to the bit.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from hetpipe.errors import CallableError, HetpipeError
from hetpipe.pipeline.callables import LossFunction, MapDataset, call_loss, in_place_of, stream_of
from hetpipe.pipeline.chain import Layer, SeedKey, Values, as_values, at_boundary, chain_of, has_forward
from hetpipe.pipeline.comparison import TensorComparison, same
from hetpipe.pipeline.compute import StageCompute
from hetpipe.pipeline.data import Batch
from hetpipe.pipeline.hidden_references import leaves_behind, strangers, unregistered_paths
from hetpipe.pipeline.modes import enter_training
from hetpipe.pipeline.precision import autocast
from hetpipe.pipeline.seeds import (
    evaluation_layer_seed,
    generator_states,
    layer_seed,
    preserved_generators,
    seed_generators,
)
from hetpipe.values.ids import Minibatch, VirtualWorkerIndex
from hetpipe.values.precision import Precision
from hetpipe.values.quantities import bytes_text

#: Samples in the proof's minibatch; some user code needs whole minibatches, and gets them.
PROVEN_SAMPLES = 4

#: Virtual worker whose minibatches the proof computes.
_VW = VirtualWorkerIndex(0)
_FIRST, _SECOND = Minibatch(1), Minibatch(2)
_CPU = torch.device("cpu")

#: Relative difference between other weights and the initial ones, and absolute difference where these are zero.
_CHANGED_SHARE = 0.05
_CHANGED_ZERO = 1e-3

#: Description of a layer whose outputs depend on more than its inputs, weights, buffers and seed.
_KEEPS = (
    "it reads state left by another layer, or keeps state outside its buffers; pass it on as an output, or keep it in "
    "a registered buffer"
)

_HEAD = "model: the cut model does not compute what the model computes"


@dataclass(frozen=True, slots=True)
class Proof:
    """Result of a successful proof."""

    samples: int
    """Samples in each minibatch of the proof."""
    is_exact: bool
    """Whether everything was equal to the bit, rather than within rounding."""
    notices: tuple[str, ...] = ()
    """Notices for the user, as sentences."""


#: Explains a difference at a layer, or after the last one, as sentences.
Explain = Callable[[Layer | None], str]


class UncutFailure(CallableError):
    """The user's own model fails on the proof's minibatch."""


def refuse_sparse(gradients: Mapping[str, Tensor | None]) -> None:
    """Check the gradients of the user's own model.

    Args:
        gradients: of its parameters, by name.

    Raises:
        CallableError: one is a sparse tensor.
    """
    for name, gradient in gradients.items():
        if gradient is not None and gradient.layout is not torch.strided:
            raise CallableError(
                f"model: the gradient of {name} is sparse, and optimizers, links and shards compute with dense ones; "
                "build its module (Embedding, EmbeddingBag) with `sparse=False`"
            )


def prove_model(
    build: Callable[[], nn.Module],
    chain: Sequence[Layer],
    *,
    loss: LossFunction,
    batches: tuple[Batch, Batch],
    seed: int,
) -> Proof:
    """Compare the user's model with its layers; `chain` and the generators are left unchanged.

    Args:
        build: builds the user's model under the job's seed.
        chain: the layers of a model built by `build` that has not run yet.
        loss: the job's loss.
        batches: two minibatches of equal size.
        seed: seed of the job.

    Raises:
        UncutFailure: the model or a layer fails on these minibatches.
        CallableError: the layers compute something else; names the first difference and the fix.
    """
    first, second = batches
    buffers = _buffers_of(chain)
    try:
        # Warnings of user code will appear often enough during training.
        with preserved_generators(), torch.enable_grad(), warnings.catch_warnings(), _memory_failures(chain):
            warnings.simplefilter("ignore")
            return _Proof(build, chain, loss, seed).run(first, second)
    finally:
        _load_buffers(chain, buffers)


def prove_data(
    key: str, reference: str, build: Callable[[], MapDataset], dataset: MapDataset, read: Callable[[MapDataset], Batch]
) -> None:
    """Check that a minibatch is the same when it is read again, and when it is read from a newly built data set.

    The first and the last stage, and their later incarnations, each build the data set and read it independently.

    Args:
        key: job key of the data set.
        reference: value of the key.
        build: builds the data set under its seed.
        dataset: a data set built by `build`.
        read: reads the minibatch under its seed.

    Raises:
        CallableError: it differs, so that inputs and targets would not match.
    """
    with preserved_generators():
        once = read(dataset)
        part = _different_part(read(dataset), once)
        if part:
            raise CallableError(
                f"{key}: the {part} of one minibatch, read twice under one seed, differ: a sample may depend only on "
                "its index and on draws from torch, `random` or NumPy's global functions (numpy.random.rand), which "
                "are seeded for every minibatch; a generator that the data set keeps (numpy.random.default_rng()) "
                "cannot be seeded: create it in __getitem__, as "
                "numpy.random.default_rng(numpy.random.randint(2**31))"
            )
        part = _different_part(read(build()), once)
        if part:
            raise CallableError(
                f"{key}: the {part} of one minibatch differ when `{reference}()` has been called again: the first and "
                "the last stage each build the data set themselves, under one seed; make its random draws from "
                "torch, `random` or NumPy's global functions, or from a generator with a fixed seed"
            )


def prove_jump(key: str, dataset: MapDataset, read: Callable[[MapDataset], Batch]) -> None:
    """Check that a stream's `iterate_from` gives the samples that it gives there when read from the start.

    Args:
        key: job key of the stream.
        dataset: one without `iterate_from` has nothing to be checked.
        read: reads a minibatch that does not begin at position 0.

    Raises:
        CallableError: it does not.
    """
    stream = stream_of(dataset)
    if stream is None or not stream.jumps:
        return
    with preserved_generators():
        stream.rewind()
        part = _different_part(read(dataset), read(in_place_of(dataset, stream.without_jumps())))
    if part:
        raise CallableError(
            f"{key}: the {part} of a minibatch that begins at position 1 differ between `iterate_from(1)` and an "
            "iterator from the start; `iterate_from(position)` returns an iterator whose first sample is that at "
            "`position`, counted from 0"
        )


def _different_part(found: Batch, expected: Batch) -> str:
    if not same(found.inputs, expected.inputs):
        return "inputs"
    return "" if same(found.target, expected.target) else "targets"


@dataclass(slots=True)
class _Computed:
    """One minibatch of the uncut model."""

    outputs: tuple[Values, ...] | None
    """Outputs of every layer, in order; None if the model's forward does not call the layers one by one."""
    result: Values
    """Return value of the model."""
    loss: float
    gradients: dict[str, Tensor | None]


class _Proof:
    """One proof. Single use."""

    def __init__(self, build: Callable[[], nn.Module], chain: Sequence[Layer], loss: LossFunction, seed: int) -> None:
        self._chain = chain
        self._loss = loss
        self._seed = seed
        for layer in chain:
            layer.module.to(_CPU)
        self._weights = {
            name: layer.module.get_parameter(local).detach()
            for layer in chain
            for local, name in layer.parameters.items()
        }
        #: Comparison of computations with equal operations, and of others.
        self._strict, self._loose = TensorComparison(), TensorComparison(is_loose=True)
        self._uncut = _Uncut(_made_again(build, chain), loss, seed, chain[0].precision)
        self._check_made_alike()
        #: Layer → tensors that it uses without registering them.
        self._strangers: dict[int, list[Tensor]] = {}

    def run(self, first: Batch, second: Batch) -> Proof:
        uncut, chain = self._uncut, self._chain
        self._compare_as_made(first)
        # From here on the weights differ from the initial ones, as after any update.
        others = other_weights(self._weights)
        uncut.take_over(others)
        before = _buffers_of(chain)
        swapped = uncut.train(first)
        expected = self._compare(swapped, others, first, self._explain_weights)
        self._refuse_strangers()
        after = _buffers_of(chain)
        _load_buffers(chain, before)
        seen = self._compare_in_flight(others, expected, swapped.outputs, first, second)
        self._compare_alone(others, before, seen)
        _load_buffers(chain, after)
        self._compare_evaluations(others, first)
        return Proof(first.num_samples, self._strict.is_exact and not uncut.is_whole, tuple(uncut.notices))

    # -- what is compared --------------------------------------------------------------------------------------------

    def _compare_as_made(self, batch: Batch) -> None:
        """Compare on the initial weights, where only the model's definition can differ."""
        computed = self._uncut.train(batch)
        self._check_loss(batch, computed)
        leaves = {name: weight.detach().requires_grad_() for name, weight in self._weights.items()}
        self._compare(computed, leaves, batch, self._explain_definition)

    def _compare(
        self, computed: _Computed, weights: Mapping[str, Tensor], batch: Batch, explain: Explain
    ) -> dict[str, Tensor | None]:
        """Run the layers on `weights` and compare.

        Returns:
            The gradients, if every layer was seeded as on a stage; else nothing.
        """
        comparison = self._loose if computed.outputs is None else self._strict
        cut = _Cut(self._chain, self._loss, self._seed, is_seeded=computed.outputs is not None)
        self._compare_forward(cut, comparison, computed, weights, batch, explain)
        if self._strangers and explain == self._explain_definition:
            # Weights that are read in another layer lack gradients where they are registered; the outputs on other
            # weights will show where they are read.
            return {}

        def on_gradients(layer: Layer, found: Mapping[str, Tensor | None]) -> None:
            for name, gradient in found.items():
                difference = comparison.difference(gradient, computed.gradients[name], computed.gradients)
                if difference:
                    self._fail(layer, f"gradient of {name}", difference, explain)

        with _backward_failures("its layers, each as a stage of its own,"):
            cut.backward(_FIRST, weights, on_gradients)
        for layer, ours in zip(self._chain, self._uncut.chain, strict=True):
            for local, name in layer.buffers.items():
                difference = comparison.difference(layer.module.get_buffer(local), ours.module.get_buffer(local))
                if difference:
                    self._fail(layer, f"buffer {name}", difference, explain)
        return {} if computed.outputs is None else computed.gradients

    def _compare_forward(
        self,
        cut: _Cut,
        comparison: TensorComparison,
        computed: _Computed,
        weights: Mapping[str, Tensor],
        batch: Batch,
        explain: Explain,
    ) -> None:
        def on_layer(layer: Layer, _: Values, outputs: Values) -> None:
            self._strangers.update(cut.strangers)
            if computed.outputs is not None:
                self._check_values(comparison, outputs, computed.outputs[layer.index], layer, explain)

        if computed.outputs is None:
            seed_generators(self._seed)
        outputs, loss = cut.forward(_FIRST, weights, batch, on_layer)
        self._check_values(comparison, outputs, computed.result, None, explain)
        wide = torch.float64
        difference = comparison.difference(torch.tensor(loss, dtype=wide), torch.tensor(computed.loss, dtype=wide))
        if difference:
            raise CallableError(f"{_HEAD}: first difference at the loss ({difference}). {explain(None)}")

    def _check_values(
        self,
        comparison: TensorComparison,
        found: Values,
        expected: Values,
        layer: Layer | None,
        explain: Explain,
    ) -> None:
        if len(found) != len(expected):
            self._fail(layer, f"{len(found)} outputs", f"instead of {len(expected)}", explain)
        for index, (value, wanted) in enumerate(zip(found, expected, strict=True)):
            difference = comparison.difference(value.detach(), wanted)
            if difference:
                self._fail(layer, f"output {index}", difference, explain)

    def _compare_evaluations(self, weights: Mapping[str, Tensor], batch: Batch) -> None:
        """Compare in evaluation mode: the user's `eval()` on the model, and the flags set by stages."""
        expected, outputs = self._uncut.evaluate(batch)
        comparison = self._loose if outputs is None else self._strict

        def explain(_: Layer | None) -> str:
            return (
                "This is in evaluation mode: eval() of the model must change nothing but flags `training`, or what it "
                "changes must be in the forward of the layers."
            )

        def on_layer(layer: Layer, _: Values, found: Values) -> None:
            if outputs is not None:
                self._check_values(comparison, found, outputs[layer.index], layer, explain)

        cut = _Cut(self._chain, self._loss, self._seed, is_seeded=outputs is not None)
        if outputs is None:
            seed_generators(self._seed)
        found = cut.evaluate(weights, batch, on_layer)
        self._check_values(comparison, found, expected, None, explain)
        bare = self._uncut.evaluate_bare(batch)
        if bare is not None:
            self._check_values(self._loose, found, bare, None, explain)

    def _compare_in_flight(
        self,
        weights: Mapping[str, Tensor],
        expected: dict[str, Tensor | None],
        outputs: tuple[Values, ...] | None,
        first: Batch,
        second: Batch,
    ) -> list[tuple[Values, Values]]:
        """Run two forwards, then the backward of the first: as in a pipeline.

        Args:
            weights: leaves.
            expected: gradients of `first`; empty if unknown.
            outputs: outputs of every layer; None if unknown.
            first: a minibatch.
            second: another minibatch.

        Returns:
            Inputs and outputs of every layer in the first forward.
        """
        buffers = _buffers_of(self._chain)
        if not expected:

            def on_first(_: Layer, found: Mapping[str, Tensor | None]) -> None:
                expected.update(found)

            alone = _Cut(self._chain, self._loss, self._seed)
            alone.forward(_FIRST, weights, first)
            with _backward_failures("its layers, each as a stage of its own,"):
                alone.backward(_FIRST, weights, on_first)
            _load_buffers(self._chain, buffers)
        cut = _Cut(self._chain, self._loss, self._seed)
        seen: list[tuple[Values, Values]] = []

        def on_layer(layer: Layer, inputs: Values, found: Values) -> None:
            seen.append((inputs, tuple(value.detach().clone() for value in found)))
            if outputs is not None:
                self._check_again(layer, found, outputs[layer.index], "on the same input")

        def on_gradients(layer: Layer, found: Mapping[str, Tensor | None]) -> None:
            for name, gradient in found.items():
                difference = self._strict.difference(gradient, expected[name], expected)
                if difference:
                    raise _in_flight(layer, f"the gradient of {name} differs, {difference}")

        cut.forward(_FIRST, weights, first, on_layer)
        cut.forward(_SECOND, weights, second)
        try:
            cut.backward(_FIRST, weights, on_gradients)
        except HetpipeError:
            raise
        except Exception as error:
            raise _in_flight(
                cut.current, f"the backward of the first one fails, {type(error).__name__}: {error}"
            ) from error
        return seen

    def _compare_alone(
        self, weights: Mapping[str, Tensor], buffers: Sequence[Mapping[str, Tensor]], seen: list[tuple[Values, Values]]
    ) -> None:
        """Run every layer again, the last one first, on its earlier inputs, without a preceding forward of others."""
        _load_buffers(self._chain, buffers)
        cut = _Cut(self._chain, self._loss, self._seed)
        for layer in reversed(self._chain):
            inputs, expected = seen.pop()
            try:
                found = cut.run_layer(layer, _FIRST, weights, inputs)
            except CallableError as error:
                raise CallableError(
                    f"{error}. This happens when it runs without the layers before it: {_KEEPS}"
                ) from error
            self._check_again(layer, found, expected, "without the layers before it")

    def _check_again(self, layer: Layer, found: Values, expected: Values, how: str) -> None:
        for index, (value, wanted) in enumerate(zip(found, expected, strict=True)):
            difference = self._strict.difference(value.detach(), wanted)
            if difference:
                raise CallableError(
                    f"model: {place(layer)} computes something else when it is run again {how} (output {index}, "
                    f"{difference}): {_KEEPS}"
                )

    # -- refusals ----------------------------------------------------------------------------------------------------

    def _fail(self, layer: Layer | None, what: str, difference: str, explain: Explain) -> NoReturn:
        where = "what the model returns after its last layer" if layer is None else place(layer)
        raise CallableError(f"{_HEAD}: first difference at {where} ({what}, {difference}). {explain(layer)}")

    def _explain_definition(self, layer: Layer | None) -> str:
        """Explain a difference between layers and model on the initial weights."""
        hidden = self._hidden_in(layer)
        if hidden:
            return hidden
        calls = f"{self._uncut.irregular}. " if self._uncut.irregular else ""
        return (
            f"{calls}Give {type(self._uncut.model).__name__} a method layers() whose modules, in sequence, compute "
            "the same as its forward, and move computations between them into modules of their own."
        )

    def _explain_weights(self, layer: Layer | None) -> str:
        """Explain a difference between layers and model on other weights only."""
        return self._hidden_in(layer) or (
            "It computes with the weights that it was built with instead of those that are trained: read them from "
            "registered parameters of the same layer, in forward."
        )

    def _hidden_in(self, layer: Layer | None) -> str:
        """Tensors that `layer` uses without registering them, as a sentence; empty if there are none."""
        layers = self._chain if layer is None else (layer,)
        for each in layers:
            used = {id(tensor) for tensor in self._strangers.get(each.index, ())}
            paths = unregistered_paths(each, lambda tensor, used=used: id(tensor) in used)  # type: ignore[misc]
            if not paths:
                known = {id(parameter) for parameter in self._registered()}
                paths = unregistered_paths(each, lambda tensor, known=known: id(tensor) in known)  # type: ignore[misc]
            if paths:
                return self._not_registered(paths)
        return ""

    def _not_registered(self, paths: Sequence[str]) -> str:
        verb = "Parameter {} is" if len(paths) == 1 else "Parameters {} are"
        return (
            f"{verb.format(', '.join(paths))} used there but not registered. Use parameters in the layer that "
            "registers them; a weight that is used in two places needs both of them in one layer."
        )

    def _registered(self) -> Iterator[Tensor]:
        return (parameter for layer in self._chain for parameter in layer.module.parameters())

    def _refuse_strangers(self) -> None:
        """Check for parameters that no optimizer would train: cut and uncut model agree on them, both wrongly."""
        for layer in self._chain:
            used = {id(tensor) for tensor in self._strangers.get(layer.index, ())}
            if not used:
                continue
            paths = unregistered_paths(layer, lambda tensor: id(tensor) in used)  # noqa: B023 - used at once
            shapes = [str(list(tensor.shape)) for tensor in self._strangers[layer.index]]
            who = ", ".join(paths) or f"of shape {', '.join(shapes)}"
            raise CallableError(
                f"model: Parameter {who} is used in {place(layer)} but not registered, so no optimizer would ever "
                "train it; assign it to an attribute of a module of that layer, or keep it in an nn.ParameterList"
            )

    def _check_loss(self, batch: Batch, computed: _Computed) -> None:
        """Check that the loss keeps no state.

        Raises:
            CallableError: it has parameters of its own, or changes when it is called.
        """
        if self._uncut.loss_strangers:
            shapes = ", ".join(str(list(tensor.shape)) for tensor in self._uncut.loss_strangers)
            found_in_layers = any(
                strange for layer in self._uncut.chain for strange in unregistered_paths(layer, self._uncut.is_strange)
            )
            if not found_in_layers:
                raise CallableError(
                    f"loss: it computes with parameters of its own (of shape {shapes}), which no optimizer would ever "
                    "train; put them into the last layer of the model, and give the loss what that layer returns"
                )
        module = self._loss if isinstance(self._loss, nn.Module) else nn.Module()
        before = {name: buffer.clone() for name, buffer in module.named_buffers()}
        values = []
        for _ in range(2):
            seed_generators(self._seed)
            output = tuple(
                value.clone().requires_grad_(value.is_floating_point() or value.is_complex())
                for value in computed.result
            )
            with autocast(self._chain[0].precision, _CPU):
                value = call_loss(self._loss, output[0] if len(output) == 1 else output, _copied(batch.target))
            values.append(float(value.detach()))
        changed = [name for name, buffer in module.named_buffers() if not same(buffer, before[name])]
        where = "only the last stage of each virtual worker calls it, and its state is neither averaged nor saved"
        if changed:
            raise CallableError(
                f"loss: its buffer {', '.join(changed)} changes when it is called, but {where}; put it into the last "
                "layer of the model"
            )
        if not same(values[0], values[1]):
            raise CallableError(
                f"loss: called twice with one output and one target it returns {values[0]:.6g} and {values[1]:.6g}, so "
                f"it keeps state between calls, but {where}; put that state into a buffer of the last layer"
            )

    def _check_made_alike(self) -> None:
        """Check that the model is the same each time it is built: every stage builds it itself."""
        ours = self._uncut.chain
        if [dict(layer.parameters) for layer in ours] != [dict(layer.parameters) for layer in self._chain]:
            raise CallableError(
                "model: called twice, it returned models with other layers or parameters; every stage builds it "
                "itself, so it must return the same one each time"
            )
        for layer, again in zip(self._chain, ours, strict=True):
            tensors = {**_all_tensors(layer), **{f"buffer {k}": v for k, v in _all_buffers(layer).items()}}
            others = {**_all_tensors(again), **{f"buffer {k}": v for k, v in _all_buffers(again).items()}}
            for name, tensor in tensors.items():
                if name not in others or not same(tensor, others[name]):
                    raise CallableError(
                        f"model: built twice under one seed, its {name} differs; every stage builds the model itself: "
                        "draw from torch, `random` or NumPy's global functions, or from a generator with a fixed "
                        "seed"
                    )


class _Uncut:
    """The user's model, run as the user would run it, with hooks on its layers."""

    def __init__(self, model: nn.Module, loss: LossFunction, seed: int, precision: Precision) -> None:
        self.model = model.to(_CPU)
        self.chain = chain_of(model, precision=precision)
        self._loss = loss
        self._seed = seed
        self.notices: list[str] = []
        #: Deviation from calling each layer once and in order, as a sentence without its end; empty if there is none.
        self.irregular = ""
        #: Whether it could only be compared as a whole, not layer by layer.
        self.is_whole = False
        #: Leaves of the loss's graph that belong to no parameter.
        self.loss_strangers: list[Tensor] = []
        #: Whether the forward is the chain, as for `nn.Sequential`; it cannot pass several values between layers.
        self._is_chain = not has_forward(model) or (
            isinstance(model, nn.Sequential)
            and type(model).forward is nn.Sequential.forward
            and list(map(id, model)) == [id(layer.module) for layer in self.chain]
        )
        if not has_forward(model):
            self.notices.append(
                f"{type(model).__name__} has layers() and no forward of its own: the sequence of its layers is taken "
                "as its definition"
            )

    def is_strange(self, tensor: Tensor) -> bool:
        return any(tensor is stranger for stranger in self.loss_strangers)

    def take_over(self, weights: Mapping[str, Tensor]) -> None:
        """Set the weights in the modules themselves, as a step of an optimizer does."""
        with torch.no_grad():
            for layer in self.chain:
                for local, name in layer.parameters.items():
                    layer.module.get_parameter(local).copy_(weights[name])

    def train(self, batch: Batch) -> _Computed:
        """Forward, loss and backward in training mode."""
        enter_training(mode for layer in self.chain for mode in layer.modes)
        if not self.is_whole:
            watch = _Watch(self.chain, lambda layer: layer_seed(self._seed, _VW, _FIRST, layer.index))
            buffers = _buffers_of(self.chain)
            with watch:
                result = self._call(batch, watch)
            if watch.is_regular:
                return self._computed(batch, result, watch.outputs)
            self._note_whole(watch)
            # Again without hooks, which have seeded only some of the layers.
            _load_buffers(self.chain, buffers)
        seed_generators(self._seed)
        return self._computed(batch, self._call(batch, None), None)

    def _computed(self, batch: Batch, result: Values, outputs: tuple[Values, ...] | None) -> _Computed:
        found = tuple(value.detach().clone() for value in result)
        with self._autocast():
            loss = call_loss(self._loss, result[0] if len(result) == 1 else result, _copied(batch.target))
        named = {
            name: layer.module.get_parameter(local) for layer in self.chain for local, name in layer.parameters.items()
        }
        own = {id(parameter) for parameter in named.values()}
        self.loss_strangers = [leaf for leaf in leaves_behind([loss]) if id(leaf) not in own]
        for parameter in named.values():
            parameter.grad = None
        if loss.requires_grad:
            with _backward_failures("the model itself"):
                torch.autograd.backward(loss)
        gradients: dict[str, Tensor | None] = {}
        for name, parameter in named.items():
            gradients[name], parameter.grad = parameter.grad, None
        refuse_sparse(gradients)
        return _Computed(outputs, found, float(loss.detach()), gradients)

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> tuple[Values, tuple[Values, ...] | None]:
        """Forward in the model's own evaluation mode: its result, and the outputs of every layer."""
        self.model.eval()
        if not self.is_whole:
            watch = _Watch(self.chain, lambda layer: evaluation_layer_seed(self._seed, _VW, _FIRST, layer.index))
            with watch:
                result = self._call(batch, watch)
            if watch.is_regular:
                return result, watch.outputs
            self._note_whole(watch)
        seed_generators(self._seed)
        return self._call(batch, None), None

    @torch.no_grad()
    def evaluate_bare(self, batch: Batch) -> Values | None:
        """The same without hooks; None if the model draws random numbers even in evaluation mode."""
        self.model.eval()
        seed_generators(self._seed)
        before = generator_states()
        result = self._call(batch, None)
        return result if generator_states() == before else None

    def _call(self, batch: Batch, watch: _Watch | None) -> Values:
        values = tuple(value.clone() for value in batch.inputs)
        current: Layer | None = None
        try:
            with self._autocast():
                if self._is_chain:
                    for layer in self.chain:
                        current = layer
                        values = as_values(layer.module(*values), layer)
                    return values
                result = self.model(*values)
        except HetpipeError:
            raise
        except Exception as error:
            current = current or (None if watch is None else watch.current)
            if current is not None:
                received = values if watch is None else watch.received
                raise UncutFailure(f"model: {_failure_in(current, received, error)}") from error
            raise UncutFailure(
                f"model: {type(self.model).__name__}'s own forward failed on input of shape {_shapes(values)}: "
                f"{type(error).__name__}: {error}; it must take what the first layer takes"
            ) from error
        if isinstance(result, Tensor):
            return (result,)
        if isinstance(result, tuple | list) and result and all(isinstance(item, Tensor) for item in result):
            return tuple(result)
        raise CallableError(
            f"model: {type(self.model).__name__}'s own forward returned {type(result).__name__}; like its last layer "
            "it must return a tensor or a flat tuple of tensors"
        )

    def _autocast(self) -> AbstractContextManager[object]:
        return autocast(self.chain[0].precision, _CPU)

    def _note_whole(self, watch: _Watch) -> None:
        self.is_whole = True
        self.irregular = watch.irregular
        self.notices.append(
            f"{watch.irregular}, so the model was compared with its layers as a whole and within rounding, not layer "
            "by layer"
        )


class _Watch:
    """Hooks on the layers of a model that seed, normalise and record values during one forward."""

    def __init__(self, chain: Sequence[Layer], seed_of: Callable[[Layer], int]) -> None:
        self._chain = chain
        self._seed_of = seed_of
        self._handles: list[Any] = []
        self._depth = 0
        self._outputs: list[Values] = []
        self.irregular = ""
        self.current: Layer | None = None
        """The layer in progress."""
        self.received: Values = ()

    def __enter__(self) -> None:
        for module in {id(layer.module): layer.module for layer in self._chain}.values():
            self._handles.append(module.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._after))

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    @property
    def is_regular(self) -> bool:
        """Whether the forward called each layer once, in order; if not, `irregular` describes the deviation."""
        if not self.irregular and len(self._outputs) < len(self._chain):
            missing = self._chain[len(self._outputs)]
            self.irregular = f"The model's own forward never calls {place(missing)}"
        return not self.irregular

    @property
    def outputs(self) -> tuple[Values, ...] | None:
        """Outputs of every layer; None if the forward was irregular."""
        return tuple(self._outputs) if self.is_regular else None

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._depth += 1
        if self._depth > 1:
            return None
        position = len(self._outputs)
        called = next(layer for layer in self._chain if layer.module is module)
        if self.irregular or position == len(self._chain) or self._chain[position].module is not module:
            if not self.irregular:
                due = (
                    "after the last layer" if position == len(self._chain) else f"before {place(self._chain[position])}"
                )
                self.irregular = f"The model's own forward calls {place(called)} {due}"
            self.current = called
            return None
        layer = self._chain[position]
        self.current = layer
        self.received = tuple(value for value in args if isinstance(value, Tensor))
        seed_generators(self._seed_of(layer))
        return tuple(at_boundary((value,))[0] if isinstance(value, Tensor) else value for value in args), kwargs

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._depth -= 1
        if self._depth or self.irregular:
            return
        layer = self._chain[len(self._outputs)]
        # Cloned: the next operation may modify it in place.
        self._outputs.append(tuple(value.detach().clone() for value in as_values(output, layer)))
        self.current = None


OnLayer = Callable[[Layer, Values, Values], None]
OnGradients = Callable[[Layer, Mapping[str, Tensor | None]], None]


class _Cut:
    """The layers, each as a stage of its own."""

    def __init__(self, chain: Sequence[Layer], loss: LossFunction, seed: int, *, is_seeded: bool = True) -> None:
        stage = StageCompute if is_seeded else _UnseededCompute
        self._chain = chain
        self._stages = [
            stage(
                (layer,),
                vw=_VW,
                seed=seed,
                device=_CPU,
                loss=loss if layer is chain[-1] else None,
                watches_activations=False,
            )
            for layer in chain
        ]
        self.current = chain[0]
        """The layer in progress."""
        self.strangers: dict[int, list[Tensor]] = {}
        """Layer → tensors that it uses without registering them."""

    def forward(
        self, p: Minibatch, weights: Mapping[str, Tensor], batch: Batch, on_layer: OnLayer | None = None
    ) -> tuple[Values, float]:
        """Outputs of the last layer, and the loss. `on_layer` is called with each layer's inputs and outputs."""
        values = tuple(value.clone() for value in batch.inputs)
        for layer in self._chain:
            # The layer may modify it in place.
            received = tuple(value.detach().clone() for value in values) if on_layer else ()
            given, values = values, self.run_layer(layer, p, weights, values)
            found = strangers(values, _of(layer, weights), given)
            if found:
                self.strangers[layer.index] = found
            if on_layer is not None:
                on_layer(layer, received, values)
        outputs = tuple(value.detach().clone() for value in values)
        return outputs, float(self._stages[-1].loss(p, values, _copied(batch.target)))

    def run_layer(self, layer: Layer, p: Minibatch, weights: Mapping[str, Tensor], values: Values) -> Values:
        """Outputs of `layer`."""
        self.current = layer
        with _layer_failures(layer, values):
            return self._stages[layer.index].forward(p, _of(layer, weights), values)

    def backward(self, p: Minibatch, weights: Mapping[str, Tensor], on_gradients: OnGradients) -> None:
        """Run the backward of `p`; `on_gradients` is called with each layer's parameter gradients, last layer first."""
        gradients: Sequence[Tensor | None] | None = None
        for layer in reversed(self._chain):
            self.current = layer
            found = self._stages[layer.index].backward(p, _of(layer, weights), gradients)
            on_gradients(layer, found.weights)
            gradients = found.inputs

    def evaluate(self, weights: Mapping[str, Tensor], batch: Batch, on_layer: OnLayer) -> Values:
        """The outputs of the last layer in evaluation mode."""
        values = tuple(value.clone() for value in batch.inputs)
        for layer in self._chain:
            self.current = layer
            with _layer_failures(layer, values):
                values = self._stages[layer.index].evaluate(_FIRST, _of(layer, weights), values)
            on_layer(layer, (), values)
        return values


class _UnseededCompute(StageCompute):
    """Keeps drawing across layers without reseeding, for models whose layers cannot be distinguished in the forward."""

    def _seed_for(self, p: Minibatch, key: SeedKey) -> None:
        """Do not seed."""

    def _seed_for_evaluation(self, number: int, key: SeedKey) -> None:
        """Do not seed."""


def place(layer: Layer) -> str:
    """Designation of a layer in messages: its name, or its number if that is its name."""
    return f"layer {layer.index}" if layer.name.isdigit() else layer.name


def _of(layer: Layer, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: weights[name] for name in layer.parameters.values()}


def shares_tensors(model: nn.Module, modules: Iterable[nn.Module]) -> bool:
    """Whether `model` has one of `modules` that has tensors; a library may have one activation function for all."""
    known = {id(module) for module in modules}
    return any(
        id(module) in known and any(True for _ in (*module.parameters(recurse=False), *module.buffers(recurse=False)))
        for module in model.modules()
    )


def _made_again(build: Callable[[], nn.Module], chain: Sequence[Layer]) -> nn.Module:
    """Build a second instance of the model.

    Raises:
        CallableError: the model cannot be built or copied again.
    """
    model = build()
    if not shares_tensors(model, (module for layer in chain for module in layer.module.modules())):
        return model
    fix = "return a new one at each call"
    if any(layer.gradient_hooks for layer in chain):
        raise CallableError(f"model: called twice, it returned the same modules, whose hooks cannot be copied; {fix}")
    try:
        return copy.deepcopy(model)
    except Exception as error:
        raise CallableError(
            f"model: called twice, it returned the same modules, which cannot be copied ({type(error).__name__}: "
            f"{error}); {fix}"
        ) from error


def other_weights(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Leaves that differ from `weights` in every element, by a few percent of its magnitude."""
    generator = torch.Generator().manual_seed(0)
    others: dict[str, Tensor] = {}
    for name, weight in weights.items():
        size = float(torch.linalg.vector_norm(weight)) / max(1, weight.numel()) ** 0.5
        # With the same strides, which parameters keep when they are stepped in place.
        other = torch.empty_like(weight)
        (torch.view_as_real(other) if other.is_complex() else other).uniform_(-1.0, 1.0, generator=generator)
        others[name] = other.mul_(size * _CHANGED_SHARE or _CHANGED_ZERO).add_(weight.detach()).requires_grad_()
    return others


def _all_tensors(layer: Layer) -> dict[str, Tensor]:
    names = {**layer.parameters, **layer.frozen}
    return {f"parameter {name}": layer.module.get_parameter(local).detach() for local, name in names.items()}


def _all_buffers(layer: Layer) -> dict[str, Tensor]:
    return {name: layer.module.get_buffer(local) for local, name in layer.buffers.items()}


def _buffers_of(chain: Sequence[Layer]) -> list[dict[str, Tensor]]:
    """Copies of the buffers of every layer."""
    return [{name: buffer.detach().clone() for name, buffer in layer.module.named_buffers()} for layer in chain]


def _load_buffers(chain: Sequence[Layer], buffers: Sequence[Mapping[str, Tensor]]) -> None:
    with torch.no_grad():
        for layer, copies in zip(chain, buffers, strict=True):
            for name, value in copies.items():
                layer.module.get_buffer(name).copy_(value)


def _copied(target: Any) -> Any:
    """A copy of a target with tensors of its own."""
    if isinstance(target, Tensor):
        return target.clone()
    if isinstance(target, tuple | list):
        return type(target)(_copied(item) for item in target)
    return {key: _copied(item) for key, item in target.items()} if isinstance(target, dict) else target


def _in_flight(layer: Layer, what: str) -> CallableError:
    return CallableError(
        f"model: in {place(layer)}, with two minibatches in flight, {what}: it keeps state of its latest forward that "
        "the backward of an earlier one then reads; keep it in the graph (ctx.save_for_backward, or an output)"
    )


def _shapes(values: Values) -> str:
    return ", ".join(str(list(value.shape)) for value in values)


def _failure_in(layer: Layer, values: Values, error: Exception) -> str:
    return (
        f"layer {layer.index} ({layer.name}) failed on input of shape {_shapes(values)}: "
        f"{type(error).__name__}: {error}"
    )


@contextmanager
def _layer_failures(layer: Layer, values: Values) -> Iterator[None]:
    """Convert an exception of the layer's own code to one sentence."""
    try:
        yield
    except HetpipeError:
        raise
    except Exception as error:
        raise UncutFailure(f"model: {_failure_in(layer, values, error)}") from error


@contextmanager
def _backward_failures(who: str) -> Iterator[None]:
    """Convert an exception of a backward to one sentence."""
    try:
        yield
    except HetpipeError:
        raise
    except Exception as error:
        raise UncutFailure(f"model: the backward of {who} failed: {type(error).__name__}: {error}") from error


@contextmanager
def _memory_failures(chain: Sequence[Layer]) -> Iterator[None]:
    """Convert a failed allocation to an error that states the memory the proof needs.

    Raises:
        CallableError: the host has too little memory.
    """
    try:
        yield
    except (CallableError, MemoryError, RuntimeError) as error:
        cause = error.__cause__ if isinstance(error, CallableError) else error
        if not (isinstance(cause, MemoryError) or "can't allocate memory" in str(cause)):
            raise
        num_bytes = sum(tensor.nbytes for layer in chain for tensor in layer.module.parameters())
        raise CallableError(
            f"model: the proof before training does not fit into this host's memory: it needs about five times the "
            f"{bytes_text(num_bytes)} of the weights, and the activations of {PROVEN_SAMPLES} samples twice; inspect "
            "the job on a node with more memory, or free some there"
        ) from error
