"""Replacements for tensors that operations save for the backward.

Autograd passes every tensor to be saved to a *pack* function and keeps its return value
(`torch.autograd.graph.saved_tensors_hooks`). Here that is always an object with an `unpack` method, so that pack
functions compose and the graph refers to nothing but the kept data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

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
            raise modified_in_place(self.tensor)
        return self.tensor


class MovableStorage(Protocol):
    """A storage that may be elsewhere, or another one, when a backward reads from it."""

    def whole(self, dtype: torch.dtype) -> Tensor:
        """The whole storage as a vector."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class StoredView:
    """A tensor as a position in a storage. Sizes, strides and offset count elements."""

    storage: MovableStorage
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    is_conjugate: bool
    is_negative: bool
    """Flags of views that represent the complex conjugate, or the negative, of the stored data."""

    def unpack(self) -> Tensor:
        """The tensor currently at this position."""
        found = self.storage.whole(self.dtype).as_strided(self.size, self.stride, self.offset)
        found = found.conj() if self.is_conjugate else found
        return found.neg() if self.is_negative else found


def stored_view(tensor: Tensor, storage: MovableStorage) -> StoredView:
    """The position of `tensor` in its storage, for which `storage` stands."""
    offset = int(tensor.storage_offset())
    return StoredView(storage, tensor.dtype, tensor.size(), tensor.stride(), offset, tensor.is_conj(), tensor.is_neg())


def modified_in_place(tensor: Tensor) -> CallableError:
    """The error of a forward that has modified a saved tensor."""
    return CallableError(
        f"model: a tensor of shape {list(tensor.shape)} that the backward needs was modified in place "
        "after the forward had saved it; use an operation that is not in place, or a clone"
    )


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
    found = _current_hooks()
    if found is None:
        yield
        return
    pack, unpack = found
    with saved_tensors_hooks(_unwatched(pack), unpack):
        yield


def current_pack() -> Pack:
    """How tensors are packed now, outside of any inner block: by the innermost block, else kept."""
    found = _current_hooks()
    return keep if found is None else found[0]


def _current_hooks() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None:
    return torch._C._autograd._top_saved_tensors_default_hooks(True)  # noqa: SLF001, FBT003 - its only name


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
