"""Resolution of a job's `optimizer` to a class: one of `torch.optim`, or a user-defined `module:Class`.

A user-defined class is stepped like any other: on the parameters of one stage, in place, and from the weights selected
by the policy. It declares properties that cannot be observed:

* `couples_parameters = True`: its step of one parameter depends on others. Each stage has only its own parameters, so
  its result depends on the cut; without the declaration such a class is rejected.
* `prediction = Rule(…)` (`weights.prediction`): its update rule, for policies that predict.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from hetpipe.errors import JobError
from hetpipe.job.training import OptimizerSpec
from hetpipe.values.suggest import did_you_mean

#: Unsupported optimizers, with the reason and an alternative.
_REFUSED: Mapping[str, str] = {
    "LBFGS": "it computes the loss several times per step, but in a pipeline each minibatch passes only once; use SGD",
    "SparseAdam": "it needs sparse gradients, but shards hold dense slices; use Adam",
}

#: The job's key that contains the class.
KEY = "optimizer.name"


class CallableLoader(Protocol):
    """Loads user-defined callables; implemented above this layer (`pipeline.callables`)."""

    def __call__(self, reference: str, *, key: str) -> Callable[..., Any]:
        """Load `reference` (`module:callable`); `key` is the job's key, the prefix of every message."""
        ...


def optimizer_class(spec: OptimizerSpec, load: CallableLoader | None) -> type[torch.optim.Optimizer]:
    """Resolve the class of `spec`.

    Args:
        spec: the job's section.
        load: loads a user-defined class; None where none is allowed.

    Raises:
        JobError: `torch.optim` has no such optimizer, it is unsupported, or the name does not refer to an optimizer.
        CallableError: the user's module cannot be used.
    """
    if spec.is_own:
        assert load is not None, "a user-defined optimizer needs a loader"
        found = load(spec.name, key=KEY)
        if not isinstance(found, type) or not issubclass(found, torch.optim.Optimizer):
            raise JobError(f"{KEY}: `{spec.name}` is {_described(found)}; it must inherit from torch.optim.Optimizer")
        return found
    if spec.name in _REFUSED:
        raise JobError(f"{KEY}: {spec.name} is not supported: {_REFUSED[spec.name]}")
    classes = _classes()
    if spec.name not in classes:
        usable = [name for name in classes if name not in _REFUSED]
        raise JobError(
            f"{KEY}: torch.optim has no {spec.name!r}; {did_you_mean(spec.name, usable)}, or name a class of yours, "
            "for example `my_module:MyOptimizer`"
        )
    return classes[spec.name]


def _classes() -> dict[str, type[torch.optim.Optimizer]]:
    found = {name: getattr(torch.optim, name) for name in dir(torch.optim)}
    return {
        name: value
        for name, value in found.items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer
    }


def _described(found: object) -> str:
    return f"the class {found.__name__}" if isinstance(found, type) else f"of type {type(found).__name__}"
