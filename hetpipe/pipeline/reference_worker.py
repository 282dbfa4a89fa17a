"""One virtual worker of the reference executor: which weights a minibatch uses, and what becomes of its gradient.

It holds what `wsp.md` §3 gives a virtual worker between two barriers: the running sum ρ (in its optimizer), the
snapshots of ρ that later minibatches need, its complete waves' updates ũ, and its own buffers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from hetpipe.pipeline.chain import Layer, Values, chain_of, run_layers
from hetpipe.pipeline.reference_optimizer import ReferenceOptimizer
from hetpipe.pipeline.reference_values import (
    MapDataset,
    MinibatchRecord,
    ReferenceRun,
    ReferenceState,
    Tensors,
)
from hetpipe.pipeline.seeds import fetch_seed, layer_seed
from hetpipe.spec.ids import Clock, Minibatch, VirtualWorkerIndex


def required_clock(p: int, *, minibatches_per_wave: int, staleness: int | None) -> int:
    """`wsp.md` §2: max(0, ⌈(p + 1) / N⌉ − (D + 2)), and 0 for D = ∞.

    >>> [required_clock(p, minibatches_per_wave=4, staleness=1) for p in (11, 12, 15, 16)]
    [0, 1, 1, 2]
    """
    if staleness is None:
        return 0
    rounded_up = (p + minibatches_per_wave) // minibatches_per_wave
    return max(0, rounded_up - (staleness + 2))


def added(left: Tensors, right: Tensors) -> Tensors:
    """`left` + `right`, name by name."""
    return {name: tensor + right[name] for name, tensor in left.items()}


def parameters_of(layers: Sequence[Layer]) -> Tensors:
    """Copies of the trainable parameters of `layers`, in chain order."""
    return {
        name: layer.module.get_parameter(local).detach().clone()
        for layer in layers
        for local, name in layer.parameters.items()
    }


def buffers_of(layers: Sequence[Layer]) -> Tensors:
    """Copies of the buffers of `layers`, in chain order."""
    return {
        name: layer.module.get_buffer(local).detach().clone()
        for layer in layers
        for local, name in layer.buffers.items()
    }


def load_buffers(layers: Sequence[Layer], buffers: Tensors) -> None:
    """Write `buffers` into the modules of `layers`."""
    for layer in layers:
        for local, name in layer.buffers.items():
            layer.module.get_buffer(local).copy_(buffers[name])


def read_block(dataset: MapDataset, block: Sequence[int]) -> tuple[Values, Any]:
    """The inputs and the target of the samples in `block`.

    Raises:
        ValueError: a sample is no (input, target), or its input no tensor or flat tuple of tensors.
    """
    collated = default_collate([dataset[index] for index in block])
    if not isinstance(collated, tuple | list) or len(collated) != len(("input", "target")):
        raise ValueError(f"a sample must be (input, target), not {type(dataset[block[0]]).__name__}")
    inputs, target = collated
    values = tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)
    if not values or not all(isinstance(value, Tensor) for value in values):
        raise ValueError(f"a sample's input must be a tensor or a flat tuple of tensors, not {type(inputs).__name__}")
    return values, target


def output_of(values: Values) -> Tensor | Values:
    """What loss and metrics receive: the last layer's tensor, or the tuple if there are several."""
    return values[0] if len(values) == 1 else values


class ReferenceWorker:
    """One virtual worker. Minibatches are handed to it in the order of p; `begin` first, `close_wave` after each wave.

    Attributes:
        index: its number n.
        clock: W*, the published clock in use.
    """

    def __init__(self, index: VirtualWorkerIndex, run: ReferenceRun, model: nn.Module) -> None:
        """Take over `model`: its buffers belong to this virtual worker from now on."""
        self.index = index
        self.clock = Clock(0)
        self._run = run
        self._layers = chain_of(model.train())
        self._optimizer = ReferenceOptimizer(run.optimizer, run.arguments, parameters_of(self._layers))
        self._start = Clock(0)
        self._stepped = False
        #: q → ρ as it stood after minibatch q, for v(p) inside a wave.
        self._snapshots: dict[int, Tensors] = {}
        #: c → ũ of its own complete wave c.
        self._waves: dict[int, Tensors] = {}

    def begin(self, state: ReferenceState) -> None:
        """Start a segment from the barrier `state`, with ρ = 0."""
        self._start = self.clock = state.clock
        self._snapshots = {}
        self._waves = {}
        self._stepped = False
        self._optimizer.start_wave()
        self._optimizer.load_state(state.optimizers[self.index])
        load_buffers(self._layers, state.buffers)

    def minibatch(self, p: Minibatch, block: tuple[int, ...], published: Mapping[Clock, Tensors]) -> MinibatchRecord:
        """Compute minibatch `p` on the samples `block` and add its update to ρ.

        Args:
            p: its number; above the previous one.
            block: sample indices.
            published: the published weights by clock; W* of `p` is among them.
        """
        n = self._run.minibatches_per_wave
        if p % n == 0 or p == self._start * n + 1:
            required = required_clock(p, minibatches_per_wave=n, staleness=self._run.staleness)
            self.clock = Clock(max(self._start, required))
        through = Minibatch(max(p - n, self._start * n))
        weights = self._weights(published[self.clock], through)
        loss, gradients = self._gradients(p, block, weights)
        self._optimizer.step(weights, gradients)
        self._stepped = True
        self._snapshots[p] = {name: running.clone() for name, running in self._optimizer.running.items()}
        return MinibatchRecord(self.index, p, self.clock, through, block, loss)

    def close_wave(self, wave: int) -> Tensors | None:
        """End wave `wave` (short ones too) and return its update ũ = ρ, or None if it held no minibatch."""
        if not self._stepped:
            return None
        update = {name: running.clone() for name, running in self._optimizer.running.items()}
        self._waves[wave] = update
        self._optimizer.start_wave()
        self._stepped = False
        return update

    def buffers(self) -> Tensors:
        """Copies of its buffers."""
        return buffers_of(self._layers)

    def optimizer_state(self) -> Mapping[str, Mapping[str, object]]:
        """A copy of what its optimizer keeps per parameter."""
        return self._optimizer.state()

    def _weights(self, published: Tensors, through: Minibatch) -> Tensors:
        """w_p = B + ρ_{v(p)}, where B = ((w^(W*) + ũ_{W*}) + …); B alone where v(p) ends a wave."""
        n = self._run.minibatches_per_wave
        weights = published
        for wave in range(self.clock, through // n):
            weights = added(weights, self._waves[wave])
        if through % n:
            weights = added(weights, self._snapshots[through])
        # v(p) and W* never fall, so what lies below them is not needed again.
        self._snapshots = {q: running for q, running in self._snapshots.items() if q >= through}
        self._waves = {wave: update for wave, update in self._waves.items() if wave >= self.clock}
        return weights

    def _gradients(
        self, p: Minibatch, block: tuple[int, ...], weights: Tensors
    ) -> tuple[float, Mapping[str, Tensor | None]]:
        run, generator = self._run, torch.default_generator

        def seed(layer: Layer) -> None:
            generator.manual_seed(layer_seed(run.seed, self.index, p, layer.index))

        generator.manual_seed(fetch_seed(run.seed, self.index, p))
        inputs, target = read_block(run.train, block)
        leaves = {name: weight.detach().clone().requires_grad_() for name, weight in weights.items()}
        outputs = run_layers(self._layers, leaves, inputs, before_layer=seed)
        loss = run.loss(output_of(outputs), target)
        gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        return loss.item(), dict(zip(leaves, gradients, strict=True))
