"""Placeholders for tensors computed on another stage and not transferred: shape, dtype and device, but no data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor

from hetpipe.errors import CallableError


class AbsentTensor(Tensor):
    """A tensor without data: supports metadata queries; computing with it is an error."""

    origin: str

    def __new__(
        cls, name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device, *, requires_grad: bool
    ) -> Self:
        """Create the placeholder of a tensor made by the entry `name` on another stage."""
        found: Self = Tensor._make_wrapper_subclass(  # noqa: SLF001 - its only name
            cls, tuple(shape), dtype=dtype, device=device, requires_grad=requires_grad
        )
        found.origin = name
        return found

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # noqa: SLF001

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Reject every operation except harmless ones; the error names the value used after the cut.

        Raises:
            CallableError: always.
        """
        name = next((value.origin for value in args if isinstance(value, AbsentTensor)), "a value")
        if func.overloadpacket in _HARMLESS:
            return args[0]
        raise CallableError(
            f"model: {name} is used here ({func.overloadpacket}), after a cut before which it was made, but was not "
            "used after it in the minibatch on which the model was cut: which values are used where depends on the "
            "data; train the model with `workers: {stages: 1}`"
        )

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        """Describe the placeholder in error messages."""
        return f"AbsentTensor({self.origin}, {list(self.shape)}, {self.dtype})"


class AbsentParameter(AbsentTensor):
    """A placeholder for a parameter of another stage; results computed from it depend on weights."""


#: Operations that torch applies to every tensor that passes through its own machinery.
_HARMLESS = frozenset({torch.ops.aten.detach, torch.ops.aten.alias})
