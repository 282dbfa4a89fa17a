"""The reference executor's local optimizer: any `torch.optim` class, stepping in place on a target.

With shards the target is the running sum ρ (`wsp.md` §3, Arithmetic): it starts every wave at zero, so an optimizer
whose update does not depend on the weights leaves there the sum of its updates. Without shards it is the newest weights
themselves. Weight decay does depend on the weights; it is taken out of the optimizer and computed here.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from fnmatch import fnmatchcase
from typing import Any, cast

import torch
from torch import Tensor

from tests.reference.gradients import Gradients
from tests.reference.policies import POLICIES
from tests.reference.prediction import Change, rule_of
from tests.reference.values import OptimizerState, ReferenceRun, Tensors


class Decay(Enum):
    """How an optimizer's weight decay enters."""

    COUPLED = auto()
    """g ← g + λ·w before the step."""
    DECOUPLED = auto()
    """target ← target − lr·λ·w before the step."""
    ON_WEIGHTS = auto()
    """The update depends on the weights in yet another way: the optimizer steps a copy of them, decay and all."""


_DECAY = {
    "SGD": Decay.COUPLED,
    "Adam": Decay.COUPLED,
    "RMSprop": Decay.COUPLED,
    "Adagrad": Decay.COUPLED,
    "Adadelta": Decay.COUPLED,
    "Adamax": Decay.COUPLED,
    "NAdam": Decay.COUPLED,
    "RAdam": Decay.COUPLED,
    "Rprop": Decay.COUPLED,
    "AdamW": Decay.DECOUPLED,
    "Muon": Decay.DECOUPLED,
    "Adafactor": Decay.ON_WEIGHTS,
    "ASGD": Decay.ON_WEIGHTS,
}


@dataclass(frozen=True, slots=True)
class OptimizerMemory:
    """What an optimizer knows from earlier updates."""

    state: OptimizerState
    updates: int
    """How many it made; the position of the learning rate's schedule."""
    last_gradients: Tensors
    """The gradients that it last saw, where a prediction may need them."""


@dataclass(frozen=True, slots=True)
class _Options:
    """What holds for one parameter."""

    group: Mapping[str, Any]
    """Its group in the optimizer; the learning rate in it changes."""
    decay: Decay
    rate: float
    """λ, as far as the decay is computed here."""
    sign: float
    """−1 for an optimizer that maximizes: it negates the gradient it is given, but decays towards zero all the same."""


def _plain_copy(value: object) -> object:
    return value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)


