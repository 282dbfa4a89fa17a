"""Detection of values whose size depends on the elements of others: indices of a mask, the tokens of one expert.

Which path a forward takes may depend on such a size (`if indices.numel() == 0: continue`) as on a number that it reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hetpipe.model.structure import tensors_in

#: Functions and properties that read a size.
READS_SIZE = frozenset({"__len__", "get nbytes", "get shape", "is_same_size", "nelement", "numel", "size"})

#: Functions that return as many tensors as the size of their argument says.
NUMBERED_BY_SIZE = frozenset({"chunk", "split", "tensor_split", "unbind"})

#: Functions whose result has the size of their first argument, whatever the sizes of the others.
_KEEPS_SIZE = (
    "index_add",
    "index_copy",
    "index_fill",
    "index_put",
    "index_reduce",
    "masked_",
    "scatter",
    "__setitem__",
)

_aten = torch.ops.aten

#: Operators of which one argument determines the size: its index.
_DETERMINED_BY = {_aten.index: 1, _aten.masked_select: 1}


def keeps_size(name: str, args: Sequence[Any], is_sized: Callable[[Tensor], bool]) -> bool:
    """Whether a function with an argument whose size depends on weights returns something of another, fixed size."""
    first = args[0] if args else None
    return isinstance(first, Tensor) and not is_sized(first) and name.startswith(_KEEPS_SIZE)


class SizeWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch ships it untyped
    """Notices operators whose result has a size that depends on elements which depend on weights."""

    def __init__(self, depends: Callable[[Tensor], bool]) -> None:
        """Create it; `depends` tells whether a tensor depends on weights."""
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self._depends = depends
        self._shared: set[int] = set()
        self.is_found = False

    @contextmanager
    def watching(self, arguments: Sequence[Tensor], *, is_shared: bool) -> Iterator[None]:
        """Watch one function call; afterwards `is_found` tells the result.

        Args:
            arguments: the tensors in its arguments.
            is_shared: none of them depends on weights.
        """
        self.is_found = False
        if is_shared:
            yield
            return
        self._shared = {id(tensor) for tensor in arguments if not self._depends(tensor)}
        with self:
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator."""
        has_size = func is _aten.one_hot.default and len(args) > 1 and args[1] >= 0
        has_size |= bool(kwargs) and kwargs.get("output_size") is not None
        if torch.Tag.dynamic_output_shape in func.tags and not has_size and not self.is_found:
            packet = func.overloadpacket
            deciding = args[_DETERMINED_BY[packet]] if packet in _DETERMINED_BY else args
            self.is_found = any(
                id(tensor) not in self._shared
                for tensor in tensors_in(deciding)
                if packet is not _aten.index or tensor.dtype in {torch.bool, torch.uint8}
            )
        return func(*args, **(kwargs or {}))
