"""Tensor computations of one stage: forward, backward and evaluation on given weights. No ordering, no network.

`torch.autograd.grad` computes the gradients of a minibatch, except if a layer recomputes with
`torch.utils.checkpoint(use_reentrant=True)`: such a region runs a nested backward that accumulates into `.grad` of the
weights in the modules, and torch supports it in `torch.autograd.backward` only. Because the gradients of the two may
differ in their strides, the latter is used only where necessary.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from hetpipe.clock import Clock
from hetpipe.decide.schedule.policy import Kind
from hetpipe.pipeline.activation_bytes import ActivationBytes
from hetpipe.pipeline.callables import LossFunction, call_loss, call_metric
from hetpipe.pipeline.chain import (
    Layer,
    SeedKey,
    Values,
    active_layers,
    copied_buffers,
    gradient_flags,
    hooked,
    run_layers,
    ties_in_place,
    weights_in_place,
)
from hetpipe.pipeline.frozen_cache import digest_of
from hetpipe.pipeline.layer_memory import LayerMemory
from hetpipe.pipeline.modes import enter_evaluation, enter_training
from hetpipe.pipeline.precision import autocast
from hetpipe.pipeline.remapping import Remapping
from hetpipe.pipeline.saved_tensors import keep
from hetpipe.pipeline.seeds import evaluation_layer_seed, layer_seed, seed_generators
from hetpipe.pipeline.swapping import SwappedTensors
from hetpipe.values.ids import Minibatch, VirtualWorkerIndex
from hetpipe.values.memory import LayerPolicy, runs_of
from hetpipe.values.run import DeviceConfig, RatioSums, StageEmulation

#: Start of a backward: an edge of the graph and its gradient, None for a scalar loss.
BackwardStart = tuple[GradientEdge, Tensor | None]


class Differentiation:
    """Differentiates minibatches of a stage. The first graph determines whether layers recompute reentrantly."""

    def __init__(self) -> None:
        self._is_reentrant: bool | None = None

    def run(
        self,
        starts: Sequence[BackwardStart],
        leaves: Mapping[str, Tensor],
        inputs: Sequence[Tensor],
        standing: Mapping[str, Tensor],
    ) -> tuple[dict[str, Tensor | None], Sequence[Tensor | None]]:
        """Differentiate, and free the graph.

        Args:
            starts: edges to start from.
            leaves: parameter name → its leaf in the graph.
            inputs: the other leaves.
            standing: parameter name → tensor in the modules during the backward; recomputed regions read these.

        Returns:
            The gradients of the parameters by name, and those of the inputs; None for unused ones.
        """
        wanted = [*leaves.values(), *inputs]
        if not starts or not wanted:
            return dict.fromkeys(leaves), [None for _ in inputs]
        edges = [edge for edge, _ in starts]
        gradients = [gradient for _, gradient in starts]
        if self._is_reentrant is None:
            self._is_reentrant = _recomputes_reentrantly(edges)
        found: Sequence[Tensor | None] = [None for _ in wanted]
        if not self._is_reentrant:
            found = torch.autograd.grad(edges, wanted, gradients, allow_unused=True)
        else:
            torch.autograd.backward(edges, gradients)
        # Nested backwards, of such regions and of custom functions, accumulate in `.grad`.
        of_each = [_sum(gradient, _taken(leaf)) for gradient, leaf in zip(found, wanted, strict=True)]
        of_weights = dict(zip(leaves, of_each, strict=False))
        for name, weight in standing.items():
            of_weights[name] = _sum(of_weights[name], _taken(weight))
        return of_weights, of_each[len(leaves) :]


def _recomputes_reentrantly(edges: Iterable[GradientEdge]) -> bool:
    """Whether the graph of `edges` contains a region under `torch.utils.checkpoint(use_reentrant=True)`."""
    ahead = [edge.node for edge in edges]
    seen: set[Node] = set()
    while ahead:
        node = ahead.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.name() == "CheckpointFunctionBackward":
            return True
        ahead += [following for following, _ in node.next_functions if following is not None]
    return False


def _taken(leaf: Tensor) -> Tensor | None:
    gradient, leaf.grad = leaf.grad, None
    return gradient


def _sum(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    return one if other is None else other if one is None else one + other


@dataclass(frozen=True, slots=True)
class _Pending:
    """State of a forward for its backward, besides the tensors saved by the layers."""

    inputs: tuple[Tensor | None, ...]
    """Leaves in place of the stage's inputs; None for an input without gradient."""
    outputs: tuple[GradientEdge | None, ...]
    """Start of the backward: the edges of the graph at the outputs or at the loss, which keep no tensor alive; None
    for an output without gradient."""
    leaves: Mapping[str, Tensor]
    """The weights of the forward, as leaves of the graph."""
    saving: Remapping | None
    """Maps saved weights to those of the backward, if they differ from those of the forward."""
    ties: Mapping[str, Tensor]
    """Weights of other stages that the forward used."""
    swapped: SwappedTensors | None
    """What is in host memory."""


