"""Runs the layers of one stage under their memory policies (`memory-policy.md` §1 and §4).

Held layers compute as without policies; what swapped ones save is in host memory until the backward (`swapping`). A
recomputed run is a region of `torch.utils.checkpoint` (non-reentrant), which saves the run's inputs alone and computes
the rest a second time when the backward first needs something of it. The second time equals the first: the weights are
those that the backward uses, every layer draws under the same seed, and buffers have the values that the first forward
found. What the second time writes to buffers is discarded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hetpipe.errors import CallableError
from hetpipe.model.absent import AbsentTensor
from hetpipe.pipeline.chain import Layer, SeedKey, Values, run_layers, ties_of
from hetpipe.pipeline.host_link import HostLink, Transfer
from hetpipe.pipeline.saved_tensors import current_pack, hooks_unwatched, refuses_hooks, saving_with, version_of
from hetpipe.pipeline.swapping import SwappedTensors
from hetpipe.values.memory import RESIDENT, LayerPolicy, MemoryChange, changed_policies, runs_of

Seed = Callable[[SeedKey], None]


@dataclass(frozen=True, slots=True)
class LayersRun:
    """Result of a forward."""

    values: Values
    """Of the last layer."""
    ties: Mapping[str, Tensor]
    """Weights of other stages that the layers used (`ties_of`)."""
    swapped: SwappedTensors | None
    """Tensors in host memory until the backward; None without swapped layers."""


class LayerMemory:
    """The layers of one stage, in the order of computation."""

    def __init__(
        self,
        layers: Sequence[Layer],
        policies: Sequence[LayerPolicy] | None = None,
        link: HostLink | None = None,
        changes: Sequence[MemoryChange] = (),
    ) -> None:
        """Group `layers` by policy.

        Args:
            layers: of the stage.
            policies: one each; None: all are kept.
            link: to host memory; None if no layer is ever swapped.
            changes: of policies, in order of time.
        """
        self._layers = layers
        self._host_link = link
        self._planned = policies or ["keep"] * len(layers)
        self._changes = changes
        self._changed: tuple[LayerPolicy, ...] | None = None
        #: The last transfer of each minibatch that may still be leaving the device.
        self._leaving: deque[Transfer] = deque()
        self._inactive: Collection[int] = ()
        self._group(self._planned)

    def leave_out(self, inactive: Collection[int]) -> None:
        """Run the forwards without these layers of the chain from here on; nothing is in flight."""
        self._inactive = inactive
        self._group(self.policies or ["keep"] * len(self._layers))

    def begin_wave(self, p: int, wave: int) -> tuple[LayerPolicy, ...] | None:
        """Run the forwards from minibatch `p` on under the policies of this wave; those in flight keep theirs.

        Returns:
            The policies, at the first wave and where they change; None elsewhere, and where nothing ever changes.
        """
        if not self._changes:
            return None
        layers = [(layer.index, layer.name) for layer in self._layers]
        policies = changed_policies(self._planned, layers, self._changes, p=p, wave=wave)
        if policies == self._changed:
            return None
        self._changed = policies
        self._group(policies)
        return policies

    def _group(self, policies: Sequence[LayerPolicy]) -> None:
        #: Of the layers, in the forwards from now on; empty if all are kept.
        self.policies = tuple(policies) if set(policies) != {"keep"} else ()
        runs = {index: run for run in runs_of(policies) for index in range(*run)}
        active = [index for index, layer in enumerate(self._layers) if layer.index not in self._inactive]
        groups = groupby(active, key=lambda index: (runs.get(index), policies[index] == "swap"))
        self._parts = [
            _RecomputedRun(group) if run is not None else _Held(group, swaps=swaps)
            for (run, swaps), group in ((key, [self._layers[index] for index in each]) for key, each in groups)
        ]
        self._link = self._host_link if "swap" in policies else None
        assert (self._link is not None) == ("swap" in policies), "nothing is swapped without a link"

    def run(self, weights: Mapping[str, Tensor], values: Values, seed: Seed, *, first: int = 0) -> LayersRun:
        """Run the forward of a minibatch.

        Args:
            weights: parameter name → leaf; every trainable parameter of the layers.
            values: the input of layer `first`.
            seed: as in `run_layers`; recomputation calls it again.
            first: index in the chain of the first layer to run; those of the stage before it are not.

        Raises:
            CallableError: a layer cannot be recomputed.
        """
        swapped = self._begun(weights, values)
        ties: Mapping[str, Tensor] | None = None
        if not self._parts:
            values = run_layers((), weights, values, seed)
        for part in self._parts:
            if part.is_before(first):
                continue
            values = part.run(weights, values, seed, swapped, first)
            # Those that a later part uses are of this stage, or among these.
            ties = ties_of(self._layers) if ties is None else ties
        if swapped is not None:
            left = swapped.leave()
            if left is not None:
                self._leaving.append(left)
        return LayersRun(values, ties or {}, swapped)

    def _begun(self, weights: Mapping[str, Tensor], values: Values) -> SwappedTensors | None:
        """For the swapped tensors of a minibatch, once at most one other minibatch is leaving the device."""
        if self._link is None:
            return None
        while len(self._leaving) >= RESIDENT:
            self._leaving.popleft().wait()
        modules = [layer.module for layer in self._layers]
        lasting = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
        places = [owner[key] for layer in self._layers for owner, key in layer.buffer_places]
        present = [tensor for tensor in places if not isinstance(tensor, AbsentTensor)]
        return SwappedTensors(self._link, [*weights.values(), *values, *lasting, *present])


class _Part:
    """Consecutive layers under one memory policy."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        self._layers = layers

    def is_before(self, first: int) -> bool:
        """Whether all its layers are before layer `first` of the chain."""
        return self._layers[-1].index < first

    def _from(self, first: int) -> Sequence[Layer]:
        """Its layers from index `first` of the chain on."""
        return [layer for layer in self._layers if layer.index >= first]


