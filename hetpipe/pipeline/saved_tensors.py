"""What a graph keeps instead of the tensors that its operations save for the backward.

Autograd hands every tensor that is about to be saved to a *pack* function and keeps what that returns
(`torch.autograd.graph.saved_tensors_hooks`). Here that is always an object that can `unpack` itself, so that pack
functions may be put one into another and the graph refers to nothing but what it keeps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from hetpipe.errors import CallableError


class Packed(Protocol):
    """What stands for one saved tensor."""

    def unpack(self) -> Tensor:
        """The tensor, when the backward asks for it; possibly more than once."""
        ...


Pack = Callable[[Tensor], Packed]


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Kept:
    """A tensor kept as it is."""

    tensor: Tensor
    """Without its place in the graph, which would close a circle of references."""
    version: int
    """`version_of` it when it was saved; under hooks autograd leaves it to them to notice a change."""

    def unpack(self) -> Tensor:
        """The tensor.

        Raises:
            CallableError: somebody changed it in place after it was saved, so that the gradient would be wrong.
        """
        if version_of(self.tensor) != self.version:
            raise CallableError(
                f"model: a tensor of shape {list(self.tensor.shape)} that the backward needs was changed in place "
                "after the forward had saved it; use an operation that is not in place, or a clone"
            )
        return self.tensor


def keep(tensor: Tensor) -> Kept:
    """Keep `tensor` as autograd without hooks would."""
    return Kept(tensor.detach(), version_of(tensor))


def version_of(tensor: Tensor) -> int:
    """How often `tensor`, or something that shares its memory, was changed in place."""
    return tensor._version  # noqa: SLF001 - the only name for it; torch's allow_mutation_on_saved_tensors uses it, too


def storage_address(tensor: Tensor) -> int | None:
    """Where the storage of `tensor` begins, which tells live storages apart; None if there is nothing in it."""
    return tensor.untyped_storage().data_ptr() or None if tensor.layout is torch.strided else None


def saving_with(pack: Pack) -> saved_tensors_hooks:
    """In this block, what this thread's operations save is packed by `pack`; inner blocks replace outer ones."""
    return saved_tensors_hooks(pack, _unpack)


def refuses_hooks(error: BaseException) -> bool:
    """Whether `error` is torch's answer to code that does not run under such hooks, as `torch.func.grad`."""
    return isinstance(error, RuntimeError) and "saved tensor hooks" in str(error)


def _unpack(packed: Packed) -> Tensor:
    return packed.unpack()