@dataclass(frozen=True, slots=True)
class Gradients:
    """Result of a backward."""

    weights: dict[str, Tensor | None]
    """Parameter name → gradient; None if the minibatch did not use the parameter."""
    inputs: tuple[Tensor | None, ...]
    """Per input of the stage; None for integer inputs and unused ones."""


class Emulator:
    """Stretches computations, to emulate a slower device.

    A computation takes the time in the device's profile, or else its own time, multiplied by
    slowdown · U[1, 1 + jitter].
    """

    def __init__(
        self, device: DeviceConfig, clock: Clock, *, seed: int, emulation: StageEmulation | None = None
    ) -> None:
        self._device = device
        self._clock = clock
        self._random = random.Random(seed)  # noqa: S311 - emulation, no secret
        self._emulation = emulation
        self._profiled_seconds: dict[Kind, float] = {}

    def cover(
        self,
        first_layer: int,
        last_layer: int,
        *,
        frozen: int = 0,
        policies: Sequence[LayerPolicy] = (),
        inactive: Collection[int] = (),
    ) -> None:
        """Emulate the device's time for layers [first_layer, last_layer), where a profile states it.

        Args:
            first_layer, last_layer: of the stage.
            frozen: the first layers of the chain, which have no backward.
            policies: memory policy of each layer of the stage; empty: all are kept.
            inactive: layers of the chain that are not computed.
        """
        if self._emulation is None:
            return
        trained = min(max(first_layer, frozen), last_layer)
        recomputed = [first_layer + index for run in runs_of(policies) for index in range(*run)]
        forward, backward = self._emulation.forward_seconds, self._emulation.backward_seconds
        active = [layer for layer in range(first_layer, last_layer) if layer not in inactive]
        again = math.fsum(forward[layer] for layer in recomputed if layer >= trained and layer in active)
        self._profiled_seconds = {
            Kind.FORWARD: math.fsum(forward[layer] for layer in active),
            Kind.BACKWARD: math.fsum(backward[layer] for layer in active if layer >= trained) + again,
        }

    def seconds_of(self, first_layer: int, last_layer: int, taken: float) -> float:
        """Emulated seconds of a forward through layers [first_layer, last_layer) that took `taken` seconds."""
        seconds = taken if self._emulation is None else self._emulation.forward_of(first_layer, last_layer)
        return seconds * self._device.slowdown

    def stretch(self, kind: Kind, started: float, *, skipped: range = range(0)) -> None:
        """Sleep for the remaining emulated time of a computation that started at `started` (monotonic seconds).

        Args:
            kind: what was computed.
            started: when.
            skipped: layers whose forward was not computed.
        """
        device = self._device
        if device.slowdown == 1.0 and device.jitter == 0.0 and not self._profiled_seconds:
            return
        taken = self._clock.monotonic() - started
        factor = device.slowdown * (1.0 + device.jitter * self._random.random())
        wanted = self._profiled_seconds.get(kind, taken)
        if skipped and self._emulation is not None:
            wanted -= self._emulation.forward_of(skipped.start, skipped.stop)
        self._clock.sleep(max(0.0, wanted * factor - taken))


