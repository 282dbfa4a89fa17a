"""Optimizer slots: the number of parameter-sized tensors that an optimizer keeps, for the memory of a plan. Pure.

Derived from the state that each class of `torch.optim` keeps per parameter; a test compares with the classes.
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
#: Arguments that add one tensor when they are set.
_MORE = {
    "SGD": ("momentum",),
    "Adam": ("amsgrad",),
    "AdamW": ("amsgrad",),
    "RMSprop": ("momentum", "centered"),
}


def optimizer_slots(name: str, arguments: Mapping[str, Any]) -> int | None:
    """Parameter-sized tensors per parameter; None for an unknown optimizer.

    >>> optimizer_slots("SGD", {"lr": 0.1}), optimizer_slots("SGD", {"momentum": 0.9}), optimizer_slots("AdamW", {})
    (0, 1, 2)
    """
    if name not in _ALWAYS:
        return None
    return _ALWAYS[name] + sum(bool(arguments.get(argument)) for argument in _MORE.get(name, ()))


def slots_of(optimizer: OptimizerSpec, weights: WeightPolicy) -> int | None:
    """Slots of a job's optimizer: the maximum over its groups, plus the needs of the weight policy.

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
    """Whether the last gradient is kept, because the optimizer's state alone does not determine the next update."""
    if name == "SGD":
        return not arguments.get("momentum") or bool(arguments.get("nesterov"))
    return name == "RMSprop" and not arguments.get("momentum")
