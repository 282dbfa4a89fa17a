"""The job's optimizer: which class of `torch.optim` it names, and whether its arguments fit."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hetpipe.errors import JobError
from hetpipe.spec.job import OptimizerSpec
from hetpipe.spec.suggest import did_you_mean

#: Optimizers that cannot work here, with the reason and a way out.
_REFUSED: Mapping[str, str] = {
    "LBFGS": "it computes the loss several times per step, and in a pipeline each minibatch passes once; use SGD",
    "SparseAdam": "it needs sparse gradients, but shards hold dense slices; use Adam",
}

#: Switches of torch's optimizers that only make sense outside of a pipeline, with the reason.
_REFUSED_SWITCHES: Mapping[str, str] = {
    "capturable": "it is for CUDA graphs, which a pipeline does not record; remove it",
    "differentiable": "nothing here differentiates through a step; remove it",
}


def _classes() -> dict[str, type[torch.optim.Optimizer]]:
    found = {name: getattr(torch.optim, name) for name in dir(torch.optim)}
    return {
        name: value
        for name, value in found.items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer
    }


def build_optimizer_class(spec: OptimizerSpec) -> type[torch.optim.Optimizer]:
    """The class that `spec` names.

    Raises:
        JobError: `torch.optim` has no such optimizer, or hetpipe cannot use it.
    """
    if spec.name in _REFUSED:
        raise JobError(f"optimizer.name: {spec.name} is not supported: {_REFUSED[spec.name]}")
    classes = _classes()
    if spec.name not in classes:
        usable = [name for name in classes if name not in _REFUSED]
        raise JobError(f"optimizer.name: torch.optim has no {spec.name!r}; {did_you_mean(spec.name, usable)}")
    return classes[spec.name]


def check_optimizer_arguments(spec: OptimizerSpec) -> None:
    """Refuse what the class would refuse in every stage.

    Raises:
        JobError: with every unknown argument, or else with what the class says about the values.
    """
    kind = build_optimizer_class(spec)
    allowed = [name for name in inspect.signature(kind).parameters if name != "params"]
    problems = [
        f"optimizer.{name}: {spec.name} has no such argument; {did_you_mean(name, allowed)}"
        for name in spec.arguments
        if name not in allowed
    ]
    problems += [
        f"optimizer.{name}: is not supported: {reason}"
        for name, reason in _REFUSED_SWITCHES.items()
        if spec.arguments.get(name)
    ]
    if problems:
        raise JobError(problems)
    arguments: dict[str, Any] = dict(spec.arguments)
    try:
        # A matrix, because Muon takes nothing else.
        kind([nn.Parameter(torch.zeros(2, 2))], **arguments)
    except (TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise JobError(f"optimizer: {spec.name} refuses its arguments: {error}") from error
