"""Trial of a user-defined optimizer: a few steps on tiny parameters verify what a pipeline requires.

Each stage has only its own parameters, checkpoints keep `state[parameter]` and nothing else, some parameters may have
no gradient, and the loss cannot be recomputed. A class that violates one of these would silently give other results, so
it is tested before a stage starts. Classes of torch need no trial.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hetpipe.errors import JobError
from hetpipe.weights.optimizer_class import KEY

#: Matrices, because some optimizers accept nothing else; the last one has no gradient.
_SHAPES = ((2, 2), (3, 2), (2, 3))
_NUM_STEPS = 3
#: The steps before which the trial resumes from a checkpoint.
_RESUMED_AFTER = 2

Weights = list[Tensor]


def check_own_optimizer(kind: type[torch.optim.Optimizer], name: str, arguments: Mapping[str, Any]) -> None:
    """Reject a class that would give other results in a pipeline.

    Args:
        kind: inherits `torch.optim.Optimizer`.
        name: its name in the job, for messages.
        arguments: from the job; accepted by the class.

    Raises:
        JobError: names the violation, and what the class must do or declare instead.
    """
    trial = _Trial(kind, name, arguments)
    everyone = range(len(_SHAPES))
    together = trial.run(everyone)
    resumed = trial.run(everyone, resumed_after=_RESUMED_AFTER)
    if not _equal(together, resumed):
        trial.refuse(
            "behaves differently after its `state` was restored, as from a checkpoint; keep everything that a "
            "step depends on in `self.state[parameter]`, as tensors and numbers"
        )
    if getattr(kind, "couples_parameters", False):
        return
    for index in everyone:
        if not _equal(trial.run([index]), [together[index]]):
            trial.refuse(
                "steps a parameter differently when others are present, but each stage has only its own "
                "parameters; step each one independently, or declare `couples_parameters = True` in the class "
                "if results may depend on where the model is cut"
            )


class _Trial:
    def __init__(self, kind: type[torch.optim.Optimizer], name: str, arguments: Mapping[str, Any]) -> None:
        self._kind = kind
        self._name = name
        self._arguments = arguments

    def refuse(self, what: str) -> None:
        raise JobError(f"{KEY}: {self._name} {what}")

    def run(self, indices: Sequence[int], *, resumed_after: int | None = None) -> Weights:
        """The weights of the selected parameters after all steps.

        Args:
            indices: the selected parameters.
            resumed_after: steps after which a new optimizer continues with the state of the old one.
        """
        parameters = [nn.Parameter(_noise(_SHAPES[index], seed=index)) for index in indices]
        with torch.random.fork_rng(devices=[]):
            optimizer = self._made(parameters)
            for step in range(_NUM_STEPS):
                if step == resumed_after:
                    state = {one: copy.deepcopy(dict(optimizer.state.get(one, {}))) for one in parameters}
                    optimizer = self._made(parameters)
                    optimizer.state.update({one: entries for one, entries in state.items() if entries})
                self._step(optimizer, parameters, indices, step)
        return [parameter.detach() for parameter in parameters]

    def _made(self, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        try:
            return self._kind([{"params": list(parameters)}], **self._arguments)
        except Exception as error:
            raise JobError(f"optimizer: {self._name} rejects its arguments: {_error_text(error)}") from error

    def _step(
        self, optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter], indices: Sequence[int], step: int
    ) -> None:
        idle = len(_SHAPES) - 1
        for index, parameter in zip(indices, parameters, strict=True):
            # A copy: some optimizers write to gradients.
            parameter.grad = None if index == idle else _noise(_SHAPES[index], seed=100 * (step + 1) + index)
        before = [dict(group) for group in optimizer.param_groups]
        torch.manual_seed(step)
        try:
            optimizer.step()
        except Exception as error:
            raise JobError(
                f"{KEY}: {self._name} raises in `step()`, without a closure and with one parameter that has no "
                f"gradient: {_error_text(error)}; a pipeline cannot recompute a loss, and parameters not used by a "
                "minibatch have no gradient"
            ) from error
        self._check_state(optimizer, parameters)
        self._check_groups(before, optimizer.param_groups)
        if idle in indices and not torch.equal(parameters[-1].detach(), _noise(_SHAPES[idle], seed=idle)):
            self.refuse("changes a parameter that has no gradient; skip those whose `grad` is None")

    def _check_state(self, optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> None:
        own = set(parameters)
        for parameter, entries in optimizer.state.items():
            if parameter not in own:
                self.refuse(
                    f"keeps `state[{parameter!r}]`, which is not a parameter; checkpoints contain only the "
                    "state of parameters"
                )
            for key, value in entries.items():
                if not isinstance(value, Tensor | int | float):
                    self.refuse(
                        f"keeps `state[parameter][{key!r}]` as {type(value).__name__}; checkpoints contain only "
                        "tensors and numbers"
                    )

    def _check_groups(self, before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]) -> None:
        for old, new in zip(before, after, strict=True):
            changed = [key for key in new if key != "params" and (key not in old or old[key] is not new[key])]
            if any(key not in old or old[key] != new[key] for key in changed):
                names = ", ".join(f"`{key}`" for key in changed)
                self.refuse(
                    f"changes {names} of its parameter groups, which checkpoints do not contain; keep it in "
                    "`self.state[parameter]`"
                )


def _noise(shape: tuple[int, ...], *, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _equal(some: Weights, others: Weights) -> bool:
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


def _error_text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
