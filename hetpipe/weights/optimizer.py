"""Any `torch.optim` optimizer, stepping in place on the running sum ρ of a wave (`wsp.md` §3, Arithmetic).

The optimizer's parameters *are* ρ, and its own weight decay is off; decay is added from the weights the minibatch used.
An optimizer whose update depends on the weights in another way steps a copy of those weights, and the difference is
added to ρ.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from hetpipe.weights.flat import FlatBuffer


class Decay(Enum):
    """How an optimizer's `weight_decay` enters its update."""

    COUPLED = "coupled"
    """g ← g + λ·w before the step."""
    DECOUPLED = "decoupled"
    """ρ ← ρ − lr·λ·w before the step."""
    OWN = "own"
    """The optimizer reads the weights itself: step a copy and subtract."""


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
    "SparseAdam": Decay.COUPLED,
    "AdamW": Decay.DECOUPLED,
    "Muon": Decay.DECOUPLED,
}


def decay_of(name: str, arguments: Mapping[str, Any]) -> Decay:
    """How `torch.optim.NAME` uses the weights; an unknown one steps a copy, which is always right."""
    decay = _DECAY.get(name, Decay.OWN)
    if decay is Decay.COUPLED and arguments.get("decoupled_weight_decay"):
        return Decay.DECOUPLED
    return decay


class WaveOptimizer:
    """Steps one stage's parameters. State persists over waves and barriers."""

    def __init__(self, name: str, arguments: Mapping[str, Any], rho: FlatBuffer) -> None:
        self.decay = decay_of(name, arguments)
        self._maximize = bool(arguments.get("maximize"))
        # Born on memory of their own: a parameter keeps its birth's version counter, which must not be a buffer's.
        self._parameters = {name: nn.Parameter(torch.empty_like(view)) for name, view in rho.views.items()}
        self._rho = rho
        self._lambda = 0.0
        self.optimizer: torch.optim.Optimizer | None = None
        if self._parameters:
            self.optimizer = getattr(torch.optim, name)(list(self._parameters.values()), **arguments)
            self._take_decay(self.optimizer)
        self.rebind(rho)

    def _take_decay(self, optimizer: torch.optim.Optimizer) -> None:
        """Move the weight decay, which may be the optimizer's own default, from the optimizer to this class."""
        group = optimizer.param_groups[0]
        if self.decay is not Decay.OWN and "weight_decay" in group:
            self._lambda = float(group["weight_decay"])
            group["weight_decay"] = 0.0

    def rebind(self, rho: FlatBuffer) -> None:
        """Step on `rho` from now on."""
        self._rho = rho
        for name, parameter in self._parameters.items():
            parameter.data = rho.views[name]

    def step(self, gradients: dict[str, Tensor | None], weights: Mapping[str, Tensor]) -> None:
        """Add one minibatch's update to ρ.

        Args:
            gradients: parameter name → gradient, or None where the minibatch did not use it (no update, no decay).
                They are taken out one by one, so that no gradient stays beside its sum with the decay.
            weights: parameter name → the weights that the minibatch used.
        """
        if self.optimizer is None:
            return
        for name, parameter in self._parameters.items():
            gradient = gradients.pop(name, None)
            if gradient is not None and self._lambda:
                gradient = self._decayed(parameter, gradient, weights[name].detach())
            parameter.grad = gradient
            if self.decay is Decay.OWN:
                parameter.data = weights[name].detach().clone()
        self.optimizer.step()
        for name, parameter in self._parameters.items():
            parameter.grad = None
            if self.decay is Decay.OWN:
                rho = self._rho.views[name]
                rho.add_(parameter.data - weights[name].detach())
                parameter.data = rho

    def _decayed(self, parameter: nn.Parameter, gradient: Tensor, weights: Tensor) -> Tensor:
        if self.decay is Decay.DECOUPLED:
            assert self.optimizer is not None
            parameter.data.add_(weights, alpha=-self.optimizer.param_groups[0]["lr"] * self._lambda)
            return gradient
        return gradient.add(weights, alpha=-self._lambda if self._maximize else self._lambda)

    def state(self) -> dict[str, dict[str, Tensor | float | int]]:
        """Parameter name → the optimizer's state for it (tensors are live, copy before keeping)."""
        if self.optimizer is None:
            return {}
        return {name: dict(self.optimizer.state.get(p, {})) for name, p in self._parameters.items()}

    def load_state(self, state: Mapping[str, Mapping[str, Tensor | float | int]]) -> None:
        """Take over what `state` returned, for every parameter that is in it."""
        if self.optimizer is None:
            return
        for name, entries in state.items():
            if entries and name in self._parameters:
                self.optimizer.state[self._parameters[name]] = dict(entries)
