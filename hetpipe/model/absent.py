"""A tensor that was computed on another stage and did not travel: it has a shape, a type, a device, and no elements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor

from hetpipe.errors import CallableError


class AbsentTensor(Tensor):
    """Answers what Python asks of a tensor without looking into it; to compute with it is an error."""

    origin: str

    def __new__(
        cls, name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device, *, requires_grad: bool
    ) -> Self:
        """The tensor that the entry `name` made elsewhere."""
        found: Self = Tensor._make_wrapper_subclass(  # noqa: SLF001 - its only name
            cls, tuple(shape), dtype=dtype, device=device, requires_grad=requires_grad
        )
        found.origin = name
        return found

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # noqa: SLF001

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Reject every operation except harmless ones, naming the value that is used behind the cut.

        Raises:
            CallableError: always.
        """
        name = next((value.origin for value in args if isinstance(value, AbsentTensor)), "a value")
        if func.overloadpacket in _HARMLESS:
            return args[0]
        raise CallableError(
            f"model: {name} is used here ({func.overloadpacket}), behind a cut before which it was made, but was not "
            "used in the minibatch on which the model was cut: it depends on the data which values are used where; "
            "let it train with `workers: {stages: 1}`"
        )

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        """For messages."""
        return f"AbsentTensor({self.origin}, {list(self.shape)}, {self.dtype})"


class AbsentParameter(AbsentTensor):
    """A parameter of another stage: what is computed with it depends on weights."""


#: What torch does with every tensor that passes through its own machinery.
_HARMLESS = frozenset({torch.ops.aten.detach, torch.ops.aten.alias})
