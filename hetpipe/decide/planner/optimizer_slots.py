"""How many tensors of its parameters' size an optimizer keeps: what the memory of a plan depends on. Pure.

From the state that each class of `torch.optim` makes per parameter; a test compares with the classes themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hetpipe.job.training import OptimizerSpec
from hetpipe.values.policies import POLICIES, WeightPolicy

_ALWAYS = {
    "SGD": 0,
    "Adam": 2,
    "AdamW": 2,
    "NAdam": 2,
    "RAdam": 2,
    "Adamax": 2,
    "Adadelta": 2,
    "Adagrad": 1,
    "ASGD": 1,
    "RMSprop": 1,
    "Rprop": 2,
    "Muon": 1,
}
#: Arguments that cost one more when they are set.
_MORE = {
    "SGD": ("momentum",),
    "Adam": ("amsgrad",),
    "AdamW": ("amsgrad",),
    "RMSprop": ("momentum", "centered"),
}


def optimizer_slots(name: str, arguments: Mapping[str, Any]) -> int | None:
    """Tensors of parameter size per parameter, or None for an optimizer that is not known.

    >>> optimizer_slots("SGD", {"lr": 0.1}), optimizer_slots("SGD", {"momentum": 0.9}), optimizer_slots("AdamW", {})
    (0, 1, 2)
    """
    if name not in _ALWAYS:
        return None
    return _ALWAYS[name] + sum(bool(arguments.get(argument)) for argument in _MORE.get(name, ()))


def slots_of(optimizer: OptimizerSpec, weights: WeightPolicy) -> int | None:
    """The same for the optimizer of a job: of its groups the one that keeps most, and what its weight policy needs.

    >>> slots_of(OptimizerSpec(name="SGD"), "wave"), slots_of(OptimizerSpec(name="SGD"), "predict")
    (0, 1)
    """
    most, predicts = 0, POLICIES[weights].predicts is not None
    for own in ({}, *(group.arguments for group in optimizer.groups)):
        arguments = {**optimizer.arguments, **own}
        slots = optimizer_slots(optimizer.name, arguments)
        if slots is None:
            return None
        most = max(most, slots + (predicts and _predicts_with_gradient(optimizer.name, arguments)))
    return most


def _predicts_with_gradient(name: str, arguments: Mapping[str, Any]) -> bool:
    """Whether the last gradient is kept, because the optimizer's own tensors do not say how it moves the weights."""
    if name == "SGD":
        return not arguments.get("momentum") or bool(arguments.get("nesterov"))
    return name == "RMSprop" and not arguments.get("momentum")