class StageCompute:
    """Runs the layers of one stage. Keeps the state of each minibatch from its forward to its backward."""

    def __init__(
        self,
        layers: Sequence[Layer],
        *,
        vw: VirtualWorkerIndex,
        seed: int,
        device: torch.device,
        loss: LossFunction | None,
        watches_activations: bool = True,
        memory: LayerMemory | None = None,
    ) -> None:
        """Take ownership of `layers`.

        Args:
            layers: consecutive layers.
            vw: virtual worker of the stage.
            seed: seed of the job.
            device: device of the stage.
            loss: the loss; last stage only.
            watches_activations: False if the caller sets hooks on saved tensors around `forward`; hooks do not nest.
            memory: runs the layers under their memory policies; None: all are kept.
        """
        self._layers = layers
        self._inactive: Collection[int] = ()
        self.memory = memory or LayerMemory(layers)
        self._vw = vw
        self._seed = seed
        self._device = device
        self._loss = loss
        self._pending: dict[Minibatch, _Pending] = {}
        #: `StageParts.shift`.
        self.shift = 0
        self._most_pending = 0
        self._activations = ActivationBytes(layers, watches=watches_activations)
        self._differentiation = Differentiation()
        self._modes = tuple({id(mode.module): mode for layer in layers for mode in layer.modes}.values())
        for layer in layers:
            layer.module.to(device)
        enter_training(self._modes)

    def leave_out(self, inactive: Collection[int]) -> None:
        """Compute without these layers of the chain from here on; nothing is in flight."""
        self._inactive = inactive
        self.memory.leave_out(inactive)

    def run_frozen(self, p: Minibatch, values: Values, first: int, last: int) -> Values:
        """Run the frozen layers [first, last) of the stage on what enters the first of them; keeps no state.

        Nothing there requires a gradient. Gradients stay enabled all the same: where they are not, a model that is cut
        within its own forward has the cuts and the log of evaluations, which the layers behind cannot read.

        Args:
            p: the minibatch.
            values: the inputs.
            first, last: indices in the chain.
        """
        own = [layer for layer in self._layers if first <= layer.index < last]
        return run_layers(own, {}, tuple(map(self.to_device, values)), lambda key: self._seed_for(p, key))

    def is_repeatable(self, p: Minibatch, values: Values, first: int, last: int) -> bool:
        """Whether the frozen layers [first, last) compute the same under other seeds, and write no buffer.

        Args:
            p: a minibatch.
            values: the inputs, which stay as they are.
            first, last: indices in the chain.
        """
        own = [layer for layer in self._layers if first <= layer.index < last]
        buffers = [layer.module.get_buffer(local) for layer in own for local in layer.buffers]

        def run(seeds: int) -> bytes:
            copies = tuple(value.clone() for value in values)
            found = self.run_frozen(Minibatch(seeds), copies, first, last)
            return digest_of(tuple(value.cpu() for value in (*found, *buffers)))

        before = digest_of(tuple(buffer.cpu() for buffer in buffers))
        one, other = run(p), run(p + 1)
        return one == other and before == digest_of(tuple(buffer.cpu() for buffer in buffers))

    def rows_of_samples(
        self, p: Minibatch, values: Values, first: int, last: int, num_samples: int
    ) -> tuple[bool, ...] | None:
        """Which values behind the frozen layers [first, last) have a row for each sample; others belong to all of them.

        Tried with the samples in other orders, and with one of them in all places.

        Args:
            p: a minibatch.
            values: the inputs, which stay as they are.
            first, last: indices in the chain.
            num_samples: of the minibatch.

        Returns:
            None if a row depends on more than its own sample and their number.
        """
        if num_samples == 1:
            return None  # nothing can be tried

        def chosen(value: Tensor, choice: Tensor) -> Tensor:
            return value.index_select(0, choice.to(value.device)) if has_rows(value) else value

        def has_rows(value: Tensor) -> bool:
            return value.dim() > 0 and value.shape[0] == num_samples

        def run(choice: Tensor) -> Values:
            return self.run_frozen(p, tuple(chosen(value, choice).clone() for value in values), first, last)

        same = torch.arange(num_samples)
        choices = (same.roll(1), same.flip(0), torch.zeros_like(same), torch.full_like(same, num_samples - 1))
        found, others = run(same), [run(choice) for choice in choices]
        by_sample: list[bool] = []
        for value, *at in zip(found, *others, strict=True):
            by_sample.append(has_rows(value))
            if not _same_bits(at, [chosen(value, choice) for choice in choices]):
                by_sample[-1] = False
                if not _same_bits(at, [value] * len(choices)):
                    return None
        return tuple(by_sample)

    def forward(
        self,
        p: Minibatch,
        weights: Mapping[str, Tensor],
        values: Values,
        saving: Remapping | None = None,
        *,
        first: int = 0,
    ) -> Values:
        """Run minibatch `p`; returns the values for the next stage.

        Args:
            p: the minibatch.
            weights: parameter name → leaf that requires a gradient; every trainable parameter of the stage.
            values: the inputs of the stage, or of layer `first`.
            saving: a remapping for `weights`, if they are overwritten before the backward; afterwards nothing refers to
                their memory.
            first: index in the chain of the first layer to run; layers of the stage before it are frozen, and it has
                passed them.
        """
        flags = gradient_flags(self._layers, values)
        inputs = tuple(self._leaf(value, flag) for value, flag in zip(values, flags, strict=True))
        with saving or nullcontext():
            found = self._activations.watch(
                p,
                inputs,
                lambda: self.memory.run(weights, inputs, lambda key: self._seed_for(p, key), first=first),
                keep if saving is None else saving.pack,
            )
            outputs = found.values if saving is None else saving.apart(found.values)
        self._pending[p] = _Pending(
            tuple(value if value.requires_grad else None for value in inputs),
            tuple(_edge(output) for output in outputs),
            weights,
            saving,
            found.ties,
            found.swapped,
        )
        self._most_pending = max(self._most_pending, len(self._pending))
        return outputs

    def loss(self, p: Minibatch, outputs: Values, target: Any, *, scale: float = 1.0) -> Tensor:
        """Mean loss of minibatch `p`, whose forward returned `outputs`; its backward starts from the loss × `scale`.

        A scalar on the stage's device; to read it waits for a GPU.
        """
        assert self._loss is not None, "only the last stage has a loss"
        loss, output, target = self._loss, _unwrapped(outputs), self.to_device(target)
        value = self._activations.watch(p, outputs, lambda: self._loss_of(loss, output, target))
        start = value if scale == 1.0 else value * torch.tensor(scale, device=value.device)
        self._pending[p] = replace(self._pending[p], outputs=(_edge(start),))
        return value.detach()

    def skip_loss(self, p: Minibatch) -> None:
        """Let the backward of `p` find no gradient at all: none of its targets counts, and its loss is not computed."""
        self._pending[p] = replace(self._pending[p], outputs=(None,))

    def backward(
        self, p: Minibatch, weights: Mapping[str, Tensor], gradients: Sequence[Tensor | None] | None
    ) -> Gradients:
        """Run the backward of `p`: gradients with respect to the weights of its forward.

        After a forward with `saving`, the backward reads every weight from `weights`. Recomputation
        (`torch.utils.checkpoint`, reentrant or not) always uses `weights`, on the region's saved inputs: within a
        recomputed region, forward and backward agree.

        Args:
            p: a minibatch whose forward has run.
            weights: weights in the modules during the backward; they require gradients. Those of the forward, or after
                a forward with `saving` other ones in a buffer of the same layout.
            gradients: gradients of its outputs; None on the last stage.
        """
        pending = self._pending.pop(p)
        self._bring_back(pending)
        inputs = [value for value in pending.inputs if value is not None]
        self._activations.measure(p, inputs, weights.values())
        sent = gradients if gradients is not None else (None,)
        if gradients is not None and not any(gradient is not None for gradient in gradients):
            # Of a frozen stage. The next one may have gone past frozen layers of its own: it then has other inputs than
            # this stage has outputs, and none of them has a gradient.
            sent = (None,) * len(pending.outputs)
        pairs = [
            (output, None if gradient is None else gradient.to(self._device))
            for output, gradient in zip(pending.outputs, sent, strict=True)
            if output is not None and (gradients is None or gradient is not None)
        ]
        if pending.saving is not None:
            pending.saving.read_from(weights)
        with weights_in_place(self._layers, weights), ties_in_place(self._layers, pending.ties):
            of_weights, of_inputs = self._differentiation.run(pairs, pending.leaves, inputs, weights)
            of_weights = hooked(self._layers, of_weights)
        remaining = iter(of_inputs)
        return Gradients(of_weights, tuple(None if value is None else next(remaining) for value in pending.inputs))

    @property
    def is_asynchronous(self) -> bool:
        """Whether calls return before the device has computed: on a GPU."""
        return self._device.type == "cuda"

    def finish(self) -> None:
        """Wait until the device has computed everything so far."""
        if self.is_asynchronous:
            torch.cuda.current_stream(self._device).synchronize()

    @torch.no_grad()
    def evaluate(self, number: int, weights: Mapping[str, Tensor], values: Values) -> Values:
        """Run evaluation minibatch `number` (from 1) in evaluation mode; keeps no state and changes no buffer."""
        values = tuple(self.to_device(value) for value in values)
        enter_evaluation(self._modes)
        try:
            with copied_buffers(self._layers):
                active = active_layers(self._layers, self._inactive)
                return run_layers(active, weights, values, lambda key: self._seed_for_evaluation(number, key))
        finally:
            enter_training(self._modes)

    def autocast(self) -> AbstractContextManager[object]:
        """A block that computes in the stage's precision, as its layers do."""
        return autocast(self._layers[0].precision, self._device)

    def to_device(self, target: Any) -> Any:
        """Move a target to the stage's device, from page-locked memory without waiting for the copy."""
        if isinstance(target, Tensor):
            return target.to(self._device, non_blocking=self.is_asynchronous)
        if isinstance(target, tuple | list):
            return type(target)(self.to_device(item) for item in target)
        return {k: self.to_device(v) for k, v in target.items()} if isinstance(target, dict) else target

    @property
    def num_pending(self) -> int:
        """Number of minibatches between forward and backward."""
        return len(self._pending)

    @property
    def activation_bytes_peak(self) -> int:
        """Peak bytes that forwards kept for their backwards; 0 before the first backward.

        The bytes of the first minibatch times the maximum number of minibatches in flight; see `activation_bytes` for
        what they include.
        """
        return self._activations.per_minibatch * self._most_pending

    # -- inside ------------------------------------------------------------------------------------------------------

    def _bring_back(self, pending: _Pending) -> None:
        """Start to move what the backward of `pending` needs to the device, and then what the next one will need.

        A stage's backwards are in the order of its forwards under every schedule.
        """
        for each in (pending, next(iter(self._pending.values()), None)):
            if each is not None and each.swapped is not None:
                each.swapped.come_back()

    def _loss_of(self, loss: LossFunction, output: Tensor | Values, target: Any) -> Tensor:
        with self.autocast():
            return call_loss(loss, output, target)

    def _leaf(self, value: Tensor, needs_gradient: bool) -> Tensor:  # noqa: FBT001 - called in one place
        value = self.to_device(value)
        return value.detach().requires_grad_() if needs_gradient else value

    def _seed_for(self, p: Minibatch, key: SeedKey) -> None:
        seed_generators(layer_seed(self._seed, self._vw, Minibatch(p + self.shift), key), self._device)

    def _seed_for_evaluation(self, number: int, key: SeedKey) -> None:
        seed_generators(evaluation_layer_seed(self._seed, self._vw, number, key), self._device)


def _edge(tensor: Tensor) -> GradientEdge | None:
    return get_gradient_edge(tensor) if tensor.requires_grad else None


def _same_bits(values: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    one, other = (digest_of(tuple(value.cpu() for value in each)) for each in (values, others))
    return one == other


def _unwrapped(outputs: Values) -> Tensor | Values:
    return outputs[0] if len(outputs) == 1 else outputs


def metric_values(
    outputs: Values,
    target: Any,
    *,
    functions: Mapping[str, LossFunction],
) -> dict[str, float | RatioSums]:
    """Every metric of one evaluation minibatch: its mean, or the sums of its ratio."""
    output = _unwrapped(outputs)
    return {name: call_metric(name, function, output, target) for name, function in functions.items()}
