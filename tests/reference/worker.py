"""One virtual worker of the reference executor: which weights a minibatch uses, and what becomes of its gradient.

A minibatch is computed from end to end before the next one begins. What a pipeline would have done in another order
shows in the versions alone: `SegmentEquations` says which they are, `LocalWeights` has them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.data import default_collate

from hetpipe.pipeline.chain import GradientHook, Layer, SeedKey, Values, chain_of, run_layers, weights_in_place
from hetpipe.pipeline.data import EXAMPLE_SAMPLES, Batch
from hetpipe.pipeline.layering import defines_layers, layers_of, on_output
from hetpipe.pipeline.seeds import fetch_seed, layer_seed, seed_generators
from hetpipe.values.ids import Clock, Minibatch, VirtualWorkerIndex
from hetpipe.values.precision import Precision
from tests.reference.gradients import Gradients, MinibatchGradients, average, clipped
from tests.reference.local_weights import AnchoredWeights, DirectWeights, LocalWeights
from tests.reference.optimizer import OptimizerMemory, ReferenceOptimizer
from tests.reference.policies import POLICIES, SegmentEquations, Version
from tests.reference.prediction import Change
from tests.reference.recomputation import RecomputedPass
from tests.reference.values import (
    MapDataset,
    MinibatchRecord,
    ReferenceRun,
    ReferenceScale,
    ReferenceState,
    Tensors,
)


def parameters_of(layers: Sequence[Layer]) -> Tensors:
    """Copies of the trainable parameters of `layers`, in chain order."""
    return {
        name: layer.module.get_parameter(local).detach().clone()
        for layer in layers
        for local, name in layer.parameters.items()
    }


def buffers_of(layers: Sequence[Layer]) -> Tensors:
    """Copies of the buffers of `layers`, and of frozen parameters that their forward writes, in chain order."""
    return {name: tensor.clone() for name, tensor in _buffers(layers)}


def load_buffers(layers: Sequence[Layer], buffers: Tensors) -> None:
    """Write `buffers` into the modules of `layers`."""
    for name, tensor in _buffers(layers):
        tensor.copy_(buffers[name])


def _buffers(layers: Sequence[Layer]) -> Iterator[tuple[str, Tensor]]:
    for layer in layers:
        yield from ((name, layer.module.get_buffer(local).detach()) for local, name in layer.buffers.items())
        written = () if layer.cut is None else layer.cut.description.rewritten
        for local, name in layer.frozen.items():
            if name in written:
                yield name, layer.module.get_parameter(local).detach()


def read_block(dataset: MapDataset, block: Sequence[int]) -> tuple[Values, Any]:
    """The inputs and the target of the samples in `block`.

    Raises:
        ValueError: a sample is no (input, target), or its input no tensor or flat tuple of tensors.
    """
    collated = default_collate([dataset[index] for index in block])
    if isinstance(collated, dict):
        return tuple(collated.values()), collated
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


def autocast(precision: Precision, device: str) -> AbstractContextManager[object]:
    """Torch's autocast to the format of `precision`; every use of a weight casts for itself."""
    if precision == "fp32":
        return nullcontext()
    kind = torch.device(device).type
    return torch.autocast(kind, {"bf16": torch.bfloat16, "fp16": torch.float16}[precision], cache_enabled=False)


def layers_for(run: ReferenceRun, model: nn.Module) -> tuple[Layer, ...]:
    """The layers of `model`, on the device: its own, or, if it names none, those between the cuts of its forward."""
    layers = _layers_for(run, model)
    for layer in layers:
        layer.module.to(run.device)
    return layers


def moved(value: Any, device: str) -> Any:
    """A tensor, or a nested structure of tensors, on `device`."""
    return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, value)


def _layers_for(run: ReferenceRun, model: nn.Module) -> tuple[Layer, ...]:
    if defines_layers(model):
        return chain_of(model, precision=run.precision)
    count = min(EXAMPLE_SAMPLES, run.batch_size)
    seed_generators(fetch_seed(run.seed, VirtualWorkerIndex(0), Minibatch(1)))
    values, target = read_block(run.train, range(count))
    keys = tuple(target) if isinstance(run.train[0], Mapping) else None
    return layers_of(
        model,
        Batch(values, target, count, keys),
        run.loss,
        splits_ties=not POLICIES[run.weights].predicts,
        precision=run.precision,
    )