class ReferenceOptimizer:
    """One virtual worker's optimizer between two barriers. Not thread-safe."""

    def __init__(self, run: ReferenceRun, target: Mapping[str, Tensor], memory: OptimizerMemory | None = None) -> None:
        """Make the run's optimizer for `target`, which `step` writes in place; it goes on where `memory` ends.

        Raises:
            ValueError: the reference does not know how it uses the weights, or how to predict what it does.
        """
        name = run.optimizer
        if name not in _DECAY:
            raise ValueError(f"no rule for the optimizer {name}; known: {', '.join(_DECAY)}")
        self._target = target
        self._stepped = target
        if _DECAY[name] is Decay.ON_WEIGHTS:
            self._stepped = {key: w.detach().clone() for key, w in target.items()}
        groups = _grouped(run, self._stepped)
        self._optimizer: torch.optim.Optimizer = getattr(torch.optim, name)(
            [{"params": list(members.values()), **overrides} for members, overrides in groups], **run.arguments
        )
        self._options: dict[str, _Options] = {}
        for (members, _), group in zip(groups, self._optimizer.param_groups, strict=True):
            self._options.update(dict.fromkeys(members, _options(_DECAY[name], group)))
        self._rule = None
        if POLICIES[run.weights].predicts:
            momenta = [float(group.get("momentum", 0.0)) for group in self._optimizer.param_groups]
            self._rule = rule_of(run.weights, name, momenta)
        self._include_decay = run.include_decay
        self._schedule = None if run.lr_schedule is None else run.lr_schedule(self._optimizer)
        self._updates = 0
        self._last_gradients: dict[str, Tensor] = {}
        if memory is not None:
            self._recall(memory)

    def step(self, gradients: Gradients, decayed: Tensors | None) -> None:
        """Make one update. A parameter without a gradient is left alone, its decay too.

        Args:
            gradients: per parameter; absent is as None.
            decayed: the weights w whose decay this is; None: the target itself.
        """
        present = {name: gradient for name in self._target if (gradient := gradients.get(name)) is not None}
        for name, stepped in self._stepped.items():
            stepped.grad = None
            if name in present:
                w = self._target[name] if decayed is None else decayed[name]
                stepped.grad = self._prepared(name, w, present[name])
                if self._rule is not None:
                    self._last_gradients[name] = stepped.grad.clone()
        self._optimizer.step()
        if self._stepped is not self._target:
            for name in present:
                target, stepped = self._target[name], self._stepped[name]
                _ = target.copy_(stepped) if decayed is None else target.add_(stepped - decayed[name])
        self._updates += 1
        if self._schedule is not None:
            self._schedule.step()

    def changes(self) -> Mapping[str, Change]:
        """What the next update is expected to do, for every parameter that had one; under policies that predict."""
        assert self._rule is not None, "the policy predicts"
        changes = {}
        for name, gradient in self._last_gradients.items():
            options = self._options[name]
            direction = self._rule(options.group, self._kept(name), gradient.mul(options.sign))
            is_part = options.decay is Decay.DECOUPLED and self._include_decay
            changes[name] = Change(direction.clone(), float(options.group["lr"]), options.rate if is_part else 0.0)
        return changes

    def memory(self) -> OptimizerMemory:
        """A copy of what it keeps."""
        state = {name: {key: _plain_copy(value) for key, value in self._kept(name).items()} for name in self._stepped}
        return OptimizerMemory(state, self._updates, {name: g.clone() for name, g in self._last_gradients.items()})

    def _prepared(self, name: str, w: Tensor, gradient: Tensor) -> Tensor:
        """Decay before the step; returns the gradient that the optimizer shall see."""
        options, target = self._options[name], self._target[name]
        match options.decay:
            case Decay.ON_WEIGHTS:
                self._stepped[name].copy_(w)
            case Decay.COUPLED if options.rate:
                return gradient.add(w, alpha=options.sign * options.rate)
            case Decay.DECOUPLED if options.rate and w is target:
                target.mul_(1 - options.group["lr"] * options.rate)
            case Decay.DECOUPLED if options.rate:
                target.add_(w, alpha=-options.group["lr"] * options.rate)
            case _:
                pass
        return gradient

    def _recall(self, memory: OptimizerMemory) -> None:
        for name in self._stepped:
            kept = self._kept(name)
            kept.clear()
            kept.update({key: _plain_copy(value) for key, value in memory.state[name].items()})
        self._last_gradients = {name: gradient.clone() for name, gradient in memory.last_gradients.items()}
        self._updates = memory.updates
        if self._schedule is not None:
            with warnings.catch_warnings():
                # It would be a mistake in a training loop: here the updates were made before.
                warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
                for _ in range(memory.updates):
                    self._schedule.step()

    def _kept(self, name: str) -> dict[str, Any]:
        return cast("dict[str, Any]", self._optimizer.state[self._stepped[name]])


def _grouped(
    run: ReferenceRun, tensors: Mapping[str, Tensor]
) -> list[tuple[Mapping[str, Tensor], Mapping[str, object]]]:
    """The run's groups and then the default one, with their tensors: the first group that matches takes a parameter."""
    rest = dict(tensors)
    groups: list[tuple[Mapping[str, Tensor], Mapping[str, object]]] = []
    for patterns, overrides in run.groups:
        names = [name for name in rest if any(fnmatchcase(name, pattern) for pattern in patterns)]
        groups.append(({name: rest.pop(name) for name in names}, overrides))
    return [*groups, (rest, {})]


def _options(decay: Decay, group: dict[str, Any]) -> _Options:
    """Read a group of the optimizer, and take the weight decay out of it where it is computed here."""
    if group.get("decoupled_weight_decay", False):
        decay = Decay.DECOUPLED
    rate = 0.0
    if decay is not Decay.ON_WEIGHTS and "weight_decay" in group:
        rate = float(group["weight_decay"])
        group["weight_decay"] = 0
    return _Options(group, decay, rate, -1.0 if group.get("maximize", False) else 1.0)
