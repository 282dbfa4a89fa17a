"""The class that a job's `optimizer` names: one of `torch.optim`, or the user's own as `module:Class`.

A class of the user's own is stepped as any other: on the parameters of one stage, in place, and from the weights that
the policy names. It declares what cannot be seen from outside:

* `couples_parameters = True`: its step of one parameter depends on others. Each stage has only its own parameters, so
  its result depends on the cut; without the declaration such a class is refused.
* `prediction = Rule(…)` (`weights.prediction`): how it moves a parameter, for policies that predict.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from hetpipe.errors import JobError
from hetpipe.job.training import OptimizerSpec
from hetpipe.values.suggest import did_you_mean

#: Optimizers that cannot work here, with the reason and a way out.
_REFUSED: Mapping[str, str] = {
    "LBFGS": "it computes the loss several times per step, and in a pipeline each minibatch passes once; use SGD",
    "SparseAdam": "it needs sparse gradients, but shards hold dense slices; use Adam",
}

#: The job's key that names the class.
KEY = "optimizer.name"


class CallableLoader(Protocol):
    """Finds the user's callables; it is above this layer (`pipeline.callables`)."""

    def __call__(self, reference: str, *, key: str) -> Callable[..., Any]:
        """What `reference` (`module:callable`) names; `key` of the job holds it and begins every message."""
        ...


def optimizer_class(spec: OptimizerSpec, load: CallableLoader | None) -> type[torch.optim.Optimizer]:
    """The class that `spec` names.

    Args:
        spec: the job's section.
        load: finds the user's own class; None where there can be none.

    Raises:
        JobError: `torch.optim` has no such optimizer, hetpipe cannot use it, or what is named is no optimizer.
        CallableError: the user's module cannot be used.
    """
    if spec.is_own:
        assert load is not None, "an optimizer of the user's own needs a loader"
        found = load(spec.name, key=KEY)
        if not isinstance(found, type) or not issubclass(found, torch.optim.Optimizer):
            raise JobError(
                f"{KEY}: `{spec.name}` is {_described(found)}; name a class that inherits torch.optim.Optimizer"
            )
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
