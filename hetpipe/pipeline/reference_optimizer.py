"""The reference executor's local optimizer: any `torch.optim` class, stepping in place on the running sum ρ.

Think of ρ as the parameter that the optimizer believes it trains (`wsp.md` §3, Arithmetic). It starts every wave at
zero, so an optimizer whose update does not depend on the weights leaves there the sum of its updates. Weight decay does
depend on them; it is taken out of the optimizer and computed here, from the weights that the minibatch used.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from enum import Enum, auto
from typing import Any, cast

import torch
from torch import Tensor

from hetpipe.pipeline.reference_values import OptimizerState, Tensors


class Decay(Enum):
    """How an optimizer's weight decay enters."""

    COUPLED = auto()
    """g ← g + λ·w before the step."""
    DECOUPLED = auto()
    """ρ ← ρ − lr·λ·w before the step."""
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


def _plain_copy(value: object) -> object:
    return value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)


class ReferenceOptimizer:
    """One virtual worker's optimizer and its running sum. Not thread-safe.

    Attributes:
        running: ρ per parameter; written in place by `step`.
    """

    def __init__(self, name: str, arguments: Mapping[str, object], initial: Tensors) -> None:
        """Make the optimizer `name` of `torch.optim` for the parameters of `initial`.

        Raises:
            ValueError: the reference does not know how `name` uses the weights.
        """
        if name not in _DECAY:
            raise ValueError(f"no rule for the optimizer {name}; known: {', '.join(_DECAY)}")
        self.running: dict[str, Tensor] = {key: torch.zeros_like(w) for key, w in initial.items()}
        self._decay = _DECAY[name]
        self._targets = self.running
        if self._decay is Decay.ON_WEIGHTS:
            self._targets = {key: w.detach().clone() for key, w in initial.items()}
        self._optimizer: torch.optim.Optimizer = getattr(torch.optim, name)(list(self._targets.values()), **arguments)
        group = self._optimizer.param_groups[0]
        if group.get("decoupled_weight_decay", False):
            self._decay = Decay.DECOUPLED
        self._learning_rate = float(group["lr"])
        self._rate = 0.0
        if self._decay is not Decay.ON_WEIGHTS and "weight_decay" in group:
            self._rate = float(group["weight_decay"])
            group["weight_decay"] = 0
        # A maximizing optimizer negates the gradient it is given, but decays towards zero all the same.
        self._sign = -1.0 if group.get("maximize", False) else 1.0

    def start_wave(self) -> None:
        """ρ ← 0."""
        for running in self.running.values():
            running.zero_()

    def step(self, used: Tensors, gradients: Mapping[str, Tensor | None]) -> None:
        """Add one minibatch's update to ρ. A parameter without a gradient is left alone, its decay too.

        Args:
            used: the weights that the minibatch computed with.
            gradients: the gradient of its loss at `used`, per parameter.
        """
        present = {name: g for name, g in gradients.items() if g is not None}
        for name, target in self._targets.items():
            target.grad = None
            if name in present:
                target.grad = self._prepared(name, used[name], present[name])
        self._optimizer.step()
        if self._decay is Decay.ON_WEIGHTS:
            for name in present:
                self.running[name].add_(self._targets[name] - used[name])

    def _prepared(self, name: str, used: Tensor, gradient: Tensor) -> Tensor:
        """Decay before the step; returns the gradient that the optimizer shall see."""
        match self._decay:
            case Decay.ON_WEIGHTS:
                self._targets[name].copy_(used)
            case Decay.COUPLED if self._rate:
                # Autograd may hand out one tensor for two parameters, or a broadcast one: never write into it.
                return gradient.clone().add_(used, alpha=self._sign * self._rate)
            case Decay.DECOUPLED if self._rate:
                self.running[name].add_(used, alpha=-self._learning_rate * self._rate)
            case _:
                pass
        return gradient

    def state(self) -> OptimizerState:
        """A copy of what the optimizer keeps per parameter."""
        return {
            name: {key: _plain_copy(value) for key, value in self._kept(target).items()}
            for name, target in self._targets.items()
        }

    def load_state(self, state: OptimizerState) -> None:
        """Replace the optimizer's state by a copy of `state`, as `state()` returned it."""
        for name, target in self._targets.items():
            kept = self._kept(target)
            kept.clear()
            kept.update({key: _plain_copy(value) for key, value in state[name].items()})

    def _kept(self, target: Tensor) -> dict[str, Any]:
        return cast("dict[str, Any]", self._optimizer.state[target])