class _Held(_Part):
    """Consecutive layers whose saved tensors are kept, or swapped."""

    def __init__(self, layers: Sequence[Layer], *, swaps: bool) -> None:
        super().__init__(layers)
        self._swaps = swaps

    def run(
        self, weights: Mapping[str, Tensor], values: Values, seed: Seed, swapped: SwappedTensors | None, first: int
    ) -> Values:
        """Run the forward of a minibatch, from layer `first` of the chain on."""
        layers = self._from(first)
        if swapped is None:
            return run_layers(layers, weights, values, seed)
        outer = current_pack()
        try:
            with saving_with(swapped.swap(outer) if self._swaps else swapped.keep(outer)):
                return run_layers(layers, weights, values, seed)
        except RuntimeError as error:
            if not refuses_hooks(error):
                raise
            raise _refusal(layers) from error


def _refusal(layers: Sequence[Layer]) -> CallableError:
    """The error of layers that do not run under hooks on saved tensors."""
    names = ", ".join(layer.name for layer in layers)
    return CallableError(
        f"model: layers {names} cannot be recomputed, nor be on a stage with swapped ones: one uses torch.func.grad or "
        f"a similar function; keep what it needs with `memory: {{{layers[0].name}: keep}}`, and swap nothing there"
    )


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


class _RecomputedRun(_Part):
    """Consecutive layers that are recomputed together.

    The first forward determines which buffers the layers write, and whether they modify their inputs in place. Only
    these are copied for each minibatch.
    """

    def __init__(self, layers: Sequence[Layer]) -> None:
        super().__init__(layers)
        self._names = ", ".join(layer.name for layer in layers)
        #: Places of the buffers that a forward writes; None before the first one.
        self._written: frozenset[tuple[int, str]] | None = None
        self._modifies_inputs = True

    def run(
        self, weights: Mapping[str, Tensor], values: Values, seed: Seed, swapped: SwappedTensors | None, first: int
    ) -> Values:
        """Run the forward of a minibatch, from layer `first` on; its backward will recompute it.

        The run's inputs are not swapped.
        """
        del swapped
        layers = self._from(first)
        found: list[_Buffer] | None = None

        def compute(*given: Tensor) -> Values:
            nonlocal found
            if found is not None:
                inputs = tuple(value.detach().requires_grad_(value.requires_grad) for value in given)
                with self._in_place(found), hooks_unwatched():
                    return run_layers(layers, weights, self._own(inputs), seed)
            before, own = self._buffers(), self._own(given)
            versions = [version_of(value) for value in own]
            with hooks_unwatched():
                outputs = run_layers(layers, weights, own, seed)
            self._examine(before, is_modified=versions != [version_of(value) for value in own])
            found = [buffer for buffer in before if self._is_written(buffer)]
            return outputs

        try:
            outputs: Values = checkpoint(compute, *values, use_reentrant=False, preserve_rng_state=False)
        except RuntimeError as error:
            if not refuses_hooks(error):
                raise
            raise _refusal(self._layers) from error
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
    def _in_place(self, buffers: Sequence[_Buffer]) -> Iterator[None]:
        """Put copies of the values of `buffers` in their places in this block, so that what it writes is discarded."""
        cut = self._layers[0].cut
        further = [] if cut is None else [place for places in cut.registered.values() for place in places]
        places = [*((buffer.owner, buffer.key) for buffer in buffers), *further]
        kept = [(owner, key, owner[key]) for owner, key in places]
        copies: dict[int, Tensor] = {}
        try:
            for buffer in buffers:
                assert buffer.copy is not None, "what is written is copied"
                buffer.owner[buffer.key] = copies.setdefault(id(buffer.copy), buffer.copy.clone())
            yield
        finally:
            for owner, key, tensor in kept:
                owner[key] = tensor
