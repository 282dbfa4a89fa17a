"""Counts floating-point operations while something runs, and which of them only repeat earlier ones.

Counting is torch's (`torch.utils.flop_counter`): a multiplication and an addition are two, and only matrix products,
convolutions and attention are counted, of which torch knows the number. Model FLOPs (`values.utilisation`) leave
out what is computed again, so that is told apart, in the two forms in which a backward does it:

* Activation checkpointing of the user's own (`torch.utils.checkpoint`, or a Function that does the like) runs a forward
  inside of the backward, and enables gradients for it, which a backward by itself does not.
* Fused attention keeps no scores and computes them again: one of the five matrix products of its backward.
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


#: Attention on the CPU, which torch's counter leaves out. Formulas of the arguments' shapes.
_CPU_ATTENTION: Mapping[Any, Callable[..., int]] = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention,  # noqa: SLF001 - the operator has no other name
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,  # noqa: SLF001 - as above
}

#: Backwards of attention, of whose matrix products one in five computes the scores again.
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
    """Stands for torch's tracker of modules, of which nothing is asked here.

    The tracker calls `view_as` on what goes into a module, and a cut model takes that for a call of its forward.
    """

    parents = frozenset({"Global"})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class FlopCounter:
    """Counts what runs between `__enter__` and `__exit__`."""

    def __init__(self, *, is_backward: bool) -> None:
        """Prepare.

        Args:
            is_backward: what runs is a backward, and operations with gradients enabled belong to a second forward.
        """
        self._flops = FlopCounterMode(display=False, custom_mapping=dict(_CPU_ATTENTION))
        self._flops.mod_tracker = _Untracked()  # type: ignore[assignment]  # all that is asked of one
        self._operations = _Operations(self._flops, is_backward=is_backward)
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        # What is entered last sees each operation first.
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
        """Those of `flops` that were done before."""
        return self._operations.recomputed_flops

    @property
    def model_flops(self) -> int:
        """Those of `flops` that were not done before."""
        return self.flops - self.recomputed_flops

    @property
    def num_operations(self) -> int:
        """Operations that are no views."""
        return self._operations.number


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch ships it untyped
    """Counts operations that are no views, and watches what each adds to the count of a `FlopCounterMode`."""

    def __init__(self, flops: FlopCounterMode, *, is_backward: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch ships it untyped
        self.number = 0
        self.recomputed_flops = 0
        self._flops = flops
        self._is_backward = is_backward

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Count and run."""
        self.number += not getattr(func, "is_view", False)
        before = self._flops.get_total_flops()
        result = func(*args, **(kwargs or {}))
        if self._is_backward and (counted := int(self._flops.get_total_flops() - before)):
            if torch.is_grad_enabled():
                self.recomputed_flops += counted
            elif getattr(func, "name", str)().partition(".")[0] in _RECOMPUTING:
                self.recomputed_flops += counted // _PRODUCTS_OF_ATTENTION_BACKWARD
        return result
