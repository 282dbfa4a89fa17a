"""Training flags of a model's modules, as the model itself sets them for training and for evaluation.

A plain training loop calls `model.train()` and `model.eval()`. Stages have no whole model to call them on, and calling
them on layers would override the user's choices. The flags of both modes are therefore read from the model once, when
it is cut: flags set by the user are kept, overridden `train()` and `eval()` are called, and later only recorded flags
are set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from torch import nn

from hetpipe.errors import CallableError


@dataclass(frozen=True, slots=True)
class ModuleMode:
    """The flag `training` of one module."""

    module: nn.Module
    training: bool
    """Value while the model trains."""
    evaluation: bool
    """Value during evaluation."""


def modes_of(model: nn.Module) -> dict[int, ModuleMode]:
    """Flags of every module of `model`, by the module's `id`; the model is left in training mode.

    Raises:
        CallableError: an overridden `train()` or `eval()` raised.
    """
    left = {id(module): module.training for module in model.modules()}
    # Modules that the user has put into evaluation mode stay there.
    asked = [module for module in _outermost_overriding(model) if module.training]
    of_evaluation = dict.fromkeys(left, False)
    of_training = dict(left)
    for module in asked:
        _call("train", module.train)
        of_training.update(_flags(module))
    for module in asked:
        _call("eval", module.eval)
        of_evaluation.update(_flags(module))
    for module in asked:
        _call("train", module.train)
    modes = {
        id(module): ModuleMode(module, of_training[id(module)], of_evaluation[id(module)]) for module in model.modules()
    }
    enter_training(modes.values())
    return modes


def enter_training(modes: Iterable[ModuleMode]) -> None:
    """Set the flags for training."""
    for mode in modes:
        mode.module.training = mode.training


def enter_evaluation(modes: Iterable[ModuleMode]) -> None:
    """Set the flags for evaluation."""
    for mode in modes:
        mode.module.training = mode.evaluation


def _outermost_overriding(module: nn.Module) -> Iterator[nn.Module]:
    """Outermost modules that override `train` or `eval`: each sets the flags of its submodules."""
    if any(_is_overridden(module, name) for name in ("train", "eval")):
        yield module
        return
    for child in module.children():
        yield from _outermost_overriding(child)


def _is_overridden(module: nn.Module, name: str) -> bool:
    return name in vars(module) or getattr(type(module), name) is not getattr(nn.Module, name)


def _flags(module: nn.Module) -> dict[int, bool]:
    return {id(part): part.training for part in module.modules()}


def _call(name: str, call: Callable[[], object]) -> None:
    try:
        call()
    except Exception as error:
        owner = type(getattr(call, "__self__", None)).__name__
        raise CallableError(f"model: {owner}.{name}() raised {type(error).__name__}: {error}; fix it") from error
