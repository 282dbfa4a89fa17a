"""Replacements for tensors that operations save for the backward.

Autograd passes every tensor to be saved to a *pack* function and keeps its return value
(`torch.autograd.graph.saved_tensors_hooks`). Here that is always an object with an `unpack` method, so that pack
functions compose and the graph refers to nothing but the kept data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from hetpipe.errors import CallableError


class Packed(Protocol):
    """A replacement for one saved tensor."""

    def unpack(self) -> Tensor:
        """Return the tensor to the backward; may be called more than once."""
        ...


Pack = Callable[[Tensor], Packed]

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Kept:
    """A tensor kept unchanged."""

    tensor: Tensor
    """The tensor, detached from the graph to avoid a reference cycle."""
    version: int
    """Its version (`version_of`) when it was saved; under hooks, autograd does not detect modifications itself."""

    def unpack(self) -> Tensor:
        """Return the tensor.

        Raises:
            CallableError: it was modified in place after it was saved, so that the gradient would be wrong.
        """
        if version_of(self.tensor) != self.version:
            raise CallableError(
                f"model: a tensor of shape {list(self.tensor.shape)} that the backward needs was modified in place "
                "after the forward had saved it; use an operation that is not in place, or a clone"
            )
        return self.tensor


def keep(tensor: Tensor) -> Kept:
    """Keep `tensor` as autograd does without hooks."""
    return Kept(tensor.detach(), version_of(tensor))


def version_of(tensor: Tensor) -> int:
    """Number of in-place modifications of `tensor` or of tensors that share its memory."""
    return tensor._version  # noqa: SLF001 - the only name for it; torch's allow_mutation_on_saved_tensors uses it, too


def storage_address(tensor: Tensor) -> int | None:
    """Address of the tensor's storage, unique among live storages; None for an empty one."""
    return tensor.untyped_storage().data_ptr() or None if tensor.layout is torch.strided else None


def saving_with(pack: Pack) -> saved_tensors_hooks:
    """Pack the tensors saved by operations of this thread with `pack` in this block; inner blocks take precedence."""
    return saved_tensors_hooks(_unwatched(pack), _unpack)


@contextmanager
def hooks_unwatched() -> Iterator[None]:
    """Run the current hooks of this thread without torch-function modes in this block.

    The hooks of `torch.utils.checkpoint` call functions, which the forward of a cut model would take for its own.
    """
    found = torch._C._autograd._top_saved_tensors_default_hooks(True)  # noqa: SLF001, FBT003 - its only name
    if found is None:
        yield
        return
    pack, unpack = found
    with saved_tensors_hooks(_unwatched(pack), unpack):
        yield


def _unwatched(pack: Callable[[Tensor], T]) -> Callable[[Tensor], T]:
    """`pack` without torch-function modes.

    A user's `torch.utils.checkpoint` saves its inputs in the middle of the user's code, whose calls a cut model counts.
    """

    def unwatched(tensor: Tensor) -> T:
        with torch._C.DisableTorchFunction():  # noqa: SLF001 - its only name
            return pack(tensor)

    return unwatched


def refuses_hooks(error: BaseException) -> bool:
    """Whether `error` is torch's error for code that does not run under such hooks, such as `torch.func.grad`."""
    return isinstance(error, RuntimeError) and "saved tensor hooks" in str(error)


def _unpack(packed: Packed) -> Tensor:
    return packed.unpack()
