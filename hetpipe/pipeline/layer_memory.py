"""Runs the layers of one stage under their memory policies (`memory-policy.md` §1 and §4).

Held layers compute as without policies. A recomputed run is a region of `torch.utils.checkpoint` (non-reentrant), which
saves the run's inputs alone and computes the rest a second time when the backward first needs something of it. The
second time equals the first: the weights are those that the backward uses, every layer draws under the same seed, and
buffers have the values that the first forward found. What the second time writes to buffers is discarded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hetpipe.errors import CallableError
from hetpipe.model.absent import AbsentTensor
from hetpipe.pipeline.chain import Layer, SeedKey, Values, run_layers, ties_of
from hetpipe.pipeline.saved_tensors import hooks_unwatched, refuses_hooks, version_of
from hetpipe.values.memory import LayerPolicy, runs_of

Seed = Callable[[SeedKey], None]


class LayerMemory:
    """The layers of one stage, in the order of computation."""

    def __init__(self, layers: Sequence[Layer], policies: Sequence[LayerPolicy] | None = None) -> None:
        """Group `layers` by policy, one each; None: all are kept."""
        self._layers = layers
        policies = policies or ["keep"] * len(layers)
        run_at = {index: run for run in runs_of(policies) for index in range(*run)}
        self._parts = [
            _RecomputedRun([layers[index] for index in indices]) if run is not None else [layers[i] for i in indices]
            for run, indices in ((run, list(each)) for run, each in groupby(range(len(layers)), key=run_at.get))
        ]

    def run(self, weights: Mapping[str, Tensor], values: Values, seed: Seed) -> tuple[Values, Mapping[str, Tensor]]:
        """Run the forward of a minibatch.

        Args:
            weights: parameter name → leaf; every trainable parameter of the layers.
            values: the input of the first layer.
            seed: as in `run_layers`; recomputation calls it again.

        Returns:
            The output of the last layer, and the weights of other stages that the layers used (`ties_of`).

        Raises:
            CallableError: a layer cannot be recomputed.
        """
        ties: Mapping[str, Tensor] | None = None
        for part in self._parts:
            if isinstance(part, _RecomputedRun):
                values = part.run(weights, values, seed)
            else:
                values = run_layers(part, weights, values, seed)
            # Those that a later part uses are of this stage, or among these.
            ties = ties_of(self._layers) if ties is None else ties
        return values, ties or {}


@dataclass(slots=True)
class _Buffer:
    """A buffer before a forward."""

    owner: dict[str, Tensor]
    key: str
    tensor: Tensor
    version: int
    copy: Tensor | None
    """Its values; None where it is known not to be written."""

    @property
    def is_touched(self) -> bool:
        """Whether it has been replaced or modified in place since."""
        return self.owner[self.key] is not self.tensor or version_of(self.tensor) != self.version

    @property
    def is_changed(self) -> bool:
        """Whether it has other values than the copy, or might have had in between."""
        return self.is_touched or (self.copy is not None and not torch.equal(self.copy, self.tensor))


class _RecomputedRun:
    """Consecutive layers that are recomputed together.

    The first forward determines which buffers the layers write, and whether they modify their inputs in place. Only
    these are copied for each minibatch.
    """

    def __init__(self, layers: Sequence[Layer]) -> None:
        self._layers = layers
        self._names = ", ".join(layer.name for layer in layers)
        #: Places of the buffers that a forward writes; None before the first one.
        self._written: frozenset[tuple[int, str]] | None = None
        self._modifies_inputs = True

    def run(self, weights: Mapping[str, Tensor], values: Values, seed: Seed) -> Values:
        """Run the forward of a minibatch; its backward will recompute it."""
        found: list[_Buffer] | None = None

        def compute(*given: Tensor) -> Values:
            nonlocal found
            if found is not None:
                inputs = tuple(value.detach().requires_grad_(value.requires_grad) for value in given)
                with _in_place(found), hooks_unwatched():
                    return run_layers(self._layers, weights, self._own(inputs), seed)
            before, own = self._buffers(), self._own(given)
            versions = [version_of(value) for value in own]
            with hooks_unwatched():
                outputs = run_layers(self._layers, weights, own, seed)
            self._examine(before, is_modified=versions != [version_of(value) for value in own])
            found = [buffer for buffer in before if self._is_written(buffer)]
            return outputs

        try:
            outputs: Values = checkpoint(compute, *values, use_reentrant=False, preserve_rng_state=False)
        except RuntimeError as error:
            if not refuses_hooks(error):
                raise
            raise CallableError(
                f"model: layers {self._names} cannot be recomputed: one uses torch.func.grad or a similar function; "
                f"keep what it needs with `memory: {{{self._layers[0].name}: keep}}`"
            ) from error
        return outputs

    def _own(self, values: Values) -> Values:
        """Inputs that the layers may modify, as the run's are needed once more."""
        return tuple(value.clone() for value in values) if self._modifies_inputs else values

    def _buffers(self) -> list[_Buffer]:
        """The buffers, with copies of those that the layers may write."""
        found, copies = [], dict[int, Tensor]()
        for layer in self._layers:
            for owner, key in layer.buffer_places:
                tensor = owner[key]
                if isinstance(tensor, AbsentTensor):  # of another stage
                    continue
                if (self._written is None or (id(owner), key) in self._written) and id(tensor) not in copies:
                    copies[id(tensor)] = tensor.clone()
                copy = copies.get(id(tensor))
                found.append(_Buffer(owner, key, tensor, version_of(tensor), copy))
        return found

    def _is_written(self, buffer: _Buffer) -> bool:
        return self._written is not None and (id(buffer.owner), buffer.key) in self._written

    def _examine(self, before: Sequence[_Buffer], *, is_modified: bool) -> None:
        """Determine what a forward writes, or check that it writes nothing else than the first one.

        Raises:
            CallableError: it does, so that a recomputation would read other values.
        """
        if self._written is None:
            self._written = frozenset((id(each.owner), each.key) for each in before if each.is_changed)
            self._modifies_inputs = is_modified
            return
        late = next((each for each in before if each.copy is None and each.is_touched), None)
        if late is not None or (is_modified and not self._modifies_inputs):
            what = "one of its inputs" if late is None else f"buffer {late.key}"
            raise CallableError(
                f"model: layers {self._names} cannot be recomputed: a forward modified {what}, which the first one did "
                "not, so that a recomputation would read other values; keep what they need with "
                f"`memory: {{{self._layers[0].name}: keep}}`"
            )


@contextmanager
def _in_place(buffers: Sequence[_Buffer]) -> Iterator[None]:
    """Put copies of the values of `buffers` in their places in this block, so that what it writes is discarded."""
    kept = [(buffer.owner, buffer.key, buffer.owner[buffer.key]) for buffer in buffers]
    copies: dict[int, Tensor] = {}
    try:
        for buffer in buffers:
            assert buffer.copy is not None, "what is written is copied"
            buffer.owner[buffer.key] = copies.setdefault(id(buffer.copy), buffer.copy.clone())
        yield
    finally:
        for owner, key, tensor in kept:
            owner[key] = tensor
