"""Counts floating-point operations, distinguishing recomputed ones.

Counts are torch's (`torch.utils.flop_counter`): a multiplication and an addition are two operations, and only matrix
products, convolutions and attention are counted. Model FLOPs (`values.utilisation`) exclude recomputation, which
backwards do in two forms:

* Activation checkpointing (`torch.utils.checkpoint`, or a similar Function of the user) runs a forward inside the
  backward with gradients enabled, which a backward otherwise has disabled.
* Fused attention recomputes the scores instead of saving them: one of the five matrix products of its backward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

_aten = torch.ops.aten


def _attention(query: torch.Size, key: torch.Size, value: torch.Size, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query, key, value))  # type: ignore[no-untyped-call]  # torch ships it untyped


def _attention_backward(
    gradient: torch.Size, query: torch.Size, key: torch.Size, value: torch.Size, *_: Any, **__: Any
) -> int:
    flops = sdpa_backward_flop_count(gradient, query, key, value)  # type: ignore[no-untyped-call]  # as above
    return int(flops)


#: CPU attention, which torch's counter omits: formulas of the arguments' shapes.
_CPU_ATTENTION: Mapping[Any, Callable[..., int]] = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention,  # noqa: SLF001 - the operator has no other name
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,  # noqa: SLF001 - as above
}

#: Backwards of attention, in which one of five matrix products recomputes the scores.
_RECOMPUTING = frozenset(
    f"aten::_{name}_backward"
    for name in (
        "scaled_dot_product_flash_attention_for_cpu",
        "scaled_dot_product_flash_attention",
        "scaled_dot_product_efficient_attention",
        "scaled_dot_product_cudnn_attention",
        "flash_attention",
        "efficient_attention",
    )
)
_PRODUCTS_OF_ATTENTION_BACKWARD = 5


class _Untracked:
    """Replaces torch's module tracker, which is not needed here.

    The tracker calls `view_as` on the inputs of modules, which a cut model would treat as a call of its forward.
    """

    parents = frozenset({"Global"})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class FlopCounter:
    """Counts the operations between `__enter__` and `__exit__`."""

    def __init__(self, *, is_backward: bool) -> None:
        """Create a counter.

        Args:
            is_backward: whether a backward is counted, in which operations with gradients enabled are recomputation.
        """
        self._flops = FlopCounterMode(display=False, custom_mapping=dict(_CPU_ATTENTION))
        self._flops.mod_tracker = _Untracked()  # type: ignore[assignment]  # all that is asked of one
        self._operations = _Operations(self._flops, is_backward=is_backward)
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        # The mode entered last receives each operation first.
        self._stack.enter_context(self._flops)
        self._stack.enter_context(self._operations)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()

    @property
    def flops(self) -> int:
        """All floating-point operations."""
        return int(self._flops.get_total_flops())

    @property
    def recomputed_flops(self) -> int:
        """Recomputed operations among `flops`."""
        return self._operations.recomputed_flops

    @property
    def model_flops(self) -> int:
        """Operations among `flops` that are not recomputed."""
        return self.flops - self.recomputed_flops

    @property
    def num_operations(self) -> int:
        """Number of operations other than views."""
        return self._operations.number


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch ships it untyped
    """Counts operations other than views, and the increments that each causes in a `FlopCounterMode`."""

    def __init__(self, flops: FlopCounterMode, *, is_backward: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch ships it untyped
        self.number = 0
        self.recomputed_flops = 0
        self._flops = flops
        self._is_backward = is_backward

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Count the operation and run it."""
        self.number += not getattr(func, "is_view", False)
        before = self._flops.get_total_flops()
        result = func(*args, **(kwargs or {}))
        if self._is_backward and (counted := int(self._flops.get_total_flops() - before)):
            if torch.is_grad_enabled():
                self.recomputed_flops += counted
            elif getattr(func, "name", str)().partition(".")[0] in _RECOMPUTING:
                self.recomputed_flops += counted // _PRODUCTS_OF_ATTENTION_BACKWARD
        return result
