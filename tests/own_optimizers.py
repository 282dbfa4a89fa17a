"""Optimizers as a user writes them: good ones, and each mistake that would train to something else unnoticed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from hetpipe.weights.prediction import Rule, UpdateState


def _momentum(update: UpdateState) -> Tensor | None:
    found: Tensor | None = update.state.get("velocity")
    return found


class Momentum(torch.optim.Optimizer):
    """`torch.optim.SGD(foreach=False)` with momentum, bit for bit."""

    prediction = Rule(_momentum, lambda _group: False)

    def __init__(self, parameters: Iterable[Any], lr: float = 0.1, momentum: float = 0.9) -> None:
        if lr < 0:
            raise LookupError(f"{lr} is no rate")
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "maximize": False})

    def changes(self) -> Iterable[tuple[Tensor, Tensor, dict[str, Any]]]:
        """Parameters that have a gradient, with it and their options."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    yield parameter, parameter.grad, group

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """See torch."""
        assert closure is None
        for parameter, gradient, group in self.changes():
            state = self.state[parameter]
            if "velocity" in state:
                state["velocity"].mul_(group["momentum"]).add_(gradient)
            else:
                state["velocity"] = gradient.clone()
            parameter.add_(state["velocity"], alpha=-group["lr"])


class Decaying(torch.optim.Adafactor):
    """Reads the weights that it steps; no rule to predict it by."""


class ByNorm(Momentum):
    """Divides by the norm of all gradients that it sees."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """See torch."""
        norm = torch.stack([gradient.norm() for _, gradient, _ in self.changes()] or [torch.ones(())]).norm()
        for parameter, gradient, group in self.changes():
            parameter.sub_(gradient / norm, alpha=group["lr"])


class ByNormOfStage(ByNorm):
    """The same on purpose."""

    couples_parameters = True


class Counting(Momentum):
    """Counts its steps where no checkpoint finds them."""

    steps = 0

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """See torch."""
        self.steps += 1
        for parameter, gradient, group in self.changes():
            parameter.sub_(gradient / self.steps, alpha=group["lr"])


class CountingInGroup(Momentum):
    """Counts its steps in its groups."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """See torch."""
        super().step()
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1


class Listing(Momentum):
    """Keeps a list."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """See torch."""
        for parameter, gradient, _ in self.changes():
            self.state[parameter].setdefault("gradients", []).append(gradient.clone())


class Sharing(Momentum):
    """Keeps something that belongs to no parameter."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """See torch."""
        self.state["all"]["steps"] = 1  # type: ignore[index]


class Searching(Momentum):
    """Wants the loss again."""

    def step(self, closure: Callable[[], float]) -> float:  # type: ignore[override]
        """See torch."""
        return closure()


class Drifting(Momentum):
    """Moves what has no gradient."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """See torch."""
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(0.9)


def momentum(parameters: Iterable[Any]) -> Momentum:
    """No class."""
    return Momentum(parameters)
