"""PipeOptim's weight prediction, computed from the existing optimizer state.

Ŵ_{t+s} = W_t − lr·s·ΔW_t (PipeOptim §III-A, eq. (3) and (5)): the latest update, repeated s times at the rate of the
next one. s counts the updates between a minibatch's forward and its backward, K − i − 1 in a full pipeline (eq. (4),
`decide.schedule.versions`). ΔW_t is the amount subtracted by the optimizer's own rule (Table I), computed here by one
function per optimizer.

Differences from other descriptions:

* Under AdamW the decoupled decay λ·W is part of every update, so it is part of the prediction; Table I omits it, as
  does `prediction: {include_decay: false}`.
* ε is outside the root, as in torch's Adam, and has the optimizer's value.
* The authors' public code predicts s = K − i updates ahead and uses a fixed ε. The paper is correct: the backward of a
  minibatch sees the updates of all before it, K − i − 1 more than its forward did.

To add an optimizer, write one function and one line in `RULES`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hetpipe.errors import JobError
from hetpipe.values.policies import POLICIES, WeightPolicy
from hetpipe.values.suggest import join_names


@dataclass(frozen=True, slots=True)
class UpdateState:
    """State of one parameter after an update. Rules only read it."""

    group: Mapping[str, Any]
    """Options of the parameter's group for the next update, in torch's format."""
    weight_decay: float
    """λ of a decoupled decay that counts as part of the update; 0 without one, or if it is coupled."""
    state: Mapping[str, Any]
    """The optimizer's state of the parameter, in torch's format; empty before its first update."""
    gradient: Tensor | None
    """The last gradient as passed to the optimizer: clipped, including a coupled decay, before `maximize` negates it.
    """
    weights: Tensor
    """W_t."""

    @property
    def descent(self) -> Tensor | None:
        """The last gradient in the direction that is subtracted: negated under `maximize`.

        torch negates it first, so momentum and averages are already negated.
        """
        return self.gradient.neg() if self.gradient is not None and self.group["maximize"] else self.gradient


@dataclass(frozen=True, slots=True)
class Rule:
    """Update rule of one optimizer."""

    change: Callable[[UpdateState], Tensor | None]
    """ΔW_t; None before the parameter's first update. The result may alias the optimizer's own state."""
    needs_gradient: Callable[[Mapping[str, Any]], bool]
    """Whether a group with these options requires the last gradient to be kept."""


def _sgd_needs_gradient(group: Mapping[str, Any]) -> bool:
    return not group["momentum"] or bool(group["nesterov"])


def _sgd(update: UpdateState) -> Tensor | None:
    """The momentum buffer v_t, with its dampening; g + μ·v_t under Nesterov; g without momentum."""
    group, descent = update.group, update.descent
    if not group["momentum"]:
        return descent
    buffer: Tensor | None = update.state.get("momentum_buffer")
    if not group["nesterov"] or buffer is None:
        return buffer
    return None if descent is None else descent.add(buffer, alpha=group["momentum"])


def _adam(update: UpdateState) -> Tensor | None:
    """m̂_t / (√v̂_t + ε), plus λ·W_t where the decay is decoupled."""
    if not update.state:
        return None
    group, state = update.group, update.state
    beta1, beta2 = group["betas"]
    step = float(state["step"])  # a tensor in torch, on the device if fused
    second: Tensor = state["max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"]
    denominator = second.div(1 - beta2**step).sqrt_().add_(group["eps"])
    change: Tensor = state["exp_avg"].div(1 - beta1**step).div_(denominator)
    return change.add_(update.weights, alpha=update.weight_decay) if update.weight_decay else change


def _rmsprop_needs_gradient(group: Mapping[str, Any]) -> bool:
    return not group["momentum"]


def _rmsprop(update: UpdateState) -> Tensor | None:
    """Without momentum g / (√v_t + ε), where v_t lacks the square of the mean if centered; else the momentum buffer."""
    group, state, descent = update.group, update.state, update.descent
    if not state:
        return None
    if group["momentum"]:
        buffer: Tensor = state["momentum_buffer"]
        return buffer
    if descent is None:
        return None
    mean_square: Tensor = state["square_avg"]
    if group["centered"]:
        mean_square = mean_square.addcmul(state["grad_avg"], state["grad_avg"], value=-1)
    return descent.div(mean_square.sqrt().add_(group["eps"]))


def _never(_group: Mapping[str, Any]) -> bool:
    return False


#: Class name in `torch.optim` → rule.
RULES: Mapping[str, Rule] = {
    "SGD": Rule(_sgd, _sgd_needs_gradient),
    "Adam": Rule(_adam, _never),
    "AdamW": Rule(_adam, _never),
    "RMSprop": Rule(_rmsprop, _rmsprop_needs_gradient),
}


def rule_of(kind: type[Any], name: str) -> Rule:
    """The rule of an optimizer: the class's own `prediction`, or hetpipe's for a class of `torch.optim`.

    Args:
        kind: the class.
        name: its name in the job.

    Raises:
        JobError: there is none.
    """
    declared = getattr(kind, "prediction", None)
    if isinstance(declared, Rule):
        return declared
    if ":" in name:
        raise JobError(
            f"optimizer.name: {name} declares no update rule, so its weights cannot be predicted; declare "
            "`prediction = Rule(change, needs_gradient)` in the class (hetpipe.weights.prediction), or use "
            "another weight policy"
        )
    if name not in RULES:
        raise JobError(
            f"optimizer.name: is {name}, but update rules exist only for {join_names(RULES, 'and')}, so its "
            "weights cannot be predicted; use one of these, or another weight policy, or add its rule, one "
            "function in hetpipe/weights/prediction.py"
        )
    return RULES[name]


def check_predictable(kind: type[Any], name: str, weights: WeightPolicy) -> None:
    """Reject an optimizer without a rule if the weight policy needs predictions.

    That `spectrain` needs momentum is a rule between keys of the job (`job.rules`).

    Raises:
        JobError: as for `rule_of`.
    """
    if POLICIES[weights].predicts is not None:
        rule_of(kind, name)