def _stages_of(layers: Sequence[Layer], counts: Sequence[int]) -> tuple[tuple[str, ...], ...]:
    """The parameter names of each stage, in chain order; stage i has `counts[i]` layers.

    Raises:
        ValueError: the counts do not add up.
    """
    if sum(counts) != len(layers):
        raise ValueError(f"stages of {counts} layers have {sum(counts)} together, but the model has {len(layers)}")
    ends = [sum(counts[: i + 1]) for i in range(len(counts))]
    return tuple(
        tuple(name for layer in layers[end - count : end] for name in layer.parameters.values())
        for end, count in zip(ends, counts, strict=True)
    )


class ReferenceWorker:
    """One virtual worker. Minibatches are handed to it in the order of p; `begin` first, `close_wave` after each wave.

    Attributes:
        index: its number n.
        clock: W*, the published clock in use.
    """

    # What `begin` makes anew for each segment.
    _equations: SegmentEquations
    _local: LocalWeights
    _optimizer: ReferenceOptimizer
    #: Parameters of frozen layers.
    _frozen: frozenset[str]
    #: The layers of the segment, in order.
    _active: tuple[Layer, ...]
    #: Minibatches of the update under way.
    _group: list[MinibatchGradients]
    #: e of the scales 2^e of the group's losses.
    _exponents: list[int]
    #: q → the loss scale that follows from the updates through q.
    _scales: dict[int, ReferenceScale]
    #: q → what the update after q was expected to do when q's had been made, under policies that predict.
    _changes: dict[int, Mapping[str, Change]]

    def __init__(self, index: VirtualWorkerIndex, run: ReferenceRun, model: nn.Module) -> None:
        """Take over `model`: its buffers belong to this virtual worker from now on.

        Raises:
            ValueError: the run's stages have another number of layers.
        """
        self.index = index
        self.clock = Clock(0)
        self._run = run
        self._policy = POLICIES[run.weights]
        self._layers = layers_for(run, model)
        self._model = model
        self._loss = on_output(self._layers, run.loss)
        self._stages = self._cut(Clock(0))

    def begin(self, state: ReferenceState, last: int) -> None:
        """Start a segment from the barrier `state`; `last` is this worker's last minibatch in it."""
        run, n = self._run, self._run.num_in_wave(self.index, state.clock)
        self.clock = state.clock
        self._stages = self._cut(state.clock)
        #: The equations number minibatches as if N had always been what it is in this segment.
        self._renumbered = state.clock * n - run.numbered_before(self.index, state.clock)
        self._freeze(run.frozen_at(state.clock))
        left_out = run.inactive_at(state.clock)
        self._active = tuple(layer for layer in self._layers if layer.index not in left_out)
        self._equations = SegmentEquations(
            weights=run.weights,
            num_stages=len(self._stages),
            minibatches_per_wave=n,
            accumulate=run.accumulate,
            staleness=run.staleness if run.sync == "wsp" else None,
            start=state.clock,
            last=last,
            pulls_when_required=run.pull == "required",
        )
        self._local = (AnchoredWeights if run.sync == "wsp" else DirectWeights)(state, n)
        memory = OptimizerMemory(
            state.optimizers[self.index],
            state.updates[self.index],
            {name: g for name, g in state.last_gradients[self.index].items() if name not in self._frozen},
        )
        self._optimizer = ReferenceOptimizer(run, self._local.target, memory)
        self._group, self._exponents = [], []
        self._scales = {state.clock * n: state.scales[self.index]}
        self._changes = {state.clock * n: self._optimizer.changes()} if self._policy.predicts else {}
        load_buffers(self._layers, state.buffers)

    def _freeze(self, count: int) -> None:
        """Train the first `count` layers no more: no gradients, and their modules in evaluation mode."""
        frozen = self._layers[:count]
        self._frozen = frozenset(name for layer in frozen for name in layer.parameters.values())
        if count and self._run.frozen_mode == "eval":
            paths = self._run.frozen_modules.get(count)
            for module in (
                (layer.module for layer in frozen) if paths is None else map(self._model.get_submodule, paths)
            ):
                module.eval()

    def _cut(self, clock: Clock) -> tuple[tuple[str, ...], ...]:
        """The parameter names of each stage in the segment that begins at `clock`."""
        return _stages_of(self._layers, self._run.stages_at(self.index, clock) or (len(self._layers),))

    def minibatch(self, p: Minibatch, block: tuple[int, ...], published: Mapping[Clock, Tensors]) -> MinibatchRecord:
        """Compute minibatch `p` on the samples `block`, and make the update that it completes.

        Args:
            p: its number; above the previous one.
            block: sample indices.
            published: the published weights by clock; W* of `p` is among them.
        """
        own, p = p, Minibatch(p + self._renumbered)
        forward = [self._equations.forward(p, stage) for stage in range(len(self._stages))]
        backward = [self._equations.backward(p, stage) for stage in range(len(self._stages))]
        self.clock = forward[0].clock
        used = self._weights(forward, published)
        read = self._weights(backward, published) if self._policy.predicts else None
        exponent = self.exponent(p)
        loss, gradients = self._gradients(own, block, used, read, exponent)
        self._exponents.append(exponent)
        self._group.append(MinibatchGradients(gradients, self._weight(block)))
        if self._run.sync != "allreduce" and self._equations.is_update(p):
            self.update(p, average(self.take_group()), self._decayed(p, used, forward[0], published))
        self._forget(forward[0])
        through = Minibatch(forward[0].through - self._renumbered)
        return MinibatchRecord(self.index, own, self.clock, through, block, loss, self._squares(gradients))

    def _squares(self, gradients: Gradients) -> dict[int, float]:
        """Per layer, what of it is trained: Σ over its parameters, one after the other, of the sum of squares."""
        found = {}
        for layer in self._layers:
            names = [name for name in layer.parameters.values() if name not in self._frozen]
            total = 0.0
            for name in names:
                gradient = gradients[name]
                # No gradient of the tests is so large that it is added in parts.
                total += 0.0 if gradient is None else float(gradient.flatten().dot(gradient.flatten()))
            if names:
                found[int(layer.index)] = total
        return found

    def take_group(self) -> Sequence[MinibatchGradients]:
        """The minibatches since the last update, which no other update shall count."""
        group, self._group = self._group, []
        return group

    def exponent(self, p: int) -> int:
        """Of the scale 2^e of the loss of `p`: what followed from the updates in its weights; 0 but under fp16."""
        if self._run.precision != "fp16":
            return 0
        return self._scales[self._equations.forward(p, 0).through].exponent

    @property
    def scale(self) -> ReferenceScale:
        """The loss scale after all its updates."""
        return self._scales[max(self._scales)]

    def update(self, through: int, gradients: Gradients, decayed: Tensors | None = None) -> None:
        """Make one update with what `gradients` are after clipping.

        Args:
            through: its last minibatch.
            gradients: averaged.
            decayed: the weights whose decay belongs to it; None: the newest themselves.

        Raises:
            ValueError: a gradient is not finite, and no scale is to blame.
        """
        used = max(self._exponents, default=None)
        self._exponents = []
        if self._run.precision == "fp16":
            used = self.exponent(through) if used is None else used
            overflowed = any(g is not None and not bool(g.isfinite().all()) for g in gradients.values())
            self._scales[through] = self.scale.after(used, overflowed=overflowed)
            if overflowed:
                if used == 0:
                    raise ValueError(f"the update after {through} overflowed at scale 1")
                self._local.keep(through)
                return
        if self._run.max_norm is not None:
            whole = tuple(name for names in self._stages for name in names)
            parts = self._stages if self._run.clip == "stage" else (whole,)
            gradients = {k: g for names in parts for k, g in clipped(gradients, names, self._run.max_norm).items()}
        self._optimizer.step(gradients, decayed)
        self._local.keep(through)
        if self._policy.predicts:
            self._changes[through] = self._optimizer.changes()

    def close_wave(self, wave: int) -> Tensors | None:
        """End wave `wave` (short ones too); returns its ũ, None if it held no minibatch, or without shards w."""
        return self._local.close_wave(wave)

    def buffers(self) -> Tensors:
        """Copies of its buffers."""
        return buffers_of(self._layers)

    def optimizer_memory(self) -> OptimizerMemory:
        """A copy of what its optimizer keeps."""
        return self._optimizer.memory()

    def _weights(self, versions: Sequence[Version], published: Mapping[Clock, Tensors]) -> Tensors:
        """Every stage's parameters in that stage's version."""
        weights: dict[str, Tensor] = {}
        for names, version in zip(self._stages, versions, strict=True):
            found = self._local.at(version, published)
            changes = self._changes[version.through] if version.ahead else {}
            for name in names:
                weights[name] = changes[name].ahead(found[name], version.ahead) if name in changes else found[name]
        return weights

    def _decayed(self, p: int, used: Tensors, version: Version, published: Mapping[Clock, Tensors]) -> Tensors | None:
        """The weights whose decay belongs to the update after `p`; None: the newest themselves, to be stepped."""
        newest = [self._equations.newest(p, stage) for stage in range(len(self._stages))]
        if self._run.sync != "wsp" and (self._policy.decays_newest or version.through == newest[0].through):
            return None
        return self._weights(newest, published) if self._policy.decays_newest else used

    def _weight(self, block: tuple[int, ...]) -> int:
        """n_j of a minibatch."""
        return len(block) if self._run.weigh is None else self._run.weigh(read_block(self._run.train, block)[1])

    def _forget(self, version: Version) -> None:
        """Versions and W* never fall, and no stage has an older version than the first."""
        self._local.forget(version)
        self._changes = {q: changes for q, changes in self._changes.items() if q >= version.through}

    def _gradients(
        self, p: Minibatch, block: tuple[int, ...], used: Tensors, read: Tensors | None, exponent: int
    ) -> tuple[float, Gradients]:
        """Loss and gradients of `p`: forward with `used`, backward with `read`, or with `used` if that is None.

        The backward is that of the loss × 2^`exponent`, its gradients are divided by that.
        """
        run = self._run

        def seed(key: SeedKey) -> None:
            seed_generators(layer_seed(run.seed, self.index, p, key), torch.device(run.device))

        seed_generators(fetch_seed(run.seed, self.index, p))
        inputs, target = moved(read_block(run.train, block), run.device)
        leaves = {
            name: weight.detach().clone().requires_grad_(name not in self._frozen) for name, weight in used.items()
        }
        gradients: dict[str, Tensor | None]
        begun = [clock for clock in run.recompute_from if run.numbered_before(self.index, clock) < p]
        runs = run.recompute_from[max(begun)] if begun else run.recompute
        whole = RecomputedPass(self._active, runs, seed) if runs else None
        outputs = (
            run_layers(self._active, leaves, inputs, seed=seed) if whole is None else whole.forward(leaves, inputs)
        )
        if run.weigh is not None and not run.weigh(target):
            return math.nan, dict.fromkeys(leaves)  # nothing counts: no loss, no gradient, no step, no decay
        with autocast(run.precision, run.device):
            loss: Any = self._loss(output_of(outputs), target)
        if read is not None:
            # Algorithm 1 of PipeOptim to the letter: the parameters' storage, which whatever autograd saved of a
            # parameter shares, gets other weights between forward and backward. No version counter sees it.
            for name, leaf in leaves.items():
                leaf.data.copy_(read[name])
        with weights_in_place(self._layers, leaves):  # for layers that recompute
            start = loss * torch.tensor(2.0**exponent, device=loss.device) if exponent else loss
            if whole is None:
                trained = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
                found = torch.autograd.grad(start, list(trained.values()), allow_unused=True)
                gradients = dict.fromkeys(leaves) | dict(zip(trained, found, strict=True))
            else:
                gradients = whole.backward(start, leaves)
            for name, hook in [each for layer in self._layers for each in _hooks_of(layer)]:
                gradient = gradients[name]
                if gradient is not None:
                    changed = hook(gradient)
                    gradients[name] = gradient if changed is None else changed
        return loss.item(), {name: None if g is None else g / 2.0**exponent for name, g in gradients.items()}


def _hooks_of(layer: Layer) -> list[tuple[str, GradientHook]]:
    """What the user registered on the layer's parameters, with their names."""
    return [(name, hook) for name, hooks in layer.gradient_hooks.items() for hook in hooks.values()]
