"""A step of an optimizer without torch's wrapper around it, while nobody listens there.

torch wraps `step` of each class in a scope for profilers and in calls of hooks: 21 of the 35 µs of SGD on a small
layer, and several times as much on a core that has just slept. All of that is undocumented;
`tests/weights/test_torch_step.py` verifies the installed version. Where a later one differs, the wrapper stays.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch.optim import optimizer as internals

_OWN_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_HOOKS_OF_ALL = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")


class TorchStep:
    """`optimizer.step()`, in the same bits; what torch's wrapper calls is called as always."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        """Look for the wrapper; classes outside of `torch.optim` are left alone."""
        self._optimizer = optimizer
        kind = type(optimizer)
        hooks: list[Collection[object] | None] = [getattr(optimizer, name, None) for name in _OWN_HOOKS]
        hooks += [getattr(internals, name, None) for name in _HOOKS_OF_ALL]
        self._hooks = [each for each in hooks if each is not None]
        is_known = kind.__module__.startswith("torch.optim.") and getattr(kind.step, "hooked", False)
        #: What the wrapper calls.
        self._inner: Callable[[torch.optim.Optimizer], object] | None = None
        if is_known and len(self._hooks) == len(hooks):
            self._inner = getattr(kind.step, "__wrapped__", None)
        self._is_profiled: Callable[[], bool] = getattr(torch.autograd, "_profiler_enabled", lambda: True)

    def __call__(self) -> None:
        """Make the step."""
        inner = self._inner
        if inner is None or any(self._hooks) or self._is_profiled():
            self._optimizer.step()
        else:
            inner(self._optimizer)
