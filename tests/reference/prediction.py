"""Weights some updates ahead, in the reference executor: Ŵ = W − lr·s·Δ (PipeOptim eq. 4 and Table I; `policies.md`).

Δ is what the optimizer subtracted at its last update of a parameter, divided by the learning rate, as far as its state
tells; the state is that of `torch.optim`, after the step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

#: (options of the parameter's group, the optimizer's state of it, its last gradient as it was descended) → Δ.
Rule = Callable[[Mapping[str, Any], Mapping[str, Any], Tensor], Tensor]


def _sgd(group: Mapping[str, Any], state: Mapping[str, Any], gradient: Tensor) -> Tensor:
    """v; with Nesterov's momentum g + μ·v; without momentum g."""
    if group["momentum"] == 0:
        return gradient
    velocity: Tensor = state["momentum_buffer"]
    return gradient.add(velocity, alpha=group["momentum"]) if group["nesterov"] else velocity


def _adam(group: Mapping[str, Any], state: Mapping[str, Any], _: Tensor) -> Tensor:
    """m̂ / (√v̂ + ε); v is its maximum so far with amsgrad."""
    beta1, beta2 = group["betas"]
    t = float(state["step"])
    mean: Tensor = state["exp_avg"].div(1 - beta1**t)
    square: Tensor = state["max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"].div(1 - beta2**t)
    return mean.div(square.sqrt().add(group["eps"]))


def _rmsprop(group: Mapping[str, Any], state: Mapping[str, Any], gradient: Tensor) -> Tensor:
    """The momentum buffer; without momentum g / (√v + ε), centered: v − ḡ² for v."""
    if group["momentum"] > 0:
        velocity: Tensor = state["momentum_buffer"]
        return velocity
    square: Tensor = state["square_avg"]
    if group["centered"]:
        square = square.addcmul(state["grad_avg"], state["grad_avg"], value=-1)
    return gradient.div(square.sqrt().add(group["eps"]))


_RULES: Mapping[str, Rule] = {"SGD": _sgd, "Adam": _adam, "AdamW": _adam, "RMSprop": _rmsprop}


def rule_of(weights: str, optimizer: str, momenta: list[float]) -> Rule:
    """The rule for Δ under the policy `weights`.

    Args:
        weights: `predict` or `spectrain`.
        optimizer: class of `torch.optim`.
        momenta: the momentum of each parameter group; 0 where the optimizer has none.

    Raises:
        ValueError: the policy cannot predict this optimizer.
    """
    if weights == "spectrain" and (optimizer != "SGD" or 0 in momenta):
        raise ValueError(f"spectrain predicts SGD with momentum only, not {optimizer} with momentum {momenta}")
    if optimizer not in _RULES:
        raise ValueError(f"{weights} has no rule for the optimizer {optimizer}; known: {', '.join(_RULES)}")
    return _RULES[optimizer]


@dataclass(frozen=True, slots=True)
class Change:
    """What one more update is expected to do to a parameter."""

    direction: Tensor
    """Δ, less the decay."""
    learning_rate: float
    """Of the next update."""
    decay: float
    """λ of a decay that is part of Δ, or 0."""

    def ahead(self, weight: Tensor, steps: int) -> Tensor:
        """Ŵ, `steps` updates after `weight`."""
        direction = self.direction.add(weight, alpha=self.decay) if self.decay else self.direction
        return weight.add(direction, alpha=-(self.learning_rate * steps))
