"""A forward on weights that are gone when its backward runs (`predict`, `spectrain`; `policies.md`).

The predicted weights Ŵ live for one forward. Wherever the backward reads a weight, it shall read the one that is
current by then (PipeOptim; `policies.md`): every tensor that an operation saves out of the storage of Ŵ is remembered
by where it lies, and unpacked as the same place of the storage that holds the current weights. That covers the weight
itself and whatever is a view of it: transposes, slices, parts of one fused matrix, two uses of one weight.

Everything else that is saved is an activation and stays what the forward on Ŵ made of it, also if it was computed from
weights alone: weight * mask, a conversion to another dtype (autocast), contiguous() of a transpose, weight
normalisation, and the block into which cuDNN copies the weights of a recurrent layer, so that on GPUs the backward of
`nn.LSTM` and its like reads Ŵ.

A layer cannot take part if it needs Ŵ later without telling autograd (a view of a weight kept as an attribute), if it
saves weights under hooks of its own (`save_on_cpu`; `torch.utils.checkpoint` is none of these, as it saves nothing), or
if it uses `torch.func.grad` and its like, which refuse to run under hooks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from hetpipe.errors import CallableError
from hetpipe.pipeline.saved_tensors import Packed, keep, refuses_hooks, saving_with, storage_address


class _Storage:
    """The bytes that saved places refer to: those of the current weights, as soon as a backward knows them."""

    def __init__(self) -> None:
        self._bytes: torch.UntypedStorage | None = None
        self._whole: dict[torch.dtype, Tensor] = {}

    def point_at(self, weight: Tensor) -> None:
        """From now on, the storage of `weight`."""
        self._bytes = weight.untyped_storage()
        self._whole.clear()

    def whole(self, dtype: torch.dtype) -> Tensor:
        """All of it as a vector."""
        found = self._whole.get(dtype)
        if found is None:
            assert self._bytes is not None, "a backward began without Remapping.read_from"
            found = self._whole[dtype] = torch.empty(0, dtype=dtype, device=self._bytes.device).set_(self._bytes)
        return found


@dataclass(frozen=True, slots=True, eq=False)
class _Place:
    """A weight or a part of one, as a place in a storage. Sizes, strides and the offset count elements."""

    storage: _Storage
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    is_conjugate: bool
    is_negative: bool
    """Views that stand for the complex conjugate, or for the negative, of what lies there."""

    def unpack(self) -> Tensor:
        """What lies there now."""
        found = self.storage.whole(self.dtype).as_strided(self.size, self.stride, self.offset)
        found = found.conj() if self.is_conjugate else found
        return found.neg() if self.is_negative else found


class Remapping:
    """The block in which one forward runs on weights that do not outlive it, and what its backward needs to know.

    After the block nothing refers to the storage of those weights any more: it may be overwritten or freed. The graph
    knows the leaves themselves, as the tensors whose gradients are wanted, so they are emptied (`leaf.data`, as
    `nn.Module.to` and FSDP do it) until `read_from` fills them with the current weights.

    Not to be entered twice, and used by one thread.
    """

    def __init__(self, leaves: Mapping[str, Tensor]) -> None:
        """Begin a forward on `leaves`: by parameter name, tensors that require gradients, all views of one buffer."""
        self._leaves = leaves
        first = next(iter(leaves.values()), None)
        self._address = None if first is None else storage_address(first)
        self._current = _Storage()
        self._hooks: saved_tensors_hooks | None = None

    def __enter__(self) -> Self:
        """Begin to pack."""
        self._hooks = saving_with(self.pack)
        self._hooks.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """End, and let go of the weights.

        Raises:
            CallableError: a layer did what torch refuses under hooks.
        """
        assert self._hooks is not None, "left before it was entered"
        self._hooks.__exit__()
        self._hooks = None
        for name, leaf in self._leaves.items():
            assert storage_address(leaf) == self._address, f"{name} does not lie in the buffer of the other weights"
            leaf.data = torch.empty(0, dtype=leaf.dtype, device=leaf.device)
        if error is not None and refuses_hooks(error):
            raise CallableError(
                "model: a layer uses torch.func.grad or its like, which cannot run on predicted weights; compute it "
                "with torch.autograd.grad, or choose weights that are not predicted, as stash"
            ) from error

    def pack(self, tensor: Tensor) -> Packed:
        """What the graph keeps instead of `tensor`."""
        if self._address is None or storage_address(tensor) != self._address:
            return keep(tensor)
        offset = int(tensor.storage_offset())
        view = (tensor.is_conj(), tensor.is_neg())
        return _Place(self._current, tensor.dtype, tensor.size(), tensor.stride(), offset, *view)

    def apart(self, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """`outputs`, of which none lies in the storage of the weights: what leaves the stage outlives them."""
        return tuple(
            output.clone() if self._address is not None and storage_address(output) == self._address else output
            for output in outputs
        )

    def read_from(self, weights: Mapping[str, Tensor]) -> None:
        """The backward that follows reads `weights`, which lie in one buffer of the same layout."""
        for name, leaf in self._leaves.items():
            leaf.data = weights[name].detach()
        if weights:
            self._current.point_at(next(iter(weights.values())))
